"""Batch normalisation (arXiv 1502.03167) over the rows of all data-parallel ranks, as one process has them.

torch's SyncBatchNorm does this on CUDA alone, and for modules that are exchanged for it. Here the function that they all call computes with sums
over the ranks while a forward runs: two small reductions a call forward, one backward. A check that takes a batch apart repeats for the
parts what it learnt of the whole, so that what else couples rows is found all the same.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soli.core.plan import Plan
from soli.mesh.collectives import Axis, all_reduce
from soli.mesh.mesh import Mesh

LABEL = "statistics of the batch"
_function = F.batch_norm


@dataclass
class Known:
    """Mean and (biased) variance of each channel, and how many values each is of; what backward of all rows summed, for that of parts."""

    mean: Tensor
    var: Tensor
    count: Tensor
    back: Tensor | None = None


def training_norms(model: nn.Module) -> list[str]:
    """The modules that normalise by the batch when a step trains, which puts a model that is in eval() into training mode, by name."""
    kind, every = nn.modules.batchnorm._BatchNorm, not model.training
    return [n or "the model" for n, m in model.named_modules() if isinstance(m, kind) and (m.training or every)]


def can(plan: Plan) -> bool:
    """Whether each call of a plan's step sees rows that together are the batch, once, and alike in number of dims."""
    return plan.model_ranks * plan.accumulate == 1 and plan.recompute == "none"


def alone() -> AbstractContextManager[object]:
    """Within, torch's synchronised norms compute as one process's: they would sum by themselves, on CUDA alone."""
    return patch.object(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward)


class Statistics:
    """`axis`: the ranks that have the other rows, over a group of its own: sums of gradients are sent meanwhile. Nothing is done where rows stay together, or no norm is of them."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh | None) -> None:
        """`mesh`: None where a rank has all rows. Collective over it."""
        self.active = plan.pieces > 1 and can(plan) and bool(training_norms(model))
        self.axis = mesh.another(mesh.dp) if mesh is not None and self.active else Axis("alone")
        self.always = self.active and any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in model.modules())  # in evaluation too
        self._whole: list[Known] = []  # of the calls of a check's newest forward on all of its rows
        self._learns, self._repeats = False, iter(self._whole)  # in a check

    def computing(self) -> AbstractContextManager[object]:
        """Around a forward."""
        return patch.object(F, "batch_norm", self._normalised) if self.active else nullcontext()

    def check(self, part: bool) -> AbstractContextManager[object]:
        """Around a check's forward: of a part of the rows that the one before it had, or of all of them."""
        repeats = iter(self._whole if part else ())
        self._whole = self._whole if part else []
        return patch.multiple(self, _learns=not part, _repeats=repeats)

    def _normalised(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if not training:
            return _function(input, running_mean, running_var, weight, bias, False, momentum, eps)
        known = next(self._repeats, None) or self._sums(input)
        mean, var, count = known.mean, known.var, known.count
        if self._learns:
            self._whole.append(known)
        if input.numel() == input.shape[1] and count <= 1:
            raise ValueError("batch normalisation needs more than one value of each channel in training")
        with torch.no_grad():
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return _Normalised.apply(input, weight, bias, known, eps, self.axis)

    @torch.no_grad()
    def _sums(self, x: Tensor) -> Known:
        dims = [d for d in range(x.dim()) if d != 1]
        x = x if x.dtype == torch.float64 else x.float()
        sums = torch.cat([x.sum(dims), x.new_full((1,), x.numel() // x.shape[1])])
        all_reduce(sums, self.axis, label=LABEL)
        count = sums[-1]
        mean = sums[:-1] / count
        squares = (x - _along(mean, x)).square().sum(dims)
        all_reduce(squares, self.axis, label=LABEL)
        return Known(mean, squares / count, count)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, known: Known, eps: float, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight, torch.rsqrt(known.var + eps))
        ctx.known, ctx.back, ctx.axis, ctx.has_bias = known, known.back, axis, bias is not None
        return _function(x, known.mean, known.var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        known: Known = ctx.known
        dims = [d for d in range(x.dim()) if d != 1]
        normal = (x - _along(known.mean, x)) * _along(scale, x)
        of_bias, of_weight = grad.sum(dims), (grad * normal).sum(dims)
        both = ctx.back
        if both is None:
            both = torch.stack([of_bias, of_weight]).to(scale.dtype)
            all_reduce(both, ctx.axis, label=LABEL)
            known.back = both.detach()
        means = both / known.count
        of_x = (grad - _along(means[0], x) - normal * _along(means[1], x)) * _along(scale, x)
        of_x = of_x if weight is None else of_x * _along(weight, x)
        found = None if weight is None else of_weight.to(weight.dtype)
        return of_x.to(x.dtype), found, of_bias.to(grad.dtype) if ctx.has_bias else None, None, None, None


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    """Broadcast along dim 1."""
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))
