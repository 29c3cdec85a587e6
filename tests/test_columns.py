"""Columns by other programs' names, what joins devices as people write it, batches of tokens, models by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.test_predict import ROW

from soli.planner.columns import KNOWN, plain
from soli.planner.cost import memory
from soli.planner.cost.constants import known, repeated
from soli.planner.cost.points import (
    ACT,
    CUBE,
    EXPERTS,
    GPIPE,
    GRID,
    INTERLEAVED,
    MLP,
    NORM,
    RING,
    SELECTIVE,
    ULYSSES,
    UP,
    ZBH1,
    ZBV,
    points,
)
from soli.planner.hardware import interconnect
from soli.planner.hardware.devices import devices
from soli.planner.models import named
from soli.planner.predict import predict
from soli.planner.rows import read, read_measured
from soli.planner.spellings import way

BIG = ROW | {"layers": "32", "tp": "2", "pp": "2", "dp": "16", "microbatch": "1", "global_batch": "64"}


# --- what joins devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "said", "net", "link", "node"),
    [
        ("v100", "8xHDR", 200, 150, 8), ("v100", "NVLink + 8x HDR InfiniBand", 200, 150, 8), ("v100", "NDR400", 400, 150, 8), ("a100", "HDR100", 100, 300, 8),
        ("a100", "4x200Gb/s IB", 100, 300, 8), ("a100", "200Gbps x 4", 100, 300, 8), ("v100", "8 × NDR", 400, 150, 8), ("v100", "8 NICs of 200 Gbps", 200, 150, 8),
        ("v100", "EFA 3.2Tbps", 400, 150, 8), ("a100", "400Gbps EFA", 50, 300, 8), ("a100", "p4d.24xlarge", 50, 300, 8), ("h100", "NVSwitch; 3200 Gbps", 400, 450, 8),
        ("h100", "400 Gbps", 400, 450, 8), ("a100", "800Gbps", 100, 300, 8), ("v100", "1.6 Tb/s per node", 200, 150, 8), ("v100", "50 GB/s IB per GPU", 400, 150, 8),
        ("a100", "RoCE 400G", 400, 300, 8), ("v100", "RoCEv2 8x400G", 400, 150, 8), ("a100", "100 GbE", 12.5, 300, 8), ("v100", "10GbE", 1.25, 150, 8),
        ("a100", "PCIe only", 200, 25, 8), ("a100", "no NVLink", 200, 25, 8), ("a100", "PCIe Gen3 x16, 25GbE", 3.125, 12.5, 8), ("l40s", "PCIe Gen4, no NVLink, 2x100GbE", 25, 25, 8),
        ("a100", "8x200Gb HDR IB per VM, PCIe to EPYC, 1.7TB host", 200, 300, 8), ("a100", "NVLink3 600GB/s, 8x200Gb HDR IB, full fat tree", 200, 300, 8),
        ("h800", "NVLink 400 GB/s + 8x 400G RoCE", 400, 200, 8), ("a100", "NVLink 600 GB/s 8x200Gb IB", 200, 300, 8), ("a100", "IB HDR, 1 NIC/node", 25, 300, 8),
        ("v100", "8x V100-SXM2 per node, NVLink2; one 100 Gb/s IB (EDR) per node", 12.5, 150, 8), ("v100", "DGX-2, 8x EDR IB", 50, 150, 16),
        ("a100", "4x A100 per node, NVLink3, 1x HDR", 50, 300, 4), ("gb200", "NVL72 NVLink5", 400, 900, 72), ("gb200", "NVL72 + 4x400Gb IB NDR", 400, 900, 72), ("gb300", "NVL72 + 4x800Gb IB XDR", 800, 900, 72),
        ("gb200", "NVL72; 1600 Gbps EFA per node", 400, 900, 72), ("v100", "NVLink4; IB 8x50 GB/s", 400, 150, 8),
        ("h100", "NVLink in node; inter-node not stated", 400, 450, 8), ("v100", "NVSwitch 3.6TB/s; 8 x 400 Gbit/s InfiniBand", 400, 150, 8),
        ("v100", "GPUDirect-TCPX 4x200G", 100, 150, 8), ("a100-pcie", "100 GbE", 12.5, 25, 8), ("a100", "400GbE RoCE", 400, 300, 8), ("v100", "PCIe 3.0 x16 / 40GbE", 5, 12.5, 8), ("v100", "NVLink 300GB/s | 4xHDR", 100, 150, 8),
        ("a100", "3.2Tbps IB", 400, 300, 8), ("a100", "3200 Gbps IB", 400, 300, 8), ("a100", "NVLink, 3200 Gb/s InfiniBand", 400, 300, 8), ("h100", "3200 Gbps IB", 400, 450, 8),
        ("h100", "3.2 Tbps IB per GPU", 3200, 450, 8), ("h100", "800 Gbps IB", 800, 450, 8), ("a100", "400 Gbps IB", 400, 300, 8),
        ("h200", "two nodes of one GPU each; plain VPC Ethernet", 25, 450, 1), ("v100", "two nodes of 4, 100 GbE", 25, 150, 4), ("a100", "hosts with 2 x 400 Gb/s", 100, 300, 8), ("v100", "nodes with 2 CPUs, 100 GbE", 12.5, 150, 8), ("v100", "8 servers with 4 V100 GPUs", 50, 150, 4),
    ],
)  # fmt: skip
def test_what_joins_devices_is_read(gpu: str, said: str, net: float, link: float, node: int) -> None:
    device = replace(devices()[gpu], node=interconnect.server(said) or devices()[gpu].node)
    found, _ = interconnect.joined(device, said)
    assert (found.net_gbits, found.link_gbs, found.node) == (net, link, node)


def test_what_is_guessed_or_not_understood_of_it_is_said() -> None:
    for said, why in (
        ("RoCE v2", "'RoCE v2' as the usual 400 Gbit/s of a device"), ("TPU ICI", "'TPU ICI' is not counted"), ("no InfiniBand", "'no InfiniBand' is not counted"),
        ("100 GbE", "'100 GbE' as 12.5 Gbit/s of a device"), ("NVLink 4; 16x400Gb IB; Myrinet", "'Myrinet' is not counted"),
    ):  # fmt: skip
        row = read(ROW | {"gpu": "H100", "interconnect": said, "recompute": "full"})
        assert f"interconnect: {why}" in row.inferred
    sure = ("NVLink4 + 8x400Gb IB (DGX assumed)", "Selene", "one node, NVLink5", "", "400 Gb/s ConnectX-7 per GPU")
    assert [read(ROW | {"gpu": "H100", "interconnect": said, "sp": "off"}).inferred for said in sure] == [[]] * len(sure)


def test_ethernet_takes_longer() -> None:
    slow, usual = (read(ROW | {"interconnect": said}).point["net_latency"] for said in ("100GbE", ""))
    assert slow > 5 * usual


# --- columns ----------------------------------------------------------------------------------------------

MODEL = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "seq": 4096,
    "tp": 2,
    "pp": 2,
    "dp": 16,
    "microbatch": 1,
    "global_batch": 64,
}
CONFIGURATIONS = {
    "Megatron-LM": {
        "num-layers": "32", "hidden-size": "4096", "num-attention-heads": "32", "num-query-groups": "8", "ffn-hidden-size": "14336", "seq-length": "4096",
        "world-size": "64", "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2", "num-layers-per-virtual-pipeline-stage": "4",
        "micro-batch-size": "1", "global-batch-size": "64", "recompute-granularity": "selective", "sequence-parallel": "True",
        "use-distributed-optimizer": "True", "vocab_size": "32000", "bf16": "True",
    },
    "torchtitan": {
        "model.name": "llama3", "model.flavor": "8B", "training.local_batch_size": "4", "parallelism.pipeline_parallel_microbatch_size": "1", "#GPUs": "64",
        "training.seq_len": "4096", "parallelism.data_parallel_shard_degree": "-1", "parallelism.tensor_parallel_degree": "2",
        "parallelism.pipeline_parallel_degree": "2", "parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "activation_checkpoint.mode": "selective",
    },
    "DeepSpeed": {
        "nodes": "8", "gpus_per_node": "8", "n_layers": "32", "d_model": "4096", "n_heads": "32", "max_seq_len": "4096", "train_batch_size": "64",
        "train_micro_batch_size_per_gpu": "1", "zero_stage": "1", "offload_optimizer": "cpu", "activation_checkpointing": "True", "mp_size": "2",
        "pipe_parallel_size": "2", "fp16": "True",
    },
    "calculon": {
        "num_procs": "64", "tensor_par": "2", "pipeline_par": "2", "data_par": "16", "batch_size": "64", "microbatch_size": "1", "hidden": "4096",
        "feedforward": "16384", "seq_size": "4096", "attn_heads": "32", "attn_size": "128", "num_blocks": "32", "datatype": "float16",
        "activation_recompute": "attn_only", "pipeline_interleaving": "2", "optimizer_sharding": "True", "weight_offload": "True",
    },
    "SimuMax": {
        "world_size": "64", "tp_size": "2", "pp_size": "2", "ep_size": "4", "etp_size": "1", "seq_len": "4096", "micro_batch_size": "1",
        "micro_batch_num": "4", "hidden_size": "4096", "head_num": "32", "kv_head_num": "8", "intermediate_size": "14336", "layer_num": "32",
        "vocab_size": "32000", "expert_num": "8", "topk": "2", "dtype": "bf16", "zero_state": "1", "enable_sequence_parallel": "True",
    },
}  # fmt: skip


@pytest.mark.parametrize("program", CONFIGURATIONS)
def test_configurations_by_their_own_names(program: str) -> None:
    found = read({"gpu": "A100-80GB", "framework": program, **CONFIGURATIONS[program]})
    assert not found.refused
    assert {name: found.point[name] for name in MODEL} == MODEL
    own = {
        "Megatron-LM": {"kv_heads": 8, "chunks": 4, "zero": 1, "sp": 1, "recompute": SELECTIVE},
        "torchtitan": {"zero": 3, "chunks": 2, "schedule": INTERLEAVED, "kv_heads": 8},
        "DeepSpeed": {"zero": 1, "offload": 1, "recompute": 2}, "calculon": {"recompute": SELECTIVE, "chunks": 2, "zero": 1},
        "SimuMax": {"experts": 8, "etp": 1, "ep": 4, "sp": 1},
    }[program]  # fmt: skip
    assert {name: found.point[name] for name in own} == own
    assert ("weight_offload=True is not counted" in found.inferred) == (program == "calculon")


def test_names_of_columns() -> None:
    assert [plain(name) for name in ("Global Batch Size", "model.hidden-size", "#GPUs", "tokens/s/gpu")] == [
        "global_batch_size",
        "hidden_size",
        "gpus",
        "tokens_s_gpu",
    ]
    assert "tokens_s_gpu" not in KNOWN


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel": "4"}, "tp=2 and tensor_parallel=4 cannot both be"),
        ({"gradient_checkpointing": "false"}, "recompute=full and gradient_checkpointing=false cannot both be"),
        ({"strategy": "TP4 PP2"}, "strategy: 'tp4' and tp=2 cannot both be"),
        ({"nodes": "8", "gpus_per_node": "4"}, "8 nodes of 4 are 32, and it has 64 gpus"),
        ({"gpus": "8 per node"}, "gpus: '8 per node' is no whole number above 0"),
        ({"global_batch": "8 per GPU"}, "global_batch: '8 per GPU' is no whole number above 0"),
        ({"microbatch": "4096 tokens"}, "microbatch: '4096 tokens' is no whole number above 0"),
        ({"microbatch": "1,2,4"}, "microbatch: '1,2,4' is no whole number above 0"),
        ({"global_batch": "", "microbatch": "", "batch_size": "128", "tp": "1", "pp": "1", "dp": "64"}, "batch_size: of a device, or of all? it has no global_batch, nor"),
        ({"schedule": "BFS"}, "schedule: 'BFS' of 1 stages a rank is not known"),
        ({"schedule": "gpipe", "vp": "4"}, "schedule: 'gpipe' of 4 stages a rank is not known"),
        ({"cp": "32", "dp": "", "gpus": "128", "cp_comm_type": "a2a"}, "Ulysses over cp=32 cuts the 16 heads of a rank"),
        ({"tp_mode": "2.5d"}, "tp_mode: '2.5d' of 2 ranks is not known"), ({"tp_mode": "2d"}, "tp_mode: '2d' of 2 ranks is not known"),
        ({"experts": "8", "topk": "2", "ep": "8", "etp": "8"}, "ep x etp = 64 ranks are more than tp x cp x dp = 32"),
        ({"seq_len": "2,048 x 2"}, "seq_len: '2,048 x 2' is no whole number above 0"), ({"gpus": "1 0245"}, "gpus: '1 0245' is no whole number above 0"),
        ({"recompute": "offload"}, "recompute: 'offload' is not understood"),
        ({"global_batch": "64", "microbatch": "", "local_batch_size": "4", "tp": "1", "pp": "1", "dp": "64"}, "global_batch=64 is less than dp x microbatch = 256"),
        ({"model": "Nemotron-H 56B"}, "layers of its model are no attention (state spaces)"),
        ({"model": "Gated DeltaNet 1.3B"}, "layers of its model are no attention (it is linear)"), ({"model": "RecurrentGemma-9B"}, "no attention (state spaces)"),
        ({"model": "Flan-T5-XXL"}, "it is an encoder and a decoder"), ({"model": "Whisper-large-v3"}, "it hears"), ({"model": "ResNet-50"}, "it is no stack of like layers"),
        ({"gpu": "4x A100 + 4x H100"}, "names a100 and h100: a row is of devices of one kind"), ({"gpu": "A100/H100"}, "names a100 and h100"),
        ({"params_b": "6,738"}, "params_b: '6,738' is no number above 0"),
        ({"model": "Qwen3.5-VL-35B", "layers": ""}, "layers of its model are no attention (it is linear)"),
        ({"model": "Llama 4 Maverick", "layers": ""}, "nor the name of a published model (only every second layer has experts)"),
    ],
)  # fmt: skip
def test_what_columns_say_against_each_other_is_refused(changes: dict[str, str], reason: str) -> None:
    assert reason in "; ".join(read(BIG | changes).refused)


@pytest.mark.parametrize(
    ("changes", "point"),
    [
        ({"nodes": "16"}, {"node": 4}), ({"gpus": "", "dp": "", "nodes": "8", "gpus_per_node": "8"}, {"dp": 16, "node": 8}),
        ({"gpu": "GB200", "gpus_per_node": "4"}, {"node": 72}), ({"params": "6738415616", "layers": "", "hidden": ""}, {"hidden": 4224}),
        ({"dp": "-1"}, {"dp": 16}), ({"sp": "2"}, {"sp": 1}), ({"lora_rank": "16"}, {"frozen": 1}), ({"lora_rank": "0"}, {"frozen": 0}),
        ({"global_batch": "", "batch_size": "64"}, {"global_batch": 64}),
        ({"global_batch": "", "microbatch": "", "local_batch_size": "2", "pp": "1", "dp": "32"}, {"global_batch": 64, "microbatch": 2}),
        ({"global_batch": "", "microbatch": "", "batch_size_per_gpu": "2", "grad_accum": "4"}, {"global_batch": 128, "microbatch": 2}),
        ({"schedule": "gpipe"}, {"schedule": GPIPE}), ({"schedule": "ZB-H1"}, {"schedule": ZBH1}), ({"schedule": "ZBVZeroBubble", "vp": "2"}, {"schedule": ZBV, "chunks": 1}),
        ({"cp": "4", "dp": "4", "cp_comm_type": "a2a"}, {"context": ULYSSES}), ({"cp": "4 (ulysses)", "dp": "4"}, {"context": ULYSSES}),
        ({"cp": "4", "dp": "4", "framework": "DeepSpeed-Ulysses"}, {"context": ULYSSES}), ({"cp": "4", "dp": "4", "notes": "alltoall"}, {"context": RING}),
        ({"cp": "4", "dp": "4", "cp_comm_type": "p2p"}, {"context": RING}), ({"ulysses_degree": "4", "dp": "4"}, {"context": ULYSSES, "cp": 4}),
        ({"sp": "ulysses 4", "dp": "4"}, {"context": ULYSSES, "cp": 4, "sp": 0}), ({"sp": "DeepSpeed-Ulysses=4", "dp": "4"}, {"context": ULYSSES, "cp": 4}),
        ({"shard": "LoRA, embedding trained"}, {"frozen": 1, "zero": 0}), ({"shard": "Q-LoRA (int4 base)"}, {"frozen": 1, "zero": 0}), ({"shard": "LoRA + ZeRO-2"}, {"frozen": 1, "zero": 2}),
        ({"framework": "torchtitan", "recompute": "selective"}, {"by_product": 1, "again": 8}), ({"framework": "torchtitan", "recompute": "selective (op)"}, {"by_product": 1}),
        ({"framework": "torchtitan", "recompute": ""}, {"by_product": 1, "again": 8}), ({"framework": "torchtitan", "recompute": "", "experts": "8", "topk": "2", "layers": "8"}, {"by_product": 1, "again": 4}),
        ({"framework": "torchtitan", "recompute": "", "microbatch": "64", "global_batch": "1024"}, {"recompute": 2, "again": 0}), ({"framework": "torchtitan", "recompute": "none"}, {"recompute": 0, "again": 0}),
        ({"recompute": "selective (moe_act, layernorm)"}, {"recompute": 0, "parts": ACT + NORM}), ({"recompute": "selective (core_attn, mlp)"}, {"recompute": 1, "parts": MLP}),
        ({"recompute": "", "recompute_modules": '["mla_up_proj", "moe"]'}, {"recompute": 0, "parts": UP + EXPERTS}), ({"recompute": "none", "recompute_modules": '["mlp"]'}, {"parts": 0}),
        ({"framework": "Megatron TP + DeepSpeed ZeRO-3", "shard": "zero3", "pp": "1", "dp": "32"}, {"moved": 1}), ({"framework": "HF + DeepSpeed ZeRO-3", "shard": "zero3", "pp": "1", "dp": "32"}, {"moved": 0}),
        ({"recompute": "selective", "recompute_modules": '["mlp", "mhc"]'}, {"recompute": 0, "parts": MLP}), ({"recompute": "full [1]"}, {"recompute": 2, "parts": 0}),
        ({"recompute": "Selective (Core Attention, LayerNorm)"}, {"recompute": 1, "parts": NORM}), ({"recompute": "selective (no norm)"}, {"recompute": 1, "parts": 0}),
        ({"recompute": "selective [1]"}, {"recompute": 1}), ({"recompute": "full", "framework": "Megatron TP + DeepSpeed ZeRO-3", "shard": "zero3", "pp": "1", "dp": "32", "offload": "none"}, {"moved": 1}),
        ({"framework": "Megatron + DeepSpeed ZeRO-3", "shard": "zero3", "pp": "1", "dp": "32", "offload": "optimizer to CPU; activations: none"}, {"moved": 0}),
        ({"framework": "DeepSpeed ZeRO-3 (vs Megatron)", "shard": "zero3", "pp": "1", "dp": "32"}, {"moved": 0}),
        ({"precision": "bf16", "fp8": "hybrid", "gpu": "H100"}, {"low": 1}), ({"precision": "", "bf16": "true", "fp8": "e4m3", "gpu": "H100"}, {"low": 1}), ({"precision": "bf16", "fp8": "false", "gpu": "H100"}, {"low": 2}),
        ({"shard": "", "zero": "1.0"}, {"zero": 1}), ({"recompute": "0.25"}, {"recompute": 0, "again": 4}),
        ({"base": "llama3_8b_pretrain_config"}, {"gradient": 2}), ({"base": "a100"}, {"gradient": 4}), ({"notes": "of the base gpt3_config"}, {"gradient": 4}),        ({"framework": "torchtitan", "recompute": "selective-layer"}, {"by_product": 0, "again": 8}), ({"recompute": "selective"}, {"again": 0}),
        ({"framework": "nanotron", "sp": "", "gpu": "H100"}, {"sp": 1}), ({"framework": "nanotron", "sp": "off", "gpu": "H100"}, {"sp": 0}),
        ({"tp_mode": "2D", "tp": "4", "dp": "8"}, {"tensor": GRID, "rows": 2}), ({"tp_mode": "3D", "tp": "8", "dp": "4"}, {"tensor": CUBE, "rows": 2}),
        ({"cpu_offload": "true", "zero_stage": "2"}, {"offload": 1, "zero": 2}), ({"cpu_offload": "false", "zero_stage": "2"}, {"offload": 0}),
        ({"shard": "", "fsdp": "FULL_SHARD"}, {"zero": 3}), ({"shard": "", "fsdp": "8"}, {"zero": 3}), ({"shard": "", "fsdp": "SHARD_GRAD_OP"}, {"zero": 2}), ({"shard": "", "fsdp": "False"}, {"zero": 0}),
        ({"data_parallel": "DDP", "tensor_parallel": "yes"}, {"tp": 2, "dp": 16}), ({"precision": "", "mixed_precision": "True"}, {"low": 2}),
    ],
)  # fmt: skip
def test_columns_of_the_plan(changes: dict[str, str], point: dict[str, float]) -> None:
    row = read(BIG | changes)
    assert not row.refused, row.refused
    assert {name: row.point[name] for name in point} == pytest.approx(point)


HEADED = {name: cell for name, cell in BIG.items() if name not in ("layers", "heads", "seq_len", "global_batch", "microbatch", "recompute", "gpu")}


@pytest.mark.parametrize(
    ("changes", "point"),
    [
        ({"Number of layers": "32", "# heads": "32", "SeqLen (T)": "2048", "GlobalBatchSize": "64", "GlobalBatchSize (T)": "131072", "MicroBatchSize": "1", "Act. ckpt": "full", "System": "DGX A100 (8x80GB)"},
            {"recompute": 2, "capacity": 83.3e9}),
        ({"No. of layers": "32", "Attention heads": "32", "Max seq length": "2 048", "Batch size/DP": "4", "Remat": "✓", "Instance type": "p4d.24xlarge"},
            {"recompute": 2, "net": 50e9 / 8}),
        ({"num_layers": "32", "heads": "32", "seq": "2048", "batch size": "64", "mbs": "1", "Gradient checkpointing": "✗", "GPU": "16 A100 40GB"}, {"recompute": 0}),
    ],
)  # fmt: skip
def test_headings_of_papers(changes: dict[str, str], point: dict[str, float]) -> None:
    """As tables have them: with signs, units in brackets, thousands apart, a server's name."""
    row = read(HEADED | changes)
    assert not row.refused, row.refused
    expected = {"layers": 32, "heads": 32, "seq": 2048, "global_batch": 64, "microbatch": 1, "dp": 16, **point}
    assert {name: row.point[name] for name in expected} == pytest.approx(expected, rel=0.02)


