"""Rows of a table of configurations, as points: what each says, what is inferred where it is silent, what is refused.

A row is what a CSV file has of one run: its model by dimensions, its plan, and its devices, under the names that
COLUMNS has. What a row leaves out is inferred where there is a usual answer, and said; where there is none, or where
what it says contradicts itself, the row is refused with every reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

from soli.core.errors import Problem
from soli.planner.cells import SILENT, number, text, true
from soli.planner.cost.points import CAST, FULL, HALF, MIXED, NONE, SELECTIVE, SIZES, of_device
from soli.planner.cost.programs import MEGATRON, OLD, TESTS, of_program
from soli.planner.hardware import devices
from soli.planner.hardware.clusters import unknown
from soli.planner.hardware.devices import Device
from soli.planner.models import Model
from soli.planner.published import named

COLUMNS: dict[str, tuple[str, ...]] = {
    "layers": ("layers",), "hidden": ("hidden",), "heads": ("heads",), "kv_heads": ("kv_heads", "kv_groups"),
    "ffn": ("ffn",), "seq": ("seq_len", "seq", "seq_length"), "vocab": ("vocab",), "params_b": ("params_b",),
    "gpus": ("gpus",), "tp": ("tp", "tensor_model_parallel_size"), "pp": ("pp", "pipeline_model_parallel_size"),
    "chunks": ("vp", "chunks", "virtual_pipeline_model_parallel_size"), "dp": ("dp",), "cp": ("cp", "context_parallel_size"),
    "ep": ("ep", "expert_model_parallel_size"), "microbatch": ("microbatch", "mbs", "micro_batch_size"),
    "global_batch": ("global_batch", "gbs", "global_batch_size"),
    "accumulate": ("grad_accum",), "experts": ("experts",), "topk": ("topk",), "moe_ffn": ("moe_ffn",),
    "chunk_layers": ("vp_layers",), "head_size": ("head_size", "head_dim", "kv_channels"), "replicate": ("replicate",),
}  # fmt: skip
"""A number's name here, and the columns that may have it."""
WORDS: dict[str, tuple[str, ...]] = {
    "recompute": ("recompute", "recompute_mode", "recompute_granularity"), "sp": ("sp", "sequence_parallel"),
    "model": ("model", "recipe"),
}  # fmt: skip
"""The same of what is said in words."""

TIMES = {"iter_time_s": 1.0, "iter_time_s_median": 1.0, "measured_ms": 1e-3, "measured_time_s": 1.0}
MEMORIES = {"peak_mem_gb": 1e9, "peak_mem_alloc_gib": 2.0**30, "peak_memory_gb": 1e9}
STATES = {"static_mem_alloc_gib": 2.0**30}
MOE = re.compile(r"(\d+)\s*e(?:xperts)?\s*top(\d+)(?:\s*\+\s*(\d+)\s*shared)?", re.I)
GATED = re.compile(r"llama|mistral|mixtral|qwen|deepseek|gemma|swiglu|phi-?3|olmo", re.I)
HEADS = (
    (re.compile(r"qwen-?_?3", re.I), 128.0), (re.compile(r"gpt[-_ ]?oss", re.I), 64.0),
    (re.compile(r"gemma", re.I), 256.0), (re.compile(r"\bmla\b|deepseek-?_?v[23]", re.I), 160.0),
)  # fmt: skip
"""Families whose head size is not hidden / heads, by their model cards; of MLA the mean of 192 for keys, 128 for values."""
BESIDE = re.compile(r"\bvlm\b|_vlm_|multimodal|llava", re.I)
"""Models of which the columns say only a part."""
OTHER, NANOTRON = "other", "nanotron"
STAGE = r"zero[\s_=-]*(?:stage)?[\s_=-]*{0}|stage[\s_=-]*{0}"
RECOMPUTE, DEVICES, BY_EYE = "recompute=", "gpus=", "a time read by eye"
SCALED = (MEGATRON, OLD, "megatron-deepspeed")
"""Frameworks whose gradients of fp16 are summed in fp16 and copied in fp32 for the optimizer, which scales them back."""
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
    said = {name: number(row, name, columns, found.refused) for name, columns in COLUMNS.items()}
    device = _device(row, found)
    if device is None:
        return found
    found.generation, found.framework = device.generation, framework(row)
    if found.framework == OLD and found.generation in FLASH_SINCE:  # which it never ran on
        found.framework = MEGATRON
    if found.framework == OTHER:
        found.inferred.append("framework=any")
    precision = _precision(row, device, found)
    point = of_device(device, precision) if precision else {}
    kept = HALF if precision == "fp16" and found.framework in SCALED else MIXED
    point |= _network(row, device) | (CAST if found.framework == "soli" else kept)
    point |= {"logged": float(found.framework == TESTS), "frugal": float(found.framework != NANOTRON)}
    told = " ".join(text(row, name) for name in ("attn_backend", "notes"))
    point |= of_program(found.framework, found.generation, told)
    point |= _model(row, said, found) | _attention(row, found)
    point |= _degrees(said, point, found)
    point["replicate"] = said["replicate"] or 1.0
    point["longest"] = _by_cost(point) if found.framework == NANOTRON else 0.0
    point |= _choices(row, point, found)
    point |= _batch(said, point, found)
    if not found.refused:
        found.refused += _impossible(said, point)
    if not found.refused:
        found.point = point
    return found


