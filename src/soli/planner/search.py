"""The best plans of a model on a cluster, exact within the cost model: branch and bound over arrays.

Layouts are taken in the order of what they cost at least; of each come its orders of stages, and of these the ways to
shard, as long as their bounds are below what was found. What is left out is slower, or larger than the memory, than its
bound says (Land and Doig 1960).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from soli.core.errors import Problem, raise_all
from soli.core.plan import Plan
from soli.planner import bounds, space
from soli.planner.bounds import SLACK, constants_of, high
from soli.planner.cost import memory
from soli.planner.cost.points import FULL, GRID, INTERLEAVED, NONE, ONE, PRECISIONS, Array, Points
from soli.planner.cost.step import Step, seconds, step
from soli.planner.offers import CONTEXTS, LEVELS, NAMED, TENSORS, spelt
from soli.planner.space import Places, Table, points_of
from soli.planner.task import FIXED, Task, problems

MOST = 16384  # servers
SERVERS = sorted({n for k in range(MOST.bit_length()) for n in (1 << k, 3 << k) if n <= MOST})
"""Numbers of servers that are tried: powers of two and three times those, up to MOST."""
PIECE = 1 << 13
"""Points computed at once: what lies in a core's cache."""
FEW = 16
"""Layouts that are looked at first; then twice as many, ..."""
FEW_WAYS = {"zero": 1.0, "replicate": 1.0, "offload": 0.0, "microbatch": 1.0}
"""Of each layout: looked at before all ways, which then need be no slower. It takes a fifth of the time, and saves a tenth to two fifths."""
SHOWN = 10
KEY = ("tp", "cp", "pp", "dp", "ep", "tensor", "precision")
"""Plans that differ in one of these, or in whether parameters are sharded, lay the ranks out otherwise."""
USUAL = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "tensor": 0, "offload": 0}
"""Of a plan that shares the batch out and does no more; how many copies a state has and how cp crosses is no further choice."""

