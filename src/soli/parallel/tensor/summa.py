"""Products on a grid of ranks: 2D tensor parallelism (SUMMA: van de Geijn & Watts 1997; Optimus, arXiv 2104.05343).

Every matrix is cut both ways and no rank has a whole row or column of one. The sum over k runs in *panels*, pieces
of k that one rank of each row has of x and one rank of each column has of W; they are broadcast, multiplied and
dropped. A gradient goes the other way: its panel is computed by all ranks of a row or column and summed into one.

    y[T_R, N_C] = x[T_R, K_C] @ W[N_C, K_R]^T        panel p: x[T_R, p] from its column, W[N_C, p] from its row
    dx[T_R, p]  = sum over C of dy[T_R, N_C] @ W[N_C, p]
    dW[N_C, p]  = sum over R of dy[T_R, N_C]^T @ x[T_R, p]

The next panel's broadcasts, and the sums of the panel before, are under way while a panel is computed.

    Legend: T tokens, N new, K summed; R ranks along `row` (number i), C along `col` (number j);
    t, n, k: this rank's tokens, its new ones, and all of K; p a panel of K; e bytes of an element
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from soli.mesh.collectives import NOTHING, Axis, broadcast, reduce
from soli.parallel.keep import alias, carried
from soli.parallel.precision import lowered
from soli.parallel.tensor.moves import Later, then
from soli.parallel.tensor.split import Split

Range = tuple[int, int]
HALVES = (torch.float16, torch.bfloat16)
PANEL_OF_X, PANEL_OF_W = "panel of a product's input", "panel of a weight"
GRADIENT_OF_X, GRADIENT_OF_W = "gradient of a product's input", "gradient of a weight"


class Panel(NamedTuple):
    """Elements of K that rank j of `col` has of x and rank i of `row` has of W, in the same order."""

    j: int
    of_x: tuple[Range, ...]  # of rank j's own k
    i: int
    of_w: tuple[Range, ...]  # of rank i's own k
    size: int


def linear(x: Tensor, w: Tensor, of_x: Split, of_w: Split, row: Axis, col: Axis) -> Tensor:
    """x [t, .., K_C], W [n, K_R] -> y [t, .., n]: x's last dim is cut over `col` by of_x, W's over `row` by of_w.

    Ranks along `col` have the same tokens, ranks along `row` others, maybe another number. A rank keeps its own x and
    W for the backward and nothing else; it has two panels of each at a time at most.

    Bytes of a rank's collectives; those over an axis of size 1 are none:

        forward     broadcast over col t k e,  over row n k e
        for dx      broadcast over row n k e,  reduce over col t k e
        for dW      broadcast over col t k e,  reduce over row n k e
    """
    x, w = lowered(x), lowered(w)
    if of_x.size != of_w.size:
        raise ValueError(f"x is cut along a dim of {of_x.size}, W along one of {of_w.size}")
    sizes = of_x.local(col.size, col.index), of_w.local(row.size, row.index)
    if (x.shape[-1], w.shape[1]) != sizes:
        raise ValueError(f"x {list(x.shape)} and W {list(w.shape)} do not have the rank's {sizes} columns")
    return _Linear.apply(x, w, of_x, of_w, row, col)


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Neither classes of tensors, which answer with rules, nor autocast change what is computed inside."""
    on = torch.is_autocast_enabled(device.type)
    with torch._C.DisableTorchFunctionSubclass(), torch.autocast(device.type, enabled=False) if on else nullcontext():
        yield


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, of_x: Split, of_w: Split, row: Axis, col: Axis) -> Tensor:
        for_x, for_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if for_w else None, w if for_x else None)
        ctx.shape, ctx.grid = x.shape, (of_x, of_w, row, col)
        with plainly(x.device):
            # Under selective recomputation the product is kept: a panel is sent once a forward.
            return carried(x, lambda x: _product(x, w, of_x, of_w, row, col), alone=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with plainly(dy.device):
            dx, dw = _gradients(dy, x, w, *ctx.grid)
        return None if dx is None else dx.view(ctx.shape), dw, None, None, None, None


# --- panels ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def panels(of_x: Split, of_w: Split, rows: int, cols: int) -> tuple[Panel, ...]:
    """The panels of K in an order that is the same on every rank. In a square grid with equal cuts: one a rank."""
    found = []
    for j in range(cols):
        for i in range(rows):
            x, w = matched(of_x.own(cols, j), of_w.own(rows, i))
            if x:
                found.append(Panel(j, x, i, w, sum(stop - start for start, stop in x)))
    return tuple(found)


def matched(first: list[Range], second: list[Range]) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """What two owners both have of a dim: where it is in the first's part, and in the second's.

    Both own ranges of the dim and have them side by side, in the order given.
    """
    mine: list[Range] = []
    theirs: list[Range] = []
    at = 0
    for start, stop in first:
        place = 0
        for low, high in second:
            a, b = max(start, low), min(stop, high)
            if a < b:
                append(mine, at + a - start, at + b - start)
                append(theirs, place + a - low, place + b - low)
            place += high - low
        at += stop - start
    return tuple(mine), tuple(theirs)


def append(ranges: list[Range], start: int, stop: int) -> None:
    """One range more, as part of the last where it begins at its end."""
    if ranges and ranges[-1][1] == start:
        start = ranges.pop()[0]
    ranges.append((start, stop))


def columns(block: Tensor, ranges: Iterable[Range]) -> Tensor:
    """These columns of a block [.., k], side by side; maybe none. A view where they are one range."""
    pieces = [block[..., start:stop] for start, stop in ranges] or [block[..., :0]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def put(block: Tensor, ranges: tuple[Range, ...], values: Tensor) -> None:
    """Write these columns of a block [.., k]."""
    at = 0
    for start, stop in ranges:
        block[..., start:stop].copy_(values[..., at : at + stop - start])
        at += stop - start


def _sent(block: Tensor, ranges: tuple[Range, ...], size: int, axis: Axis, owner: int, label: str) -> Later:
    """Begin to give every rank of the axis the owner's columns of its block, as [rows, size].

    The block is an alias: where collectives stage what they send they write it back, and what autograd has saved
    must not look changed by that.
    """
    if axis.index != owner:
        panel = block.new_empty(block.shape[0], size)
    else:
        panel = columns(block, ranges)
        panel = panel if axis.size == 1 else panel.contiguous()
    pending = broadcast(panel, axis, owner, label=label, wait=False) if panel.numel() else NOTHING
    return then(pending, lambda: panel)


def _summed(a: Tensor, b: Tensor, into: Tensor, ranges: tuple[Range, ...], axis: Axis, owner: int, label: str) -> Callable[[], None]:
    """Compute a @ b and begin to sum it over the axis into the owner's columns of its block `into`.

    A part of a sum is sent in the tensors' own type, as a row's output is in 1D: it is rounded once on each rank,
    and from there on the backend sums it as it does all sums (the local one in float32, rounded once). In float32
    it would be twice the bytes, for a sum of as many terms as the axis has ranks.
    """
    whole = axis.index == owner and ranges == ((0, into.shape[1]),)
    part = torch.mm(a, b, out=into) if whole else torch.mm(a, b)
    pending = reduce(part, axis, owner, label=label, wait=False) if part.numel() else NOTHING

    def finish() -> None:
        pending.wait()
        if axis.index == owner and not whole:
            put(into, ranges, part)

    return finish


def _each(todo: tuple[Panel, ...], begin: Callable[[Panel, int], list[Later | None]], compute: Callable[..., None]) -> None:
    """Compute with each panel once it is there, while the next is under way. None stands for what is not needed.

    The next is begun before this one is waited for: another rank owns it, whose link would be idle. Neighbouring panels
    take turns in the axes' groups (collectives.py says why).
    """
    coming = begin(todo[0], 0) if todo else []
    for number, panel in enumerate(todo):
        following = begin(todo[number + 1], number + 1) if number + 1 < len(todo) else []
        compute(panel, number, *(None if finish is None else finish() for finish in coming))
        coming = following


# --- the product and its gradients ------------------------------------------------------------------------


def flat(x: Tensor) -> Tensor:
    """[.., k] as [t, k], also of size 0."""
    return alias(x.reshape(prod(x.shape[:-1]), x.shape[-1]))


def _product(x: Tensor, w: Tensor, of_x: Split, of_w: Split, row: Axis, col: Axis) -> Tensor:
    rows, block = flat(x), alias(w)
    todo = panels(of_x, of_w, row.size, col.size)
    # One product over the whole K would be rounded once; so is the sum of several.
    wide = torch.float32 if x.dtype in HALVES and len(todo) > 1 else x.dtype
    total = rows.new_zeros(rows.shape[0], w.shape[0], dtype=wide)

    def begin(panel: Panel, number: int) -> list[Later | None]:
        return [
            _sent(rows, panel.of_x, panel.size, col.turn(number), panel.j, PANEL_OF_X),
            _sent(block, panel.of_w, panel.size, row.turn(number), panel.i, PANEL_OF_W),
        ]

    def compute(panel: Panel, number: int, x_p: Tensor, w_p: Tensor) -> None:
        _add(total, x_p, w_p.t())

    _each(todo, begin, compute)
    return total.to(x.dtype).view(*x.shape[:-1], w.shape[0])


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the type of the total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch has no product of 16 bits into 32 on CPUs
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _gradients(dy: Tensor, x: Tensor | None, w: Tensor | None, of_x: Split, of_w: Split, row: Axis, col: Axis) -> tuple[Tensor | None, Tensor | None]:
    """dx [t, K_C] and dW [n, K_R] of dy [.., n]. Without W no dx is wanted, without x no dW."""
    rows = flat(dy)
    new, block = None if x is None else flat(x), None if w is None else alias(w)
    dx = None if w is None else dy.new_empty(rows.shape[0], of_x.local(col.size, col.index))
    dw = None if x is None else dy.new_empty(rows.shape[1], of_w.local(row.size, row.index))
    under_way: deque[Callable[[], None]] = deque()

    def begin(panel: Panel, number: int) -> list[Later | None]:
        r, c = row.turn(number), col.turn(number)
        return [
            None if block is None else _sent(block, panel.of_w, panel.size, r, panel.i, PANEL_OF_W),
            None if new is None else _sent(new, panel.of_x, panel.size, c, panel.j, PANEL_OF_X),
        ]

    def compute(panel: Panel, number: int, w_p: Tensor | None, x_p: Tensor | None) -> None:
        before, r, c = len(under_way), row.turn(number), col.turn(number)
        if dx is not None and w_p is not None:
            under_way.append(_summed(rows, w_p, dx, panel.of_x, c, panel.j, GRADIENT_OF_X))
        if dw is not None and x_p is not None:
            under_way.append(_summed(rows.t(), x_p, dw, panel.of_w, r, panel.i, GRADIENT_OF_W))
        for _ in range(before):
            under_way.popleft()()

    _each(panels(of_x, of_w, row.size, col.size), begin, compute)
    for finish in under_way:
        finish()
    return dx, dw
