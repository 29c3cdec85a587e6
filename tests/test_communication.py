"""The record holds every collective; the bytes of each plan equal their closed form, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases import CASES
from noted import bytes_by
from pool import Pool
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.engine import parallelize
from soli.mesh.collectives import (
    Axis,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    exchange,
    gather_json,
    reduce,
    reduce_scatter,
)
from soli.mesh.mesh import build_mesh
from soli.mesh.record import call_site, record_torch, recorder
from soli.mesh.world import join
from soli.planner.legality import resolve
from sweep import swept


def step_bytes(plan: str):
    """Bytes that one step records, without the first step's checks; and what the closed form needs."""
    case = CASES["gpt"]
    model, loss_fn, batches = case.make()
    engine = parallelize(model, loss_fn, optimizer=case.optimizer, plan=plan)
    engine.step(batches[0])
    recorder.clear()
    engine.step(batches[1])
    big = {key: 0 for key in ("all_reduce", "reduce_scatter", "all_gather")}
    for record in recorder.records:
        if record.label.startswith(("gradients", "parameters")):
            big[record.operation] += record.bytes
    units = {u.name: u.padded * 4 for u in engine.laid.units}
    small = sum(r.bytes for r in recorder.records) - sum(big.values())
    blocks = engine.laid.gatherer.order
    last = blocks[-1].name if blocks else ""
    slots = sum(s.numel for u in engine.laid.units for s in u.slots)
    return big, units, small, last, slots


@pytest.mark.parametrize(
    ("zero", "accumulate"), [swept(0, 1), (0, 2), (1, 1), swept(1, 2), swept(2, 1), (2, 2), (3, 1), (3, 2)]
)
def test_bytes_of_a_step(pool: Pool, zero: int, accumulate: int) -> None:
    plan = f"dp=2,zero={zero},accumulate={accumulate}"
    model, _, _ = CASES["gpt"].make()
    count = sum(p.numel() for p in model.parameters())
    for big, units, _, last, slots in pool.run(step_bytes, plan, ranks=2):
        assert slots == count
        whole = sum(units.values())
        assert count * 4 <= whole < (count + 2 * len(units)) * 4
        if zero == 0:
            assert big == {"all_reduce": whole, "reduce_scatter": 0, "all_gather": 0}
        elif zero < 3:
            assert big == {"all_reduce": 0, "reduce_scatter": whole, "all_gather": whole}
        else:
            # Per microbatch: all units forward, and all but the root and the last block again backward.
            gathers = accumulate * (2 * whole - units["root"] - units[last])
            assert big == {"all_reduce": 0, "reduce_scatter": whole, "all_gather": gathers}


@contextmanager
def nothing() -> Iterator[None]:
    yield


@nothing()
def where() -> str:
    return call_site()


def test_a_line_of_the_standard_library_is_not_the_users() -> None:
    assert where().startswith(__file__)  # and not contextlib.py, which calls what it decorates


def hsdp_bytes():
    return step_bytes("dp=4,replicate=2,zero=2")[:2]


def test_bytes_of_hsdp(pool: Pool) -> None:
    for big, units in pool.run(hsdp_bytes, ranks=4):
        whole = sum(units.values())
        assert big == {"all_reduce": whole // 2, "reduce_scatter": whole, "all_gather": whole}


def against_torch(backend: str):
    """Each collective of the seam against what it means, on odd sizes and several types."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo") if backend == "gloo" else dist.group.WORLD
    axis = Axis("dp", size, rank, tuple(range(size)), group, backend)
    problems = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for n in (1, 3, 1000):
            mine = (torch.arange(n * size) % 7 + rank).to(dtype)
            total = sum((torch.arange(n * size) % 7 + r).to(dtype) for r in range(size))
            reduced = mine.clone()
            all_reduce(reduced, axis)
            part = torch.empty(n, dtype=dtype)
            reduce_scatter(part, mine, axis)
            whole = torch.empty(n * size, dtype=dtype)
            all_gather(whole, part, axis)
            place = mine.clone()  # in place, as ZeRO-1 does it: a rank's part is its own slot of the whole
            reduce_scatter(place.view(size, n)[rank], place, axis)
            if not torch.equal(place.view(size, n)[rank], part):
                problems.append(("rs in place", dtype, n))
            sent = mine.clone()
            broadcast(sent, axis, source=size - 1)
            last = (torch.arange(n * size) % 7 + size - 1).to(dtype)
            gathered = mine.clone()
            reduce(gathered, axis, size - 1)
            wanted = total if rank == size - 1 else gathered
            following, previous = (rank + 1) % size, (rank - 1) % size
            passed = torch.empty_like(mine)
            exchange(passed, mine, axis, following, previous)
            before = (torch.arange(n * size) % 7 + previous).to(dtype)
            # Rank r gets r + 1 elements of everyone, the first of them numbered by who sent it.
            sizes = [r + 1 for r in range(size)]
            posted = torch.cat([torch.full((r + 1,), rank * 10 + r) for r in range(size)]).to(dtype)
            received = torch.empty(size * (rank + 1), dtype=dtype)
            all_to_all(received, posted, axis, [rank + 1] * size, sizes)
            post = torch.cat([torch.full((rank + 1,), r * 10 + rank) for r in range(size)]).to(dtype)
            for name, got, want in (
                ("ar", reduced, total), ("rs+ag", whole, total), ("bc", sent, last), ("reduce", gathered, wanted),
                ("exchange", passed, before), ("all_to_all", received, post),
            ):  # fmt: skip
                if not torch.equal(got, want):
                    problems.append((name, dtype, n))
    if gather_json({"rank": rank, "x": "é" * rank}, axis) != [{"rank": r, "x": "é" * r} for r in range(size)]:
        problems.append(("json", None, 0))
    return problems


@pytest.mark.parametrize("backend", ["local", "gloo"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives(pool: Pool, ranks: int, backend: str) -> None:
    assert pool.run(against_torch, backend, ranks=ranks) == [[]] * ranks


def order_and_groups():
    """What a gather begins, in order; whether the axes of a 2D grid over gloo have two groups each."""
    begun = []
    seen = lambda name, real: lambda *args, **kwargs: (begun.append(name), real(*args, **kwargs))[1]
    receive, send = dist.irecv, dist.isend
    group = dist.new_group(backend="gloo")
    axis = Axis("dp", 4, dist.get_rank(), (0, 1, 2, 3), group)
    dist.irecv, dist.isend = seen("receive", receive), seen("send", send)
    try:
        all_gather(torch.empty(4), torch.ones(1), axis)
        reduce_scatter(torch.empty(1), torch.ones(4), axis)
    finally:
        dist.irecv, dist.isend = receive, send
    world = replace(join(), backend="gloo")
    mesh = build_mesh(resolve(Plan.parse("tp=4,tensor=2d"), 4), world)
    return begun, [mesh[name].other not in (None, mesh[name].group) for name in ("row", "tp")]


def test_nothing_is_sent_before_all_is_asked_for(pool: Pool) -> None:
    """On gloo, a rank's word that it can receive waits behind what it sends."""
    for begun, two in pool.run(order_and_groups, ranks=4):
        assert begun == (["receive"] * 3 + ["send"] * 3) * 2
        assert two == [True, True]


def crossed(to: int):
    """Bytes that this rank's loopback carried while two ranks summed 4 MB into one of them over gloo."""
    axis = Axis("dp", 2, dist.get_rank(), (0, 1), dist.new_group(backend="gloo"))
    x = torch.arange(1_000_000.0) * (axis.index + 1)
    sent = lambda: int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())
    reduce(x.clone(), axis, to)
    barrier(axis)
    before = sent()
    reduce(x, axis, to)
    barrier(axis)
    assert axis.index != to or torch.equal(x, torch.arange(1_000_000.0) * 3)
    return sent() - before


