"""When each rank of a pipeline computes what: 1F1B and interleaved 1F1B, event by event."""

from __future__ import annotations

from dataclasses import dataclass

from soli.core.pipelines import order, played


@dataclass(frozen=True)
class Work:
    """One forward (F) or backward (B) of a microbatch on a rank's chunk. Seconds."""

    kind: str
    rank: int
    chunk: int
    microbatch: int
    start: float
    end: float


def timeline(stages: int, chunks: int, microbatches: int, forward: float, backward: float) -> list[Work]:
    """All of a step. `forward`, `backward`: seconds of one chunk and microbatch."""
    orders = [order(rank, stages, chunks, microbatches) for rank in range(stages)]
    return [
        Work(kind, rank, stage // stages, number, start, end)
        for rank, (kind, stage, number), start, end in played(orders, {"F": forward, "B": backward})
    ]
