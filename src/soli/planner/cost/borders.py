"""Where a pipeline's borders lie: the last stage has the last product and the loss, and so fewer layers than the others.

soli cuts where the longest stage is shortest, by flops (parallel/pipeline/stages.py); Megatron-LM's and others' users can
say it (offers.py). With r, the last product by a layer, S stages are n, n, ..., and what is left for the last:

    minimise max(n, last + r),  last = max(L - n (S - 1), 0):  n is beside (L + r) / S
"""

from dataclasses import replace

import numpy as np

from soli.planner.cost.points import Array, Points


def placed(p: Points) -> Points:
    """Plans of one model with the longest stage as short as can be: `longest`, `fewer`. How many stages there are says all of it."""
    stages = (p.pp * p.chunks).astype(np.int64)
    best, last = lengths(replace(p, pp=np.arange(1.0, stages.max(initial=1) + 1), chunks=np.ones(1)))
    return replace(p, longest=p.chunks * best[stages - 1], fewer=(best - last)[stages - 1])


def lengths(p: Points) -> tuple[Array, Array]:
    """Layers of the longest stage, and of the last."""
    stages, ends = p.pp * p.chunks, last_by_layer(p)
    least, middle = np.ceil(p.layers / stages - 1e-9), (p.layers + ends) / stages
    best = least
    for n in (np.floor(middle), np.ceil(middle)):
        n = np.maximum(n, least)
        best = np.where(_worst(p, n, ends) < _worst(p, best, ends), n, best)
    # Of borders whose longest stage is the same, those whose squares add up to least.
    least, most = _last(p, best), np.minimum(best, np.floor(_worst(p, best, ends) - ends + 1e-9))
    last = least
    for n in (np.floor(middle - ends), np.ceil(middle - ends)):
        n = np.clip(n, least, np.maximum(most, least))
        last = np.where(_squares(p, n, ends) < _squares(p, last, ends), n, last)
    return best, last


def last_by_layer(p: Points) -> Array:
    """Flops of the last product by those of a layer, forward; attention's scores as they are counted, masked ones too."""
    width, active = p.attention_width, np.where(p.experts > 0, p.active, 1.0)
    return p.vocab * p.hidden / (p.attention_matrices + p.matrices * p.hidden * p.ffn * active + 2 * p.seq * width)


def _last(p: Points, n: Array) -> Array:
    return np.clip(p.layers - n * (p.pp * p.chunks - 1), 0.0, n)


def _worst(p: Points, n: Array, ends: Array) -> Array:
    return np.maximum(n, _last(p, n) + ends)


def _squares(p: Points, last: Array, ends: Array) -> Array:
    """Of all stages' lengths, where those beside the last are as equal as can be."""
    others = np.maximum(p.pp * p.chunks - 1, 1.0)
    each = np.floor((p.layers - last) / others)
    return others * each**2 + (p.layers - last - each * others) * (2 * each + 1) + (last + ends) ** 2
