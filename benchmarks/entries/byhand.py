"""Written by hand on PyTorch: one process, DDP, ZeRO-1 (ZeroRedundancyOptimizer), FSDP2."""

import os

import torch
import torch.distributed as dist
import workload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from entries import Step, start


def build(mode: str, size: str) -> Step:
    """The training step of one layout."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if mode != "reference":
        start()
    model = split(mode, workload.build_model(size))
    optimizer = build_optimizer(mode, model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        part = workload.local_part(batch, rank, world)
        loss = workload.mean_loss(model(part["tokens"]), part["targets"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def split(mode: str, model: nn.Module) -> nn.Module:
    """Wrap a model that keeps its repeated part in `model.blocks`. memory.py uses this too."""
    if mode == "reference":
        return model
    if mode in ("ddp", "zero1"):
        # views spare the copy of every gradient out of its bucket, and its memory
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reshard = mode == "fsdp2"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def build_optimizer(mode: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, its states split among the ranks for ZeRO-1."""
    if mode != "zero1":
        return workload.build_optimizer(model.parameters())
    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=workload.LEARNING_RATE, fused=True
    )
