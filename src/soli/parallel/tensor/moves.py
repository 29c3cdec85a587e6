"""What crosses the tensor axis, each with its backward. Tensors here are plain: local parts or whole values.

    enter     whole -> whole      backward: sum                 (Megatron's f: the same input to every rank's part)
    reduce    part of a sum -> whole   backward: nothing        (Megatron's g)
    gather    local -> whole      backward: this rank's part    (every rank goes on with the same)
    share     local -> whole      backward: sum, scattered      (gather, then enter)
    scatter   part of a sum -> local   backward: gather         (sequence parallelism's g)
    pick      whole -> local      backward: gather              (what all computed alike, each its part)

A gradient of a whole tensor is whole and the same on every rank, one of a local part is that part's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from soli.mesh.collectives import Axis, all_gather, all_reduce, reduce_scatter
from soli.parallel.tensor.split import Split, taken, together


def summed(x: Tensor, axis: Axis, label: str, op: str = "sum") -> Tensor:
    """A new tensor: the sum (or max) over the axis."""
    if axis.size == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, axis, op, label=label)
    return total


def collected(x: Tensor, split: Split, axis: Axis, label: str) -> Tensor:
    """The whole tensor, of which every rank has its local part."""
    if axis.size == 1:
        return x
    sizes = [split.local(axis.size, r) for r in range(axis.size)]
    rest = (*x.shape[: split.dim], *x.shape[split.dim + 1 :])
    piece = x.new_empty((max(sizes), *rest))
    piece[: sizes[axis.index]].copy_(x.movedim(split.dim, 0))
    every = x.new_empty((axis.size * max(sizes), *rest))
    all_gather(every.view(-1), piece.view(-1), axis, label=label)
    rows = every.view(axis.size, max(sizes), *rest)
    return together([rows[r, :n].movedim(0, split.dim) for r, n in enumerate(sizes)], split)


def scattered(x: Tensor, split: Split, axis: Axis, label: str) -> Tensor:
    """This rank's local part of the sum over the axis."""
    if axis.size == 1:
        return x
    sizes = [split.local(axis.size, r) for r in range(axis.size)]
    rest = (*x.shape[: split.dim], *x.shape[split.dim + 1 :])
    every = x.new_zeros((axis.size, max(sizes), *rest))
    for r, n in enumerate(sizes):
        every[r, :n].copy_(taken(x, split, axis.size, r).movedim(split.dim, 0))
    mine = x.new_empty((max(sizes), *rest))
    reduce_scatter(mine.view(-1), every.view(-1), axis, label=label)
    return mine[: sizes[axis.index]].movedim(0, split.dim).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        # Not a view: a view holds its base, and the base remembers what was entered of it (cut.entered).
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x)  # type: ignore[call-overload]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.axis, "gradient of a column's input"), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        all_reduce(x, axis, label="output of a row")
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, axis: Axis) -> Tensor:
        ctx.split, ctx.axis = split, axis
        return collected(x, split, axis, "a cut tensor, whole")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return taken(grad, ctx.split, ctx.axis.size, ctx.axis.index), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, axis: Axis) -> Tensor:
        ctx.split, ctx.axis = split, axis
        return collected(x, split, axis, "a column's input")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scattered(grad, ctx.split, ctx.axis, "gradient of a column's input"), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, axis: Axis) -> Tensor:
        ctx.split, ctx.axis = split, axis
        return scattered(x, split, axis, "output of a row")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collected(grad, ctx.split, ctx.axis, "gradient of a row's output"), None, None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, axis: Axis) -> Tensor:
        ctx.split, ctx.axis = split, axis
        mine = taken(x, split, axis.size, axis.index)
        return mine.view_as(mine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collected(grad, ctx.split, ctx.axis, "gradient of a tensor cut for a part"), None, None


def enter(x: Tensor, axis: Axis) -> Tensor:
    return _Enter.apply(x, axis) if axis.size > 1 and x.requires_grad and torch.is_grad_enabled() else x


def reduce(x: Tensor, axis: Axis, *, fresh: bool = False) -> Tensor:
    """The sum over the axis. `fresh`: a product that nobody else has or saved, which may be summed in place."""
    if axis.size == 1:
        return x
    own = x if fresh and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return _Reduce.apply(own, axis)


def gather(x: Tensor, split: Split, axis: Axis) -> Tensor:
    return _Gather.apply(x, split, axis) if axis.size > 1 else x


def share(x: Tensor, split: Split, axis: Axis) -> Tensor:
    return _Share.apply(x, split, axis) if axis.size > 1 else x


def scatter(x: Tensor, split: Split, axis: Axis) -> Tensor:
    return _Scatter.apply(x, split, axis) if axis.size > 1 else x


def pick(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's part of a whole tensor."""
    if axis.size == 1:
        return x
    if not x.requires_grad or not torch.is_grad_enabled():
        return taken(x, split, axis.size, axis.index)
    return _Pick.apply(x, split, axis)
