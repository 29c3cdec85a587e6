"""One structured stream of events per rank: kept in memory, and written as JSON lines once a file is named.

Kinds in use: `note` (something the user should know), `step`, `skip` (a step that was not taken),
`save`, `load`, `error`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

KEPT = 10_000


class Events:
    """The stream of one rank. `emit` costs microseconds; lines are flushed so that a crash loses none."""

    def __init__(self) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._file: TextIO | None = None

    def to_file(self, path: Path) -> None:
        """Append this and all later events to `path`; what was kept so far is written first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        for event in self.recent:
            self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def emit(self, kind: str, **fields: Any) -> None:
        event = {"time": time.time(), "kind": kind, **fields}
        self.recent.append(event)
        if self._file is not None:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, what is emitted is forgotten: of a program that is run for its shapes alone."""
        kept, self.recent = self.recent, deque(maxlen=KEPT)
        file, self._file = self._file, None
        try:
            yield
        finally:
            self.recent, self._file = kept, file

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.recent if event["kind"] == kind]


events = Events()
