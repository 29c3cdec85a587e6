"""What configurations say, beside the programs that transformers builds of them; what they leave out, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from soli.core.errors import SoliError
from soli.planner.models import FAMILIES, Model, read_model
from typed import soli

NEAR = 0.03
NEEDS = {
    "llama": {"num_key_value_heads": 8, "hidden_size": 4096, "num_attention_heads": 32},
    "gpt2": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "dots1": {
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 0,
        "moe_intermediate_size": 1408, "hidden_size": 2048, "num_hidden_layers": 8,
    },
    "deepseek_v2": {
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408, "topk_method": "greedy",
    },
}  # fmt: skip
"""Of families that do not run by their own defaults, or say less by them."""
COMPARED = "5.23"
"""The version of transformers that the families were compared with: it has all of them."""
DIMENSIONS = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


def read(folder: Path, **said: Any) -> tuple[Model, tuple[str, ...]]:
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return read_model(folder)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_has_the_parameters_that_its_dimensions_give(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING and Version(transformers.__version__) < Version(COMPARED):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = transformers.CONFIG_MAPPING[kind](**NEEDS.get(kind, {}))
    causal = kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    build = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        there = sum(p.numel() for p in build.from_config(config).parameters())
    config.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    model, inferred = read(tmp_path, **said)
    assert "compared with no program" not in str(inferred)
    assert model.parameters == pytest.approx(there, rel=NEAR)
    of = lambda *names: next((getattr(config, name) for name in names if hasattr(config, name)), 0)
    active = of("num_experts_per_tok", "moe_k") if model.experts else 1
    wide = of("shared_expert_intermediate_size") // (of("moe_intermediate_size") or 1)
    assert model.shared == (of("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or wide)
    assert model.active == active + model.shared
    # What programs do by themselves need not be said.
    assert model.tied == config.tie_word_embeddings == FAMILIES[kind][1]
    own = ("tie_word_embeddings", "hidden_act", "activation_function", "hidden_activation")
    assert read(tmp_path, **{key: value for key, value in said.items() if key not in own})[0] == model


@pytest.mark.parametrize(
    ("kind", "said", "plain"),
    [
        ("qwen2_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, 4),
        ("qwen3_moe", {"num_hidden_layers": 5, "mlp_only_layers": [0, 4], "moe_intermediate_size": 256}, 2),
        ("dots1", NEEDS["dots1"] | {"first_k_dense_replace": 3, "intermediate_size": 10944}, 3),
        ("ernie4_5_moe", {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_start_index": 2}, 4),
    ],
)
def test_layers_without_experts_have_the_parameters_of_the_program(
    kind: str, said: dict[str, Any], plain: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**said)
    with torch.device("meta"):
        there = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    config.save_pretrained(tmp_path)
    model, _ = read_model(tmp_path)
    assert model.plain == plain
    assert model.parameters == pytest.approx(there, rel=NEAR)


def test_an_activation_that_nobody_wrote_is_the_family_s(tmp_path: Path) -> None:
    """Llama 3 of 8 billion parameters, 6.2 of them without its gates."""
    model, inferred = read(tmp_path, model_type="llama", **DIMENSIONS)
    assert model.parameters == pytest.approx(8.03e9, rel=0.001)
    assert not inferred


def test_a_family_that_nobody_compared_is_said(tmp_path: Path) -> None:
    for kind, gate in (("mine", "with a gate"), ("", "without a gate")):
        model, inferred = read(tmp_path, model_type=kind, hidden_act="silu" if kind else "gelu", **DIMENSIONS)
        assert model.gated == (gate == "with a gate")
        assert len(inferred) == 1
        assert gate in inferred[0]
        assert (f"'{kind}'" if kind else "without a model_type") in inferred[0]
    done = soli("plan", str(tmp_path), "--cluster", "h100:8x1", "--global-batch", "8")
    assert "Read from the model: models without a model_type were compared with no program" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads=32, as many as heads"),
        ({"vision_config": {"hidden_size": 8}}, "vision_config is left out, only text is planned"),
        ({"encoder_config": {"hidden_size": 8}}, "encoder_config is left out, only text is planned"),
        ({"num_nextn_predict_layers": 1}, "1 layers that predict further tokens are left out"),
        ({"model_type": "gpt_oss", "sliding_window": 128}, "windows of its layers are left out: published runs of it took no less time for them"),
        ({"num_local_experts": 8, "num_experts_per_tok": [2, 2], "num_dense_layers": 3}, "3 of its 32 layers have an MLP of 14336 and no experts, and a stage has as many of both as the model"),
    ],
)
def test_what_a_configuration_leaves_out_is_said(said: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert read(tmp_path, **(DIMENSIONS | {"model_type": "llama"} | said))[1] == (expected,)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"mamba_d_state": 16}, "layers that are no attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of other kinds"),
        ({"embedding_size": 128}, "a table of another width"),
        ({"word_embed_proj_dim": 128}, "a table of another width"),
        ({"attn_type_list": [0, 1]}, "layers that are no attention"),
        ({"shared_expert_intermediate_size": 5000, "moe_intermediate_size": 1408}, "a shared expert of another width"),
        ({"num_hidden_groups": 1}, "layers that share their weights"),
        ({"hidden_size_per_layer_input": 256}, "tables beside the first"),
        ({"model_type": "gla"}, "layers that are no attention"),
        ({"model_type": "qwen"}, "MLPs that its other keys do not say"),  # each of half the width that it says
        ({"block_configs": [{"ffn": {"ffn_mult": 2.6}}]}, "sizes of each layer's own"),
        ({"moe_intermediate_size": [1536, 512]}, "a size of each layer's own"),
        ({"num_codebooks": 8}, "tables beside the first"),
    ],
)
def test_layers_that_are_not_what_the_dimensions_say_are_refused(
    said: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(SoliError, match=what) as refused:
        read(tmp_path, **({"model_type": "llama"} | DIMENSIONS | said))
    assert f"'{next(iter(said))}'" in str(refused.value)


def test_a_model_of_pictures_is_sent_to_its_program(tmp_path: Path) -> None:
    """A ViT's config.json has no vocabulary."""
    with pytest.raises(SoliError, match="does not say the model's vocab") as refused:
        read(tmp_path, model_type="vit", image_size=224, patch_size=16, **(DIMENSIONS | {"vocab_size": None}))
    assert "FILE.py:NAME" in refused.value.problems[0].fix


