"""Words of tables, many of each kind: what they come to of a row, and what is like them and means something else."""

from __future__ import annotations

import pytest
from tests.test_predict import ROW

from soli.planner.cost.points import FULL, NONE, SELECTIVE
from soli.planner.predict import predict
from soli.planner.rows import read
from soli.planner.spellings import program

TITAN = {"framework": "torchtitan"}
FSDP, MEGATRON = {"framework": "PyTorch FSDP", "shard": "FULL_SHARD"}, {"framework": "Megatron-LM"}

BERT = {"framework": "NVIDIA DeepLearningExamples (PyTorch)", "model": "BERT-large", "tp": "1", "dp": "32"}
LORA = FSDP | {"model": "a LoRA", "tied": "true", "vocab": "1"}  # of as good as no table


def each(row: dict[str, str], column: str, words: tuple[str, ...], **point: float) -> list[tuple[dict[str, str], dict[str, float]]]:
    return [(row | {column: word}, point) for word in words]


CASES = [
    *each(
        TITAN, "attention",
        ("standard attention", "vanilla", "PyTorch", "torch", "baseline", "no FA", "w/o FA", "no FA2", "without flash", "flash off", "FlashAttention: off",
         "flash-attn=False", "FlashAttention disabled", "non-fused", "PyTorch (standard)", "native PyTorch attention", "fused softmax", "dot_product",
         "without FlashAttention (standard)", "unoptimized", "HF baseline (standard attention)", "from scratch", "hand-written"), flash=0,
    ),
    *each(
        MEGATRON, "attention",
        ("standard SDPA", "PyTorch SDPA", "FlashAttention (no dropout)", "flash attention, no bias", "baseline + flash", "FA2", "v2", "2", "aiter", "cudnn_flash_te",
         "mem-efficient", "fused kernels", "xformers", "padded FMHA"), flash=1,
    ),
    *each(MEGATRON | {"attention": "PyTorch"}, "notes", ("flash-attn 2 elsewhere",), flash=0),
    *each({"framework": "FlashAttention's scripts"}, "attention", ("standard", "PyTorch"), flash=0),
    *each({"framework": "FlashAttention's scripts"}, "attention", ("", "n/a"), flash=1),
    *each(TITAN, "notes", ("standard attention", "vanilla attention", "no FA2", "without flash attention"), flash=0),
    *each(TITAN, "notes", ("2x faster than standard attention", "no fatal errors", "no fused norm"), flash=1),
    *each(
        FSDP, "precision",
        ("torch_dtype=bfloat16", "torch_dtype: torch.bfloat16", "bf16 (weights loaded in bfloat16)", "model in bf16", "bf16 params", "full bf16", "bfloat16 (full)",
         "bf16 only", "all states in bf16", "fully bf16", "bf16 everywhere"), weight=2, gradient=2, moments=4,
    ),
    *each(FSDP, "precision", ("bf16", "bf16 mixed", "bf16 mixed (bf16 params, fp32 reduce)", "bf16 params, fp32 master", "amp bf16"), moments=12),
    *each(FSDP, "optimizer", ("Adam (bf16 states)", "AdamW bf16", "AdamWBF16", "AdamW (bf16 params)"), weight=2, moments=4),
    *each(FSDP, "optimizer", ("AdamW 4bit", "AdamW4bit"), moments=5),
    *each(FSDP, "optimizer", ("AdamWFp8", "adamw_bnb_8bit", "8-bit Adam"), moments=6),
    *each(FSDP, "notes", ("bf16 full fine-tuning", "bf16 mixed over torch_dtype bfloat16", "FSDP mixed precision: params in bf16", "recomputed in full", "not pure bf16"), moments=12),
    *each(MEGATRON, "notes", ("model in bf16", "bf16 params", "torch_dtype=bfloat16", "GEMMs in bf16, attention full"), moments=12),  # beside a copy
    *each(MEGATRON, "notes", ("full bf16 training", "all states in bf16"), moments=4),
    *each(MEGATRON, "optimizer", ("Adam (bf16 states)",), moments=8),
    *each(LORA, "precision", ("4-bit", "nf4", "4bit", "QLoRA", "NF4 (bf16 compute)", "4bit + bf16", "int4", "QLoRA 4-bit (double quant)"), frozen=1, weight=4.5 / 8, low=2),
    *each(LORA, "precision", ("int8", "8-bit", "8bit", "INT8 (LLM.int8)", "FP8 base weights", "bf16, base weights quantized to FP8"), frozen=1, weight=8.5 / 8, low=2),
    *each(LORA, "notes", ("FP8 base weights", "frozen weights in FP8", "base model in 8-bit", "quantized to FP8"), frozen=1, weight=8.5 / 8, low=2),
    *each(LORA, "precision", ("bf16", "bf16 mixed"), frozen=1, weight=2, low=2),
    *each(LORA | {"gpu": "H100"}, "precision", ("FP8", "fp8 hybrid"), frozen=1, weight=2, low=1),  # of products
    *each(FSDP, "precision", ("QLoRA",), frozen=1, low=2),
    *each(LORA, "notes", ("LoRA rank 16 on attention projections", "adapters on q_proj, v_proj", "target_modules: qkv", "LoRA of q, v", "lora_target_modules q_proj"), frozen=1, spared=1),
    *each(LORA, "notes", ("LoRA on all linear layers", "", "adapters on attention and MLP", "target modules q_proj, k_proj, up_proj", "attention: flash"), frozen=1, spared=0),
    *each(FSDP, "optimizer", ("AdamW (fused)", "adamw_torch_fused", "FusedAdam", "Fused AdamW"), fused=1),
    *each(FSDP, "optimizer", ("AdamW", "adamw_torch", "unfused Adam", "AdamW (not fused)"), fused=0),
    *each({"framework": "HF Trainer + PEFT", "model": "Qwen-7B"}, "notes", ("Full-parameter", "full fine-tuning", "full finetune", "full-weight training"), frozen=0),
    *each({"framework": "HF Trainer + PEFT", "model": "Qwen-7B"}, "notes", ("LoRA on all linear layers", "", "full fine-tuning is another row; LoRA"), frozen=1),
    *each({}, "notes", ("loss_type chunked_nll", "chunked loss", "chunked cross entropy"), pieces=8),
    *each({}, "framework", ("NVIDIA BERT (PyTorch, apex)", "Unsloth", "PyTorch (NVIDIA BERT)"), eager=1),
    *each({}, "vp", ("interleaved", "Interleaving"), chunks=2, schedule=1),
    *each({}, "schedule", ("1F1B-I", "depth-first", "interleaved 1F1B"), chunks=2, schedule=1),
    *each({}, "schedule", ("1F1B", "1F1B, in order"), chunks=1, schedule=0),
    *each({}, "notes", ("1F1B-I schedule",), chunks=2, schedule=1),
    *each({"schedule": "interleaved", "pp": "4", "dp": "4"}, "layers", ("24", "22", "30", "26"), chunks=2),
    *each({"schedule": "interleaved", "pp": "4", "dp": "4"}, "layers", ("12", "10", "36"), chunks=3),
    *each({}, "recompute", ("w/ AC", "with AC", "w/ gc"), recompute=FULL),
    *each({}, "notes", ("schedule ZB-1P; 24 microbatches", "zero bubble H1", "zero-bubble pipeline"), chunks=1, schedule=3),
    *each({}, "notes", ("ZB-2P", "zero bubble (2P)"), schedule=3.5),
    *each({}, "notes", ("faster than zero-bubble", "without zero-bubble", "ZeRO, no bubble"), schedule=0),
    *each({}, "framework", ("Megatron-LM fork (ZBV schedule)", "Megatron-LM (zero bubble V)"), chunks=1, schedule=4),
    *each({"arch": "moe 8e top2", "dp": "4", "tp": "2", "pp": "1", "gpus": "8"}, "notes", ("TE + DeepEP", "HybridEP dispatcher"), ep=8),
    *each({"arch": "moe 8e top2", "dp": "4", "tp": "2", "pp": "1", "gpus": "8"}, "notes", ("", "without DeepEP", "deep epochs"), ep=1),
    *each({"arch": "moe 8e top2", "dp": "4", "tp": "2", "pp": "1", "gpus": "8", "notes": "DeepEP"}, "ep", ("4",), ep=4),
    *each({"framework": "MaxText", "tp": "1", "pp": "1", "dp": "1", "gpus": "8"}, "shard", ("FSDP 8", "fsdp (size 8)"), dp=8, zero=3, replicate=1),
    *each({"framework": "MaxText", "tp": "1", "pp": "1", "dp": "2", "gpus": "16", "shard": ""}, "FSDP", ("8",), dp=16, zero=3, replicate=2),
    *each({"microbatch": "", "global_batch": "", "Micro Num": "4"}, "Micro Bsz", ("8",), microbatch=8, global_batch=256),
    *each({"framework": "InternEvo", "tp": "1", "pp": "1", "dp": "64"}, "shard", ("zero1=8", "zero1, groups of 8"), zero=1, replicate=8),
    *each(TITAN | {"tp": "1", "pp": "1", "dp": "16", "cp": "4"}, "shard", ("FSDP 16, CP 4", "FSDP 16", "CP 4, FSDP 16"), zero=3, replicate=1),
    *each({"framework": "nanotron"}, "shard", ("", "not stated"), zero=1),
    *each({"framework": "nanotron"}, "shard", ("none", "zero0"), zero=0),
    *each({"framework": "NeMo AutoModel (PyTorch)"}, "precision", ("BF16",), weight=2, gradient=2, moments=4),
    *each({}, "interconnect", ("ethernet between instances", "Ethernet"), net=25e9 / 8 / 8),
    *each({}, "interconnect", ("RoCE (Ethernet)", "Spectrum-X Ethernet", "RDMA over Ethernet"), net=25e9),
    *each({}, "schedule", ("DualPipe", "dualpipev"), paired=0.5),
    *each({}, "schedule", ("1F1B", "interleaved"), paired=0),
    *each({"attention": "eager"}, "framework", ("NVIDIA DeepLearningExamples (PyTorch)", "FlashAttention's scripts", "HF Trainer, TorchScript"), eager=1),
    *each(
        {"framework": "DeepSpeed", "shard": "zero1"}, "offload",
        ("offload optimizer to CPU", "OffloadOptimizer", "Adam states to CPU", "optimizer to CPU", "cpu", "CPU offload", "offload", "full offload", "moments in DRAM",
         "AdamW states: host", "on", "yes", "True"), offload=1, moved=0,
    ),
    *each({"framework": "DeepSpeed", "shard": "zero3"}, "offload", ("offload optimizer and params to CPU", "offload params to CPU", "weights to host"), offload=2),
    *each(
        {"framework": "DeepSpeed", "shard": "zero1"}, "offload",
        ("no", "none", "offload: none", "no offload", "False", "optimizer on GPU", "offload optimizer: no", "0", "cpu: off"), offload=0, moved=0,
    ),
    *each({"shard": "zero1"}, "offload", ("offload activations", "activations to CPU", "activation offload"), offload=0, moved=1),
    *each({"framework": "DeepSpeed", "shard": "zero1"}, "optimizer", ("CPUAdam", "DeepSpeedCPUAdam", "cpu_adam", "AdamW, offloaded to the host", "Adam (states on CPU)"), offload=1, moments=12),
    *each({"framework": "DeepSpeed", "shard": "distributed optimizer, on every host"}, "optimizer", ("FusedAdam", "AdamW", "HybridAdam", "AdamW, on the device", "AdamW; activations offloaded", "AdamW, offload: none", "AdamW offload=no", "Adam (offload off)", "AdamW, offloading disabled",
         "AdamW, offload activations", "AdamW states offloaded 50%", "AdamW, on CPU and GPU", "AdamW in the CPU-free path"), offload=0),
    *each({"framework": "Colossal-AI"}, "shard", ("zero2_cpu", "ZeRO-2 (CPU)", "zero2 + cpu"), zero=2, offload=1),
    *each({"framework": "Colossal-AI"}, "shard", ("zero2", "gemini (zero3), placed between GPU and CPU"), offload=0),
    *each({"recompute": "", "attention": "eager"}, "framework", ("HF Trainer", "PyTorch", "TRL"), recompute=NONE, again=0),
    *each({"recompute": "", "attention": "eager", "tp": "1", "dp": "32", "microbatch": "1", "shard": "zero3"}, "framework", ("HF Transformers + DeepSpeed",), recompute=NONE, again=0),
    *each({"recompute": "", "attention": "eager"}, "framework", ("Megatron-LM", "Megatron-DeepSpeed"), recompute=SELECTIVE),
    *each({"recompute": "", "attention": "eager", "tp": "1", "dp": "32", "microbatch": "8", "global_batch": "256"}, "framework", ("HF Trainer", "PyTorch", "HF Trainer, DeepSpeed"), recompute=FULL),
    *each(
        BERT, "notes",
        ("SQuAD fine-tuning", "span head", "sequence classification", "no vocabulary logits", "MRPC", "GLUE (MNLI)", "without LM head", "w/o the vocabulary logits",
         "token-classification head"), scored=0,
    ),
    *each(BERT, "model", ("BERT-large SQuAD v1.1", "roberta-base, SST-2"), scored=0),
    *each(BERT, "notes", ("pretraining", "logits of all tokens", "no dropout"), scored=1),
    *each(BERT | {"model": "Llama-7B"}, "notes", ("evaluated on SQuAD and GLUE", "MRPC"), scored=1),  # its harness
    *each(BERT, "notes", ("logits of the masked positions only",), scored=0.15),
    *each({"model": "GPT-2"}, "notes", ("linear head, no vocabulary", "without a vocabulary"), scored=0),
    *each({"model": "GPT-2"}, "notes", ("no vocabulary parallelism", "vocabulary padded", "invite", "no vocab padding", "without vocab expansion"), scored=1, both_ways=0),
    *each({"notes": ""}, "model", ("ViT-L/16", "google/vit-base", "vision transformer"), scored=0, both_ways=1),
    *each({"notes": ""}, "model", ("Llama-2 + ViT-L/14",), scored=1, both_ways=0),
    *each({"model": "GPT-2"}, "notes", ("bidirectional pipeline (Chimera)", "NVLink 900 GB/s bidirectional", "causal, not bidirectional", "the BERT tokenizer"), both_ways=0),
    *each({"model": "GPT-2"}, "notes", ("SDPA, not causal", "bidirectional attention", "masked language model", "non-causal"), both_ways=1),
    *each({"notes": ""}, "model", ("BERT-large", "roberta-base", "DeBERTa", "CamemBERT", "ModernBERT-base"), both_ways=1),
    *each({"model": "GPT-2"}, "notes", ("MFU counts full (non-causal) attention FLOPs", "causal", "flash attention"), both_ways=0),
    *each({"model": "GPT-2"}, "notes", ("torch.compile",), launches=0.5),
    *each({"model": "a"}, "notes", ("SwiGLU, RMSNorm", "GeGLU"), gated=1),
    *each({"model": "a"}, "notes", ("no SwiGLU", "RMSNorm"), gated=0),
    *each({"model": "a", "layers": "18", "hidden": "768", "heads": "12", "kv_heads": "4", "ffn": "2304", "vocab": "32768", "params_b": "0.149"}, "tied", ("yes", "true"), gated=1),
    *each({"model": "GPT-2"}, "notes", ("no torch.compile", "eager", ""), launches=1),
    *each({"model": "GPT-2"}, "precision", ("bf16 autocast", "fp16 (torch.autocast)"), launches=1.3), *each({"model": "GPT-2"}, "precision", ("bf16", "fp32"), launches=1),
    *each(BERT, "gpu", ("H100", "L40S", "A100", "RTX 4090"), flash=0),
    *each(BERT | {"gpu": "H100"}, "attention", ("flash attention", "fused attention"), flash=1),
    *each({"gpu": "H100"}, "framework", ("HF Trainer", "torchtitan"), flash=1),
    *each({"framework": "HF Trainer", "precision": "bf16 mixed"}, "notes", ("torch_dtype=bfloat16", "weights loaded in bf16"), moments=4),
    *each({"framework": "HF Trainer", "precision": "bf16 mixed", "shard": "FULL_SHARD"}, "notes", ("torch_dtype=bfloat16", "weights loaded in bf16"), moments=12),
    *each({}, "framework", ("HF Accelerate + TE TransformerLayer", "HF + Transformer Engine", "PyTorch + Transformer Engine"), eager=1),
    *each({}, "framework", ("HF Accelerate", "PyTorch, routed experts", "PyTorch (20 te)"), eager=2.1),
    *each(FSDP, "optimizer", ("Adam-mini", "adam_mini", "AdamMini"), moments=8),  # a copy and one moment
    *each(FSDP, "optimizer", ("LOMO", "AdaLomo", "BAdam"), weight=2, gradient=0, moments=0),
    *each(FSDP, "optimizer", ("GaLore", "GaLoreAdamW", "APOLLO"), gradient=2, moments=4),
    *each(FSDP, "optimizer", ("Adam", "AdamW", "FusedAdam", "RAdam", "NAdam", "adamw_torch_fused", "Adam minimal"), moments=12),
    *each({"shard": "none"}, "shard", ("optimizer+gradients", "os+g", "os_g", "optimizer states and gradients", "ShardedDDP", "sharded_ddp", "SDP"), zero=2),
    *each({}, "shard", ("optimizer, gradients, parameters", "os+g+p", "Pos+g+p", "optimizer + gradients + weights"), zero=3),
    *each({}, "shard", ("os", "P_os", "optimizer states", "optimizer", "DDP, distributed optimizer"), zero=1),
    *each({}, "shard", ("ddp", "DDP (sharded never)", "no optimizer sharding"), zero=0),
    *each({}, "recompute", ("act ckpt", "act. ckpt.", "Act Ckpt", "GC", "w/ GC", "nothing_saveable", "on (per layer)", "every layer", "checkpoint every block", "100%"), recompute=FULL, again=0),
    *each({}, "recompute", ("partial", "50%", "half", "partial (50%)", "every 2 layers", "every_2", "every 2nd layer"), recompute=NONE, again=8),
    *each({}, "recompute", ("12/32 layers", "12 of 32", "37.5%"), recompute=NONE, again=6),
    *each({}, "recompute", ("dots_saveable", "save_qkv_proj", "minimal_flash", "attention+norm"), recompute=SELECTIVE),
    *each({}, "recompute", ("mlp", "MLP only", "moe_act", "selective (layernorm)"), recompute=NONE),
    *each({}, "recompute", ("no GC", "off (per layer)", "without act ckpt"), recompute=NONE, again=0),
    *each({}, "sp", ("on (TP)", "yes (Megatron)", "True"), sp=1),
    *each({}, "sp", ("off (TP alone)", "no"), sp=0),
    *each({"dp": "", "tp": "1", "pp": "1"}, "gpus", ("16", "2x8", "2 × 8", "16x A100", "16 GPUs"), dp=16),
    *each({"experts": "64", "moe_ffn": "512"}, "topk", ("top-2", "top2", "2", "Top 2"), experts=64, active=2),
    *each({"topk": "8", "moe_ffn": "512"}, "experts", ("256+1", "256 + 1", "256+1 shared"), experts=256, active=9, shared=1),
    *each({"topk": "8", "moe_ffn": "512"}, "experts", ("256",), experts=256, active=8, shared=0),
    *each({"layers": "", "hidden": "4096", "ffn": "", "pp": "1", "dp": "16"}, "params_b", ("6.44B/1B", "6.44", "6.44B / 0.5B"), layers=32),
    *each({}, "global_batch", ("64 → 1024", "64->1024", "1024", "2^10", "2**10"), global_batch=1024),
    *each({}, "seq_len", ("1M",), seq=2**20),
    *each({"microbatch": "", "tp": "8", "pp": "1", "dp": "8", "recompute": "full"}, "global_batch", ("96", "48", "144"), microbatch=6),  # which divides a replica's
    *each({"microbatch": "", "tp": "8", "pp": "1", "dp": "8", "recompute": "full"}, "global_batch", ("128", "100"), microbatch=8),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "point"), CASES)
