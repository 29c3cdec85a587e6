"""How attention crosses the ranks of cp: keys and values go round, or heads are exchanged for positions.

    ring      keys and values once round; in backward again, and their gradients      (arXiv 2310.01889)
    ulysses   all-to-alls of q, k, v and of the result, backward alike               (arXiv 2309.14509, 3)

Volumes: docs/communication.md, 7. A ring's rounds are charged whole, though some hide behind what is computed.
"""

import numpy as np

from soli.planner.cost.communication import all_to_all, gather
from soli.planner.cost.constants import Constants
from soli.planner.cost.points import ULYSSES, Array, Points


def crossing(p: Points, k: Constants) -> tuple[Array, Array]:
    """Seconds of a layer's forward and backward, of T tokens on each of cp ranks."""
    hidden = p.tokens * p.hidden * p.number
    keys = 2 * hidden * p.attention_width / p.hidden * p.kv_share / p.tp
    round_ = gather(p, k, keys * p.cp, p.cp, p.tp)
    if not (p.context == ULYSSES).any():
        return round_, 2 * round_
    # Of grouped keys a rank gets those that its queries read: where there are fewer than ranks each goes to several.
    heads = p.heads / p.tp
    groups = np.minimum(np.maximum(np.maximum(p.kv_heads / p.tp, 1.0), p.cp), heads)
    one = p.tokens * p.head_size * p.number
    exchanged = 2 * all_to_all(p, k, one * heads, p.cp, p.tp) + 2 * all_to_all(p, k, one * groups, p.cp, p.tp)
    ulysses = p.context == ULYSSES
    return np.where(ulysses, exchanged, round_), np.where(ulysses, exchanged, 2 * round_)


def calls(p: Points) -> Array:
    """Collectives that attention's forward starts: a ring passes keys on once less than it has ranks."""
    return np.where(p.context == ULYSSES, 4.0 * (p.cp > 1), p.cp - 1)
