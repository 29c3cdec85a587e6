"""Which ranks wait for others: each says so in a file, and from all of them the launcher sees that none can go on. No torch here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SAY_SECONDS = 0.5
"""How long a rank waits before it says so, and then says it again."""
STUCK_SECONDS = 3.0
"""How long nothing came to any rank before none can go on: each has looked since, and only others can move what it waits for."""


def say(call: str, moved: float, looked: float | None) -> None:
    """The main thread waits in `call`; since `moved` nothing came, by what it saw at `looked`. None: it does not look, it is woken."""
    if path := os.environ.get("SOLI_WAITS_FILE"):
        with suppress(OSError):  # the folder is gone or full: no reason for a wait to fail
            Path(path).write_text(json.dumps({"call": call, "moved": moved, "looked": looked}), encoding="utf-8")


def over() -> None:
    """It does not wait any more."""
    if path := os.environ.get("SOLI_WAITS_FILE"):
        Path(path).unlink(missing_ok=True)


@contextmanager
def waiting(call: str) -> Iterator[None]:
    """Around what waits for other ranks and does not return before they come."""
    say(call, time.time(), None)
    try:
        yield
    finally:
        over()


def stuck(waits: Iterator[dict[str, Any] | None], ended: float) -> bool:
    """Whether ranks, all that run, wait for each other or for one that has ended (at `ended`; 0: none has)."""
    found = list(waits)
    if not all(found) or (not ended and any(wait["looked"] is None for wait in found if wait)):
        return False
    now = time.time() - STUCK_SECONDS  # who is woken may need a while for the rest
    looked = min(wait["looked"] or now for wait in found if wait)
    return looked - max(ended, *(wait["moved"] for wait in found if wait)) > STUCK_SECONDS