def test_rows_that_say_too_little_or_too_much() -> None:
    assert "it has fewer cells than the table has columns" in read(BIG | {"framework": None}).inferred
    experts = {"experts": "64", "topk": "2", "ep": "64", "tp": "1"}
    assert "ep=64 as 16: a stage has no more ranks" in read(BIG | experts | {"gpus": "32"}).inferred
    for column in ("Quantization", "(TP, PP, DP)", "remat_kind", "T", "Numerics", "Seq len (K)", "Layers (per stage)"):
        assert any(word.endswith("=4 is not counted") for word in read(BIG | {column: "4"}).inferred), column


def test_what_is_not_counted_or_assumed_is_said() -> None:
    said = lambda **changes: " ".join(read(BIG | changes).inferred)
    assert "offload: 'banana' is not counted" in said(offload="banana")
    assert "offload: '0.5' is not counted" in said(offload="0.5")
    assert "is not counted" not in said(offload="parameters, gradients and optimizer on CPU")
    assert "optimizer=SOAP as Adam" in said(optimizer="SOAP")  # which keeps more than two moments


def test_names_of_devices_are_no_others() -> None:
    assert {name: read(BIG | {"gpu": name}).device.name for name in ("8x L40S", "L40", "p5.48xlarge", "512 H100s")} == {
        "8x L40S": "l40s", "L40": "l40", "p5.48xlarge": "h100", "512 H100s": "h100",
    }  # fmt: skip
    assert not read(BIG | {"gpu": "DGX A100, A100 40GB"}).refused
    assert not read(BIG | {"gpu": "p4d.24xlarge, A100"}).refused
    assert not read(BIG | {"params_b": "6,738M"}).refused
    assert read(BIG | {"gpu": "NVIDIA A2"}).refused
    assert read(BIG | {"gpu": "", "notes": "Table P3; 64 A100 GPUs"}).device.name == "a100"


