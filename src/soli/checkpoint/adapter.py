"""soli's Sharded, dressed as what DCP's planners take: a tensor that knows its chunks.

Legend: a *piece* is (Box, Tensor); a *chunk* is DCP's word for a box.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from soli.checkpoint.tensorfile import DTYPES, Forms, dtype_name
from soli.checkpoint.tiling import inside
from soli.core.errors import Problem, raise_all
from soli.core.layout import Box, Sharded

Tensors = dict[str, Sharded]
"""Global tensors by name, each with the boxes that this rank holds."""


class Pieces(Tensor):
    """A tensor of the global shape that owns no memory; DCP asks it for chunks and pieces.

    It must be a Tensor: `find_state_dict_object` refuses to look up a chunk of anything else.
    """

    pieces: list[tuple[Box, Tensor]]

    @staticmethod
    def __new__(cls, sharded: Sharded) -> Pieces:
        made = Tensor._make_wrapper_subclass(cls, torch.Size(sharded.shape), dtype=sharded.dtype)
        made.pieces = [(box, piece.detach()) for box, piece in sharded.pieces if box.numel]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on a Pieces, which only carries chunks to DCP")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        index = lambda box: MetadataIndex(fqn, box.offsets)
        data = lambda box: TensorWriteData(chunk=chunk_of(box), properties=properties, size=self.shape)
        return [WriteItem(index(box), WriteItemType.SHARD, tensor_data=data(box)) for box, _ in self.pieces]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(box) for box, _ in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # The index hint counts this rank's pieces when loading, and all ranks' chunks when saving.
        at, offsets = index.index, tuple(index.offset or ())
        if at is not None and at < len(self.pieces) and self.pieces[at][0].offsets == offsets:
            return self.pieces[at][1]
        return next(piece for box, piece in self.pieces if box.offsets == offsets)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def adapt(tensors: Tensors) -> dict[str, Any]:
    """What DCP's planners take as state dict."""
    return {name: Pieces(sharded) for name, sharded in tensors.items()}


def _problems(name: str, sharded: Sharded) -> Iterator[Problem]:
    if not isinstance(name, str) or not isinstance(sharded, Sharded):
        yield Problem("tensors must map names to Sharded", f"{name!r}: {type(sharded).__name__}")
        return
    if sharded.dtype not in DTYPES:
        allowed = ", ".join(dtype_name(dtype) for dtype in DTYPES)
        yield Problem(f"{name}: this dtype cannot be stored", dtype_name(sharded.dtype), allowed)
    seen: set[Box] = set()
    for box, piece in sharded.pieces:
        if box in seen and box.numel:
            yield Problem(f"{name}: the same box is given twice by one rank", str(box))
        seen.add(box)
        if not inside(box, sharded.shape):
            yield Problem(f"{name}: a box leaves the tensor", str(box), f"shape {sharded.shape}")
        if tuple(piece.shape) != box.sizes or piece.dtype != sharded.dtype or piece.device.type == "meta":
            got = f"{tuple(piece.shape)} {dtype_name(piece.dtype)} on {piece.device}"
            allowed = f"{box.sizes} {dtype_name(sharded.dtype)} in memory"
            yield Problem(f"{name}: a piece is not what its box says", got, allowed)


def merge(offers: list[Forms]) -> dict[str, Any]:
    """name -> (shape, dtype) over all ranks, in rank order. SoliError where ranks disagree."""
    merged: Forms = {}
    problems = []
    for rank, offer in enumerate(offers):
        for name, (shape, dtype) in offer.items():
            if (known := merged.setdefault(name, (shape, dtype))) != (shape, dtype):
                got = f"{known[0]} {dtype_name(known[1])}, but rank {rank}: {shape} {dtype_name(dtype)}"
                problems.append(Problem(f"{name}: the ranks disagree on the global tensor", got))
    raise_all(problems, everywhere=True)
    return merged


def offer_of(tensors: Tensors) -> Forms:
    """What a rank brings. SoliError lists every piece that is not what its box says."""
    raise_all(problem for name, sharded in tensors.items() for problem in _problems(name, sharded))
    return {name: (tuple(sharded.shape), sharded.dtype) for name, sharded in tensors.items()}
