"""Families of transformers by a configuration's `model_type`: whose dimensions are all that there is to know.

Each was built by transformers from its own defaults and has the parameters that its dimensions give, within 3%
(tests/test_configurations.py does it again). Whether an MLP has a gate, and so a third matrix (Shazeer, arXiv 2002.05202), is the
family's and not its activation's: StarCoder2 and Gemma say the same one. What a family's program does where a
configuration does not say `tie_word_embeddings` is here too.
"""

from __future__ import annotations

from dataclasses import dataclass

_PLAIN_TIED = (
    "bert", "bert-generation", "biogpt", "bloom", "camembert", "data2vec-text", "deberta", "deberta-v2", "ernie", "falcon",
    "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "ibert", "jina_embeddings_v3", "megatron-bert", "mpnet",
    "openai-gpt", "opt", "roberta", "roberta-prelayernorm", "roformer", "starcoder2", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
_PLAIN = ("apertus", "arcee", "codegen", "gpt_neox", "gptj", "jais2", "nanochat", "persimmon", "phi")
_GATED_TIED = (
    "cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "modernbert", "nomic_bert", "smollm3", "vaultgemma",
)  # fmt: skip
_GATED = (
    "bitnet", "cwm", "diffllama", "dots1", "eurobert", "exaone4", "glm", "glm4", "gpt_oss", "granite", "granitemoe", "helium",
    "hyperclovax", "internlm3", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe",
    "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "solar_open", "stablelm",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What a family's program does."""

    gated: bool
    tied: bool


FAMILIES = {
    **dict.fromkeys(_PLAIN_TIED, Family(gated=False, tied=True)),
    **dict.fromkeys(_PLAIN, Family(gated=False, tied=False)),
    **dict.fromkeys(_GATED_TIED, Family(gated=True, tied=True)),
    **dict.fromkeys(_GATED, Family(gated=True, tied=False)),
}