@pytest.mark.parametrize(
    ("name", "billions"),
    [("MT-NLG", 530), ("Megatron-Turing NLG 530B", 530), ("Turing-NLG", 17.2), ("LLaMA (7B)", 6.7), ("Mixtral 8×7B", 46.7), ("GPT-3 18B", 18), ("GPT-3 (175 billion)", 175), ("GPT 1T", 1008), ("70b", 70)],
)  # fmt: skip
def test_names_of_models(name: str, billions: float) -> None:
    row = read({"model": name, "gpu": "H100", "gpus": "64", "seq_len": "2048", "global_batch": "64", "microbatch": "1"})
    assert not row.refused, row.refused
    assert memory.parameters(points([row.point]))[0] / 1e9 == pytest.approx(billions, rel=0.05)


def test_heads_of_160_are_heads() -> None:
    """Keys of DeepSeek's models are compressed, which are as wide together; those of Megatron's largest are not."""
    big = {"model": "", "hidden": "20480", "heads": "128", "layers": "105", "ffn": "81920"}
    assert read(BIG | big | {"pp": "35", "vp": "3", "tp": "8", "dp": "8", "gpus": "2240"}).point["compressed"] == 0
    assert read(BIG | {"model": "deepseek-v3", "layers": "", "hidden": "", "heads": "", "ffn": "", "vocab": "", "gpu": "H100"}).point["compressed"] > 0


