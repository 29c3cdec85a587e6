"""Where a tensor is cut over the tensor axis: one dim, in parts, each of the same number of atoms.

    dim of size 3C, a fused QKV       parts (C, C, C), atoms = heads
    rank 0 of 2                       [first half of Q's heads | of K's | of V's]
    sequence of 8 over cp, balanced   parts (8,), spans (0-2, 6-8), (2-4, 4-6)

An *atom* is what may not be torn apart: a head, a group of heads that share a key, an element. Rank r owns the
same atoms of every part, as even as they go. So two dims with equal numbers of parts and atoms are cut at the
same fractions, whatever their sizes, and every view, slice or product keeps that: the number of atoms is what
tensors that meet must agree on. A sequence may be shared out otherwise: `spans` says which ranges of every part a
rank owns, and a slice of it keeps what is left of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import gcd, prod

import torch
from torch import Tensor

from soli.core.layout import even_parts

Spans = tuple[tuple[tuple[int, int], ...], ...]
"""By rank: the [start, stop) ranges that it owns, in order."""


@dataclass(frozen=True)
class Split:
    """A cut of `dim` (>= 0, of the logical tensor). `origins`: the parameters whose layout led to it.

    Without origins it is a cut along the sequence: a choice of the plan's, which a whole tensor can always replace.
    """

    dim: int
    parts: tuple[int, ...]
    atoms: int
    origins: frozenset[str] = field(default=frozenset(), compare=False)
    lead: tuple[int, ...] = field(default=(), compare=False)  # what a view merged into the first dim
    # of a grid in 3D, where hidden sizes are cut over two in turn
    axis: str = field(default="", compare=False)
    spans: Spans = ()  # by rank; without them the atoms of every part are shared out evenly

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return sum(self.parts)

    def own(self, ranks: int, rank: int) -> list[tuple[int, int]]:
        """The [start, stop) ranges of the dim that a rank owns, in the order in which it has them."""
        starts = [sum(self.parts[:i]) for i in range(len(self.parts))]
        if self.spans:
            return [(at + a, at + b) for at in starts for a, b in self.spans[rank]]
        first, last = even_parts(self.atoms, ranks)[rank]
        atoms = [part // self.atoms for part in self.parts]
        return [(at + first * atom, at + last * atom) for at, atom in zip(starts, atoms, strict=True)]

    def local(self, ranks: int, rank: int) -> int:
        """The size of a rank's part of the dim."""
        return sum(stop - start for start, stop in self.own(ranks, rank))

    def at(self, dim: int) -> Split:
        return replace(self, dim=dim)

    def sized(self, parts: tuple[int, ...]) -> Split:
        """The same cut of parts of other sizes. Misfit where a span would end inside an element."""
        if not self.spans:
            return replace(self, parts=parts)
        new, old = parts[0], self.parts[0]
        if any(bound * new % old for own in self.spans for span in own for bound in span):
            raise Misfit(self.origins, f"{old} positions become {new}")
        spans = tuple(tuple((a * new // old, b * new // old) for a, b in own) for own in self.spans)
        return replace(self, parts=parts, spans=spans)

    def fits(self, other: Split) -> bool:
        """Cut at the same fractions: same number of atoms, parts in the same proportions."""
        if self.spans or other.spans:
            return self.spans == other.spans and self.parts == other.parts
        scaled = tuple(p * other.size for p in self.parts) == tuple(p * self.size for p in other.parts)
        return scaled and self.atoms == other.atoms


def origins_of(splits: Iterable[Split]) -> frozenset[str]:
    """The parameters whose layout led to any of these cuts."""
    return frozenset().union(*(split.origins for split in splits))


class Misfit(Exception):  # noqa: N818 - it is no error: a finder answers it with another layout
    """A layout that an operation cannot keep. What to change: fewer atoms, more parts, or replicate."""

    def __init__(
        self,
        origins: frozenset[str],
        why: str,
        *,
        atoms: int = 0,
        borders: tuple[tuple[int, int], ...] = (),  # fractions of the dim, as (numerator, denominator)
        flat: bool = False,  # a grid may not cut them both ways
    ) -> None:
        super().__init__(why)
        self.flat = flat
        self.origins, self.why, self.atoms, self.borders = origins, why, atoms, borders


def agreed(splits: list[Split], ranks: int) -> Split:
    """The cut of tensors that meet in one dim (which may have several sizes). Misfit where they differ."""
    first = splits[0]
    for other in splits[1:]:
        if first.fits(other):
            first = replace(first, origins=first.origins | other.origins)
            continue
        atoms = [s.atoms for s in splits]
        same = all(tuple(p * s.size for p in first.parts) == tuple(p * first.size for p in s.parts) for s in splits)
        everyone = origins_of(splits)
        if not same:
            raise Misfit(everyone, "tensors meet that are cut in other places")
        least = gcd(*atoms)
        if least >= ranks:
            raise Misfit(everyone, f"tensors meet that have {least} units in common", atoms=least)
        coarse = min(splits, key=lambda s: s.atoms)
        why = f"it has {coarse.atoms} units and meets tensors of {max(atoms)}, and {ranks} ranks share them"
        raise Misfit(coarse.origins or everyone, why)
    return first


def taken(whole: Tensor, split: Split, ranks: int, rank: int) -> Tensor:
    """A rank's part of a whole tensor. A view where it is one piece."""
    if ranks == 1:
        return whole
    pieces = [whole.narrow(split.dim, a, b - a) for a, b in split.own(ranks, rank) or [(0, 0)]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, split.dim)


def together(locals_: list[Tensor], split: Split) -> Tensor:
    """The whole tensor from all ranks' parts."""
    if len(locals_) == 1:
        return locals_[0]
    pieces = []
    for r, local in enumerate(locals_):
        at = 0
        for start, stop in split.own(len(locals_), r):
            pieces.append((start, local.narrow(split.dim, at, stop - start)))
            at += stop - start
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda found: found[0])], split.dim)


