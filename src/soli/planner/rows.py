"""Rows of a table of configurations, as points: what each says, what is inferred where it is silent, what is refused.

A row is what a CSV file has of one run: its model by dimensions, its plan, and its devices, under the names that
COLUMNS has. What a row leaves out is inferred where there is a usual answer, and said; where there is none, or where
what it says contradicts itself, the row is refused with every reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isnan

from soli.core.errors import Problem
from soli.planner.cost.points import FULL, NONE, SELECTIVE
from soli.planner.hardware.clusters import unknown
from soli.planner.hardware.devices import Device, named

COLUMNS: dict[str, tuple[str, ...]] = {
    "layers": ("layers",), "hidden": ("hidden",), "heads": ("heads",), "kv_heads": ("kv_heads", "kv_groups"),
    "ffn": ("ffn",), "seq": ("seq_len", "seq"), "vocab": ("vocab",), "params_b": ("params_b",),
    "gpus": ("gpus",), "tp": ("tp",), "pp": ("pp",), "chunks": ("vp", "chunks"), "dp": ("dp",), "cp": ("cp",),
    "ep": ("ep",), "microbatch": ("microbatch", "mbs"), "global_batch": ("global_batch", "gbs"),
    "accumulate": ("grad_accum",), "experts": ("experts",), "topk": ("topk",), "moe_ffn": ("moe_ffn",),
    "chunk_layers": ("vp_layers",),
}  # fmt: skip
"""A number's name here, and the columns that may have it."""

TIMES = {"iter_time_s": 1.0, "iter_time_s_median": 1.0, "measured_ms": 1e-3, "measured_time_s": 1.0}
MEMORIES = {"peak_mem_gb": 1e9, "peak_mem_alloc_gib": 2.0**30, "peak_memory_gb": 1e9}
STATES = {"static_mem_alloc_gib": 2.0**30}
MOE = re.compile(r"(\d+)\s*e(?:xperts)?\s*top(\d+)(?:\s*\+\s*(\d+)\s*shared)?", re.I)
GATED = re.compile(r"llama|mistral|mixtral|qwen|deepseek|gemma|swiglu|phi-?3|olmo", re.I)
TESTS = "megatron-tests"
RECOMPUTE, MICROBATCH = "recompute=", "microbatch="
USUAL = 8.0
"""Sequences of a microbatch where nobody says it and no pipeline wants many."""

FLASH = ("fsdp", "nanotron", "soli", TESTS)
"""Frameworks, and generations of devices, whose attention keeps no scores unless a row says so."""

FLASH_SINCE = ("hopper", "blackwell", "blackwell-ultra", "cdna3")


@dataclass
class Row:
    """What one row says. `point`: the fields of Points; empty where it is refused."""

    point: dict[str, float] = field(default_factory=dict)
    framework: str = ""
    generation: str = ""
    inferred: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    time: float | None = None  # measured, seconds
    memory: float | None = None  # measured, bytes
    states: float | None = None  # of it what is there between steps
    fits: bool = True  # False: it is known to have run out of memory

    @property
    def unsaid(self) -> bool:
        """Whether it leaves out what is recomputed: nothing for its time, as much as fits for its memory."""
        return any(word.startswith(RECOMPUTE) for word in self.inferred)


def read(row: Mapping[str, str]) -> Row:
    """A row of a table, by column."""
    found = Row()
    said = {name: _number(row, columns) for name, columns in COLUMNS.items()}
    device = _device(row, found)
    if device is None:
        return found
    found.generation, found.framework = device.generation, framework(row)
    point = _hardware(row, device, said, found) | _precision(row, device, found)
    point |= _model(row, said, found) | _attention(row, found)
    point |= _degrees(said, point, found)
    point |= _choices(row, point, found)
    point |= _batch(said, point, found)
    found.time, found.memory = _measured(row, TIMES), _measured(row, MEMORIES)
    found.states = _measured(row, STATES)
    found.fits = "oom" not in _text(row, "status").lower()
    if not found.refused:
        found.point = point
    return found