def test_parts_of_a_configuration_count_as_its_own(tmp_path: Path) -> None:
    """DBRX, by its card 132 billion parameters, 36 of them active; Llama 4 Scout's experts in every layer; ChatGLM3's names."""
    dbrx = {
        "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }  # fmt: skip
    model, _ = read(tmp_path, model_type="dbrx", **dbrx)
    assert model.parameters == pytest.approx(132e9, rel=0.01)
    assert (model.kv_heads, model.experts, model.active, model.gated) == (8, 16, 4, True)
    parts = {"attn_config": {"model_type": "", "tie_word_embeddings": True}, "tie_word_embeddings": False}
    assert not read(tmp_path, model_type="llama", **DIMENSIONS, **parts)[0].tied  # a part does not say what the whole does
    two, _ = read(tmp_path, model_type="mixtral", num_local_experts=4, shared_expert_intermediate_size=2 * 14336, **DIMENSIONS)
    assert two.shared == 2
    assert read(tmp_path, model_type="llama", moe_layer_interval=1, **DIMENSIONS)[0].layers == 32
    assert read(tmp_path, model_type="llama", interleave_moe_layer_step=1, **DIMENSIONS)[0].layers == 32
    glm = {"padded_vocab_size": 65024, "num_layers": 28, "multi_query_group_num": 2, "kv_channels": 128, "ffn_hidden_size": 13696}
    model, _ = read(tmp_path, model_type="chatglm", hidden_size=4096, num_attention_heads=32, tie_word_embeddings=False, **glm)
    assert (model.kv_heads, model.head_size, model.ffn, model.vocab) == (2, 128, 13696, 65024)
    assert model.parameters == pytest.approx(6.24e9, rel=0.01)
    whole = {**glm, "multi_query_attention": False}
    assert read(tmp_path, model_type="chatglm", hidden_size=4096, num_attention_heads=32, **whole)[0].kv_heads == 32


@pytest.mark.parametrize(
    ("said", "window", "share"),
    [
        ({"sliding_window": 4096}, 4096, 1), ({"sliding_window": None}, 0, 0), ({"sliding_window": True}, 0, 0), ({"sliding_window": 4096, "use_sliding_window": False}, 0, 0),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 24}, 4096, 1 / 4), ({"sliding_window": 1024, "sliding_window_pattern": 6}, 1024, 5 / 6),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16}, 128, 1 / 2), ({"model_type": "gemma2", "sliding_window": 4096}, 4096, 1 / 2),
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 8}, 4096, 3 / 4), ({"model_type": "gpt_oss", "sliding_window": 128}, 0, 0),
    ],
)  # fmt: skip
def test_windows_of_a_configuration(said: dict[str, Any], window: int, share: float, tmp_path: Path) -> None:
    """Which layers have one; within chunks a token reads half of one in the mean."""
    model, inferred = read(tmp_path, **{"model_type": "llama", **DIMENSIONS, **said})
    assert (model.window, model.windowed) == (window, pytest.approx(share))
    assert any(f"{share:.0%} of its layers attend to {window} tokens" in one for one in inferred) == (window > 0)


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"intermediate_size": "14336"}, "intermediate_size is no size"),
    ({"intermediate_size": -5}, "intermediate_size is no size"),
    ({"head_dim": "256"}, "head_dim is no size"),
    ({"num_key_value_heads": "8"}, "num_key_value_heads is no size"),
    ({"num_local_experts": "8", "num_experts_per_tok": "2"}, "num_experts_per_tok is no size"),
    ({"max_position_embeddings": "4096"}, "max_position_embeddings is no size"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings says neither"),
    ({"layer_types": ["full_attention"] * 10}, "layer_types has 10 layers, and the model 32"),
]


