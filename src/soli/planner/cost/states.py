"""How programs keep parameters, gradients and the optimizer's state: bytes a parameter, counted from what they do."""

import re

from soli.core.tables import table
from soli.planner.cost.programs import MEGATRON, OLD, TESTS, first, tells
from soli.planner.spellings import affirmed, meant

KEPT: dict[str, dict[str, float]] = table(__package__, "states.toml")
"""What programs do, by a word for it."""
ADAM = 8.0
"""Bytes of two moments in fp32, which are among `moments`; all but what soli does and what is aware have the copy of the parameters beside them."""
LORA = re.compile(r"(?<![a-z])(?<![qv]_)(?<!than )(?<!unlike )(?<!vs )(?<!versus )q?lora(?![a-z])|(?<![a-z])peft(?![a-z])", re.I)
"""Fine-tuning of a few weights beside frozen ones."""

FULLY = re.compile(r"\bfull[- ](?:parameters?|weights?|(?:model )?fine[- ]?tun\w*|ft|sft)\b", re.I)
"""Fine-tuning of all of them."""

SHORTER = ("fsdp", "deepspeed", "jax", "other")
DEEPSPEED = "megatron-deepspeed"


def of_states(framework: str, precision: str = "bf16", pipeline: bool = True, said: str = "", optimizer: str = "") -> dict[str, float]:
    """The program's part of a point. `said`: what a row tells of it; `optimizer`: the same of its optimizer."""
    if framework == "soli":
        return KEPT["soli"]
    found, told = _of_program(framework, precision, pipeline, said), affirmed(said)
    copy, width = found["moments"] - ADAM, 4.0
    if precision in ("fp32", "tf32", "fp64"):
        found, copy = found | KEPT["full_width"], 0.0
    elif tells("true", full := f"{told}; {optimizer.lower()}") or ((_pure(framework, full) or (tells("pure", full) and tells("unmastered", said.lower()))) and not tells("beside", full)):
        found, copy, width = found | KEPT["half_width"], 0.0, 2.0
    elif copy:
        found, copy, width = _told(found, copy, f"{said}; {optimizer}".lower())
    moments, width = meant("moments", optimizer.lower()), first("moments", optimizer.lower(), width)
    trainer = tells("trainer", told)
    return found | {
        "copied": width if trainer and moments in (None, 2.0) and width > 1 else found["copied"],
        "moments": copy + width * (2.0 if moments is None else moments),
        "gradient": 0.0 if tells("in_backward", f"{told}; {optimizer.lower()}") else found["gradient"],
        "eighth": float(precision == "fp8" and framework in (MEGATRON, TESTS) and not (tells("recipes", said) or tells("narrow_gather", told))),
        "late": float(trainer or framework == "fsdp"),
        "residual": 4.0 if copy > 0 and framework == "fsdp" and tells("casts", told) else 2.0,
        "casts": float(copy > 0 and framework == "fsdp" and tells("casts", told) and not (tells("compiled", told) or tells("compiler", told))),
    }


def _pure(framework: str, told: str) -> bool:
    """Whether all that is kept has 16 bits."""
    mixed = tells("mixed", told)
    loaded = (tells("loaded", told) and not (mixed and tells("upcast", told))) or (tells("narrowly", told) and not mixed)
    return (tells("pure", told) and not tells("copied", f"{framework}; {told}")) or (framework == "fsdp" and loaded)


def _told(found: dict[str, float], copy: float, said: str) -> tuple[dict[str, float], float, float]:
    """A program's states as a row tells them otherwise; bytes of the copy in fp32, and of a moment."""
    told = affirmed(said)
    copy = 0.0 if tells("unmastered", said) else 2.0 if tells("remainder", told) else copy
    narrow_sums = tells("sums", told) and not re.search("fp32 main", told)
    return found | ({"gradient": 2.0, "summed": 2.0} if narrow_sums else {}), copy, first("wide", told, 4.0)


def _of_program(framework: str, precision: str, pipeline: bool, said: str) -> dict[str, float]:
    wide = bool(re.search("fp32 (?:grad )?reduce|reduce(?:_grads)?_in_fp32(?![ =:]*(?:false|off|no|0))|reduce(?:_dtype)? (?:fp32|float32)", said, re.I))
    if re.search(r"precision[- _]aware", said, re.I):
        return KEPT["aware"]
    if framework in ("deepspeed", DEEPSPEED) and precision != "fp16" and pipeline:
        return KEPT["both"]
    if framework in ("deepspeed", DEEPSPEED) or (framework in (MEGATRON, OLD) and precision == "fp16"):
        return KEPT["half"] | ({"summed": 4.0} if wide else {})
    if framework in SHORTER:
        return KEPT["short"] | ({"summed": 4.0} if wide else {}) | (KEPT["in_a_pipeline"] if framework == "fsdp" else {})
    return KEPT["short" if tells("recipes", said) and not wide else "wide"]