@pytest.mark.parametrize(("gpu", "point"), [("H100", {"sp": 1, "zero": 1}), ("A100", {"sp": 0, "zero": 0})])
def test_what_recent_recipes_have_is_not_said(gpu: str, point: dict[str, float]) -> None:
    row = read({**BIG, "framework": "NeMo", "gpu": gpu, "shard": "", "sp": "", "hidden": "1024"})
    assert {name: row.point[name] for name in point} == point
    large = read({**BIG, "framework": "", "gpu": "H100", "shard": "", "layers": "80", "hidden": "8192", "ffn": "", "heads": "64", "recompute": ""})
    assert (large.point["zero"], large.point["sp"]) == (1, 1)  # it has to have fitted


SILENT = {name: cell for name, cell in ROW.items() if name not in ("gpus", "tp", "pp", "dp", "shard")}


@pytest.mark.parametrize(
    ("changes", "point", "said"),
    [
        *(({"gpus": "64", "strategy": cell}, {"tp": 8, "pp": 4, "dp": 2, "zero": 0}, []) for cell in ("TP8 PP4 DP2", "TP 8 x PP 4", "tp=8,pp=4", "DP2-TP8-PP4", "dp2tp8pp4", "3D (tp=8, pp=4)", "dp=-1, tp=8, pp=4")),
        ({"gpus": "64", "plan": "TP8 PP4 VP 2, CP2 + ZeRO-1"}, {"tp": 8, "pp": 4, "chunks": 2, "cp": 2, "zero": 1}, []), ({"gpus": "64", "layout": "TP8+SP"}, {"tp": 8, "sp": 1}, []),
        ({"gpus": "64", "parallelism": "FSDP"}, {"zero": 3, "tp": 1, "dp": 64}, []), ({"gpus": "64", "parallelism": "ZeRO-2"}, {"zero": 2}, []), ({"gpus": "64", "parallelism": "HSDP"}, {"zero": 3, "replicate": 8}, []),
        ({"gpus": "64", "strategy": "EP8", "experts": "8", "topk": "2"}, {"ep": 8}, []), ({"gpus": "64", "setup": "our TP8 run, distributed"}, {"tp": 8, "zero": 0}, []),
        ({"gpus": "64", "strategy": "hybrid"}, {"tp": 1, "zero": 1}, ["strategy: 'hybrid' is not counted"]), ({"gpus": "64", "plan": "TP4, Alpa"}, {"tp": 4}, ["plan: 'alpa' is not counted"]),
        ({"gpus": "64", "plan": "FSDP", "shard": "none"}, {"zero": 0}, ["plan: 'fsdp' is not counted"]), ({"gpus": "64", "plan": "TP4 VP1 EP1", "vp": "0", "ep": "0"}, {"tp": 4, "chunks": 1}, []),
        ({"gpus": "64", "plan": "TP4 ZeRO-3", "shard": "zero1"}, {"tp": 4, "zero": 1}, ["plan: 'zero-3' is not counted"]),
        *(({"gpu": cell}, {"dp": 4}, [f"4 gpus of '{cell}'"]) for cell in ("4x RTX 4090", "4 x H100", "4xA100", "H100 x4", "H100x4")),
        ({"gpu": "4x H100", "gpus": "16"}, {"dp": 16}, []), ({"gpu": "4x H100", "nodes": "2"}, {"dp": 16}, ["gpus=16"]), ({"gpu": "A100 PCIe x16"}, {"dp": 8}, ["gpus=8"]), ({"gpu": "4x A100", "tp": "8"}, {"dp": 1}, ["gpus=8"]),
        ({"gpus": "64", "seq_len": "", "context_length": "8k"}, {"seq": 8192}, []), ({"gpus": "64", "context_length": "131072"}, {"seq": 2048}, ["context_length=131072 is not counted"]),
        ({"gpus": "64", "context": "2048"}, {"seq": 2048}, []), ({"gpus": "64", "seq_len": "", "block_size": "1024"}, {"seq": 1024}, []),
        ({"gpus": "64", "global_batch": "", "microbatch": "", "per_device_batch_size": "2", "gas": "3"}, {"microbatch": 2, "global_batch": 384}, []),
        ({"gpus": "64", "length_grouping": "x"}, {}, ["length_grouping=x is not counted"]),
        *(({"gpus": "64", heading: "8/4/2"}, {"tp": 8, "pp": 4, "dp": 2}, []) for heading in ("TP/PP/DP", "TPxPPxDP", "Parallelism (TP, PP, DP)", "tp_pp_dp")),
        ({"gpus": "64", "tp": "8", "tp_dp_overlap": "1 2"}, {"tp": 8, "dp": 8}, []),
        ({"gpus": "64", "mesh": "dp2 tp8 pp4"}, {"tp": 8, "pp": 4, "dp": 2}, []), ({"gpus": "64", "DP type": "ZeRO-2"}, {"zero": 2}, []),
        ({"gpus": "64", "framework": "DeepSpeed", "shard": "zero2", "offload": "ZeRO-Offload"}, {"offload": 1}, []),
        ({"gpus": "64", "global_batch": "", "batch size": "1M tokens", "microbatch": "1"}, {"global_batch": 512}, ["global_batch=512 of 1e+06 tokens"]),
        ({"gpus": "64", "global_batch": "", "effective batch size": "128"}, {"global_batch": 128}, []),
        ({"gpus": "64", "global_batch": "", "microbatch": "2", "Local BS": "4"}, {"global_batch": 256}, []),
        ({"gpus": "64", "pp": "4", "schedule": "interleaved 1F1B (v=4)"}, {"chunks": 4}, []), ({"gpus": "64", "vocab": "32k"}, {"vocab": 32000}, []),
        ({"gpus": "64", "pp": "4", "schedule": "DualPipe"}, {"schedule": 5}, ["schedule=DualPipe as dualpipev, of one copy of the weights"]),
    ],
)  # fmt: skip
def test_whole_plans_and_counts_in_a_cell(changes: dict[str, str], point: dict[str, float], said: list[str]) -> None:
    """Where no column of their own says another number."""
    row = read(SILENT | changes)
    assert not row.refused, row.refused
    assert {name: row.point[name] for name in point} == pytest.approx(point)
    usual = ("zero=", "attention=", "swiglu=")
    assert [word for word in row.inferred if not word.startswith(usual)] == said


