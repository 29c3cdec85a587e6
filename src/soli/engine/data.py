"""The order of the data, and what samples draw: a function of (seed, epoch, number), never of the plan.

A global batch is a run of consecutive samples of that order; each rank loads its own rows of it. The
position of a stream with a name is part of a checkpoint, so a resumed run goes on with the very next batch, under any
plan; and it is kept from call to call, so a loop that asks for an epoch at a time gets one after another.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from soli.core.errors import Problem, SoliError, listed, on_all_ranks, raise_all
from soli.core.events import events
from soli.core.layout import even_parts
from soli.engine.batch import Part, as_dict
from soli.parallel import generators

AHEAD = 1000
"""Batches that are remembered as given out and not trained on: who has more in hand reads them for something else."""


@dataclass
class Position:
    """Where a stream of batches stands: the next batch is number `batch` of epoch `epoch`, where batches are of so many samples
    (0: not begun) of a dataset of so many (0: it has no length)."""

    epoch: int = 0
    batch: int = 0
    global_batch: int = 0
    size: int = 0
    mover = cast(Any, None)  # the order whose iterator moved it last; None: a checkpoint
    once = cast(tuple[Any, list[Any], Any], (None, [], None))  # what can be iterated only once, and what is left of it
    ahead = cast(tuple["Position", ...], ())  # where it stood before each batch that was given out and not trained on
    trained = cast(Any, False)


@dataclass
class Order:
    """Everything that decides which samples a batch holds."""

    global_batch: int
    seed: Callable[[], int]  # a checkpoint brings its own
    shuffle: bool
    epochs: int | None  # None: the rest of the one that it stands in
    ranks: int
    index: int
    position: Position = field(default_factory=Position)
    name: str | None = None
    first: bool = True  # whether this rank says what there is to say
    size: int = 0  # samples of an epoch; 0: nobody knows
    sample: str = ""  # a dataset's first, where ranks read rows of their own
    given: Any = None  # the dataset as the program gave it

    def place(self, epoch: int, batch: int, total: int) -> dict[str, Any]:
        """Where a batch stands, and in what."""
        shown = ("name", "shuffle", "global_batch", "size", "sample")
        return {"batch": (epoch, batch), "rows": total, "seed": self.seed()} | {n: getattr(self, n) for n in shown}


class Stream(Iterator[Part]):
    """This rank's part of each global batch, from the position on; the position moves as they are yielded."""

    def __init__(self, dataset: Any, order: Order, collate: Callable[[list[Any]], Any] | None, workers: int) -> None:
        collated = partial(_collated, collate or default_collate, order.ranks)  # workers may have to pickle it
        read = _stream if is_stream(dataset) else partial(_by_number, workers=workers)
        self._make = lambda order: read(dataset, order, collated)
        self.order = order
        _check(dataset, order)
        self._parts: Iterator[Part] | None = None
        self._ends = 0  # the epoch before which its parts do

    def __iter__(self) -> Iterator[Part]:
        if self.order.position.epoch >= self._ends:  # another loop over it, or one that took all there was: the next epoch
            self._parts = None
        return self

    def __next__(self) -> Part:
        if self._parts is None:
            until = _until(self.order)
            self._parts, self._ends = self._make(until), until.epochs or 0
        for part in self._parts:
            return part
        self._ends = 0
        raise StopIteration

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if not self.order.size:
            raise TypeError("nobody knows how many batches a stream of samples gives")
        return -(-self.order.size // self.order.global_batch) * (1 if self.order.epochs is None else self.order.epochs)

    def anew(self) -> Iterator[Part]:
        """All of it, from the beginning, wherever it stands; it stays where it stands."""
        return self._make(_until(replace(self.order, position=Position())))


def _collated(collate: Callable[[list[Any]], Any], ranks: int, samples: list[Any]) -> Any:
    if ranks == 1:
        return as_dict(collate(samples))
    with generators.apart(0) as drew:
        batch = as_dict(collate(samples))
        if drew():
            what = "collate draws random numbers, and each rank collates rows of its own: they would be the same for other rows"
            raise SoliError(what, fix="draw in the dataset's __getitem__, or in the model's forward")
    return batch


def need_asked(dataset: Any, global_batch: Any, epochs: Any, workers: Any, shuffle: Any) -> None:
    """Raises SoliError where engine.batches is asked for what is none, and where a dataset gives no samples by number or one after another, but something else."""
    asked = {"global_batch": global_batch, "epochs": 0 if epochs is None else epochs, "workers": workers}
    odd = [Problem(f"{name} of engine.batches is a whole number", repr(x), "0, 1, 2, ...") for name, x in asked.items() if not hasattr(x, "__index__") or x < 0]
    odd += [Problem("shuffle of engine.batches says neither", repr(shuffle), "True or False")] * (shuffle not in (True, False))
    if not hasattr(dataset, "__iter__" if is_stream(dataset) else "__len__"):
        odd.append(Problem("engine.batches is given no dataset", type(dataset).__name__, "what gives samples one after another, or by number and says by len() how many"))
    raise_all(odd, everywhere=True)
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        order = "a sampler's order as torch.utils.data.Subset(dataset, order)"
        fix = f"give loader.dataset, collate=loader.collate_fn and shuffle=; {order}; or each batch of the loader to engine.step"
        raise on_all_ranks("engine.batches makes batches of samples, and a DataLoader gives batches", fix=fix)
    if isinstance(dataset, dict | UserDict) and dataset and 0 not in dataset:
        what = "a dataset gives a sample for each number from 0 on, and this is a mapping by names"
        fix = "give a list of samples: [{name: x[i] for name, x in data.items()} for i in range(rows)], or each batch to engine.step"
        raise on_all_ranks(what, got=listed([str(key) for key in dataset]), fix=fix)


def _check(dataset: Any, order: Order) -> None:
    if order.global_batch < order.ranks:
        what = "the global batch is smaller than the number of data-parallel ranks"
        raise on_all_ranks(what, got=f"global_batch={order.global_batch}, dp={order.ranks}", allowed=f"{order.ranks} or more")
    if is_stream(dataset):
        if order.shuffle:
            what = "a stream cannot be shuffled by soli: it has no length and no samples by number"
            raise on_all_ranks(what, got=type(dataset).__name__, fix="pass shuffle=False (and shuffle in the stream), or give a map-style dataset")
    elif len(dataset) == 0:
        raise on_all_ranks("the dataset is empty", got=f"{type(dataset).__name__} of length 0")
    order.global_batch, order.size = int(order.global_batch), 0 if is_stream(dataset) else len(dataset)


def is_stream(dataset: Any) -> bool:
    """Whether it gives samples one after another, and not by number."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _until(order: Order) -> Order:
    """The order with the epochs that are to be through at its end."""
    at = order.position
    if order.epochs is None:
        return replace(order, epochs=at.epoch + 1)
    if at.epoch >= order.epochs:
        text = f"the stream '{order.name}' has {at.epoch} epochs behind it, and epochs={order.epochs} are asked for: nothing is left"
        events.note(text, shown=order.first)
    return order


def _goes_on(order: Order) -> bool:
    """Whether an epoch is left. SoliError where the stream stands in the midst of one of other batches."""
    at = order.position
    if at.batch and at.global_batch and (at.global_batch, at.size) != (order.global_batch, order.size):
        read = at.batch * at.global_batch
        if at.size != order.size or read % order.global_batch:
            what = f"the stream '{order.name}' stands in the midst of an epoch of other batches: its position would be of other samples"
            got = f"batch {at.batch} of {at.global_batch} of {at.size or 'some'} samples, and now {order.global_batch} of {order.size or 'some'}"
            allowed = "the same dataset, and batches of which the samples that were read are a multiple"
            fix = "another name= for another dataset (name=None: from the beginning each time), or the batches of before until the epoch ends"
            raise on_all_ranks(what, got=got, allowed=allowed, fix=fix)
        at.batch = read // order.global_batch
    at.global_batch, at.size = order.global_batch, order.size
    return order.epochs is not None and at.epoch < order.epochs


def _by_number(dataset: Dataset[Any], order: Order, collate: Callable[[list[Any]], Any], workers: int) -> Iterator[Part]:
    drawing = _Drawing(dataset, order.ranks)
    if order.ranks > 1 and not workers:  # a dataset may open its files where it is read first
        order.sample = drawing.first()
    while _goes_on(order):
        epoch, size = order.position.epoch, order.size
        drawn = lambda: torch.Generator().manual_seed((order.seed() * 1_000_003 + order.position.epoch) & 2**64 - 1)
        indices = torch.randperm(size, generator=drawn()) if order.shuffle else torch.arange(size)
        starts = list(range(0, size, order.global_batch))[order.position.batch :]
        if not starts:
            _advance(order, True)
        spans = [(start, min(start + order.global_batch, size)) for start in starts]
        parts = [even_parts(stop - start, order.ranks)[order.index] for start, stop in spans]
        mine = [indices[s + a : s + b].tolist() for (s, _), (a, b) in zip(spans, parts, strict=True)]
        drawing.epoch, drawing.seed = epoch, (seed := order.seed())
        # Its own numbers: a loader draws one from the program's generator, which a resumed run would do once more.
        own = torch.Generator().manual_seed(generators.hashed("loader", seed, epoch))
        samplers = [m for m in mine if m]
        loader = iter(DataLoader(drawing, batch_sampler=samplers, collate_fn=collate, num_workers=workers, generator=own))
        for (start, stop), (a, b) in zip(spans, parts, strict=True):
            data = next(loader) if b > a else None
            here = _advance(order, start + order.global_batch >= size)
            yield Part(data, a, b, stop - start, order.place(epoch, start // order.global_batch, stop - start))
            if _moved(order, here):
                break


class _Drawing(Dataset[Any]):
    """Samples whose Python draws (augmentation) draw by their number: alike whichever rank or worker makes them, and unlike their
    neighbours, whose rank began with the same seed. The first batch that draws is made twice: until then nothing is seeded."""

    def __init__(self, dataset: Dataset[Any], ranks: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, 0, 0
        self.drew, self.looked = False, ranks == 1

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        if not self.drew:
            with generators.apart(0) as drew:
                samples = self._read(numbers)
                self.drew = drew()
            if not self.drew:
                return self._looked(samples, numbers[0])
        return [self._by_number(number) for number in numbers]

    def _read(self, numbers: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(numbers)) if many else [self.dataset[number] for number in numbers]

    def _looked(self, samples: list[Any], number: int) -> list[Any]:
        """Once, where several ranks read: a sample that is another one when it is read again is drawn from what nobody sees."""
        if not self.looked and _seen(samples[0]) != _seen(self._read([number])[0]):
            what = "the dataset gives another sample when it is asked again, and each rank reads its own: they would depend on the ranks"
            fix = "draw from Python's random, numpy or torch (which soli seeds by the sample), not from a generator of the dataset's own"
            raise SoliError(what, got=f"sample {number} of {type(self.dataset).__name__}", fix=fix)
        self.looked = True
        return samples

    def first(self) -> str:
        """A word for the first sample, whose draws are alike everywhere."""
        with generators.apart(generators.hashed("sample", self.seed, self.epoch, 0)):
            sample = tree_map(lambda x: "" if isinstance(x, str) else x, self._read([0])[0])  # a path is a rank's own
            return f"{generators.hashed(_seen(sample)):x}"

    def _by_number(self, number: int) -> Any:
        with generators.apart(generators.hashed("sample", self.seed, self.epoch, number)):
            return self.dataset[number]


def _seen(sample: Any) -> list[str]:
    return [str(x) for x in tree_leaves(sample) if isinstance(x, Tensor | np.ndarray | int | float | str)]


END = object()


def _alike(stream: Iterable[Any], number: int) -> Iterator[Any]:
    """What a stream gives, which may shuffle: its draws are its own, the same on every rank and after a resume."""
    with generators.apart(number):
        samples, held = iter(stream), generators.held()
    while True:
        with generators.apart(number, held):
            sample, held = next(samples, END), generators.held()
        if sample is END:
            return
        yield sample


def _stream(stream: Iterable[Any], order: Order, collate: Callable[[list[Any]], Any]) -> Iterator[Part]:
    while _goes_on(order):
        epoch, before = order.position.epoch, order.position.batch * order.global_batch
        held, source = _rest(order) if before and isinstance(order.given, Iterator) else ([], None)
        source = source or islice(_alike(stream, generators.hashed("stream", order.seed(), epoch)), before, None)
        batch = _taken(held, source, order.global_batch)
        if not batch and not before:
            fix = "give something that can be iterated once for each epoch, or ask for one epoch"
            raise on_all_ranks(f"the stream gave no samples in epoch {epoch}", got=type(stream).__name__, fix=fix)
        if not batch:  # it ended exactly where it was resumed
            _advance(order, True)
        while batch:
            ahead = _taken(held, source, order.global_batch)
            order.position.once = (order.given, ahead + held, source)
            a, b = even_parts(len(batch), order.ranks)[order.index]
            place = order.place(epoch, order.position.batch, len(batch))
            here = _advance(order, not ahead)
            yield Part(collate(batch[a:b]) if b > a else None, a, b, len(batch), place)
            batch = [] if _moved(order, here) else ahead


def _taken(held: list[Any], source: Iterator[Any], count: int) -> list[Any]:
    """The next samples, of those that were read before first."""
    found = held[:count]
    del held[:count]
    return found + list(islice(source, count - len(found)))


def _rest(order: Order) -> tuple[list[Any], Iterator[Any] | None]:
    """What is left of a generator of which an epoch's first samples were read before: those read ahead, and it."""
    given, held, source = order.position.once
    if given is not order.given:
        return [], None
    if order.position.mover is None:
        what = f"a checkpoint has moved the stream '{order.name}' to samples that were read already, and they cannot be read again"
        raise on_all_ranks(what, got=type(given).__name__, fix="give something that can be iterated anew, or another iterator after engine.load")
    return [*held], source


def trained(positions: dict[str, Position], place: dict[str, Any]) -> None:
    """A step has seen the batch that a stream gave out at this place; of a batch of no place nobody knows whose it was, and it may be any's."""
    at, where = positions.get(place.get("name", ""), Position()), (*place.get("batch", ()), place.get("global_batch"))
    places = [(one.epoch, one.batch, one.global_batch) for one in at.ahead]
    if where in places:
        at.ahead, at.trained = at.ahead[places.index(where) + 1 :], True
    for one in positions.values() if "batch" not in place else ():
        one.ahead = ()


def resumed(positions: dict[str, Position], begun: bool) -> dict[str, Position]:
    """Where a checkpoint goes on: at the first batch that was given out and not trained on; of streams that none is trained on, at the next."""
    inhand = {name: at.ahead[0] for name, at in positions.items() if (at.trained or not begun) and 0 < len(at.ahead) < AHEAD}
    return positions | inhand


def _advance(order: Order, epoch_ends: bool) -> tuple[Position, int]:
    """Move the position by a batch; where it stands then, in the order of which seed."""
    at = order.position
    at.ahead = (*at.ahead[1 - AHEAD :], replace(at))
    at.epoch, at.batch, at.mover = (at.epoch + 1, 0, order) if epoch_ends else (at.epoch, at.batch + 1, order)
    return replace(at), order.seed()


def _moved(order: Order, here: tuple[Position, int]) -> bool:
    """Whether a checkpoint was loaded meanwhile. SoliError where another iterator has moved the position."""
    if order.position.mover is not None and order.position.mover is not order:
        what = f"two iterators read the stream '{order.name}' by turns, and it has one position: each would leave out what the other reads"
        raise on_all_ranks(what, fix="give engine.batches a name= for each dataset that is read beside another, and go on with one iterator of each")
    return (order.position, order.seed()) != here
