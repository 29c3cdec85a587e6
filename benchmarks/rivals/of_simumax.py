"""SimuMax: rows and searches. It is not on the package index: --clone is the folder of its repository.

Its file of the A100 was measured on one with PCIe. Where the row's have NVLink, its networks are those of the template in
its docs/system.md (300 GB/s inside a server, half of it used); its products and attention stay as that file has them.
"""

import argparse
import json
import re
import sys
import warnings
from pathlib import Path

from common import FULL, NONE, Row, answer, microbatches, whole

DEVICES = ("a100", "a100-40gb")
TEMPLATE = re.compile(r"## Minimal viable template.*?```json\n(.*?)```", re.S)
MARGIN = 10
"""GiB that a search keeps free, as its example does."""
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40, "ms": 1e-3, "s": 1.0, "us": 1e-6}


def why_not(row: Row) -> str:
    """What it cannot express of a row."""
    rules = (
        (row["device"] not in DEVICES, "it has no file of this device"),
        (row["zero"] > 1, "it has no ZeRO-2 or 3"),
        (row["cp"] > 1, "its context parallelism is no ring"),
        (row["chunks"] > 1 and row["layers"] % (row["pp"] * row["chunks"]), "its stages have as many layers each"),
    )
    return next((reason for wrong, reason in rules if wrong), "")


def system_of(clone: Path, row: dict) -> dict:
    """Its A100, in a server with NVLink."""
    config = json.loads((clone / "configs/system/a100_pcie.json").read_text())
    template = json.loads(TEMPLATE.search((clone / "docs/system.md").read_text())[1])
    config |= {"sys_name": "a100_nvlink", "networks": template["networks"]}
    config["accelerator"]["mem_gbs"] = 40 if row["device"] == "a100-40gb" else 80
    return config


def model_of(q: dict):
    """A model of its own kind."""
    from simumax.core.config import ModelConfig

    layers, hidden, heads, kv, size, ffn, vocab, experts, active = whole(
        q, "layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "experts", "active"
    )
    mixture = {"model_type": "moe", "expert_num": experts, "topk": active, "moe_ffn_hidden_size": ffn}
    return ModelConfig(
        hidden_size=hidden, head_num=heads, kv_head_num=kv, head_size=size, intermediate_size=ffn, layer_num=layers,
        vocab_size=vocab, use_swiglu=bool(q["gated"]), model_name="row", **(mixture if experts else {"model_type": "dense"}),
    )  # fmt: skip


def planned(row: Row):
    """A row's plan."""
    from simumax.core.config import StrategyConfig

    tp, pp, dp, ep, seq, size, chunks, layers = whole(
        row, "tp", "pp", "dp", "ep", "seq", "microbatch", "chunks", "layers"
    )
    level = round(row["recompute"])
    return StrategyConfig(
        seq_len=seq, micro_batch_size=size, micro_batch_num=microbatches(row), world_size=tp * pp * dp, tp_size=tp,
        pp_size=pp, ep_size=ep if row["experts"] else 1, enable_sequence_parallel=bool(row["sp"]),
        interleaving_size=chunks, pp_comm_async=chunks == 1, zero_state=round(row["zero"]), use_flash_sdp=bool(row["flash"]),
        use_math_sdp=not row["flash"], enable_recompute=level != NONE,
        recompute_granularity={NONE: None, FULL: "full_block"}.get(level, "sdp_only"),
        recompute_layer_num=0 if level == NONE else layers,
    )  # fmt: skip


def number(said: str | float) -> float:
    """Of what it prints: "246.5 ms", "4.2233 GB" (GiB)."""
    if not isinstance(said, str):
        return float(said)
    value, unit = said.split()
    return float(value) * UNITS[unit]


def predict(row: Row, clone: Path) -> dict:
    """Time, and the most that is allocated on any stage."""
    from simumax.core.config import SystemConfig
    from simumax.core.perf_llm import PerfLLM

    perf = PerfLLM()
    perf.configure(planned(row), model_of(row), SystemConfig.init_from_dict(system_of(clone, row)))
    perf.run_estimate()
    time = number(perf.analysis_cost().data["duration_time_per_iter"])
    memory = perf.analysis_mem().data
    stages = [memory] if "peak_mem" in memory else list(memory.values())
    return {"time": time, "memory": max(number(stage["peak_mem"]) for stage in stages)}


def search(task: dict, clone: Path) -> dict:
    """Its own search with its own lists: tp 1 to 8, every pp, what is recomputed; one sequence a microbatch."""
    from simumax.core.config import StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    perf = PerfLLM()
    start = StrategyConfig(seq_len=task["seq"], micro_batch_size=1, micro_batch_num=1, world_size=task["devices"], zero_state=1)  # fmt: skip
    perf.configure(start, model_of(task), SystemConfig.init_from_dict(system_of(clone, task)))
    seen: dict = {}
    best = perf.search_best_parallel_strategy(
        world_size=task["devices"], gmi_error=MARGIN, micro_batch_size=1, global_batch_size=task["batch"],
        all_search_result=seen, verbose=False,
    )  # fmt: skip
    return {"plans": max((len(column) for column in seen.values()), default=0), "best": str(best.get("parallelism", "none"))}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clone", type=Path, required=True)
    where = parser.parse_args().clone.resolve()
    sys.path.insert(0, str(where))
    warnings.filterwarnings("ignore")
    answer(lambda row: predict(row, where), why_not, lambda task: search(task, where))
