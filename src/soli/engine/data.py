"""The order of the data, and what samples draw: a function of (seed, epoch, number), never of the plan.

A global batch is a run of consecutive samples of that order; each rank loads its own rows of it. The
position is part of a checkpoint, so a resumed run goes on with the very next batch, under any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from soli.core.errors import SoliError
from soli.core.layout import even_parts
from soli.engine.batch import Part
from soli.parallel import generators


@dataclass
class Position:
    """Where a stream of batches stands: the next batch is number `batch` of epoch `epoch`."""

    epoch: int = 0
    batch: int = 0


@dataclass
class Order:
    """Everything that decides which samples a batch holds."""

    global_batch: int
    seed: int
    shuffle: bool
    epochs: int
    ranks: int
    index: int
    position: Position = field(default_factory=Position)


def batches(dataset: Any, order: Order, collate: Callable[[list[Any]], Any] | None, workers: int) -> Iterator[Part]:
    """This rank's part of each global batch, from the position on; the position moves as they are yielded."""
    if order.global_batch < order.ranks:
        raise SoliError(
            "the global batch is smaller than the number of data-parallel ranks",
            got=f"global_batch={order.global_batch}, dp={order.ranks}",
            allowed=f"{order.ranks} or more",
            everywhere=True,
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if order.shuffle:
            raise SoliError(
                "a stream cannot be shuffled by soli: it has no length and no samples by number",
                got=type(dataset).__name__,
                fix="pass shuffle=False (and shuffle in the stream), or give a map-style dataset",
                everywhere=True,
            )
        return _stream(dataset, order, collate or default_collate)
    if len(dataset) == 0:
        raise SoliError("the dataset is empty", got=f"{type(dataset).__name__} of length 0", everywhere=True)
    return _by_number(dataset, order, collate or default_collate, workers)


def _by_number(
    dataset: Dataset[Any], order: Order, collate: Callable[[list[Any]], Any], workers: int
) -> Iterator[Part]:
    size, drawing = len(dataset), _Drawing(dataset, order.seed)  # type: ignore[arg-type]
    while order.position.epoch < order.epochs:
        indices = _permutation(size, order)
        first = order.position.batch
        starts = list(range(0, size, order.global_batch))[first:]
        spans = [(start, min(start + order.global_batch, size)) for start in starts]
        parts = [even_parts(stop - start, order.ranks)[order.index] for start, stop in spans]
        mine = [indices[s + a : s + b].tolist() for (s, _), (a, b) in zip(spans, parts, strict=True)]
        drawing.epoch = order.position.epoch
        loader = iter(
            DataLoader(drawing, batch_sampler=[m for m in mine if m], collate_fn=collate, num_workers=workers)
        )
        for (start, stop), (a, b) in zip(spans, parts, strict=True):
            data = next(loader) if b > a else None
            _advance(order.position, start + order.global_batch >= size)
            yield Part(data, a, b, stop - start)


class _Drawing(Dataset[Any]):
    """Samples whose Python draws (augmentation) draw by their number: alike whichever rank or worker makes them, and unlike their
    neighbours, whose rank began with the same seed. The first batch that draws is made twice: until then nothing is seeded."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self.drew = False

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        if not self.drew:
            many = getattr(self.dataset, "__getitems__", None)
            with generators.apart(0) as drew:
                samples = many(numbers) if many else [self.dataset[number] for number in numbers]
                self.drew = drew()
            if not self.drew:
                return list(samples)
        return [self._by_number(number) for number in numbers]

    def _by_number(self, number: int) -> Any:
        with generators.apart(generators.hashed("sample", self.seed, self.epoch, number)):
            return self.dataset[number]


def _permutation(size: int, order: Order) -> torch.Tensor:
    if not order.shuffle:
        return torch.arange(size)
    generator = torch.Generator().manual_seed(order.seed * 1_000_003 + order.position.epoch)
    return torch.randperm(size, generator=generator)


def _stream(stream: Iterable[Any], order: Order, collate: Callable[[list[Any]], Any]) -> Iterator[Part]:
    while order.position.epoch < order.epochs:
        samples = islice(iter(stream), order.position.batch * order.global_batch, None)
        batch = list(islice(samples, order.global_batch))
        while batch:
            ahead = list(islice(samples, order.global_batch))
            a, b = even_parts(len(batch), order.ranks)[order.index]
            _advance(order.position, not ahead)
            yield Part(collate(batch[a:b]) if b > a else None, a, b, len(batch))
            batch = ahead
        if order.position.batch:  # the stream ended exactly where it was resumed
            _advance(order.position, True)


def _advance(position: Position, epoch_ends: bool) -> None:
    position.epoch, position.batch = (position.epoch + 1, 0) if epoch_ends else (position.epoch, position.batch + 1)
