"""The names and the order of the mesh's axes: the only place that knows them.

A rank's coordinates follow AXES from the slowest to the fastest: neighbours in `tp` are neighbours in
rank. `replicate` and `shard` say where a parameter's gradient is summed: ranks of data parallelism and of
context parallelism alike, so replicate x shard = dp x cp, and cp is the faster part of it. Tensor parallelism in
2D has a grid: `row` runs over the ranks of one column, `tp` over those of one row. Copies of the grid (2.5D) are
data parallelism to a parameter, and so they are part of replicate x shard too. In 3D grids stand in `depth`.
"""

from math import prod

PP, REPLICATE, SHARD, CP, DEPTH, ROW, TP = "pp", "replicate", "shard", "cp", "depth", "row", "tp"
AXES = (PP, REPLICATE, SHARD, DEPTH, ROW, TP)


def coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Where a rank stands on each axis. `sizes` has one entry for each of AXES."""
    where: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, where[axis] = divmod(rank, sizes[axis])
    return {axis: where[axis] for axis in AXES}


def peers(rank: int, axis: str, sizes: dict[str, int]) -> list[int]:
    """The ranks that differ from `rank` on this axis only, in the order of the axis (itself included)."""
    stride = prod(sizes[faster] for faster in AXES[AXES.index(axis) + 1 :])
    first = rank - coordinates(rank, sizes)[axis] * stride
    return [first + i * stride for i in range(sizes[axis])]
