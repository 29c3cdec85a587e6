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

from soli.planner.cells import SILENT, number, text, true
from soli.planner.cost.points import CAST, FULL, HALF, MIXED, NONE, SELECTIVE, of_device
from soli.planner.cost.programs import MEGATRON, OLD, TESTS, of_program
from soli.planner.hardware.clusters import unknown
from soli.planner.hardware.devices import Device
from soli.planner.models import Model, compressed
from soli.planner.published import named
from soli.planner.spellings import (
    FSDP,
    NANOTRON,
    OTHER,
    Sharding,
    device,
    mentioned,
    precision,
    program,
    recomputation,
    sharding,
    switch,
)

COLUMNS: dict[str, tuple[str, ...]] = {
    "layers": ("layers",), "hidden": ("hidden",), "heads": ("heads",), "kv_heads": ("kv_heads", "kv_groups"),
    "ffn": ("ffn",), "seq": ("seq_len", "seq", "seq_length"), "vocab": ("vocab",), "params_b": ("params_b",),
    "gpus": ("gpus",), "tp": ("tp", "tensor_model_parallel_size"), "pp": ("pp", "pipeline_model_parallel_size"),
    "chunks": ("vp", "chunks", "virtual_pipeline_model_parallel_size"), "dp": ("dp",), "cp": ("cp", "context_parallel_size"),
    "ep": ("ep", "expert_model_parallel_size"), "microbatch": ("microbatch", "mbs", "micro_batch_size"),
    "global_batch": ("global_batch", "gbs", "global_batch_size"),
    "accumulate": ("grad_accum",), "experts": ("experts",), "topk": ("topk",), "moe_ffn": ("moe_ffn",),
    "chunk_layers": ("vp_layers",), "again": ("recompute_num_layers", "recompute_layers"), "head_size": ("head_size", "head_dim", "kv_channels"), "replicate": ("replicate",),
    "shard_group": ("zero_group", "shard_group", "data_parallel_shard_degree"), "shared": ("shared_experts",),
}  # fmt: skip
"""A number's name here, and the columns that may have it."""
WORDS: dict[str, tuple[str, ...]] = {
    "recompute": ("recompute", "recompute_mode", "recompute_granularity"), "sp": ("sp", "sequence_parallel"),
    "model": ("model", "recipe"), "gpu": ("gpu", "device", "accelerator", "gpu_type"),
}  # fmt: skip
"""The same of what is said in words."""

TOLD = ("model", "recipe", "notes", "source", "interconnect", "framework", "test_case", "env")
"""Cells that may name a device where no column does."""
TIMES = {"iter_time_s": 1.0, "iter_time_s_median": 1.0, "measured_ms": 1e-3, "measured_time_s": 1.0}
MEMORIES = {"peak_mem_gb": 1e9, "peak_mem_alloc_gib": 2.0**30, "peak_memory_gb": 1e9}
STATES = {"static_mem_alloc_gib": 2.0**30}
MOE = re.compile(r"(\d+)\s*e(?:xperts)?[\s,/]*top[\s-]*(\d+)(?:\s*\+\s*(\d+)\s*shared)?", re.I)
GATED = re.compile(r"llama|mistral|mixtral|qwen|deepseek|gemma|swiglu|phi-?3|olmo", re.I)
LATENT = 160.0
HEADS = (
    (re.compile(r"qwen-?_?3", re.I), 128.0), (re.compile(r"gpt[-_ ]?oss", re.I), 64.0),
    (re.compile(r"gemma", re.I), 256.0), (re.compile(r"\bmla\b|deepseek-?_?v[23]|kimi-?_?k2", re.I), LATENT),
)  # fmt: skip
"""Families whose head size is not hidden / heads, by their model cards; of MLA the mean of 192 for keys, 128 for values."""
BESIDE = re.compile(r"\bvlm\b|_vlm_|multimodal|llava", re.I)
"""Models of which the columns say only a part."""
RECOMPUTE, DEVICES, BY_EYE = "recompute=", "gpus=", "a time read by eye"
SCALED = (MEGATRON, OLD, "megatron-deepspeed")
"""Frameworks whose gradients of fp16 are summed in fp16 and copied in fp32 for the optimizer, which scales them back."""
USUAL = 8.0
"""Sequences of a microbatch where nobody says it and no pipeline wants many."""