@pytest.mark.parametrize("to", [0, 1])
def test_a_sum_of_two_is_sent_once(pool: Pool, to: int) -> None:
    """4 MB cross, not the 6 of gloo's own reduce. Both ranks see all of the loopback's bytes."""
    assert min(pool.run(crossed, to, ranks=2)) < 5.0e6


def foreign():
    """What PyTorch's own engines send is seen too: DDP from C++, FSDP2, DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found = {}
    x = torch.ones(4, 8)
    recorder.clear()
    with record_torch():
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8, bias=False))
        recorder.clear()
        ddp(x).sum().backward()
    found["ddp"] = bytes_by(recorder)
    recorder.clear()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    with record_torch():
        model(x).sum().backward()
    found["fsdp2"] = bytes_by(recorder)
    recorder.clear()
    with record_torch():
        distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
    found["dtensor"] = bytes_by(recorder)
    return {key: {f"{op}": n for (op, _), n in value.items()} for key, value in found.items()}


def test_torch_collectives_are_seen(pool: Pool) -> None:
    for found in pool.run(foreign, ranks=2):
        assert found["ddp"].get("all_reduce") == 8 * 8 * 4
        assert found["fsdp2"].get("all_gather") == 8 * 8 * 4  # the root is gathered once
        assert found["fsdp2"].get("reduce_scatter") == 8 * 8 * 4
        assert found["dtensor"].get("all_gather") == 8 * 8 * 4


def pipeline():
    """Two stages, two microbatches of [2, 8], one step of GPipe."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    rank = dist.get_rank()
    example = torch.zeros(2, 8, requires_grad=True)
    stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"), input_args=example, output_args=example)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).square().sum())
    recorder.clear()
    with record_torch():
        schedule.step(torch.ones(4, 8)) if rank == 0 else schedule.step(target=torch.zeros(4, 8))
    return [(r.operation, r.bytes) for r in recorder.records if r.operation in ("send", "recv")]


def test_pipelining_is_seen(pool: Pool) -> None:
    first, last = pool.run(pipeline, ranks=2)
    activations = 2 * 8 * 4
    assert first.count(("send", activations)) == first.count(("recv", activations)) == 2
    assert last.count(("send", activations)) == last.count(("recv", activations)) == 2


def missing() -> tuple[str, str]:
    """What rank 0 says that waits on tp for a rank that does not come, and what torch calls the group."""
    world = replace(join(), deadline=2.0)
    mesh = build_mesh(Plan(dp=2, tp=2), world)
    name = mesh["tp"].group.group_desc
    try:
        if world.rank == 0:
            all_reduce(torch.ones(3), mesh["tp"])
    except SoliError as error:
        return str(error), name
    return "", name


def test_axes_have_the_deadline_of_the_job(pool: Pool) -> None:
    """torch's default for groups that are made later is half an hour."""
    said, names = zip(*pool.run(missing, ranks=4, deadline=30), strict=True)
    assert "rank 1 did not arrive in 2 s" in said[0]
    assert said[1:] == ("", "", "")
    assert names == ("tp",) * 4
