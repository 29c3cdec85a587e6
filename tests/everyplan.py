"""Every plan of a task, made and not bounded: what a search is compared with."""

from __future__ import annotations

import numpy as np

from soli.planner.cost.points import Points
from soli.planner.space import layouts, points_of, rows_of, shards, size, stages
from soli.planner.task import Task


def spaces(task: Task) -> Points:
    """All of them, with each number of layers that can be recomputed where some are and some not."""
    table = stages(task, layouts(task))
    times = np.maximum(table["most"] / table["chunks"], 1).astype(np.int64)
    place = np.repeat(np.arange(size(table)), times)
    table = rows_of(table, place)
    table["again"] = table["again"] + (np.arange(len(place)) - np.repeat(np.cumsum(times) - times, times)) * table["chunks"]
    return points_of(task, shards(task, table)).spread()