# --- views ----------------------------------------------------------------------------------------------


def viewed(split: Split, old: tuple[int, ...], new: tuple[int, ...], ranks: int) -> Split:
    """The cut of a tensor of logical shape `old` seen as `new` (row-major). Misfit where there is none."""
    if old == new:
        return split
    if 0 in old and new.count(0) == 1:  # sizes do not say which dims nothing was merged of: take one for none
        old = tuple(n or 1 for n in old)
        new = tuple(n or prod(old) // prod(m or 1 for m in new) for n in new)
    low, high, first, last = _group(old, new, split.dim)
    outer, inner = prod(old[low : split.dim]), prod(old[split.dim + 1 : high])
    parts, dims = tuple(p * inner for p in split.parts) * outer, list(range(first, last))
    while dims:
        dim = dims.pop(0)
        size = new[dim]
        if size == 1:
            continue
        equal = len(set(parts)) == 1
        if len(parts) > 1 and equal and len(parts) % size == 0:
            parts = parts[: len(parts) // size]
            continue
        left, even = [d for d in dims if new[d] > 1], equal and size % len(parts) == 0
        if not even and left:
            raise Misfit(split.origins, f"a view as {new} tears its parts apart")
        each = size // len(parts) if even else 0
        if not each:  # the last dim of the group: it is the flat dim itself
            return split.at(dim).sized(parts)
        atoms = gcd(split.atoms, each)
        if atoms != split.atoms:
            if atoms < ranks and len(left) > 1 and len(parts) == 1:
                borders = tuple((i, size) for i in range(1, size))
                raise Misfit(split.origins, f"a dim of {size} is outermost in {new}", borders=borders)
            raise Misfit(split.origins, f"seen as {new}, it has {atoms} units to share", atoms=atoms)
        return split.at(dim).sized((each,) * len(parts))
    raise Misfit(split.origins, f"a view as {new} leaves nothing to cut")


def _group(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> tuple[int, int, int, int]:
    """The smallest run of old dims with `dim` in it, and the run of new dims of the same elements."""
    i = j = 0
    while True:
        low, first = i, j
        i, j = i + 1, j + 1
        a, b = old[low], new[first] if first < len(new) else 1
        while a != b:
            if a < b:
                a *= old[i]
                i += 1
            else:
                b *= new[j]
                j += 1
        if low <= dim < i:
            # Ones that follow belong to the run too: a dim that is split off last may be one of them.
            while j < len(new) and new[j] == 1 and i == len(old):
                j += 1
            return low, i, first, min(j, len(new))


def sliced(split: Split, start: int, stop: int) -> Split:
    """The cut of elements [start, stop) of the cut dim: whole parts only."""
    borders = list(accumulate(split.parts, initial=0))
    if start in borders and stop in borders:
        return replace(split, parts=split.parts[borders.index(start) : borders.index(stop)], lead=())
    if split.spans and len(split.parts) == 1:
        within = lambda place: min(max(place, start), stop) - start
        clipped = lambda spans: tuple((within(a), within(b)) for a, b in spans if within(a) < within(b))
        n = stop - start
        return replace(split, parts=(n,), atoms=n, spans=tuple(map(clipped, split.spans)), lead=())
    wanted = tuple((b, split.size) for b in (start, stop) if b not in borders)
    raise Misfit(split.origins, f"elements {start} to {stop} of {split.size} are used apart", borders=wanted)
