"""Which ranks of a pipeline may be the fullest, and what each has: the first, the last, and one between that has no table.

Of stages that are not alike the first is among the shorter ones (borders.py); where the longer ones are is not said, and each rank is
taken to have as many as it can. Where nothing is known, all but the last are the longest.
"""

from dataclasses import dataclass

import numpy as np

from soli.planner.cost.pipeline import in_flight
from soli.planner.cost.points import GPIPE, ZBH1, Array, Points
from soli.planner.cost.schedules import in_a_v, undone


@dataclass(frozen=True)
class Rank:
    """What one rank has of a pipeline. Microbatches are in parts of all its layers."""

    layers: Array
    tables: Array  # of the embedding and the last product: 0, 1, or 2, which are one where they are tied
    ends: Array  # flag: the last product and the loss
    under_way: Array  # microbatches whose activations are kept
    undone: Array  # of those, whose backward's second half is to come
    losses: Array  # microbatches whose loss has no gradient yet, or is the one that has


def ranks(p: Points) -> tuple[Rank, Rank, Rank]:
    """The first, one between, and the last. Where there is none between, that one has nothing.

    In a V the last two are both of the ranks that have no end: where the most is under way, and where the most is undone.
    """
    folded, none, one = in_a_v(p), np.zeros(len(p)), np.ones(len(p))
    whole, between = (p.pp == 1) | folded, (p.pp > 2) | folded
    place = np.where(p.schedule == ZBH1, p.pp - 2, 1.0)  # of ZBH1's ranks the later ones keep more
    least, most = _layers(p)
    losses = np.where((p.schedule == GPIPE) | (p.schedule == ZBH1), in_flight(p), 1.0)
    early, late = np.where(whole, one, none), np.where(folded, none, one)  # has the last product
    kept, waits = in_flight(p, p.pp - 1), undone(p, p.pp - 1)
    first = least - np.where(folded, p.fewer, 0.0)
    last = np.where(folded, most, p.own_layers - p.fewer)
    there = lambda x: np.where(between, x, 0.0)
    return (
        Rank(first, 1 + early, early, in_flight(p), undone(p), early * losses),
        Rank(there(most), none, none, there(in_flight(p, place)), np.where(folded, 0.0, there(undone(p, place))), none),
        Rank(last, late, late, np.where(folded, np.minimum(waits, kept), kept), waits, late * losses),
    )


def _layers(p: Points) -> tuple[Array, Array]:
    """Layers of the first rank, whose first stage is among those that have one less than the longest; and the most that another has."""
    lacking, others = p.pp * p.own_layers - p.layers - p.fewer, np.maximum(p.pp * p.chunks - 1, 1.0)
    alike = (p.pp > 2) & (p.chunks == 1) & (p.fewer > 0)
    told = ((p.longest > 0) | alike) & (lacking < others)  # else they are not short of one each
    long = others - np.where(told, np.maximum(lacking, 0.0), 0.0)
    least = p.own_layers - p.chunks + np.minimum(long, p.chunks - np.where(long < others, 1.0, 0.0))
    return least, p.own_layers - p.chunks + np.minimum(long, p.chunks)
