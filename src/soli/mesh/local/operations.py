"""The collectives of a group, as generators over its board: they yield where they wait.

Reductions are those of sums.py, in the order of the ranks, whatever the size. Data is moved as bytes.

Shapes: n elements of a rank's tensor, N ranks. All tensors here are flat and contiguous.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from soli.mesh.local.board import Board, Operation, Write
from soli.mesh.local.sums import combine

ALONE_BYTES = 1 << 14
"""Up to here each rank sums everything itself; above, each sums its part and reads the parts of the others."""
PLACED_BYTES = 1 << 16
"""From here on tensors in shared memory are used where they lie: that takes a meeting more than slots do."""
PIECE_BYTES = 1 << 17
"""In which tensors that lie in shared memory are summed: they stay in the cache."""


def everyone(board: Board) -> range:
    """All ranks of the group."""
    return range(board.ranks)


def laid(board: Board, piece: Tensor) -> Write:
    """What puts a piece at the beginning of this rank's slot."""

    def write(lane: int) -> None:
        board.slot(board.rank, lane, piece.dtype)[: piece.numel()].copy_(piece)

    return write


def opened(board: Board, operation: Operation, tensor: Tensor | None, write: Write) -> Any:
    """A chunk of an operation whose tensors may lie in shared memory: (lane of the slots, places or None).

    With no tensor, as after the first chunk, this rank has placed none.
    Where only some ranks have placed theirs, those write their slots after all, and the ranks meet once more.
    """
    place = 0 if tensor is None or tensor.nbytes < PLACED_BYTES else board.place_of(tensor)
    lane = yield from board.chunk_of(operation, None if place else write, everyone(board), place)
    places = board.places()
    if all(places):
        return lane, places
    if any(places):
        if place:
            write(lane)
        yield from board.again(operation, everyone(board))
    return lane, None