def framework(row: Mapping[str, str]) -> str:
    """Whose program ran: a family whose rows share constants."""
    if _text(row, "test_case"):
        return TESTS  # of toy sizes, deterministic, on shared machines
    text = " ".join(_text(row, name) for name in ("framework", "source")).lower()
    families = (
        ("zero-3", "deepspeed"), ("zero3", "deepspeed"), ("deepspeed zero", "deepspeed"), ("offload", "deepspeed"),
        ("fsdp", "fsdp"), ("torchtitan", "fsdp"), ("llm-foundry", "fsdp"), ("megatron-deepspeed", "megatron-deepspeed"),
        ("megatron+deepspeed", "megatron-deepspeed"), ("deepspeed", "deepspeed"), ("nemo", "megatron"),
        ("megatron", "megatron"), ("nanotron", "nanotron"), ("soli", "soli"),
    )  # fmt: skip
    return next((family for word, family in families if word in text), "other")


# --- devices ----------------------------------------------------------------------------------------------


def _device(row: Mapping[str, str], found: Row) -> Device | None:
    text = _text(row, "gpu")
    if not text:
        found.refused.append("it names no gpu")
        return None
    words = re.sub(r"\(.*", "", text).lower().replace("_", "-").replace(" ", "-").strip("-")
    tries = [words, words.replace("-sxm", ""), *_shorter(words)]
    device = next((d for word in tries if (d := named(word)) is not None), None)
    if device is None:
        found.refused.append(_said(unknown(text)))
    return device


def _said(problem: Problem) -> str:
    return f"{problem.what}; {problem.allowed}"


def _shorter(words: str) -> list[str]:
    """The name with less and less behind it: a100-80gb-sxm, a100-80gb, a100."""
    parts = words.split("-")
    return ["-".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def _hardware(
    row: Mapping[str, str], device: Device, said: dict[str, float | None], found: Row
) -> dict[str, float]:
    text = " ".join(_text(row, name) for name in ("interconnect", "gpu"))
    node, net = float(device.node), device.net_gbits * 1e9 / 8
    patterns = (r"(\d+)[- ]GPU nodes", r"NVL(\d+)", r"(\d+)/node", r"(\d+) ?GPUs? (?:a|per) node")
    sizes = [m for pattern in patterns if (m := re.search(pattern, text, re.I))]
    if sizes:
        node = float(sizes[0].group(1))
    elif "dgx-2" in text.lower():
        node = 16.0
    if rails := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", text):
        net = float(rails.group(1)) * float(rails.group(2)) * 1e9 / 8 / node
    elif rate := re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)[^,;]*?(?:per|/)?\s*node", text, re.I):
        net = float(rate.group(1)) * 1e9 / 8 / node
    return {
        "capacity": device.memory, "bandwidth": device.memory_gbs * 1e9, "node": node, "link": device.link_gbs * 1e9,
        "link_latency": device.link_us * 1e-6, "net": net, "net_latency": device.net_us * 1e-6,
        "host": device.host_gbs * 1e9, "weight": 2.0, "moments": 12.0, "whole": 0.0, "casts": 0.0,
        "logged": float(found.framework == TESTS),
    }  # fmt: skip


def _precision(row: Mapping[str, str], device: Device, found: Row) -> dict[str, float]:
    text = _text(row, "precision").lower() or (
        "fp8" if _true(row, "fp8") else "fp16" if _true(row, "fp16") else ""
    )
    wide = "bf16" if "bf16" in device.tflops else "fp16"
    low = next((name for name in ("fp4", "fp8") if name in text), "")
    if low and low not in device.tflops:
        found.refused.append(f"{device.name} multiplies no {low} (it has {', '.join(device.tflops)})")
        low = ""
    if not text:
        found.inferred.append(f"precision={wide}")
    peak = device.tflops[low or wide] * 1e12
    size = {"": 2.0, "fp8": 1.0, "fp4": 0.5}[low]
    return {"peak": peak, "peak_wide": device.tflops[wide] * 1e12, "low": size}


# --- the model --------------------------------------------------------------------------------------------