__all__ = ["FIXED", "LEVELS", "Found", "Task", "constants_of", "costs", "different", "enough", "peaks", "plan_of", "problems", "search", "simplest"]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a search saw: the plans that fit and are no slower than the best of the last layout that was asked for."""

    task: Task
    points: Points  # quickest first
    cost: Step
    counted: int  # plans in the space
    looked: int  # of them those whose cost was computed; the others are bounded
    fit: int  # of those looked at, that were not slower than what was found before
    nearest: Points | None  # one point: where nothing fits, what takes the least memory
    least: float  # its upper bound of memory, bytes


Bound = Callable[[Task, Table], Array]


class Best:
    """The best value of each layout, and how bad the last of so many is."""

    def __init__(self, count: int, near: float = 0.0) -> None:
        self.of: dict[tuple[float, ...], float] = {}
        self.count, self.near = count, 1 + near
        self.worst = np.inf

    def note(self, keys: Array, values: Array) -> None:
        """Values of the layouts that the rows of `keys` say."""
        if not len(values):
            return
        each, place = space.distinct(keys)
        least = np.full(len(each), np.inf)
        np.minimum.at(least, place, values)
        for key, value in zip(map(tuple, each.tolist()), least.tolist(), strict=True):
            self.of[key] = min(self.of.get(key, np.inf), value)
        if len(self.of) >= self.count:
            times = sorted(self.of.values())
            self.worst = max(times[self.count - 1], times[0] * self.near)


def search(task: Task, count: int = SHOWN, near: float = 0.0) -> Found:
    """The best plans of the task, of so many layouts, and all that are no slower than the quickest by so large a part.

    SoliError where it contradicts itself, or no plan can be at all."""
    raise_all(problems(task))
    whole = space.counted(task)
    if not whole:
        raise_all([_none(task)])
    best = Best(count, near)
    best.worst = begun(task, count, near)
    kept, looked, fit = _explored(task, best)
    if not fit:
        nearest, least = thriftiest(task)
        return Found(task, nearest.take([]), costs(task, nearest.take([])), whole, looked, 0, nearest, least)
    p = points_of(task, _sorted(kept, best.worst)).spread()
    return Found(task, p, costs(task, p), whole, looked, fit, None, float(peaks(task, p).min()))


def begun(task: Task, count: int, near: float = 0.0) -> float:
    """Seconds that no plan has to be slower than: those of the last layout among a few plans of each."""
    few = task.with_fixed(FEW_WAYS)
    if FEW_WAYS.keys() & (task.fixed or {}).keys() or problems(few):
        return float(np.inf)
    best = Best(count, near)
    _explored(few, best)
    return best.worst / SLACK


def _explored(task: Task, best: Best) -> tuple[list[tuple[Table, Array]], int, int]:
    """Plans that are no slower than the best so far, with their times; how many were looked at; and how many fit."""
    kept: list[tuple[Table, Array]] = []
    looked = fit = 0
    low = _fitting(task, bounds.memory_of_layouts, bounds.time_of_layouts)
    then = _fitting(task, bounds.memory_of_stages, bounds.time_of_stages)
    for part in descend(task, low, then, lambda: best.worst):
        ways = space.ways(task, part)
        looked += len(ways["zero"])
        # Of rows that recompute some layers the time of as few as may be: no more of them are quicker.
        quick = bounds.time_of_shards(task, part, ways) <= best.worst
        table = settled(task, space.sharded(part, space.rows_of(ways, quick)))
        table = space.rows_of(table, np.flatnonzero(peaks(task, points_of(task, table)) <= task.limit))
        found = times(task, points_of(task, table))
        at = np.flatnonzero(found <= best.worst)
        fit += len(at)
        kept.append((space.rows_of(table, at), found[at]))
        best.note(_keys(kept[-1][0]), found[at])
    return kept, looked, fit


def _fitting(task: Task, memory_of: Bound, time_of: Bound) -> Callable[[Table], Array]:
    """Bounds of the time of rows that may fit; infinite of others."""

    def bound(table: Table) -> Array:
        fits = np.flatnonzero(memory_of(task, table) <= task.limit)
        found = np.full(space.size(table), np.inf)
        found[fits] = time_of(task, space.rows_of(table, fits))
        return found

    return bound


def descend(task: Task, first: Callable[[Table], Array], second: Callable[[Table], Array], worst: Callable[[], float]) -> Iterator[Table]:
    """Tables of `stages`, those with the least bounds first, until no other can be below what `worst` says.

    `first`, `second`: bounds of rows of layouts, and of stages. An infinite bound leaves a row out.
    """
    table = space.layouts(task)
    low = np.concatenate([first(part) for part in _parts(table)])
    order = _ascending(low, worst())
    start, many = 0, FEW
    while start < len(order) and low[order[start]] <= worst():
        some = order[start : start + many]
        start, many = start + many, min(2 * many, PIECE)
        middle = space.stages(task, space.rows_of(table, some[low[some] <= worst()]))
        if not space.size(middle):
            continue
        later = np.concatenate([second(part) for part in _parts(middle)])
        following = _ascending(later, worst())
        for a in range(0, len(following), PIECE // 2):
            part = following[a : a + PIECE // 2]
            part = part[later[part] <= worst()]
            if not len(part):
                break
            yield space.rows_of(middle, part)


def _ascending(bounds: Array, most: float) -> Places:
    """Places of the finite ones that are no more than `most`, the least first."""
    places = np.flatnonzero(np.isfinite(bounds) & (bounds <= most))
    return places[np.argsort(bounds[places], kind="stable")]


def thriftiest(task: Task, enough: float = -np.inf) -> tuple[Points, float]:
    """The plan whose upper bound of memory is the least, and that; or the first that takes no more than is enough."""
    best = Best(1)
    found: list[Points] = []
    low = lambda table: bounds.memory_of_layouts(task, table)
    then = lambda table: bounds.memory_of_stages(task, table)
    for part in descend(task, low, then, lambda: best.worst if best.worst > enough else -np.inf):
        table = space.shards(task, part)
        if not space.size(table):  # copies that no group has leave nothing
            continue
        p = points_of(task, {**table, "again": table["most"]})
        sizes = peaks(task, p)
        i = int(np.argmin(sizes))
        if sizes[i] < best.worst:
            best.note(np.zeros((1, 1)), sizes[[i]])
            found = [p.take([i]).spread()]
    return found[0], float(best.worst)


def settled(task: Task, table: Table) -> Table:
    """Rows that recompute some layers with as few as fit, which is the quickest: each more takes time and gives memory.

    Layers are alike, so that of the sets of so many all are the same: bisection finds what a search over sets would.
    """
    open_rows = np.flatnonzero(table["most"] > 0)
    some = space.rows_of(table, open_rows)
    low, high_ = some["again"] / some["chunks"] - 1, some["most"] / some["chunks"]
    while len(at := np.flatnonzero(low + 1 < high_)):
        part, middle = space.rows_of(some, at), np.floor((low[at] + high_[at]) / 2)
        fits = peaks(task, points_of(task, {**part, "again": middle * part["chunks"]})) <= task.limit
        low[at], high_[at] = np.where(fits, low[at], middle), np.where(fits, middle, high_[at])
    again = table["again"].copy()
    again[open_rows] = high_ * some["chunks"]
    return {**table, "again": again}


def holds(task: Task) -> bool:
    """Whether some plan fits."""
    return not problems(task) and space.counted(task) > 0 and thriftiest(task, task.limit)[1] <= task.limit


def peaks(task: Task, p: Points) -> Array:
    """The upper bound of each point's memory, bytes."""
    return high(task) * np.concatenate([memory.peak(piece, constants_of(task)) for piece in _pieces(p)])


def times(task: Task, p: Points) -> Array:
    """Seconds of each point's step."""
    return np.concatenate([seconds(piece, constants_of(task))[0] for piece in _pieces(p)])


def costs(task: Task, p: Points) -> Step:
    """What each point costs."""
    parts = [step(piece, constants_of(task)) for piece in _pieces(p)]
    return Step(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Step)})


