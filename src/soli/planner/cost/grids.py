"""What products cost whose matrices are cut both ways, over a grid (2D) or a cube (3D) of the ranks of tp.

R x C ranks of a grid (`rows`, `columns`), q^3 of a cube; a product [T, K] x [K, N]; docs/communication.md, 4, has the
derivation, and what tests hold it to:

    2D    in panels of K, of which x's are broadcast over C and W's over R; each gradient alike       (arXiv 2104.05343)
    3D    x and W are gathered, y is scattered; y's gradient gathered, x and W twice more               (arXiv 2105.14450)

A broadcast of S bytes takes as long as a gather that ends in S n/(n-1): as much goes over each link (NCCL's rings). What
2.5D does is 2D with more of dp: the same ranks, which is why no plan here is called so.
"""

from collections.abc import Iterator

import numpy as np

from soli.planner.cost import communication
from soli.planner.cost.constants import Constants
from soli.planner.cost.points import CUBE, GRID, Array, Points


def panels(p: Points) -> Array:
    """Pieces in which a product's sum runs: one for every pair of a row and a column of ranks that share a part of it."""
    return np.where(p.tensor == GRID, np.where(p.rows == p.columns, p.columns, p.rows + p.columns - 1), 1.0)


def products(p: Points) -> Iterator[tuple[Array, Array, Array, bool]]:
    """A layer's products as soli computes them, q, k and v apart: summed size, width, how many; whether it ends a pair.

    On a cube the tokens and the sizes change axes from one to the next.
    """
    width, one = p.attention_width, np.ones_like(p.tp)
    yield p.hidden, width, one, False
    yield p.hidden, p.kv_heads * p.head_size, 2 * one, False
    yield width, p.hidden, one, True
    yield p.hidden, p.ffn, p.matrices - 1, False
    yield p.ffn, p.hidden, one, True


def of_layer(p: Points, k: Constants) -> tuple[Array, Array]:
    """Seconds of the collectives of a layer's products and norms, forward and backward; 0 where tp is one line."""
    forward, backward = np.zeros_like(p.tp), np.zeros_like(p.tp)
    for kind, of in ((GRID, _of_grid), (CUBE, _of_cube)):
        at = np.flatnonzero(np.broadcast_to(p.tensor == kind, len(p)))
        some, constants = p.take(at), k.take(at)
        # a norm's, a token: of what it reads, then of what the mean leaves
        sums = some.tokens * 4.0 * some.columns / some.tp
        norms = 4 * communication.all_reduce(some, constants, sums, some.columns, np.ones_like(some.tp))
        one, other = of(some, constants)
        forward[at], backward[at] = one + norms, other + norms
    return forward, backward


def calls(p: Points) -> Array:
    """Collectives that a layer's forward starts."""
    return np.where(p.tensor == 0, 0.0, np.where(p.tensor == GRID, 2 * panels(p), 3.0) * (4 + p.matrices) + 4)


def beside(p: Points) -> Array:
    """Bytes that the largest product has gathered: two panels of x and of W, or on a cube all that it reads and makes."""
    most = np.zeros_like(p.tp)
    for summed, width, _, _ in products(p):
        some = 2 * (p.tokens * summed / p.rows + summed * width / p.columns) / panels(p)
        whole = (p.tokens * (summed + width) + summed * width) / p.columns**2
        most = np.maximum(most, p.number * np.where(p.tensor == GRID, some, whole))
    return np.where(p.tensor == 0, 0.0, most)


def _of_grid(p: Points, k: Constants) -> tuple[Array, Array]:
    """Seconds in which panels of each product's x, and of its W, are broadcast."""
    pieces, one, spent = panels(p), np.ones_like(p.tp), np.zeros_like(p.tp)
    for summed, width, count, _ in products(p):
        x = _broadcast(p, k, p.number * p.tokens / p.rows * summed / pieces, p.columns, one)
        w = _broadcast(p, k, p.number * width / p.columns * summed / pieces, p.rows, p.columns)
        spent = spent + count * pieces * (x + w)
    return spent, 2 * spent


def _of_cube(p: Points, k: Constants) -> tuple[Array, Array]:
    """Seconds in which each product's x and W are gathered, and its y is scattered."""
    q, one, forward, backward = p.columns, np.ones_like(p.tp), np.zeros_like(p.tp), np.zeros_like(p.tp)
    for summed, width, count, ends in products(p):
        over_x, over_y = (q, one) if ends else (one, q)
        x = communication.gather(p, k, p.number * p.tokens * summed / q**2, q, over_x)
        w = communication.gather(p, k, p.number * summed * width / q**2, q, q**2)
        y = communication.gather(p, k, p.number * p.tokens * width / q**2, q, over_y)
        forward, backward = forward + count * (x + w + y), backward + count * (2 * (x + w) + y)
    return forward, backward


def _broadcast(p: Points, k: Constants, size: Array, n: Array, inner: Array) -> Array:
    return communication.gather(p, k, size * n / np.maximum(n - 1, 1.0), n, inner)


def shapes(tp: int) -> list[tuple[float, int, int]]:
    """The grids and cubes that tp ranks can be: GRID or CUBE, rows, columns."""
    grids = [(GRID, rows, tp // rows) for rows in range(2, tp // 2 + 1) if tp % rows == 0]
    edge = round(tp ** (1 / 3))
    return [*grids, *([(CUBE, edge, edge)] if edge > 1 and edge**3 == tp else [])]
