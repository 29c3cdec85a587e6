"""Layers that were measured: how far a law is off at some shapes, and so at the shapes near them.

A law of a few constants is smooth; what libraries do at a shape is not. Where steps were measured, the time of a
layer, and that of the first and last stage's tables, is the law's times a factor: a Gaussian process over the shape
(Rasmussen and Williams 2006, 2.2), a part of which is the shape's own (at the same shape again) and a part of which
its neighbours share. A step's time is nearly linear in the logarithm of each, with the share it has of the step.

layers.toml has such factors of published runs, by framework and generation: of shapes that models of three depths or more
were run with, whose times agree, since only these tell a layer's time from the tables'. `make fit-planner` writes it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from soli.core.tables import table
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