def test_words(changes: dict[str, str], point: dict[str, float]) -> None:
    row = read(ROW | changes)
    assert not row.refused, row.refused
    assert {name: row.point[name] for name in point} == pytest.approx(point, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"framework": name, "attention": "GQA"}, "attention: 'gqa' is not understood") for name in ("torchtitan", "FlashAttention's scripts")),
        *(({"recompute": word}, f"recompute: '{word}' as selective") for word in ("dots_saveable", "save_qkv_proj")),
        ({"recompute": "mlp", "framework": "torchtitan"}, "recompute: 'mlp' as selective"),
        ({"global_batch": "64 → 1024"}, "global_batch=1024 of '64 → 1024'"),
        ({"recompute": "partial"}, "recompute: 'partial' as half of the layers"),
    ],
)  # fmt: skip
def test_what_is_said_of_words(changes: dict[str, str], said: str) -> None:
    row = read(ROW | changes)
    assert not row.refused, row.refused
    assert said in row.inferred


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"precision": word}, f"multiplies no {word}") for word in ("int8", "nf4", "4-bit", "8-bit")),
        *(({"optimizer": word}, f"optimizer: '{word}' has no backward") for word in ("MeZO", "zeroth-order SGD")),
        *(({"recompute": word}, f"recompute: '{word}' is not understood") for word in ("gcc", "moe+layernorm", "a few")),
        *(({"gpus": word}, f"gpus: '{word}' is no whole number") for word in ("8/16", "2x8x4", "some", "8 per node")),
        *(({"params_b": word, "layers": ""}, f"params_b: '{word}' is no number") for word in ("7B/s", "7/device")),
    ],
)
def test_what_is_refused_of_words(changes: dict[str, str], reason: str) -> None:
    assert any(reason in why for why in read(ROW | changes).refused)


