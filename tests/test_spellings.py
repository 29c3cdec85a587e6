"""What people write in tables for the same thing, and what none of them means."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.test_predict import ROW

from soli.planner.cost.points import FULL, NONE, SELECTIVE, points
from soli.planner.hardware.devices import USABLE
from soli.planner.models import compressed, named, of_entry, read_model
from soli.planner.predict import predict
from soli.planner.rows import read
from soli.planner.spellings import Sharding, device, precision, program, recomputation, sharding, switch


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("", Sharding()), ("not stated", Sharding()),
        ("none", Sharding(0.0)), ("DDP", Sharding(0.0)), ("NO_SHARD", Sharding(0.0)), ("not sharded", Sharding(0.0)), ("no", Sharding(0.0)),
        ("none (DDP)", Sharding(0.0)),
        ("z1", Sharding(1.0)), ("zero1", Sharding(1.0)), ("ZeRO-DP 1", Sharding(1.0)), ("dist-optimizer, overlap-grad-reduce", Sharding(1.0)),
        ("dist-optimizer(ZeRO-1)", Sharding(1.0)), ("1", Sharding(1.0)), ("sharded optimizer", Sharding(1.0)),
        ("ZeRO stage: 2", Sharding(2.0)), ("SHARD_GRAD_OP", Sharding(2.0)), ("stage=2", Sharding(2.0)),
        ("ZeRO-Offload", Sharding(2.0, offload=True)),
        ("FULL_SHARD", Sharding(3.0)), ("FSDP2", Sharding(3.0)), ("ZeRO++", Sharding(3.0)), ("gemini", Sharding(3.0)), ("MiCS", Sharding(3.0)),
        ("zero3 (no offload)", Sharding(3.0)), ("zero3 + NVMe/CPU", Sharding(3.0, offload=True)), ("no fsdp", Sharding(0.0)),
        ("zero3 + offload (act+optimizer to host)", Sharding(3.0, offload=True)),
        ("HYBRID_SHARD", Sharding(3.0, copied=True)), ("HSDP", Sharding(3.0, copied=True)),
        ("HSDP (replicate 4, shard 16)", Sharding(3.0, copied=True, group=16, replicate=4)),
        ("hsdp 8x16", Sharding(3.0, copied=True, group=16, replicate=8)),
        ("_HYBRID_SHARD_ZERO2", Sharding(2.0, copied=True)), ("FULL_SHARD + DP", Sharding(3.0, copied=True)), ("FULL_SHARD, DPO", Sharding(3.0)),
        ("TP+PP+DP (ZeRO-1)", Sharding(1.0)), ("ZeRO-1 + DP", Sharding(1.0)),
        ("zero1=8", Sharding(1.0, group=8)), ("zero1=8 (optimizer states sharded within 8 GPUs)", Sharding(1.0, group=8)), ("zero1=-1", Sharding(1.0)),
        ("FSDP 8, CP 1", Sharding(3.0)), ("fsdp 128, dcn data parallel 2", Sharding(3.0)), ("CP 2, FSDP 4", Sharding(3.0, group=4)),
        ("hybrid zero1 8", Sharding(1.0, copied=True, group=8)), ("megatron-fsdp 64", Sharding(3.0, group=64)),
        ("Distributed Data Parallel (DDP)", Sharding(0.0)), ("torch.distributed DDP", Sharding(0.0)), ("DistributedDataParallel", Sharding(0.0)),
        ("DDP, distributed optimizer", Sharding(1.0)), ("FSDP SHARD_GRAD_OP", Sharding(2.0)), ("FSDP NO_SHARD", Sharding(0.0)), ("FSDP (no offload)", Sharding(3.0)),
        ("fully sharded", Sharding(3.0)), ("full sharding", Sharding(3.0)), ("Fully Sharded Data Parallel", Sharding(3.0)),
        ("sharded", None), ("some", None),
    ],
)  # fmt: skip
def test_sharding(said: str, found: Sharding | None) -> None:
    assert sharding(said) == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        *((word, (NONE, 1.0, 0)) for word in ("none", "no", "off", "False", "0", "disabled", "N")),
        *((word, (SELECTIVE, 1.0, 0)) for word in ("selective", '"selective"', "seqsel", '["moe_act"]', "op", "sac", "core_attn", "selective-layer")),
        *((word, (FULL, 1.0, 0)) for word in ("full", '"full"', "true", "on", "1", "yes-AC", "activation checkpointing", "uniform", "all layers", "full (script)")),
        ("full 5 of 48", (FULL, 5 / 48, 0)), ("full-5of48", (FULL, 5 / 48, 0)), ("full, 16 layers", (FULL, 1.0, 16)), ("block 5", (FULL, 1.0, 5)),
        *((word, (NONE, 1.0, 0)) for word in ("AC none", "AC off", "activation checkpointing: off", "gradient checkpointing: False", "checkpointing disabled",
            "no activation checkpointing", "w/o AC", "gradient checkpointing not used")),
        *((word, (SELECTIVE, 1.0, 0)) for word in ("AC selective", "ac: op", "per op SAC", "per-op", "remat_policy minimal_flash", "remat: dots", "activation checkpointing (selective)")),
        *((word, (FULL, 1.0, 0)) for word in ("gradient_checkpointing=True", "use_remat", "remat_policy full", "remat=full", "AC on every layer", "ac: full", "full (uniform, num_layers=1)", "full, uniform, 1 layers")),
        ("activation checkpointing 5 of 48", (FULL, 5 / 48, 0)), ("block, 4 layers", (FULL, 1.0, 4)),
        ("some of it", None),
    ],
)  # fmt: skip
def test_recomputation(said: str, found: tuple[float, float, int] | None) -> None:
    assert recomputation(said) == found


def test_switches_types_and_programs() -> None:
    assert [switch(word) for word in ("=tp", "tp", "Y", "enabled", "Megatron-SP", "1")] == [True] * 6
    assert [switch(word) for word in ("off", "N", "disabled", "0", "none")] == [False] * 5
    assert [switch(word) for word in ("8", "isp")] == [None] * 2
    types = {
        "bf16": ("bfloat16", "torch.bfloat16", "bf16 (fp8 off)", "amp_bf16"), "fp16": ("float16", "half", "fp16 mixed"),
        "fp8": ("MXFP8", "FP8 hybrid", "bf16 + fp8"), "fp4": ("NVFP4",), "tf32": ("tfloat32", "tf32"), "": ("mixed", "int8"),
    }  # fmt: skip
    assert {word: precision(word) for words in types.values() for word in words} == {
        word: name for name, words in types.items() for word in words
    }
    programs = {
        "megatron": ("NeMo 24.09", "Megatron-Core (no offload)", "Primus (Megatron)", "Megatron-LM core_r0.8.0", "Megatron-Core via Megatron-Bridge"),
        "megatron-2020": ("Megatron-LM", "Megatron-LM (2020)"),
        "fsdp": ("torchtitan", "NeMo AutoModel (FSDP2)", "fms-fsdp (PyTorch FSDP)", "HF Accelerate", "llm-foundry (Composer+PyTorch FSDP)"),
        "deepspeed": ("DeepSpeed", "DeepSpeed ZeRO-3 + CPU offload (Megatron-DeepSpeed)"), "megatron-deepspeed": ("Megatron-DeepSpeed",),
        "other": ("InternEvo", "Colossal-AI", "in-house", "AA-Scaling (Megatron-style)", "Megatron-like"), "soli": ("soli 0.1",),
        "pytorch": ("HF Trainer", "PyTorch Lightning", "nanoGPT", "ms-swift (HF Trainer)"),
    }  # fmt: skip
    assert {
        name: program(name, "a consolidated list of fsdp runs") for names in programs.values() for name in names
    } == {name: family for family, names in programs.items() for name in names}
    assert program("", "pytorch/torchtitan@1:docs/performance.md") == "fsdp"


@pytest.mark.parametrize(
    ("said", "name", "size"),
    [
        ("A100 40G", "a100-40gb", 40), ("A100(40G)", "a100-40gb", 40), ("8xA100", "a100", 0), ("8x H100", "h100", 0), ("H100x8", "h100", 0),
        ("DGX H100", "h100", 0), ("AMD Instinct MI300X", "mi300x", 0), ("H100 NVL", "h100-nvl", 0), ("A100-SXM4-40GB", "a100-40gb", 40),
        ("NVIDIA H100 80GB HBM3", "h100", 80), ("p5.48xlarge (H100)", "h100", 0), ("H800-80GB-SXM", "h800", 80), ("A800", "a800", 0),
        ("MI355X", "mi355x", 0), ("Tesla T4", "t4", 0), ("NVIDIA GeForce RTX 4090", "rtx-4090", 0), ("H100-96GB-SXM", "h100-96gb", 96),
        ("A10G", "a10g", 0), ("NVIDIA A10G 24GB", "a10g", 24), ("A10", "a10", 0), ("GH200 480GB", "gh200", 480), ("GH200 (95 GB)", "gh200", 95), ("GH200 144GB HBM3e", "gh200-144gb", 144),
        ("RTX A5000", "rtx-a5000", 0), ("NVIDIA RTX 6000 Ada", "rtx-6000-ada", 0), ("RTX 4060 Ti", "rtx-4060-ti", 0), ("RTX 5090", "rtx-5090", 0),
        ("MI250X (one GCD)", "mi250x", 0), ("AMD Instinct MI210", "mi210", 0), ("MI100", "mi100", 0), ("RTX 4070", "rtx-4070", 0),
        ("RTX 2080 Ti", "rtx-2080-ti", 0), ("GeForce RTX 2080Ti", "rtx-2080-ti", 0), ("2080 Ti", "rtx-2080-ti", 0), ("Titan RTX 24GB", "titan-rtx", 24),
        ("Quadro RTX 8000", "quadro-rtx-8000", 0), ("RTX 8000 48GB", "quadro-rtx-8000", 48), ("Quadro RTX 6000", "quadro-rtx-6000", 0), ("RTX 6000-24GB", "quadro-rtx-6000", 24), ("RTX 3080", "rtx-3080", 0),
        ("RTX 3090 Ti", "rtx-3090-ti", 0), ("RTX 3090", "rtx-3090", 0), ("RTX 4090D", "rtx-4090-d", 0), ("RTX 4090 D", "rtx-4090-d", 0), ("NVIDIA A30", "a30", 0),
        ("Tesla P100", "p100", 0), ("B100", "b100", 0), ("AMD Instinct MI300A", "mi300a", 0),
    ],
)  # fmt: skip
def test_devices(said: str, name: str, size: float) -> None:
    found, told = device(said)
    assert found is not None
    assert (found.name, told) == (name, size)


def test_what_a_device_is_sold_as_may_count_other_memory() -> None:
    """480 GB are a Grace CPU's; no A100 has 100, and one of 64 was made for one machine."""
    assert not read(ROW | {"gpu": "GH200 480GB"}).refused
    for gpu, mib in (("L40S 48GB", 46068), ("NVIDIA A40-48GB", 46068), ("L40", 46068), ("A10 24GB", 23028), ("L4-24GB", 23034), ("A10G (24 GB)", 23028), ("T4 16GB", 15360)):  # fmt: skip
        row = read(ROW | {"gpu": gpu, "precision": "fp16"})
        assert not row.refused
        assert row.point["capacity"] == pytest.approx(USABLE * mib * 2**20, rel=1e-3)  # what correcting errors leaves
    for gpu in ("A100-100GB", "A100 20GB", "RTX 3070 Ti", "RTX 3080 12GB", "RTX 6000", "Titan V", "P1000", "A300"):
        assert f"no device '{gpu}' is known" in read(ROW | {"gpu": gpu}).refused[0]
    usual, less = (read(ROW | {"gpu": gpu}) for gpu in ("A100-80GB", "NVIDIA A100 64GB"))
    for name in ("capacity", "bandwidth"):
        assert less.point[name] == pytest.approx(0.8 * usual.point[name])
    assert "gpu=a100 with 64 of its 80 GiB" in less.inferred
    assert not read(ROW | {"gpu": "GH200 (94.5 GiB)"}).refused


