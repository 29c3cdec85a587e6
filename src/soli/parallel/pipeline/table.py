"""A schedule as a table, and how long it takes: who computes what when, if forward and backward cost what they do.

The order is torch's own (`pipeline_order`); an action starts when its rank is free and what it needs has arrived.
Sending costs nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from soli.core.plan import Plan
from soli.parallel.pipeline.schedules import build, microbatches, rank_of_stages

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Forward; whole backward; its halves, by what was received and by weights."""


@dataclass(frozen=True)
class Action:
    """`kind` of COSTS, on a microbatch at a stage, from `start` to `stop`."""

    kind: str
    stage: int
    microbatch: int
    start: float
    stop: float


def order(plan: Plan) -> list[list[tuple[str, int, int]]]:
    """(kind, stage, microbatch) in the order of each rank."""
    count, ranks = microbatches(plan), rank_of_stages(plan)
    if plan.schedule == "1f1b":
        return [_one_f_one_b(stage, plan.pp, count) for stage in range(plan.pp)]
    made = build(plan, [_stage(plan, stage) for stage, owner in enumerate(ranks) if owner == 0], count)
    return [[step for action in made.pipeline_order[rank] for step in _steps(action)] for rank in range(plan.pp)]


def _one_f_one_b(stage: int, stages: int, count: int) -> list[tuple[str, int, int]]:
    """What torch's Schedule1F1B runs; the table that it shows has more forwards in flight and cannot be run."""
    ahead = min(count, stages - stage)
    steps = [("F", stage, number) for number in range(ahead)]
    for number in range(count):
        steps.append(("B", stage, number))
        if ahead + number < count:
            steps.append(("F", stage, ahead + number))
    return steps


def _stage(plan: Plan, stage: int) -> Any:
    """What torch's schedules ask of a stage of rank 0 to make the order of all ranks."""
    return SimpleNamespace(
        stage_index=stage, num_stages=plan.stages, group_size=plan.pp, group_rank=0, is_first=stage == 0,
        is_last=stage == plan.stages - 1, submod=nn.Module(),
    )  # fmt: skip


def _steps(action: Any) -> list[tuple[str, int, int]]:
    if action is None:
        return []
    if action.sub_actions:
        return [step for part in action.sub_actions for step in _steps(part)]
    kind = str(action.computation_type.value)
    return [(kind, action.stage_index, action.microbatch_index)] if kind in COSTS else []


def timeline(plan: Plan) -> list[list[Action]]:
    """When each rank does what."""
    waiting, last = [list(rank) for rank in order(plan)], plan.stages - 1
    done: dict[tuple[str, int, int], float] = {}
    found: list[list[Action]] = [[] for _ in waiting]
    while any(waiting):
        moved = False
        for rank, steps in enumerate(waiting):
            while steps and (ready := _ready(steps[0], done, last)) is not None:
                kind, stage, number = steps.pop(0)
                start = max(ready, found[rank][-1].stop if found[rank] else 0.0)
                stop = start + COSTS[kind]
                found[rank].append(Action(kind, stage, number, start, stop))
                done[kind, stage, number] = stop
                moved = True
        if not moved:
            raise AssertionError("a schedule waits for itself")
    return found


def _ready(step: tuple[str, int, int], done: dict[tuple[str, int, int], float], last: int) -> float | None:
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


def bubble(plan: Plan) -> float:
    """The share of a step in which ranks wait. Microbatches that only fill the schedule up count as waiting."""
    ranks = timeline(plan)
    length = max(actions[-1].stop for actions in ranks)
    work = plan.microbatches * plan.stages * (COSTS["F"] + COSTS["B"])
    return 1 - work / (length * plan.pp)
