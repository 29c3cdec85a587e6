"""Every plan of a task, in three steps: how its ranks lie, in what order its stages run, and what ZeRO shards.

    layouts   tp, cp, pp, dp, ep whose ranks the model can be cut by; tp's line, grid or cube; sp; context; microbatch; precision
    stages    schedule and chunks; recompute: of all layers, or of how many        what can be chosen of a layout depends on nothing that follows
    shards    zero; replicate (HSDP); offload of the optimizer's state

A table has a column for each choice and a row a plan. A search goes down from layouts and leaves out what cannot be
the best.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from soli.planner.cost import borders, points
from soli.planner.cost.grids import shapes as shapes_of
from soli.planner.cost.points import Array, Points, of_device
from soli.planner.cost.programs import of_program
from soli.planner.cost.states import of_states
from soli.planner.legality import divisors
from soli.planner.offers import LEVELS, NAMED, SOLI, SOME, chooses
from soli.planner.spellings import FSDP
from soli.planner.task import Task

Table = dict[str, Array]
Places = NDArray[np.int64]

WIDEST = {"tp": 64, "cp": 64}
MICROBATCHES = (1, 2, 4, 8, 16, 32)  # sequences of one
CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
PLACED = ("tp", "cp", "pp", "dp", "ep", "tensor", "rows")
SHARDING = ("zero", "replicate", "offload")
USUAL = {"schedule": points.ONE, "chunks": 1.0, "recompute": points.NONE, "zero": 0.0, "offload": 0.0}
"""What a layout is taken to have until it is chosen."""


def size(table: Table) -> int:
    """Rows."""
    return len(table["tp"])


def rows_of(table: Table, places: Places | NDArray[np.bool_]) -> Table:
    """Some rows."""
    return {name: column[places] for name, column in table.items()}


def distinct(rows: Array) -> tuple[Places, Places]:
    """Of rows [n, k] of whole numbers those that differ, in order, and which of them each is. As one number a row: by columns it took a tenth of a search."""
    whole = rows.astype(np.int64)
    sizes = tuple((whole.max(axis=0, initial=0) + 1).tolist())
    _, first, place = np.unique(np.ravel_multi_index(tuple(whole.T), sizes), return_index=True, return_inverse=True)
    return whole[first], place


# --- layouts ----------------------------------------------------------------------------------------------


def meshes(task: Task) -> NDArray[np.int64]:
    """[n, PLACED]: ranks that are the devices together, by which the model can be cut, and as fixed."""
    model, n, fixed = task.model, task.cluster.size, dict(task.fixed or {})
    fits = lambda t: model.heads % t == 0 and (model.kv_heads % t == 0 or t % model.kv_heads == 0)
    grids = chooses(task.framework, "grids") and not model.experts
    shapes = lambda tp: [(points.LINE, 1, tp), *(shapes_of(tp) if grids else [])]
    shares = divisors(model.experts) if model.experts and chooses(task.framework, "ep") else [1]
    found = [
        (tp, cp, pp, n // tp // cp // pp, ep, tensor, rows)
        for tp in divisors(n)
        if tp <= WIDEST["tp"]
        for tensor, rows, columns in shapes(tp)
        if fits(columns) and (tensor == points.GRID or "rows" not in fixed)  # a line and a cube have them too
        for cp in divisors(n // tp)
        if cp <= WIDEST["cp"] and task.seq % cp == 0
        for pp in divisors(n // tp // cp)
        if pp <= model.layers
        for ep in shares
        # whole groups of those that have the same part of tp; or all of them, and some of tp
        if (copies := n // tp // pp) % ep == 0 or (ep % copies == 0 and tp % (ep // copies) == 0)
    ]
    table = np.array(found, dtype=np.int64).reshape(-1, len(PLACED))
    for column, name in enumerate(PLACED):
        if name in fixed:
            table = table[table[:, column] == fixed[name]]
    return table


def layouts(task: Task) -> Table:
    """How the ranks can lie, with sp, the microbatch and what products are computed in."""
    fixed = dict(task.fixed or {})
    ways = (points.RING, points.ULYSSES) if chooses(task.framework, "ulysses") else (points.RING,)
    asked = tuple(float(points.PRECISIONS.index(name)) for name in task.precisions)
    values = {"sp": (0.0, 1.0) if chooses(task.framework, "sp") else (0.0,), "context": ways, "microbatch": MICROBATCHES, "precision": asked}
    if "microbatches" in fixed:
        values["microbatch"] = (1.0,)  # what they leave
    axes = [np.array([fixed[name]] if name in fixed else own, dtype=float) for name, own in values.items()]
    inner = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])
    mesh = meshes(task)
    mesh = mesh[mesh[:, 3] <= task.batch].T.astype(float)
    whole = np.concatenate([np.repeat(mesh, inner.shape[1], axis=1), np.tile(inner, mesh.shape[1])])
    table = dict(zip((*PLACED, *values), whole, strict=True))
    tp, rows, cp, pp, dp, tensor = (table[name] for name in ("tp", "rows", "cp", "pp", "dp", "tensor"))
    cube, ring = tensor == points.CUBE, table["context"] == points.RING
    parts = fixed.get("microbatches")
    if parts and "microbatch" not in fixed:
        table["microbatch"] = np.ceil(task.batch / (dp * parts))
    taken = dp * table["microbatch"]
    kept = taken < 2 * task.batch if task.framework == SOLI else taken <= task.batch
    if parts:
        kept &= np.ceil(task.batch / taken) == parts
    if task.framework == SOLI:  # a replica's sequences are cut into parts that are as equal as can be
        table["microbatch"] = np.ceil(np.ceil(task.batch / dp) / np.ceil(task.batch / taken))
    kept &= table["microbatch"] == fixed.get("microbatch", table["microbatch"])  # what is cut otherwise is not what was fixed
    kept &= table["microbatch"] % rows ** np.where(cube, 2, 1) == 0
    kept &= (table["sp"] == 0) | ((tensor == points.LINE) & (tp > 1) & (task.seq / cp % tp == 0))
    kept &= ring | ((cp > 1) & ((task.model.heads / np.where(cube, rows, tp / rows)) % cp == 0))
    if not chooses(task.framework, "ring"):
        kept &= (cp == 1) | ~ring
    if not chooses(task.framework, "crossed"):
        kept &= (cp == 1) | (tp * pp == 1)
    if task.framework != SOLI:  # whose batches need not be equal
        kept &= task.batch % taken == 0
    if not chooses(task.framework, "uneven"):
        kept &= task.model.layers % pp == 0
    return rows_of(table, kept)


# --- what is chosen of each -------------------------------------------------------------------------------


def stages(task: Task, table: Table) -> Table:
    """Each row with each order of its stages, and what is recomputed of them.

    Where some layers are, and some not, how many is chosen later, between `again` and `most`.
    """
    place, order = np.nonzero(_ordered(task, table))
    orders = _orders(task)[order].T
    found = {**rows_of(table, place), "schedule": orders[0], "chunks": orders[1]}
    levels = _levels(task)
    whole = {name: np.repeat(column, len(levels)) for name, column in found.items()}
    whole |= {"recompute": np.tile(np.array(levels), len(place)), "again": np.zeros(len(place) * len(levels))}
    whole["most"] = whole["again"]
    own = _budgets(task, found)
    mixed = rows_of(found, own > 0)
    mixed |= {"recompute": np.full(size(mixed), points.NONE), "again": mixed["chunks"], "most": own[own > 0] * mixed["chunks"]}
    return {name: np.concatenate([column, mixed[name]]) for name, column in whole.items()}


def shards(task: Task, table: Table) -> Table:
    """Each row with each way to shard its states."""
    return sharded(table, ways(task, table))


def sharded(table: Table, chosen: Table) -> Table:
    """Rows with some of their ways."""
    return {**rows_of(table, chosen["stage"].astype(np.int64)), **chosen}


def ways(task: Task, table: Table) -> Table:
    """Of each row each way to shard its states. `stage`: which row it is of; `copies`: the how many-th (stage, replicate)."""
    every, first, count, kind = _sharded(task, table)
    place = np.repeat(np.arange(size(table)), count[kind])
    within = np.arange(len(place)) - np.repeat(np.cumsum(count[kind]) - count[kind], count[kind])
    found = dict(zip(SHARDING, every[first[kind][place] + within].T, strict=True))
    begins = (np.diff(place, prepend=-1) != 0) | (np.diff(found["replicate"], prepend=0.0) != 0)
    return {**found, "stage": place, "copies": np.cumsum(begins) - 1}


def counted(task: Task) -> int:
    """Plans of the space, without making them."""
    table = layouts(task)
    if not size(table):
        return 0
    _, _, count, kind = _sharded(task, table)
    place, order = np.nonzero(_ordered(task, table))
    _, chunks = _orders(task)[order].T
    mixes = _budgets(task, {**rows_of(table, place), "chunks": chunks})
    return int(((mixes + len(_levels(task))) * count[kind][place]).sum())


def _levels(task: Task) -> tuple[float, ...]:
    """What can be recomputed of all layers alike."""
    return tuple(level for level in LEVELS.values() if (task.fixed or {}).get("recompute") in (None, level))


def _budgets(task: Task, table: Table) -> Places:
    """How many layers of each stage can be recomputed whole where some are not; as many numbers of them."""
    if not chooses(task.framework, "some") or (task.fixed or {}).get("recompute", SOME) != SOME:
        return np.zeros(size(table), dtype=np.int64)
    return np.ceil(task.model.layers / (table["pp"] * table["chunks"])).astype(np.int64) - 1


def _orders(task: Task) -> Array:
    """[n, 2]: schedule and stages of a rank. What a plan calls chunks is 1 in the schedules that lie in a V."""
    said = dict(task.fixed or {})
    has = lambda schedule: schedule == points.ONE or chooses(task.framework, NAMED[schedule])
    found = [(points.ONE, 1.0), *((points.INTERLEAVED, float(n)) for n in CHUNKS[1:])]
    if "chunks" in said:
        found = [(points.ONE if said["chunks"] == 1 else points.INTERLEAVED, said["chunks"])]
    if said.get("chunks", 1) == 1:
        found += [(points.GPIPE, 1.0), (points.ZBH1, 1.0), (points.ZBV, 2.0), (points.DUALPIPEV, 2.0)]
    kept = [(schedule, n) for schedule, n in found if said.get("schedule", schedule) == schedule and has(schedule)]
    return np.array(kept, dtype=float).reshape(-1, 2)


def _ordered(task: Task, table: Table) -> NDArray[np.bool_]:
    """[rows, orders]: which orders of its stages a row can have."""
    column = {name: values[:, None] for name, values in table.items()}
    pp = column["pp"]
    schedule, chunks = _orders(task).T[:, None, :]
    times = np.ceil(task.batch / (column["dp"] * column["microbatch"]))
    kept = (pp * chunks <= task.model.layers) & ((schedule == points.ONE) | (pp > 1))
    kept &= ~np.isin(schedule, (points.INTERLEAVED, points.ZBH1)) | (times % pp == 0)
    kept &= (schedule < points.ZBV) | (times >= 2 * pp)
    kept &= ~np.isin(schedule, (points.ZBH1, points.ZBV, points.DUALPIPEV)) | (column["tensor"] == points.LINE)
    if not chooses(task.framework, "uneven"):
        kept &= task.model.layers % (pp * chunks) == 0
    return np.asarray(kept)


def _sharded(task: Task, table: Table) -> tuple[Array, Places, Places, Places]:
    """All ways to shard; the first and the number of those of each kind of row; the rows' kinds."""
    spread = points_of(task, table).expert_replicas if task.model.experts else np.zeros(size(table))
    kinds, kind = distinct(np.stack([table["dp"], table["cp"], spread, table["pp"] > 1], axis=1))
    ways = [_ways(*one, task.framework, tuple((task.fixed or {}).items())) for one in kinds.tolist()]
    count = np.array([len(one) for one in ways], dtype=np.int64)
    return np.concatenate(ways), np.cumsum(count) - count, count, kind