def test_what_contradicts_is_said_or_refused() -> None:
    """Beside what is counted; what no program could run is refused."""
    said = lambda **changes: read(ROW | changes).inferred
    assert "grad_accum=7 is not counted (global_batch=128, dp=8)" in said(grad_accum="7")
    assert any(text.startswith("params_b=70 is not counted") for text in said(params_b="70"))
    assert "ep=4 is not counted: it has no experts" in said(ep="4")
    assert "a last microbatch of less than 2" in said(global_batch="130")
    assert "tp=4 cuts 30 heads" in read(ROW | {"heads": "30"}).refused
    assert "ep=3 shares 8 experts" in read(ROW | {"experts": "8", "topk": "2", "ep": "3"}).refused


def test_what_is_sharded_where_no_column_says_it() -> None:
    for framework, zero in (("torchtitan", 3), ("PyTorch FSDP", 3), ("DeepSpeed ZeRO-2", 2), ("Megatron-LM", 0)):
        row = read({name: cell for name, cell in ROW.items() if name != "shard"} | {"framework": framework})
        assert (row.point["zero"], f"zero={zero}" in row.inferred) == (zero, True), framework
    assert (
        read(ROW | {"framework": "torchtitan", "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "shard": ""}).point["zero"]
        == 0
    )


def test_programs_of_today_shard_the_optimizer_where_nobody_says_it() -> None:
    silent = {name: cell for name, cell in ROW.items() if name != "shard"}
    for gpu, framework, zero in (
        ("H100", "Megatron-LM", 1),
        ("B200", "NeMo 25.04", 1),
        ("A100", "NeMo 24.01", 0),
        ("H100", "JAX", 0),
    ):
        row = read(silent | {"gpu": gpu, "framework": framework})
        assert (row.point["zero"], f"zero={zero}" in row.inferred) == (zero, True), (gpu, framework)
    assert read(silent | {"framework": "torchtitan", "shard": "fully_shard"}).point["zero"] == 3


ONE = ROW | {
    "model": "Llama-2 7B", "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "microbatch": "1", "global_batch": "1", "seq_len": "512", "framework": "litgpt",
    "layers": "32", "kv_heads": "32", "ffn": "11008", "vocab": "32000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "frozen", "bits"),
    [
        ({}, 0, 16), ({"notes": "LoRA rank 32 on query and value"}, 1, 16), ({"peft": "lora"}, 1, 16), ({"comment": "sft_type lora"}, 1, 16),
        ({"notes": "full fine-tuning, not LoRA"}, 0, 16), ({"notes": "QLoRA, bnb.nf4"}, 1, 4), ({"peft": "lora", "load_in_4bit": "True"}, 1, 4),
        ({"peft": "lora", "quantization": "nf4"}, 1, 4), ({"peft": "qlora"}, 1, 4), ({"notes": "4-bit checkpoints"}, 0, 16),
        ({"framework": "fsdp_qlora (PyTorch FSDP)", "notes": "LoRA of all linear layers"}, 1, 16), ({"peft": "lora", "load_in_4bit": "False"}, 1, 16),
        ({"peft": "lora", "load_in_8bit": "True"}, 1, 8),
    ],
)  # fmt: skip
def test_adapters_and_narrow_weights_are_read_from_any_words(changes: dict[str, str], frozen: int, bits: int) -> None:
    """Llama 2 7B: 6.74 billion parameters, 0.262 of them in two tables, which keep 16 bits; half a bit more for scales."""
    point = read(ONE | changes).point
    tables = 2 * 32000 * 4096
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    each = 2.0 if bits == 16 else ((bits + 0.5) / 8 * matrices + 2 * tables) / (matrices + tables)
    assert point["frozen"] == frozen
    assert point["weight"] == pytest.approx(each, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "rank", "each", "table"),
    [
        ({"notes": "LoRA rank 32 on all products"}, 32, 16, 2), ({"lora_r": "8"}, 8, 16, 2), ({"peft": "lora"}, 16, 16, 2), ({"notes": "LoRA, r=64", "precision": "bf16-true"}, 64, 8, 2),
        ({"peft": "qlora", "lora_rank": "8"}, 8, 16, 2), ({"peft": "qlora", "lora_rank": "8", "framework": "HF TRL"}, 8, 16, 4), ({"peft": "qlora", "lora_rank": "8", "framework": "axolotl"}, 8, 16, 2),
        ({"peft": "qlora", "lora_rank": "8", "framework": "Unsloth (TRL)"}, 8, 16, 2), ({}, 0, 0, 2),
    ],
)  # fmt: skip
def test_adapters_take_memory_and_tables_beside_narrow_weights_more(
    changes: dict[str, str], rank: int, each: int, table: int
) -> None:
    """Of Llama 2 7B's layer seven matrices; peft casts what is not narrow to fp32."""
    row = read(ONE | {"recompute": "full"} | changes)
    assert row.point.get("adapters", 0) == rank * (8 * 4096 + 3 * (4096 + 11008))
    assert ("lora_rank=16" in row.inferred) == (rank == 16)
    p = points([row.point])
    taken = [
        memory.states(one, repeated(known("fsdp", "ampere"), 1))[0] for one in (p, replace(p, adapters=np.zeros(1)))
    ]
    assert taken[0] - taken[1] == pytest.approx(32 * row.point.get("adapters", 0) * each)
    if changes.get("peft") == "qlora":
        matrices, tables = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 2 * 32000 * 4096
        assert row.point["weight"] == pytest.approx(
            (4.5 / 8 * matrices + table * tables) / (matrices + tables), rel=1e-3
        )


def test_a_loss_in_pieces_is_read_from_a_column_of_its_own() -> None:
    assert [read(ROW | {"use_liger_kernel": said}).point["pieces"] for said in ("True", "False", "")] == [0.0, 1.0, 1.0]
    assert [read(ROW | {"extra": said}).point["pieces"] for said in ("Liger kernel", "no Liger kernel")] == [0.0, 1.0]


def test_attention_within_documents_or_a_window_is_said() -> None:
    said = "attention=over the whole sequence, not within its documents or windows"
    for notes in ("short documents (block-diagonal attention)", "sliding-window attention", "attention windowed to 1024 tokens, scores kept: no flash"):
        assert said in read(ROW | {"notes": notes}).inferred
    assert said not in read(ROW).inferred


@pytest.mark.parametrize(
    ("notes", "window", "share"),
    [
        ("sliding window attention (4,096)", 4096, 1), ("SWA-4k", 4096, 1), ("1024-token sliding window in every other layer", 1024, 1 / 2),
        ("window_size=512, 5:1 local:global", 512, 5 / 6), ("attention windowed to 1024 tokens", 1024, 1), ("", 0, 0),
        ("warmup window 10, context window of 4096 tokens is filled", 0, 0), ("128k context window", 0, 0),
    ],
)  # fmt: skip
def test_windows_that_a_row_tells_of(notes: str, window: int, share: float) -> None:
    point = read(ROW | {"attn_backend": "flash", "notes": notes}).point
    assert (point["window"], point["windowed"]) == (window, pytest.approx(share))


def test_windows_of_a_published_model_are_kept_to_where_a_kernel_does() -> None:
    """Megatron's does, and FlashAttention; a mask that torch's attention is given leaves nothing out."""
    named = lambda **more: read(ROW | {"model": "Gemma-3-27B", "layers": "62", "hidden": "5376", "heads": "32", "params_b": "27"} | more).point
    assert named(framework="Megatron-LM", gpu="H100")["windowed"] == pytest.approx(5 / 6, abs=1e-4)
    assert named(framework="Hugging Face", gpu="H100")["windowed"] == 0
    assert named(framework="Hugging Face", gpu="H100", attn_backend="flash_attention_2")["window"] == 1024


def test_networks_by_their_names_here() -> None:
    slow = read(ROW | {"interconnect": "ethernet-10"})
    assert slow.point["net"] == read(ROW | {"interconnect": "10 GbE"}).point["net"]


def test_what_nobody_reads_is_said() -> None:
    for changes, said in (
        ({"mtp_num_layers": "1"}, ["mtp_num_layers=1 is not counted"]), ({"moe_layer_freq": "2"}, ["moe_layer_freq=2 is not counted"]),
        ({"activation_offload": "True"}, ["activation_offload=True is not counted"]), ({"mtp_num_layers": "0", "batch_time_ms": "3", "overlap_moe": "1"}, []),
        ({"cp": "4", "dp": "4", "cp_comm_type": "a2a+p2p"}, ["cp_comm_type=a2a+p2p as a ring"]), ({"schedule": "interleaved"}, ["vp=2"]),
    ):  # fmt: skip
        assert read(BIG | {"attn_backend": "unfused"} | changes).inferred == said


def test_ways_of_a_program() -> None:
    orders = ("", "1F1B", "Interleaved 1F1B", "GPipe", "AFAB", "zb-h1", "ZBV", "DualPipeV", "DualPipe", "ZB-2p", "some")
    assert [way("schedules", word) for word in orders] == [0, 0, 1, 2, 2, 3, 4, 5, 5, 3.5, None]
    said = ("1F1B with 2 pipelines", "GPipe with 2 stages", "interleaved 1F1B with 2 chunks", "ZB-H2", "zero bubble 2p")
    assert [way("schedules", word) for word in said] == [0, 2, 1, 3.5, 3.5]
    assert [way("contexts", word) for word in ("", "p2p", "all_gather", "a2a", "Ulysses", "USP")] == [
        0,
        0,
        0,
        1,
        1,
        None,
    ]


@pytest.mark.parametrize(
    ("cells", "sequences"),
    [
        ({"global_batch_tokens": "4M"}, 2048), ({"global_batch": "4M tokens"}, 2048), ({"global_batch": "4194304 tokens"}, 2048),
        ({"global_batch": "512K tokens"}, 256), ({"tokens_per_batch": "4,000,000"}, 1952), ({"global_batch": "1M toks", "seq_len": "1000"}, 992),
        ({"global_batch": "2M tokens", "seq_len": "2048", "gpus": "992", "tp": "8", "pp": "1", "dp": "124"}, 992), ({"global_batch": "2.00M tokens", "gpus": "62", "dp": "62", "tp": "1", "pp": "1"}, 1024),
        ({"global_batch": "1M toks", "seq_len": "1000", "gpus": "48", "tp": "1", "pp": "1", "dp": "48"}, 1008), ({"global_batch": "2^20 tokens"}, 512),
    ],
)  # fmt: skip
def test_batches_of_tokens(cells: dict[str, str], sequences: int) -> None:
    """4M are 2^22 where that is so many whole sequences; and as many as replicas share, where so few digits may mean that."""
    row = read(BIG | {"global_batch": ""} | cells)
    assert row.point["global_batch"] == sequences
    assert any(word.startswith(f"global_batch={sequences} of ") for word in row.inferred)


def test_ranks_that_share_an_expert() -> None:
    """tp=2 and etp=1: each rank of tp has whole experts, and twice as many ranks have the same."""
    row = BIG | {"experts": "8", "topk": "2", "ep": "4", "moe_ffn": "4096"}
    both = points([read(row | {"etp": etp}).point for etp in ("", "1")])
    assert [*both.expert_tp] == [2, 1]
    assert [*both.expert_replicas] == [4, 8]
    assert [*both.expert_stride] == [8, 4]
    cut, own = predict([row, row | {"expert_tensor_parallel_size": "1"}])
    assert own.predicted_memory_gb > cut.predicted_memory_gb


def test_measured_columns_by_other_names() -> None:
    assert read_measured(ROW | {"step_time_ms": "1500", "peak_memory_gib": "2"}).time == 1.5
    assert read_measured(ROW | {"step_time_ms": "1500", "peak_memory_gib": "2"}).memory == 2 * 2**30


def test_names_of_published_models() -> None:
    known = {
        "GPT-3 1.3B": "gpt3-1.3b", "gpt2": "gpt2", "opt-1.3b": "opt-1.3b", "BLOOM 7.1B": "bloom-7b1", "EleutherAI/pythia-12b-deduped": "pythia-12b", "MPT-7b": "mpt-7b",
        "tiiuae/falcon-40b": "falcon-40b", "meta-llama/Llama-4-Scout-17B-16E": "llama-4-scout", "llama3.3-70b": "llama-3-70b", "Mistral-Small-3.1-24B": "mistral-small-24b",
        "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b", "Qwen3-4B": "qwen3-4b", "qwen3_30b_a3b": "qwen3-30b-a3b", "Qwen2-57B-A14B": "qwen2-57b-a14b", "Qwen-7B": "qwen1.5-7b",
        "deepseek-v3.1": "deepseek-v3", "google/gemma-7b": "gemma-7b", "gemma-2-27b-it": "gemma-2-27b", "gemma 3 27B": "gemma-3-27b", "phi-3-mini-128k": "phi-3-mini",
        "Phi-4": "phi-4", "OLMo-2-7B": "olmo-2-7b", "GLM-4.5-Air": "glm-4.5-air", "starcoder2-15b": "starcoder2-15b", "internlm2_5-7b": "internlm2-7b", "Yi-34B": "yi-34b",
        "grok-1": "grok-1", "DBRX": "dbrx", "T-NLG": "t-nlg-17b", "Nemotron-22B": "nemotron-3-22b",
    }  # fmt: skip
    assert {name: model.name for name in known if (model := named(name))} == known
    others = (
        "Llama4-Maverick",
        "DeepSeek-V4",
        "grok-2",
        "gpt-4",
        "Qwen2.5-VL-7B",
        "gpt2-13b",
        "tiny-yi-6b",
        "Qwen3-Next-80B",
        "opt-350m",
    )
    assert [named(name) for name in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen3-Coder-30B-A3B", "it has experts"), ("GLaM 64B/64E", "it has experts"), ("t5-11b", "an encoder and a decoder"),
        ("UL2 20B", "an encoder and a decoder"), ("Whisper 1.5B", "it hears"), ("ViT-22B", "it sees pictures"), ("DLRM 100B", "it recommends"),
    ],
)  # fmt: skip
def test_names_of_other_models_are_no_sizes_of_a_decoder(name: str, said: str) -> None:
    row = read({**SILENT, "gpus": "64", "model": name, "layers": "", "hidden": "", "heads": "", "ffn": "", "vocab": ""})
    assert said in "; ".join(row.refused)


