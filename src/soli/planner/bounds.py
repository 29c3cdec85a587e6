"""What no plan with some choices can be below, whatever is chosen of the rest: the cost model itself, asked kindly.

A row of `layouts` lacks stages and shards, one of `stages` lacks shards. What is lacking is taken as what costs least
of each part of a cost, whether one plan can have it all or not.
"""

from dataclasses import replace

import numpy as np

from soli.planner import space
from soli.planner.cost import arithmetic, communication, memory
from soli.planner.cost.constants import Constants, known, repeated, spread_of
from soli.planner.cost.points import FULL, Array, Points
from soli.planner.cost.step import late, running, sums, updating, whole
from soli.planner.offers import chooses
from soli.planner.space import Table, points_of
from soli.planner.task import Task

SLACK = 1 - 1e-9
"""Of sums that are added in another order."""


def constants_of(task: Task) -> Constants:
    """What the search assumes of every plan: arrays [1]."""
    return repeated(known(task.framework, task.cluster.device.generation), 1)


def high(task: Task) -> float:
    """The upper bound of a memory, by what is predicted."""
    return spread_of(task.framework)["memory_high"]


def time_of_layouts(task: Task, table: Table) -> Array:
    """Seconds: nothing is recomputed, waited for, gathered or reduced.

    No stage has fewer layers than one of equal parts but the last, nor less work than the average.
    """
    p, k = _made(task, table)
    least = np.ceil(p.layers / p.pp - 1e-9)  # no plan with the same ranks is below it, whatever its borders
    p = replace(p, longest=least, fewer=np.where(p.pp > 1, least, 0.0))
    run = running(p, k)
    ends = arithmetic.embedding(p, k) + run.tables
    average = p.microbatches * (run.layers / p.own_layers * p.layers + ends) / p.pp
    return SLACK * whole(p, k, np.maximum(run.busy, average))


def time_of_stages(task: Task, table: Table) -> Array:
    """Seconds: nothing is gathered or reduced."""
    p, k = _made(task, table)
    run = running(p, k)
    return SLACK * whole(p, k, run.busy + run.waiting)


def time_of_shards(task: Task, stages: Table, ways: Table) -> Array:
    """Seconds of rows of `stages` with their `space.ways`: exact but where parameters are gathered, behind as much as may be.

    What a stage computes and what its copies send is the same of all ways to shard: the first is computed once a stage, the
    other once for each number of copies.
    """
    run = running(*_made(task, stages))
    each = space.rows_of(ways, np.flatnonzero(np.diff(ways["copies"], prepend=-1)))
    p, k = _made(task, space.sharded(stages, each))
    of, summed = each["stage"], sums(p, k)
    busy, backward = (run.busy + run.waiting)[of], run.layers[of] / 2
    flag = lambda value: np.full(1, float(value))
    learnt = memory.trained(p)
    one = updating(replace(p, zero=flag(0)), k, *learnt)
    parts = np.stack([updating(replace(p, zero=flag(1), offload=flag(moved)), k, *learnt) for moved in (0, 1)])
    found = np.empty((4, 2, len(p)))
    for zero in range(4):
        reduced = late(replace(p, zero=flag(zero)), k, summed, np.inf if zero == 3 else backward)
        gathered = _gathering(replace(p, zero=flag(3)), k, 2 * backward / p.own_layers) if zero == 3 else 0.0
        found[zero] = whole(p, k, busy + gathered + reduced + (parts if zero else one))
    found[3] *= SLACK
    return found[ways["zero"].astype(int), ways["offload"].astype(int), ways["copies"]]


def _gathering(p: Points, k: Constants, layer: Array) -> Array:
    """Seconds that gathers add to a step at least, whose layers take so long without."""
    first, forth, back, last = communication.gathers_of_layer(p, k, *memory.of_layer(p))
    sent = forth + back + (first + last - forth - back) / p.microbatches
    return p.microbatches * (p.own_layers - p.fewer) * np.maximum(sent - (1 + k.hidden_gathers) * layer, 0.0)


def memory_of_layouts(task: Task, table: Table) -> Array:
    """Bytes: all is recomputed, one microbatch is under way, and states are cut over all ranks."""
    p, k = _made(task, table)
    p = _sharded(task, replace(p, recompute=np.full(len(p), FULL), global_batch=p.dp * p.microbatch))
    return SLACK * high(task) * np.where(p.pp > 1, memory.average(p, k), memory.peak(p, k, bare=True))


def memory_of_stages(task: Task, table: Table) -> Array:
    """Bytes: states are cut over all ranks, and as many layers are recomputed as may be; what is gathered takes no place."""
    p, k = _made(task, {**table, "again": table["most"]})
    return SLACK * high(task) * memory.peak(_sharded(task, p), k, bare=True)


def _sharded(task: Task, p: Points) -> Points:
    """Under ZeRO-3, with the optimizer's state in the host's memory if it can."""
    return replace(p, zero=np.full(len(p), 3.0), offload=np.full(len(p), float(chooses(task.framework, "offload"))))


def _made(task: Task, table: Table) -> tuple[Points, Constants]:
    return points_of(task, table), constants_of(task)
