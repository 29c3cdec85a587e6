"""llm-analysis: rows. It judges one plan at a time and searches none.

What the index has is older than its repository's last commit, which mends what it says of tp and knows gated MLPs:
with --clone that is run.
"""

import argparse
import logging
import sys
from dataclasses import fields
from pathlib import Path

from common import FULL, NONE, SELECTIVE, Row, answer, whole

DEVICES = {
    "v100-16gb": "v100-sxm-16gb", "v100": "v100-sxm-32gb", "a100-40gb": "a100-sxm-40gb", "a100": "a100-sxm-80gb",
    "h100": "h100-sxm-80gb",
}  # fmt: skip
"""Its own files of devices; another is described by its data sheet, which is all that those files have."""
GATED = "mlp_gated_linear_units"
TYPES = {"bf16": "w16a16e16", "fp16": "w16a16e16", "fp8": "w8a8e16", "fp4": "w4a4e16"}


def why_not(row: Row) -> str:
    """What it cannot express of a row."""
    from llm_analysis.config import ModelConfig

    rules = (
        (row["cp"] > 1, "it has no context parallelism"),
        (row["gated"] and GATED not in {f.name for f in fields(ModelConfig)}, "its models have no gated MLP"),
    )
    return next((reason for wrong, reason in rules if wrong), "")


def device(row: Row):
    """One of its own, or one that it is told."""
    from llm_analysis.config import GPUConfig, get_gpu_config_by_name

    if row["device"] in DEVICES:
        return get_gpu_config_by_name(DEVICES[row["device"]])
    return GPUConfig(
        row["device"], row["capacity"] / 2**30, row["bandwidth"] / 1e9, row["link"] / 1e9, 8e-6, row["peak_wide"] / 1e12,
        inter_node_bandwidth_in_GB_per_sec=row["net"] * 8 / 1e9,
    )  # fmt: skip


def predict(row: Row, efficiency: float) -> dict:
    """Time, and memory where it is told the bytes that were kept (its types of 8 and 4 bits keep parameters so)."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name

    layers, heads, hidden, vocab, seq, kv, ffn, experts, active = whole(
        row, "layers", "heads", "hidden", "vocab", "seq", "kv_heads", "ffn", "experts", "active"
    )
    tp, pp, dp, ep, size, batch = whole(row, "tp", "pp", "dp", "ep", "microbatch", "global_batch")
    levels = {NONE: "NONE", SELECTIVE: "ATTN_COMPUTE", FULL: "FULL"}
    model = ModelConfig(
        "row", layers, heads, hidden, vocab, max_seq_len=seq, num_key_value_heads=kv, ffn_embed_dim=ffn,
        moe_num_experts=max(experts, 1), moe_top_k=active, **({GATED: True} if row["gated"] else {}),
    )  # fmt: skip
    # Of data parallelism it knows a sharded kind (ZeRO, FSDP) and a replicated one.
    sharded, replicas = (dp, 1) if row["zero"] else (1, dp)
    parallel = ParallelismConfig(
        tp, pp, sharded, replicas, ep_size=ep if experts else 1, sp_size=tp if row["sp"] else 1
    )
    kind = get_dtype_config_by_name(TYPES[row["precision"]])
    analysis = LLMAnalysis(model, device(row), kind, parallel, flops_efficiency=efficiency)
    said = analysis.training(
        batch_size_per_gpu=size, global_batch_size=batch, seq_len=seq,
        activation_recomputation=ActivationRecomputation[levels[round(row["recompute"])]],
        ds_zero=DSZeRO(round(row["zero"])), flash_attn=bool(row["flash"]),
    )  # fmt: skip
    memory = said["estimated_peak_memory_per_gpu"] if TYPES[row["precision"]] == "w16a16e16" else None
    return {"time": said["latency_per_iter"], "memory": memory}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--efficiency", type=float, required=True, help="of the device's peak; 1 is its default")
    parser.add_argument("--clone", type=Path, help="instead of what the index has")
    args = parser.parse_args()
    if args.clone:
        sys.path.insert(0, str(args.clone.resolve()))
    logging.disable(logging.CRITICAL)
    answer(lambda row: predict(row, args.efficiency), why_not)
