"""Hugging Face accelerate: DDP, and FSDP2 where it must be talked into it."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"  # read while accelerate makes its state

import accelerate
import torch
import workload
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from entries import Step


def build(mode: str, size: str) -> Step:
    """The training step under an Accelerator."""
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin() if mode == "fsdp2" else None)
    if mode == "fsdp2" and accelerator.state.distributed_type != DistributedType.FSDP:
        # on CPU accelerate drops the plugin without a word and would run (and be measured as) plain DDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin()
    rank, world = accelerator.process_index, accelerator.num_processes
    model = workload.build_model(size)
    model, optimizer = accelerator.prepare(model, workload.build_optimizer(model.parameters()))
    if mode == "fsdp2" and not all(isinstance(p, DTensor) for p in model.parameters()):
        raise RuntimeError("accelerate did not shard the model; this row would be DDP under another name")

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        part = workload.local_part(batch, rank, world)
        loss = workload.mean_loss(model(part["tokens"]), part["targets"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plugin() -> FullyShardedDataParallelPlugin:
    """FSDP2, a shard group a block, parameters given back after the forward."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
