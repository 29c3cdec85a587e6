"""What the ranks of a group tell each other through shared memory, and how one waits for the others.

A collective is a sequence of *chunks*, numbered through the life of the group: each rank may write its slot,
posts that it is there (`ready`) with a checksum of what it is about to do, waits for those it reads from, and
posts that it has read (`done`). A slot has three lanes, so chunk k may be written once everyone has done chunk
k - 3: a rank can write one chunk while it sums the one before and others still read the one before that. In a
chunk the ranks may meet up to three times.

A rank whose tensor lies in memory that the group shares (`allocate`) posts its place with the checksum. If all
do, they work on the tensors themselves, and no slot is written.

    words of a rank    ready, done, sleeping, bell; checksums and places of its last four chunks; whether it waits
                       for another host
    text of a rank     its last four operations in words, with their call sites: read when something is wrong
    slot of a rank     three lanes of `lane_bytes` bytes
    channel s -> d     cells of a byte stream of messages, for send and receive

Plain loads and stores of aligned words are ordered on x86; elsewhere a lock, taken twice, is the barrier: a
store may sink into a critical section, but what comes before one is seen before what comes after the next.
"""

import ctypes
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soli.core.errors import SoliError, failure
from soli.mesh.local.segment import rounded, shared_map
from soli.mesh.local.waiting import sleep_on, wake

DIFFERENT = "called different collectives"
WORDS = 16  # of a rank: 128 bytes, two cache lines
READY, DONE, SLEEPING, BELL, SUMS, PLACES, ABROAD = 0, 1, 2, 3, 4, 8, 12
AHEAD = 4  # chunks whose checksums, places and texts are kept
MEETINGS = 4  # ready counts in chunks times this, plus which meeting of the chunk it is
PLACE_BITS = 40  # of a place for the offset in a region; the region's number stands above them
TEXT = 512
FAILED_TEXT = 8192
LANES = 3
LANE_BYTES = 1 << 20
CELL = 1 << 18  # bytes of a cell of a channel
CELLS = 2
LOOK_SECONDS = 0.1  # between two looks at whether the others live

_fence = threading.Lock()
_IN_ORDER = os.uname().machine == "x86_64"

Write = Callable[[int], None]
"""Fills a lane of this rank's slot, by the lane's number."""
Step = Iterator[None]
"""An operation under way: yields while it waits for another rank."""


@dataclass
class Operation:
    """What is said of a collective: `checksum` must be the same on every rank that takes part."""

    text: str
    site: str
    checksum: int


@dataclass
class Region:
    """Memory from `allocate`: `start` is the address of this rank's part, of `stride` bytes as everyone's."""

    map: weakref.ref[mmap.mmap]
    start: int
    stride: int