def test_a_head_without_logits_takes_less_of_both() -> None:
    whole, head = predict([ROW | BERT | {"recompute": "none", "pp": "1", "dp": "", "notes": words} for words in ("pretraining", "SQuAD")])
    assert (head.predicted_time_s or 0) < (whole.predicted_time_s or 0)
    assert 0 < (head.predicted_memory_gb or 0) < (whole.predicted_memory_gb or 0)


PROGRAMS = {
    "fsdp": ("LLM Foundry", "llm_foundry", "llm-foundry", "MosaicBERT", "OLMo", "OLMo-core", "open_lm", "OpenLM", "verl", "verl (FSDP)", "VeOmni"),
    "megatron-deepspeed": ("GPT-NeoX", "GPT-NeoX (Megatron + DeepSpeed)", "gpt_neox", "Megatron-DeepSpeed"), "jax": ("levanter", "EasyLM", "MaxText", "AxLearn"),
    "pytorch": ("picotron", "nanochat", "nanoGPT", "Oumi", "HF + Transformer Engine", "HF + TE", "Transformer Engine (Hugging Face)", "ms-swift"),
    "megatron": ("Megatron-SWIFT", "ms-swift (Megatron)", "Transformer Engine", "PyTorch + Transformer Engine", "NeMo (PyTorch, Transformer Engine)", "Megatron-Core (Hugging Face, TE)"),
    "megatron-2020": ("Megatron-LM", "verl (Megatron)"), "other": ("swiftly", "overly", "openllm", "doumi"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in PROGRAMS.items() for name in names])
def test_programs_of_these_names(family: str, name: str) -> None:
    assert program(name, "") == family


@pytest.mark.parametrize(
    ("changes", "zero"),
    [
        ({}, 0), ({"hidden": "4096"}, 1), ({"hidden": "8192"}, 3), ({"hidden": "8192", "framework": "PyTorch", "shard": "none"}, 0),
        ({"hidden": "8192", "framework": "Megatron-LM"}, 1), ({"hidden": "8192", "tp": "2", "pp": "2", "dp": "16"}, 1),
    ],
)  # fmt: skip
def test_what_pytorch_shares_out_is_as_much_as_it_has_to(changes: dict[str, str], zero: float) -> None:
    row = read(ROW | {"framework": "PyTorch", "shard": "", "hidden": "2048", "ffn": "", "heads": "16", "tp": "1", "pp": "1", "dp": "64", "attention": "flash"} | changes)
    assert not row.refused
    assert row.point["zero"] == zero
    assert "shard" in changes or f"zero={zero:g}" in row.inferred
