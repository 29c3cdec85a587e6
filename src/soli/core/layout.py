"""Which part of a global tensor a rank holds: boxes, and the arithmetic between boxes and flat ranges.

A *box* is a rectangular part of a tensor: offsets and sizes, one number a dim. ZeRO cuts tensors at
arbitrary elements of their flattened form; a flat range of a row-major tensor is a handful of boxes
(`flat_boxes`). What a checkpoint stores, and what a rank asks back, are boxes: resharding is then an
intersection of boxes, the same for every plan.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that cover elements [start, stop) of a row-major tensor, in flat order.

    At most 2 * len(shape) - 1 boxes. A 0-d tensor has one element and one box.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is no range of a tensor of shape {shape}")
    if start == stop:
        return []
    if len(shape) <= 1:
        return [Box((start,) * len(shape), (stop - start,) * len(shape))]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        return _inside(shape, first, start - first * inner, stop - first * inner)
    head = [] if start == first * inner else _inside(shape, first, start - first * inner, inner)
    tail = [] if stop == (last + 1) * inner else _inside(shape, last, 0, stop - last * inner)
    low, high = first + bool(head), last + 1 - bool(tail)
    return head + ([Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))] if high > low else []) + tail


def _inside(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    """The boxes of flat range [start, stop) within one row of the first dim."""
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in flat_boxes(shape[1:], start, stop)]


@dataclass
class Sharded:
    """One global tensor, of which this rank holds the given boxes (maybe none).

    Each piece is (box, tensor): the tensor has the box's sizes and may be a view of live memory. Other
    ranks may hold the same boxes; one of them is enough.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Box, Tensor]] = field(default_factory=list)


def from_whole(tensor: Tensor) -> Sharded:
    """A tensor that every rank holds whole."""
    shape = tuple(tensor.shape)
    return Sharded(shape, tensor.dtype, [(whole(shape), tensor)])


def from_flat(flat: Tensor, shape: tuple[int, ...], start: int) -> Sharded:
    """Elements [start, start + flat.numel()) of the row-major tensor of this shape, as views of `flat`."""
    pieces, at = [], 0
    for box in flat_boxes(tuple(shape), start, start + flat.numel()):
        pieces.append((box, flat[at : at + box.numel].view(box.sizes)))
        at += box.numel
    return Sharded(tuple(shape), flat.dtype, pieces)


@dataclass(frozen=True)
class Portion:
    """What a rank has of a tensor of `shape`: along each dim of `cuts` these [start, stop) ranges, side by side.

    A dim may be cut again: then the ranges are those of what the cuts before have left.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    def of_whole(self, local: Sharded) -> Sharded:
        """Boxes of the local part, as boxes of the whole tensor."""
        pieces = local.pieces
        for dim, ranges in reversed(self.cuts):
            pieces = [found for box, tensor in pieces for found in _spread(box, tensor, dim, ranges)]
        return Sharded(self.shape, local.dtype, pieces)

    def taken(self, whole: Tensor) -> Tensor:
        """The local part of a whole tensor."""
        for dim, ranges in self.cuts:
            whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim)
        return whole


def _spread(box: Box, tensor: Tensor, dim: int, ranges: tuple[tuple[int, int], ...]) -> list[tuple[Box, Tensor]]:
    """A box of the part, along `dim`, as boxes of the whole."""
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    found, at = [], 0
    for start, stop in ranges:
        a, b = max(low, at), min(high, at + stop - start)
        if a < b:
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = start + a - at, b - a
            found.append((Box(tuple(offsets), tuple(sizes)), tensor.narrow(dim, a - low, b - a)))
        at += stop - start
    return found


def even_parts(total: int, parts: int) -> list[tuple[int, int]]:
    """`total` things in `parts` contiguous [start, stop) ranges whose sizes differ by at most one."""
    size, more = divmod(total, parts)
    starts = [i * size + min(i, more) for i in range(parts + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))
