"""Fit constants to measured steps: bounded least squares of logarithms, held to the set that they follow.

A constant that the rows do not show stays where its parent has it: each is drawn back with the weight of one row that
is off by as much as PRIOR allows. Rows that no law explains count less (soft L1), and peaks least, as a logarithm does:
eight of one source that take twice what is counted had all of torch's FSDP take 2 GB more. Used for published tables
(benchmarks/planner.py) and for what a machine measures of itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from soli.planner.cost.constants import MEANINGS, NAMES, repeated
from soli.planner.cost.points import Array, Points
from soli.planner.cost.step import Step, step

TIME_ERROR, MEMORY_ERROR = 0.05, 0.05
"""The relative error at which a row starts to count less."""
PRIOR = 0.6
"""How far, as a logarithm, a constant may be from its parent's at the price of one such error."""

BOUNDS = np.array([[np.log(max(m.low, 1e-3 * m.high)), np.log(m.high)] for m in MEANINGS.values()])


@dataclass(frozen=True)
class Measured:
    """What is known of steps: arrays [N], nan where nothing is."""

    times: Array  # seconds
    memories: Array  # bytes at the peak
    states: Array  # bytes between steps
    fits: Array  # 1: it ran; 0: it ran out of memory


def fit(points: Points, measured: Measured, parent: Mapping[str, float], weights: Array | None = None) -> dict[str, float]:
    """Constants for which the step model gives what was measured. A run whose memory nobody said still fitted.

    `parent`: where they start and what holds them. `weights` [N]: of rows.
    """
    low, high = BOUNDS.T
    start = np.clip(logs(parent), low + 1e-9, high - 1e-9)
    scale = np.sqrt(np.ones(len(points)) if weights is None else weights)

    def residuals(found: NDArray[np.float64]) -> NDArray[np.float64]:
        cost = step(points, repeated(dict(zip(NAMES, np.exp(found), strict=True)), len(points)))
        return np.concatenate([(residuals_of(cost, points, measured) * scale).ravel(), (found - start) / PRIOR])

    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", x_scale=0.3, max_nfev=60)
    return {name: float(f"{value:.5g}") for name, value in zip(NAMES, np.exp(found.x), strict=True)}


def residuals_of(cost: Step, points: Points, measured: Measured) -> Array:
    """[5, N] of each row, in errors at which it starts to count less: its time, memory and states; what is said to fit
    and not to fit. 0 where nothing is known."""
    over = np.log(cost.memory / points.capacity)
    sized = np.isfinite(measured.memories)
    off = [
        np.log(cost.time / measured.times) / TIME_ERROR, 2 * np.arcsinh(np.log(cost.read / measured.memories) / MEMORY_ERROR / 2),
        np.log(cost.states / measured.states) / MEMORY_ERROR, np.where((measured.fits == 1) & ~sized, np.maximum(over, 0), 0.0) / MEMORY_ERROR,
        np.where(measured.fits == 0, np.minimum(over, 0), 0.0) / MEMORY_ERROR,
    ]  # fmt: skip
    return np.nan_to_num(np.stack(off), nan=0.0)


def logs(of: Mapping[str, float]) -> NDArray[np.float64]:
    """Constants as the fit varies them."""
    return np.clip(np.log([max(of[name], 1e-9) for name in NAMES]), BOUNDS[:, 0], BOUNDS[:, 1])
