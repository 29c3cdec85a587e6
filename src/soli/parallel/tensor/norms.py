"""Norms over a hidden size that is cut: a rank has a part of every token, and the ranks add up its moments.

    y[T, H_C] = (x[T, H_C] - mean[T]) * rstd[T] * weight[H_C] + bias[H_C]

Two sums forward (the mean, then what is left of it: exact where the mean is large) and one backward, of two numbers a
token; one each for the root mean square alone.

    Legend: t tokens, h this rank's hidden size, H all of it
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from soli.mesh.collectives import Axis
from soli.parallel.tensor import moves
from soli.parallel.tensor.cut import Run, deeper, marked, part_of, plain, shape_of, split_of
from soli.parallel.tensor.split import Misfit, Split


def norm(run: Run, name: str, x: Tensor, split: Split, rest: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """layer_norm(x, [H], weight, bias, eps) and rms_norm(x, [H], weight, eps) of x [.., h], cut by `split`."""
    centred = name == "layer_norm"
    given = dict(zip(("weight", "bias", "eps") if centred else ("weight", "eps"), rest, strict=False)) | kwargs
    weight, bias = (_own(run, given.get(key), split.at(0)) for key in ("weight", "bias"))
    eps = given.get("eps", 1e-5 if centred else None)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return marked(_Norm.apply(plain(x), weight, bias, eps, shape_of(x)[-1], centred, run.axis), deeper(x))


def _own(run: Run, weight: Tensor | None, split: Split) -> Tensor | None:
    if weight is None:
        return None
    if run.finder is not None and isinstance(weight, nn.Parameter):
        run.finder.choose_along(weight, split)
    known = split_of(weight)
    if known is None:
        return part_of(run, weight, split)
    if not known.fits(split):
        raise Misfit(known.origins | split.origins, "a norm's weight is cut in other places than its input")
    return weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, size: int, centred: bool, axis: Axis) -> Tensor:  # fmt: skip
        with torch._C.DisableTorchFunctionSubclass():
            high = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
            if centred:
                mean = moves.summed(high.sum(-1, keepdim=True), axis, "mean of a norm") / size
                high = high - mean
            square = moves.summed(high.square().sum(-1, keepdim=True), axis, "mean square of a norm") / size
            rstd = (square + eps).rsqrt()
            normed = high * rstd
            ctx.save_for_backward(normed, rstd, weight)
            ctx.known = size, centred, axis, x.dtype, bias is not None
            y = normed if weight is None else normed * weight
            return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        normed, rstd, weight = ctx.saved_tensors
        size, centred, axis, dtype, has_bias = ctx.known
        with torch._C.DisableTorchFunctionSubclass():
            grad = grad.to(normed.dtype)
            over = tuple(range(grad.dim() - 1))
            of_weight = None if weight is None else (grad * normed).sum(over).to(weight.dtype)
            of_bias = grad.sum(over).to(grad.dtype if weight is None else weight.dtype) if has_bias else None
            own = grad if weight is None else grad * weight
            parts = [(own * normed).sum(-1, keepdim=True), *([own.sum(-1, keepdim=True)] if centred else [])]
            means = moves.summed(torch.cat(parts, -1), axis, "moments of a norm's gradient") / size
            dx = own - normed * means[..., :1]
            if centred:
                dx = dx - means[..., 1:]
            return (dx * rstd).to(dtype), of_weight, of_bias, None, None, None, None