def read_measured(row: Mapping[str, str]) -> Row:
    """A row with what was measured of it."""
    found = read(row)
    found.time, found.memory, found.states = (
        next((value * unit for column, unit in units.items() if (value := number(row, name, (column,), found.refused))), None)
        for name, units in (("time", TIMES), ("memory", MEMORIES), ("states", STATES))
    )  # fmt: skip
    if DEVICES in " ".join(found.inferred) and found.point.get("zero"):
        found.memory = found.states = None  # of states that are shared out among a number that nobody says
    if "by eye" in text(row, "provenance"):
        found.inferred.append(BY_EYE)
    found.fits = "oom" not in text(row, "status").lower()
    return found


def framework(row: Mapping[str, str]) -> str:
    """Whose program ran: a family whose rows share constants."""
    if text(row, "test_case"):
        return TESTS  # of toy sizes, deterministic, on shared machines
    said = " ".join(text(row, name) for name in ("framework", "source")).lower()
    families = (
        ("zero-3", "deepspeed"), ("zero3", "deepspeed"), ("deepspeed zero", "deepspeed"), ("offload", "deepspeed"),
        ("fsdp", "fsdp"), ("torchtitan", "fsdp"), ("llm-foundry", "fsdp"), ("megatron-deepspeed", "megatron-deepspeed"),
        ("megatron+deepspeed", "megatron-deepspeed"), ("deepspeed", "deepspeed"), ("nemo", MEGATRON),
        ("bridge", MEGATRON), ("megatron-core", MEGATRON), ("mcore", MEGATRON), ("megatron", OLD), ("nanotron", "nanotron"), ("soli", "soli"),
    )  # fmt: skip
    return next((family for word, family in families if word in said), OTHER)


# --- devices ----------------------------------------------------------------------------------------------


def _device(row: Mapping[str, str], found: Row) -> Device | None:
    said = text(row, "gpu")
    if not said and (elsewhere := _mentioned(row)):
        said = elsewhere
        found.inferred.append(f"gpu={said}")
    if not said:
        found.refused.append("it names no gpu")
        return None
    words = (
        re.sub(r"\(.*|\b(?:nvidia|tesla|amd)\b", "", said.lower())
        .replace("_", "-")
        .replace(" ", "-")
        .strip("-")
    )
    words = re.sub(r"-(?:sxm|hbm)\w*", "", words)
    tries = [words, *_shorter(words)]
    if size := re.search(r"(\d+)\s*-?gi?b(?![a-z/])", said.lower()):
        tries = [f"{words.split('-')[0]}-{size.group(1)}gb", *tries]
    if "pcie" in words:
        tries = [f"{words.split('-')[0]}-pcie", *tries]
    device = next((d for name in tries if (d := devices.named(name)) is not None), None)
    if device is None:
        found.refused.append(_said(unknown(said)))
        return None
    odd = [form for form in ("pcie", "nvl") if form in words.split("-") and form not in device.name]
    if odd or (size and abs(float(size.group(1)) / device.memory_gib - 1) > 0.15):
        found.refused.append(
            f"no device '{said}' is known; {device.name} has {device.memory_gib:g} GiB, as SXM or as sold"
        )
        return None
    return device


