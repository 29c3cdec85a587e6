"""Lightning Fabric: DDP, and ModelParallelStrategy with FSDP2 (its FSDPStrategy is for GPUs only)."""

import os

import torch
import workload
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from entries import Step


def build(mode: str, size: str) -> Step:
    """The training step under Fabric."""
    world = int(os.environ["WORLD_SIZE"])
    strategy = "ddp"
    if mode == "fsdp2":
        strategy = ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    rank = fabric.global_rank
    # Fabric wants the optimizer after the sharding, so the two are set up one after the other
    model = fabric.setup_module(workload.build_model(size))
    optimizer = fabric.setup_optimizers(workload.build_optimizer(model.parameters()))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        part = workload.local_part(batch, rank, world)
        loss = workload.mean_loss(model(part["tokens"]), part["targets"])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, a shard group a block, over Fabric's data-parallel axis."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=True)
    return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=True)
