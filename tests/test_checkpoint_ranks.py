"""Checkpoints between real gloo ranks: other worlds, other layouts, one rank's error, background saving.

Run as a program, this file is one rank: `python test_checkpoint_ranks.py JOB RANK WORLD FOLDER`.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from soli.checkpoint import load, read_manifest, save, save_async
from soli.checkpoint.tool import check
from soli.core.errors import SoliError
from soli.core.layout import Box, Sharded, even_parts, from_flat, from_whole
from sweep import swept

STATE = {"step": 7, "plan": "dp=2,zero=3", "lr": 0.1, "betas": [0.9, 0.999], "nested": {"none": None, "yes": True}}


def globals_() -> dict[str, Tensor]:
    """The tensors of the run, the same on every rank."""
    rng = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=rng)
    special = draw(6, 5)
    special[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    return {
        "model.embed": draw(11, 7),
        "model.half": draw(5, 3, 4).bfloat16(),
        "model.special": special,
        "model.double": draw(13).double(),
        "optimizer.embed.step": torch.tensor(41.0),
        "optimizer.embed.exp_avg": draw(11, 7),
        "rng.cpu": torch.randint(0, 256, (97,), generator=rng, dtype=torch.uint8),
        "model.mask": torch.rand(4, 4, generator=rng) > 0.5,
        "model.empty": torch.zeros(0, 4),
    }


def flat(tensor: Tensor, rank: int, world: int, fill: bool) -> Sharded:
    """This rank's even flat range of a tensor; memory that must be overwritten if not `fill`."""
    start, stop = even_parts(tensor.numel(), world)[rank]
    part = tensor.reshape(-1)[start:stop].clone()
    return from_flat(part if fill else poison(part), tuple(tensor.shape), start)


def poison(tensor: Tensor) -> Tensor:
    out = torch.empty_like(tensor)
    out.view(-1).view(torch.uint8).fill_(0x5A if tensor.dtype != torch.bool else 1)
    return out


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def pieces_hold(sharded: Sharded, tensor: Tensor) -> bool:
    places = [tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True)) for b, _ in sharded.pieces]
    return all(same(p, tensor[at]) for (_, p), at in zip(sharded.pieces, places, strict=True))


def mixed(rank: int, world: int, fill: bool) -> dict[str, Sharded]:
    """Flat ranges, a scalar that all ranks hold, and two tensors that only one rank knows."""
    out = {}
    for name, tensor in globals_().items():
        if tensor.dim() == 0 or name == "model.empty":
            out[name] = from_whole(tensor.clone() if fill else poison(tensor))
        elif name == "rng.cpu":
            held = rank == world - 1
            out[name] = from_whole(tensor.clone() if fill else poison(tensor))
            out[name].pieces = out[name].pieces if held else []
        elif name == "model.double":
            if rank == 0:  # a pipeline stage: the other ranks do not even name it
                out[name] = from_whole(tensor.clone() if fill else poison(tensor))
        else:
            out[name] = flat(tensor, rank, world, fill)
    return out


def error_of(call: Callable[[], object]) -> SoliError:
    try:
        call()
    except SoliError as error:
        return error
    raise AssertionError("no SoliError was raised")


def only_these(folder: Path, *names: str) -> bool:
    dist.barrier()
    return {entry.name for entry in folder.iterdir()} == set(names)


def job_save(rank: int, world: int, folder: Path) -> None:
    """Save synchronously and in the background; then every way in which one rank alone can fail."""
    tensors = mixed(rank, world, fill=True)
    save(folder / "sync", tensors, STATE)
    own = dist.new_group(backend="gloo")
    pending = save_async(folder / "async", tensors, STATE, group=own)
    for sharded in tensors.values():
        for _, piece in sharded.pieces:
            piece.zero_()  # training goes on: what was staged must not change
    total = torch.ones(1000)
    for _ in range(30):
        dist.all_reduce(total)
        total /= world
    pending.wait()
    assert pending.done()
    assert torch.equal(total, torch.ones(1000))
    first = folder / "inner"
    if rank == 0:
        first.mkdir()
    dist.barrier()
    _failures(rank, world, first, own)


