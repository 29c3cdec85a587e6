"""What attributes are for: whether losses depend on what forwards leave in them. And weights that begin as zeros, behind which no loss shows it.

A gate that begins closed (ReZero, arXiv 2003.04887), an adapter's second matrix (LoRA, arXiv 2106.09685), modulations of zeros (DiT, arXiv
2212.09748): whatever is multiplied by it moves no loss at a run's first step, and all later ones. So a copy of the model, which coupling.py
has, is looked at once more with small numbers in such weights. What a forward makes of these is the copy's, and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from soli.parallel import kept

Loss = tuple[float, float]
"""The sum of a forward's losses and how many were counted."""
Run = Callable[[int, int], Loss]
"""Of these rows, from one to before another. What the forward changes stays."""
LATER = 3
"""Forwards more after which what they left in attributes is looked at once again: a list may be read from the second entry on."""
LEAST, MOST = 0.05, 0.1
"""Numbers in the place of zeros: above 0, as a root or a logarithm asks."""


@dataclass(frozen=True)
class Behind:
    """What losses depend on once the weights are open. `idle`: on nothing that forwards leave in attributes; `onward`: on whether it is the
    first one; `read`: on attributes that a forward wrote and left as they were."""

    idle: bool = True
    onward: bool = False
    read: set[str] = field(default_factory=set)


@torch.no_grad()
def open_up(model: nn.Module) -> bool:
    """Give weights that train and are all zeros small numbers, each another one, less where many are summed; whether there are such. A bias
    is added, and hides nothing: most models have biases of zeros, and would be looked at twice for nothing."""
    named = [(name.rpartition(".")[2], x) for name, x in model.named_parameters()]
    own = [x for leaf, x in named if "bias" not in leaf and x.requires_grad and x.numel() and (x.is_floating_point() or x.is_complex())]
    closed = [x for x in own if not x.any()]
    for x in closed:
        width = x[0].numel() if x.dim() else 1
        x.copy_(torch.linspace(LEAST, MOST, x.numel(), device=x.device, dtype=torch.float64).view_as(x) / width**0.5)
    return bool(closed)


def idle(model: nn.Module, run: Run, rows: int, cut: int, start: kept.Snapshot, before: kept.Snapshot, whole: Loss) -> bool:
    """Whether nothing comes of attributes, as of results that a module keeps for others to look at: the loss is the same with what was in
    them before any forward, and with what several left; of a part of the rows too (from `cut` on, if it is one), which may have set what the
    first rows set for ever. `start`, `before`: what was kept before a forward, and after it."""

    def loss(state: kept.Snapshot, begin: int = 0) -> Loss:
        kept.restore(model, state)
        return run(begin, rows)

    anew = start | kept.in_state(model, before)
    parts = [loss(before, cut), loss(anew, cut)] if cut else []
    first = loss(anew)
    kept.restore(model, before)
    for _ in range(LATER):
        run(0, rows)
    last = loss(kept.values(model) | kept.in_state(model, before))
    return kept.same(first, whole) and kept.same(last, whole) and kept.same(parts[:1], parts[1:])


def behind(model: nn.Module, run: Run, rows: int, writes: bool) -> Behind:
    """Of a model whose weights are open; nothing where its loss is no number then. `writes`: whether its forward writes into weights. It is not
    put back."""
    weights = [name for name, _ in model.named_parameters()] if writes else []
    start, had = kept.values(model, weights), list(kept.tensors(model))  # themselves, so that no other has their id
    version = lambda x: 0 if x.is_inference() else x._version
    versions = {id(x): version(x) for _, x in had}
    first = run(0, rows)
    before, moved = kept.values(model, weights), kept.changed(model, start)
    wrote = {name: x for name, x in kept.tensors(model) if versions.get(id(x)) != version(x)}
    if first[0] - first[0] != 0 or not (moved or wrote):
        return Behind()
    read = set()
    for name in sorted(wrote.keys() - kept.in_state(model, dict(wrote)).keys()):
        kept.restore(model, start)
        kept.shift(model, [name])
        read |= set() if kept.same(run(0, rows), first) else {name}
    kept.restore(model, before)
    whole = run(0, rows)
    aside = len(moved) > len(kept.in_state(model, moved))
    still = not aside or idle(model, run, rows, rows // 2, start, before, whole)
    return Behind(still, not kept.same(first, whole), read)