def test_ranks_of_experts_may_be_counted_beside_dp() -> None:
    row = {"gpus": "32", "tp": "2", "pp": "1", "dp": "4", "ep": "4", "experts": "8", "topk": "2"}
    beside, inside = (read(ROW | row | {"dp": dp, "global_batch": "64"}) for dp in ("4", "16"))
    assert not beside.refused
    assert beside.point == inside.point
    assert read(ROW | row | {"dp": "8"}).refused


def test_what_was_measured_names_no_device() -> None:
    """A throughput of 3090 is no RTX 3090."""
    row = ROW | {"gpu": "", "source": "", "interconnect": "", "notes": "", "tokens_per_s_per_gpu": "3090"}
    assert read(row).refused == ["it names no gpu"]
    assert device("4090")[0] is not None  # where the column says it


def test_names_of_models_keep_their_points() -> None:
    others = ("Llama 1.3B", "llama-2.7b", "GPT 2.2B", "llama 130b", "deepseek-r1-distill-qwen-7b")
    assert [named(name) for name in others] == [None] * len(others)
    known = {"Llama-3.1-8B": "llama-3-8b", "LLAMA3.1_405B": "llama-3.1-405b", "llama31_405b": "llama-3.1-405b", "Llama-3.2-3B": "llama-3.2-3b",
             "qwen2.5-7b": "qwen2.5-7b", "opt-13b": "opt-13b", "LLAMA2-7B": "llama-2-7b"}  # fmt: skip
    assert {name: model.name for name in known if (model := named(name))} == known
    row = read(ROW | {"model": "LLAMA3_8B", "layers": "32", "hidden": "4096", "heads": "", "ffn": "", "vocab": ""})
    assert [row.point[name] for name in ("heads", "kv_heads", "ffn", "vocab")] == [32, 8, 14336, 128256]
    assert "model=llama-3-8b" in row.inferred


