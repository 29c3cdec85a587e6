"""Ranks that are not there: one rank of N runs alone, and what it sends and receives is recorded and no more.

For rehearsing a plan (engine/rehearse.py): sums leave what they are given, what is received is not filled. What one
stage of a pipeline tells the next in words is kept, so that stages can be run one after another.
"""

import json
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


class NotYetError(Exception):
    """A rank is told something by one that has not run so far."""


class Absent:
    """The group of ranks that are not there, and what they told each other."""

    def __init__(self) -> None:
        self._letters: dict[tuple[int, int, int], str] = {}
        self._counts: Counter[tuple[int, int]] = Counter()
        self._heard = 0

    def begin(self) -> None:
        """Another rank runs, or the same one from its beginning."""
        self._counts.clear()

    def heard(self) -> bool:
        """Whether anything new was said since this was asked last."""
        before, self._heard = self._heard, len(self._letters)
        return len(self._letters) > before

    def tell(self, value: Any, sender: int, to: int) -> None:
        """Keep what a rank sends, by its number among what it sends there."""
        self._letters[sender, to, self._number(sender, to)] = json.dumps(value)

    def told(self, sender: int, to: int) -> Any:
        """What was sent there next. NotYetError where the sender has to run first."""
        key = (sender, to, self._number(sender, to))
        if key not in self._letters:
            raise NotYetError(f"rank {to} waits for what rank {sender} says")
        return json.loads(self._letters[key])

    def _number(self, sender: int, to: int) -> int:
        self._counts[sender, to] += 1
        return self._counts[sender, to]


def holding(group: Any) -> AbstractContextManager[object]:
    """Within, torch's schedules hold what they would send over an absent group."""
    if not isinstance(group, Absent):
        return nullcontext()
    # What torch has of messages under way: their memory stays until they are waited for, by nobody, and dropped.
    held = lambda tensors, desc=None: [SimpleNamespace(tensors=tensors, wait=lambda: None)] if tensors else []
    by_peer = lambda tensors, desc=None: {0: held(tensors)} if tensors else {}  # gpipe's
    return patch.multiple("torch.distributed.pipelining.schedules", _batch_p2p=held, _sorted_batch_p2p=by_peer)  # by name: its import takes two seconds


def answering(group: Any, rank: int, size: int) -> AbstractContextManager[object]:
    """Within, torch knows this rank's place in an absent group: its PipelineStage asks for it."""
    if not isinstance(group, Absent):
        return nullcontext()
    get_rank, get_size = dist.get_rank, dist.get_world_size
    return patch.multiple(
        dist,
        get_rank=lambda asked=None: rank if asked is group else get_rank(asked),
        get_world_size=lambda asked=None: size if asked is group else get_size(asked),
    )
