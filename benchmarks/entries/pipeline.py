"""Pipelines over two ranks on torch.distributed.pipelining: one microbatch a row, every schedule that it has."""

import os

import torch
import torch.distributed as dist
import workload
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from entries import Step, start

SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1, "loop"),
    "1f1b": ("Schedule1F1B", 1, "loop"),
    "interleaved": ("ScheduleInterleaved1F1B", 2, "loop"),
    "zbh1": ("ScheduleInterleavedZeroBubble", 1, "loop"),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", 2, "loop"),
    "zbv": ("ScheduleZBVZeroBubble", 2, "v"),
    "dualpipev": ("ScheduleDualPipeV", 2, "v"),
}
"""Class, stages a rank, and whether a rank's stages are rank, rank + N, ... (loop) or rank, 2N - 1 - rank (v)."""


class Stage(nn.Module):
    """Some blocks of the model; the first has the embeddings, the last the head."""

    def __init__(self, model: workload.GPT, number: int, stages: int) -> None:
        super().__init__()
        blocks = len(model.blocks)
        self.blocks = model.blocks[blocks * number // stages : blocks * (number + 1) // stages]
        self.first = nn.ModuleList([model.embed, model.position]) if number == 0 else None
        self.last = nn.Sequential(model.norm, model.head) if number == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first[0](x) + self.first[1](torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.last is None else self.last(x)


def build(mode: str, size: str) -> Step:
    """The training step of one schedule; rank 0 gets the loss from the rank that has it."""
    start()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name, each, kind = SCHEDULES[mode]
    stages = each * world
    numbers = [rank + world * i for i in range(each)] if kind == "loop" else [rank, stages - 1 - rank]
    model = workload.build_model(size)
    modules = [Stage(model, number, stages) for number in numbers]
    made = [PipelineStage(m, number, stages, torch.device("cpu")) for m, number in zip(modules, numbers, strict=True)]
    microbatches = workload.SIZES[size].batch
    schedule = getattr(schedules, name)(
        made[0] if name in ("ScheduleGPipe", "Schedule1F1B") else made, microbatches, loss_fn=workload.mean_loss
    )
    optimizer = workload.build_optimizer([p for module in modules for p in module.parameters()])
    ends = next(
        r
        for r in range(world)
        if stages - 1 in ([r, stages - 1 - r] if kind == "v" else [r + world * i for i in range(each)])
    )

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses: list[Tensor] = []
        inputs = [batch["tokens"]] if 0 in numbers else []
        wanted = {"target": batch["targets"], "losses": losses} if stages - 1 in numbers else {}
        schedule.step(*inputs, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack([x.detach() for x in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(loss, ends)
        return loss

    return step
