"""Schedules: which of torch's classes does which, how many stages a rank has, and what each costs.

gpipe        all forwards, then all backwards (arXiv 1811.06965)
1f1b         one forward, one backward in turn (PipeDream-flush, arXiv 2006.09503)
interleaved  1f1b over several stages a rank (arXiv 2104.04473)
zbh1         1f1b; gradients of weights fill the bubble (arXiv 2401.10241)
zbv          the same over two stages a rank that lie in a V (arXiv 2405.15362)
dualpipev    forwards and backwards in pairs over the same V (DeepSeek's DualPipe, cut in half)
"""

import logging
from typing import Any

from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from soli.core.plan import V_SHAPED, Plan

logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
"""torch logs the whole schedule when a rank fails; the error itself says what is wrong."""


SCHEDULES: dict[str, Any] = {
    "gpipe": torchs.ScheduleGPipe, "1f1b": torchs.Schedule1F1B, "interleaved": torchs.ScheduleInterleaved1F1B,
    "zbh1": torchs.ScheduleInterleavedZeroBubble, "zbv": torchs.ScheduleZBVZeroBubble, "dualpipev": torchs.ScheduleDualPipeV,
}  # fmt: skip


def rank_of_stages(plan: Plan) -> list[int]:
    """The pp rank of each stage."""
    mapping = generate_stage_to_rank_mapping(plan.pp, plan.stages, "v" if plan.schedule in V_SHAPED else "loop")
    return [mapping[stage] for stage in range(plan.stages)]


def microbatches(plan: Plan) -> int:
    """The least number that the schedule takes and that is not below the plan's: the others are empty."""
    count = plan.microbatches
    if plan.schedule == "1f1b":
        return max(count, plan.pp)
    if plan.schedule == "dualpipev":
        return max(count, plan.stages)
    if plan.schedule in ("interleaved", "zbh1"):
        while count % max(1, count // plan.pp):  # whole rounds
            count += 1
    return count


def build(plan: Plan, stages: list[Any], count: int) -> Any:
    """torch's schedule over this rank's stages, for `count` microbatches. Gradients are sums."""
    kind = SCHEDULES[plan.schedule]
    given = stages[0] if issubclass(kind, torchs.PipelineScheduleSingle) else stages
    made = kind(given, count, loss_fn=lambda output, target: None, scale_grads=False)
    for stage in stages:
        stage.has_backward = True
    # What torch would learn by sending shapes around is known (run.py).
    made._initialize_stage = made._initialize_stages = lambda *args, **kwargs: None
    return made
