"""What crosses the tensor axis, each with its backward. Tensors here are plain: local parts or whole values.

    enter     whole -> whole      backward: sum                 (Megatron's f: the same input to every rank's part)
    reduce    part of a sum -> whole   backward: nothing        (Megatron's g)
    gather    local -> whole      backward: this rank's part    (every rank goes on with the same)
    share     local -> whole      backward: sum, scattered      (gather, then enter)
    scatter   part of a sum -> local   backward: gather         (sequence parallelism's g)
    pick      whole -> local      backward: gather              (what all computed alike, each its part)

A gradient of a whole tensor is whole and the same on every rank, one of a local part is that part's.

Over cp, which cuts what the batch holds and no weight, a gradient of a whole tensor is each rank's part of a sum, as
a parameter's is under data parallelism. A whole value is then read as it is, and

    reduce_both   part of a sum -> whole   backward: sum
    gather_both   local -> whole           backward: sum, scattered
    own_part      whole -> local           backward: zeros around it
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from soli.core.errors import on_all_ranks
from soli.mesh.collectives import Axis, Pending, all_gather, all_reduce, reduce_scatter
from soli.parallel.keep import alias, carried
from soli.parallel.tensor.split import Split, taken, together

if TYPE_CHECKING:
    from soli.parallel.reduce import Reducer

Way = Callable[[Tensor], Tensor]
Later = Callable[[], Tensor]
"""Waits for a tensor that is under way."""
COLUMN = "gradient of a column's input"


def summed(x: Tensor, axis: Axis, label: str, op: str = "sum") -> Tensor:
    """A new tensor: the sum (or max) over the axis."""
    return x if axis.size == 1 else summed_later(x, axis, label, op)()


def summed_later(x: Tensor, axis: Axis, label: str, op: str = "sum", *, fresh: bool = False) -> Later:
    """Begin the sum; what is returned waits for it. `fresh`: nobody else has x, which may hold the sum."""
    total = x if fresh and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return then(all_reduce(total, axis, op, label=label, wait=False), lambda: total)


def then(pending: Pending, result: Later) -> Later:
    """Waits for what is under way, and gives the result."""

    def finish() -> Tensor:
        pending.wait()
        return result()

    return finish


def collected(x: Tensor, split: Split, axis: Axis, label: str) -> Tensor:
    """The whole tensor, of which every rank has its local part."""
    return collected_later(x, split, axis, label)()


def collected_later(x: Tensor, split: Split, axis: Axis, label: str) -> Later:
    """Begin to gather it; what is returned waits for it. Parts are sent padded to the largest."""
    if axis.size == 1:
        return lambda: x
    before, after = x.shape[: split.dim], x.shape[split.dim + 1 :]
    sizes = [split.local(axis.size, r) for r in range(axis.size)]
    n = max(sizes)
    if not prod((*before, n, *after)):  # on every rank of the axis: backends refuse to move nothing
        return lambda: x.new_empty((*before, split.size, *after))
    piece = x.contiguous()
    if x.shape[split.dim] < n:
        piece = x.new_empty((*before, n, *after))
        piece.narrow(split.dim, 0, x.shape[split.dim]).copy_(x)
    every = x.new_empty((axis.size, *before, n, *after))
    pending = all_gather(every.view(-1), piece.view(-1), axis, label=label, wait=False)
    if split.dim == 0 and all(split.own(axis.size, r) == [(r * n, (r + 1) * n)] for r in range(axis.size)):
        return then(pending, lambda: every.flatten(0, 1))
    parts = lambda: [every[r].narrow(split.dim, 0, m) for r, m in enumerate(sizes)]
    return then(pending, lambda: together(parts(), split))


def scattered(x: Tensor, split: Split, axis: Axis, label: str) -> Tensor:
    """This rank's local part of the sum over the axis."""
    return scattered_later(x, split, axis, label)()


def scattered_later(x: Tensor, split: Split, axis: Axis, label: str) -> Later:
    """Begin it; what is returned waits for it."""
    if axis.size == 1:
        return lambda: x
    sizes = [split.local(axis.size, r) for r in range(axis.size)]
    shape = (*x.shape[: split.dim], max(sizes), *x.shape[split.dim + 1 :])
    n = sizes[axis.index]
    mine = x.new_empty(shape)
    if not mine.numel():  # on every rank of the axis: backends refuse to move nothing
        return lambda: mine.narrow(split.dim, 0, n)
    every = x.new_empty((axis.size, *shape))
    for r, m in enumerate(sizes):
        every[r].narrow(split.dim, 0, m).copy_(taken(x, split, axis.size, r))
        every[r].narrow(split.dim, m, max(sizes) - m).zero_()
    pending = reduce_scatter(mine.view(-1), every.view(-1), axis, label=label, wait=False)
    return then(pending, lambda: mine if n == max(sizes) else mine.narrow(split.dim, 0, n).contiguous())