FLASH = (FSDP, "nanotron", "soli", TESTS)
"""Frameworks, and generations of devices, whose attention keeps no scores unless a row says so."""

FLASH_SINCE = ("hopper", "blackwell", "blackwell-ultra", "cdna3", "cdna4", "ada")


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
    timeless: bool = False  # it says not how large a step is
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
    point |= _network(row, device)
    point |= {"logged": float(found.framework == TESTS), "frugal": float(found.framework != NANOTRON)}
    told = " ".join(text(row, name) for name in ("attn_backend", "notes", "framework"))
    point |= of_program(found.framework, found.generation, told)
    point |= CAST if found.framework == "soli" else kept
    point |= _model(row, said, found) | _attention(row, found)
    point |= _degrees(said, point, found)
    point["longest"] = _by_cost(point) if found.framework == NANOTRON else 0.0
    point |= _choices(row, said, point, found)
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
    if DEVICES in " ".join(found.inferred) and (found.point.get("zero") or found.timeless):
        found.memory = found.states = None  # of states that are shared out among a number that nobody says
    found.time = None if found.timeless else found.time
    if any(word.startswith("microbatch=") for word in found.inferred):
        found.memory = found.states = None  # of as many sequences as nobody says
    if "by eye" in text(row, "provenance"):
        found.inferred.append(BY_EYE)
    found.fits = "oom" not in text(row, "status").lower()
    return found


def framework(row: Mapping[str, str]) -> str:
    """Whose program ran: a family whose rows share constants."""
    if text(row, "test_case"):
        return TESTS  # of toy sizes, deterministic, on shared machines
    return program(text(row, "framework"), text(row, "source"))


# --- devices ----------------------------------------------------------------------------------------------


def _device(row: Mapping[str, str], found: Row) -> Device | None:
    said = word(row, "gpu")
    if not said:
        elsewhere = mentioned(*(text(row, name) for name in TOLD))
        if elsewhere is None:
            found.refused.append("it names no gpu")
        else:
            found.inferred.append(f"gpu={elsewhere.name}")
        return elsewhere
    one, size = device(said)
    if one is None:
        problem = unknown(said)
        found.refused.append(f"{problem.what}; {problem.allowed}; {problem.fix}")
        return None
    odd = [
        form for form in ("pcie", "nvl") if form in re.split(r"[\s_-]", said.lower()) and form not in one.name
    ]
    if odd or (size and abs(size / one.memory_gib - 1) > 0.15):
        found.refused.append(
            f"no device '{said}' is known; {one.name} has {one.memory_gib:g} GiB, as SXM or as sold"
        )
        return None
    return one


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
    said = text(row, "precision") or ("fp8" if true(row, "fp8") else "fp16" if true(row, "fp16") else "")
    name = precision(said)
    if not name and (SILENT.fullmatch(said) or re.search("mixed|amp", said.lower())):
        name = precision(re.sub(r"[_-]", " ", word(row, "model")))
        name = name or ("bf16" if "bf16" in device.tflops else "fp16")
        found.inferred.append(f"precision={name}")
    if name in device.tflops:
        return name
    found.refused.append(f"{device.name} multiplies no {name or said} (it has {', '.join(device.tflops)})")
    return ""


# --- the model --------------------------------------------------------------------------------------------