@cache
def _ways(dp: int, cp: int, experts: int, piped: int, framework: str, fixed: tuple[tuple[str, float], ...]) -> Array:
    """[n, SHARDING] over so many ranks, of which `experts` have the same ones. A group of HSDP has two ranks or more."""
    said, has = dict(fixed), {name: chooses(framework, name) for name in ("offload", "deep", "copies")}
    found = [
        (zero, copies, offload)
        for copies in divisors(dp)
        for zero in range(min(copies - 1, 1), 4)  # copies are of what is sharded
        for offload in ((0, 1) if zero and has["offload"] else (0,))
        if (has["deep"] or zero < 2 or not piped) and (has["copies"] or copies == 1 or zero == 3)
        if (zero == 0 or dp * cp > copies) and experts % copies == 0
        if all(said.get(name, n) == n for name, n in zip(SHARDING, (zero, copies, offload), strict=True))
    ]
    return np.array(found, dtype=float).reshape(-1, len(SHARDING))


# --- points -----------------------------------------------------------------------------------------------


@points.once
def _alike(task: Task) -> Table:
    """Fields of points that all plans have alike, or that are not chosen yet: [1]."""
    same = {
        **points.UNSAID, **task.model.point(), **of_device(task.cluster.device, task.precisions[0]), "seq": task.seq,
        **of_program(task.framework, task.cluster.device.generation),
        "global_batch": task.batch, "logged": 0.0, **of_states(task.framework), **USUAL,
    }  # fmt: skip
    same["windowed"] *= chooses(task.framework, "windows")
    return {name: np.full(1, value, dtype=float) for name, value in same.items()}


def points_of(task: Task, table: Mapping[str, Array]) -> Points:
    """Rows as points; what is not chosen yet as USUAL; the borders of a pipeline as the program places them."""
    same = usual = _alike(task)
    for name, piped in product(task.precisions, (False, True)):
        own = of_device(task.cluster.device, name) | of_states(task.framework, name, piped)
        if other := {key: value for key, value in own.items() if value != usual[key]}:
            chosen = (table["precision"] == points.PRECISIONS.index(name)) & ((table["pp"] > 1) == piped)
            same = same | {key: np.where(chosen, value, same[key]) for key, value in other.items()}
    found = Points(**{f.name: table[f.name] if f.name in table else same[f.name] for f in fields(Points)})
    if task.framework == FSDP and (some := found.recompute == points.SELECTIVE).any():  # every second product, as torchtitan's default
        again = np.where(some, found.own_layers / (1 if task.model.experts else 2), found.again)
        found = replace(found, recompute=np.where(some, points.NONE, found.recompute), again=again, by_product=some.astype(float))
    return borders.placed(found) if chooses(task.framework, "uneven") else found
