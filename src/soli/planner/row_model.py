"""The model of a row, by its dimensions, its name or its number of parameters; and how it attends."""

import re
from collections.abc import Mapping

from soli.planner.cells import SILENT, text, true
from soli.planner.columns import COLUMNS, told_by
from soli.planner.cost.programs import MEGATRON, TESTS, WORDS, tells
from soli.planner.models import Model, compressed, named, plain_name
from soli.planner.row import KERNEL, Row, Said
from soli.planner.spellings import FSDP, affirmed, meant, switch

MOE = re.compile(r"(\d+)\s*e(?:xperts)?[\s,/]*top[\s-]*(\d+)(?:\s*\+\s*(\d+)\s*shared)?", re.I)
LONG = 2048.0
"""Tokens. The published runs on A100 that say no kernel, some 1,100, have no gates and no longer sequences, but two, which came later."""
LATENT = 160.0
SIZED = re.compile(r"(?<![\da-z.×])(\d+(?:\.\d+)?) ?b(?:illion)?(?![a-z\d])")
"""A number of parameters in a name: not one of active ones, nor of each expert."""
RANK = re.compile(r"(?:\brank|\br(?= *=))[ =:]*([1-9]\d*)")
ON_EXPERTS = r"\ball[- _]linear|(?:lora|adapters?)\b(?:(?!\bno)[^.;])*\bon\b(?:(?!\bno|\bbut\b|\bexcept)[^.;()])*\bexperts\b(?! (?:are )?frozen)"
USUAL_RANK = 16
"""Of adapters: TRL's lora_r (huggingface/trl, trl/trainer/model_config.py)."""
FLASH = (FSDP, "nanotron", "soli", TESTS)
"""Frameworks, and generations of devices, whose attention keeps no scores unless a row says so."""

FLASH_SINCE = ("hopper", "blackwell", "blackwell-ultra", "blackwell-rtx", "cdna3", "cdna4", "ada")


def model_of(row: Mapping[str, str], said: Said, found: Row) -> dict[str, float]:
    name = called(row)
    if strange := meant("strange", plain_name(name)):
        found.refused.append(strange)
        return {}
    if re.search("enc(?:oder)?[-_ /+]?dec(?:oder)?|seq2seq", text(row, "arch").lower()):
        found.refused.append("arch: it is an encoder and a decoder, and its formulas are of one of them")
        return {}
    known = _meant(row, said)
    model = known if known and _lacks(row, said, known) else None
    if model:
        found.inferred.append(f"model={model.name}")
    same = known and all(said[name] in (None, getattr(known, name)) for name in ("hidden", "heads"))
    if known and (model or same):  # what has all that is needed may leave out keys' heads and shared experts
        said = dict.fromkeys(COLUMNS) | of_model(known) | {name: value for name, value in said.items() if value is not None}
    layers, hidden, total = _sizes(row, said, found)
    if layers is None or hidden is None:
        return {}
    heads = found.assumed(said, "heads", max(round(hidden / (128 if hidden >= 2048 else 64)), 1))
    kv_heads = said["kv_heads"] or heads
    experts, active, shared = _experts(said, name, found, WORDS["padded"].search(told_by(row).lower()))
    seq = said["seq"]
    if seq is None and model:
        seq = float(model.seq)
        found.inferred.append(f"seq={seq:g}")
    if seq is None:
        found.refused.append("it has no sequence length (seq_len)")
        seq = 1.0
    vocab = found.assumed(said, "vocab", 51200.0)
    if meant("pictures", name.lower()):
        found.refused.append("a part of its model is no transformer of these dimensions (it sees pictures)")
    told = meant("gated", text(row, "notes").lower())
    usual = told if told is not None else meant("families_gated", name.lower()) or experts > 0
    gated = float(bool(switch(text(row, "swiglu"))) or "glu" in text(row, "swiglu").lower() or (unsaid(row, "swiglu", found) and bool(usual)))
    family = " ".join(text(row, n) for n in ("model", "test_case", "arch")).lower()
    head_size = said["head_size"] or meant("heads", family) or hidden / heads  # of some families heads are wider together than the model
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    latent = (head_size == LATENT and head_size != hidden / heads) or true(row, "mla") or true(row, "multi_latent_attention")
    latent |= bool(re.match("[1-9]", text(row, "kv_lora_rank"))) and switch(text(row, "multi_latent_attention")) is None  # Megatron's has a default
    said_tied = switch(text(row, "tied"))
    rest = (total or 0.0) * 1e9 - layers * attention - (1 if said_tied else 2) * vocab * hidden
    if experts:
        ffn = said["moe_ffn"]
        if ffn is None and rest > 0:
            ffn = max(round(rest / (layers * experts * hidden * (2 + gated)) / 64), 1) * 64.0
            found.inferred.append(f"an expert's width {ffn:.0f} of {total:g}B parameters")
        ffn = ffn or said["ffn"] or 4 * hidden
    else:
        ffn = found.assumed(said, "ffn", 4 * hidden)
        if total and rest > 0 and told is None:  # which of the two number of matrices gives the parameters that it has
            gated = float(abs(rest - 3 * layers * hidden * ffn) < abs(rest - 2 * layers * hidden * ffn))
    tied = not switch(text(row, "untie")) if not unsaid(row, "untie", found) else (not gated if said_tied is None else said_tied)
    if known and told is None and switch(text(row, "swiglu")) is None and said["ffn"] in (None, known.ffn, known.plain_ffn):
        gated = float(known.gated)
    if known and said_tied is None and switch(text(row, "untie")) is None:
        tied = known.tied
    if gated and not model and unsaid(row, "swiglu", found):
        found.inferred.append("swiglu=true")
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": head_size,
        "compressed": compressed(hidden, heads, 1536 if hidden > 2048 else 0) if latent else 0.0,
        "ffn": ffn, "gated": gated, "seq": seq, "vocab": vocab, "experts": experts, "active": active, "shared": shared,
        "tied": float(tied), "window": float(known.window) if known else 0.0, "windowed": known.windowed if known else 0.0,
        "plain": float(known.plain) if known and experts and layers == known.layers else 0.0, "plain_ffn": float(known.plain_ffn if known and known.plain_ffn else ffn),
    }  # fmt: skip


