"""What was noted and sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

from soli.core.events import events
from soli.mesh.record import Recorder


def noted() -> list[dict[str, Any]]:
    """The newest last."""
    return [event for event in events.recent if event["kind"] == "note"]


def bytes_by(recorder: Recorder) -> dict[tuple[str, str], int]:
    """Total bytes for each (operation, axis)."""
    total = Counter[tuple[str, str]]()
    for record in recorder.records:
        total[record.operation, record.axis] += record.bytes
    return total
