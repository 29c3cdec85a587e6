"""Sources that nobody had looked at: what was predicted of their runs before anything was changed for them (unseen.csv).

The tables in published/ were in sight when the formulas were made, also where constants are fitted without them. These runs were not: `table`: the
ninth to the twelfth and the fourteenth to the eighteenth time that such sources were gathered (docs/log.md). The file leaves out runs that are in published/ since,
and of the last five those that their reader had misread, or that were here before.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "unseen.csv"


@cache
def rows() -> list[dict[str, str]]:
    """The file's."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ratios(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Sources, and by how much the time or memory (`kind`) of their runs was predicted too large, of those whose own is known."""
    measured, predicted = {"time": ("time_s", "predicted_time_s"), "memory": ("memory_gb", "predicted_memory_gb")}[kind]
    known = [row for row in rows() if row[measured] and row[predicted]]
    return (
        np.array([row["source"] for row in known]),
        np.array([float(row[predicted]) / float(row[measured]) for row in known]),
    )


def told(spread: dict[str, float]) -> dict[str, dict[str, float]]:
    """Of times and memories: how many, of how many sources, how far off, and the share inside the interval of today."""
    found = {}
    for kind in ("time", "memory"):
        names, ratio = ratios(kind)
        off, inside = np.abs(ratio - 1), (spread[f"{kind}_low"] <= 1 / ratio) & (1 / ratio <= spread[f"{kind}_high"])
        found[kind] = {
            "rows": len(ratio), "sources": len(set(names)), "mean": float(off.mean()), "median": float(np.median(off)),
            "p90": float(np.quantile(off, 0.9)), "bias": float(ratio.mean() - 1), "inside": float(inside.mean()),
            "inside by source": float(np.mean([inside[names == name].mean() for name in sorted(set(names))])),
        }  # fmt: skip
    return found


def choices() -> list[int]:
    """Runs that ran, of these those that were called infeasible; that ran out of memory, of these those called feasible."""
    said = {ran: [row["feasible"] for row in rows() if row["ran"] == ran] for ran in ("true", "false")}
    return [len(said["true"]), said["true"].count("false"), len(said["false"]), said["false"].count("true")]
