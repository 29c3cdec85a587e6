"""How programs keep parameters, gradients and the optimizer's state: bytes a parameter, counted from what they do."""

from __future__ import annotations

import re

from soli.planner.cost.programs import MEGATRON, OLD

WIDE = {
    "weight": 2.0, "gradient": 4.0, "summed": 4.0, "copied": 0.0, "moments": 12.0, "whole": 0.0, "casts": 0.0,
}  # fmt: skip
"""Megatron-LM in bf16: gradients are summed and kept in fp32, a copy of the parameters in fp32 is among the optimizer's."""
SHORT = WIDE | {"gradient": 2.0, "summed": 2.0}
"""DeepSpeed and most others: gradients as wide as parameters. torch's FSDP has parameters and gradients in fp32 and no copy, which is
as much, and sums in 16 bits."""
HALF = SHORT | {"copied": 4.0}
"""Megatron and DeepSpeed in fp16: the update, which scales gradients back, copies those of its share in fp32."""
BOTH = WIDE | {"gradient": 6.0}
"""DeepSpeed's optimizer of bf16 under a pipeline: gradients, and their sums over microbatches in fp32, whole on every rank
(bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers")."""
AWARE = SHORT | {"moments": 8.0}
"""Megatron-Core's precision-aware optimizer: gradients and moments in 16 bits, parameters in fp32 beside those of 16."""
CAST = {
    "weight": 4.0, "gradient": 4.0, "summed": 4.0, "copied": 0.0, "moments": 8.0, "whole": 1.0, "casts": 1.0,
}  # fmt: skip
"""soli: parameters in fp32, cast where products read them (parallel/precision.py, docs/concepts.md)."""

SHORTER = ("fsdp", "deepspeed", "jax", "other")
DEEPSPEED = "megatron-deepspeed"
RECIPES = re.compile(r"nemo|megatron[- ]bridge", re.I)
"""Their recipes for performance set grad_reduce_in_fp32 = False (NVIDIA-NeMo/Megatron-Bridge@067f987, src/megatron/bridge/perf_recipes)."""


def of_states(
    framework: str, precision: str = "bf16", pipeline: bool = True, said: str = ""
) -> dict[str, float]:
    """The program's part of a point. `said`: what a row tells of it."""
    wide = bool(re.search("fp32 (?:grad )?reduce", said, re.I))
    if framework == "soli":
        return CAST
    if re.search(r"precision[- _]aware", said, re.I):
        return AWARE
    if framework in (MEGATRON, OLD, DEEPSPEED) and precision == "fp16":
        return HALF
    if framework == DEEPSPEED and pipeline:
        return BOTH
    if framework in (*SHORTER, DEEPSPEED):
        return SHORT | ({"summed": 4.0} if wide else {})
    return SHORT if RECIPES.search(said) and not wide else WIDE
