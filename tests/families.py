"""Small models of transformers' families that soli has no code for, with their default options."""

from __future__ import annotations

from typing import Any

import torch

from soli import losses
from soli.verify.parity import Case, adamw

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 16,
}
PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SMALL | PAD | {"num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 6}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 4}),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "cohere": ("CohereForCausalLM", GROUPED),
    "neox": ("GPTNeoXForCausalLM", SMALL),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 37}),
    "falcon": (
        "FalconForCausalLM",
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 37} | PAD,
    ),
    "gptj": (
        "GPTJForCausalLM",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 37, "n_positions": 16, "rotary_dim": 4},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "vocab_size": 37,
            "max_position_embeddings": 16,
        }
        | PAD,
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 37},
    ),
    "roberta": ("RobertaForMaskedLM", SMALL),
    "bitnet": ("BitNetForCausalLM", GROUPED),  # a norm over all heads: keys and values are cut, queries are not
    "bigbird": ("BigBirdForMaskedLM", SMALL | PAD),  # replaces its attention while it runs
    "xlm": (  # masks expanded as scores
        "XLMWithLMHeadModel",
        {"emb_dim": 16, "n_layers": 2, "n_heads": 4, "n_words": 37, "max_position_embeddings": 16} | PAD,
    ),
    "data2vec": (  # stochastic depth
        "Data2VecVisionForImageClassification",
        {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        | {"image_size": 8, "patch_size": 4, "num_labels": 5, "drop_path_rate": 0.3},
    ),
    "mixtral": (
        "MixtralForCausalLM",  # the grouped product of torch has no float64
        GROUPED | {"num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "deepseek": (  # latent attention; experts of any number of tokens, none among them
        "DeepseekV3ForCausalLM",
        SMALL
        | PAD
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12}
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 4, "experts_implementation": "eager"},
    ),
}
UNSHIFTED = ("MaskedLM", "ConditionalGeneration", "XLMWithLMHeadModel", "Classification")


def case(name: str) -> Case:
    """Three batches, the first rows without counted targets."""
    kind, options = FAMILIES[name]

    def make() -> Any:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(31)
        build = getattr(transformers, kind)
        model = build(build.config_class(**options))
        generator = torch.Generator().manual_seed(5)
        batches = []
        for rows in (8, 7, 9):
            if kind.endswith("ImageClassification"):
                pixels = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
                batches.append({"pixel_values": pixels, "labels": torch.randint(5, (rows,), generator=generator)})
                continue
            tokens = torch.randint(3, 37, (rows, 6), generator=generator)
            labels = tokens.clone()
            labels[: rows // 3] = losses.IGNORE
            batches.append({"input_ids": tokens, "labels": labels})
        return model, losses.from_model(shifted=not kind.endswith(UNSHIFTED)), batches

    return Case(name, make, adamw)