def _model(row: Mapping[str, str], said: dict[str, float | None], found: Row) -> dict[str, float]:
    model = _named(row, said)
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
        stages = (said["pp"] or 1.0) * max(said["chunks"] or 1.0, 1.0)
        layers, hidden = _shape_of(total * 1e9, layers, hidden, stages)
        found.inferred.append(f"layers={layers:g}, hidden={hidden:g} of {total:g}B parameters")
    take: Callable[[str, float], float] = lambda name, usual: _or(said, name, usual, found)
    heads = take("heads", max(round(hidden / (128 if hidden >= 2048 else 64)), 1))
    kv_heads = said["kv_heads"] or heads
    name = _called(row)
    experts, active, shared = _experts(said, name, found)
    seq = said["seq"]
    if seq is None and model:
        seq = float(model.seq)
        found.inferred.append(f"seq={seq:g}")
    if seq is None:
        found.refused.append("it has no sequence length (seq_len)")
        seq = 1.0
    vocab = take("vocab", 51200.0)
    if BESIDE.search(name):
        found.refused.append("a part of its model is no transformer of these dimensions (it sees pictures)")
    gated = float(true(row, "swiglu") or ("swiglu" not in row and (bool(GATED.search(name)) or experts > 0)))
    head_size = _head_size(said, row, hidden / heads)
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    latent = head_size == LATENT or true(row, "mla")
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
    said_tied = switch(text(row, "tied"))
    tied = not true(row, "untie") if "untie" in row else (not gated if said_tied is None else said_tied)
    if model:
        gated, tied = float(model.gated), model.tied
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": head_size,
        "compressed": compressed(hidden, heads, 1536 if hidden > 2048 else 0) if latent else 0.0,
        "ffn": ffn, "gated": gated, "seq": seq, "vocab": vocab, "experts": experts, "active": active, "shared": shared,
        "tied": float(tied), "frozen": float(bool(re.search(r"(?<![a-z])q?lora(?![a-z])|(?<![a-z])peft(?![a-z])", name, re.I))),
    }  # fmt: skip


def _called(row: Mapping[str, str]) -> str:
    """All that a row calls its model."""
    return " ".join([word(row, "model"), *(text(row, name) for name in ("test_case", "arch"))])


def _named(row: Mapping[str, str], said: dict[str, float | None]) -> Model | None:
    """The published model of which a row leaves something out; None where it says all, or means another one of that name."""
    model = named(word(row, "model"))
    if model is None:
        return None
    whole = (said["layers"], said["hidden"])
    other = all(whole) and whole != (model.layers, model.hidden)
    if other or (said["params_b"] and abs(model.parameters / said["params_b"] / 1e9 - 1) > 0.2):
        return None
    needed = ["layers", "hidden", "heads", "ffn", "vocab"]
    if model.experts:
        needed[3:4] = [] if said["moe_ffn"] else ["ffn"]
        needed += [] if MOE.search(_called(row)) else ["experts"]
    return model if any(said[name] is None for name in needed) else None