def all_reduce(board: Board, operation: Operation, tensor: Tensor, op: str) -> Any:
    """Reduce `tensor` [n] in place on every rank.

    Of more than two ranks each sums its part of a chunk into its slot, where the others fetch it. They do so
    when they meet for the next chunk, so that a chunk takes one meeting and not two.
    """
    alone = board.ranks == 2 or tensor.nbytes <= ALONE_BYTES
    before: tuple[Tensor, int] | None = None  # the last chunk and its lane: summed, not fetched
    for number, mine in enumerate(tensor.split(board.lane_bytes // tensor.element_size())):
        lane, places = yield from opened(board, operation, None if number else tensor, laid(board, mine))
        if places:
            return (yield from _placed_all_reduce(board, operation, tensor, op, places))
        if alone:
            combine([_lane(board, r, lane, mine) for r in everyone(board)], mine, op)
            board.read()
            continue
        if before is not None:
            _fetch(board, *before)
            board.read(behind=1)
        own = _part(board, board.rank, mine)
        combine([_lane(board, r, lane, mine)[own] for r in everyone(board)], mine[own], op)
        _lane(board, board.rank, lane, mine)[own].copy_(mine[own])
        before = mine, lane
    if before is not None:
        yield from board.again(operation, everyone(board))
        _fetch(board, *before)
        board.read()


def _lane(board: Board, other: int, lane: int, like: Tensor) -> Tensor:
    return board.slot(other, lane, like.dtype)[: like.numel()]


def _part(board: Board, other: int, chunk: Tensor) -> slice:
    """The elements of a chunk that a rank sums."""
    return slice(chunk.numel() * other // board.ranks, chunk.numel() * (other + 1) // board.ranks)


def _fetch(board: Board, chunk: Tensor, lane: int) -> None:
    """Every other rank's sums into `chunk`."""
    for other in everyone(board):
        part = _part(board, other, chunk)
        if other != board.rank:
            chunk[part].copy_(_lane(board, other, lane, chunk)[part])


def reduce(board: Board, operation: Operation, tensor: Tensor, op: str, root: int) -> Any:
    """Reduce `tensor` [n] in place on the root alone."""
    for mine in tensor.split(board.lane_bytes // tensor.element_size()):
        lane = yield from board.chunk_of(operation, laid(board, mine), everyone(board) if board.rank == root else ())
        if board.rank == root:
            combine([_lane(board, r, lane, mine) for r in everyone(board)], mine, op)
        board.read()


def reduce_scatter(board: Board, operation: Operation, out: Tensor, parts: Sequence[Tensor], op: str) -> Any:
    """Reduce part r of every rank into `out` [n] of rank r; a rank's `parts` are N tensors [n]."""
    in_a_row = len({part.data_ptr() - i * part.nbytes for i, part in enumerate(parts)}) == 1
    whole = parts[0].as_strided((out.numel() * len(parts),), (1,)) if in_a_row else None
    ranks, dtype = board.ranks, out.dtype
    room = board.lane_bytes // (out.element_size() * ranks)
    for start in range(0, max(out.numel(), 1), room):
        count = min(room, out.numel() - start)

        def write(lane: int, start: int = start, count: int = count) -> None:
            slot = board.slot(board.rank, lane, dtype)
            for other in range(ranks):
                slot[other * room : other * room + count].copy_(parts[other][start : start + count])

        lane, places = yield from opened(board, operation, None if start else whole, write)
        if places:
            return (yield from _placed_reduce_scatter(board, out, parts, op, places))
        own = slice(board.rank * room, board.rank * room + count)
        combine([board.slot(r, lane, dtype)[own] for r in range(ranks)], out[start : start + count], op)
        board.read()


def all_gather(board: Board, operation: Operation, outs: Sequence[Tensor], mine: Tensor) -> Any:
    """`mine` [b] bytes of rank r into `outs[r]` [b] on every rank."""
    for start in range(0, max(mine.numel(), 1), board.lane_bytes):
        piece = mine[start : start + board.lane_bytes]
        lane, places = yield from opened(board, operation, None if start else mine, laid(board, piece))
        if places:
            return (yield from _placed_all_gather(board, outs, mine, places))
        for other, out in enumerate(outs):
            target = out[start : start + board.lane_bytes]
            if other != board.rank:
                target.copy_(_lane(board, other, lane, piece))
            elif target.data_ptr() != piece.data_ptr():
                target.copy_(piece)
        board.read()


def broadcast(board: Board, operation: Operation, data: Tensor, root: int) -> Any:
    """`data` [b] bytes of the root on every rank."""
    for piece in data.split(board.lane_bytes):
        lane = yield from board.chunk_of(operation, laid(board, piece) if board.rank == root else None, (root,))
        if board.rank != root:
            piece.copy_(_lane(board, root, lane, piece))
        board.read()


def gather(board: Board, operation: Operation, outs: Sequence[Tensor], mine: Tensor, root: int) -> Any:
    """`mine` [b] bytes of rank r into `outs[r]` on the root."""
    for piece, *targets in zip(*(whole.split(board.lane_bytes) for whole in (mine, *outs)), strict=True):
        lane = yield from board.chunk_of(operation, laid(board, piece), everyone(board) if board.rank == root else ())
        for other, target in enumerate(targets):  # none on the other ranks
            target.copy_(_lane(board, other, lane, piece))
        board.read()


def scatter(board: Board, operation: Operation, out: Tensor, parts: Sequence[Tensor], root: int) -> Any:
    """`parts[r]` [b] bytes of the root into `out` [b] of rank r."""
    room = board.lane_bytes // board.ranks
    for piece, *sent in zip(*(whole.split(room) for whole in (out, *parts)), strict=True):

        def write(lane: int, sent: Sequence[Tensor] = sent) -> None:
            for other, part in enumerate(sent):
                board.slot(root, lane, torch.uint8)[other * room : other * room + part.numel()].copy_(part)

        lane = yield from board.chunk_of(operation, write if board.rank == root else None, (root,))
        place = board.rank * room
        piece.copy_(board.slot(root, lane, torch.uint8)[place : place + piece.numel()])
        board.read()


def all_to_all(board: Board, operation: Operation, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> Any:
    """`parts[r]` bytes of rank s into `outs[s]` of rank r; the sizes may all differ, and must agree in pairs.

    The first chunk begins with the sizes of this rank's parts; every chunk has `room` bytes for each other rank.
    """
    ranks, rank = board.ranks, board.rank
    sizes = torch.tensor([part.numel() for part in parts])
    head = 8 * ranks
    room = (board.lane_bytes - head) // max(ranks - 1, 1) // 8 * 8
    place = lambda source, target: head + room * (target - (target > source))  # nobody sends to itself
    start, longest = 0, 1
    while start < longest:

        def fill(lane: int, start: int = start) -> None:
            if not start:
                board.slot(rank, lane, torch.int64)[:ranks].copy_(sizes)
            for other, part in enumerate(parts):
                sent, at = part[start : start + room], place(rank, other)
                if other != rank:
                    board.slot(rank, lane, torch.uint8)[at : at + sent.numel()].copy_(sent)

        lane = yield from board.chunk_of(operation, fill, everyone(board))
        if not start:
            table = torch.stack([board.slot(r, lane, torch.int64)[:ranks] for r in range(ranks)])
            check_splits(board, rank, [out.numel() for out in outs], table)
            longest = int(table.fill_diagonal_(0).max())
            outs[rank].copy_(parts[rank])
        for other, out in enumerate(outs):
            piece, at = out[start : start + room], place(other, rank)
            if other != rank:
                piece.copy_(board.slot(other, lane, torch.uint8)[at : at + piece.numel()])
        board.read()
        start += room


def check_splits(board: Board, rank: int, wanted: Sequence[int], table: Tensor) -> None:
    """Whether the bytes that every rank sends, `table[s, r]` from s to r, are those that this rank expects."""
    sent = table[:, rank].tolist()
    if wrong := [(other, size) for other, size in enumerate(wanted) if size != sent[other]]:
        lines = [f"  rank {board.numbers[rank]} expects {size} bytes of rank {board.numbers[r]}, which sends {sent[r]}" for r, size in wrong]
        raise board.fail(f"the splits of all_to_all in group {board.name} do not fit\n" + "\n".join(lines))


def barrier(board: Board, operation: Operation) -> Any:
    """Go on once every rank is here."""
    yield from board.chunk_of(operation, None, everyone(board))
    board.read()


# --- tensors that all ranks have in shared memory: nothing is copied into a slot -------------------------------
#
# Each is the rest of an operation whose first meeting found that all are placed (`Board.places`). The order of the
# sums is that of the slots', so the results are the same bits.


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


def _placed_all_reduce(board: Board, operation: Operation, tensor: Tensor, op: str, places: Sequence[int]) -> Any:
    """Each rank sums its part of `tensor` [n] over all ranks, and writes it to all."""
    ranks, rank = board.ranks, board.rank
    theirs = [tensor if r == rank else board.at(r, places[r], tensor) for r in range(ranks)]
    _sum(theirs, theirs, op, tensor.numel() * rank // ranks, tensor.numel() * (rank + 1) // ranks)
    yield from board.again(operation, range(ranks))
    board.read()


def _placed_reduce_scatter(board: Board, out: Tensor, parts: Sequence[Tensor], op: str, places: Sequence[int]) -> Any:
    """Sum part r of every rank into `out` [n] of rank r, which may be its own part; `parts` [N][n] lie in a row."""
    rank = board.rank
    skip = parts[0].nbytes * rank
    theirs = [parts[rank] if r == rank else board.at(r, places[r] + skip, parts[rank]) for r in range(board.ranks)]
    _sum(theirs, [out], op, 0, out.numel())
    board.read()
    yield from board.all_read()


def _placed_all_gather(board: Board, outs: Sequence[Tensor], mine: Tensor, places: Sequence[int]) -> Any:
    """`mine` [b] bytes of rank r into `outs[r]` of every rank, from where it lies."""
    for step in range(1, board.ranks):  # not all from the same rank at once
        other = (board.rank + step) % board.ranks
        outs[other].copy_(board.at(other, places[other], mine))
    own = outs[board.rank]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    board.read()
    yield from board.all_read()
