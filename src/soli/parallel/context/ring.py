"""Ring attention (arXiv 2310.01889): queries stay, keys and values go round, softmax is put together as they come.

Every rank passes its keys and values on, p - 1 times, and meanwhile computes with those it has. Backward they go round
again (nothing of the whole sequence is kept), and the sums of their gradients after them, to the owners: what a rank
finds of its own keys waits for the rest at home, so these move p - 1 times as well.

The double ring (LoongTrain, arXiv 2406.18485) goes round inner rings, each of which works on the blocks of one of them
at a time; meanwhile these blocks move to the next inner ring. The single ring is the double one with one inner ring.

Which positions a rank owns is free: with a causal mask, spans in zigzag give each rank the same work.

    Legend: b batch, h heads of queries, g heads of keys, l local queries, s local keys, S all keys, e head size of
    q and k, f head size of v; p ranks
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from soli.core.errors import SoliError
from soli.mesh.collectives import Axis, exchange
from soli.parallel.context import blocks
from soli.parallel.precision import lowered
from soli.parallel.tensor.moves import then
from soli.parallel.tensor.split import Spans
from soli.parallel.tensor.summa import Range, append
from soli.parallel.tensor.summa import columns as columns_of

KEYS = "keys and values of a ring"
GRADIENTS = "gradients of keys and values of a ring"
FAR = 1e3


# --- what is computed ---------------------------------------------------------------------------------------


class Call(NamedTuple):
    """Local queries `rows` with the keys `columns` of a block: all of them, or, `diagonal`, of the same positions."""

    rows: Range
    columns: Range
    diagonal: bool


class _Piece(NamedTuple):
    at: int  # where it begins in the local tensor
    start: int
    stop: int

    @property
    def local(self) -> Range:
        return self.at, self.at + self.stop - self.start


def _joined(spans: tuple[Range, ...]) -> list[Range]:
    """The same positions in the same order in as few ranges as can be."""
    found: list[Range] = []
    for start, stop in spans:
        if stop > start:
            append(found, start, stop)
    return found


def _pieces(spans: list[Range], borders: set[int]) -> list[_Piece]:
    """The spans, cut at the borders."""
    found, at = [], 0
    for start, stop in spans:
        marks = [start, *sorted(b for b in borders if start < b < stop), stop]
        found += [_Piece(at + a - start, a, b) for a, b in pairwise(marks)]
        at += stop - start
    return found


@cache
def calls(queries: tuple[Range, ...], keys: tuple[Range, ...], causal: bool) -> tuple[Call, ...]:
    """What one rank computes of one block, with as few calls as can be; nothing that causality hides.

    With borders in common, a piece of queries and one of keys are the same, or one lies before the other wholly: no
    call needs a mask for causality but the kernel's own.
    """
    rows, columns = _joined(queries), _joined(keys)
    if not rows or not columns:
        return ()
    if not causal:
        return (Call((0, length(queries)), (0, length(keys)), False),)
    borders = {border for span in (*rows, *columns) for border in span}
    seen: list[tuple[Range, list[Range]]] = []
    diagonals = []
    for piece in _pieces(rows, borders):
        full: list[Range] = []
        for other in _pieces(columns, borders):
            if other.start == piece.start:
                diagonals.append(Call(piece.local, other.local, True))
            elif other.start < piece.start:
                append(full, *other.local)
        if seen and seen[-1][1] == full:
            seen[-1] = ((seen[-1][0][0], piece.local[1]), full)
        else:
            seen.append((piece.local, full))
    return (*(Call(local, c, False) for local, full in seen for c in full), *diagonals)


def length(spans: tuple[Range, ...]) -> int:
    """How many positions these are."""
    return sum(stop - start for start, stop in spans)


def positions(spans: tuple[Range, ...], local: Range) -> list[Range]:
    """The positions of the local range [start, stop), in order."""
    found = []
    for piece in _pieces(_joined(spans), set()):
        start, stop = max(local[0], piece.at), min(local[1], piece.local[1])
        if start < stop:
            found.append((piece.start + start - piece.at, piece.start + stop - piece.at))
    return found


# --- what moves ---------------------------------------------------------------------------------------------


class Rings(NamedTuple):
    """Rank r of the whole axis is number `inner.index` of inner ring number `outer.index`."""

    inner: Axis
    outer: Axis

    def owner(self, round: int, turn: int) -> int:
        """Whose block is here at this turn of this round."""
        ring = (self.outer.index - round) % self.outer.size
        return ring * self.inner.size + (self.inner.index - turn) % self.inner.size


class Step(NamedTuple):
    round: int
    turn: int
    owner: int
    block: Tensor  # flat


def rings(axis: Axis, inner: Axis | None = None, outer: Axis | None = None) -> Rings:
    """The single ring over the axis, or the double one."""
    found = Rings(inner or axis, outer or Axis("outer ring"))
    if found.inner.size * found.outer.size != axis.size or found.owner(0, 0) != axis.index:
        got = f"{found.outer.size} rings of {found.inner.size} ranks, of {axis.size} ranks on {axis.name}"
        allowed = "rank r of the axis = number in the outer ring * size of the inner one + number in the inner ring"
        raise SoliError("inner and outer rings do not make up their axis", got=got, allowed=allowed)
    return found


def travel(block: Tensor, sizes: list[int], ways: Rings, label: str) -> Iterator[Step]:
    """Every rank's flat block, of `sizes` elements, this rank's own first; the next is under way meanwhile.

    p - 1 exchanges: all but one turn of a round inside the inner ring, all but one round to the outer one.
    """
    for round in range(ways.outer.size):
        ahead = None
        if round + 1 < ways.outer.size:  # it has the whole round to arrive
            ahead = passed_on(block, sizes[ways.owner(round + 1, 0)], ways.outer, label)
        for turn in range(ways.inner.size):
            coming = None
            if turn + 1 < ways.inner.size:
                coming = passed_on(block, sizes[ways.owner(round, turn + 1)], ways.inner, label)
            yield Step(round, turn, ways.owner(round, turn), block)
            if coming is not None:
                block = coming()
        if ahead is not None:
            block = ahead()


def passed_on(sent: Tensor, numel: int, axis: Axis, label: str) -> Callable[[], Tensor]:
    """Begin to send to the next rank; what is returned waits for the `numel` elements of the one before."""
    received = sent.new_empty(numel)
    following, previous = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    return then(exchange(received, sent, axis, following, previous, label=label, wait=False), lambda: received)


class Homeward:
    """Sums of gradients of the blocks that `travel` brings, which go after them and end at the blocks' owners.

    A rank's part of the block that a round begins with (in the first round its own) stays, and what the other ranks
    of the inner ring found comes to it at the round's end; it is then that the sum goes to the next inner ring, beside
    the next round's first turn. So there are p - 1 exchanges, along the same ways as those of the blocks.
    """

    def __init__(self, sizes: list[int], ways: Rings, like: Tensor) -> None:
        self.sizes, self.ways, self.like = sizes, ways, like
        self.round = -1
        self.stays: Tensor | None = None
        self.own: Tensor | None = None
        self.coming: Callable[[], Tensor] | None = None
        self.from_outer: Callable[[], Tensor] | None = None

    def add(self, step: Step, part: Tensor | None) -> None:
        """`part`, flat, is what this rank found of the step's block; None: nothing of it was seen here."""
        if step.turn == 0:
            self._end_round()
            self.round, self.stays = step.round, part
            return
        total = self._sum(step.owner, self.coming, part)
        size = self.sizes[self.ways.owner(step.round, step.turn + 1)]
        self.coming = passed_on(total, size, self.ways.inner, GRADIENTS)

    def finish(self) -> Tensor:
        """The gradient of this rank's own block."""
        self._end_round()
        return self._sum(self.ways.owner(0, 0), self.from_outer, self.own)

    def _end_round(self) -> None:
        if self.round < 0:
            return
        total = self._sum(self.ways.owner(self.round, 0), self.coming, self.stays)
        self.coming = self.stays = None
        if self.round == 0:
            self.own = total
            return
        if self.from_outer is not None:
            total = self.from_outer().add_(total)
        self.from_outer = passed_on(total, self.sizes[self.ways.owner(self.round + 1, 0)], self.ways.outer, GRADIENTS)

    def _sum(self, owner: int, coming: Callable[[], Tensor] | None, part: Tensor | None) -> Tensor:
        if coming is None:
            return self.like.new_zeros(self.sizes[owner]) if part is None else part
        return coming() if part is None else coming().add_(part)