def of_model(model: Model) -> dict[str, float | None]:
    """What a published model's row would say."""
    found: dict[str, float | None] = {
        name: getattr(model, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_size")
    }  # fmt: skip
    if model.experts:
        routed = model.active - model.shared
        found |= {"experts": model.experts, "topk": routed, "shared": model.shared, "moe_ffn": model.ffn}
    return found


def _experts(said: dict[str, float | None], name: str, found: Row) -> tuple[float, float, float]:
    """Experts of a layer, those that a token goes to, and of these those that each token goes to."""
    told = MOE.search(name)
    parts = [float(part or 0) for part in told.groups()] if told else [0.0, 0.0, 0.0]
    experts = said["experts"] if said["experts"] is not None else parts[0]
    if not experts:
        if re.search(r"(?<![a-z])moe(?![a-z])|mixture|mixtral", name, re.I):
            found.refused.append("it is a mixture of experts, and says not of how many (experts, topk)")
        return 0.0, 1.0, 0.0
    shared = said["shared"] if said["shared"] is not None else parts[2]
    routed = said["topk"] or parts[1]
    if not routed:
        routed = 2.0
        found.inferred.append("topk=2")
    return experts, routed + shared, shared


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
    return {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp or 1.0, "chunks": chunks}


def _by_cost(q: Mapping[str, float]) -> float:
    """Layers of nanotron's first stage: until its products are more than a stage's share of all, the last one among them."""
    if q["pp"] == 1 or "layers" not in q:
        return 0.0
    one = q["hidden"] * (4 * q["hidden"] + (2 + q["gated"]) * q["ffn"])
    return min((q["layers"] + q["vocab"] * q["hidden"] / one) // q["pp"] + 1, q["layers"])


def _choices(
    row: Mapping[str, str], said: dict[str, float | None], point: dict[str, float], found: Row
) -> dict[str, float]:
    shard, recompute = text(row, "shard"), word(row, "recompute")
    states = sharding(shard)
    by_stage = sharding(text(row, "zero"))
    if states is None or by_stage is None:
        found.refused.append(
            f"shard: '{shard if states is None else text(row, 'zero')}' is not understood (none, zero1, zero2, zero3, FULL_SHARD, ...)"
        )
        states = by_stage = Sharding()
    zero = states.zero if by_stage.zero is None else by_stage.zero
    if zero is None:
        zero = 3.0 if true(row, "fsdp") or true(row, "use_megatron_fsdp") else float(true(row, "dist_opt"))
        if not zero and "dist_opt" not in row:
            found.inferred.append("zero=0")
    level, again = _recomputed(row, said, recompute, point, found)
    sp = word(row, "sp") or (
        "on" if recompute.lower().startswith("seq") else ""
    )  # Calculon's seqsel has both
    parted = None if SILENT.fullmatch(sp) and sp.lower() != "none" else switch(sp)
    if parted is None and not SILENT.fullmatch(sp):
        found.refused.append(f"sp: '{sp}' is not understood (on, off, =tp)")
    ranks = point["dp"] * point["cp"]
    usual = max(point["node"] // point["tp"], 1.0) if states.copied else ranks  # HSDP: a server
    group = said["shard_group"] or states.group or usual
    copies = said["replicate"] or states.replicate or max(ranks / group, 1.0)
    return {
        "zero": zero if ranks > 1 else 0.0,
        "replicate": copies if ranks % copies == 0 else 1.0,
        "offload": float(states.offload or by_stage.offload or "infinity" in text(row, "framework").lower()),
        "recompute": level,
        "again": again,
        "sp": float(bool(parted) and point["tp"] > 1),
    }


def _recomputed(
    row: Mapping[str, str], said: dict[str, float | None], words: str, point: dict[str, float], found: Row
) -> tuple[float, float]:
    """What is recomputed of each layer, and how many of a rank's are recomputed whole beside it."""
    silent = SILENT.fullmatch(words) and words.lower() != "none"
    read = None if silent else recomputation(words)
    if read is None:
        if not silent:
            found.refused.append(
                f"recompute: '{words}' is not understood (none, selective, full, full 5 of 48)"
            )
        level = NONE if point.get("flash") or "recompute_method" in row else SELECTIVE
        if "recompute_method" not in row:
            found.inferred.append(f"{RECOMPUTE}{'none' if level == NONE else 'selective'}")
        return level, 0.0
    level, share, count = read
    own = ceil(point.get("layers", 1.0) / point["pp"])
    if level == FULL and text(row, "recompute_method").lower() == "block" and said["again"]:
        count = int(said["again"])
    if level == SELECTIVE and found.framework == FSDP:  # of every second layer, or of every second product
        return NONE, own / 2
    if level == FULL and (share < 1 or 0 < count < own):
        return NONE, own * share if share < 1 else float(count)
    return level, 0.0


def _batch(said: dict[str, float | None], point: dict[str, float], found: Row) -> dict[str, float]:
    size, whole, times, dp = said["microbatch"], said["global_batch"], said["accumulate"], point["dp"]
    if whole is None and size is None:
        found.refused.append("it has no global_batch, nor microbatch and grad_accum")
        return {}
    if whole is None and times is None:
        times, found.timeless = (
            point["pp"],
            True,
        )  # enough for what a rank keeps; how long a step takes cannot be said
        found.inferred.append(f"grad_accum={times:g}")
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