def _mentioned(row: Mapping[str, str]) -> str:
    """The first known device that any cell names; empty if none does."""
    words = re.sub(r"[\s_]", "-", " ; ".join(filter(None, row.values())).lower())
    names = [name for device in devices.devices().values() for name in (device.name, *device.aliases)]
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name != "cpu")
    match = re.search(rf"(?<![a-z0-9])({pattern})(?![a-z0-9])", words)
    return match[0] if match else ""


def _said(problem: Problem) -> str:
    return f"{problem.what}; {problem.allowed}"


def _shorter(words: str) -> list[str]:
    """The name with less and less behind it: a100-80gb-sxm, a100-80gb, a100."""
    parts = words.split("-")
    return ["-".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def _network(row: Mapping[str, str], device: Device) -> dict[str, float]:
    """What a row says of servers and of what joins them, where it differs from the device's usual one."""
    said = " ".join(text(row, name) for name in ("interconnect", "gpu"))
    node, net = float(device.node), device.net_gbits * 1e9 / 8
    patterns = (r"(\d+)[- ]GPU nodes", r"NVL(\d+)", r"(\d+)/node", r"(\d+) ?GPUs? (?:a|per) node")
    sizes = [m for pattern in patterns if (m := re.search(pattern, said, re.I))]
    if sizes:
        node = max(float(sizes[0].group(1)), 1.0)
    elif "dgx-2" in said.lower():
        node = 16.0
    if rails := re.search(r"([1-9]\d*)\s*x\s*([1-9]\d*)\s*Gb", said):
        net = float(rails.group(1)) * float(rails.group(2)) * 1e9 / 8 / node
    elif rate := re.search(r"([1-9]\d*)\s*Gb(?:ps|/s|it/s)[^,;]*?(?:per|/)?\s*node", said):
        net = float(rate.group(1)) * 1e9 / 8 / node
    return {"node": node, "net": net}


def _precision(row: Mapping[str, str], device: Device, found: Row) -> str:
    """Of linear products; empty where the device has it not, which refuses the row."""
    said = text(row, "precision").lower() or (
        "fp8" if true(row, "fp8") else "fp16" if true(row, "fp16") else ""
    )
    if SILENT.fullmatch(said):
        said = "bf16" if "bf16" in device.tflops else "fp16"
        found.inferred.append(f"precision={said}")
    name = next((name for name in SIZES if name in said), "")
    if name in device.tflops:
        return name
    found.refused.append(f"{device.name} multiplies no {name or said} (it has {', '.join(device.tflops)})")
    return ""


# --- the model --------------------------------------------------------------------------------------------


def _model(row: Mapping[str, str], said: dict[str, float | None], found: Row) -> dict[str, float]:
    model = None if said["layers"] and said["hidden"] else named(word(row, "model"))
    if model:
        found.inferred.append(f"model={model.name}")
        said = of_model(model) | {name: value for name, value in said.items() if value is not None}
        said = dict.fromkeys(COLUMNS) | said
    layers, hidden, total = said["layers"], said["hidden"], said["params_b"]
    if layers is None or hidden is None:
        if total is None:
            found.refused.append(
                "it has neither layers and hidden nor params_b, nor the name of a published model"
            )
            return {}
        layers, hidden = _shape_of(
            total * 1e9, layers, hidden, (said["pp"] or 1.0) * max(said["chunks"] or 1.0, 1.0)
        )
        found.inferred.append(f"layers={layers:g}, hidden={hidden:g} of {total:g}B parameters")
    take: Callable[[str, float], float] = lambda name, usual: _or(said, name, usual, found)
    heads = take("heads", max(round(hidden / (128 if hidden >= 2048 else 64)), 1))
    kv_heads = said["kv_heads"] or heads
    experts, active = said["experts"] or 0.0, (said["topk"] or 1.0) if said["experts"] else 1.0
    if not experts and (mixture := MOE.search(text(row, "arch"))):
        experts, active = float(mixture.group(1)), float(mixture.group(2)) + float(mixture.group(3) or 0)
    seq = said["seq"]
    if seq is None and model:
        seq = float(model.seq)
        found.inferred.append(f"seq={seq:g}")
    if seq is None:
        found.refused.append("it has no sequence length (seq_len)")
        seq = 1.0
    vocab = take("vocab", 51200.0)
    name = " ".join([word(row, "model"), *(text(row, n) for n in ("test_case", "arch"))])
    if BESIDE.search(name):
        found.refused.append("a part of its model is no transformer of these dimensions (it sees pictures)")
    gated = float(true(row, "swiglu") or ("swiglu" not in row and (bool(GATED.search(name)) or experts > 0)))
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    rest = (total or 0.0) * 1e9 - layers * attention - 2 * vocab * hidden
    if experts:
        ffn = said["moe_ffn"]
        if ffn is None and rest > 0:
            ffn = max(round(rest / (layers * experts * hidden * (2 + gated)) / 64), 1) * 64.0
            found.inferred.append(f"an expert's width {ffn:.0f} of {total:g}B parameters")
        ffn = ffn or said["ffn"] or 4 * hidden
    else:
        ffn = take("ffn", 4 * hidden)
        if total and rest > 0:  # which of the two number of matrices gives the parameters that it has
            gated = float(abs(rest - 3 * layers * hidden * ffn) < abs(rest - 2 * layers * hidden * ffn))
    tied = not true(row, "untie") if "untie" in row else true(row, "tied") or not gated
    if model:
        gated, tied = float(model.gated), model.tied
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": _head_size(said, row, hidden / heads),
        "ffn": ffn, "gated": gated, "seq": seq, "vocab": vocab, "experts": experts, "active": active,
        "tied": float(tied), "frozen": float(bool(re.search(r"\blora\b", name, re.I))),
    }  # fmt: skip


