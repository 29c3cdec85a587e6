"""One structured stream of events per rank, kept in memory.

Kinds in use: `note` (something the user should know), `step`, `skip` (a step that was not taken),
`save`, `load`, `error`.
"""

import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

KEPT = 10_000


class Events:
    """The stream of one rank. `emit` costs microseconds."""

    def __init__(self) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def emit(self, kind: str, **fields: Any) -> None:
        self.recent.append({"time": time.time(), "kind": kind, **fields})

    def note(self, text: str, *, shown: bool, **more: Any) -> None:
        """Something the user should know; one rank of many shows it."""
        self.emit("note", text=text, **more)
        if shown:
            print(f"soli: {text}", flush=True)

    def apart(self) -> AbstractContextManager[object]:
        """Within, what is emitted is forgotten: of a program that is run for its shapes alone."""
        return patch.object(self, "recent", deque(maxlen=KEPT))


events = Events()
