"""Collectives on tensors that all ranks have in shared memory: nothing is copied into a slot.

Each is the rest of an operation whose first meeting found that all are placed (`Board.places`). What has to be
summed is summed in pieces that stay in the cache. The order of the sums is that of operations.py, so the
results are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from soli.mesh.local.board import Board, Operation
from soli.mesh.local.sums import combine

PIECE_BYTES = 1 << 17


def _sum(parts: Sequence[Tensor], outs: Sequence[Tensor], op: str, start: int, stop: int) -> None:
    """Elements [start, stop) of the parts, summed, into each of `outs`."""
    step = PIECE_BYTES // parts[0].element_size()
    total = torch.empty(min(stop - start, step), dtype=parts[0].dtype)
    for at in range(start, stop, step):
        piece = slice(at, min(at + step, stop))
        summed = total[: piece.stop - at]
        combine([part[piece] for part in parts], summed, op)
        for out in outs:
            out[piece].copy_(summed)


def all_reduce(board: Board, operation: Operation, tensor: Tensor, op: str, places: Sequence[int]) -> Any:
    """Each rank sums its part of `tensor` [n] over all ranks, and writes it to all."""
    ranks, rank = board.ranks, board.rank
    theirs = [tensor if r == rank else board.at(r, places[r], tensor) for r in range(ranks)]
    _sum(theirs, theirs, op, tensor.numel() * rank // ranks, tensor.numel() * (rank + 1) // ranks)
    yield from board.again(operation, range(ranks))
    board.read()


def reduce_scatter(board: Board, out: Tensor, parts: Sequence[Tensor], op: str, places: Sequence[int]) -> Any:
    """Sum part r of every rank into `out` [n] of rank r, which may be its own part; `parts` [N][n] lie in a row."""
    rank = board.rank
    skip = parts[0].nbytes * rank
    theirs = [parts[rank] if r == rank else board.at(r, places[r] + skip, parts[rank]) for r in range(board.ranks)]
    _sum(theirs, [out], op, 0, out.numel())
    board.read()
    yield from board.all_read()


def all_gather(board: Board, outs: Sequence[Tensor], mine: Tensor, places: Sequence[int]) -> Any:
    """`mine` [b] bytes of rank r into `outs[r]` of every rank, from where it lies."""
    for step in range(1, board.ranks):  # not all from the same rank at once
        other = (board.rank + step) % board.ranks
        outs[other].copy_(board.at(other, places[other], mine))
    own = outs[board.rank]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    board.read()
    yield from board.all_read()