def test_a_named_mixture_has_its_experts() -> None:
    """Of which a row says all dimensions but those of experts."""
    sizes = {
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "ffn": "14336",
        "vocab": "32000",
        "params_b": "46.7",
        "arch": "moe",
    }
    point = read(ROW | sizes | {"model": "Mixtral-8x7B"}).point
    assert [point[name] for name in ("experts", "active", "ffn", "kv_heads")] == [8, 2, 14336, 8]
    assert read(ROW | sizes | {"model": "mine"}).refused == [
        "it is a mixture of experts, and says not of how many (experts, topk)"
    ]


def test_who_shares_a_state_is_read() -> None:
    row = ROW | {"shard": "HYBRID_SHARD", "tp": "1", "pp": "1", "dp": "64", "gpus": "64"}
    assert (read(row).point["zero"], read(row).point["replicate"]) == (3.0, 8.0)  # one server's eight share
    assert read(row | {"shard": "zero1", "zero_group": "16"}).point["replicate"] == 4.0
    assert read(row | {"shard": "HSDP (replicate 2, shard 32)"}).point["replicate"] == 2.0


def test_some_layers_are_recomputed() -> None:
    """Of every second layer, or product, where torch checkpoints selectively; of as many as are said; of a stage's, at most."""
    row = ROW | {"layers": "32", "pp": "1", "tp": "2", "dp": "32"}
    for changes, again in (
        ({"framework": "torchtitan", "recompute": "selective"}, 16.0), ({"recompute": "full 8 of 32"}, 8.0),
        ({"recompute": "full", "recompute_method": "block", "recompute_num_layers": "4"}, 4.0), ({"recompute": "full, 99 layers"}, 0.0),
    ):  # fmt: skip
        point = read(row | changes).point
        assert (point["recompute"], point["again"]) == ((NONE, again) if again else (FULL, 0.0))