# --- attention ----------------------------------------------------------------------------------------------


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, of_q: Spans, of_k: Spans, axis: Axis, causal: bool = False, mask: Tensor | None = None,
    scale: float | None = None, inner: Axis | None = None, outer: Axis | None = None,
) -> Tensor:  # fmt: skip
    """F.scaled_dot_product_attention of a sequence that is cut: q [.., h, l, e], k [.., g, s, e], v [.., g, s, f] ->
    [.., h, l, f], this rank's rows. g divides h.

    `causal`: a query at position i sees keys at j <= i. `mask`: of this rank's rows, [.., l or 1, S] with the keys in
    order of position, bool (True may be seen) or added. Both may be given. A row that sees nothing is zeros.

    Every rank of the axis calls it, and runs its backward. What is added may be any large negative number instead of
    -inf; of a row in which every key has one, the scores alone decide, where torch's rounding makes all keys alike.
    """
    work = _Work(of_q, of_k, causal, q.shape[-1] ** -0.5 if scale is None else scale, rings(axis, inner, outer))
    q, k, v = lowered(q), lowered(k), lowered(v)
    _check(q, k, v, mask, work)
    lead, (heads, rows) = q.shape[:-3], q.shape[-3:-1]
    if mask is not None:
        mask = _four_dims(mask, lead, rows, sum(map(length, of_k)))
    q, k, v = (x.reshape(lead.numel(), *x.shape[-3:]) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _Ring.apply(q, k, v, mask, work)
    return out.view(*lead, heads, rows, v.shape[-1])


@dataclass(frozen=True)
class _Work:
    """What a ring computes, beside its tensors."""

    of_q: Spans
    of_k: Spans
    causal: bool
    scale: float
    ways: Rings

    def calls(self, owner: int) -> tuple[Call, ...]:
        return calls(self.of_q[self.ways.owner(0, 0)], self.of_k[owner], self.causal)

    def sizes(self, k: Tensor, v: Tensor) -> list[int]:
        """Elements of each rank's keys and values."""
        each = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
        return [each * length(spans) for spans in self.of_k]

    def opened(self, block: Tensor, owner: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The owner's keys [b, g, s, e] and values [b, g, s, f] in a flat block; k and v are of any rank."""
        (b, g, _, e), s, f = k.shape, length(self.of_k[owner]), v.shape[3]
        keys, values = block.split([b * g * s * e, b * g * s * f])
        return keys.view(b, g, s, e), values.view(b, g, s, f)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, work: _Work) -> Tensor:
        off = _taken_off(mask, work)
        out, lse = _forward(q, k, v, mask, off, work)
        ctx.save_for_backward(q, k, v, mask, off, out, lse)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_backward(grad, ctx.saved_tensors, ctx.work), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, off: Tensor | None, work: _Work) -> tuple[Tensor, Tensor]:
    """out [b, h, l, f] in q's type, and lse [b, h, l]."""
    high = blocks.sums(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=high)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=high)
    for step in travel(torch.cat([k.reshape(-1), v.reshape(-1)]), work.sizes(k, v), work.ways, KEYS):
        keys, values = work.opened(step.block, step.owner, k, v)
        for call in work.calls(step.owner):
            i, j = slice(*call.rows), slice(*call.columns)
            shown = _shown(mask, off, call, work.of_k[step.owner])
            part = blocks.forward(q[:, :, i], keys[:, :, j], values[:, :, j], shown, call.diagonal, work.scale)
            _merge(out[:, :, i], lse[:, :, i], *part)
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, more: Tensor, of_more: Tensor) -> None:
    """Into `out` [b, h, l, f], of keys whose sum of exponentials is exp(lse), goes `more`, of other keys."""
    total = torch.logaddexp(lse, of_more)
    base = total.masked_fill(total == -math.inf, 0)  # of a row that has seen nothing: exp(-inf - 0) = 0
    out.mul_((lse - base).exp().unsqueeze(-1)).add_(more * (of_more - base).exp().unsqueeze(-1))
    lse.copy_(total)


