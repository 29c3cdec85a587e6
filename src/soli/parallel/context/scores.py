"""Ring self-attention with its scores written out (arXiv 2105.13120): RingQK and RingAV.

Each rank has its rows of the scores, of all keys, so that what a program does with them (a bias, a mask, softmax,
dropout) needs no communication. Keys, and later values, go round; their gradients are sums over all rows: a sum goes
round too, gets each rank's part, and ends at its owner. In both directions p - 1 moves, beside products.

    Legend: l local queries, s local keys, S all keys in order of position, e and f head sizes
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from soli.mesh.collectives import Axis
from soli.parallel.context.blocks import sums
from soli.parallel.context.ring import length, passed_on, rings, travel
from soli.parallel.precision import lowered
from soli.parallel.tensor.split import Spans
from soli.parallel.tensor.summa import columns, put

KEYS = "keys or values of a ring"
GRADIENTS = "gradient of keys or values of a ring"


def ring_qk(q: Tensor, k: Tensor, spans_k: Spans, axis: Axis) -> Tensor:
    """q @ k.mT: q [.., l, e] of local rows and local k [.., s, e], the same leading dims -> scores [.., l, S]."""
    return _product(q, k, spans_k, axis, True)


def ring_av(a: Tensor, v: Tensor, spans_v: Spans, axis: Axis) -> Tensor:
    """a @ v: a [.., l, S] of local rows and local v [.., s, f], the same leading dims -> [.., l, f]."""
    return _product(a, v, spans_v, axis, False)


def _product(x: Tensor, y: Tensor, spans: Spans, axis: Axis, of_keys: bool) -> Tensor:
    x, y = lowered(x), lowered(y)
    with torch.autocast(x.device.type, enabled=False):
        return _Ring.apply(x, y, spans, axis, of_keys)


class _Ring(torch.autograd.Function):
    """x with every rank's y: x @ y.mT where y is of keys, else x @ y. One's forward is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, spans: Spans, axis: Axis, of_keys: bool) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.ring, ctx.of_keys = (spans, axis), of_keys
        return (_with_each if of_keys else _with_all)(x, y, *ctx.ring)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        scores, rows = (grad, x) if ctx.of_keys else (x, grad)
        of_x = (_with_all if ctx.of_keys else _with_each)(grad, y, *ctx.ring)
        return of_x, _sent_home(scores, rows, *ctx.ring), None, None, None


def _with_each(x: Tensor, y: Tensor, spans: Spans, axis: Axis) -> Tensor:
    """x [.., l, e] with every rank's y [.., s, e], each in its columns -> [.., l, S]."""
    out = x.new_empty((*x.shape[:-1], sum(map(length, spans))))
    for owner, block in _blocks(y, spans, axis):
        put(out, spans[owner], x @ block.mT)
    return out


def _with_all(a: Tensor, y: Tensor, spans: Spans, axis: Axis) -> Tensor:
    """The sum over ranks of their columns of a [.., l, S] with their y [.., s, e] -> [.., l, e]."""
    total = a.new_zeros((*a.shape[:-1], y.shape[-1]), dtype=sums(a.dtype))
    for owner, block in _blocks(y, spans, axis):
        total += columns(a, spans[owner]) @ block
    return total.to(a.dtype)


def _sent_home(a: Tensor, x: Tensor, spans: Spans, axis: Axis) -> Tensor:
    """Of the sum over ranks of a.mT @ x, a [.., l, S] and x [.., l, e], this rank's rows [.., s, e].

    The sum of rank j's rows begins at rank j + 1, so that it ends at j; the part that it gets next is computed while
    it is under way.
    """
    each, coming = x.shape[:-2].numel() * x.shape[-1], None
    for turn in range(axis.size):
        owner = (axis.index - 1 - turn) % axis.size
        part = (columns(a, spans[owner]).mT @ x).to(sums(x.dtype))
        total = part if coming is None else part + coming().view(part.shape)
        if turn + 1 < axis.size:
            coming = passed_on(total.reshape(-1), each * length(spans[owner - 1]), axis, GRADIENTS)
    return total.to(x.dtype)


def _blocks(y: Tensor, spans: Spans, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Every rank and its y [.., s, e], this rank's own first."""
    each = y.shape[:-2].numel() * y.shape[-1]
    sizes = [each * length(own) for own in spans]
    for step in travel(y.reshape(-1), sizes, rings(axis), KEYS):
        yield step.owner, step.block.view(*y.shape[:-2], length(spans[step.owner]), y.shape[-1])
