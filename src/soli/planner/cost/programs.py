"""What differs from program to program on the same device: which kernel attends, and how tokens get to their experts."""

import re

from soli.core.tables import table
from soli.planner.spellings import affirmed

MEGATRON, OLD, TESTS = "megatron", "megatron-2020", "megatron-tests"
"""Megatron-Core, of 2023 and later; Megatron-LM before it; and Megatron-LM's own tests."""

FIRST, SECOND, OWN = 0, 1, 2
"""Kernels that keep no scores: FlashAttention and Triton's of its time; FlashAttention-2, which is torch's; and those
that are made for one generation of devices, cuDNN's, which Transformer Engine takes, and FlashAttention-3."""

SAID = table(__package__, "programs.toml")
WORDS = {name: re.compile(pattern) for name, pattern in SAID["words"].items()}
"""What programs are told by."""
SHARES: dict[str, list[float]] = SAID["shares"]
"""What these kernels reach of the peak alone, by generation."""
OTHERS = SHARES["hopper"]
"""Of devices of which no measurement is known."""

UNFUSED = ("fsdp", "soli")
"""Programs that run the operations that a model is written in: these, and those of DeepSpeed that have such a model."""

EAGER = 2.1
"""Bytes that move between products where torch runs a Llama operation by operation, by those where a compiler or kernels made by hand
(Transformer Engine's, which NeMo AutoModel has) fuse them: Llama 3 8B on 8 and 128 H100 takes 16% longer without torch.compile (pytorch/torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3)."""

COMPILED, WHOLE = 8.0, 4.0
"""Bytes that a loss which a compiler made of torch's operations keeps of a logit: itself and its gradient in 16 bits, and one of them in 32 where layers are
compiled apart; and where a program is compiled whole no more than the two (Inductor, torch 2.13: no buffer of logits in 32 bits, forward or backward)."""

LAUNCHED = 0.5
"""Kernels of a layer that a compiler made, by those of torch's operations: of a GPT's 31, forward and backward, Inductor makes 24, of a Llama's 90,
whose norms and rotations are written out, 28 (torch 2.13; views not counted)."""

CAST = 1.3
"""And where torch.autocast casts what each product reads, which are 22 more for a GPT's layer and 26 for a Llama's; each is launched by itself, but by no
module: GPTs of a course's, on an A100, take 6.5 ms a layer without and 8.4 with it (yyin-dev/cs336-a2@bc6cc1b01d16, data)."""

BEHIND = 0.4
"""Of what tp sends the share that torch's AsyncTP runs behind products: Llama 3 70B of tp=8 takes 18.7 s a step with it, 19.8 s without
(pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 4), where the sums take some 3 s."""

PAIRED = 0.5
"""Of what experts exchange the share that runs behind another microbatch's passes where one's forward is paired with another's backward: Qwen3 30B
on 16 H100 takes 31.3 s so and 41.3 s without, 21.0 and 24.7 s by HybridEP (NVIDIA-NeMo/Megatron-Bridge@067f987, skills), whose exchanges take some 20
and 6 s."""

ROUTED = {MEGATRON: 2.0, TESTS: 8.0}
"""Bytes a hidden unit that programs keep of a token at its expert: what the expert reads, where the permutation is fused and its weight is
applied inside (Megatron-Core's recipes); that and what it gives; or both, in the order of tokens and in that of experts (the tests, whose
memory was measured, docs/log.md)."""

BLOCKS = re.compile(r"cuda_launch_blocking ?= ?1(?: from (\d+) gpus on)?")


def tells(words: str, said: str) -> bool:
    """Whether what is said has these words of programs.toml."""
    return WORDS[words].search(said) is not None


def first(table: str, said: str, otherwise: float) -> float:
    """What the first pattern of a table of programs.toml that is there says."""
    return next((float(value) for words, value in SAID[table].items() if re.search(words, said)), otherwise)


def blocks(said: str, devices: float) -> bool:
    """Whether the host waits for each kernel before it launches the next one."""
    found = BLOCKS.search(affirmed(said))
    return found is not None and devices >= float(found[1] or 0)


def attends(framework: str, generation: str, said: str) -> float:
    """Of a device's peak what the program's attention reaches alone, where it keeps no scores. `said`: what a row tells."""
    own = (framework in (MEGATRON, TESTS) and not tells("second", affirmed(said))) or tells("late", affirmed(said))
    return SHARES.get(generation, OTHERS)[FIRST if tells("early", said) else OWN if own else SECOND]


def of_program(framework: str, generation: str, said: str = "") -> dict[str, float]:
    """The program's part of a point.

    Megatron-Core sends a token once to each server and rank that has experts of it (DeepEP, HybridEP), others once an expert.
    """
    has = affirmed(said)
    unfused = framework in UNFUSED or (framework == "deepspeed" and tells("plain", has))
    eager = unfused and not (tells("compiled", has) or tells("compiler", has))
    return {
        "kernel": attends(framework, generation, said),
        "once": float(
            bool(re.search(r"deepep|hybridep|dual-?pipe", said, re.I)) or (framework == MEGATRON and not re.search("all-?to-?all", said))
        ),
        "routed": ROUTED.get(framework, 4.0),
        "eager": EAGER if eager else 1.0,
        "composed": float(eager and framework != "soli"),
        "one_loss": first("one_loss", has, COMPILED * tells("compiled", has)) if framework == "fsdp" else 0.0,
        "launches": LAUNCHED if tells("compiled", has) else CAST if tells("cast", has) else 1.0,
        "behind": BEHIND if tells("async", has) else 0.0,
        # DeepSpeed's hooks are of modules, FSDP's units of layers
        "looped": (1.0 + (framework == "deepspeed")) * (tells("plain", has) and not tells("grouped", has)),
        "graphs": float(tells("graphs", has)),
        "unwaited": float(tells("unwaited", has)),
        "cached": float(tells("held", has) and not tells("taken", has)),
        "paired": PAIRED if tells("paired", has) else 0.0,
        "fours": float(framework.startswith("megatron")),
        "pieces": first("pieces", has, 1.0),
        "turns": float(tells("turns", has)),
        "widened": 4.0 * (tells("peft", has) and framework not in (MEGATRON, "soli")),
        "written": float(generation == "cpu"),
    }
