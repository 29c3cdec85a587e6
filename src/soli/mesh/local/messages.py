"""Send and receive: a stream of cells from each rank to each other, and messages in it that are told by tag.

A sender waits only while the channel is full; a receiver takes what comes and keeps aside what it has not
asked for yet. Both are generators, so any number of them go on at once and no order of calls locks up.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soli.core.errors import SoliError
from soli.mesh.local.board import CELL, CELLS, Board, Operation

WRITTEN, READ, HEADS = 0, 1, 2
TAG, TOTAL, CHECKSUM, USED = 0, 1, 2, 3  # of a cell


@dataclass(eq=False)
class Message:
    """What arrives, or is expected: `data` are its bytes."""

    tag: int
    data: Tensor
    checksum: int
    got: int = 0
    claimed: bool = True

    @property
    def complete(self) -> bool:
        return self.got >= max(self.data.numel(), 1)


def send(board: Board, operation: Operation, data: Tensor, target: int, tag: int) -> Any:
    """`data` [b] bytes into the channel to `target`; done when all of it is in there."""
    words, base = board.words, board.channel(board.rank, target)
    for piece in data.split(CELL):
        while words[base + WRITTEN] - words[base + READ] >= CELLS:
            yield
        number = words[base + WRITTEN]
        board.cell(board.rank, target, number)[: piece.numel()].copy_(piece)
        head = base + HEADS + 4 * (number % CELLS)
        words[head + TAG], words[head + TOTAL] = tag, data.numel()
        words[head + CHECKSUM], words[head + USED] = operation.checksum, piece.numel()
        board.publish(base + WRITTEN, number + 1, target)


def unlike(board: Board, ends: tuple[int, int], tag: int, sent: int, wanted: int, retyped: bool) -> SoliError:
    """A message between two ranks of the job whose bytes, or their type, are not those that are asked for."""
    what = f"a message from rank {ends[0]} to rank {ends[1]} (tag {tag}) in group {board.name} is not what is received"
    return board.fail(f"{what}\n  sent {sent} bytes, received as {wanted} bytes" + ", of another type" * retyped)


class Inbox:
    """The channel from one source, as the rank that reads it sees it."""

    def __init__(self, board: Board, source: int) -> None:
        self.board, self.source = board, source
        self.expected: list[Message] = []
        self.aside: list[Message] = []
        self.current: Message | None = None

    def expect(self, tag: int, data: Tensor, checksum: int) -> Message:
        """Ask for the next message with this tag: one that was kept aside, or one to come."""
        for message in self.aside:
            if message.tag == tag and not message.claimed:
                message.claimed = True
                return message
        wanted = Message(tag, data, checksum)
        self.expected.append(wanted)
        return wanted

    def poll(self) -> None:
        """Take every cell that is there, as long as somebody waits for something."""
        board, words = self.board, self.board.words
        base = board.channel(self.source, board.rank)
        while words[base + WRITTEN] > words[base + READ] and (self.expected or self.current is not None):
            board.order()
            number = words[base + READ]
            head = base + HEADS + 4 * (number % CELLS)
            message = self.current or self._begin(words[head + TAG], words[head + TOTAL], words[head + CHECKSUM])
            used = words[head + USED]
            message.data[message.got : message.got + used].copy_(board.cell(self.source, board.rank, number)[:used])
            message.got += max(used, 1)
            self.current = None if message.complete else message
            board.publish(base + READ, number + 1, self.source)

    def _begin(self, tag: int, total: int, checksum: int) -> Message:
        for wanted in self.expected:
            if wanted.tag == tag:
                self.expected.remove(wanted)
                self._check(wanted, total, checksum)
                return wanted
        message = Message(tag, torch.empty(total, dtype=torch.uint8), checksum, claimed=False)
        self.aside.append(message)
        return message

    def _check(self, wanted: Message, total: int, checksum: int) -> None:
        size, retyped, of = wanted.data.numel(), wanted.checksum != checksum, self.board.global_ranks
        if size != total or retyped:
            raise unlike(self.board, (of[self.source], of[self.board.rank]), wanted.tag, total, size, retyped)

    def take(self, message: Message, data: Tensor, checksum: int) -> None:
        """Put a message that was kept aside where it was asked for."""
        if message in self.aside:
            self.aside = [m for m in self.aside if m is not message]
            self._check(Message(message.tag, data, checksum), message.data.numel(), message.checksum)
            data.copy_(message.data)


def receive(inbox: Inbox, message: Message, data: Tensor, checksum: int) -> Any:
    """Wait until `message`, which `inbox.expect` gave, is complete in `data`."""
    while not message.complete:
        inbox.poll()
        if not message.complete:
            yield
    inbox.take(message, data, checksum)
