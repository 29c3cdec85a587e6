"""Every plan of a model on a cluster, and the best of them: exhaustive, and so exact within the cost model.

The space is a table: factorisations of the devices into tp, cp, pp and dp, times what is chosen apart from them. All
of it is laid out as arrays; memory is computed first, and time for what fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from soli.core.errors import Problem, raise_all
from soli.core.plan import Plan
from soli.planner.cost import memory
from soli.planner.cost.constants import Constants, known, repeated, spread_of
from soli.planner.cost.points import CAST, FULL, MIXED, NONE, SELECTIVE, Array, Points, of_device
from soli.planner.cost.step import Step, step
from soli.planner.hardware.clusters import Cluster
from soli.planner.models import Model

WIDEST = {"tp": 64, "cp": 64}
MICROBATCHES = (1, 2, 4, 8, 16, 32)  # sequences of one
CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
LEVELS = {"none": NONE, "selective": SELECTIVE, "full": FULL}
FIXED = ("tp", "sp", "cp", "pp", "chunks", "dp", "zero", "recompute", "microbatch")
"""What the user may fix; `microbatch` is in sequences."""
MOST = 16384  # servers
PIECE = 1 << 15
"""Points computed at once: what lies in a core's cache."""


@dataclass(frozen=True)
class Task:
    """What is asked: a model, on a cluster, so many sequences of so many tokens a step, and what is fixed."""

    model: Model
    cluster: Cluster
    batch: int
    seq: int
    precision: str = "bf16"
    memory: float = 0.0  # bytes of a device that may be used; 0: all
    fixed: Mapping[str, float] | None = None
    framework: str = "soli"  # whose program runs the plan

    @property
    def limit(self) -> float:
        """Bytes."""
        return self.memory or self.cluster.device.memory


@dataclass(frozen=True)
class Found:
    """What a search saw: all points, which fit, and the costs of these, quickest first."""

    task: Task
    points: Points  # those that fit, quickest first
    cost: Step
    counted: int  # plans in the space
    nearest: Points | None  # one point: where nothing fits, what takes the least memory
    least: float  # its upper bound of memory, bytes


def problems(task: Task) -> list[Problem]:
    """What keeps any plan from being, before one is looked at."""
    found = []
    if task.memory > task.cluster.device.memory:
        found.append(
            Problem(
                f"{task.memory / 1e9:.1f} GB are more than {task.cluster.device.name} has",
                allowed=f"{task.cluster.device.memory / 1e9:.1f} GB",
            )
        )
    if task.precision not in task.cluster.device.tflops:
        found.append(
            Problem(
                f"{task.cluster.device.name} does not multiply {task.precision}",
                allowed=", ".join(task.cluster.device.tflops),
            )
        )
    fixed = dict(task.fixed or {})
    for name in ("tp", "cp", "pp", "dp"):
        if task.cluster.size % int(fixed.get(name, 1)):
            found.append(
                Problem(
                    f"{name}={fixed[name]:g} does not divide the {task.cluster.size} devices of {task.cluster}"
                )
            )
    degrees = {name: fixed[name] for name in ("tp", "cp", "pp", "dp") if name in fixed}
    whole = float(np.prod(list(degrees.values()) or [1.0]))
    said = " and ".join(f"{name}={value:g}" for name, value in degrees.items())
    if not found and task.cluster.size % int(whole):
        found.append(
            Problem(f"{said} contradict each other: {whole:g} do not divide the {task.cluster.size} devices")
        )
    elif len(degrees) == 4 and whole != task.cluster.size:
        found.append(Problem(f"{said} take {whole:g} devices, and {task.cluster} has {task.cluster.size}"))
    dp, size = fixed.get("dp", 1.0), fixed.get("microbatch", 1.0)
    if dp * size > task.batch:
        words = [f"{name}={fixed[name]:g}" for name in ("dp", "microbatch") if name in fixed]
        found.append(
            Problem(
                f"{' and '.join(words)} take {dp * size:g} sequences, and the global batch has {task.batch}"
            )
        )
    if fixed.get("sp") and fixed.get("tp") == 1:
        found.append(
            Problem("sp=on and tp=1 contradict each other: the sequence is cut over the ranks of tp")
        )
    if fixed.get("chunks", 1) > 1 and fixed.get("pp") == 1:
        found.append(
            Problem(f"chunks={fixed['chunks']:g} and pp=1 contradict each other: chunks are of a pipeline")
        )
    if fixed.get("zero", 0) > 0 and fixed.get("dp") == 1 and fixed.get("cp") == 1:
        found.append(Problem(f"zero={fixed['zero']:g} and dp=1 contradict each other: ZeRO shards over dp"))
    return found