def _backward(grad: Tensor, saved: tuple[Any, ...], work: _Work) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of out, added up in the type of sums."""
    q, k, v, mask, off, out, lse = saved
    high, sizes = blocks.sums(q.dtype), work.sizes(k, v)
    dq = torch.zeros_like(q, dtype=high, memory_format=torch.contiguous_format)
    home = Homeward(sizes, work.ways, dq)
    for step in travel(torch.cat([k.reshape(-1), v.reshape(-1)]), sizes, work.ways, KEYS):
        keys, values = work.opened(step.block, step.owner, k, v)
        found = None
        for call in work.calls(step.owner):
            if found is None:
                found = dq.new_zeros(sizes[step.owner])
                dk, dv = work.opened(found, step.owner, k, v)
            i, j = slice(*call.rows), slice(*call.columns)
            shown = _shown(mask, off, call, work.of_k[step.owner])
            parts = blocks.backward(
                grad[:, :, i], q[:, :, i], keys[:, :, j], values[:, :, j], out[:, :, i], lse[:, :, i],
                shown, call.diagonal, work.scale,
            )  # fmt: skip
            for place, part in zip((dq[:, :, i], dk[:, :, j], dv[:, :, j]), parts, strict=True):
                place.add_(part)
        home.add(step, found)
    dk, dv = work.opened(home.finish(), work.ways.owner(0, 0), k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# --- masks --------------------------------------------------------------------------------------------------


def _four_dims(mask: Tensor, lead: torch.Size, rows: int, keys: int) -> Tensor:
    """[.., l or 1, S], of which leading dims are left out or 1 -> [b or 1, h or 1, l, S]."""
    mask = mask.expand(*mask.shape[:-2], rows, keys)
    mask = mask[(None,) * (len(lead) + 3 - mask.dim())]
    if mask.shape[:-3].numel() != 1:
        mask = mask.expand(*lead, *mask.shape[-3:])
    return mask.reshape(mask.shape[:-3].numel(), *mask.shape[-3:])


def _taken_off(mask: Tensor | None, work: _Work) -> Tensor | None:
    """[b or 1, h or 1, l, 1]: the most that a mask adds to a key that a row sees, where that is far from 0; else 0.

    Softmax does not see it, but beside it lse would lose the digits by which blocks are put together.
    """
    if mask is None or mask.dtype == torch.bool:
        return None
    top = mask.new_full((*mask.shape[:3], 1), -math.inf)
    for owner in range(len(work.of_k)):
        for call in work.calls(owner):
            part = _part(mask, call, work.of_k[owner])
            if call.diagonal:
                part = part.masked_fill(torch.ones_like(part, dtype=torch.bool).triu(1), -math.inf)
            rows = top[:, :, slice(*call.rows)]
            torch.maximum(rows, part.amax(-1, keepdim=True), out=rows)
    return top.masked_fill((top.abs() < FAR) | top.isinf(), 0)


def _shown(mask: Tensor | None, off: Tensor | None, call: Call, keys: tuple[Range, ...]) -> Tensor | None:
    """What a call's kernel gets as its mask."""
    if mask is None or off is None:
        return None if mask is None else _part(mask, call, keys)
    return _part(mask, call, keys) - off[:, :, slice(*call.rows)]


def _part(mask: Tensor, call: Call, keys: tuple[Range, ...]) -> Tensor:
    """A call's rows and columns, of a block of keys at these positions."""
    return columns_of(mask[:, :, slice(*call.rows)], positions(keys, call.columns))


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, work: _Work) -> None:
    """What no caller may get wrong."""
    here = work.ways.owner(0, 0)
    wanted = (length(work.of_q[here]), length(work.of_k[here]), length(work.of_k[here]))
    found = tuple(x.shape[-2] for x in (q, k, v))
    if found != wanted:
        raise SoliError("the rows of a ring's tensors are not its spans", got=found, allowed=wanted)
    if len({x.dtype for x in (q, k, v)}) > 1 or len({x.shape[:-3] for x in (q, k, v)}) > 1:
        got = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise SoliError("q, k and v of a ring differ", got=got, allowed="one type, and the same leading dims")
    if k.shape[-3] != v.shape[-3] or q.shape[-3] % max(k.shape[-3], 1):
        got = ", ".join(str(x.shape[-3]) for x in (q, k, v))
        raise SoliError("heads that do not fit", got=got, allowed="heads of k and v that divide those of q")
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise SoliError("the mask of a ring gets no gradient", got="a mask that requires one")
