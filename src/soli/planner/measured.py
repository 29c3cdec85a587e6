"""Layers that were measured: how far a law is off at some shapes, and so at the shapes near them.

A law of a few constants is smooth; what libraries do at a shape is not. Where steps were measured, the time of a
layer, and that of the first and last stage's tables, is the law's times a factor: a Gaussian process over the shape
(Rasmussen and Williams 2006, 2.2), a part of which is the shape's own (at the same shape again) and a part of which
its neighbours share. A step's time is nearly linear in the logarithm of each, with the share it has of the step.

layers.toml has such factors of published runs, by framework and generation: of shapes that models of three depths or more
were run with, whose times agree, since only these tell a layer's time from the tables'. `make fit-planner` writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from soli.core.tables import table
from soli.planner.cost.constants import MEANINGS, NAMES, Constants, repeated
from soli.planner.cost.points import Array, Points
from soli.planner.cost.step import Step, step

# Fit constants to measured steps: bounded least squares of logarithms, held to the set that they follow.
#
# A constant that the rows do not show stays where its parent has it: each is drawn back with the weight of one row that
# is off by as much as PRIOR allows. Rows that no law explains count less (soft L1), and peaks least, as a logarithm does:
# eight of one source that take twice what is counted had all of torch's FSDP take 2 GB more. Used for published tables
# (benchmarks/planner.py) and for what a machine measures of itself.


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


OWN, SHARED = 0.15, 0.10
"""Standard deviations of a factor's logarithm: of a shape by itself, and with its neighbours."""
REACH = 1.0
"""How far neighbours reach: in factors of e of each size."""
NOISE = 0.01
"""Standard deviation of a measured step's logarithm."""
ROUNDS = 4
NORMAL = 1.64
"""Deviations that leave 5% on either side."""


@dataclass(frozen=True)
class Factors:
    """What measured rows say of layers and of tables."""

    shapes: Array  # [n, 5] logarithms, of the measured rows
    shares: Array  # [n, 2] of their steps: layers and tables
    weights: Array  # [n] what the process gives each
    inverse: NDArray[np.float64]  # [n, n] of their covariance

    def at(self, points: Points) -> tuple[Array, Array]:
        """Factors of a layer's and of a table's time at each point."""
        near = covariance(shapes_of(points), self.shapes)
        layers, tables = (np.exp(near @ (self.weights * share)) for share in self.shares.T)
        return layers, tables


def between(factors: Factors, points: Points, cost: Step) -> tuple[Array, Array]:
    """Measured by predicted: 5% are expected below the first, 5% above the second. `cost`: with these factors.

    The process' own deviation at each point, in multiples that hold what each measured row is off by where the others
    predict it (Rasmussen and Williams 2006, 5.4.2). The law was fitted to them too, and what shapes do is not normal:
    1.64 would be too few.
    """
    shares = np.stack([cost.layers / cost.time, cost.tables / cost.time], axis=1)
    near = covariance(shapes_of(points), factors.shapes) * (shares @ factors.shares.T)
    own = (OWN**2 + SHARED**2) * (shares**2).sum(1) + NOISE**2
    deviation = np.sqrt(np.maximum(own - np.einsum("ij,jk,ik->i", near, factors.inverse, near), NOISE**2))
    left_out = factors.weights / np.sqrt(np.diag(factors.inverse))
    level = 0.05 * (1 - 1 / len(left_out))
    low, high = np.quantile(left_out, [level, 1 - level])
    return np.exp(min(low, -NORMAL) * deviation), np.exp(max(high, NORMAL) * deviation)


def shapes_of(p: Points) -> Array:
    """[N, 5]: what a rank's products have for sizes, and how many ranks share them."""
    return np.log(np.stack([p.tokens, p.hidden, p.attention_width, p.ffn * (1 + p.gated), p.tp], axis=1))


def covariance(a: Array, b: Array) -> NDArray[np.float64]:
    """[len(a), len(b)] of factors' logarithms."""
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
    return SHARED**2 * np.exp(-distance / (2 * REACH**2)) + OWN**2 * (distance < 1e-12)


def learn(points: Points, constants: Constants, times: Array) -> Factors:
    """Factors of which these measured steps [N], seconds, are made."""
    shapes = shapes_of(points)
    layers = tables = np.ones(len(points))
    for _ in range(ROUNDS):  # Gauss-Newton: the shares change with the factors
        cost = step(points, constants, layers, tables)
        shares = np.stack([cost.layers / cost.time, cost.tables / cost.time], axis=1)
        assumed = shares[:, 0] * np.log(layers) + shares[:, 1] * np.log(tables)
        found = process(shapes, shares, np.log(times / cost.time) + assumed)
        layers, tables = found.at(points)
    return found


def process(shapes: Array, shares: Array, off: Array) -> Factors:
    """What steps say that are off by this much, as a logarithm."""
    gram = covariance(shapes, shapes) * (shares @ shares.T) + NOISE**2 * np.eye(len(off))
    inverse = np.asarray(np.linalg.inv(gram), dtype=np.float64)
    return Factors(shapes, shares, inverse @ off, inverse)


def factors_of(layers: Array) -> Factors:
    """Of a table [n, 7]: the sizes of a shape, and the factors of its layers' and its tables' time."""
    shapes, off = np.log(np.tile(layers[:, :5], (2, 1))), np.log(layers[:, 5:]).T.ravel()
    return process(shapes, np.repeat(np.eye(2), len(layers), axis=0), off)


@cache
def published(framework: str, generation: str) -> Factors | None:
    """Of layers.toml; None where no published run says them."""
    said = table(__package__, "layers.toml").get(f"{framework} {generation}")
    return factors_of(np.array(said["layers"], dtype=np.float64)) if said else None