class _Move(torch.autograd.Function):
    """`there` forward, `back` on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # of a function of the model's own it may be a cut tensor
            return ctx.back(grad.view_as(grad)), None, None


def moved(x: Tensor, axis: Axis, there: Way, back: Way) -> Tensor:
    """`there` forward and `back` on the gradient, which cross the axis."""
    return x if axis.size == 1 else _Move.apply(x, there, back)


def no_view(x: Tensor) -> Tensor:
    """The same memory as no view of the leaf, which autograd lets nobody write."""
    return _Move.apply(x, Tensor.detach, lambda grad: grad)


def enter(x: Tensor, axis: Axis) -> Tensor:
    """A whole tensor, for computations of parts: its gradient is summed."""
    return _Move.apply(x, alias, lambda grad: summed(grad, axis, COLUMN))


def enter_parameter(x: nn.Parameter, reducer: Reducer) -> Tensor:
    """The same of a parameter that every rank has: what comes back is summed with others' when the step has all of it."""
    reducer.expect_parts(x)

    def back(grad: Tensor) -> Tensor:
        reducer.add_part(x, grad)
        return grad.new_zeros(()).expand_as(grad)

    return _Move.apply(x, alias, back)


def reduce(x: Tensor, axis: Axis, *, fresh: bool = False) -> Tensor:
    """The sum over the axis. `fresh`: a product that nobody else has or saved, which may be summed in place."""

    def there(x: Tensor) -> Tensor:
        saved = any(isinstance(mode, torch.utils.checkpoint._CachingTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())  # by a policy of the program's
        own = x if fresh and x.is_contiguous() and not saved else x.clone(memory_format=torch.contiguous_format)
        all_reduce(own, axis, label="output of a row")
        return own

    return moved(x, axis, lambda x: carried(x, there, alone=fresh), lambda grad: grad)


def reduce_both(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, whose gradients on the ranks are parts of a sum too."""
    _refuse_in_backward(axis)
    total = lambda x: summed(x, axis, "a sum over a cut dim")
    return moved(x, axis, lambda x: carried(x, total, alone=False), total)


def gather_both(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """The whole of a cut tensor, whose gradients on the ranks are parts of a sum."""
    _refuse_in_backward(axis)
    there = lambda x: collected(x, split, axis, "a part of the sequence, whole")
    return moved(x, axis, there, lambda grad: scattered(grad, split, axis, "gradient of the sequence"))


def _refuse_in_backward(axis: Axis) -> None:
    """What a function of the program's own computes there of all ranks' parts it may give as a gradient, which is a part of a sum."""
    node = torch._C._current_autograd_node()
    own = isinstance(node, BackwardCFunction) and "Checkpoint" not in type(node).__name__
    if own and not torch.is_grad_enabled():
        what = "the backward of an autograd function of the model's own sums over the sequence, which is cut"
        got = f"a gradient of a whole tensor, as of a weight, along {axis.name}"
        raise on_all_ranks(what, got=got, fix="let the function give gradients of what it computes by positions, and multiply by weights outside of it")


def gather(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """The whole of a cut tensor, with which every rank goes on alike."""
    there = lambda x: collected(x, split, axis, "a cut tensor, whole")
    return moved(x, axis, there, lambda grad: taken(grad, split, axis.size, axis.index))


def share(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """The whole of a cut tensor, for computations of parts."""
    there = lambda x: collected(x, split, axis, "a column's input")
    return moved(x, axis, there, lambda grad: scattered(grad, split, axis, COLUMN))


def scatter(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's part of a sum over the axis, of a product that nobody else has."""
    there = lambda x: carried(x, lambda x: scattered(x, split, axis, "output of a row"), alone=True)
    return moved(x, axis, there, lambda grad: collected(grad, split, axis, "gradient of a row's output"))


def pick(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's part of a whole tensor."""
    if axis.size == 1:
        return x
    mine = lambda x: taken(x, split, axis.size, axis.index)
    if not x.requires_grad or not torch.is_grad_enabled():
        return mine(x)
    back = lambda grad: collected(grad, split, axis, "gradient of a tensor cut for a part")
    return _Move.apply(x, lambda x: mine(x).clone(), back)


def own_part(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's part of a whole tensor whose gradients are parts of a sum."""
    mine = taken(x, split, axis.size, axis.index)
    # A view would keep all of what was drawn or computed whole; a parameter is there anyway.
    return mine.clone() if axis.size > 1 and mine._is_view() and not isinstance(x, nn.Parameter) else mine