def test_deepspeed_beside_tp_is_beside_megatron() -> None:
    of = lambda **changes: read({**SILENT, "gpus": "64", "framework": "DeepSpeed", "shard": "zero2"} | changes).framework
    assert (of(), of(tp="4"), of(tp="4", shard="zero3")) == ("deepspeed", "megatron-deepspeed", "deepspeed")


def test_a_run_that_was_made_to_fit_fits() -> None:
    """States are shared out since it does not fit otherwise: it is not asked to leave a twentieth free as well."""
    of = lambda layers: predict([{**SILENT, "gpus": "8", "framework": "HF Trainer", "tp": "1", "pp": "1", "dp": "8", "shard": "", "layers": str(layers), "recompute": "none", "global_batch": "16"}])[0]
    ways = [(found.feasible, next(word for word in found.inferred if word.startswith("zero="))) for found in map(of, range(2, 64, 2))]
    feasible = [way for way, _ in ways]
    assert {"zero=0", "zero=1", "zero=3"} == {zero for _, zero in ways}
    assert feasible == sorted(feasible, reverse=True)  # more layers never fit again


def test_states_are_shared_before_anything_is_computed_again() -> None:
    """Llama 3.1 405B (arXiv 2407.21783, table 4) of which its plan's degrees alone are said."""
    big = {"model": "llama-3.1-405b", "gpu": "H100", "gpus": "8192", "tp": "8", "pp": "16", "seq_len": "8192", "global_batch": "2048"}
    inferred = read({**big, "recompute": "", "layers": "126", "vp": ""}).inferred
    assert {"zero=1", "sp=on"} <= set(inferred)
    assert any(word.startswith("recompute=full-") for word in inferred)  # not all of it
