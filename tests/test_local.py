"""The local backend against gloo: the same calls, bitwise for movement; its sums against the order it promises."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import soli.backend  # noqa: F401
from pool import Pool
from soli.mesh.local.board import LANE_BYTES
from sweep import spread, swept

DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int32,
)  # that gloo moves
SIZES = (0, 1, 7, 5000, LANE_BYTES // 4 + 3)


def values(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(n, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (n,), generator=generator).to(dtype)


def groups():
    ours, gloo = dist.new_group(backend="local"), dist.new_group(backend="gloo")
    dist.barrier(gloo)  # a rank that ends while another still connects would close its connections
    return ours, gloo


def movement():
    """Every call that moves data, on both backends; the names of those that differ."""
    ours, gloo = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    bad = []
    for dtype, n in itertools.product(DTYPES, SIZES):
        mine = values(n, dtype, rank)
        whole = values(n * size, dtype, 9 + rank)
        for name in MOVES:
            a, b = (MOVES[name](group, mine.clone(), whole.clone(), rank, size) for group in (ours, gloo))
            if len(a) != len(b) or not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
                bad.append((name, dtype, n))
    return bad


def parts(whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [p.clone() for p in whole.view(size, -1).unbind(0)]


def broadcast(group, mine, whole, rank, size):
    dist.broadcast(mine, size - 1, group=group)
    return [mine]


def all_gather(group, mine, whole, rank, size):
    outs = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(outs, mine, group=group)
    return outs


def gather(group, mine, whole, rank, size):
    outs = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, outs, dst=0, group=group)
    return outs or []


def scatter(group, mine, whole, rank, size):
    out = torch.empty_like(mine)
    dist.scatter(out, parts(whole, size) if rank == 1 else None, src=1, group=group)
    return [out]


def all_to_all(group, mine, whole, rank, size):
    n = mine.numel()
    sizes = [(n + s) // 2 for s in range(size)]  # rank r gets (n + r) / 2 of everyone
    out = torch.empty(size * ((n + rank) // 2), dtype=mine.dtype)
    sent = torch.cat([whole, whole])[: sum(sizes)].contiguous() if n else values(sum(sizes), mine.dtype, rank)
    dist.all_to_all_single(out, sent, [(n + rank) // 2] * size, sizes, group=group)
    return [out]


def ring(group, mine, whole, rank, size):
    out = torch.empty_like(mine)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % size, group=group),
            dist.P2POp(dist.irecv, out, (rank - 1) % size, group=group),
        ]
    )
    for work in works:
        work.wait()
    return [out]


def tags(group, mine, whole, rank, size):
    """Received in another order than sent."""
    if rank == 0:
        works = [dist.isend(mine + 1 if mine.dtype != torch.bool else mine, 1, group=group, tag=t) for t in (3, 5)]
        works[0].wait()
        works[1].wait()
        return []
    if rank == 1:
        a, b = torch.empty_like(mine), torch.empty_like(mine)
        dist.recv(b, 0, group=group, tag=5)
        dist.recv(a, 0, group=group, tag=3)
        return [a, b]
    return []


def objects(group, mine, whole, rank, size):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank}, group=group)
    return [torch.tensor([f["rank"] + len(f["text"]) for f in found])]


MOVES = {f.__name__: f for f in (broadcast, all_gather, gather, scatter, all_to_all, ring, tags, objects)}


@pytest.mark.parametrize("ranks", [2, 3, swept(4)])
def test_movement_equals_gloo_bitwise(pool: Pool, ranks: int) -> None:
    assert pool.run(movement, ranks=ranks, deadline=60) == [[]] * ranks


def strided(dtype: torch.dtype):
    """A column of a matrix; gloo fills other elements than it was given, without a word."""
    ours, _ = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    grid = torch.zeros(5, 2, dtype=dtype)
    grid[:, 1] = values(5, dtype, rank)
    dist.broadcast(grid[:, 1], 0, group=ours)
    dist.all_reduce(grid[:, 1], dist.ReduceOp.MAX, group=ours)
    outs = [torch.zeros(5, 3, dtype=dtype)[:, 2] for _ in range(size)]
    dist.all_gather(outs, grid[:, 1], group=ours)
    want = torch.stack([torch.zeros(5, dtype=dtype), values(5, dtype, 0)], 1)
    return torch.equal(grid, want) and all(torch.equal(out, want[:, 1]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_strided_tensors(pool: Pool, dtype: torch.dtype) -> None:
    assert all(pool.run(strided, dtype, ranks=3))


def sums():
    """Reductions: in the order of the ranks, the same for every size and on every rank, twice."""
    ours, _ = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    bad = []
    for dtype, n in itertools.product(DTYPES, SIZES):
        if dtype == torch.bool:
            continue
        all_parts = [values(n * size, dtype, r) for r in range(size)]
        for op, name in (OPS if dtype.is_floating_point else OPS | BITS).items():
            expected = ordered(all_parts, name)
            for turn in range(2):
                mine = all_parts[rank].clone()
                dist.all_reduce(mine, op, group=ours)
                part = torch.empty(n, dtype=dtype)
                dist.reduce_scatter_tensor(part, all_parts[rank].clone(), op, group=ours)
                root = all_parts[rank].clone()
                dist.reduce(root, 0, op, group=ours)
                whole = expected if rank == 0 else all_parts[rank]
                for call, got, want in (
                    ("all_reduce", mine, expected),
                    ("reduce_scatter", part, expected.view(size, n)[rank]),
                    ("reduce", root, whole),
                ):
                    if not torch.equal(got, want):
                        bad.append((call, name, dtype, n, turn))
    return bad


OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min", dist.ReduceOp.PRODUCT: "product"}


BITS = {dist.ReduceOp.BAND: "band", dist.ReduceOp.BOR: "bor", dist.ReduceOp.BXOR: "bxor"}
STEPS = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def ordered(all_parts: list[torch.Tensor], name: str) -> torch.Tensor:
    step = STEPS[name]
    wide = all_parts[0].dtype in (torch.bfloat16, torch.float16) and name in ("sum", "product")
    total = all_parts[0].float() if wide else all_parts[0].clone()
    for part in all_parts[1:]:
        total = step(total, part.float() if wide else part)
    return total.to(all_parts[0].dtype)


@pytest.mark.parametrize("ranks", [2, 3, swept(4)])
def test_sums_have_one_order(pool: Pool, ranks: int) -> None:
    assert pool.run(sums, ranks=ranks, deadline=60) == [[]] * ranks


def others():
    """What gloo's sums do not have, or c10d rewrites: averages, booleans, complex numbers, lists, coalescing."""
    ours, _ = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [values(1000, torch.float32, r) for r in range(size)]
    mean = parts[rank].clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=ours)
    flags = [values(100, torch.bool, r) for r in range(size)]
    all_true = flags[rank].clone()
    dist.all_reduce(all_true, dist.ReduceOp.MIN, group=ours)
    numbers = [torch.complex(part, -part) for part in parts]
    summed = numbers[rank].clone()
    dist.all_reduce(summed, group=ours)
    seen = [torch.empty_like(summed) for _ in range(size)]
    dist.all_gather(seen, numbers[rank], group=ours)
    listed = torch.empty(1000 // size)
    dist.reduce_scatter(listed, list(parts[rank][: 1000 // size * size].chunk(size)), group=ours)
    with dist._coalescing_manager(group=ours, async_ops=True) as manager:
        many = [parts[rank][10 * i : 10 * i + 10].clone() for i in range(4)]
        for tensor in many:
            dist.all_reduce(tensor, group=ours)
    manager.wait()
    want = ordered(parts, "sum")
    n = 1000 // size
    return (
        torch.equal(mean, want / size),
        torch.equal(all_true, torch.stack(flags).all(0)),
        torch.equal(summed, torch.complex(want, -want)),
        all(torch.equal(a, b) for a, b in zip(seen, numbers, strict=True)),
        torch.equal(listed, want[rank * n : rank * n + n]),
        torch.equal(torch.cat(many), want[:40]),
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_calls(pool: Pool, ranks: int) -> None:
    assert pool.run(others, ranks=ranks) == [(True,) * 6] * ranks


def overlapping():
    """Several groups at once, asynchronous, waited for in another order than issued."""
    ours, _ = groups()
    size = dist.get_world_size()
    pairs = [dist.new_group([a, b], backend="local") for a, b in itertools.combinations(range(size), 2)]
    mine = [g for g in pairs if g is not dist.GroupMember.NON_GROUP_MEMBER]
    tensors = [torch.full((10_000,), float(dist.get_rank())) for _ in mine]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, mine, strict=True)]
    big = torch.ones(3_000_000)
    last = dist.all_reduce(big, group=ours, async_op=True)
    future = last.get_future()
    for work in reversed(works):
        work.wait()
    future.wait()
    return [float(t[0]) for t in tensors], [float(t[-1]) for t in tensors], float(big.min()), float(big.max())


def test_groups_overlap(pool: Pool) -> None:
    for rank, (first, last, low, high) in enumerate(pool.run(overlapping, ranks=4)):
        assert first == last == [float(rank + other) for other in range(4) if other != rank]
        assert low == high == 4.0


def engines():
    """DDP, FSDP2 and DTensor on the backend equal the plain model in float64."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    ours, _ = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double())[1]
    x = torch.randn(4 * size, 8, generator=torch.Generator().manual_seed(1)).double()
    plain = make()
    plain(x).square().mean().backward()
    want = [p.grad for p in plain.parameters()]
    ddp = nn.parallel.DistributedDataParallel(make(), process_group=ours)
    ddp(x[4 * rank : 4 * rank + 4]).square().mean().backward()
    errors = [float((p.grad - w).abs().max()) for p, w in zip(ddp.parameters(), want, strict=True)]
    mesh = DeviceMesh.from_group(ours, "cpu", mesh_dim_names=("shard",))
    sharded = make()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(x[4 * rank : 4 * rank + 4]).square().mean().backward()
    for p, w in zip(sharded.parameters(), want, strict=True):
        errors.append(float((p.grad.full_tensor() - w).abs().max()))
    cut = distribute_tensor(x, mesh, [Shard(0)])
    errors.append(float((cut.full_tensor() - x).abs().max()))
    return max(errors)


@pytest.mark.parametrize("ranks", [2, swept(4)])
def test_torch_engines_run_on_it(pool: Pool, ranks: int) -> None:
    assert all(error <= 1e-15 for error in pool.run(engines, ranks=ranks))


PIPELINES = {
    "ScheduleGPipe": (1, "loop"),
    "Schedule1F1B": (1, "loop"),
    "ScheduleInterleaved1F1B": (2, "loop"),
    "ScheduleInterleavedZeroBubble": (2, "loop"),
    "ScheduleZBVZeroBubble": (2, "v"),
    "ScheduleDualPipeV": (2, "v"),
}
"""Every schedule of torch.distributed.pipelining: stages of a rank, and which (rank + iN, or a V)."""


def pipelined(name: str):
    """The largest relative difference of a weight's gradient from the plain model's, over this rank's stages."""
    from torch.distributed.pipelining import PipelineStage, schedules

    ours, _ = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    each, kind = PIPELINES[name]
    stages = each * size
    numbers = [rank, stages - 1 - rank] if kind == "v" else [rank + size * i for i in range(each)]
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64).double() for _ in range(stages)]
    x = torch.randn(2 * stages, 64).double()
    made = [PipelineStage(layers[n], n, stages, torch.device("cpu"), group=ours) for n in numbers]
    loss = lambda y, t: (y - t).square().sum()
    schedule = getattr(schedules, name)(made[0] if each == 1 else made, 2 * stages, loss_fn=loss, scale_grads=False)
    target = {"target": torch.zeros_like(x)} if stages - 1 in numbers else {}
    for _ in range(2):  # the second step must not trip over the first
        for layer in layers:
            layer.zero_grad()
        schedule.step(*([x] if 0 in numbers else []), **target)
    got = [layers[n].weight.grad.clone() for n in numbers]
    for layer in layers:
        layer.zero_grad()
    y = x
    for layer in layers:
        y = layer(y)
    y.square().sum().backward()
    wants = [layers[n].weight.grad for n in numbers]
    return max(float((g - w).abs().max() / w.abs().max()) for g, w in zip(got, wants, strict=True))


@pytest.mark.parametrize(("name", "ranks"), spread([(name,) for name in PIPELINES], [(3,), (2,)]))
def test_pipelines_run_on_it(pool: Pool, name: str, ranks: int) -> None:
    assert all(error <= 1e-12 for error in pool.run(pipelined, name, ranks=ranks))
