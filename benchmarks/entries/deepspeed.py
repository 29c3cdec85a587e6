"""DeepSpeed: ZeRO stages 0 to 3 on its CPU accelerator, over gloo, with torch's own AdamW."""

import os

import deepspeed
import torch
import workload

from entries import Step


def build(mode: str, size: str) -> Step:
    """The training step of one ZeRO stage."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed(dist_backend="gloo")
    rows = workload.SIZES[size].batch
    config = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": rows // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its default is 1.0, and no other entry clips
        "zero_optimization": {"stage": int(mode)},
        # keep torch's fused AdamW instead of its own CPU Adam: the same update in every entry
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    model = workload.build_model(size)
    optimizer = workload.build_optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        part = workload.local_part(batch, rank, world)
        loss = workload.mean_loss(engine(part["tokens"]), part["targets"])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