def search(task: Task) -> Found:
    """Every plan of the task. SoliError where it contradicts itself, or no plan can be whatever the memory."""
    raise_all(problems(task))
    space = spaces(task)
    if not len(space):
        raise_all([_none(task)])
    bounds = peaks(task, space)
    fits = np.flatnonzero(bounds <= task.limit)
    nearest = None if len(fits) else space.take(np.array([int(np.argmin(bounds))]))
    kept = space.take(fits)
    cost = costs(task, kept)
    order = np.argsort(cost.time, kind="stable")
    ordered = Step(**{f.name: getattr(cost, f.name)[order] for f in fields(Step)})
    return Found(task, kept.take(order), ordered, len(space), nearest, float(bounds.min()))


def peaks(task: Task, p: Points) -> Array:
    """The upper bound of each point's memory, bytes."""
    high = spread_of(task.framework, task.cluster.device.generation)["memory_high"]
    parts = [memory.peak(piece, constants_of(task, len(piece))) for piece in _pieces(p)]
    return high * np.concatenate(parts)


def costs(task: Task, p: Points) -> Step:
    """What each point costs."""
    parts = [step(piece, constants_of(task, len(piece))) for piece in _pieces(p)]
    return Step(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Step)})


def _pieces(p: Points) -> list[Points]:
    return [p.take(slice(a, a + PIECE)) for a in range(0, max(len(p), 1), PIECE)]


def constants_of(task: Task, count: int) -> Constants:
    """What the search assumes."""
    return repeated(known(task.framework, task.cluster.device.generation), count)


# --- the space --------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    """All, in order."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def meshes(task: Task) -> NDArray[np.int64]:
    """[n, 4]: tp, cp, pp, dp whose product is the devices, that the model can be cut by, and as fixed."""
    model, n, fixed = task.model, task.cluster.size, dict(task.fixed or {})
    fits_tp = lambda t: model.heads % t == 0 and (model.kv_heads % t == 0 or t % model.kv_heads == 0)
    found = [
        (tp, cp, pp, n // tp // cp // pp)
        for tp in divisors(n)
        if tp <= WIDEST["tp"] and fits_tp(tp)
        for cp in divisors(n // tp)
        if cp <= WIDEST["cp"] and task.seq % cp == 0
        for pp in divisors(n // tp // cp)
        if pp <= model.layers
    ]
    table = np.array(found, dtype=np.int64).reshape(-1, 4)
    for column, name in enumerate(("tp", "cp", "pp", "dp")):
        if name in fixed:
            table = table[table[:, column] == fixed[name]]
    return table


def spaces(task: Task) -> Points:
    """Every plan, as points."""
    fixed = dict(task.fixed or {})
    choices = {
        "sp": (0.0, 1.0), "zero": (0.0, 1.0, 2.0, 3.0), "recompute": (NONE, SELECTIVE, FULL), "chunks": CHUNKS,
        "microbatch": MICROBATCHES,
    }  # fmt: skip
    axes = [
        np.array([fixed[name]] if name in fixed else values, dtype=float) for name, values in choices.items()
    ]
    inner = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])
    mesh = meshes(task)
    mesh = mesh[mesh[:, 3] <= task.batch].T.astype(float)
    tp, cp, pp, dp = (np.repeat(axis, inner.shape[1]) for axis in mesh)
    sp, zero, recompute, chunks, microbatch = (np.tile(axis, mesh.shape[1]) for axis in inner)
    times = task.batch / (dp * microbatch)
    kept = times >= 1
    kept &= (sp == 0) | ((tp > 1) & (task.seq / cp % tp == 0))
    kept &= (zero == 0) | (dp * cp > 1)
    kept &= (chunks == 1) | ((pp > 1) & (pp * chunks <= task.model.layers) & (np.ceil(times) % pp == 0))
    if task.framework != "soli":  # whose batches and stages need not be equal
        kept &= (task.batch % (dp * microbatch) == 0) & (task.model.layers % (pp * chunks) == 0)
    same = {
        **task.model.point(), **of_device(task.cluster.device, task.precision), "seq": task.seq, "global_batch": task.batch,
        "ep": 1.0, "offload": 0.0, "logged": 0.0, **(CAST if task.framework == "soli" else MIXED),
    }  # fmt: skip
    own = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "sp": sp, "zero": zero, "recompute": recompute, "chunks": chunks, "microbatch": microbatch}  # fmt: skip
    count = int(kept.sum())
    return Points(
        **{
            f.name: own[f.name][kept] if f.name in own else np.full(count, float(same[f.name]))
            for f in fields(Points)
        }
    )