def unsaid(row: Mapping[str, str], name: str, found: Row) -> bool:
    """Whether a row is silent of a flag; what the tests of Megatron-LM, whose rows are their flags, do not set is off."""
    return found.framework != TESTS and bool(SILENT.fullmatch(cell := text(row, name))) and cell.lower() != "none"


def _sizes(row: Mapping[str, str], said: Said, found: Row) -> tuple[float | None, float | None, float | None]:
    """Layers, their width, and billions of parameters, where anything tells these; None in the place of the first two: the row is refused."""
    layers, hidden, total = said["layers"], said["hidden"], said["params_b"]
    if layers is not None and hidden is not None:
        return layers, hidden, total
    why = meant("partly", plain_name(text(row, "model")))
    if not total and not why and not said["experts"] and (size := SIZED.search(text(row, "model").lower())):
        total = float(size[1])
    if total is None or (why and "decoder" in why):
        found.refused.append("it has neither layers and hidden nor params_b, nor the name of a published model" + (f" ({why})" if why else ""))
        return None, None, total
    stages = (said["pp"] or 1.0) * max(said["chunks"] or 1.0, 1.0)
    layers, hidden = _shape_of(total * 1e9, layers, hidden, stages)
    found.inferred.append(f"layers={layers:g}, hidden={hidden:g} of {total:g}B parameters")
    return layers, hidden, total


def called(row: Mapping[str, str]) -> str:
    """All that a row calls its model."""
    lora = "" if switch(text(row, "lora")) is False or SILENT.fullmatch(text(row, "lora")) else "lora"
    names = ("model", "test_case", "arch", "peft", *["shard"] * bool(re.search(r"(?i)lora|peft", text(row, "shard"))))
    return " ".join([*(text(row, name) for name in names), lora])


def _meant(row: Mapping[str, str], said: Said) -> Model | None:
    """The published model of a row's name; None where the row means another one of that name."""
    model = named(text(row, "model"))
    if model is None:
        return None
    whole = (said["layers"], said["hidden"])
    other = all(whole) and whole != (model.layers, model.hidden)
    return None if other or (said["params_b"] and abs(model.parameters / said["params_b"] / 1e9 - 1) > 0.2) else model


def _lacks(row: Mapping[str, str], said: Said, model: Model) -> bool:
    """Whether a row leaves something out that the published model says."""
    experts = ["experts"] * bool(model.experts and not MOE.search(called(row)))
    needed = ["layers", "hidden", "heads", "moe_ffn" if model.experts and said["moe_ffn"] else "ffn", "vocab", *experts]
    return any(said[name] is None for name in needed)


