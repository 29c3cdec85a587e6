"""A transformer by its dimensions; read from a Hugging Face config.json: no weights, no network, no library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from soli.core.errors import Problem, SoliError, raise_all
from soli.planner.cost import memory
from soli.planner.cost.points import Points, points

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "expert_ffn": ("moe_intermediate_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "routed": ("num_experts_per_tok", "moe_topk"),
    "shared": ("n_shared_experts",),
    "seq": ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
}
"""A dimension, and the keys under which configurations have it."""
MOST = 10**9
NEEDED = ("layers", "hidden", "heads", "vocab")
GATED = ("silu", "swiglu", "gelu_pytorch_tanh", "swigluoai")
"""Activations whose MLPs have a gate and so a third matrix (Shazeer, arXiv 2002.05202)."""
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function")
GATES = ("gemma", "gemma2", "gemma3_text")
STRANGE = (
    "is_encoder_decoder",
    "ffn_config",
    "attn_config",
    "interleave_moe_layer_step",
    "shared_expert_intermediate_size",
)
"""Keys of models whose layers are not all alike, or whose MLPs are not what the other keys say."""
UNGATED = (
    "phi",
    "phi1",
    "starcoder2",
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "bert",
    "gpt_bigcode",
)


NEUTRAL = tuple(field.name for field in fields(Points))


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
    active: int
    tied: bool
    seq: int  # the longest that it was made for; 0: not said
    shared: int = 0  # of the active experts those that each token goes to
    flash: bool = True  # attention's scores are not kept in memory

    @property
    def parameters(self) -> float:
        """Of all layers and tables."""
        return float(memory.parameters(points([{**dict.fromkeys(NEUTRAL, 1.0), **self.point()}]))[0])

    def point(self) -> dict[str, float]:
        """The model's part of a point."""
        return {
            "layers": self.layers, "hidden": self.hidden, "heads": self.heads, "kv_heads": self.kv_heads,
            "head_size": self.head_size, "ffn": self.ffn, "gated": float(self.gated), "vocab": self.vocab,
            "experts": self.experts, "active": self.active, "tied": float(self.tied), "flash": float(self.flash), "frozen": 0.0,
            "shared": self.shared,
        }  # fmt: skip


def read_model(path: Path) -> Model:
    """The model of a config.json, or of the directory that has one. SoliError with every problem."""
    try:
        file = path / "config.json" if path.is_dir() else path
        said = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SoliError(
            "the model cannot be read",
            got=f"{path}: {error.strerror}",
            allowed="a Hugging Face config.json, or the directory that has one",
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SoliError(
            "the model is no config.json",
            got=f"{file}: {error}",
            allowed="a Hugging Face config.json, or the directory that has one",
        ) from error
    if not isinstance(said, Mapping):
        raise SoliError("the model is no config.json", got=f"{file}: no object of JSON")
    inner = said.get("text_config")
    said = {**said, **(inner if isinstance(inner, Mapping) else {})}
    return _model(file, {key: value for key, value in said.items() if value is not None})


def _model(file: Path, said: Mapping[str, Any]) -> Model:
    numbers = {name: _number(said, keys) for name, keys in NAMES.items()}
    raise_all(
        [
            Problem(
                f"models with '{key}' are not understood yet",
                got=f"{file}: {key}={json.dumps(said[key])[:80]}",
            )
            for key in STRANGE
            if said.get(key)
        ]
        + [
            Problem(
                f"{file} does not say the model's {name}",
                got=", ".join(k for k in said if isinstance(said[k], int))[:200],
                allowed=" or ".join(NAMES[name]) + ", a whole number above 0",
            )
            for name in NEEDED
            if numbers[name] is None
        ]
    )
    raise_all(_contradictions(file, numbers))
    layers, hidden, heads, vocab = (numbers[name] or 0 for name in NEEDED)
    experts = numbers["experts"] or 0
    ffn = (numbers["expert_ffn"] if experts else None) or numbers["ffn"] or 4 * hidden
    kind = str(said.get("model_type", ""))
    one_key = bool(said.get("multi_query")) and not said.get("new_decoder_architecture")  # Falcon says both
    activation = str(next((said[key] for key in ACTIVATIONS if said.get(key)), ""))
    return Model(
        name=str(said.get("_name_or_path") or kind or file.parent.name),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if one_key else numbers["kv_heads"] or heads,
        head_size=numbers["head_size"] or hidden // heads,
        ffn=ffn,
        gated=(activation in GATED or kind in GATES) and kind not in UNGATED,
        vocab=vocab,
        experts=experts,
        active=(numbers["routed"] or 1) + (numbers["shared"] or 0) if experts else 1,
        tied=bool(said.get("tie_word_embeddings", True)),
        seq=numbers["seq"] or 0,
        shared=(numbers["shared"] or 0) if experts else 0,
    )


def _number(said: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    found = (said[key] for key in keys if key in said)
    whole = (int(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool) and n == n // 1)
    return next((n for n in whole if 0 < n < MOST), None)


def _contradictions(file: Path, numbers: Mapping[str, int | None]) -> list[Problem]:
    heads, kv_heads, hidden = numbers["heads"] or 1, numbers["kv_heads"], numbers["hidden"] or 1
    found = []
    if kv_heads and heads % kv_heads:
        found.append(Problem(f"{file}: {kv_heads} key heads do not divide {heads} heads"))
    if heads > hidden:
        found.append(Problem(f"{file}: {heads} heads share a width of {hidden}"))
    if (numbers["routed"] or 0) > (numbers["experts"] or numbers["routed"] or 0):
        found.append(Problem(f"{file}: a token goes to {numbers['routed']} of {numbers['experts']} experts"))
    return found
