"""What goes wrong on the local backend is named, on every rank and soon: real processes, real kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import soli.backend  # noqa: F401
from pool import Pool
from soli.core.errors import SoliError
from soli.mesh.local.board import DIFFERENT, _error
from soli.mesh.local.messages import Message
from test_launch import Job


def caught(call, *args, **options) -> tuple[str, float]:
    began = time.monotonic()
    try:
        call(*args, **options)
    except (SoliError, RuntimeError) as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def mismatch(kind: str):
    group = dist.new_group(backend="local")
    rank = dist.get_rank()
    caught(dist.barrier, group)  # who is slow may hear of it here
    tensor = torch.zeros(
        4 + (rank == 2 and kind == "size"), dtype=torch.float64 if rank == 2 and kind == "type" else None
    )
    if rank == 2 and kind == "operation":
        found = caught(lambda: (dist.broadcast(tensor, 0, group=group), dist.barrier(group)))
    else:
        op = dist.ReduceOp.MAX if rank == 2 and kind == "reduction" else dist.ReduceOp.SUM
        found = caught(dist.all_reduce, tensor, op, group=group)
    return found, caught(dist.barrier, group)[0]


@pytest.mark.parametrize("kind", ["operation", "size", "type", "reduction"])
def test_different_calls_are_named_on_every_rank(pool: Pool, kind: str) -> None:
    words = {"operation": "broadcast(root 0)", "size": "[5]", "type": "float64", "reduction": "all_reduce(max)"}
    for (text, seconds), after in pool.run(mismatch, kind, ranks=3):
        assert "called different collectives" in text
        assert words[kind] in text
        assert "rank 2: " in text
        assert "all_reduce(sum) of float32[4] at " in text
        assert "test_local_faults.py:" in text
        assert seconds < 2
        assert "called different collectives" in after  # nothing of the group is trusted any more


def misrooted(kind: str):
    """Roots that look at nobody: the next collective, in which somebody looks, says it."""
    group = dist.new_group(backend="local")
    rank, tensor = dist.get_rank(), torch.zeros(4)
    dist.barrier(group)
    if kind == "broadcast":
        first = caught(dist.broadcast, tensor, rank, group=group)
    else:
        first = caught(dist.reduce, tensor, 1 - rank, group=group)
    return first, caught(dist.all_reduce, tensor, group=group)[0]


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_roots_that_differ_are_named_by_the_next_collective(pool: Pool, kind: str) -> None:
    for (first, _), then in pool.run(misrooted, kind, ranks=2):
        said = first or then
        assert "called different collectives" in said
        assert all(f"{kind}" in line for line in said.splitlines() if line.startswith("rank "))


INTERRUPTED = """
import signal, sys
import torch, torch.distributed as dist
import soli.backend

def tell(*_):
    raise KeyboardInterrupt

