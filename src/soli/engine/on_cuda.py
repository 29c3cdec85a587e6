"""What a CUDA device would keep of a program that is rehearsed on the CPU: where torch takes other kernels and casts there.

RMSNorm is one kernel, which keeps one number a row, where the CPU's is written out and keeps what is scaled (ATen/native/layer_norm.cpp).
torch.autocast computes other functions in fp32 than on the CPU, by torch's own list (ATen/autocast_mode.h), and hands cross_entropy's softmax
through in 16 bits. The norm and the loss were measured on an H100 (benchmarks/results/gpu.md), the rest of the list was not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from soli.core.functions import name_of
from soli.parallel.randomness import BACKWARD, backward_of
from soli.parallel.tensor.pointwise import NAMES

TYPED = frozenset(NAMES["typed"])
"""Functions that autocast asks for results in fp32, where the caller asks for nothing."""
WIDE = frozenset(NAMES["wide"])
"""Functions that read 16 bits as fp32."""
OTHERWISE = TYPED | WIDE | {"cross_entropy"}
_composed = torch.rms_norm


@contextmanager
def as_on(device: str) -> Iterator[None]:
    """Within, operations of CPU tensors keep what they would keep on a device of this type."""
    if device != "cuda":
        yield
        return
    with patch.object(torch, "rms_norm", _rms_norm), _Casts():
        yield


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    if weight is not None and weight.dtype != x.dtype:  # then on CUDA too
        return _composed(x, shape, weight, eps)
    return _OneKernel.apply(x, weight, x.shape[: x.dim() - len(shape)])


class _OneKernel(torch.autograd.Function):
    """Reads a tensor, writes one, keeps what it read and a number a row; its values say nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: torch.Size) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return x.mul(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = ctx.saved_tensors[1]
        return grad.mul(1), None if weight is None else torch.empty_like(weight), None


class _Casts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD:
            with self:  # a mode is off inside its own handler, and blocks may be made again
                return backward_of(*args, **kwargs)
        name = name_of(func)
        if name not in OTHERWISE or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        if name == "cross_entropy":
            return _cross_entropy(*args, **kwargs)
        if name in WIDE:
            return func(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})
        given = [*args, *kwargs.values()]
        if any(map(_is_narrow, given)) and not any(isinstance(x, torch.dtype) for x in given):
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


def _cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None, **more: Any) -> Tensor:
    """F.cross_entropy: its softmax as it is given them, its loss in fp32."""
    if not _is_narrow(logits) or target.is_floating_point() or more.get("label_smoothing"):
        return F.cross_entropy(logits, target, weight, **more)
    with torch.autocast("cpu", enabled=False):
        found = torch.log_softmax(logits, 1)
    more.pop("label_smoothing", None)
    return F.nll_loss(found.float(), target, weight, **more)


def _is_narrow(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)


def _widened(x: Any) -> Any:
    return x.float() if _is_narrow(x) else x
