"""What is sent while something is computed, and so takes no time of its own. How much of it does is a program's constant.

    tp's sums           behind the products beside them, piece by piece      (Wang et al. 2023, doi:10.1145/3567955.3567959)
    ZeRO-3's gathers    the next layer's behind this one's computing         (arXiv 2304.11277, 3.3)
    gradients           of layers that are done, behind the backward's rest  (arXiv 2006.15704, 3.2.3)

A pipeline's sends overlap in pipeline.py, whose fill counts those that do not. Rings of cp and experts' exchanges are waited for.
"""

import numpy as np

from soli.planner.cost.constants import Constants
from soli.planner.cost.points import Amount, Array, Points


def sums(p: Points, k: Constants, sent: Array) -> Array:
    """Seconds that what tp sends adds to a layer: less than it takes alone where pieces run behind products; more where ranks wait
    for the slowest, the more of them there are: `waited_sums` is of 8 (docs/log.md, what tp waits for)."""
    return sent * k.waited_sums ** (np.log2(p.tp) / 3) * (1 - p.behind)


def gathers(k: Constants, sent: Array, computed: Array) -> Array:
    """Seconds that are left of a layer's gathers: what is longer than a share of the layer's computing."""
    return np.maximum(sent - k.hidden_gathers * computed, 0.0)


def gradients(k: Constants, sent: Array, backward: Amount) -> Array:
    """Seconds that are left of the gradients' reduction: a share runs behind the backward, and no more than there is of it."""
    return np.maximum(sent - k.hidden_gradients * np.minimum(sent, backward), 0.0)
