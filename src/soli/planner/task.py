"""What a search is asked, and what of it contradicts itself before a plan is looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from soli.core.errors import Problem, listing
from soli.planner.cost.grids import shapes
from soli.planner.cost.points import CUBE, GRID, INTERLEAVED, LINE, ONE, PRECISIONS, ZBH1, ZBV
from soli.planner.hardware.clusters import Cluster
from soli.planner.legality import divisors
from soli.planner.models import Model
from soli.planner.offers import SOLI, spelt, unable

FIXED = ("tp", "sp", "cp", "pp", "chunks", "dp", "zero", "recompute", "microbatch", "microbatches", "ep", "replicate", "context", "offload", "schedule", "tensor", "rows", "precision")  # fmt: skip
"""What the user may fix; `microbatch` is in sequences, `microbatches` are those of a replica, without a pipeline too."""


@dataclass(frozen=True)
class Task:
    """What is asked: a model, on a cluster, so many sequences of so many tokens a step, and what is fixed."""

    model: Model
    cluster: Cluster
    batch: int
    seq: int
    precision: str = "bf16"  # or several, such as bf16,fp8, of which a plan has one
    memory: float = 0.0  # bytes of a device that may be used; 0: all
    fixed: Mapping[str, float] | None = None
    framework: str = "soli"  # whose program runs the plan

    @property
    def precisions(self) -> tuple[str, ...]:
        """What products may be computed in."""
        said = (self.fixed or {}).get("precision")
        return tuple(self.precision.split(",")) if said is None else (PRECISIONS[int(said)],)

    @property
    def limit(self) -> float:
        """Bytes."""
        return self.memory or self.cluster.device.usable

    def with_fixed(self, more: Mapping[str, float]) -> Task:
        """The task with more that is fixed; a precision beside those that it asks for is asked for too."""
        found = replace(self, fixed={**(self.fixed or {}), **more})
        return replace(found, precision=found.precisions[0]) if "precision" in more else found


@listing
def problems(task: Task) -> Iterator[Problem]:
    """What keeps any plan from being, before one is looked at."""
    fixed = dict(task.fixed or {})
    yield from _of_devices(task)
    yield from _of_degrees(task, fixed)
    yield from _of_batch(task, fixed)
    yield from _of_choices(task, fixed)


def _of_devices(task: Task) -> Iterator[Problem]:
    device = task.cluster.device
    if task.memory > device.memory:
        yield Problem(f"{task.memory / 1e9:.1f} GB are more than {device.name} has", allowed=f"{device.memory / 1e9:.1f} GB")
    if not set(task.precisions) <= set(task.precision.split(",")):
        yield Problem(f"precision={task.precisions[0]} is fixed, and {task.precision} is asked for")
    for name in task.precisions:
        if name not in device.tflops:
            yield Problem(f"{device.name} does not multiply {name}", allowed=", ".join(device.tflops))


def _of_degrees(task: Task, fixed: Mapping[str, float]) -> list[Problem]:
    degrees = {name: fixed[name] for name in ("tp", "cp", "pp", "dp") if name in fixed}
    size = task.cluster.size
    odd = (_said(degrees, name) for name, value in degrees.items() if size % int(value))
    found = [Problem(f"{one} does not divide the {size} devices of {task.cluster}") for one in odd]
    whole, said = math.prod(degrees.values()), _said(degrees, *degrees)
    if not found and size % int(whole):
        found.append(Problem(f"{said} contradict each other: {whole:g} do not divide the {size} devices"))
    elif len(degrees) == 4 and whole != size:
        found.append(Problem(f"{said} take {whole:g} devices, and {task.cluster} has {size}"))
    return found


def _of_batch(task: Task, fixed: Mapping[str, float]) -> Iterator[Problem]:
    """Where no replica can have such microbatches. soli's are as equal as can be: of 31 sequences on 8 replicas four of one, though some have three."""
    said = {name: int(fixed[name]) for name in ("dp", "microbatch", "microbatches") if name in fixed}
    taken = math.prod(said.values())
    ranks = max(task.cluster.size // math.prod(int(fixed.get(name, 1)) for name in ("tp", "cp", "pp")), 1)
    counts = [dp for dp in ([said["dp"]] if "dp" in said else divisors(ranks)) if dp <= task.batch]
    cuts = [_cut(-(-task.batch // dp), said) for dp in counts]
    fits = any(said.get("microbatch", size) == size and said.get("microbatches", times) == times for size, times in cuts)
    if taken <= task.batch if task.framework != SOLI else fits:
        return
    near = f"dp={counts[-1]} has microbatch={cuts[-1][0]}, microbatches={cuts[-1][1]}" if cuts else ""
    many = f"take {taken} sequences, and the global batch has {task.batch}"
    odd = f"cannot be: a replica cuts its part of {task.batch} sequences as equally as can be"
    yield Problem(f"{_said(fixed, *said)} {many if taken > task.batch else odd}", allowed=near)


def _cut(own: int, said: Mapping[str, int]) -> tuple[int, int]:
    """The largest microbatch of so many sequences, and how many there are, that are the nearest to what is said."""
    times = -(-own // said.get("microbatch", -(-own // said.get("microbatches", 1))))
    return -(-own // times), times


def _of_choices(task: Task, fixed: Mapping[str, float]) -> list[Problem]:
    said, model = partial(_said, fixed), task.model
    one = lambda *names: all(fixed.get(name) == 1 for name in names)
    pp, chunks, parts, copies, ep = (fixed.get(name, 1) for name in ("pp", "chunks", "microbatches", "replicate", "ep"))
    room = fixed.get("dp") or task.cluster.size // math.prod(int(fixed.get(name, 1)) for name in ("tp", "cp", "pp"))
    grid, tensor, schedule = fixed.get("tensor") or "rows" in fixed, fixed.get("tensor", GRID), fixed.get("schedule", ONE)
    order = fixed.get("schedule", ONE if chunks == 1 else INTERLEAVED)
    if order >= ZBV:
        stages, many, scarce = 2 * pp, "two times pp or more", parts < 2 * pp
    else:
        stages, many, scarce = chunks * pp, "a multiple of pp", order in (INTERLEAVED, ZBH1) and parts % pp > 0
    rules = {
        "sp=on and tp=1 contradict each other: the sequence is cut over the ranks of tp": fixed.get("sp") and one("tp"),
        f"{said('chunks')} and pp=1 contradict each other: chunks are of a pipeline": chunks > 1 and one("pp"),
        f"{said('schedule')} and pp=1 contradict each other: schedules are of a pipeline": schedule != ONE and one("pp"),
        f"{said('schedule')} and {said('chunks')} contradict each other": {"schedule", "chunks"} <= fixed.keys() and (schedule == INTERLEAVED) != (chunks > 1),
        f"{said('zero')} and dp=1 contradict each other: ZeRO shards over dp": fixed.get("zero", 0) > 0 and one("dp", "cp"),
        "offload=optimizer and zero=0 contradict each other: what is sharded is moved": fixed.get("offload") and fixed.get("zero") == 0,
        "context=ulysses and cp=1 contradict each other: attention crosses the ranks of cp": fixed.get("context") and one("cp"),
        f"{said('rows')} are of a grid, which {said('tensor')} is not": "rows" in fixed and tensor != GRID,
        "sp=on and a grid contradict each other: a grid has cut what sp cuts": fixed.get("sp") and grid,
        f"{said('schedule')} and a grid contradict each other: its products compute both gradients at once": grid and schedule >= ZBH1,
        f"{said('replicate')} and zero=0 contradict each other: copies are of sharded states": copies > 1 and fixed.get("zero") == 0,
        f"{said('replicate')} does not divide {said('dp') or f'the {room} ranks that dp can have'}": room % copies,
        f"{said('tensor', 'rows', 'tp')} contradict each other: {fixed.get('tp', 1):g} ranks are no such {'cube' if tensor == CUBE else 'grid'}": grid and tensor != LINE and _no_shape(task, fixed, tensor),
        f"{said('pp', 'chunks', 'schedule')}: {stages:g} stages, and {model.name} has {model.layers} layers": stages > model.layers,
        f"{said('schedule', 'chunks', 'microbatches', 'pp')} contradict each other: microbatches are {many}": {"pp", "microbatches"} <= fixed.keys() and pp > 1 and scarce,
        f"{said('ep')} {f'does not divide the {model.experts} experts of' if model.experts else 'is of experts, and there are none in'} {model.name}": model.experts % ep if model.experts else ep > 1,
    }  # fmt: skip
    return [Problem(what) for what, wrong in rules.items() if wrong] + unable(task.framework, fixed, task.precisions)


def _no_shape(task: Task, fixed: Mapping[str, float], tensor: float) -> bool:
    """Whether tp, where it is fixed and divides the devices, has no such shape of ranks; of such rows, where these are fixed."""
    tp, rows = int(fixed.get("tp", 0)), fixed.get("rows")
    return tp > 0 and task.cluster.size % tp == 0 and not any(kind == tensor and rows in (None, n) for kind, n, _ in shapes(tp))


def _said(fixed: Mapping[str, float], *names: str) -> str:
    return spelt(fixed, *names, between=" and ")