def _pieces(p: Points) -> list[Points]:
    return [p.take(slice(a, a + PIECE)) for a in range(0, max(len(p), 1), PIECE)]


def _parts(table: Table) -> list[Table]:
    whole = range(0, max(space.size(table), 1), PIECE)
    return [{name: column[a : a + PIECE] for name, column in table.items()} for a in whole]


def _keys(table: Mapping[str, Array] | Points) -> Array:
    """[rows, columns]: what two plans that are shown differ in."""
    column = table.__getitem__ if isinstance(table, Mapping) else lambda name: getattr(table, name)
    return np.stack([*(column(name) for name in KEY), (column("zero") >= 3).astype(float)], axis=1)


def _sorted(kept: list[tuple[Table, Array]], worst: float) -> Table:
    """What is no slower, quickest first."""
    times = np.concatenate([time for _, time in kept])
    whole = {name: np.concatenate([table[name] for table, _ in kept]) for name in kept[0][0]}
    return space.rows_of(whole, _ascending(times, worst))


def _none(task: Task) -> Problem:
    """Why no plan is in the space."""
    model, mesh = task.model, space.meshes(task)
    said = spelt(task.fixed or {})
    least = int(mesh[:, 3].min()) if len(mesh) else 0
    return Problem(
        f"no plan shares {task.batch} sequences of {task.seq} tokens among the {task.cluster.size} devices",
        got=f"{model.heads} heads, {model.layers} layers" + (f"; fixed: {said}" if said else ""),
        allowed="dp x microbatch <= the global batch; tp divides the heads, cp the sequence, and pp is no more than the layers",
        fix=f"a global batch of {least} or more, or fewer devices" if least > task.batch else "fix less",
    )


# --- plans ------------------------------------------------------------------------------------------------


def plan_of(p: Points, i: int) -> Plan:
    """The plan at a place, as the engine takes it."""
    word = lambda words, column: next(name for name, value in words.items() if value == column[i])
    level = word(LEVELS, p.recompute)
    if p.again[i] > 0:
        level = "selective" if p.by_product[i] else f"{kept_share(p.take([i])):.3f}"
    times, piped = int(np.ceil(p.microbatches[i])), p.pp[i] > 1
    rows = int(p.rows[i]) if p.tensor[i] == GRID and p.rows[i] != p.columns[i] else 0  # a square says itself
    return Plan(
        tensor=word(TENSORS, p.tensor), rows=rows, dp=int(p.dp[i]), zero=int(p.zero[i]), tp=int(p.tp[i]), sp=bool(p.sp[i]), cp=int(p.cp[i]), pp=int(p.pp[i]),
        chunks=int(p.chunks[i]) if p.schedule[i] <= INTERLEAVED else 1, schedule=NAMED[p.schedule[i]], ep=int(p.ep[i]), replicate=int(p.replicate[i]),
        offload="optimizer" if p.offload[i] else "none", context=word(CONTEXTS, p.context),
        microbatches=times if piped else 1, accumulate=1 if piped else times, recompute=level, precision=PRECISIONS[int(p.precision[i])],
    )  # fmt: skip


def kept_share(p: Points) -> float:
    """Of the activations that would be kept if nothing were recomputed."""
    whole, least = (memory.activations_of_layer(p.recomputing(n))[0] for n in (NONE, FULL))
    return float(np.clip(1 - p.again[0] / p.own_layers[0] * (1 - least / whole), 0.001, 0.999))


def different(found: Found, count: int) -> list[int]:
    """Places of the quickest plans, no two of which lay the ranks out alike."""
    _, places = np.unique(_keys(found.points), axis=0, return_index=True)
    return sorted(places.tolist())[:count]


def chosen(p: Points) -> Array:
    """How many choices of each plan are not usual, ZeRO-1, 1F1B and 16 bits beside USUAL: what has to be set and measured."""
    beside = [getattr(p, name) != value for name, value in USUAL.items()]
    more = [p.zero > 1, p.low < 2, (p.schedule != ONE) | (p.chunks > 1), (p.recompute != NONE) | (p.again > 0)]
    return sum(beside + more, np.zeros(len(p)))


def simplest(found: Found, near: float) -> int:
    """The place of the plan with the fewest choices, of those no slower than the quickest by so large a part; the quickest of several."""
    close = np.flatnonzero(found.cost.time <= found.cost.time[0] * (1 + near))
    return int(close[np.argmin(chosen(found.points.take(close)))])


def enough(task: Task) -> int | None:
    """The fewest servers on which a plan fits, of SERVERS and of up to 16 between the first of them that do and the one before; None up to MOST."""
    fits = lambda nodes: holds(replace(task, cluster=replace(task.cluster, nodes=nodes)))
    most = next(filter(fits, SERVERS), 0)
    less = max((n for n in SERVERS if n < most), default=0)
    return next(filter(fits, range(most, less, -max((most - less) // 16, 1))[::-1]), None)
