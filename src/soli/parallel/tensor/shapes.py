"""Rules of functions that move elements without changing them: views, transposes, slices, joins."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soli.parallel.tensor.cut import Run, call, cut, part_of, shape_of, split_of, whole
from soli.parallel.tensor.split import Misfit, Split, agreed, origins_of, sliced, viewed


def view(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """view, reshape: to a logical shape."""
    x, *sizes = args
    sizes = sizes or list(kwargs.values())
    if sizes and isinstance(sizes[0], torch.dtype):
        raise Misfit(_split(x).origins, "a view as another type")
    return reshaped(run, x, _sizes(sizes), reshape=func is not Tensor.view)


def view_as(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    x, other = (*args, *kwargs.values())
    return reshaped(run, x, shape_of(other), reshape=func is not Tensor.view_as)


def reshaped(run: Run, x: Tensor, shape: tuple[int, ...], reshape: bool = True) -> Tensor:
    split = split_of(x)
    if split is None:
        return x.reshape(shape)
    old = shape_of(x)
    if -1 in shape:
        rest = prod(s for s in shape if s != -1)
        shape = tuple(prod(old) // max(rest, 1) if s == -1 else s for s in shape)
    if prod(shape) != prod(old):
        raise RuntimeError(f"shape {list(shape)} is invalid for a tensor of shape {list(old)}")
    found = viewed(split, old, shape, run.ranks)
    found = replace(found, lead=_lead(split, old, shape, found.dim))
    local = (*shape[: found.dim], found.local(run.axis.size, run.axis.index), *shape[found.dim + 1 :])
    return cut(x.reshape(local) if reshape else x.view(local), found)


def _lead(split: Split, old: tuple[int, ...], new: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Which dims became the first, when the cut one is not among them."""
    if len(new) == 2 and dim == 1:
        if len(old) == 2 and old[0] == new[0]:
            return split.lead
        if len(old) > 2 and prod(old[: len(old) - 1]) == new[0]:
            return old[: len(old) - 1]
    return ()


def flatten(run: Run, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    shape = shape_of(x)
    start, end = start_dim % len(shape), end_dim % len(shape)
    return reshaped(run, x, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))