def of_model(model: Model) -> Said:
    """What a published model's row would say."""
    found: Said = {name: getattr(model, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_size")}  # fmt: skip
    if model.experts:
        routed = model.active - model.shared
        found |= {"experts": model.experts, "topk": routed, "shared": model.shared, "moe_ffn": model.ffn}
    return found


def _experts(said: Said, name: str, found: Row, padded: re.Match[str] | None) -> tuple[float, float, float]:
    """Experts of a layer, those that a token goes to, slots kept free for it included, and of these those that each token goes to."""
    parts = [float(part or 0) for part in told.groups()] if (told := MOE.search(name)) else [0.0, 0.0, 0.0]
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
    return experts, routed * float(padded[1] if padded else 1) + shared, shared


def _shape_of(parameters: float, layers: float | None, hidden: float | None, stages: float) -> tuple[float, float]:
    """Layers and hidden size of 12 l h^2 parameters, with h = 128 l where neither is known (arXiv 2001.08361, 3.3).

    Layers are a multiple of the pipeline's stages, as programs ask for.
    """
    if layers is None:
        free = (parameters / 12 / 128**2) ** (1 / 3) if hidden is None else parameters / 12 / hidden**2
        layers = max(round(free / stages), 1) * stages
    if hidden is None:
        hidden = max(round((parameters / 12 / layers) ** 0.5 / 128), 1) * 128.0
    return layers, hidden


def adapters_of(row: Mapping[str, str], q: Mapping[str, float], found: Row) -> float:
    """Parameters of a layer's adapters: of each matrix but experts' two of the rank's width (LoRA, arXiv 2106.09685, 4.1)."""
    column = next((cell for name in ("lora_rank", "lora_r") if re.fullmatch(r"[1-9]\d*", cell := text(row, name))), "")
    told = RANK.search(f"{called(row)}; {text(row, 'notes')}")
    if not column and not told:
        found.inferred.append(f"lora_rank={USUAL_RANK}")
    rank = float(column or (told[1] if told else USUAL_RANK))
    width = q["heads"] * q["head_size"]
    each = re.search(ON_EXPERTS, affirmed(f"{told_by(row)}; {called(row)}"))
    own = (q["experts"] / q["ep"] if each else 0.0) if q["experts"] else 1 - q["spared"]
    mlp = own * (2 + q["gated"]) * (q["hidden"] + q["ffn"])
    return rank * (4 * q["hidden"] + 2 * width * (1 + q["kv_heads"] / q["heads"]) + mlp)


def attention_of(row: Mapping[str, str], point: Mapping[str, float], found: Row) -> dict[str, float]:
    """Whether scores are kept, and the windows that a kernel keeps to."""
    backend, notes = text(row, "attn_backend").lower(), text(row, "notes").lower()
    said = f"{backend} {notes} {text(row, 'framework').lower()}"
    told = WORDS["window"].search(f"{said} {text(row, 'arch').lower()}")
    kernel = _kernel(row, point, found, backend, notes, said)
    # Where nothing is told of a published model's windows, a mask that is given to torch's attention leaves nothing out.
    keeps = bool(kernel) and bool(told or found.framework == MEGATRON or meant("attends", f"{backend} {notes}"))
    windows = _windows(told, said, point) if keeps else {"window": 0.0, "windowed": 0.0}
    if meant("documents", said) and not windows["windowed"]:
        found.inferred.append("attention=over the whole sequence, not within its documents or windows")
    return {"flash": kernel, **windows}


def _windows(told: re.Match[str] | None, said: str, point: Mapping[str, float]) -> dict[str, float]:
    """Those that a row tells, or else its published model has."""
    if told is None:
        return {"window": point.get("window", 0.0), "windowed": point.get("windowed", 0.0)}
    each = sum(int(n) for one in WORDS["local_each"].findall(said)[:1] for n in one if n)
    share = each / (each + 1) if each else 0.5 if tells("local_others", said) else point.get("windowed") or 1.0
    size, thousands = told[1] or told[3], told[2] or told[4]
    return {"window": float(size.replace(",", "")) * (1024 if thousands else 1), "windowed": share}


def _kernel(row: Mapping[str, str], point: Mapping[str, float], found: Row, backend: str, notes: str, said: str) -> float:
    """Whether attention keeps no scores."""
    speaks = not SILENT.fullmatch(backend)
    kind = meant("attention", backend) if speaks else None
    if speaks and kind is None:
        found.inferred.append(f"attention: '{backend}' is not understood")
    if kind is None:  # a program may be named by what a column says that this run is without
        kind = meant("attends", notes if speaks else said)
    # Megatron-LM's long-term-support image has no flash attention that is deterministic.
    old = true(row, "deterministic") and text(row, "env") == "lts" and "flash" not in said
    if old or text(row, "impl") == "local":
        kind = False
    if kind is not None:
        return float(kind)
    if (found.framework in FLASH and not found.plain) or found.generation in FLASH_SINCE:
        return 1.0
    # Of those that FlashAttention runs on, models with gates and long sequences came after it.
    since = point.get("gated") or point.get("seq", 0.0) > LONG or (found.plain and meant("second_torch", affirmed(said)))
    later = found.generation in ("ampere", "cdna2") and since
    found.inferred.append(f"{KERNEL}{'flash' if later else 'scores kept'}")
    return float(bool(later))