def _model(row: Mapping[str, str], said: dict[str, float | None], found: Row) -> dict[str, float]:
    layers, hidden, total = said["layers"], said["hidden"], said["params_b"]
    if layers is None or hidden is None:
        if total is None:
            found.refused.append("it has neither layers and hidden nor params_b")
            return {}
        layers, hidden = _shape_of(total * 1e9, layers, hidden)
        found.inferred.append(f"layers={layers:g}, hidden={hidden:g} of {total:g}B parameters")
    take: Callable[[str, float], float] = lambda name, usual: _or(said, name, usual, found)
    heads = take("heads", max(round(hidden / (128 if hidden >= 2048 else 64)), 1))
    kv_heads = said["kv_heads"] or heads
    experts, active = said["experts"] or 0.0, (said["topk"] or 1.0) if said["experts"] else 1.0
    if not experts and (mixture := MOE.search(_text(row, "arch"))):
        experts, active = float(mixture.group(1)), float(mixture.group(2)) + float(mixture.group(3) or 0)
    seq = said["seq"]
    if seq is None:
        found.refused.append("it has no sequence length (seq_len)")
        seq = 1.0
    vocab = take("vocab", 51200.0)
    name = " ".join(_text(row, n) for n in ("model", "test_case", "arch"))
    gated = float(bool(GATED.search(name)) or _true(row, "swiglu") or experts > 0)
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    rest = (total or 0.0) * 1e9 - layers * attention - 2 * vocab * hidden
    if experts:
        ffn = said["moe_ffn"]
        if ffn is None and rest > 0:
            ffn = rest / (layers * experts * hidden * (2 + gated))
            found.inferred.append(f"an expert's width {ffn:.0f} of {total:g}B parameters")
        ffn = ffn or said["ffn"] or 4 * hidden
    else:
        ffn = take("ffn", 4 * hidden)
        if total and rest > 0:  # which of the two number of matrices gives the parameters that it has
            gated = float(abs(rest - 3 * layers * hidden * ffn) < abs(rest - 2 * layers * hidden * ffn))
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": hidden / heads,
        "ffn": ffn, "gated": gated, "seq": seq, "vocab": vocab, "experts": experts, "active": active,
        "tied": float(not gated and not _true(row, "untie")), "frozen": float("lora" in name.lower()),
    }  # fmt: skip


def _shape_of(parameters: float, layers: float | None, hidden: float | None) -> tuple[float, float]:
    """Layers and hidden size of 12 l h^2 parameters, with h = 128 l where neither is known (arXiv 2001.08361, 3.3)."""
    if hidden is None:
        hidden = (parameters / 12 / layers) ** 0.5 if layers else (parameters / 12 * 128) ** (1 / 3)
        hidden = max(round(hidden / 128), 1) * 128.0
    return layers or max(round(parameters / 12 / hidden**2), 1), hidden


def _attention(row: Mapping[str, str], found: Row) -> dict[str, float]:
    text = " ".join(_text(row, name) for name in ("attn_backend", "notes", "provenance")).lower()
    # Megatron-LM's long-term-support image has no flash attention that is deterministic.
    old = _true(row, "deterministic") and _text(row, "env") == "lts" and "flash" not in text
    if "unfused" in text or _text(row, "impl") == "local" or old:
        return {"flash": 0.0}
    known = "flash" in text or "fused" in text or found.framework in FLASH
    return {"flash": float(known or found.generation in FLASH_SINCE)}


# --- the plan ---------------------------------------------------------------------------------------------