def _failures(rank: int, world: int, folder: Path, own: dist.ProcessGroup) -> None:
    good = mixed(rank, world, fill=True)
    error = error_of(lambda: save_async(folder / "x", good, STATE))
    assert "process group of its own" in str(error)
    bad = dict(good)
    if rank == 1:
        bad["model.embed"] = Sharded((11, 7), torch.float64, good["model.embed"].pieces)
    error = error_of(lambda: save(folder / "x", bad, STATE))
    assert "rank 1: model.embed" in str(error), error
    assert error.everywhere
    assert error.exit_code == 2
    error = error_of(lambda: save(folder / "x", good, STATE if rank == 0 else {"a": {"b": torch.ones(1)}}))
    assert "state['a']['b']" in str(error), error
    bad = dict(good)
    if rank == 1:
        bad["model.embed"] = Sharded((11, 8), torch.float32, [])
    assert "ranks disagree" in str(error_of(lambda: save(folder / "x", bad, STATE)))
    bad = dict(good) | {"model.embed": flat(globals_()["model.embed"], 0, world, True)}
    assert "do not cover" in str(error_of(lambda: save(folder / "x", bad, STATE)))
    box = Box((0, 0), (11 - rank, 7))  # equal offsets, other sizes: DCP alone would drop one of them
    bad = dict(good) | {"model.embed": Sharded((11, 7), torch.float32, [(box, torch.zeros(box.sizes))])}
    assert "two boxes overlap" in str(error_of(lambda: save(folder / "x", bad, STATE)))
    assert only_these(folder)
    big = {"model.big": flat(torch.arange(40_000.0), rank, world, True)}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    if rank == 1:  # this rank's disk refuses more than 20 kB a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    errors = [error_of(lambda: save(folder / "x", big, STATE))]
    errors.append(error_of(lambda: save_async(folder / "x", big, STATE, group=own).wait()))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for error in errors:
        assert "rank 1: " in str(error), error
        assert "File too large" in str(error), error
        assert error.exit_code == 2
    assert only_these(folder)
    save(folder / "x", big, STATE)
    error = error_of(lambda: save(folder / "x", big, STATE))
    assert "exists" in str(error)
    assert error.exit_code == 2
    save(folder / "x", big, STATE | {"step": 8}, overwrite=True)
    assert only_these(folder, "x")
    assert read_manifest(folder / "x").state["step"] == 8


def job_load(rank: int, world: int, folder: Path) -> None:
    """Load in another world, by flat ranges and by rows; then damage and missing keys on all ranks."""
    for source in ("sync", "async"):
        wanted = mixed(rank, world, fill=False)
        assert load(folder / source, wanted) == STATE
        for name, sharded in wanted.items():
            assert pieces_hold(sharded, globals_()[name]), (source, name)
    columns = {}
    for name, tensor in globals_().items():
        if tensor.dim() == 2 and tensor.numel():
            start, stop = even_parts(tensor.shape[1], world)[rank]
            live = poison(tensor)  # a strided view of live memory
            columns[name] = Sharded(
                tuple(tensor.shape), tensor.dtype, [(Box((0, start), (len(tensor), stop - start)), live[:, start:stop])]
            )
    load(folder / "sync", columns, ignore=lambda name: name not in columns)
    assert all(pieces_hold(sharded, globals_()[name]) for name, sharded in columns.items())
    error = error_of(lambda: load(folder / "sync", columns))
    assert sum("nobody asks for it" in str(p) for p in error.problems) == len(globals_()) - len(columns)
    extra = mixed(rank, world, fill=False)
    if rank == 2:
        extra["model.more"] = from_whole(torch.zeros(2))
    assert "model.more is missing" in str(error_of(lambda: load(folder / "sync", extra)))
    damaged = folder / "damaged"
    if rank == 0:
        shutil.copytree(folder / "sync", damaged)
        file = damaged / "rank-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    error = error_of(lambda: load(damaged, mixed(rank, world, fill=False)))
    assert "rank-00001.safetensors is damaged" in str(error), error
    assert error.everywhere


def run_ranks(job: str, world: int, folder: Path, store: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, job]
    tail = [str(world), str(folder), str(store)]
    ranks = [
        subprocess.Popen([*command, str(r), *tail], env=env, stderr=subprocess.PIPE, text=True) for r in range(world)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)


def test_two_ranks_save_and_one_and_three_load(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    run_ranks("save", 2, folder, tmp_path / "store2")
    for name in ("sync", "async"):
        assert check(folder / name) == []
        wanted = mixed(0, 1, fill=False)
        assert load(folder / name, wanted) == STATE
        for key, sharded in wanted.items():
            assert pieces_hold(sharded, globals_()[key]), (name, key)
    one, other = read_manifest(folder / "sync"), read_manifest(folder / "async")
    assert one.tensors == other.tensors, "the same chunks in files of the same checksums"
    assert one.files == other.files
    stored = sum(chunk.box.numel for saved in one.tensors.values() for chunk in saved.chunks)
    assert stored == sum(tensor.numel() for tensor in globals_().values()), "what several ranks hold is stored once"
    assert len(one.tensors["optimizer.embed.step"].chunks) == 1
    run_ranks("load", 3, folder, tmp_path / "store3")


UNWAITED = """
import sys, torch, soli
from pathlib import Path
folder = Path(sys.argv[1])
sgd = lambda p: torch.optim.SGD(p, lr=0.1)
engine = soli.parallelize(torch.nn.Linear(4, 2), soli.losses.mse(), optimizer=sgd, plan=f"dp={sys.argv[2]}")
engine.step((torch.ones(4, 4), torch.ones(4, 2)))
folder.touch()  # and no folder can be made of it
engine.save(folder / "one", wait=False)
"""


@pytest.mark.parametrize("ranks", [swept(1), 2])
def test_a_background_save_that_failed_fails_a_program_that_ends(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNWAITED)
    command = [sys.executable, "-m", "soli", "run", "-n", str(ranks), str(script), str(tmp_path / "there"), str(ranks)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("refused making the checkpoint's folder") == 1, ended.stderr


if __name__ == "__main__":
    job, rank, world, folder, store = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(world)),
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
    {"save": job_save, "load": job_load}[job](int(rank), int(world), Path(folder))
    dist.barrier()
    dist.destroy_process_group()
