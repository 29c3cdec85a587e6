"""The systems that are measured, by name. One file a system; each has `build(mode, size) -> step`.

`step(batch)` takes the global batch, trains this rank's part of it, and returns a loss: its own mean (what a
user of that system gets without asking for more) or the global one. rank.py writes down what it returns, and
run.py takes the mean over the ranks, which is the global loss either way.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

Step = Callable[[dict[str, Tensor]], Tensor | float]


@dataclass(frozen=True)
class Entry:
    """One row: who, in which environment (of envs.py), and at which ZeRO stage."""

    system: str
    module: str
    mode: str
    environment: str
    stage: str  # z0..z3, tp, ...: the rows that are compared with each other; "one" for a one-process program
    world: int = 2
    by_hand: bool = False
    backend: str = "gloo"  # local: ranks in shared memory, from `import soli.backend`
    asked: bool = False  # measured only where --only names it
    reference: str = "reference"  # the one-process entry of the same model, whose losses are the right ones


def start() -> None:
    """The process group of an entry that makes its own, over its backend."""
    if os.environ["BENCH_BACKEND"] == "local":
        import soli.backend  # noqa: F401
    dist.init_process_group(os.environ["BENCH_BACKEND"])


ENTRIES: dict[str, Entry] = {
    "reference": Entry("PyTorch, one process", "byhand", "reference", "base", "one", world=1),
    "ddp": Entry("PyTorch by hand", "byhand", "ddp", "base", "z0", by_hand=True),
    "zero1-hand": Entry("PyTorch by hand", "byhand", "zero1", "base", "z1", by_hand=True),
    "fsdp2-noreshard": Entry("PyTorch by hand", "byhand", "fsdp2-noreshard", "base", "z2", by_hand=True),
    "fsdp2": Entry("PyTorch by hand", "byhand", "fsdp2", "base", "z3", by_hand=True),
    "soli-z0": Entry("soli", "soli_engine", "dp=2,zero=0", "base", "z0", backend="local"),
    "soli-z1": Entry("soli", "soli_engine", "dp=2,zero=1", "base", "z1", backend="local"),
    "soli-z2": Entry("soli", "soli_engine", "dp=2,zero=2", "base", "z2", backend="local"),
    "soli-z3": Entry("soli", "soli_engine", "dp=2,zero=3", "base", "z3", backend="local"),
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
    "hf-one": Entry("transformers, one process", "hf", "one", "base", "one", world=1, asked=True, reference="hf-one"),
}
SCHEDULES = {
    "gpipe": "schedule=gpipe",
    "1f1b": "schedule=1f1b",
    "interleaved": "schedule=interleaved,chunks=2",
    "zbh1": "schedule=zbh1",
    "zbv": "schedule=zbv",
    "dualpipev": "schedule=dualpipev",
}
"""What a plan says for each."""
BOTH: dict[str, Entry] = {
    "ddp": ENTRIES["ddp"],
    "fsdp2-noreshard": ENTRIES["fsdp2-noreshard"],
    "fsdp2": ENTRIES["fsdp2"],
    "tp": Entry("PyTorch by hand", "tensor", "hand", "base", "tp", by_hand=True),
    "tp-sp": Entry("PyTorch by hand", "tensor", "hand-sp", "base", "tp-sp", by_hand=True),
    "tp-dtensor": Entry("PyTorch by hand", "tensor", "dtensor", "base", "tp-dtensor", by_hand=True),
    **{
        name: Entry("PyTorch by hand", "pipeline", name, "base", name, by_hand=True)
        for name in ("gpipe", "1f1b", "interleaved", "zbh1", "zero-bubble", "zbv", "dualpipev")
    },
    **{f"soli-z{stage}": ENTRIES[f"soli-z{stage}"] for stage in range(4)},
    "soli-tp": Entry("soli", "soli_engine", "tp=2", "base", "tp"),
    "soli-tp-sp": Entry("soli", "soli_engine", "tp=2,sp=on", "base", "tp-sp"),
    "megatron-tp": Entry("Megatron-Core", "megatron", "tp", "megatron", "tp"),
    "megatron-tp-sp": Entry("Megatron-Core", "megatron", "tp-sp", "megatron", "tp-sp"),
    "hf-tp-plan": Entry("transformers", "hf", "tp-plan", "base", "hf-tp", reference="hf-one"),
    "soli-hf-tp": Entry("soli", "hf", "soli", "base", "hf-tp", reference="hf-one"),
    **{
        f"soli-{name}": Entry("soli", "soli_engine", f"pp=2,microbatches=4,{said}", "base", f"pp-{name}")
        for name, said in SCHEDULES.items()
    },
}
"""What is measured over both backends, as NAME-gloo and NAME-local (make bench-backend)."""
ENTRIES |= {
    f"{name}-{backend}": replace(entry, backend=backend, asked=True)
    for name, entry in BOTH.items()
    for backend in ("gloo", "local")
}

# What a row is compared with: the fastest hand-written layout of its stage. A plain DDP step is counted in
# for z1 (a user without memory trouble would write it), FSDP2 that reshards for z2 (it keeps less still);
# at z3 only FSDP2 that reshards keeps as little.
BASELINES: dict[str, tuple[str, ...]] = {
    "z0": ("ddp", "ddp-gloo"),
    "z1": ("zero1-hand", "ddp"),
    "z2": ("fsdp2-noreshard", "fsdp2", "fsdp2-noreshard-gloo"),
    "z3": ("fsdp2", "fsdp2-gloo"),
    "one": (),
    "tp": ("tp-local", "tp-gloo"),
    "tp-sp": ("tp-sp-local", "tp-sp-gloo"),
    "hf-tp": ("hf-tp-plan-gloo",),  # transformers' own: nobody writes that model by hand
} | {
    entry.stage: (f"{name}-gloo",)
    for name, entry in BOTH.items()
    if entry.module in ("tensor", "pipeline") and name not in ("tp", "tp-sp")
}
BASELINES |= {
    entry.stage: (f"{entry.stage.removeprefix('pp-')}-local",)
    for entry in BOTH.values()
    if entry.stage.startswith("pp-")
}
