"""How long a rank waits under schedules that are not 1F1B, and what it keeps, of stages that are alike.

F, B and W: seconds of a stage's forward, of its gradients of inputs and of those of weights, p ranks.

    gpipe       (p - 1)(F + B + W)                        keeps all m (arXiv 1811.06965)
    zbh1        (p - 1)(F + B - W)                        keeps p, on every rank (arXiv 2401.10241, table 1)
    zbh2        (p - 1)(F + B - 2 W)                      keeps 2 p - 1 (ibid.; ZB-2p nearly)
    zbv         (p - 1) max(B, 2 (B - W))                 keeps p (arXiv 2405.15362: the same memory as 1F1B's)
    dualpipev   (p - 1) max(F + B - W, 2 B - W - F/(p - 1))    keeps p + 1/2

The last two have two stages a rank, of half the layers, in a V: the first and the last of all are on one rank. They are
of the orders that torch runs, with m >= 2 p and F <= B, where they equal a simulation event by event; papers count F = B = W.
"""

import numpy as np
from numpy.typing import NDArray

from soli.planner.cost import arithmetic
from soli.planner.cost.constants import Constants
from soli.planner.cost.points import DUALPIPEV, GPIPE, ZBH1, ZBH2, ZBV, Amount, Array, Points


def in_a_v(p: Points) -> NDArray[np.bool_]:
    """Whether the first and the last stage are on one rank."""
    return np.asarray((p.schedule == ZBV) | (p.schedule == DUALPIPEV))


def shares(p: Points, k: Constants, sent: tuple[Array, Array]) -> tuple[Array, Array]:
    """Of a layer's time both ways, its forward's part and that of gradients of weights. `sent`: what is sent each way."""
    products, elements = arithmetic.products_forward(p, k), arithmetic.elements_forward(p, k)
    attention, backward = arithmetic.attention(p, k)
    whole = products + attention + elements
    more = products * (1 - p.frozen) + backward - attention + 0.5 * elements
    again = arithmetic.recomputed(p, whole, attention) + (arithmetic.parts(p, k) if p.parts.any() else 0.0)
    total = 2 * whole + more + again + sent[0] + sent[1]
    return (whole + sent[0]) / total, products * (1 - p.frozen) / total


def waits(p: Points, layers: Array, own: Array, forward: Array, weights: Array) -> Array:
    """Seconds in which a rank waits: `own` of all its layers both ways, of which `layers` if none is computed again."""
    halves = np.where(in_a_v(p), 2.0, 1.0)
    F, W = forward * layers / halves, weights * layers / halves
    B = own / halves - F - W
    others = p.pp - 1
    late = np.minimum(p.microbatches - 1, others * np.where(p.schedule == ZBH2, 2, 1))  # W fill what is waited, as many as there are
    found = np.where(p.schedule == GPIPE, others * (F + B + W), np.maximum(others * (F + B) - late * W, 0))
    found = np.where(p.schedule == ZBV, others * np.maximum(B, 2 * (B - W)), found)
    return np.where(p.schedule == DUALPIPEV, np.maximum(others * (F + B - W), others * (2 * B - W) - F), found)


def kept(p: Points) -> Array:
    """Microbatches whose activations a rank keeps, in parts of all its layers."""
    found = np.where(p.schedule == GPIPE, p.microbatches, np.where(p.schedule == ZBH2, 2 * p.pp - 1, p.pp))
    return np.minimum(np.where(p.schedule == DUALPIPEV, p.pp + 0.5, found), p.microbatches)


def undone(p: Points, rank: Amount = 0.0) -> Array:
    """Of `kept` those whose second half of the backward is to come, where the most is there, of torch's orders. A V's last rank has
    no others then."""
    found = np.where(p.schedule == ZBH1, rank + 1, 0.0)
    found = np.where(p.schedule == ZBV, rank + 0.5, found)
    return np.where(p.schedule == DUALPIPEV, np.where(np.asarray(rank) > 0, (rank + 1) / 2, 0.5), found)
