"""Size the model to the machine: what the configuration leaves at 0 is filled in here, with the reason.

The rule. With a compute budget of `units` (1 = two cores for two minutes) the best number of parameters
grows with the square root of the compute (Hoffmann et al. 2022), and a GPT with dim/32 blocks has
12 * layers * dim^2 = 0.375 * dim^3 of them; so dim grows with units^(1/6), from 128 at one unit.
"""

from dataclasses import replace

import torch

from soli.core.errors import on_all_ranks
from soli.mesh.backends import cores
from soli.train.config import Config

CORES_PER_ACCELERATOR = 1000  # one data-centre GPU in cores of a server, in float32: an order of magnitude
PEAK_AT_128 = 3e-3


def machine() -> tuple[int, int]:
    """Cores that this process may use, and accelerators of the machine."""
    return cores(), torch.cuda.device_count() if torch.cuda.is_available() else 0


def sized(config: Config, cores: int, accelerators: int) -> tuple[Config, str]:
    """The configuration with a size for the model and a learning rate, and one line that says why."""
    model, run = config.model, config.run
    minutes = run.minutes or 2.0
    units = (accelerators * CORES_PER_ACCELERATOR or cores) * minutes / 4
    dim = model.dim or max(64, 64 * round(2 * units ** (1 / 6)))
    if not model.dim and model.heads:
        dim = max(1, round(dim / model.heads)) * model.heads
    layers = model.layers or max(2, dim // 32)
    # About 32 wide, and a number of them that divides the width.
    heads = model.heads or next(heads for heads in range(max(1, dim // 32), 0, -1) if dim % heads == 0)
    # The best rate falls about with the square root of the width in this range (tried at 128).
    lr = config.optim.lr or float(f"{PEAK_AT_128 * (128 / dim) ** 0.5:.2g}")
    if dim % heads:
        raise on_all_ranks("model.dim does not divide into model.heads", got=f"dim {dim}, heads {heads}")
    how = "as you said" if model.dim else f"64 x 2 x {units:.2g}^(1/6), rounded"
    where = f"{accelerators} accelerators" if accelerators else f"{cores} cores"
    shape = f"dim {dim} ({how}), {layers} layers, {heads} heads, {model.context} tokens a window"
    line = f"sized to {where} and {minutes:g} minutes: {shape}, {config.optim.batch} windows a step, lr {lr:g}"
    model = replace(model, dim=dim, layers=layers, heads=heads)
    return replace(config, model=model, optim=replace(config.optim, lr=lr)), line
