"""What the ranks of a group tell each other through shared memory, and how one waits for the others.

A collective is a sequence of *chunks*, numbered through the life of the group: each rank may write its slot,
posts that it is there (`ready`) with a checksum of what it is about to do, waits for those it reads from, and
posts that it has read (`done`). A slot has two halves, so chunk k may be written once everyone has done chunk
k - 2; no rank is ever more than two chunks ahead of another.

    words of a rank    ready, done, sleeping, bell, checksums of its last four chunks
    text of a rank     its last four operations in words, with their call sites: read when something is wrong
    slot of a rank     two halves of `half` bytes
    channel s -> d     cells of a byte stream of messages, for send and receive

Plain loads and stores of aligned words are ordered on x86; elsewhere a lock stands in for the barrier.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from soli.core.errors import SoliError, failure
from soli.mesh.local.segment import Segment
from soli.mesh.local.waiting import sleep_on, wake

WORDS = 16  # of a rank: 128 bytes, two cache lines
READY, DONE, SLEEPING, BELL, SUMS = 0, 1, 2, 3, 4
AHEAD = 4  # chunks whose checksums and texts are kept
TEXT = 512
FAILED_TEXT = 8192
HALF = 1 << 20  # bytes of half a slot
CELL = 1 << 18  # bytes of a cell of a channel
CELLS = 2
LOOK_SECONDS = 0.1  # between two looks at whether the others live

_fence = threading.Lock()
_IN_ORDER = os.uname().machine == "x86_64"

Step = Iterator[None]
"""An operation under way: yields while it waits for another rank."""


@dataclass
class Operation:
    """What is said of a collective: `checksum` must be the same on every rank that takes part."""

    text: str
    site: str
    checksum: int


class Board:
    """One group's shared memory as one of its ranks sees it."""

    moves = 0  # of this process, over all groups: goes up with everything that is posted

    def __init__(self, store: Any, rank: int, ranks: int, name: str, timeout: timedelta) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        self.half = HALF
        place = 8 * WORDS * ranks
        self._failed, place = place, place + FAILED_TEXT
        self._texts, place = place, place + ranks * AHEAD * TEXT
        self._channels, place = place, place + 8 * ranks * ranks * (2 + CELLS * 4)
        place = -(-place // 4096) * 4096
        self._cells, place = place, place + ranks * ranks * CELLS * CELL
        self._slots, place = place, place + ranks * 2 * self.half
        self.segment = Segment(store, rank, ranks, place, timeout)
        self.words = self.segment.words
        self.chunk = 0
        self.broken: Exception | None = None  # after an error nothing of the group can be trusted
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}
        self._watch: dict[int, int] = {}
        self._looked = 0.0

    # --- chunks ---------------------------------------------------------------------------------------

    def chunk_of(
        self, operation: Operation, write: Callable[[int], None] | None, sources: range | tuple[int, ...]
    ) -> Any:
        """One chunk up to the point where the slots of `sources` may be read; returns which half they are in.

        A generator to be delegated to (`half = yield from board.chunk_of(...)`); `read()` ends the chunk.
        """
        number = self.chunk
        self.chunk = number + 1
        words = self.words
        if number >= 2:
            for other in range(self.ranks):
                while words[other * WORDS + DONE] < number - 1:
                    yield
        if write is not None:
            write(number & 1)
        self._post(number, operation)
        for other in sources:
            if other != self.rank:
                yield from self._ready(other, number, 1, operation)
        return number & 1

    def again(self, operation: Operation, sources: range | tuple[int, ...]) -> Any:
        """A second meeting inside the chunk: what was written since is there on all `sources`."""
        number = self.chunk - 1
        self.order()
        self.words[self.rank * WORDS + READY] = 2 * number + 2
        self._wake()
        for other in sources:
            if other != self.rank:
                yield from self._ready(other, number, 2, operation)

    def read(self) -> None:
        """This rank has read all that it wanted of the chunk."""
        self.order()
        self.words[self.rank * WORDS + DONE] = self.chunk
        self._wake()

    def _post(self, number: int, operation: Operation) -> None:
        at = self._texts + (self.rank * AHEAD + number % AHEAD) * TEXT
        said = f"{operation.text}\n{operation.site}".encode()[: TEXT - 2]
        self.segment.map[at : at + len(said) + 1] = said + b"\0"
        base = self.rank * WORDS
        self.words[base + SUMS + number % AHEAD] = operation.checksum
        self.order()
        self.words[base + READY] = 2 * number + 1
        self._wake()

    def _ready(self, other: int, number: int, meeting: int, operation: Operation) -> Step:
        base, words = other * WORDS, self.words
        while words[base + READY] < 2 * number + meeting:
            yield
        self.order()
        if meeting == 1 and words[base + SUMS + number % AHEAD] != operation.checksum:
            raise self.fail(self._mismatch(number))

    def order(self) -> None:
        """Stores before this are seen before stores after it."""
        if not _IN_ORDER:
            with _fence:
                pass

    # --- waking and sleeping --------------------------------------------------------------------------

    def _wake(self) -> None:
        Board.moves += 1
        for other in range(self.ranks):
            if self.words[other * WORDS + SLEEPING]:
                self.ring(other)

    def publish(self, place: int, value: int, other: int) -> None:
        """Store a word after everything before it, and wake the rank that looks at it."""
        self.order()
        Board.moves += 1
        self.words[place] = value
        if self.words[other * WORDS + SLEEPING]:
            self.ring(other)

    def ring(self, other: int) -> None:
        """Wake a rank that sleeps."""
        place = other * WORDS + BELL
        self.words[place] = (self.words[place] + 1) & 0x7FFFFFFF
        wake(self.segment.address + 8 * place)

    def sleep(self, look: Callable[[], bool]) -> None:
        """Sleep until rung, unless `look()` finds news after all."""
        base = self.rank * WORDS
        bell = self.words[base + BELL]
        self.words[base + SLEEPING] = 1
        try:
            if not look():
                sleep_on(self.segment.address + 8 * (base + BELL), bell)
        finally:
            self.words[base + SLEEPING] = 0

    # --- what can go wrong ----------------------------------------------------------------------------

    def check(self, peer: int | None) -> None:
        """Raise what another rank has found, or that a rank which others (or a message of `peer`) wait for is gone."""
        if self.segment.map[self._failed]:
            raw = self.segment.map[self._failed + 1 : self._failed + FAILED_TEXT]
            raise _error(raw[: raw.index(b"\0")].decode(errors="replace"))
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        gone = [other for other in range(self.ranks) if self._is_gone(other)]
        late = [other for other in gone if other == peer or self._behind(other)]
        if late:
            raise self.fail(f"rank {late[0]} of group {self.name} is gone; it stood at {self.said(late[0])}")

    def _behind(self, other: int) -> bool:
        """Whether `other` has not done something that this rank has begun."""
        words, mine = self.words, self.rank * WORDS
        return bool(words[other * WORDS + DONE] < max(words[mine + DONE], (words[mine + READY] + 1) // 2))

    def _is_gone(self, other: int) -> bool:
        if other == self.rank or not hasattr(os, "pidfd_open"):
            return False
        if other not in self._watch:
            try:
                self._watch[other] = os.pidfd_open(self.segment.pids[other])
            except ProcessLookupError:
                return True
        return bool(select.select([self._watch[other]], [], [], 0)[0])

    def late(self, seconds: float) -> SoliError:
        """Nobody has moved for too long: say who stands where."""
        numbers = [self.words[r * WORDS + READY] for r in range(self.ranks)]
        behind = [r for r in range(self.ranks) if numbers[r] < max(numbers)]
        named = f"rank {behind[0]} did not arrive" if behind else "no rank went on"
        lines = [f"  rank {r}: {self.said(r)}" for r in range(self.ranks)]
        return self.fail(f"{named} in {seconds:g} s in group {self.name}\n" + "\n".join(lines))

    def said(self, other: int) -> str:
        """The last operation of a rank, with its call site."""
        ready = self.words[other * WORDS + READY]
        if not ready:
            return "no collective yet"
        return f"#{(ready - 1) // 2} {self._text(other, (ready - 1) // 2)}"

    def _text(self, other: int, number: int) -> str:
        at = self._texts + (other * AHEAD + number % AHEAD) * TEXT
        raw = self.segment.map[at : at + TEXT]
        return raw[: raw.index(b"\0")].decode(errors="replace").replace("\n", " at ")

    def _mismatch(self, number: int) -> str:
        lines = []
        for other in range(self.ranks):
            here = self.words[other * WORDS + READY] > 2 * number
            lines.append(f"  rank {other}: {self._text(other, number) if here else 'not there yet'}")
        return f"the ranks of group {self.name} called different collectives\n" + "\n".join(lines)

    def fail(self, text: str) -> SoliError:
        """Tell every rank of the group, and return the error to raise here."""
        said = text.encode()[: FAILED_TEXT - 2]
        if not self.segment.map[self._failed]:
            self.segment.map[self._failed + 1 : self._failed + 2 + len(said)] = said + b"\0"
            self.order()
            self.segment.map[self._failed] = 1
            self._wake()
        return _error(text)

    # --- memory ---------------------------------------------------------------------------------------

    def slot(self, other: int, half: int, dtype: torch.dtype) -> Tensor:
        """Half a slot of a rank, as elements of `dtype`."""
        if dtype not in self._views:
            place = lambda r, h: self._slots + (2 * r + h) * self.half
            self._views[dtype] = [
                [self.segment.tensor(place(r, h), self.half).view(dtype) for h in range(2)]
                for r in range(self.ranks)
            ]
        return self._views[dtype][other][half]

    def cell(self, source: int, target: int, number: int) -> Tensor:
        """A cell of the channel from `source` to `target`, bytes."""
        place = ((source * self.ranks + target) * CELLS + number % CELLS) * CELL
        return self.segment.tensor(self._cells + place, CELL)

    def channel(self, source: int, target: int) -> int:
        """The first word of a channel: cells written, cells read, then four words of each cell."""
        return self._channels // 8 + (source * self.ranks + target) * (2 + CELLS * 4)


def _error(text: str) -> SoliError:
    what, _, got = text.partition("\n")
    found = failure(what, got=got or None)
    found.consequence = "is gone" in what
    return found
