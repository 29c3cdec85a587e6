"""What differs from program to program on the same device: which kernel attends, and how tokens get to their experts."""

from __future__ import annotations

import re

from soli.planner.spellings import affirmed

MEGATRON, OLD, TESTS = "megatron", "megatron-2020", "megatron-tests"
"""Megatron-Core, of 2023 and later; Megatron-LM before it; and Megatron-LM's own tests."""

FIRST, SECOND, OWN = 0, 1, 2
"""Kernels that keep no scores: FlashAttention and Triton's of its time; FlashAttention-2, which is torch's; and those
that are made for one generation of devices, cuDNN's, which Transformer Engine takes, and FlashAttention-3."""

SHARES = {
    "ampere": (0.35, 0.6, 0.6),
    "hopper": (0.175, 0.35, 0.53),
    "blackwell": (0.08, 0.16, 0.53),
    "blackwell-ultra": (0.08, 0.16, 0.53),
}
"""What they reach of the peak alone, of heads of 128 under a causal mask. A100: 25 to 40% and 50 to 73% (arXiv
2307.08691, abstract). H100: 35% by the second (arXiv 2407.08608, abstract), cuDNN 539 TFLOP/s forward and 516 backward
(figures 5 and 6), the first half as much as the second, as on A100. Blackwell: the FLOP/s of H100, and cuDNN's share."""
OTHERS = SHARES["hopper"]
"""Of devices of which no measurement is known."""

EARLY = re.compile(r"(?i)torch 1\.|^triton|triton[- ](?:flash|att)|att\w*\W+triton|flash[- ]?att(?:entio)?n?[- ]?1\b")

LATE = re.compile(
    r"(?i)(?<![a-z])fa-?[34]\b|flash[- ]?att(?:entio)?n?[- ]?[34]\b|^cudnn\b|cudnn[ -]?(?:att|sdpa|flash)|transformer[ _]?engine"
)
"""Kernels that are made for a generation, of programs that otherwise take the second."""

UNFUSED = ("fsdp", "soli")
PLAIN = re.compile(r"\bhf\b|hugging ?face|(?<!megatron )transformers\b|py-?torch")
"""Programs that run the operations that a model is written in: these, and those of DeepSpeed that have such a model."""
COMPILED = re.compile(r"torch[._ -]?compile|(?<![a-z])compiled?\b(?! from)")
COMPILER = re.compile(rf"{COMPILED.pattern}|\bjax\b|\bxla\b|\bautomodel\b|\bxtuner\b|\btransformer[ _]?engine\b")
EAGER = 2.1
"""Bytes that move between products where torch runs a Llama operation by operation, by those where a compiler or kernels made by hand
(Transformer Engine's, which NeMo AutoModel has) fuse them: Llama 3 8B on 8 and 128 H100 takes 16% longer without torch.compile (pytorch/torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3)."""

ASYNC = re.compile(r"async[ -]?tp")
BEHIND = 0.4
"""Of what tp sends the share that torch's AsyncTP runs behind products: Llama 3 70B of tp=8 takes 18.7 s a step with it, 19.8 s without
(pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 4), where the sums take some 3 s."""

TURNS = re.compile(r"\binternevo\b")
"""Programs whose ranks of ZeRO broadcast the parameters that each updated (InternLM/InternEvo@0f78a1c, internlm/solver/optimizer/hybrid_zero_optim.py,
`broadcast_params`)."""

ROUTED = {MEGATRON: 2.0, TESTS: 8.0}
"""Bytes a hidden unit that programs keep of a token at its expert: what the expert reads, where the permutation is fused and its weight is
applied inside (Megatron-Core's recipes); that and what it gives; or both, in the order of tokens and in that of experts (the tests, whose
memory was measured, docs/log.md)."""


PIECES = {
    r"(?<![a-z])liger(?! off)|cut[- ]cross|fused[- ]linear[- ](?:cross|ce\b)|\bflce\b": 0.0,
    r"chunked (?:loss|cross|ce\b)": 8.0,
}
"""Losses that have a batch's logits in pieces: as many as make them as large as what they are of (0: linkedin/Liger-Kernel,
ops/fused_linear_cross_entropy.py, chunk_size), or torchtune's eight (modules/loss)."""

BLOCKS = re.compile(r"cuda_launch_blocking ?= ?1(?: from (\d+) gpus on)?")


def blocks(said: str, devices: float) -> bool:
    """Whether the host waits for each kernel before it launches the next one."""
    found = BLOCKS.search(affirmed(said))
    return found is not None and devices >= float(found[1] or 0)


def attends(framework: str, generation: str, said: str = "") -> float:
    """Of a device's peak what the program's attention reaches alone, where it keeps no scores. `said`: what a row tells."""
    kernel = OWN if framework in (MEGATRON, TESTS) or LATE.search(affirmed(said)) else SECOND
    if EARLY.search(said):
        kernel = FIRST
    return SHARES.get(generation, OTHERS)[kernel]


def of_program(framework: str, generation: str, said: str = "") -> dict[str, float]:
    """The program's part of a point.

    Megatron-Core sends a token once to each server and rank that has experts of it (DeepEP, HybridEP), others once an expert.
    """
    has = affirmed(said)
    unfused = framework in UNFUSED or (framework == "deepspeed" and PLAIN.search(has))
    return {
        "kernel": attends(framework, generation, said),
        "once": float(
            bool(re.search(r"deepep|hybridep", said, re.I)) or (framework == MEGATRON and "alltoall" not in said)
        ),
        "routed": ROUTED.get(framework, 4.0),
        "eager": EAGER if unfused and not COMPILER.search(has) else 1.0,
        "one_loss": float(framework == "fsdp" and bool(COMPILED.search(has))),
        "behind": BEHIND if ASYNC.search(has) else 0.0,
        "fours": float(framework.startswith("megatron")),
        "pieces": next((pieces for words, pieces in PIECES.items() if re.search(words, has)), 1.0),
        "turns": float(bool(TURNS.search(has))),
        "written": float(generation == "cpu"),
    }
