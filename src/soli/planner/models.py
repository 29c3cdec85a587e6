"""A transformer by its dimensions; read from a Hugging Face config.json: no weights, no network, no library.

Of a family of transformers (a configuration's `model_type`, families.toml) the dimensions are all that there is to know: each was built by
transformers from its own defaults and has the parameters that its dimensions give, within 3% (tests/test_configurations.py does it again).
Whether an MLP has a gate, and so a third matrix (Shazeer, arXiv 2002.05202), is the family's and not its activation's: StarCoder2 and Gemma
say the same one. What a family's program does where a configuration does not say `tie_word_embeddings` is there too.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from soli.core.errors import Problem, SoliError, raise_all
from soli.core.tables import table
from soli.planner.cost import memory
from soli.planner.cost.points import Points, points

FAMILIES = {kind: (one["gated"], one["tied"]) for one in table(__package__, "families.toml")["family"] for kind in one["of"]}
"""Whether a family's MLPs have a gate, and whether its first table is the last one too."""
_KEYS = table(__package__, "configurations.toml")
NAMES: dict[str, list[str]] = _KEYS["dimensions"]
"""A dimension, and the keys under which configurations have it."""
WINDOWED: dict[str, float] = _KEYS["windowed"]
"""Of a family's layers those with windows, where its configuration does not say which."""
PADDED: list[str] = _KEYS["positions"]["padded"]
ENCODERS: list[str] = _KEYS["positions"]["both_ways"]
MOST = 10**9
NEEDED = ("layers", "hidden", "heads", "vocab")
GATED = ("silu", "swiglu", "gelu_pytorch_tanh", "swigluoai", "chatglm")
"""Activations, and families that say none, whose MLPs mostly have a gate, for families that nobody compared (families.toml)."""
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function")
STRANGE = {what: "|".join(patterns) for what, patterns in _KEYS["strange"].items()}
"""What models have whose layers are not all alike, or are not what the dimensions say; and the keys that tell of it."""
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
NARROW = ("embedding_size", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size")
PARTS = ("text_config", "attn_config", "ffn_config")
"""Of a configuration, whose keys count as its own."""
SHARED = ("llama4", "llama4_text")
"""Whose tokens all go to one expert more, which no key says."""
BEFORE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
TRACED = "plan FILE.py:NAME, a function that returns the model and a batch: what is traced is understood, or refused by its layers"
TOWER = re.compile(r"(?:vision|audio|speech|image|acoustic|semantic|encoder|projector)\w*_config")


@dataclass(frozen=True)
class Model:
    """A stack of like layers between an embedding and logits."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    gated: bool
    vocab: int
    experts: int
    active: float  # of a token, 1 where there are none
    tied: bool
    seq: int  # the longest that it was made for; 0: not said
    shared: int = 0  # of the active experts those that each token goes to
    compressed: int = 0  # parameters of a layer's attention, where its keys are compressed
    flash: bool = True  # attention's scores are not kept in memory
    both_ways: bool = False  # no causal mask
    plain: int = 0  # layers of a mixture that have one MLP in the place of experts
    plain_ffn: int = 0
    windowed: float = 0.0  # of its layers those whose attention reads so many tokens before each
    window: int = 0

    @property
    def parameters(self) -> float:
        """Of all layers and tables."""
        return float(memory.parameters(self._alone())[0])

    @property
    def used(self) -> float:
        """Parameters without the experts that a token does not go to."""
        return float(memory.used(self._alone())[0])

    def _alone(self) -> Points:
        return points([{**dict.fromkeys((field.name for field in fields(Points)), 1.0), **self.point()}])

    def point(self) -> dict[str, float]:
        """The model's part of a point."""
        return {"frozen": 0.0} | {name: float(value) for name, value in vars(self).items() if name not in ("name", "seq")}


def read_model(path: Path, near: Sequence[str] = ()) -> tuple[Model, tuple[str, ...]]:
    """The model of a config.json, or of the directory that has one, and what was inferred. SoliError with every problem.

    `near`: names of published models that may have been meant."""
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        said = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        allowed = "a Hugging Face config.json, the directory that has one, FILE.py:NAME, or a published model's name"
        allowed += f" ({', '.join(near)})" if near else ""
        raise SoliError("the model cannot be read", got=f"{file}: {error.strerror}", allowed=allowed) from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits, brackets in 100,000 others
        allowed = "a Hugging Face config.json, or the directory that has one"
        raise SoliError("the model is no config.json", got=f"{file}: {error}", allowed=allowed) from error
    if not isinstance(said, Mapping):
        raise SoliError("the model is no config.json", got=f"{file}: no object of JSON")
    for part in PARTS:
        inner = said.get(part)
        inner = inner if isinstance(inner, Mapping) else {}
        said = {**said, **inner} if part == "text_config" else {**inner, **said}
    return _model(file, {key: value for key, value in said.items() if value is not None})


def _model(file: Path, said: Mapping[str, Any]) -> tuple[Model, tuple[str, ...]]:
    numbers = {name: _number(said, keys) for name, keys in NAMES.items()}
    missing = () if said.get("is_encoder_decoder") else _missing(file, said, numbers)  # such name them twice, with prefixes
    raise_all([*_strange(file, said, numbers["hidden"]), *missing, *_unreadable(file, said)])
    raise_all(_contradictions(file, numbers))
    layers, hidden, heads, vocab = (numbers[name] or 0 for name in NEEDED)
    experts = 0 if said.get("is_moe") is False else numbers["experts"] or 0
    kind = str(said.get("model_type", ""))
    shared = (numbers["shared"] or _shared(said) or int(kind in SHARED)) if experts else 0
    if said.get("multi_query_attention") is False:  # ChatGLM's, which says a number all the same
        numbers["kv_heads"] = None
    one_key = bool(said.get("multi_query")) and not said.get("new_decoder_architecture")  # Falcon says both
    activation = str(next((said[key] for key in ACTIVATIONS if said.get(key)), ""))
    usual = {"kv_rank": 0, "q_rank": 0, "nope": 128, "rope": 64, "values": hidden // heads if kind == "minicpm3" else 128}
    latent = {name: numbers[name] or (0 if NAMES[name][0] in said else size) for name, size in usual.items()} if numbers["kv_rank"] else {}
    gated, tied = FAMILIES.get(kind, (not {activation, kind}.isdisjoint(GATED) or (experts > 0 and not activation), True))
    wide, plain = numbers["ffn"] or 4 * hidden, _plain(said, layers) if experts else 0
    padded = kind in PADDED and isinstance(said.get("pad_token_id", 1), int)
    before_first = said.get("pad_token_id", 1) + 1 if padded else 0  # positions that count from after the padding's index leave these free
    model = Model(
        name=str(said.get("_name_or_path") or kind or file.parent.name), layers=layers, hidden=hidden, heads=heads,
        kv_heads=1 if one_key else numbers["kv_heads"] or heads,
        head_size=sum(latent[name] for name in ("nope", "rope", "values")) // 2 if latent else numbers["head_size"] or hidden // heads,
        ffn=(numbers["expert_ffn"] if experts else None) or wide, gated=gated, vocab=vocab, experts=experts,
        active=(numbers["routed"] or 1) + shared if experts else 1, shared=shared, seq=max((numbers["seq"] or 0) - before_first, 0),
        tied=bool(said.get("tie_word_embeddings", tied)), compressed=int(compressed(hidden, heads, **latent)) if latent else 0,
        plain=plain, plain_ffn=(numbers["plain_ffn"] or wide) if plain else 0, **_windows(kind, said, layers),
        both_ways=kind in ENCODERS and not said.get("is_decoder"),
    )  # fmt: skip
    return model, tuple(_inferred(kind, said, numbers, model))


def compressed(hidden: float, heads: float, q_rank: float, kv_rank: float = 512, nope: float = 128, rope: float = 64, values: float = 128) -> float:  # fmt: skip
    """Parameters of a layer's latent attention (MLA, arXiv 2405.04434, 2.1): `q_rank` 0 where queries are whole. `nope`, `rope`, `values`: of a
    head's query without and with positions, and of its values."""
    queries = (hidden + heads * (nope + rope)) * q_rank if q_rank else hidden * heads * (nope + rope)
    return queries + (hidden * (kv_rank + rope) + kv_rank * heads * (nope + values)) + heads * values * hidden


def _missing(file: Path, said: Mapping[str, Any], numbers: Mapping[str, int | None]) -> Iterator[Problem]:
    for name in (name for name in NEEDED if numbers[name] is None):
        there = ", ".join(f"{k}={json.dumps(said[k])}" for k in NAMES[name] if k in said) or ", ".join(k for k in said if isinstance(said[k], int))
        allowed = " or ".join(NAMES[name]) + f", a whole number from 1 to {MOST - 1:,}"
        yield Problem(f"{file} does not say the model's {name}", got=there[:200], allowed=allowed, fix=TRACED)


def _unreadable(file: Path, said: Mapping[str, Any]) -> Iterator[Problem]:
    """Sizes beside the needed ones that are there and say no size: they would be taken as not there. 0 and -1 say that there is none."""
    for key in (key for name, keys in NAMES.items() if name not in NEEDED for key in keys if key in said):
        endless = key in NAMES["seq"] and isinstance(said[key], int | float) and said[key] >= MOST  # transformers' word for no limit
        if not endless and not isinstance(said[key], list | dict) and said[key] not in (0, -1, False) and _number(said, [key]) is None:
            allowed = f"a whole number from 1 to {MOST - 1:,}, without quotes; or without this key"
            yield Problem(f"{file}: {key} is no size", got=json.dumps(said[key])[:80], allowed=allowed)
    tied = said.get("tie_word_embeddings", False)
    if not isinstance(tied, int):
        yield Problem(f"{file}: tie_word_embeddings says neither", got=json.dumps(tied)[:80], allowed="true or false")
    kinds = said.get("layer_types")
    layers = _number(said, NAMES["layers"])
    if isinstance(kinds, list) and kinds and layers and len(kinds) < layers:
        yield Problem(f"{file}: layer_types has {len(kinds)} layers, and the model {layers}")


def _windows(kind: str, said: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """How many tokens attention reads, and in which part of the layers. Within chunks a token reads half of one in the mean, as of a window of half its size."""
    window, chunk, every, first = (_number(said, [key]) for key in ("sliding_window", "attention_chunk_size", "sliding_window_pattern", "max_window_layers"))
    size, kinds, ropes = window or (chunk or 0) // 2, said.get("layer_types"), said.get("no_rope_layers")
    if WINDOWED.get(kind) == 0:
        share = 0.0
    elif isinstance(kinds, list) and kinds:
        share = 1 - kinds.count("full_attention") / len(kinds)
    elif isinstance(ropes, list) and ropes:  # Llama 4's: whole where there are no positions
        share = sum(map(bool, ropes)) / len(ropes)
    elif said.get("use_sliding_window") is False:
        share = 0.0
    elif first:
        share = max(1 - first / layers, 0.0)
    else:
        share = 1 - 1 / every if every else WINDOWED.get(kind, 1.0)
    return {"window": size, "windowed": share} if size > 0 and share > 0 else {}


def _shared(said: Mapping[str, Any]) -> int | None:
    """How many of its experts' widths a shared expert of its own width has; None where that is no whole number."""
    wide = said.get("shared_expert_intermediate_size", 0)
    one = said.get("moe_intermediate_size", said.get("intermediate_size"))
    whole = isinstance(wide, int) and isinstance(one, int) and one > 0 and wide % one == 0
    return wide // one if whole else (None if wide else 0)


def _plain(said: Mapping[str, Any], layers: int) -> int:
    """Layers of a mixture without experts, as programs of transformers read it."""
    whole = lambda key, usual: said[key] if isinstance(said.get(key), int) and said[key] > 0 else usual
    listed = lambda key: said[key] if isinstance(said.get(key), list) else []
    if kinds := listed("mlp_layer_types"):
        return kinds.count("dense")
    step, every = max(whole(key, 1) for key in STEPS), whole("moe_layer_freq", 1)
    first, last = max(map(partial(whole, usual=0), BEFORE)), whole("moe_layer_end_index", layers)
    marks = listed("moe_layer_freq") or [i % every == 0 for i in range(layers)]
    kept = (i for i in range(first, min(last + 1, layers, len(marks))) if marks[i] and i not in listed("mlp_only_layers"))
    return layers - sum((i + 1) % step == 0 for i in kept)


def _strange(file: Path, said: Mapping[str, Any], hidden: int | None) -> list[Problem]:
    forms = {key: (key, f"{key}={value}") for key, value in said.items() if value}
    keys = {key: what for what, pattern in STRANGE.items() for key, two in forms.items() if any(re.fullmatch(pattern, x) for x in two)}
    keys |= {key: "a table of another width" for key in NARROW if hidden and said.get(key, hidden) != hidden}
    own = lambda x: isinstance(x, list) and x.count(x[0]) != len(x)
    keys |= {key: "a size of each layer's own" for names in NAMES.values() for key in names if said.get(key) and own(said[key])}
    if list(keys.values()).count(keys.get("model_type", "")) > 1:  # another key says it too
        del keys["model_type"]
    if _shared(said) is None:
        keys["shared_expert_intermediate_size"] = "a shared expert of another width"
    if said.get("attn_type") == "multiquery_attention":
        keys["attn_type"] = "one key of all heads"
    kinds = said.get("layer_types")
    if isinstance(kinds, list) and not {str(kind) for kind in kinds} <= {*ATTENTION}:
        keys["layer_types"] = "layers of other kinds"
    told = {f"models with '{key}', {what}, are not understood yet": f"{file}: {key}={json.dumps(said[key])[:80]}" for key, what in keys.items()}
    return [Problem(what, got=got, fix=TRACED) for what, got in told.items()]


def _inferred(kind: str, said: Mapping[str, Any], numbers: Mapping[str, int | None], model: Model) -> list[str]:
    found = []
    if kind not in FAMILIES:
        named = f"models of the type '{kind}'" if kind else "models without a model_type"
        found.append(
            f"{named} were compared with no program: each layer is taken as attention and an MLP with{'' if model.gated else 'out'} a gate, "
            f"and {'one table is the first and the last' if model.tied else 'the first table and the last are two'}"
        )
    if numbers["ffn"] is None and numbers["expert_ffn"] is None and (model.gated or kind not in FAMILIES):  # others' own default, as GPT-2's
        found.append(f"ffn={model.ffn}, four times the width")
    if model.gated and numbers["kv_heads"] is None and model.kv_heads > 1:
        found.append(f"num_key_value_heads={model.kv_heads}, as many as heads")
    if model.experts and numbers["routed"] is None:
        found.append("each token goes to one expert")
    if model.plain:
        found.append(f"{model.plain} of its {model.layers} layers have an MLP of {model.plain_ffn} and no experts, and a stage has as many of both as the model")
    if model.window:
        found.append(f"{model.windowed:.0%} of its layers attend to {model.window} tokens before each, which takes less time in Megatron's kernels, as much in soli's")
    elif WINDOWED.get(kind) == 0:
        found.append("windows of its layers are left out: published runs of it took no less time for them")
    if further := said.get("num_nextn_predict_layers"):
        found.append(f"{further} layers that predict further tokens are left out")
    found += [f"{key} is left out, only text is planned" for key in said if TOWER.fullmatch(key) and said[key]]
    return found


def _number(said: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    alike = lambda x: x[0] if isinstance(x, list) and x and x.count(x[0]) == len(x) else x  # one of each layer
    found = (alike(said[key]) for key in keys if key in said)
    whole = (int(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool) and n == n // 1)
    return next((n for n in whole if 0 < n < MOST), None)


def _contradictions(file: Path, numbers: Mapping[str, int | None]) -> Iterator[Problem]:
    heads, kv_heads, hidden = numbers["heads"] or 1, numbers["kv_heads"], numbers["hidden"] or 1
    if kv_heads and heads % kv_heads:
        yield Problem(f"{file}: {kv_heads} key heads do not divide {heads} heads")
    if heads > hidden:
        yield Problem(f"{file}: {heads} heads share a width of {hidden}")
    if (numbers["routed"] or 0) > (numbers["experts"] or numbers["routed"] or 0):
        yield Problem(f"{file}: a token goes to {numbers['routed']} of {numbers['experts']} experts")


# Published models by name, where nothing else says their dimensions: published.toml has them, each with its source.


LAYERS = re.compile(r"(?:^|[-_ ])l([1-9]\d*)\b|\b([1-9]\d*)[-_ ]?layers?\b", re.I)
"""A name that says of how many layers a part of a model has: deepseek-v2-l4."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """The entries of published.toml."""
    return table(__package__, "published.toml")


def of_entry(name: str) -> Model:
    """The model of an entry."""
    dims = published()[name]["dims"]
    usual = {"kv_heads": dims["heads"], "head_size": dims["hidden"] // dims["heads"], "gated": False, "tied": False}
    said = {**usual, "experts": 0, **dims}
    active = said.pop("routed") + said.get("shared", 0) if said["experts"] else 1
    return Model(name=name, active=active, **said)


def plain_name(text: str) -> str:
    """A name as `match` has it: without its publisher, and 1.3B is not 13B."""
    words = re.sub(r"(?<=\d) ?billion", "b", re.sub(r"^[\w.-]+/(?=[a-z])", "", text.lower().replace("×", "x")))
    return re.sub(r"[-_ ./()]", "", re.sub(r"(?<=\d)\.(?=\d)", "p", words))


def named(text: str) -> Model | None:
    """The published model that a name means, with as many layers as the name says; None if it means none."""
    plain = plain_name(text)
    entry = next((name for name, one in published().items() if re.search(one["match"], plain)), None)
    if entry is None or re.search(r"distill|vl\d|vl$|vision", plain):  # as large as others, of other programs
        return None
    model, part = of_entry(entry), LAYERS.search(text)
    layers = int(part[1] or part[2]) if part else model.layers
    return replace(model, layers=layers, plain=model.plain * (layers == model.layers))


def near(text: str) -> list[str]:
    """The names that are most alike."""
    return difflib.get_close_matches(text.lower(), published(), n=3, cutoff=0.4)