def unflatten(run: Run, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    shape = shape_of(x)
    dim %= len(shape)
    sizes = tuple(sizes)
    if -1 in sizes:
        rest = -prod(sizes)
        sizes = tuple(shape[dim] // rest if s == -1 else s for s in sizes)
    return reshaped(run, x, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def squeeze(run: Run, x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    shape = shape_of(x)
    wanted = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % len(shape) for d in wanted if shape[d % len(shape)] == 1}
    return reshaped(run, x, tuple(s for d, s in enumerate(shape) if d not in gone))


def unsqueeze(run: Run, x: Tensor, dim: int) -> Tensor:
    split = _split(x)
    dim %= x.dim() + 1
    return cut(x.unsqueeze(dim), split.at(split.dim + (dim <= split.dim)))


def permuted(run: Run, x: Tensor, order: Sequence[int]) -> Tensor:
    split, order = _split(x), [d % x.dim() for d in order]
    return cut(x.permute(order), split.at(order.index(split.dim)))


def permute(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    x, *dims = args
    return permuted(run, x, _sizes(dims or [kwargs["dims"]]))


def transpose(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """transpose, swapaxes, swapdims, t, T, mT."""
    x, *dims = args
    name = getattr(func, "__name__", "")
    order = list(range(x.dim()))
    if name in ("transpose", "swapaxes", "swapdims"):
        a, b = (*dims, *kwargs.values())  # in either order it is the same
    elif name == "t":
        if x.dim() < 2:
            return x
        a, b = 0, 1
    elif func.__self__.__name__ == "T":
        return permuted(run, x, order[::-1])
    else:
        a, b = -1, -2
    order[a], order[b] = order[b], order[a]
    return permuted(run, x, order)


def movedim(run: Run, x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    n = x.dim()
    sources = [source % n] if isinstance(source, int) else [s % n for s in source]
    targets = [destination % n] if isinstance(destination, int) else [t % n for t in destination]
    rest = [d for d in range(n) if d not in sources]
    placed = dict(zip(targets, sources, strict=True))
    return permuted(run, x, [placed[d] if d in placed else rest.pop(0) for d in range(n)])


def expand(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    x, *sizes = args
    if getattr(func, "__name__", "") == "expand_as":
        new = shape_of(sizes[0] if sizes else kwargs["other"])
    else:
        new = _sizes(sizes or [kwargs["size"]])
    if split_of(x) is None:
        return x.expand(new)
    split = _split(x)
    at = split.at(split.dim + (len(new) - x.dim()))
    if new[at.dim] not in (-1, split.size):
        raise Misfit(split.origins, "the cut dim is expanded")
    return cut(x.expand(*new[: at.dim], -1, *new[at.dim + 1 :]), at)


def repeat_interleave(run: Run, x: Tensor, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Tensor:
    split = _split(x)
    if not isinstance(repeats, int) or dim is None:
        raise Misfit(split.origins, "repeated by a tensor or flat")
    result = x.repeat_interleave(repeats, dim)
    return cut(result, split) if dim % x.dim() != split.dim else cut(result, split.sized(tuple(p * repeats for p in split.parts)))


def repeat(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    x, *times = args
    split = _split(x)
    counts = _sizes(times or [kwargs["repeats"]])
    at = split.at(split.dim + len(counts) - x.dim())
    # the parts come again, one after the other
    return cut(x.repeat(counts), replace(at, parts=at.parts * counts[at.dim]))


# --- slices ---------------------------------------------------------------------------------------------


def narrowed(run: Run, x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Logical elements [start, stop) of a dim."""
    split = _split(x)
    if dim != split.dim:
        return cut(x.narrow(dim, start, stop - start), split)
    left = sliced(split, start, stop)
    before = sliced(split, 0, start).local(run.axis.size, run.axis.index) if start else 0
    return cut(x.narrow(dim, before, left.local(run.axis.size, run.axis.index)), left)


def narrow(run: Run, x: Tensor, dim: int, start: Any, length: int) -> Tensor:
    dim %= x.dim()
    first = int(start) % max(shape_of(x)[dim], 1) if start < 0 else int(start)
    return narrowed(run, x, dim, first, first + length)


def pieces(run: Run, func: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
    """split and chunk."""
    named = [v for k, v in kwargs.items() if k != "dim"]
    x, how, *rest = args if len(args) > 1 else (args[0], *named)
    dim = kwargs.get("dim", rest[0] if rest else 0) % x.dim()
    size = shape_of(x)[dim]
    if getattr(func, "__name__", "") == "chunk":
        how = -(-size // how) if isinstance(how, int) else how
    sizes = [min(how, size - at) for at in range(0, size, how)] if isinstance(how, int) else list(how)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    _all_borders(split_of(x), dim, starts)
    return tuple(narrowed(run, x, dim, start, start + n) for start, n in zip(starts, sizes, strict=True))


def _all_borders(split: Split | None, dim: int, starts: list[int]) -> None:
    """All borders that a cut lacks, in one Misfit."""
    if split is None or split.dim != dim or (split.spans and len(split.parts) == 1):
        return
    has = {sum(split.parts[:i]) for i in range(len(split.parts))}
    if lacking := tuple((s, split.size) for s in starts if s not in has):
        raise Misfit(split.origins, f"it is taken apart at {', '.join(str(s) for s, _ in lacking)}", borders=lacking)


def unbind(run: Run, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(select(run, x, dim, i) for i in range(shape_of(x)[dim]))


def select(run: Run, x: Tensor, dim: int, index: int) -> Tensor:
    split = _split(x)
    dim %= x.dim()
    if dim == split.dim:
        size = split.size
        raise Misfit(split.origins, "one element of the cut dim", borders=tuple((i, size) for i in range(1, size)))
    return cut(x.select(dim, index), split.at(split.dim - (dim < split.dim)))


def getitem(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """x[...]: slices, numbers, None and an ellipsis one after the other; tensors on dims that are not cut."""
    x, index = args
    split = split_of(x)
    if split is None:
        raise Misfit(frozenset(), "a whole tensor indexed by a cut one")
    if isinstance(index, list) and not all(isinstance(i, int) for i in index):
        raise Misfit(split.origins, "a list of indices")  # torch reads some as a tuple
    items = [_indices(i) for i in index] if isinstance(index, tuple) else [_indices(index)]
    if any(isinstance(i, bool) or (isinstance(i, Tensor) and i.dtype == torch.bool and i.dim() != 1) for i in items):
        raise Misfit(split.origins, "a mask over several dims or none")
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in [i for i in items if not isinstance(i, Tensor)]:
        items.append(Ellipsis)
    place = next(n for n, i in enumerate(items) if i is Ellipsis)
    items[place : place + 1] = [slice(None)] * (x.dim() - used)
    if tensors := [n for n, i in enumerate(items) if isinstance(i, Tensor)]:
        return _advanced(x, split, items, tensors)
    dim, result = 0, x
    for item in items:
        if item is None:
            result = call(torch.unsqueeze, result, dim)
            dim += 1
        elif isinstance(item, slice):
            result = _sliced(run, result, dim, item)
            dim += 1
        else:
            result = select(run, result, dim, int(item))
    return result


def _indices(item: Any) -> Any:
    """Numbers in a row as the tensor that torch makes of them."""
    in_a_row = isinstance(item, list | tuple | range | np.ndarray)
    return torch.as_tensor(item, dtype=torch.int64 if isinstance(item, list) and not item else None) if in_a_row else item


def _sliced(run: Run, x: Tensor, dim: int, item: slice) -> Tensor:
    split, size = _split(x), shape_of(x)[dim]
    start, stop, step = item.indices(size)
    if (start, stop, step) == (0, size, 1):
        return x
    if step == 1:
        return narrowed(run, x, dim, start, max(stop, start))
    if dim != split.dim:
        return cut(x[(slice(None),) * dim + (item,)], split)
    if split.spans:
        raise Misfit(split.origins, f"every {step}th position")
    if stop < size or start >= step or any(p % (split.atoms * step) for p in split.parts):
        each = split.parts[0] // step if len(set(split.parts)) == 1 and split.parts[0] % step == 0 else 0
        if each and start < step and stop >= size and gcd(split.atoms, each) < split.atoms:
            raise Misfit(split.origins, f"every {step}th element", atoms=gcd(split.atoms, each))
        raise Misfit(split.origins, f"every {step}th element of the cut dim")
    local = x[(slice(None),) * dim + (slice(start, None, step),)]
    return cut(local, replace(split, parts=tuple(p // step for p in split.parts)))


def _advanced(x: Tensor, split: Split, items: list[Any], tensors: list[int]) -> Tensor:
    if None in [i for i in items if not isinstance(i, Tensor)] or any(isinstance(i, int) for i in items):
        raise Misfit(split.origins, "an index of numbers and tensors")
    if len(tensors) != 1 or tensors[0] == split.dim:
        raise Misfit(split.origins, "indexed by tensors")
    if items[split.dim] != slice(None):
        raise Misfit(split.origins, "a slice of the cut dim beside a tensor")
    index = items[tensors[0]]
    more = (index.dim() - 1) if isinstance(index, Tensor) and index.dtype != torch.bool else 0
    return cut(x[tuple(items)], split.at(split.dim + (more if tensors[0] < split.dim else 0)))


# --- joins ----------------------------------------------------------------------------------------------


def cat(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    tensors, *rest = args
    dim = kwargs.get("dim", kwargs.get("axis", rest[0] if rest else 0))
    tensors = [x for x in tensors if len(shape_of(x)) > 1 or shape_of(x) != (0,)]
    dim %= max(len(shape_of(x)) for x in tensors)
    splits = [s for x in tensors if (s := split_of(x))]
    dims, origins = {s.dim for s in splits}, origins_of(splits)
    if len(dims) > 1:
        raise Misfit(origins, "tensors are joined that are cut along different dims")
    if dims != {dim}:
        split = agreed(splits, run.ranks)
        return cut(torch.cat([x if split_of(x) else part_of(run, x, split) for x in tensors], dim), split)
    if len(splits) < len(tensors) or len({(s.atoms, s.spans) for s in splits}) > 1:
        raise Misfit(origins, "cut and whole tensors are joined along the cut dim")
    parts = tuple(p for s in splits for p in s.parts)
    return cut(torch.cat(tensors, dim), replace(splits[0], parts=parts, origins=origins))


def stack(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    tensors, *rest = args
    dim = kwargs.get("dim", rest[0] if rest else 0) % (len(shape_of(tensors[0])) + 1)
    splits = [s for x in tensors if (s := split_of(x))]
    if len({s.dim for s in splits}) > 1:
        raise Misfit(origins_of(splits), "tensors are stacked that are cut along different dims")
    split = agreed(splits, run.ranks)
    return cut(torch.stack([x if split_of(x) else part_of(run, x, split) for x in tensors], dim), split.at(split.dim + (dim <= split.dim)))


def _split(x: Tensor) -> Split:
    found = split_of(x)
    if found is None:
        raise Misfit(frozenset(), "a whole tensor that a cut one takes elements of")
    return found


def _sizes(given: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(s) for s in (given[0] if len(given) == 1 and not isinstance(given[0], int) else given))


def gathered(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    """What every rank needs whole and nobody differentiates: argmax, item, a comparison of all elements."""
    return func(*(whole(run, x) for x in args), **{k: whole(run, v) for k, v in kwargs.items()})
