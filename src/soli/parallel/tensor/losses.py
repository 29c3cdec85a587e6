"""Rules of what is normalised over a dim that may be cut: softmax, log-sum-exp, cross-entropy, gather.

Cross-entropy over a cut vocabulary never sees a whole row of logits (Megatron-LM, arXiv 1909.08053, 3): the ranks
exchange four numbers a token: the largest logit, the sum of exponentials, the target's logit, the sum for smoothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from soli.mesh.collectives import Axis
from soli.parallel.tensor import moves
from soli.parallel.tensor.cut import Run, across, added, blamed, call, cut, entered, part_of, shape_of, split_of, whole
from soli.parallel.tensor.pointwise import along, pointwise
from soli.parallel.tensor.split import Misfit, Split, origins_of

_OF_CLASSES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
"""The arguments that losses over classes share, in torch's order."""


def softmax(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """softmax, log_softmax along any dim."""
    x, *rest = args
    split = split_of(x)
    dim = kwargs.get("dim", rest[0] if rest else None)
    if split is None or dim is None or dim % x.dim() != split.dim:
        return along(run, func, args, kwargs)
    dtype = kwargs.get("dtype", next((a for a in rest if isinstance(a, torch.dtype)), None))
    x = x.to(dtype) if dtype is not None else x
    shifted = x - _largest(run, x, split.dim)
    total = entered(run, added(run, shifted.exp().sum(split.dim, keepdim=True)))
    return cut(shifted - total.log(), split) if "log" in getattr(func, "__name__", "") else cut(shifted.exp() / total, split)


def logsumexp(run: Run, x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    split = split_of(x)
    if isinstance(dim, list | tuple) and len(dim) == 1:
        dim = dim[0]
    if split is None:
        return torch.logsumexp(x, dim, keepdim)
    if not isinstance(dim, int):
        raise Misfit(split.origins, "logsumexp over several dims")
    if dim % x.dim() != split.dim:
        gone = 0 if keepdim else int(dim % x.dim() < split.dim)
        return cut(torch.logsumexp(x, dim, keepdim), split.at(split.dim - gone))
    most = _largest(run, x, split.dim)
    result = added(run, (x - most).exp().sum(split.dim, keepdim=True)).log() + most
    return result if keepdim else result.squeeze(split.dim)


def _largest(run: Run, x: Tensor, dim: int) -> Tensor:
    """The largest of the whole dim, kept, as a constant."""
    with torch.no_grad():
        shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        most = x.amax(dim, keepdim=True) if x.shape[dim] else x.new_full(shape, -float("inf"))
        return across(moves.summed, most, run.axis, "largest logit", "max")


class _CrossEntropy(torch.autograd.Function):
    """Losses [n] of logits [n, v / ranks] and targets [n]; `start`: the first class that is this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, start: int, classes: int, smoothing: float, axis: Axis) -> Tensor:
        x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        own = x.shape[1]
        most = x.amax(1) if own else x.new_full((x.shape[0],), -float("inf"))
        most = moves.summed(most, axis, "largest logit", "max")
        mine = (target >= start) & (target < start + own)
        place, shifted = (target - start).masked_fill(~mine, 0), x - most.unsqueeze(1)
        # Not times `mine`: a class that is masked by -inf would make NaN of others' targets.
        none = torch.zeros_like(most)
        picked = torch.where(mine, shifted.gather(1, place.unsqueeze(1)).squeeze(1), none) if own else none
        share = shifted.sum(1) if smoothing else torch.zeros_like(most)
        weights = shifted.exp_()
        sums = torch.stack([weights.sum(1), picked, share])
        total, picked, share = moves.summed(sums, axis, "sums of the cross-entropy").unbind(0)
        ctx.smoothing, ctx.classes = smoothing, classes
        ctx.save_for_backward(weights.div_(total.unsqueeze(1)), mine, place)
        loss = total.log() - picked
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (total.log() - share / classes)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, mine, place = ctx.saved_tensors
        found = weights * grad.unsqueeze(1)
        if weights.shape[1]:
            found.scatter_add_(1, place.unsqueeze(1), (grad * mine * (ctx.smoothing - 1)).unsqueeze(1))
        if ctx.smoothing:
            found -= (ctx.smoothing / ctx.classes) * grad.unsqueeze(1)
        return found, None, None, None, None, None


def cross_entropy(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """F.cross_entropy of logits whose classes, or whose rows, are cut."""
    given = dict(zip((*_OF_CLASSES, "label_smoothing"), args, strict=False)) | kwargs
    x, target, split = given["input"], given["target"], split_of(given["input"])
    if split is None:
        return func(*args, **kwargs)
    classes_dim = 1 if x.dim() > 1 else 0
    ignore, weight = given.get("ignore_index", -100), given.get("weight")
    smoothing, reduction = given.get("label_smoothing", 0.0), given.get("reduction", "mean")
    if target.is_floating_point() or given.get("reduce") is not None or given.get("size_average") is not None:
        raise Misfit(split.origins, "cross-entropy with shares of classes as targets")
    if weight is not None and smoothing:
        raise Misfit(split.origins, "cross-entropy with weights and smoothing")
    if split.dim != classes_dim:
        return _by_rows(run, x, target, split, given)
    if split.spans:
        raise Misfit(split.origins, "classes that are positions of the sequence")
    shape = shape_of(x)
    _check_targets(target, shape[classes_dim], ignore)
    wanted = target.reshape(-1)
    flat = x.movedim(classes_dim, -1).reshape(wanted.numel(), x.shape[classes_dim])
    kept = wanted != ignore
    if len(split.parts) > 1:
        raise Misfit(split.origins, "a vocabulary in parts")
    start, safe = split.own(run.axis.size, run.axis.index)[0][0], wanted.masked_fill(~kept, 0)
    losses = _CrossEntropy.apply(flat, safe, start, shape[classes_dim], smoothing, run.axis)
    if run.partial:
        # the gradient of a loss is a part of a sum: each needs all of it
        losses = moves.enter(losses, run.axis)
    factors = kept.to(losses.dtype) if weight is None else kept * weight[safe]
    losses = torch.where(kept, losses, 0.0) * factors
    wide = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which leaves a loss in float32
    return _reduced(losses, factors, reduction, target.shape).to(losses.dtype if wide else x.dtype)


def _reduced(losses: Tensor, factors: Tensor, reduction: str, shape: Any) -> Tensor:
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / factors.sum() if reduction == "mean" else losses.view(shape)


def _by_rows(run: Run, x: Tensor, target: Tensor, split: Split, given: dict) -> Tensor:
    """Every rank has whole rows of logits, and some of the rows."""
    reduction, ignore = given.get("reduction", "mean"), given.get("ignore_index", -100)
    dim, known = split.dim - (split.dim > 1), split_of(target)
    if known is not None and not (known.dim == dim and known.fits(split.at(dim))):
        target, known = whole(run, target), None
    mine = target if known is not None else part_of(run, target, split.at(dim))
    more = {k: given[k] for k in ("weight", "ignore_index", "label_smoothing") if k in given}
    losses = cut(F.cross_entropy(x, mine, reduction="none", **more), split.at(dim))
    if reduction == "none":
        return losses
    total = call(torch.sum, losses)
    if reduction == "sum":
        return total
    target = whole(run, target)
    kept = target != ignore
    weight = given.get("weight")
    return total / (kept.sum() if weight is None else weight[target.masked_fill(~kept, 0)][kept].sum())


def _check_targets(target: Tensor, classes: int, ignore: int) -> None:
    """As torch does: a target outside the classes is an error, not a zero."""
    if target.device.type != "cpu" or not target.numel():
        return
    bad = ((target < 0) | (target >= classes)) & (target != ignore)
    if bool(bad.any()):
        raise IndexError(f"Target {int(target[bad][0])} is out of bounds.")


def nll_loss(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """F.nll_loss of log-probabilities whose classes are cut."""
    given = dict(zip(_OF_CLASSES, args, strict=False)) | kwargs
    x, target, split = given["input"], given["target"], split_of(given["input"])
    if split is None:
        return func(*args, **kwargs)
    if split.dim != (1 if x.dim() > 1 else 0) or given.get("weight") is not None:
        raise Misfit(split.origins, "nll_loss with weights, or of cut rows")
    ignore, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
    _check_targets(target, split.size, ignore)
    kept = target != ignore
    picked = _picked(run, x, split, target.masked_fill(~kept, 0).unsqueeze(split.dim)).squeeze(split.dim)
    return _reduced(torch.where(kept, -picked, 0.0), kept.to(x.dtype), reduction, target.shape)


def gather(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """torch.gather, take_along_dim: along the cut dim every rank gives what it has."""
    along = getattr(func, "__name__", "") == "take_along_dim"
    given = dict(zip(("input", "index", "dim") if along else ("input", "dim", "index"), args, strict=False)) | kwargs
    given["index"] = given.get("indices", given.get("index"))
    if given.get("dim") is None:
        raise Misfit(blamed(given.values()), "elements of a flat tensor")
    x, dim, index = given["input"], given["dim"] % given["input"].dim(), given["index"]
    split = split_of(x)
    if along:  # which counts from the end too
        index = call(torch.where, call(torch.lt, index, 0), call(torch.add, index, shape_of(x)[dim]), index)
    both = dim, dim if split is None else split.dim
    if given.get("out") is not None or (along and any(a != b for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if d not in both)):
        raise Misfit(origins_of(s for s in (split, split_of(index)) if s), "a tensor to write to, or an index that is broadcast")
    if split is None or split_of(index) is not None:
        return cut(x.gather(dim, index), _alike([x, index], dim))
    if dim == split.dim:
        _check_targets(index, split.size, 0)
        return _picked(run, x, split, index)
    if index.shape[split.dim] != split.size:
        raise Misfit(split.origins, "an index that is shorter than the cut dim")
    return cut(x.gather(dim, part_of(run, index, split)), split)


def scatter(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """scatter, scatter_add, ... of tensors that are cut alike, along another dim."""
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    # before it computes, which may write
    alike = _alike([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)], given["dim"] % given["input"].dim())
    if given.get("out") is not None:
        raise Misfit(alike.origins, "a tensor to write to")
    return cut(func(*args, **kwargs), alike)


def _alike(tensors: list[Tensor], dim: int) -> Split:
    """How all of them are cut."""
    splits = [s for x in tensors if (s := split_of(x)) is not None]
    if len(splits) < len(tensors) or any(s.dim == dim or (s.dim, s.size) != (splits[0].dim, splits[0].size) or not s.fits(splits[0]) for s in splits):
        raise Misfit(origins_of(splits), "a cut index")
    return splits[0]


def _picked(run: Run, x: Tensor, split: Split, index: Tensor) -> Tensor:
    if split.spans:
        raise Misfit(split.origins, "elements chosen along the sequence")
    (start, stop), *more = split.own(run.axis.size, run.axis.index)
    if more:
        raise Misfit(split.origins, "elements of a dim in parts")
    mine = (index >= start) & (index < stop)
    if start == stop:
        found = torch.zeros(index.shape, dtype=x.dtype, device=x.device) + 0 * x.sum()
    else:
        found = torch.where(mine, x.gather(split.dim, (index - start).masked_fill(~mine, 0)), 0.0)
    return added(run, found)


def elementwise_loss(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """mse_loss, l1_loss, binary_cross_entropy_with_logits, ...: element by element, then a sum or a mean."""
    kwargs = dict(kwargs)
    reduction = kwargs.pop("reduction", "mean")
    by_weights = func is F.mse_loss and kwargs.get("weight") is not None and reduction == "mean"
    if len(args) > 3 or not isinstance(reduction, str) or by_weights:
        raise Misfit(blamed(args), "a loss with reduction by position, or a mean by weights")
    if any(kwargs.pop(name, None) is not None for name in ("size_average", "reduce")):
        raise Misfit(blamed((*args, *kwargs.values())), "a loss with size_average or reduce")
    each = pointwise(run, func, args, {**kwargs, "reduction": "none"})
    if reduction == "batchmean":
        return call(torch.sum, each) / (shape_of(each) or (1,))[0]
    return each if reduction == "none" else call(torch.sum if reduction == "sum" else torch.mean, each)
