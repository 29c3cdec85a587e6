"""When each rank of a pipeline computes what: 1F1B and interleaved 1F1B, event by event (arXiv 2104.04473, 2.2)."""

from __future__ import annotations

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
        if chunks == 1:
            return 0, i
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
    orders = [order(rank, stages, chunks, microbatches) for rank in range(stages)]
    done: dict[tuple[str, int, int], float] = {}  # by (kind, stage of the whole model, microbatch)
    at, clock, found = [0] * stages, [0.0] * stages, []
    last = stages * chunks - 1
    moved = True
    while moved:
        moved = False
        for rank in range(stages):
            while at[rank] < len(orders[rank]):
                kind, chunk, number = orders[rank][at[rank]]
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
                at[rank] += 1
                moved = True
    if any(at[rank] < len(orders[rank]) for rank in range(stages)):
        raise AssertionError("the order of a rank waits for itself")
    return found
