"""Memory that the ranks share: collectives on it give the bits that they give on private memory, and it is freed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import soli.backend  # noqa: F401
from pool import Pool
from soli.mesh.collectives import Axis, all_gather, all_reduce, allocate, reduce_scatter
from soli.mesh.local.board import LANES
from sweep import swept
from test_local import OPS, ordered, values

CPU = torch.device("cpu")


def an_axis() -> Axis:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Axis("dp", size, rank, tuple(range(size)), dist.new_group(backend="local"), "local")


def writes_to_slots(board) -> list[int]:
    """How many bytes of each of this rank's slots are not zero."""
    return [int(board.slot(board.rank, lane, torch.uint8).count_nonzero()) for lane in range(LANES)]


SMALL, LARGE = (1, 7, 5000), (70_001, 300_001)


def reductions(private: tuple[int, ...], sizes: tuple[int, ...]):
    """Ranks in `private` have their tensors outside shared memory. The names of the calls that are wrong."""
    axis = an_axis()
    rank, size = axis.index, axis.size
    bad = []
    for dtype, n in itertools.product((torch.float32, torch.float64, torch.bfloat16), sizes):
        shared = allocate(n * size + 3, dtype, CPU, axis)
        mine = shared[3:] if rank not in private else torch.empty(n * size, dtype=dtype)
        parts = [values(n * size, dtype, r) for r in range(size)]
        for op, name in OPS.items():
            want = ordered(parts, name)
            mine.copy_(parts[rank])
            dist.all_reduce(mine, op, group=axis.group)
            if not torch.equal(mine, want):
                bad.append(("all_reduce", name, dtype, n))
            for inside in (True, False):
                mine.copy_(parts[rank])
                out = mine[rank * n : rank * n + n] if inside else torch.empty(n, dtype=dtype)
                dist.reduce_scatter_tensor(out, mine, op, group=axis.group)
                if not torch.equal(out, want[rank * n : rank * n + n]):
                    bad.append(("reduce_scatter", name, dtype, n, inside))
        for inside in (True, False):
            mine.copy_(parts[rank])
            whole = mine if inside else torch.empty_like(mine)
            dist.all_gather_into_tensor(whole, mine[rank * n : rank * n + n], group=axis.group)
            if not torch.equal(whole, torch.cat([parts[r][r * n : r * n + n] for r in range(size)])):
                bad.append(("all_gather", dtype, n, inside))
    return bad, writes_to_slots(axis.group.board) == [0] * LANES


@pytest.mark.parametrize("ranks", [2, 3, swept(4)])
def test_shared_tensors_give_the_same_bits_and_touch_no_slot(pool: Pool, ranks: int) -> None:
    assert pool.run(reductions, (), LARGE, ranks=ranks, deadline=60) == [([], True)] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_small_shared_tensors_give_the_same_bits(pool: Pool, ranks: int) -> None:
    assert [bad for bad, _ in pool.run(reductions, (), SMALL, ranks=ranks)] == [[]] * ranks


@pytest.mark.parametrize("private", [(0,), (1, 2)])
def test_some_ranks_with_private_tensors(pool: Pool, private: tuple[int, ...]) -> None:
    assert [bad for bad, _ in pool.run(reductions, private, LARGE, ranks=3, deadline=60)] == [[]] * 3


def written_at_once():
    """After its wait a collective's input may be overwritten: nobody still reads it."""
    axis = an_axis()
    shared = allocate(2_000_000, torch.float32, CPU, axis)
    part, bad = torch.empty(2_000_000 // axis.size), 0
    for step in range(20):
        shared.fill_(float(step))
        reduce_scatter(part, shared, axis)
        shared.fill_(-1e9)
        bad += int((part != step * axis.size).sum())
        all_reduce(shared, axis, "max")
        whole = torch.empty(2_000_000)
        own = shared[axis.index * part.numel() : (axis.index + 1) * part.numel()].fill_(float(step))
        all_gather(whole, own, axis)
        own.fill_(-1.0)
        bad += int((whole != step).sum())
    return bad


def test_inputs_may_be_overwritten_at_once(pool: Pool) -> None:
    assert pool.run(written_at_once, ranks=4) == [0] * 4


def mapped_bytes() -> int:
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:soli" in line:
            low, high = line.split()[0].split("-")
            total += int(high, 16) - int(low, 16)
    return total


def freed():
    axis = an_axis()
    before = mapped_bytes()
    for _ in range(3):
        memory = allocate(1_000_000, torch.float32, CPU, axis)
        part = memory[10:20]
        grown = mapped_bytes() - before
        all_reduce(memory.fill_(1.0), axis)
        del memory
        kept = mapped_bytes() - before
        del part
    return grown, kept, mapped_bytes() - before, dist.barrier(axis.group)


def test_memory_goes_with_its_last_view(pool: Pool) -> None:
    for grown, kept, left, _ in pool.run(freed, ranks=2):
        assert grown == kept == 2 * 4_001_792  # two ranks, whole pages
        assert left == 0
