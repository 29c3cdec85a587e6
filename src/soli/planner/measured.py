"""Layers that were measured: how far a law is off at some shapes, and so at the shapes near them.

A law of a few constants is smooth; what libraries do at a shape is not. Where steps were measured, the time of a
layer, and that of the first and last stage's tables, is the law's times a factor: a Gaussian process over the shape
(Rasmussen and Williams 2006, 2.2), a part of which is the shape's own (at the same shape again) and a part of which
its neighbours share. A step's time is nearly linear in the logarithm of each, with the share it has of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soli.planner.cost.constants import Constants
from soli.planner.cost.points import Array, Points
from soli.planner.cost.step import Step, step

OWN, SHARED = 0.15, 0.10
"""Standard deviations of a factor's logarithm: of a shape by itself, and with its neighbours."""
REACH = 1.0
"""How far neighbours reach: in factors of e of each size."""
NOISE = 0.01
"""Standard deviation of a measured step's logarithm."""
ROUNDS = 4


@dataclass(frozen=True)
class Factors:
    """What measured rows say of layers and of tables."""

    shapes: Array  # [n, 5] logarithms, of the measured rows
    shares: Array  # [n, 2] of their steps: layers and tables
    weights: Array  # [n] what the process gives each

    def at(self, points: Points) -> tuple[Array, Array]:
        """Factors of a layer's and of a table's time at each point."""
        near = covariance(shapes_of(points), self.shapes)
        layers, tables = (np.exp(near @ (self.weights * share)) for share in self.shares.T)
        return layers, tables


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
    near = covariance(shapes, shapes)
    layers = tables = np.ones(len(points))
    for _ in range(ROUNDS):  # Gauss-Newton: the shares change with the factors
        cost = step(points, constants, layers, tables)
        shares = np.stack([cost.layers / cost.time, cost.tables / cost.time], axis=1)
        assumed = shares[:, 0] * np.log(layers) + shares[:, 1] * np.log(tables)
        off = np.log(times / cost.time) + assumed
        gram = near * (shares @ shares.T) + NOISE**2 * np.eye(len(points))
        found = Factors(shapes, shares, np.asarray(np.linalg.solve(gram, off), dtype=np.float64))
        layers, tables = found.at(points)
    return found


def step_with(points: Points, constants: Constants, factors: Factors | None) -> Step:
    """A step, with what was measured."""
    return step(points, constants) if factors is None else step(points, constants, *factors.at(points))