dist.init_process_group("local")
rank = dist.get_rank()
signal.signal(signal.SIGALRM, tell)
for number in range(60):
    tensor = torch.full((1 << 24,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.0005 * number)
    try:
        work.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        try:
            work.wait()
        except RuntimeError as error:
            print("said", error)
            sys.exit(3)
    if not (tensor == 3).all():
        print("a wrong sum is done")
        sys.exit(4)
"""


def test_a_collective_that_was_interrupted_is_not_done(tmp_path: Path) -> None:
    """Whoever waits for it again hears of it: it is not the sum."""
    job = Job(tmp_path, INTERRUPTED, 2, "--backend", "local", "--all-ranks")
    assert "a wrong sum" not in job.out
    assert job.code in (0, 3), job.err  # 0: no alarm came amid a collective
    assert job.code == 0 or "interrupted by KeyboardInterrupt" in job.out


def test_messages_of_one_tag_that_wait_are_told_apart() -> None:
    """Of other sizes, where one came in part: equal bytes make no two messages one."""
    waiting = [Message(0, torch.zeros(3, dtype=torch.uint8), 1), Message(0, torch.zeros(5, dtype=torch.uint8), 1)]
    again = Message(0, torch.zeros(3, dtype=torch.uint8), 1)
    assert waiting[1] in waiting
    assert again not in waiting


def in_a_part_of_the_job():
    """Rank 2 sends rank 1 a message of another size, and does not come to what it does then."""
    groups = [dist.new_group([1, 2], timedelta(seconds=2), backend="local") for _ in range(2)]
    rank = dist.get_rank()
    if rank == 0:
        return "", ""
    if rank == 2:
        dist.send(torch.zeros(4), 1, group=groups[1])
        return "", caught(dist.barrier, groups[1])[0]
    odd = caught(dist.recv, torch.zeros(5), 2, group=groups[1])[0]
    return caught(dist.all_reduce, torch.zeros(1), group=groups[0])[0], odd


def test_ranks_are_named_as_the_job_has_them(pool: Pool) -> None:
    _, (late, odd), (_, other) = pool.run(in_a_part_of_the_job, ranks=3)
    assert "rank 2 did not arrive in 2 s in group" in late
    assert "(ranks 1-2)" in late
    assert "rank 1: #0 all_reduce" in late
    assert all("a message from rank 2 to rank 1 (tag 0) in group" in said for said in (odd, other))


def test_another_hosts_words_are_told_once() -> None:
    first = _error(f"the ranks of group 1 {DIFFERENT}\n  rank 0: a\n  rank 1: b")
    assert (again := str(_error(str(first)))) == str(first)
    assert (again.count("  got "), again.count("  seen ")) == (1, 1)


def wrong_tensors():
    group = dist.new_group(backend="local")
    rank = dist.get_rank()
    cuda = caught(dist.all_reduce, torch.empty(2, device="meta"), group=group)[0]
    out, sent = torch.zeros(3), torch.zeros(4)
    splits = caught(dist.all_to_all_single, out, sent, [1, 2], [2, 2], group=group)[0]
    return cuda, splits, rank


def test_tensors_that_cannot_be_moved(pool: Pool) -> None:
    for meta, splits, _ in pool.run(wrong_tensors, ranks=2):
        assert "moves dense CPU tensors" in meta
        assert "splits of all_to_all" in splits
        assert "which sends 8" in splits


def message_of_another_size():
    group = dist.new_group(backend="local")
    if dist.get_rank() == 0:
        dist.send(torch.zeros(4), 1, group=group)
        return caught(dist.barrier, group)[0]
    return caught(dist.recv, torch.zeros(5), 0, group=group)[0]


def test_a_message_that_does_not_fit(pool: Pool) -> None:
    for text in pool.run(message_of_another_size, ranks=2):
        assert "sent 16 bytes, received as 20 bytes" in text


def with_another_torch():
    """Rank 1 says that it runs another version."""
    from soli.mesh.local import identity

    real = identity.mine
    if dist.get_rank() == 1:
        identity.mine = lambda: identity.Identity(**{**vars(real()), "torch": "1.0"})
    try:
        return caught(dist.new_group, backend="local")
    finally:
        identity.mine = real


def test_ranks_with_different_versions(pool: Pool) -> None:
    for text, seconds in pool.run(with_another_torch, ranks=3):
        assert "the ranks have different versions of torch" in text
        assert f"rank 0: {torch.__version__.split('+')[0]}; rank 1: 1.0" in text
        assert seconds < 2


def joining_late():
    if dist.get_rank() == 1:
        time.sleep(3)
    return caught(dist.new_group, backend="local", timeout=timedelta(seconds=1))


def test_a_rank_that_joins_late(pool: Pool) -> None:
    found = pool.run(joining_late, ranks=3)
    for rank in (0, 2):
        assert "rank 1 of the group did not come in 1 s" in found[rank][0]
        assert found[rank][1] < 3


def in_a_folder(folder: str, limit: int):
    """A group whose memory is a file; rank 0 may write files of `limit` bytes at most."""
    import resource

    os.environ["SOLI_LOCAL_FOLDER"] = folder
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0 and limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        group: list = []
        said = caught(lambda: group.append(dist.new_group(backend="local")))
        total = torch.ones(3)
        if not said[0]:
            dist.all_reduce(total, group=group[0])
        return said, total.tolist(), os.listdir(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        del os.environ["SOLI_LOCAL_FOLDER"]


def test_files_in_a_folder_leave_nothing(pool: Pool, tmp_path: Path) -> None:
    for said, total, left in pool.run(in_a_folder, str(tmp_path), 0, ranks=3):
        assert (said[0], total, left) == ("", [3.0] * 3, [])


def test_a_folder_without_room_is_named_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for said, _, left in pool.run(in_a_folder, str(tmp_path), 1 << 20, ranks=3):
        assert "SOLI_LOCAL_FOLDER has no room" in said[0]
        assert str(tmp_path) in said[0]
        assert "bytes free" in said[0]
        assert said[1] < 2
        assert left == []


def too_much():
    """Rank 1 allocates another size; then all allocate more than there is."""
    group = dist.new_group(backend="local")
    unequal = caught(group.allocate, 1 << 20 if dist.get_rank() == 1 else 1 << 12)
    other = dist.new_group(backend="local")
    return unequal, caught(other.allocate, 1 << 50)


def test_memory_that_cannot_be_shared(pool: Pool) -> None:
    for rank, (unequal, huge) in enumerate(pool.run(too_much, ranks=3)):
        assert "shared memory of different sizes" in unequal[0], rank
        assert "this machine has no room" in huge[0], rank
        assert max(unequal[1], huge[1]) < 2


SCRIPT = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
import soli.backend
kind, rank, store = sys.argv[1], int(sys.argv[2]), dist.FileStore(sys.argv[3], 3)
dist.init_process_group("local", rank=rank, world_size=3, store=store, timeout=datetime.timedelta(seconds=4))
x = torch.ones(2_000_000)
for step in range(1_000_000):
    if step == 20 and rank == 1:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "late":
            time.sleep(60)
    if step == 20 and rank == 0:
        print(time.time(), flush=True)
    try:
        dist.all_reduce(x)  # here
    finally:
        if sys.exc_info()[0]:
            print(time.time(), flush=True)
"""


@pytest.mark.parametrize("kind", ["killed", "late"])
def test_a_rank_that_does_not_arrive(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    before = set(os.listdir("/dev/shm"))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), kind, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            out, err = ranks[rank].communicate(timeout=60)
            line = next(i for i, text in enumerate(SCRIPT.splitlines(), 1) if "# here" in text)
            assert "rank 1" in err
            assert ("is gone" if kind == "killed" else "did not arrive in 4 s") in err
            assert f"script.py:{line}" in err
            if rank == 0:
                began, ended = map(float, out.split())
                assert ended - began < (2.0 if kind == "killed" else 6.0)
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert set(os.listdir("/dev/shm")) == before


def many_groups(count: int):
    """Groups that come and go, each of them waited in; what this process keeps of them."""
    kept = []
    for _ in range(count):
        group = dist.new_group(backend="local")
        if dist.get_rank() == 0:
            time.sleep(0.15)  # the others look whether this rank lives
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        maps = Path("/proc/self/maps").read_text().count("memfd:soli")
        kept.append((len(os.listdir("/proc/self/fd")), maps))
    return kept


def test_groups_leave_nothing_open(pool: Pool) -> None:
    for kept in pool.run(many_groups, 5, ranks=3):
        assert kept[-1] <= kept[0]
