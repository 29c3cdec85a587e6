"""A schedule as a table, and how long it takes: who computes what when, if forward and backward cost what they do.

The order is torch's own (`pipeline_order`).
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from soli.core import pipelines
from soli.core.pipelines import Step
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


def order(plan: Plan) -> list[list[Step]]:
    """The steps of each rank."""
    count, ranks = microbatches(plan), rank_of_stages(plan)
    if plan.schedule == "1f1b":
        # what torch's Schedule1F1B runs; the table that it shows has more forwards in flight and cannot be run
        return [pipelines.order(rank, plan.pp, 1, count) for rank in range(plan.pp)]
    made = build(plan, [_stage(plan, stage) for stage, owner in enumerate(ranks) if owner == 0], count)
    return [[step for action in made.pipeline_order[rank] for step in _steps(action)] for rank in range(plan.pp)]


def _stage(plan: Plan, stage: int) -> Any:
    """What torch's schedules ask of a stage of rank 0 to make the order of all ranks."""
    return SimpleNamespace(
        stage_index=stage, num_stages=plan.stages, group_size=plan.pp, group_rank=0, is_first=stage == 0,
        is_last=stage == plan.stages - 1, submod=nn.Module(),
    )  # fmt: skip


def _steps(action: Any) -> list[Step]:
    if action is None:
        return []
    if action.sub_actions:
        return [step for part in action.sub_actions for step in _steps(part)]
    kind = str(action.computation_type.value)
    return [(kind, action.stage_index, action.microbatch_index)] if kind in COSTS else []


def bubble(plan: Plan) -> float:
    """The share of a step in which ranks wait. Microbatches that only fill the schedule up count as waiting."""
    length = max(end for *_, end in pipelines.played(order(plan), COSTS))
    return 1 - plan.microbatches * plan.stages * (COSTS["F"] + COSTS["B"]) / (length * plan.pp)
