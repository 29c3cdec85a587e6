"""How stages follow each other: the time of a step's microbatches.

    1F1B, GPipe      sum over stages of (F + B)  +  (m - 1) max over stages of (F + B)
    interleaved      the same with the sum over v; m max is not changed (arXiv 2104.04473, 2.2)

It holds for stages of different lengths: the longest is never idle between its first and last microbatch, and what
comes before and after is one pass through the others. Where the last one is shorter than the others it is too long by no
more than what that one is shorter, once a step.
"""

import numpy as np

from soli.planner.cost.points import GPIPE, INTERLEAVED, Amount, Array, Points
from soli.planner.cost.schedules import in_a_v, kept


def spent(p: Points, inner: Array, first: Array, last: Array, send: Array, layer: Array, sending: Amount = 0.0) -> tuple[Array, Array]:
    """Seconds of m microbatches on the busiest stage; and those in which it waits for the others.

    The longest rank takes `inner` seconds a microbatch (both ways), the first and last ones so much more, the last one less by
    the layers that it has fewer, and so do all together by those that stages lack; and a send. No microbatch takes less than the network
    is busy with it: `sending`.
    """
    m, stages = p.microbatches, p.pp
    one = stages <= 1
    longest = np.where(one, inner + first + last, inner + np.maximum(first, last - p.fewer * layer))
    through = stages * inner - (stages * p.own_layers - p.layers) * layer + first + last
    fill = (through - longest) / p.chunks + 2 * send * (stages - 1)
    # Interleaving sends a microbatch v times; what is sent meanwhile is hidden but for the last.
    fill = fill + np.where(p.chunks > 1, 2 * send * (p.chunks - 1), 0.0)
    return m * np.maximum(longest, sending), np.where(one, 0.0, fill)


def spent_otherwise(p: Points, inner: Array, waits: Array, first: Array, last: Array, send: Array, layer: Array, sending: Amount = 0.0) -> tuple[Array, Array]:
    """`spent` of the schedules of schedules.py: the longest stage, and what ranks wait for there; twice as many borders in a V."""
    folded = in_a_v(p)
    last = last - p.fewer * layer
    longest = inner + np.where(folded, np.maximum(first + last, 0.0), np.maximum(first, last))
    ends = np.where(folded, 0.0, np.minimum(first, last))
    # by stages beside the last; of other schedules nobody waits less
    waits = waits - np.where(p.schedule == GPIPE, (p.pp * p.own_layers - p.layers - p.fewer) * layer, 0.0)
    fill = waits + ends + 2 * send * (p.pp - 1) * np.where(folded, 2.0, 1.0)
    return p.microbatches * np.maximum(longest, sending), fill


def in_flight(p: Points, rank: Amount = 0.0) -> Array:
    """Microbatches whose activations a rank keeps, in parts of all its layers (arXiv 2205.05198, 4.2.3)."""
    m, stages = p.microbatches, p.pp
    looped = stages + (stages - 1 - 2 * rank) / p.chunks
    return np.where(p.schedule > INTERLEAVED, kept(p), np.minimum(np.where(p.chunks > 1, looped, stages - rank), m))
