"""An all_reduce inside a server, as nccl-tests measured it: not the plain latency and bandwidth of a ring.

hardware/nccl_allreduce.csv has 2 to 8 A100 on NVLink and 1 MB to 1 GB (vTrain's repository, MIT). Between 1 and 16 MB,
where tensor parallelism sums its activations, a line through latency and bandwidth is up to 23% off, and the latency
grows faster than the logarithm of the ranks.

A device's links differ in bandwidth L and latency l. With no other scale than these, seconds are l F(n, S / (L l)),
and F is read off the table. F never falls, and never grows faster than its argument: no better link is slower.
"""

import csv
from functools import cache
from importlib.resources import files

import numpy as np

from soli.planner.cost.points import Array

RANKS = (2, 4, 8)
LINK, LATENCY = 300e9 * 0.75, 6e-6 * 2.0
"""Of the devices that were measured, bytes/s and seconds: an A100's, with the usual shares (meanings.toml)."""


@cache
def table() -> tuple[Array, Array]:
    """Logarithms of S / (L l), evenly spaced [sizes], and of F [ranks, sizes]."""
    text = files("soli.planner.hardware").joinpath("nccl_allreduce.csv").read_text(encoding="utf-8")
    rows = [row for row in csv.DictReader(text.splitlines()) if row["gpu"] == "A100"]
    took = {(int(row["n_gpus"]), float(row["bytes"])): float(row["time_us"]) * 1e-6 for row in rows}
    sizes = sorted({size for _, size in took if np.log2(size).is_integer()})
    x = np.log(np.array(sizes) / (LINK * LATENCY))
    y = np.log(np.array([[took[n, size] for size in sizes] for n in RANKS]) / LATENCY)
    for i in range(1, len(sizes)):
        y[:, i] = np.clip(y[:, i], y[:, i - 1], y[:, i - 1] + x[i] - x[i - 1])
    return x, y


def all_reduce(size: Array, n: Array, link: Array, latency: Array) -> Array:
    """Seconds for `size` bytes over n ranks of a server.

    Outside the table: the latency of its smallest size, the bandwidth of its largest; more than 8 ranks wait for the
    steps of a tree and move (n - 1) / n as a ring does.
    """
    x, y = table()
    at = np.log(np.maximum(size, 1.0) / (link * latency))
    beyond = np.maximum(at - x[-1], 0.0)
    column, part = _place(at, x[0], x[1] - x[0], len(x))
    rank = np.log2(np.maximum(n, 2.0))
    row, share = _place(rank, 1.0, 1.0, len(RANKS))
    place, values = row * len(x) + column, y.ravel()
    between = lambda at: values.take(at) * (1 - part) + values.take(at + 1) * part
    lower, upper = between(place), between(place + len(x))
    found = np.exp(lower * (1 - share) + upper * share + beyond) * np.where(n > 8, (n - 1) / n * 8 / 7, 1.0)
    return np.where(n > 1, latency * (found + 2 * np.maximum(rank - 3.0, 0.0)), 0.0)


def _place(at: Array, first: float, step: float, count: int) -> tuple[np.ndarray, Array]:
    """Between which of `count` even places, and how far on."""
    moved = np.clip((at - first) / step, 0.0, count - 1.0)
    low = np.minimum(moved.astype(np.int64), count - 2)
    return low, moved - low
