"""The same matrix on a grid of ranks, cut the other way round: what was cut over the columns is cut over the rows.

A weight that one product reads as [V, H] and another as [H, V] (a head that is tied to an embedding) is stored once;
every rank sends what another rank has of it in the other cut, and nothing else. In a square grid that is one
exchange with the mirror rank, and the diagonal has nothing to send.

    A[V_C, H_R] -> A[V_R, H_C]

    Legend: R ranks along `row` (number i), C along `col` (number j); V, H the matrix, v and h this rank's sizes of it
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from soli.mesh.collectives import Axis, all_to_all
from soli.parallel.keep import alias
from soli.parallel.tensor.moves import _Move
from soli.parallel.tensor.split import Split
from soli.parallel.tensor.summa import Range, columns, matched, plainly, put

Where = tuple[tuple[Range, ...], tuple[Range, ...]]
"""Rows and columns of a block, v' and h' of them."""
LABEL = "a matrix, cut the other way"


def swapped(x: Tensor, rows: Split, cols: Split, row: Axis, col: Axis, grid: Axis) -> Tensor:
    """x [v, h], this rank's block of A[V_C, H_R] -> its block of A[V_R, H_C]; backward the other way.

    `rows` is the cut of V, `cols` of H. `grid` has all ranks: rank (i, j) is its number i C + j.

    Bytes of a rank's one collective, all_to_all over grid: what it has of x and not of the result, so
    e (v h - what both blocks have); in a square grid e v h off the diagonal, 0 on it.
    """
    if grid.size == 1:
        return x
    shape = rows.local(col.size, col.index), cols.local(row.size, row.index)
    if tuple(x.shape) != shape:
        raise ValueError(f"x {list(x.shape)} is not the rank's block {list(shape)}")
    sizes = row.size, col.size
    there = lambda x: _exchanged(x, _crossing(rows, cols, sizes, grid.index, False), grid)
    back = lambda grad: _exchanged(grad, _crossing(rows, cols, sizes, grid.index, True), grid)
    return _Move.apply(x, there, back)


class Crossing(NamedTuple):
    """What a rank sends and gets, by the other's number; its own entry is what stays."""

    shape: tuple[int, int]  # of the result
    sent: tuple[Where, ...]  # places in the block that the rank has
    received: tuple[Where, ...]  # places in the result


@lru_cache(maxsize=4096)
def _crossing(rows: Split, cols: Split, sizes: tuple[int, int], rank: int, back: bool) -> Crossing:
    def owned(rank: int, swapped: bool) -> tuple[list[Range], list[Range]]:
        (r, c), (i, j) = sizes, divmod(rank, sizes[1])
        return (rows.own(r, i), cols.own(c, j)) if swapped else (rows.own(c, j), cols.own(r, i))

    def shared(before: int, after: int) -> tuple[Where, Where]:
        """What rank `before` has and rank `after` gets: where in the block of the one, where in the other's."""
        v, h = (matched(*pair) for pair in zip(owned(before, back), owned(after, not back), strict=True))
        return (v[0], h[0]), (v[1], h[1])

    every = range(sizes[0] * sizes[1])
    v, h = (_size(ranges) for ranges in owned(rank, not back))
    sent = tuple(shared(rank, other)[0] for other in every)
    return Crossing((v, h), sent, tuple(shared(other, rank)[1] for other in every))


def _exchanged(x: Tensor, crossing: Crossing, grid: Axis) -> Tensor:
    sent = [0 if r == grid.index else _numel(where) for r, where in enumerate(crossing.sent)]
    received = [0 if r == grid.index else _numel(where) for r, where in enumerate(crossing.received)]
    with plainly(x.device):
        x = alias(x)
        pieces = [_taken(x, where).reshape(-1) for where, n in zip(crossing.sent, sent, strict=True) if n]
        away = torch.cat(pieces) if pieces else x.new_empty(0)
        arrived = x.new_empty(sum(received))
        pending = all_to_all(arrived, away, grid, received, sent, label=LABEL, wait=False)
        result = x.new_empty(crossing.shape)
        stays = crossing.sent[grid.index]
        if _numel(stays):
            _put(result, crossing.received[grid.index], _taken(x, stays))
        pending.wait()
        for where, n, flat in zip(crossing.received, received, arrived.split(received), strict=True):
            if n:
                _put(result, where, flat)
    return result


def _size(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _numel(where: Where) -> int:
    return _size(where[0]) * _size(where[1])


def _taken(block: Tensor, where: Where) -> Tensor:
    """Those rows and columns of a block [v, h]."""
    return columns(columns(block.t(), where[0]).t(), where[1])


def _put(block: Tensor, where: Where, values: Tensor) -> None:
    """Write them; `values` has v' h' elements."""
    lines = values.reshape(_size(where[0]), _size(where[1]))
    at = 0
    for start, stop in where[0]:
        put(block[start:stop], where[1], lines[at : at + stop - start])
        at += stop - start