def of_model(model: Model) -> dict[str, float | None]:
    """What a published model's row would say."""
    found: dict[str, float | None] = {
        name: getattr(model, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_size")
    }  # fmt: skip
    return found | (
        {"experts": model.experts, "topk": model.active, "moe_ffn": model.ffn} if model.experts else {}
    )


def word(row: Mapping[str, str], name: str) -> str:
    """The first cell of its columns that says something."""
    return next((said for column in WORDS[name] if (said := text(row, column))), "")


def _head_size(said: dict[str, float | None], row: Mapping[str, str], share: float) -> float:
    """Of a head: hidden / heads, but for families whose heads are wider together than the model."""
    name = " ".join(text(row, n) for n in ("model", "test_case", "arch"))
    return said["head_size"] or next((size for family, size in HEADS if family.search(name)), share)


def _shape_of(
    parameters: float, layers: float | None, hidden: float | None, stages: float
) -> tuple[float, float]:
    """Layers and hidden size of 12 l h^2 parameters, with h = 128 l where neither is known (arXiv 2001.08361, 3.3).

    Layers are a multiple of the pipeline's stages, as programs ask for.
    """
    if layers is None:
        free = (parameters / 12 / 128**2) ** (1 / 3) if hidden is None else parameters / 12 / hidden**2
        layers = max(round(free / stages), 1) * stages
    if hidden is None:
        hidden = max(round((parameters / 12 / layers) ** 0.5 / 128), 1) * 128.0
    return layers, hidden


def _attention(row: Mapping[str, str], found: Row) -> dict[str, float]:
    said = " ".join(text(row, name) for name in ("attn_backend", "notes")).lower()
    # Megatron-LM's long-term-support image has no flash attention that is deterministic.
    old = true(row, "deterministic") and text(row, "env") == "lts" and "flash" not in said
    if re.search(r"unfused|(?:no|without) flash", said) or text(row, "impl") == "local" or old:
        return {"flash": 0.0}
    known = "flash" in said or "fused" in said or found.framework in FLASH
    return {"flash": float(known or found.generation in FLASH_SINCE)}


# --- the plan ---------------------------------------------------------------------------------------------


def _degrees(said: dict[str, float | None], point: dict[str, float], found: Row) -> dict[str, float]:
    tp, pp, cp, ep = (said[name] or 1.0 for name in ("tp", "pp", "cp", "ep"))
    chunks = max(said["chunks"] or 1.0, 1.0)
    if said["chunk_layers"] and "layers" in point:  # Megatron-LM's num-layers-per-virtual-pipeline-stage
        chunks = max(point["layers"] / pp / said["chunk_layers"], 1.0)
    gpus, dp = said["gpus"], said["dp"]
    if gpus is None and dp is None:
        model = pp * tp * cp
        gpus = model * max(ceil(max(point.get("node", 1.0), pp * ep) / model), 1)
        found.inferred.append(f"{DEVICES}{gpus:g}")
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


def _by_cost(q: Mapping[str, float]) -> float:
    """Layers of nanotron's first stage: until its products are more than a stage's share of all, the last one among them."""
    if q["pp"] == 1 or "layers" not in q:
        return 0.0
    one = q["hidden"] * (4 * q["hidden"] + (2 + q["gated"]) * q["ffn"])
    return min((q["layers"] + q["vocab"] * q["hidden"] / one) // q["pp"] + 1, q["layers"])


def _choices(row: Mapping[str, str], point: dict[str, float], found: Row) -> dict[str, float]:
    shard, recompute = text(row, "shard").lower(), word(row, "recompute").lower()
    if stage := text(row, "zero"):
        shard = f"{shard} zero{re.sub(r'^(zero|stage|z)[-_ ]?', '', stage.lower())}".strip()
    zero, offload = 0.0, float("offload" in shard or "infinity" in text(row, "framework").lower())
    if re.search(STAGE.format(3) + "|full_shard|fsdp", shard) or true(row, "fsdp"):
        zero = 3.0
    elif re.search(STAGE.format(2) + "|shard_grad_op", shard):
        zero = 2.0
    elif re.search(STAGE.format(1) + "|dist", shard) or true(row, "dist_opt"):
        zero = 1.0
    elif not re.search(STAGE.format(0) + r"|\b(?:none|ddp|off|no)\b", shard):
        if not SILENT.fullmatch(shard) and not offload:
            found.refused.append(
                f"shard: '{shard}' is not understood (none, zero1, zero2, zero3, FULL_SHARD, ...)"
            )
        elif "dist_opt" not in row:
            found.inferred.append("zero=0")
    words = (("none", NONE), ("no", NONE), ("false", NONE), ("off", NONE), ("select", SELECTIVE), ("seqsel", SELECTIVE), ("full", FULL),
             ("true", FULL), ("yes", FULL))  # fmt: skip
    recompute = "" if SILENT.fullmatch(recompute) and recompute != "none" else recompute
    level = next((value for word, value in words if recompute.startswith(word)), None)
    if level is None:
        level = NONE if point.get("flash") or "recompute_method" in row else SELECTIVE
        if "recompute_method" not in row:
            found.inferred.append(f"{RECOMPUTE}{'none' if level == NONE else 'selective'}")
    sp = word(row, "sp").lower() or (
        "on" if recompute.startswith("seq") else ""
    )  # Calculon's seqsel has both
    if not re.fullmatch(r"=tp|on|true|yes|off|false|no|[01]", sp) and not SILENT.fullmatch(sp):
        found.refused.append(f"sp: '{sp}' is not understood (on, off, =tp)")
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
        size = float(max(int(size), 1))
        found.inferred.append(f"microbatch={size:g}")
    if whole < dp * size:
        found.refused.append(f"global_batch={whole:g} is less than dp x microbatch = {dp * size:g}")
    return {"global_batch": whole, "microbatch": size}


def _impossible(said: dict[str, float | None], q: dict[str, float]) -> list[str]:
    """What no program could run."""
    rules = (
        (q["tp"] > q["heads"], f"tp={q['tp']:g} cuts {q['heads']:g} heads"),
        (q["heads"] % q["kv_heads"] != 0, f"{q['kv_heads']:g} key heads do not divide {q['heads']:g} heads"),
        (q["heads"] > q["hidden"], f"{q['heads']:g} heads share a width of {q['hidden']:g}"),
        (q["pp"] * q["chunks"] > q["layers"] + 2,  # the tables may be stages too
             f"pp x vp = {q['pp'] * q['chunks']:g} stages share {q['layers']:g} layers"),
        (q["cp"] > q["seq"], f"cp={q['cp']:g} cuts a sequence of {q['seq']:g}"),
        (0 < q["experts"] < q["ep"], f"ep={q['ep']:g} shares {q['experts']:g} experts"),
        (0 < q["experts"] < (said["topk"] or 0), f"a token goes to {said['topk']} of {q['experts']:g} experts"),
    )  # fmt: skip
    return [what for wrong, what in rules if wrong]


def _or(said: dict[str, float | None], name: str, usual: float, found: Row) -> float:
    value = said[name]
    if value is None:
        found.inferred.append(f"{name}={usual:g}")
        return usual
    return value
