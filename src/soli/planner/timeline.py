"""When each rank of a pipeline computes what: 1F1B and interleaved 1F1B, event by event (arXiv 2104.04473, 2.2)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One forward (F) or backward (B) of a microbatch on a rank's chunk. Seconds."""

    kind: str
    rank: int
    chunk: int
    microbatch: int
    start: float
    end: float


def order(rank: int, stages: int, chunks: int, microbatches: int) -> list[tuple[str, int, int]]:
    """What a rank does, in order: (kind, chunk, microbatch).

    Microbatches go through the chunks in groups of as many as there are ranks; backwards take the chunks from the
    last. `chunks` > 1 takes microbatches that are a multiple of the ranks.
    """
    if chunks > 1 and microbatches % stages:
        raise ValueError(f"{microbatches} microbatches are no multiple of {stages} ranks")
    total = chunks * microbatches

    def place(i: int, backward: bool) -> tuple[int, int]:
        group, within = divmod(i, stages * chunks)
        chunk, one = divmod(within, stages)
        return (chunks - 1 - chunk if backward else chunk), group * stages + one

    ahead = stages - rank - 1 if chunks == 1 else 2 * (stages - rank - 1) + (chunks - 1) * stages
    warm = min(ahead, total)
    found = [("F", *place(i, False)) for i in range(warm)]
    for i in range(total):
        if warm + i < total:
            found.append(("F", *place(warm + i, False)))
        found.append(("B", *place(i, True)))
    return found


def timeline(stages: int, chunks: int, microbatches: int, forward: float, backward: float) -> list[Work]:
    """All of a step. `forward`, `backward`: seconds of one chunk and microbatch."""
    orders = [deque(order(rank, stages, chunks, microbatches)) for rank in range(stages)]
    done: dict[tuple[str, int, int], float] = {}  # by (kind, stage of the whole model, microbatch)
    clock, found = [0.0] * stages, []
    last = stages * chunks - 1
    while left := sum(map(len, orders)):
        for rank, actions in enumerate(orders):
            while actions:
                kind, chunk, number = actions[0]
                stage = chunk * stages + rank
                if kind == "F":
                    needs = ("F", stage - 1, number) if stage else None
                else:
                    needs = ("B", stage + 1, number) if stage < last else ("F", stage, number)
                if needs is not None and needs not in done:
                    break
                start = max(clock[rank], done[needs] if needs is not None else 0.0)
                clock[rank] = start + (forward if kind == "F" else backward)
                done[kind, stage, number] = clock[rank]
                found.append(Work(kind, rank, chunk, number, start, clock[rank]))
                actions.popleft()
        if sum(map(len, orders)) == left:
            raise AssertionError("the order of a rank waits for itself")
    return found
