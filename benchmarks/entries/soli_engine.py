"""soli, through its public API and nothing else."""

import torch
import torch.nn.functional as F
import workload
from torch import Tensor

import soli
from entries import Step


def build(mode: str, size: str) -> Step:
    """The training step under the plan that `mode` spells."""
    engine = soli.parallelize(
        workload.build_model(size),
        loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=workload.LEARNING_RATE, fused=True),
        plan=mode,
    )
    return engine.step  # takes the global batch, returns the global loss


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum over counted targets, and how many they are."""
    targets = batch["targets"]
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()
