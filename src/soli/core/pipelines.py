"""Steps of a pipeline: the order of 1F1B and interleaved 1F1B (arXiv 2104.04473, 2.2), and when each step of any order runs."""

from collections import deque
from collections.abc import Mapping, Sequence

Step = tuple[str, int, int]
"""What is computed, for which stage of the model, of which microbatch: forward (F), backward (B), or its halves, by what was received (I)
and by weights (W)."""


def order(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Step]:
    """What a rank does, in order. Of its `chunks` stages number c is stage c * ranks + rank of the model.

    Microbatches go through the chunks in groups of as many as there are ranks; backwards take the chunks from the
    last. `chunks` > 1 takes microbatches that are a multiple of the ranks.
    """
    if chunks > 1 and microbatches % ranks:
        raise ValueError(f"{microbatches} microbatches are no multiple of {ranks} ranks")
    total = chunks * microbatches

    def step(kind: str, i: int) -> Step:
        group, within = divmod(i, ranks * chunks)
        chunk, one = divmod(within, ranks)
        return kind, (chunks - 1 - chunk if kind == "B" else chunk) * ranks + rank, group * ranks + one

    warm = min(ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    found = [step("F", i) for i in range(warm)]
    for i in range(total):
        if warm + i < total:
            found.append(step("F", warm + i))
        found.append(step("B", i))
    return found


def played(orders: Sequence[Sequence[Step]], seconds: Mapping[str, float]) -> list[tuple[int, Step, float, float]]:
    """Each rank's steps with their begin and end: one begins when its rank is free and what it needs is done. Sending costs nothing.

    `orders`: by rank. `seconds`: by kind.
    """
    left, clock = [deque(steps) for steps in orders], [0.0] * len(orders)
    last = max(stage for steps in orders for _, stage, _ in steps)
    done: dict[Step, float] = {}
    found: list[tuple[int, Step, float, float]] = []
    while any(left):
        before = len(found)
        for rank, steps in enumerate(left):
            while steps and (ready := ready_at(steps[0], done, last)) is not None:
                step, start = steps.popleft(), max(ready, clock[rank])
                clock[rank] = done[step] = start + seconds[step[0]]
                found.append((rank, step, start, clock[rank]))
        if len(found) == before:
            raise AssertionError("a schedule waits for itself")
    return found


def ready_at(step: Step, done: Mapping[Step, float], last: int) -> float | None:
    """When what a step needs is there; None if that is not known yet."""
    kind, stage, number = step
    if kind == "F":
        return done.get(("F", stage - 1, number)) if stage else 0.0
    if kind == "W":
        return done.get(("I", stage, number))
    if stage == last:
        return done.get(("F", stage, number))
    above = [done[k, stage + 1, number] for k in ("B", "I") if (k, stage + 1, number) in done]
    return max(above) if above else None