def _none(task: Task) -> Problem:
    """Why no plan is in the space."""
    model, mesh = task.model, meshes(task)
    said = ", ".join(f"{name}={value:g}" for name, value in (task.fixed or {}).items())
    least = int(mesh[:, 3].min()) if len(mesh) else 0
    return Problem(
        f"no plan shares {task.batch} sequences of {task.seq} tokens among the {task.cluster.size} devices",
        got=f"{model.heads} heads, {model.layers} layers" + (f"; fixed: {said}" if said else ""),
        allowed="dp x microbatch <= the global batch; tp divides the heads, cp the sequence, and pp is no more than the layers",
        fix=f"a global batch of {least} or more, or fewer devices" if least > task.batch else "fix less",
    )


# --- plans ------------------------------------------------------------------------------------------------


def plan_of(p: Points, i: int, precision: str) -> Plan:
    """The plan at a place, as the engine takes it."""
    level = next(name for name, value in LEVELS.items() if value == p.recompute[i])
    times = int(np.ceil(p.microbatches[i]))
    piped = p.pp[i] > 1
    return Plan(
        dp=int(p.dp[i]), zero=int(p.zero[i]), tp=int(p.tp[i]), sp=bool(p.sp[i]), cp=int(p.cp[i]), pp=int(p.pp[i]),
        chunks=int(p.chunks[i]), schedule="interleaved" if p.chunks[i] > 1 else "1f1b",
        microbatches=times if piped else 1, accumulate=1 if piped else times, recompute=level, precision=precision,
    )  # fmt: skip


def different(found: Found, count: int) -> list[int]:
    """Places of the quickest plans, no two of which lay the ranks out alike."""
    seen: set[tuple[float, ...]] = set()
    places = []
    for i in range(len(found.points)):
        p = found.points
        key = (p.tp[i], p.cp[i], p.pp[i], p.dp[i], float(p.zero[i] >= 3))
        if key not in seen:
            seen.add(key)
            places.append(i)
        if len(places) == count:
            break
    return places


def with_fixed(task: Task, more: Mapping[str, float]) -> Task:
    """The task with more that is fixed."""
    return replace(task, fixed={**(task.fixed or {}), **more})


def enough(task: Task) -> int | None:
    """The fewest servers, a power of two, on which a plan fits; None up to MOST."""
    nodes = 1
    while nodes <= MOST:
        larger = replace(task, cluster=replace(task.cluster, nodes=nodes))
        space = spaces(larger) if not problems(larger) else None
        if space is not None and len(space) and peaks(larger, space).min() <= task.limit:
            return nodes
        nodes *= 2
    return None
