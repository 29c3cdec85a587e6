"""The systems that are measured, by name. One file a system; each has `build(mode, size) -> step`.

`step(batch)` takes the global batch, trains this rank's part of it, and returns a loss: its own mean (what a
user of that system gets without asking for more) or the global one. rank.py writes down what it returns, and
run.py takes the mean over the ranks, which is the global loss either way.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Step = Callable[[dict[str, Tensor]], Tensor | float]


@dataclass(frozen=True)
class Entry:
    """One row: who, in which environment (of envs.py), and at which ZeRO stage."""

    system: str
    module: str
    mode: str
    environment: str
    stage: str  # z0..z3, or "one" for the one-process reference
    world: int = 2
    by_hand: bool = False


ENTRIES: dict[str, Entry] = {
    "reference": Entry("PyTorch, one process", "byhand", "reference", "base", "one", world=1),
    "ddp": Entry("PyTorch by hand", "byhand", "ddp", "base", "z0", by_hand=True),
    "zero1-hand": Entry("PyTorch by hand", "byhand", "zero1", "base", "z1", by_hand=True),
    "fsdp2-noreshard": Entry("PyTorch by hand", "byhand", "fsdp2-noreshard", "base", "z2", by_hand=True),
    "fsdp2": Entry("PyTorch by hand", "byhand", "fsdp2", "base", "z3", by_hand=True),
    "soli-z0": Entry("soli", "soli_engine", "dp=2,zero=0", "base", "z0"),
    "soli-z1": Entry("soli", "soli_engine", "dp=2,zero=1", "base", "z1"),
    "soli-z2": Entry("soli", "soli_engine", "dp=2,zero=2", "base", "z2"),
    "soli-z3": Entry("soli", "soli_engine", "dp=2,zero=3", "base", "z3"),
    "accelerate-ddp": Entry("accelerate", "accelerate", "ddp", "lightweight", "z0"),
    "accelerate-fsdp2": Entry("accelerate", "accelerate", "fsdp2", "lightweight", "z3"),
    "fabric-ddp": Entry("Lightning Fabric", "fabric", "ddp", "lightweight", "z0"),
    "fabric-fsdp2": Entry("Lightning Fabric", "fabric", "fsdp2", "lightweight", "z3"),
    "deepspeed-z0": Entry("DeepSpeed", "deepspeed", "0", "deepspeed", "z0"),
    "deepspeed-z1": Entry("DeepSpeed", "deepspeed", "1", "deepspeed", "z1"),
    "deepspeed-z2": Entry("DeepSpeed", "deepspeed", "2", "deepspeed", "z2"),
    "deepspeed-z3": Entry("DeepSpeed", "deepspeed", "3", "deepspeed", "z3"),
    "colossalai-ddp": Entry("Colossal-AI", "colossalai", "ddp", "colossalai", "z0"),
    "colossalai-z1": Entry("Colossal-AI", "colossalai", "1", "colossalai", "z1"),
    "colossalai-z2": Entry("Colossal-AI", "colossalai", "2", "colossalai", "z2"),
}

# What a row is compared with: the fastest hand-written layout of its stage. A plain DDP step is counted in
# for z1 (a user without memory trouble would write it), FSDP2 that reshards for z2 (it keeps less still);
# at z3 only FSDP2 that reshards keeps as little.
BASELINES: dict[str, tuple[str, ...]] = {
    "z0": ("ddp",),
    "z1": ("zero1-hand", "ddp"),
    "z2": ("fsdp2-noreshard", "fsdp2"),
    "z3": ("fsdp2",),
    "one": (),
}
