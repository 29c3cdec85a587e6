"""What this machine does, measured on the ranks of this job: planner/machine.py says what of it. Collective.

The same code on the CPU with gloo or the local backend and on CUDA with NCCL. Every rank measures at once, as they
will compute; one measures alone while the others wait, which tells whether they share cores. It takes seconds, once:
the results are kept by a fingerprint of the hardware (SOLI_CACHE, or ~/.cache/soli). Products are measured by the
shapes that a program has, and kept beside.
"""

import ast
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from soli.core.errors import SoliError, blaming
from soli.core.files import write_whole
from soli.core.progress import busy
from soli.mesh import collectives
from soli.mesh.backends import processor
from soli.mesh.collectives import Axis, extreme, gather_json, raise_together
from soli.mesh.local.identity import mine
from soli.mesh.mesh import Mesh, axis_by_key
from soli.mesh.world import World, passing_groups
from soli.planner.legality import divisors
from soli.planner.machine import Machine
from soli.planner.rehearsal import Sent

SIZES = (1 << 12, 1 << 17, 1 << 20, 1 << 23)
"""Bytes of the collectives that are measured."""
MOST_RANKS = 64
"""Ranks that a measured group has at most on each axis; larger ones are scaled from these."""
FORMAT = 4
"""Of what is kept: goes up with every change of what is measured."""
RUNS = 3
CHANGED = 2.5
"""Times as long as before: then everything is measured anew."""
SECONDS = 0.08
"""Spent on one collective of one size, or less."""
BUDGET = 12.0
"""Seconds for all collectives; sizes for which none is left are extrapolated, groups scaled from the likest."""
PRODUCTS_SECONDS = 4.0
DISK = 1 << 24
"""Bytes that are written to measure the disk."""
SIDE = {"cpu": 384, "cuda": 4096}
"""Of the square products that tell a device's rate."""
STREAM = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Numbers that an operation adds, and AdamW updates: of a GPU so many that neither its cache nor launches are measured."""


def folder() -> Path:
    """Where calibrations are kept."""
    return Path(os.environ.get("SOLI_CACHE") or Path.home() / ".cache" / "soli")


def fingerprint(world: World, mesh: Mesh) -> str:
    """What two jobs have in common that a calibration serves."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else processor()
    hosts = gather_json([mine().host, name], mesh.all, label="hosts")
    places = [[row[0] for row in hosts].index(host) for host, _ in hosts]
    said = {
        "format": FORMAT, "ranks": world.size, "places": places, "devices": [name for _, name in hosts], "backend": world.backend,
        "torch": torch.__version__, "threads": torch.get_num_threads(), "cpus": os.cpu_count(),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def calibrated(world: World, mesh: Mesh, *, fresh: bool = False) -> tuple[Machine, bool]:
    """The machine of this job, and whether it was measured now: what is kept serves while it holds. Collective."""
    mark = fingerprint(world, mesh)
    kept = _kept(folder() / f"machine-{mark}.json") if world.is_first and not fresh else None
    said = gather_json(asdict(kept) if kept is not None else None, mesh.all, label="calibration")[0]
    if said is not None and _holds(Machine(**said), mesh, world.device):
        return Machine(**said), False
    disk: list[float] = []
    raise_together(lambda: disk.append(_disk()), mesh.all, label="where calibrations are kept")
    with busy("measuring this machine, once", shown=world.is_first):
        machine = _measure(world, mesh, mark, disk[0])
    machine = Machine(**gather_json(asdict(machine), mesh.all, label="calibration")[0])
    raise_together(lambda: keep(world, machine), mesh.all, label="calibration kept")
    return machine, True


def _kept(path: Path) -> Machine | None:
    """What was measured before; a file that cannot be read is told, and measured anew."""
    if not path.exists():
        return None
    try:
        return Machine(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        print(f"soli: {path} is no calibration ({error}); this machine is measured anew", file=sys.stderr)
        return None


def _keeping() -> AbstractContextManager[None]:
    """SoliError where this rank cannot write into the folder, or there is no room in it."""
    what, fix = "what is measured of this machine cannot be kept", "SOLI_CACHE=FOLDER"
    allowed = f"a folder that can be written into, with {DISK >> 20} MB free for each rank on its disk"
    return blaming(lambda error: SoliError(what, got=f"{folder()}: {error.strerror}", allowed=allowed, fix=fix), OSError)


def keep(world: World, machine: Machine) -> None:
    """For the next job. SoliError where it cannot be."""
    if world.is_first:
        with _keeping():
            write_whole(folder() / f"machine-{machine.fingerprint}.json", json.dumps(asdict(machine)))


def _holds(machine: Machine, mesh: Mesh, device: torch.device) -> bool:
    """Whether a sum over all ranks still takes what it took: the network is no part of the fingerprint. Collective."""
    if mesh.all.size == 1:
        return True
    x = torch.zeros(SIZES[-2] // 4, device=device)
    spent = _timed(lambda: collectives.all_reduce(x, mesh.all), device, mesh.all)
    return 1 / CHANGED < spent / machine.collective(Sent("all_reduce", mesh.all.ranks, SIZES[-2], False)) < CHANGED


def _measure(world: World, mesh: Mesh, mark: str, disk: float) -> Machine:
    device = world.device
    side = SIDE[device.type]
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    product = lambda: torch.mm(a, b)
    together, alone = _timed(product, device, mesh.all), _alone(product, device, mesh.all)
    big = torch.zeros(STREAM[device.type], device=device)
    tiny = torch.randn(8, device=device, requires_grad=True)
    stream = _timed(lambda: big + 1.0, device, mesh.all)
    launch = _timed(lambda: tiny * 2.0 + 1.0, device, mesh.all) / 2
    with passing_groups():
        tables = _collectives(world, mesh, device)
    hidden = _hidden(product, together, mesh.all, device) if world.size > 1 else 0.0
    return Machine(
        fingerprint=mark, ranks=world.size, launch=launch, stream=2 * 4 * big.numel() / max(stream - launch, 1e-9),
        host=_host(device), disk=disk, optimizer=_optimizer(device, mesh.all), crowd=max(together / alone, 1.0), hidden=hidden, flops=2 * side**3 / together, collectives=tables,
    )  # fmt: skip


def _collectives(world: World, mesh: Mesh, device: torch.device) -> dict[str, list[list[float]]]:
    """Seconds by operation and group, and by bytes: all groups with few bytes before any with many. Collective.

    A group over a slow link takes seconds for its largest size, which alpha and beta of the smaller ones give as well;
    a group that is not measured at all is taken for one inside a host, and nothing tells it apart.
    """
    found: dict[str, list[list[float]]] = {}
    axes = _axes(world, mesh)[::-1]  # all ranks first
    start = time.perf_counter()
    for number, size in enumerate(SIZES):
        for axis in axes:
            calls = _calls(axis, device, size)
            stride = axis.ranks[1] - axis.ranks[0]
            tables = [found.setdefault(f"{name} {axis.size}x{stride}", []) for name in calls]
            spent = extreme(time.perf_counter() - start, mesh.all, "max", label="seconds")
            needed = (RUNS + 2) * sum(_expected(table, size) for table in tables)
            if spent + needed > BUDGET and not (number < 2 and axis.size == world.size):
                continue
            share = min(SECONDS, BUDGET / 2 / (len(axes) * len(SIZES) * len(calls)))
            for table, call in zip(tables, calls.values(), strict=True):
                table.append([size, _timed(call, device, mesh.all, share)])
    return {key: table for key, table in found.items() if len(table) > 1}


def _expected(table: list[list[float]], size: int) -> float:
    """Seconds of the next size, by the two before it; 0 while nothing is known."""
    if len(table) < 2:
        return table[-1][1] if table else 0.0
    (small, before), (large, after) = table[-2:]
    return after + max(after - before, 0.0) / (large - small) * (size - large)


def _host(device: torch.device) -> float:
    """Bytes/s from the device to the host's memory."""
    x = torch.zeros(1 << 23, device=device)
    y = torch.empty(1 << 23, pin_memory=device.type == "cuda")
    return 4 * x.numel() / median(clock(lambda: y.copy_(x), device) for _ in range(5))


def _disk() -> float:
    """Bytes/s to the disk that has the folder of calibrations, with fsync. SoliError where they cannot be kept there.

    An empty file would not do to know it: a full disk takes that too.
    """
    data = os.urandom(DISK)
    with _keeping():
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder()) as file:
            start = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return len(data) / (time.perf_counter() - start)


def _optimizer(device: torch.device, everyone: Axis) -> float:
    """Parameters/s of AdamW."""
    weight = torch.nn.Parameter(torch.zeros(STREAM[device.type], device=device))
    weight.grad = torch.ones_like(weight)
    return weight.numel() / _timed(torch.optim.AdamW([weight]).step, device, everyone)


def _axes(world: World, mesh: Mesh) -> list[Axis]:
    """An axis of every size that divides the ranks, and of every distance between its ranks."""
    found = []
    for size in divisors(world.size)[1:]:
        for inner in divisors(world.size // size):
            if size > MOST_RANKS or (inner > 1 and size * inner > MOST_RANKS and size * inner != world.size):
                continue
            place = lambda rank, span=size * inner, inner=inner: (rank // span, rank % inner)
            found.append(mesh.all if size == world.size else axis_by_key("measured", {}, mesh.all, place, world))
    return found


def _calls(axis: Axis, device: torch.device, size: int) -> dict[str, Callable[[], Any]]:
    """Each collective of so many bytes, as the record counts them."""
    count = max(size // 4 // axis.size, 1)
    x, y, part = (torch.zeros(n, device=device) for n in (count * axis.size, count * axis.size, count))
    ahead, behind = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    return {
        "all_reduce": lambda: collectives.all_reduce(x, axis), "all_gather": lambda: collectives.all_gather(x, part, axis),
        "reduce_scatter": lambda: collectives.reduce_scatter(part, x, axis), "all_to_all": lambda: collectives.all_to_all(y, x, axis),
        "broadcast": lambda: collectives.broadcast(x, axis), "exchange": lambda: collectives.exchange(y, x, axis, ahead, behind),
        "send": lambda: _passed_on(x, y, axis),
    }  # fmt: skip


def _passed_on(sent: Tensor, received: Tensor, axis: Axis) -> None:
    """A message from each odd rank to the next one, as a pipeline's: those that send receive nothing meanwhile."""
    if axis.index % 2:
        collectives.send(sent, axis, (axis.index + 1) % axis.size)
    elif (axis.index - 1) % axis.size % 2:
        collectives.receive(received, axis, (axis.index - 1) % axis.size)


def _timed(call: Callable[[], Any], device: torch.device, everyone: Axis, seconds: float = SECONDS) -> float:
    """Seconds of a call, of the slowest rank. Collective: all ranks call it as often.

    Of many in a row, and not the median of single ones: ranks that share a core take turns of milliseconds, in which a
    short call sees nothing of the others.
    """
    call()
    once = clock(call, device)
    often = min(max(seconds / RUNS / max(once, 1e-7), 1), 1000)
    times = int(extreme(often, everyone, "min", label="how often"))

    def some() -> None:
        for _ in range(times):
            call()

    collectives.barrier(everyone)
    return extreme(median(clock(some, device) / times for _ in range(RUNS)), everyone, "max", label="seconds")


def clock(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call here, with all that it began on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _alone(call: Callable[[], Any], device: torch.device, everyone: Axis) -> float:
    """Seconds of a call on the first rank while the others wait."""
    collectives.barrier(everyone)
    spent = 0.0
    if everyone.index == 0:
        spent = median(clock(lambda: [call() for _ in range(10)], device) / 10 for _ in range(RUNS))
    return extreme(spent, everyone, "max", label="seconds alone")


def _hidden(product: Callable[[], Any], once: float, everyone: Axis, device: torch.device) -> float:
    """The share of a sum that runs behind products which take as long."""
    x = torch.zeros(SIZES[-2] // 4, device=device)
    alone = _timed(lambda: collectives.all_reduce(x, everyone), device, everyone)
    times = max(int(alone / once), 1)

    def both() -> None:
        pending = collectives.all_reduce(x, everyone, wait=False)
        for _ in range(times):
            product()
        pending.wait()

    return min(max((alone + times * once - _timed(both, device, everyone)) / min(alone, times * once), 0.0), 1.0)


# --- the products of a program ----------------------------------------------------------------------------


def with_products(world: World, mesh: Mesh, machine: Machine, wanted: Mapping[str, float]) -> Machine:
    """Measure the products (Call.key -> flops of all of them) that are not known, the heaviest first. Collective."""
    new = sorted((key for key in wanted if key not in machine.products), key=lambda key: -wanted[key])
    found: dict[str, float] = {}
    start = time.perf_counter()
    for key in new:
        if extreme(time.perf_counter() - start, mesh.all, "max", label="seconds") > PRODUCTS_SECONDS:
            break
        call = _again(key, world.device)
        if call is not None:
            found[key] = _timed(call, world.device, mesh.all, SECONDS / 4)
    if found:
        machine = replace(machine, products=machine.products | found)
        raise_together(lambda: keep(world, machine), mesh.all, label="products kept")
    return machine


def _again(key: str, device: torch.device) -> Callable[[], Any] | None:
    """A product of these shapes; None for what is not made of its tensors alone (convolutions, kernels of attention)."""
    name, _, rest = key.partition(" ")
    shapes, dtype = rest.rsplit(" ", 1)
    function: Any = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "baddbmm": torch.baddbmm}.get(name)
    tensors = [torch.randn(shape, device=device).to(getattr(torch, dtype)) for shape in ast.literal_eval(shapes)]
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        q, k, v = tensors[1:4] if "backward" in name else tensors[:3]
        masked = len(tensors) > (6 if "backward" in name else 3)
        forward = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=not masked, enable_gqa=q.shape[-3] != k.shape[-3])
        if "backward" not in name:
            return forward
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = forward()
        return lambda: torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    return None if function is None else lambda: function(*tensors)


def free_memory(world: World, mesh: Mesh) -> float:
    """Bytes that this rank may take of its device, which it may share with others. Collective."""
    on_cuda = world.device.type == "cuda"
    place = [mine().host, str(world.device) if on_cuda else "cpu"]
    sharing = gather_json(place, mesh.all, label="devices").count(place)
    free = float(torch.cuda.mem_get_info(world.device)[0]) if on_cuda else _free_of_host()
    return extreme(free / sharing, mesh.all, "min", label="free memory")


def _free_of_host() -> float:
    """Bytes that the host, or the control group that this process is in, has left."""
    import psutil

    free = float(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and (said := limit.read_text().strip()) != "max":
        free = min(free, float(said) - float(used.read_text()))
    return free