def test_experts_that_each_token_goes_to() -> None:
    for changes in ({"arch": "moe 256e top8 +1 shared"}, {"experts": "256", "topk": "8", "shared_experts": "1"}):
        point = read(ROW | {"params_b": "671", "moe_ffn": "2048"} | changes).point
        assert [point[name] for name in ("experts", "active", "shared")] == [256, 9, 1]


def test_compressed_keys_have_their_own_parameters(tmp_path: Path) -> None:
    """DeepSeek-V3's attention: 187,105,280 a layer by its card, as its configuration, its name and a row of it say."""
    assert compressed(7168, 128, 1536) == of_entry("deepseek-v3").compressed == 187_105_280
    (tmp_path / "config.json").write_text(
        '{"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "vocab_size": 129280,'
        '"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "intermediate_size": 18432,'
        '"kv_lora_rank": 512, "q_lora_rank": 1536, "head_dim": 64, "hidden_act": "silu"}', encoding="utf-8",
    )  # fmt: skip
    model, _ = read_model(tmp_path)
    assert (model.compressed, model.head_size) == (187_105_280, 160)
    assert points([{**read(ROW).point, **model.point()}]).attention_matrices[0] == 187_105_280


def test_what_says_no_batch_still_takes_memory() -> None:
    found = predict([ROW | {"global_batch": ""}])[0]
    assert found.predicted_time_s is None
    assert found.predicted_memory_gb == predict([ROW])[0].predicted_memory_gb
    assert found.feasible is True