class Board:
    """One group's shared memory as one of its ranks sees it."""

    moves = 0  # of this process, over all groups: goes up with everything that is posted

    def __init__(self, store: Any, rank: int, pids: list[int], name: str, timeout: timedelta, here: list[int], numbers: list[int]) -> None:
        ranks = len(pids)
        self.rank, self.ranks, self.name, self.pids = rank, ranks, name, pids
        self.numbers = numbers  # what the job calls the group's ranks, of which `here` are on this host
        self.global_ranks, self.lane_bytes = [numbers[r] for r in here], LANE_BYTES
        place = 8 * WORDS * ranks
        self._failed, place = place, place + FAILED_TEXT
        self._texts, place = place, place + ranks * AHEAD * TEXT
        self._channels, place = place, place + 8 * ranks * ranks * (2 + CELLS * 4)
        place = -(-place // 4096) * 4096
        self._cells, place = place, place + ranks * ranks * CELLS * CELL
        self._slots, place = place, place + ranks * LANES * self.lane_bytes
        self._store, self._timeout = store, timeout
        self.map = shared_map(dist.PrefixStore("board", store), rank, ranks, place, timeout)
        self.words = memoryview(self.map).cast("q")
        self._bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.regions: dict[int, Region] = {}
        self._allocated, self.chunk = 0, 0
        self.broken: Exception | None = None  # after an error nothing of the group can be trusted
        self.on_broken: Callable[[Exception], None] | None = None
        self.on_look: Callable[[], None] | None = None  # raises what other hosts have found
        self.on_late: Callable[[], str] | None = None  # what other hosts have to do with it
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}
        self._watch: dict[int, int] = {}
        self._looked = 0.0

    # --- chunks ---------------------------------------------------------------------------------------

    def chunk_of(self, operation: Operation, write: Write | None, sources: Sequence[int], place: int = 0) -> Any:
        """One chunk up to the point where the slots of `sources` may be read; returns the lane they are in.

        A generator to be delegated to (`lane = yield from board.chunk_of(...)`); `read()` ends the chunk.
        `place`: where this rank's tensor lies in shared memory, from `place_of`; 0 if it does not.
        """
        number = self.chunk
        self.chunk = number + 1
        if number >= LANES:
            for other in range(self.ranks):
                while self.words[other * WORDS + DONE] <= number - LANES:
                    yield
        if write is not None:
            write(number % LANES)
        self._post(number, operation, place)
        for other in sources:
            if other != self.rank:
                yield from self._ready(other, number, 1, operation)
        return number % LANES

    def again(self, operation: Operation, sources: Sequence[int]) -> Any:
        """Another meeting inside the chunk: what was written since is there on all `sources`."""
        number, mine = self.chunk - 1, self.rank * WORDS + READY
        meeting = self.words[mine] - MEETINGS * number + 1
        self.order()
        self.words[mine] += 1
        self._wake()
        for other in sources:
            if other != self.rank:
                yield from self._ready(other, number, meeting, operation)

    def all_read(self) -> Step:
        """After `read()`: wait until all others have read too, so that this rank may write again."""
        for other in range(self.ranks):
            while self.words[other * WORDS + DONE] < self.chunk:
                yield

    def places(self) -> list[int]:
        """What each rank posted as its place for this chunk; everyone's `ready` was awaited."""
        return [self.words[other * WORDS + PLACES + (self.chunk - 1) % AHEAD] for other in range(self.ranks)]

    def read(self, behind: int = 0) -> None:
        """This rank has read all that it wanted of the chunk; of that so many chunks behind it."""
        self.order()
        self.words[self.rank * WORDS + DONE] = self.chunk - behind
        self._wake()

    def _post(self, number: int, operation: Operation, place: int) -> None:
        at = self._texts + (self.rank * AHEAD + number % AHEAD) * TEXT
        said = f"{operation.text}\n{operation.site}".encode()[: TEXT - 2]
        self.map[at : at + len(said) + 1] = said + b"\0"
        base = self.rank * WORDS
        self.words[base + SUMS + number % AHEAD] = operation.checksum
        self.words[base + PLACES + number % AHEAD] = place
        self.order()
        self.words[base + READY] = MEETINGS * number + 1
        self._wake()

    def _ready(self, other: int, number: int, meeting: int, operation: Operation) -> Step:
        base, words = other * WORDS, self.words
        while words[base + READY] < MEETINGS * number + meeting:
            yield
        self.order()
        for one in (max(number - 1, 0), number) if meeting == 1 else ():  # the last one too: roots of it may have looked at nobody
            if words[base + SUMS + one % AHEAD] != words[self.rank * WORDS + SUMS + one % AHEAD]:
                raise self.fail(self._mismatch(one))

    def order(self) -> None:
        """Stores before this are seen before stores after it."""
        if not _IN_ORDER:
            for _ in range(2):
                with _fence:
                    pass

    # --- waking and sleeping --------------------------------------------------------------------------

    def _wake(self, others: Sequence[int] = ()) -> None:
        """Those of all ranks, or of these, that sleep."""
        Board.moves += 1
        for other in others or range(self.ranks):
            if self.words[other * WORDS + SLEEPING]:
                self.ring(other)

    def publish(self, place: int, value: int, other: int) -> None:
        """Store a word after everything before it, and wake the rank that looks at it."""
        self.order()
        self.words[place] = value
        self._wake((other,))

    def ring(self, other: int) -> None:
        """Wake a rank that sleeps."""
        place = other * WORDS + BELL
        self.words[place] = (self.words[place] + 1) & 0x7FFFFFFF
        wake(self._address + 8 * place)

    def sleep(self, look: Callable[[], bool], seconds: float) -> None:
        """Sleep until rung or so long, unless `look()` finds news after all."""
        base = self.rank * WORDS
        bell = self.words[base + BELL]
        self.words[base + SLEEPING] = 1
        try:
            if not look():
                sleep_on(self._address + 8 * (base + BELL), bell, seconds)
        finally:
            self.words[base + SLEEPING] = 0

    # --- what can go wrong ----------------------------------------------------------------------------

    def check(self, peer: int | None) -> None:
        """Raise what another rank has found, or that a rank which others (or a message of `peer`) wait for is gone."""
        if self.map[self._failed]:
            raw = self.map[self._failed + 1 : self._failed + FAILED_TEXT]
            raise _error(raw[: raw.index(b"\0")].decode(errors="replace"))
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self.on_look is not None:
            self.on_look()
        gone = [other for other in range(self.ranks) if self._is_gone(other)]
        if (late := next((other for other in gone if other == peer or self._behind(other)), None)) is not None:
            number = self.global_ranks[late]
            raise self.fail(f"rank {number} of group {self.name} is gone; it stood at {self.said(late)}")

    def _behind(self, other: int) -> bool:
        """Whether `other` has not done something that this rank has begun."""
        words, mine = self.words, self.rank * WORDS
        begun = (words[mine + READY] + MEETINGS - 1) // MEETINGS
        return bool(words[other * WORDS + DONE] < max(words[mine + DONE], begun))

    def _is_gone(self, other: int) -> bool:
        if other == self.rank or not hasattr(os, "pidfd_open"):
            return False
        if other not in self._watch:
            try:
                self._watch[other] = os.pidfd_open(self.pids[other])
            except ProcessLookupError:
                return True
            weakref.finalize(self, os.close, self._watch[other])
        ended = select.poll()  # not select.select, which knows no file number above 1023
        ended.register(self._watch[other], select.POLLIN)
        return bool(ended.poll(0))

    def breaks(self, error: Exception) -> None:
        """The first error is the group's."""
        if self.broken is None:
            self.broken = error
            if self.on_broken is not None:
                self.on_broken(error)

    def late(self, seconds: float) -> SoliError:
        """Nobody has moved for too long: say who stands where."""
        numbers = [self.words[r * WORDS + READY] for r in range(self.ranks)]
        behind = [r for r in range(self.ranks) if numbers[r] < max(numbers)]
        named = f"rank {self.global_ranks[behind[0]]} did not arrive" if behind else "no rank went on"
        if self.on_late is not None and any(self.words[r * WORDS + ABROAD] for r in range(self.ranks)):
            named = self.on_late() or named
        return self.fail(f"{named} in {seconds:g} s in group {self.name}\n{self._by_rank(self.said)}")

    def said(self, other: int) -> str:
        """The last operation of a rank, with its call site."""
        ready = self.words[other * WORDS + READY]
        if not ready:
            return "no collective yet"
        number = (ready - 1) // MEETINGS
        return f"#{number} {self._text(other, number)}"

    def _text(self, other: int, number: int) -> str:
        at = self._texts + (other * AHEAD + number % AHEAD) * TEXT
        raw = self.map[at : at + TEXT]
        return raw[: raw.index(b"\0")].decode(errors="replace").replace("\n", " at ")

    def _mismatch(self, number: int) -> str:
        here = lambda other: self.words[other * WORDS + READY] > MEETINGS * number
        said = lambda other: self._text(other, number) if here(other) else "not there yet"
        return f"the ranks of group {self.name} {DIFFERENT}\n{self._by_rank(said)}"

    def _by_rank(self, said: Callable[[int], str]) -> str:
        return "\n".join(f"  rank {self.global_ranks[r]}: {said(r)}" for r in range(self.ranks))

    def fail(self, text: str) -> SoliError:
        """Tell every rank of the group, and return the error to raise here."""
        said = text.encode()[: FAILED_TEXT - 2]
        if not self.map[self._failed]:
            self.map[self._failed + 1 : self._failed + 2 + len(said)] = said + b"\0"
            self.order()
            self.map[self._failed] = 1
            self._wake()
        return _error(text)

    # --- memory ---------------------------------------------------------------------------------------

    def allocate(self, size: int) -> Tensor:
        """`size` bytes of this rank that the others of the board see too. Collective.

        The memory goes when the tensor and its views are gone, on all ranks.
        """
        self._allocated += 1
        store = dist.PrefixStore(f"memory{self._allocated}", self._store)
        stride = rounded(max(size, 1))
        mapped = shared_map(store, self.rank, self.ranks, stride * self.ranks, self._timeout)
        own = torch.frombuffer(mapped, dtype=torch.uint8, offset=self.rank * stride, count=size)
        self.regions[self._allocated] = Region(weakref.ref(mapped), own.data_ptr(), stride)
        return own

    def place_of(self, tensor: Tensor) -> int:
        """Where the tensor lies in memory from `allocate`, for other ranks to find it; 0: not there."""
        if not self.regions:
            return 0
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for number, region in list(self.regions.items()):
            if region.start <= start and start + size <= region.start + region.stride:
                if region.map() is not None:
                    return (number << PLACE_BITS) + start - region.start
                del self.regions[number]
        return 0

    def at(self, other: int, place: int, like: Tensor) -> Tensor:
        """The tensor that rank `other` has at `place`, which has the size and type of `like`."""
        region = self.regions[place >> PLACE_BITS]
        offset = other * region.stride + (place & ((1 << PLACE_BITS) - 1))
        return torch.frombuffer(region.map(), dtype=like.dtype, offset=offset, count=like.numel())

    def slot(self, other: int, lane: int, dtype: torch.dtype) -> Tensor:
        """A lane of a rank's slot, as elements of `dtype`."""
        if dtype not in self._views:
            size = self.lane_bytes
            view = lambda r, n: self._bytes[self._slots + (LANES * r + n) * size :][:size].view(dtype)
            self._views[dtype] = [[view(r, n) for n in range(LANES)] for r in range(self.ranks)]
        return self._views[dtype][other][lane]

    def cell(self, source: int, target: int, number: int) -> Tensor:
        """A cell of the channel from `source` to `target`, bytes."""
        place = self._cells + ((source * self.ranks + target) * CELLS + number % CELLS) * CELL
        return self._bytes[place : place + CELL]

    def channel(self, source: int, target: int) -> int:
        """The first word of a channel: cells written, cells read, then four words of each cell."""
        return self._channels // 8 + (source * self.ranks + target) * (2 + CELLS * 4)


def _error(text: str) -> SoliError:
    what, _, got = text.split("\n  seen ")[0].partition("\n")  # another's words have theirs already
    found = failure(what, got=got.strip().removeprefix("got ").lstrip(), seen="uneven-decision" if DIFFERENT in what else "")
    found.consequence, found.lost = "is gone" in what or " failed" in what, True
    return found
