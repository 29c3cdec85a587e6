"""calculon: rows and searches. It is not on the package index: --clone is the folder of its repository."""

import argparse
import copy
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

from common import FULL, NONE, SELECTIVE, Row, answer, microbatches, whole

SYSTEMS = {"a100": "a100_80g", "a100-40gb": "a100_80g", "h100": "h100_80g_nvl8"}
"""Devices, and the file of its own that describes them; of 40 GB and what differs with them, see `system_of`."""
TYPES = {"bf16": "float16", "fp16": "float16", "fp8": "float8"}
RECOMPUTE = {NONE: "none", SELECTIVE: "attn_only", FULL: "full"}
ENDLESS = 1 << 20
"""GiB, so that a plan which it thinks does not fit has a time too."""


def system_of(clone: Path, row: Row) -> dict:
    """Its own file; a device with another memory than that file's has its data sheet's."""
    config = json.loads((clone / "systems" / f"{SYSTEMS[row['device']]}.json").read_text())
    if row["device"] == "a100-40gb":
        config["mem1"] |= {"GiB": 40, "GBps": row["bandwidth"] / 1e9}
    return config


def why_not(row: Row) -> str:
    """What it cannot express of a row."""
    rules = (
        (row["device"] not in SYSTEMS, "it has no file of this device"),
        (row["precision"] not in TYPES, "it has no such precision"),
        (row["precision"] == "fp8" and row["generation"] != "hopper", "it has no such precision"),
        (row["experts"] > 0, "it has no experts"),
        (row["gated"] > 0, "it has no gated MLP"),
        (row["kv_heads"] != row["heads"], "it has no grouped keys and values"),
        (row["cp"] > 1, "it has no context parallelism"),
        (row["zero"] > 1, "it has no ZeRO-2 or 3"),
    )
    return next((reason for wrong, reason in rules if wrong), "")


def execution(row: Row) -> dict:
    """A row's plan. Networks: the ranks of tp, then of pp, then of dp are neighbours, as in its own list of peers."""
    tp, pp, dp, batch, size, chunks, node = whole(row, "tp", "pp", "dp", "global_batch", "microbatch", "chunks", "node")
    return {
        "num_procs": tp * pp * dp, "tensor_par": tp, "pipeline_par": pp, "data_par": dp,
        "tensor_par_net": int(tp > node), "pipeline_par_net": int(tp * pp > node),
        "data_par_net": int(tp * pp * dp > node), "batch_size": batch, "microbatch_size": size,
        "datatype": TYPES[row["precision"]], "fused_activation": True, "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[round(row["recompute"])], "pipeline_interleaving": chunks,
        "optimizer_sharding": row["zero"] == 1, "tensor_par_comm_type": "rs_ag" if row["sp"] else "ar",
        "tensor_par_overlap": "ring" if row["hides_tp"] and tp > 1 else "none", "seq_par_ag_redo": False, "data_par_overlap": row["hides_gradients"] and dp > 1, "weight_offload": False,
        "activations_offload": False, "optimizer_offload": False, "training": True,
    }  # fmt: skip


def application(q: dict) -> dict:
    """A model of its own kind."""
    layers, hidden, ffn, heads, size, seq = whole(q, "layers", "hidden", "ffn", "heads", "head_size", "seq")
    return {"name": "row", "hidden": hidden, "feedforward": ffn, "seq_size": seq, "attn_heads": heads, "attn_size": size, "num_blocks": layers}  # fmt: skip


def predict(row: Row, clone: Path) -> dict:
    """Time and memory; whether it fits is judged by the memory that the device has."""
    from calculon.llm import Llm
    from calculon.system import System

    assert microbatches(row)
    config = system_of(clone, row)
    limit = config["mem1"]["GiB"] * 2**30
    roomy = copy.deepcopy(config)
    roomy["mem1"]["GiB"] = ENDLESS
    model = Llm(Llm.Application(application(row)), logging.getLogger("calculon"))
    system = System(roomy)
    model.compile(system, Llm.Execution.from_json(execution(row)))
    model.run(system)
    memory = model.get_mem_tier1_cap_req()
    return {"time": model.get_total_time(), "memory": memory, "fits": memory <= limit}


def search(task: dict, clone: Path) -> dict:
    """Its own command, with one process, as its README calls it; or the number of its plans, most of which that skips."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.json" for name in ("application", "system", "best")}
        files["application"].write_text(json.dumps(application(task)))
        files["system"].write_text(json.dumps(system_of(clone, task)))
        words = [
            sys.executable, str(clone / "bin" / "calculon"), "llm-optimal-execution", str(files["application"]),
            str(task["devices"]), str(task["batch"]), "float16", str(files["system"]), str(files["best"]), "-c", "1",
            "-d" if task.get("count") else "-m",
        ]  # fmt: skip
        done = subprocess.run(words, cwd=clone, env={"PYTHONPATH": str(clone)}, capture_output=True, text=True, check=True)  # fmt: skip
        said = {k.strip(): v.strip() for k, _, v in (line.rpartition(":") for line in (done.stdout + done.stderr).splitlines())}  # fmt: skip
        return {"plans": next(int(v) for k, v in said.items() if k.endswith("Total executions"))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clone", type=Path, required=True)
    where = parser.parse_args().clone.resolve()
    sys.path.insert(0, str(where))
    answer(lambda row: predict(row, where), why_not, lambda task: search(task, where))