def _degrees(said: dict[str, float | None], point: dict[str, float], found: Row) -> dict[str, float]:
    tp, pp, cp, ep = (said[name] or 1.0 for name in ("tp", "pp", "cp", "ep"))
    chunks = said["chunks"] or 1.0
    if said["chunk_layers"] and "layers" in point:  # Megatron-LM's num-layers-per-virtual-pipeline-stage
        chunks = max(point["layers"] / pp / said["chunk_layers"], 1.0)
    gpus, dp = said["gpus"], said["dp"]
    if gpus is None and dp is None:
        gpus = max(point["node"], pp * max(tp * cp, ep))
        found.inferred.append(f"gpus={gpus:g}")
    if dp is None and gpus is not None:
        dp = gpus / (tp * pp * cp)
        if dp != int(dp) or dp < 1:
            found.refused.append(f"{gpus:g} gpus are no multiple of tp x pp x cp = {tp * pp * cp:g}")
    elif gpus is not None and dp is not None and gpus != tp * pp * cp * dp:
        found.refused.append(f"tp x pp x cp x dp = {tp * pp * cp * dp:g}, and it has {gpus:g} gpus")
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "dp": dp or 1.0,
        "chunks": chunks,
    }


def _choices(row: Mapping[str, str], point: dict[str, float], found: Row) -> dict[str, float]:
    shard, recompute = _text(row, "shard").lower(), _text(row, "recompute").lower()
    zero, offload = 0.0, float("offload" in shard or "infinity" in _text(row, "framework").lower())
    if re.search(r"zero-?3|full_shard|fsdp", shard) or _true(row, "fsdp"):
        zero = 3.0
    elif re.search(r"zero-?2|shard_grad_op", shard):
        zero = 2.0
    elif re.search(r"zero-?1|dist-optimizer", shard) or _true(row, "dist_opt"):
        zero = 1.0
    elif not shard and "shard" not in row and "dist_opt" not in row:
        found.inferred.append("zero=0")
    words = (("none", NONE), ("select", SELECTIVE), ("full", FULL))
    level = next((value for word, value in words if recompute.startswith(word)), None)
    if level is None:
        level = NONE if point.get("flash") or "recompute_method" in row else SELECTIVE
        if "recompute_method" not in row:
            found.inferred.append(f"{RECOMPUTE}{'none' if level == NONE else 'selective'}")
    sp = _text(row, "sp").lower()
    return {
        "zero": zero if point["dp"] * point["cp"] > 1 else 0.0,
        "offload": offload,
        "recompute": level,
        "sp": float(sp in ("=tp", "on", "true", "1", "yes") and point["tp"] > 1),
    }


def _batch(said: dict[str, float | None], point: dict[str, float], found: Row) -> dict[str, float]:
    size, whole, times, dp = said["microbatch"], said["global_batch"], said["accumulate"], point["dp"]
    if whole is None and (size is None or times is None):
        found.refused.append("it has no global_batch, nor microbatch and grad_accum")
        return {}
    if whole is None and size is not None and times is not None:
        whole = size * times * dp
    assert whole is not None
    if size is None:
        size = whole / dp / times if times else min(whole / dp, USUAL if point["pp"] == 1 else 1.0)
        size = max(size, 1.0)
        found.inferred.append(f"{MICROBATCH}{size:g}")
    if whole < dp * size:
        found.refused.append(f"global_batch={whole:g} is less than dp x microbatch = {dp * size:g}")
    return {"global_batch": whole, "microbatch": size}


# --- cells ------------------------------------------------------------------------------------------------


def _text(row: Mapping[str, str], name: str) -> str:
    return (row.get(name) or "").strip()


def _true(row: Mapping[str, str], name: str) -> bool:
    return _text(row, name).lower() in ("true", "1", "yes", "on")


def _number(row: Mapping[str, str], columns: tuple[str, ...]) -> float | None:
    """The first number of the first of these columns that has one: "51200 (assumed)" is 51200."""
    for name in columns:
        if found := re.match(r"~?\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", _text(row, name), re.I):
            value = float(found.group(1))
            if not isnan(value) and value > 0:
                return value
    return None


def _measured(row: Mapping[str, str], columns: dict[str, float]) -> float | None:
    found = [(name, value) for name in columns if (value := _number(row, (name,))) is not None]
    return found[0][1] * columns[found[0][0]] if found else None


def _or(said: dict[str, float | None], name: str, usual: float, found: Row) -> float:
    value = said[name]
    if value is None:
        found.inferred.append(f"{name}={usual:g}")
        return usual
    return value
