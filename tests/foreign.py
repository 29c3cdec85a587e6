"""Parity cases made of Hugging Face models as they are: small configurations, their own losses and dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from soli import losses

VOCAB, LENGTH = 37, 6
IGNORE = losses.IGNORE
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}


def _batches(rows: list[int], *, masked_share: float, padded: bool) -> list[dict[str, Tensor]]:
    """Rows of tokens; some labels do not count, all of the first row's, and some rows end in padding."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for n in rows:
        tokens = torch.randint(3, VOCAB, (n, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[torch.rand(n, LENGTH, generator=generator) < masked_share] = IGNORE
        labels[: n // 2] = IGNORE
        mask = torch.ones_like(tokens)
        if padded:
            mask[-1, LENGTH - 2 :] = 0
            labels[-1, LENGTH - 2 :] = IGNORE
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return made


def hf_gpt2() -> Any:
    """Conv1D layers, tied head, dropout in four places, the model's own causal loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(21)
    config = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=12, n_layer=2, n_head=3, **NO_TOKENS)
    return GPT2LMHeadModel(config), losses.from_model(), _batches([8, 8, 5], masked_share=0.3, padded=False)


def _causal(kind: str, seed: int, **options: Any) -> Any:
    """A causal model of the Llama kind: two layers, dropout in attention, no key-value cache."""
    import transformers

    torch.manual_seed(seed)
    build = getattr(transformers, f"{kind}ForCausalLM")
    common = {
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "max_position_embeddings": LENGTH,
        "attention_dropout": 0.1,
        "use_cache": False,
    }
    return build(build.config_class(**(common | NO_TOKENS | options)))


def hf_llama() -> Any:
    """Grouped queries, rotary positions, RMS norms in float32, padding, and blocks recomputed in backward."""
    model = _causal("Llama", 22, hidden_size=12, intermediate_size=20, num_attention_heads=6, num_key_value_heads=2)
    model.gradient_checkpointing_enable()
    return model, losses.from_model(), _batches([8, 9, 8], masked_share=0.0, padded=True)


def hf_qwen2() -> Any:
    """Grouped queries with biases, a tied head, the middle of the batch padded."""
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = _causal("Qwen2", 25, **sizes, tie_word_embeddings=True)
    return model, losses.from_model(), _batches([8, 9, 8], masked_share=0.2, padded=True)


def hf_mistral() -> Any:
    """A window of attention shorter than the rows; heads wider than the model over their number."""
    sizes = {"hidden_size": 12, "intermediate_size": 21, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = _causal("Mistral", 26, **sizes, head_dim=6, sliding_window=3)
    return model, losses.from_model(), _batches([8, 8, 7], masked_share=0.0, padded=False)


def hf_opt() -> Any:
    """Learned positions with an offset, biases everywhere, ReLU, an embedding narrower than the model."""
    sizes = {"hidden_size": 12, "word_embed_proj_dim": 6, "ffn_dim": 20, "num_attention_heads": 3}
    model = _causal("OPT", 27, **sizes, dropout=0.1, layerdrop=0.0, pad_token_id=1)
    return model, losses.from_model(), _batches([8, 9, 8], masked_share=0.3, padded=True)


def hf_vit() -> Any:
    """Patches by a convolution, a class token, the model's own loss over five classes."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(28)
    config = ViTConfig(
        **SMALL,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        problem_type="single_label_classification",
    )
    generator = torch.Generator().manual_seed(6)
    batches = [
        {"pixel_values": torch.randn(n, 3, 8, 8, generator=generator).double(), "labels": torch.arange(n) % 5}
        for n in (8, 9, 7)
    ]
    return ViTForImageClassification(config), losses.from_model(shifted=False), batches


def hf_bert() -> Any:
    """A masked language model: the labels are not shifted, and most do not count."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(23)
    config = BertConfig(**SMALL, vocab_size=VOCAB, max_position_embeddings=LENGTH)
    batches = _batches([8, 7, 9], masked_share=0.6, padded=True)
    return BertForMaskedLM(config), losses.from_model(shifted=False), batches


def hf_t5() -> Any:
    """Encoder and decoder, one embedding used three times, relative positions held by the first blocks."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(24)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=12,
        d_kv=4,
        d_ff=20,
        num_layers=2,
        num_heads=3,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,  # a key-value cache that blocks write into cannot be recomputed
    )
    batches = _batches([8, 8, 9], masked_share=0.2, padded=True)
    return T5ForConditionalGeneration(config), losses.from_model(shifted=False), batches


MAKERS = (hf_gpt2, hf_llama, hf_bert, hf_t5, hf_qwen2, hf_mistral, hf_opt, hf_vit)