@pytest.mark.parametrize(("said", "words"), UNREADABLE)
def test_a_size_that_is_there_and_cannot_be_read_is_not_taken_as_not_there(tmp_path: Path, said: dict[str, Any], words: str) -> None:
    """A mixture with "8" experts was planned as a dense model, without a word."""
    with pytest.raises(SoliError) as refused:
        read(tmp_path, **{"model_type": "mixtral", **DIMENSIONS, **said})
    assert words in str(refused.value)


def test_sizes_that_say_that_there_is_none_are_none_and_a_width_that_is_guessed_is_said(tmp_path: Path) -> None:
    said = {name: x for name, x in DIMENSIONS.items() if name != "intermediate_size"}
    for endless in (-1, 10**30):
        model, inferred = read(tmp_path, **{"model_type": "llama", **said, "num_experts": 0, "max_position_embeddings": endless, "n_inner": None})
    assert (model.experts, model.ffn, model.seq) == (0, 4 * model.hidden, 0)
    assert f"ffn={model.ffn}, four times the width" in inferred
    assert not any("four times" in one for one in read(tmp_path, **{"model_type": "gpt2", **said})[1])


def test_layers_of_attention_over_windows_and_a_table_as_wide_as_the_model_are_understood(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 16
    assert read(tmp_path, model_type="llama", layer_types=kinds, embedding_size=4096, **DIMENSIONS)[0].layers == 32


def test_positions_that_begin_after_the_padding_are_fewer_than_their_table_has(tmp_path: Path) -> None:
    said = DIMENSIONS | {"max_position_embeddings": 514}
    for kind, pad, usable in (("roberta", 1, 512), ("xlm-roberta", 3, 510), ("bert", 1, 514)):
        assert read(tmp_path, **said, model_type=kind, pad_token_id=pad)[0].seq == usable
    assert read(tmp_path, **said, model_type="roberta")[0].seq == 512  # as its configuration has it, where none is said


def test_a_model_with_an_encoder_is_refused_for_it_alone(tmp_path: Path) -> None:
    """Whisper, whose heads are under names of their own."""
    whisper = {"model_type": "whisper", "is_encoder_decoder": True, "d_model": 512, "num_hidden_layers": 6, "vocab_size": 51865, "decoder_attention_heads": 8}
    with pytest.raises(SoliError, match="an encoder beside its decoder") as refused:
        read(tmp_path, **whisper)
    assert len(refused.value.problems) == 1


def test_strange_keys_and_missing_ones_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(SoliError) as refused:
        read(tmp_path, model_type="llama", hidden_size=64, vocab_size=100, num_attention_heads=4, layer_types=["recurrent"])
    assert len(refused.value.problems) == 2
    assert all(word in str(refused.value) for word in ("layer_types", "does not say the model's layers"))


LATENT = {"model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 1000, "kv_lora_rank": 512}


@pytest.mark.parametrize("wrong", [{"kv_lora_rank": "512"}, {"kv_lora_rank": -512}, {"kv_lora_rank": True}, {"qk_nope_head_dim": "128"}, {"v_head_dim": -128}])
def test_sizes_of_latent_attention_that_are_none_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LATENT | wrong))
    with pytest.raises(SoliError, match=f"{next(iter(wrong))} is no size"):
        read_model(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_what_python_reads_no_json_of_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SoliError, match="the model is no config"):
        read_model(tmp_path)


def test_values_of_minicpm3_are_as_wide_as_its_heads_share_where_nothing_says_it(tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    said = {"model_type": "minicpm3", "hidden_size": 2560, "num_hidden_layers": 62, "num_attention_heads": 40, "intermediate_size": 6400, "vocab_size": 73448}
    (tmp_path / "config.json").write_text(json.dumps(said | sizes))
    assert read_model(tmp_path)[0].parameters == pytest.approx(4.0739e9, rel=0.001)  # openbmb/MiniCPM3-4B, as transformers builds it
