"""Ulysses (arXiv 2309.14509): around attention a rank has all of the sequence and some of the heads.

    Q[B, H, L_C, E] -> Q[B, H_C, L, E]    before attention, by all-to-all; keys and values alike
    O[B, H_C, L, E] -> O[B, H, L_C, E]    after it

Heads that ranks do not divide are shared out unevenly. Of grouped keys a rank gets those that its queries read, which
may be another's too.

Legend: H heads, L positions, E size of a head, C ranks; h, l what a rank has
"""

import torch
from torch import Tensor

from soli.core.layout import even_parts
from soli.mesh.collectives import Axis, all_to_all
from soli.parallel.tensor.moves import moved
from soli.parallel.tensor.split import Spans
from soli.parallel.tensor.summa import put

Heads = list[tuple[int, int]]
"""By rank: the [start, stop) heads that it computes with."""


def shared_heads(queries: int, keys: int, ranks: int) -> tuple[Heads, Heads]:
    """The heads of queries that each rank has, and those of keys that these read."""
    group, own = queries // keys, even_parts(queries, ranks)
    return own, [(a // group, -(-b // group)) if a < b else (0, 0) for a, b in own]


def to_heads(x: Tensor, heads: Heads, spans: Spans, axis: Axis) -> Tensor:
    """[.., H, l, E], this rank's positions -> [.., h, L, E], this rank's heads."""
    count = x.shape[-3]
    there = lambda x: _heads(x, heads, spans, axis)
    return moved(x, axis, there, lambda grad: _rows(grad, count, heads, spans, axis))


def to_rows(x: Tensor, heads: Heads, spans: Spans, axis: Axis) -> Tensor:
    """[.., h, L, E], this rank's heads, which are no other's -> [.., H, l, E], this rank's positions."""
    there = lambda x: _rows(x, heads[-1][1], heads, spans, axis)
    return moved(x, axis, there, lambda grad: _heads(grad, heads, spans, axis))


def _heads(x: Tensor, heads: Heads, spans: Spans, axis: Axis) -> Tensor:
    lead, e = x.shape[:-3], x.shape[-1]
    pieces = [x[..., a:b, :, :] for a, b in heads]
    own = heads[axis.index][1] - heads[axis.index][0]
    sizes = [sum(b - a for a, b in rows) for rows in spans]
    found = _exchanged(pieces, [(*lead, own, n, e) for n in sizes], axis, "heads of all positions")
    out = x.new_empty((*lead, own, sum(sizes), e))
    for piece, rows in zip(found, spans, strict=True):
        put(out.mT, rows, piece.mT)
    return out


def _rows(x: Tensor, count: int, heads: Heads, spans: Spans, axis: Axis) -> Tensor:
    """What several ranks have of a head (grouped keys) is added up."""
    lead, e = x.shape[:-3], x.shape[-1]
    pieces = [torch.cat([x[..., a:b, :] for a, b in rows] or [x[..., :0, :]], -2) for rows in spans]
    own = sum(b - a for a, b in spans[axis.index])
    shapes = [(*lead, b - a, own, e) for a, b in heads]
    out = x.new_zeros((*lead, count, own, e))
    for piece, (a, b) in zip(_exchanged(pieces, shapes, axis, "positions of all heads"), heads, strict=True):
        out[..., a:b, :, :] += piece
    return out


def _exchanged(pieces: list[Tensor], shapes: list[tuple[int, ...]], axis: Axis, label: str) -> list[Tensor]:
    """Piece r goes to rank r; what came from rank r has shape r."""
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = sent.new_empty(sum(sizes))
    all_to_all(received, sent, axis, sizes, [piece.numel() for piece in pieces], label=label)
    return [flat.view(shape) for flat, shape in zip(received.split(sizes), shapes, strict=True)]
