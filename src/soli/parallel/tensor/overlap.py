"""Columns whose input's gradient crosses the tensor axis while the weight's is computed (Megatron-LM, arXiv 1909.08053).

autograd's own linear computes both gradients in one node, and what is after it waits for the sum. Here the node that
enters an input and the first product that reads it are one: its backward has the whole gradient of the input, since
other products of the same input (k and v beside q) come before it, sends that off, and computes the gradient of its
weight meanwhile.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from soli.mesh.collectives import Axis
from soli.parallel.tensor import moves
from soli.parallel.tensor.split import Split

Later = Callable[[Tensor], Callable[[], Tensor]]
"""Sends a gradient off, and returns what waits for the result."""


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, there: moves.Way, later: Later) -> Any:
        ctx.set_materialize_grads(False)
        ctx.later, ctx.types = later, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        read, device = there(x), x.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        a, w, b = (t if t is None or low is None else t.to(low) for t in (read, weight, bias))
        ctx.save_for_backward(a, w)
        # with a bias it is a view, into which no activation could write
        return read, torch.ops.aten._unsafe_view(found := F.linear(a, w, b), found.shape)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_read: Tensor | None, of_result: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # where the block is recomputed, by its rules
        with torch._C.DisableTorchFunctionSubclass():  # the weight's class would answer with rules
            return _backward(ctx, saved, of_read, of_result)


def _backward(ctx: Any, saved: tuple[Tensor, Tensor], of_read: Tensor | None, of_result: Tensor | None) -> Any:
    a, weight = saved
    x_type, weight_type, bias_type = ctx.types
    if of_result is None:
        return (None if of_read is None else ctx.later(of_read.clone())()), None, None, None, None
    of_input = (of_result @ weight).to(x_type)
    finish = ctx.later(of_input if of_read is None else of_input.add_(of_read))
    rows = of_result.reshape(-1, of_result.shape[-1])
    of_weight = (rows.t() @ a.reshape(-1, a.shape[-1])).to(weight_type)
    of_bias = None if bias_type is None else rows.sum(0).to(bias_type)
    return finish(), of_weight, of_bias, None, None


def entered(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> tuple[Tensor, Tensor]:
    """x whole, W [n, k] and bias [n] parts: x as other parts read it, and F.linear of them."""
    return _Column.apply(x, weight, bias, moves.alias, lambda grad: moves.summed_later(grad, axis, moves.COLUMN, fresh=True))


def shared(x: Tensor, weight: Tensor, bias: Tensor | None, split: Split, axis: Axis) -> tuple[Tensor, Tensor]:
    """The same of an x that is cut along the sequence: gathered, and its gradient scattered."""
    there = lambda x: moves.collected(x, split, axis, "a column's input")
    return _Column.apply(x, weight, bias, there, lambda grad: moves.scattered_later(grad, split, axis, moves.COLUMN))
