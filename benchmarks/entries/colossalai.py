"""Colossal-AI: TorchDDPPlugin as it is, LowLevelZeroPlugin (ZeRO-1, 2) with the few CPU answers it lacks.

LowLevelZero's own work (buckets, reduction, partition, update) runs unchanged; it only asks its accelerator
for streams and a synchronisation, which a CPU has no use for, and asserts that the accelerator is not a CPU.
"""

import contextlib

import colossalai
import torch
import torch.distributed as dist
import workload
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.zero.low_level import low_level_optim

from entries import Step


def build(mode: str, size: str) -> Step:
    """The training step under a Booster."""
    colossalai.launch_from_torch(backend="gloo", seed=workload.SEED, verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    if mode == "ddp":
        plugin = TorchDDPPlugin()
    else:
        answer_for_cpu()
        # max_norm 0: no clipping. Overlapping needs a second stream, which a CPU does not have.
        plugin = LowLevelZeroPlugin(int(mode), precision="fp32", max_norm=0.0, overlap_communication=False)
    booster = Booster(plugin=plugin)
    model = workload.build_model(size)
    model, optimizer, *_ = booster.boost(model, workload.build_optimizer(model.parameters()))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        part = workload.local_part(batch, rank, world)
        loss = workload.mean_loss(model(part["tokens"]), part["targets"])
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def answer_for_cpu() -> None:
    """Streams and events that do nothing, and no check for a GPU."""
    kind = type(get_accelerator())
    kind.Stream = lambda self, *args, **kwargs: None
    kind.current_stream = lambda self, *args, **kwargs: None
    kind.stream = lambda self, stream: contextlib.nullcontext()
    kind.synchronize = lambda self, *args, **kwargs: None
    low_level_optim.LowLevelZeroOptimizer._sanity_checks = lambda self: None
