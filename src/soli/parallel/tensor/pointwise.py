"""Rules of functions that work element by element, and of sums over dims."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.functions import in_place
from soli.core.tables import table
from soli.parallel.tensor.cut import Run, added, call, cut, entered, part_of, shape_of, split_of, whole
from soli.parallel.tensor.split import Misfit, Split, agreed, origins_of

NAMES = table("soli.parallel", "functions.toml")
"""Functions of torch by what answers them, for rules.py too."""


def is_pointwise(name: str) -> bool:
    """Whether torch says so of its operator of this name (the tag), or we do."""
    if name in NAMES["pointwise"]:
        return True
    name = NAMES["operators"].get(name, name)
    packet = getattr(torch.ops.aten, name.rstrip("_") if not hasattr(torch.ops.aten, name) else name, None)
    return False if packet is None else any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def pointwise(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    """Broadcast: cut tensors agree on one dim of the result, whole ones give this rank's part of it."""
    leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    dims = max(len(shape_of(x)) for x in leaves)
    split = met(leaves, dims, run)
    if split is None:
        return func(*args, **kwargs)
    if run.finder is not None and run.hidden:
        run.finder.meet([s for x in leaves if (s := split_of(x)) is not None and s.origins])
        for x in leaves:
            if isinstance(x, nn.Parameter) and (dim := split.dim - (dims - x.dim())) >= 0:
                run.finder.choose_along(x, split.at(dim))
    if "out" in kwargs:
        raise Misfit(split.origins, "a result that is written to a given tensor")
    fits = lambda found, x: found is not None and found.dim + dims - x.dim() == split.dim and found.fits(split)
    if in_place(func) and not fits(split_of(leaves[0]), leaves[0]):
        how = "a whole tensor" if split_of(leaves[0]) is None else "a tensor cut otherwise"
        raise Misfit(split.origins, f"{how} is changed in place by a cut one")

    def local(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        found = split_of(x)
        if fits(found, x):
            return x
        dim, mine = split.dim - (dims - x.dim()), split.local(run.axis.size, run.axis.index)
        if found is None and dim >= 0 and x.shape[dim] == mine and mine not in (1, split.size):
            # No whole tensor has this size: it is a gradient, in the backward of a function of the model's own.
            return x
        x = whole(run, x)
        return entered(run, x) if dim < 0 else part_of(run, x, split.at(dim))

    result = func(*(local(x) for x in args), **{k: local(v) for k, v in kwargs.items()})
    if result is leaves[0] and not in_place(func):
        # contiguous() of a part that is so already. Other ranks' parts may not be: what is remembered of a tensor
        # (that it was gathered) must be of the same one everywhere.
        result = result.view_as(result)
    return result if isinstance(result, str) else _cut_all(result, split)  # x.type()


def _cut_all(result: Any, split: Split) -> Any:
    """One tensor, or each of several."""
    return cut(result, split) if isinstance(result, Tensor) else result if isinstance(result, str) else type(result)(cut(x, split) for x in result)


def where(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    """torch.where; of one tensor, the places where it is true, which are of the whole."""
    if len(args) + len(kwargs) == 1:
        return func(*(whole(run, x) for x in args), **{k: whole(run, v) for k, v in kwargs.items()})
    return pointwise(run, func, args, kwargs)


def met(leaves: list[Tensor], dims: int, run: Run) -> Split | None:
    """Where tensors that broadcast to so many dims are cut together. A cut along the sequence gives way to others."""
    splits = [s.at(s.dim + dims - x.dim()) for x in leaves if (s := split_of(x))]
    owned = [s for s in splits if s.origins] or splits[:1]
    wide = lambda s: any(x.dim() >= dims - s.dim and shape_of(x)[s.dim - dims] != s.size for x in leaves)
    if len({s.dim for s in owned}) > 1 or any(s.size == 1 and wide(s) for s in owned):
        raise Misfit(origins_of(owned), "tensors meet that are cut along different dims, or broadcast along the one that is cut")
    return agreed(owned, run.ranks) if owned else None


def cast(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """x.to(...), x.type_as(y): y says a type and nothing of the layout."""
    split, result = split_of(args[0]), func(*args, **kwargs)
    return result if split is None else cut(result, split)


# --- sums over dims -------------------------------------------------------------------------------------


def reduction(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    """sum, mean, any, all, amax, amin, ... over dims: local unless the cut dim is among them."""
    x, *rest = args
    split, name = split_of(x), getattr(func, "__name__", "")
    if any(isinstance(y, Tensor) for y in (*rest[:1], kwargs.get("other"))):  # torch.max of two tensors
        return pointwise(run, func, args, kwargs)
    if split is None:
        return func(*args, **kwargs)
    flat = bool(rest) and isinstance(rest[0], bool)  # x.std(False): unbiased, and no dim
    names = ("dim", "unbiased", "keepdim")[flat:] if name in ("var", "std") else ("dim", "keepdim")
    given = dict(zip(names, rest, strict=False)) | {NAMES["of_numpy"].get(k, k): v for k, v in kwargs.items()}
    dim, keep = given.get("dim"), bool(given.get("keepdim", False))
    count = x.dim()
    dims = range(count) if dim is None or dim == () else [dim] if isinstance(dim, int) else list(dim)
    over = {d % count for d in dims}
    if split.dim not in over:
        result = func(*args, **kwargs)
        first = result if isinstance(result, Tensor) else result[0]
        return _cut_all(result, split.at(split.dim - (sum(d < split.dim for d in over) if first.dim() < count else 0)))
    if name == "var" and len(over) == 1:
        return _variance(x, split.dim, given, keep)
    if name not in ("sum", "mean"):
        raise Misfit(split.origins, f"{name} over the dim that is cut")
    total = added(run, torch.sum(x, dim=tuple(over), keepdim=keep, dtype=given.get("dtype")))
    return total if name == "sum" else total / prod(shape_of(x)[d] for d in over)


def _variance(x: Tensor, dim: int, given: dict[str, Any], keep: bool) -> Tensor:
    """torch.var along the dim that is cut, from two means."""
    less = given.get("correction")
    less = int(given.get("unbiased", True)) if less is None else less
    centred = call(torch.sub, x, call(torch.mean, x, dim=dim, keepdim=True))
    return call(torch.sum, call(torch.mul, centred, centred), dim=dim, keepdim=keep) / (shape_of(x)[dim] - less)


def along(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    """Functions along one dim that keep it: cumsum, softmax, sort, topk, ..."""
    x, *rest = args
    split = split_of(x)
    if split is None:
        return func(*args, **kwargs)
    place = 1 if getattr(func, "__name__", "") == "topk" else 0  # after k
    dim = kwargs.get("dim", kwargs.get("axis", rest[place] if len(rest) > place else -1))
    if isinstance(dim, int) and dim % x.dim() != split.dim:
        return _cut_all(func(*args, **kwargs), split)
    raise Misfit(split.origins, f"{getattr(func, '__name__', func)} along the dim that is cut")
