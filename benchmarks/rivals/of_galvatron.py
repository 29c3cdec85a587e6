"""Galvatron's search engine: rows and searches, by the profiles of layers and networks that its package ships.

It knows a layer only by a profile: here those of GPT with 4096 hidden and 32 heads, and networks of one server with 4 or 8
devices or two with 8. The package does not say what they were measured on; the rates are those of an A100. Version 2.4.0
reads a layout in which lengths have a level of their own, and ships these profiles in the layout before: `profiles`
gives them that level and changes no number.
"""

import argparse
import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path

from common import FULL, SELECTIVE, Row, answer, microbatches, whole

HIDDEN, HEADS, STATIC = 4096, 32, 2048
NETWORKS = {4: (1, 4), 8: (1, 8), 16: (2, 8)}
"""Servers and their devices, of which it has a profile."""


def why_not(row: Row) -> str:
    """What it cannot express of a row."""
    same = (row["hidden"], row["heads"], row["kv_heads"], row["ffn"], row["gated"]) == (HIDDEN, HEADS, HEADS, 4 * HIDDEN, 0)  # fmt: skip
    rules = (
        (row["generation"] != "ampere", "it has no profile of this device"),
        (not same or row["experts"], "it has no profile of this layer"),
        (devices_of(row) not in NETWORKS, "it has no profile of a network of so many devices"),
        (row["cp"] > 1, "it has no context parallelism"),
        (row["chunks"] > 1, "it has no interleaved stages"),
        (row["zero"] == 1, "it has no ZeRO-1"),
        (row["recompute"] == SELECTIVE, "it recomputes a layer or nothing"),
    )
    return next((reason for wrong, reason in rules if wrong), "")


def devices_of(row: Row) -> int:
    """All of them."""
    return round(row["tp"] * row["pp"] * row["cp"] * row["dp"])


@functools.cache
def package() -> Path:
    """Makes its search engine importable without its runtime (flash-attn, Megatron), which a package imports first."""
    folder = Path(importlib.util.find_spec("galvatron").submodule_search_locations[0])
    for name in ("galvatron", "galvatron.core"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    return folder


def profiles(home: Path, folder: Path, seq: int, flash: bool) -> str:
    """Its profiles of the layer at 2048 tokens, or at a length by its law of lengths; which of its modes reads them."""
    name = f"hidden{HIDDEN}_head{HEADS}"
    family = home / "models" / ("gpt_fa" if flash else "gpt_hf") / "configs"
    memory = json.loads((family / f"memory_profiling_bf16_{name}_seqlen{STATIC}.json").read_text())
    said = {key: {str(STATIC): value} for key, value in memory.items() if key.startswith(("layertype", "other"))}
    (folder / f"memory_profiling_bf16_{name}.json").write_text(json.dumps(said))
    if seq == STATIC:
        times = json.loads((family / f"computation_profiling_bf16_{name}_seqlen{STATIC}.json").read_text())
        times = {f"{key}_seq{STATIC}": value for key, value in times.items() if "_bsz" in key}
    else:
        file = home / "models/gpt_hf/configs" / f"computation_profiling_bf16_{name}.json"
        times = json.loads(file.read_text())
    (folder / f"computation_profiling_bf16_{name}.json").write_text(json.dumps(times))
    return name


def engine(layers: int, seq: int, devices: int, flash: bool, folder: Path, said: dict):
    """Its search engine, with its profiles."""
    home = package()
    from galvatron.core.search_engine.arguments import galvatron_search_args
    from galvatron.core.search_engine.search_engine import GalvatronSearchEngine

    nodes, each = NETWORKS[devices]
    args = galvatron_search_args(argparse.ArgumentParser()).parse_args([])
    modes = ("batch", "static") if seq == STATIC else ("sequence", "sequence")
    own = {
        "num_nodes": nodes, "num_gpus_per_node": each, "hidden_size": HIDDEN, "pipeline_type": "pipedream_flush",
        "sequence_parallel": True, "time_profile_mode": modes[0], "memory_profile_mode": modes[1],
    }  # fmt: skip
    folders = ("sp_time_path", "log_dir", "output_config_path", "time_profiling_path", "memory_profiling_path")
    vars(args).update(own | said | dict.fromkeys(folders, str(folder)))
    # It reads this file for any network and ships one of a single server; where tp alone is asked for, nothing uses it.
    times = home / "profile_hardware/hardware_configs/sp_time_1nodes_8gpus_per_node.json"
    (folder / f"sp_time_{nodes}nodes_{each}gpus_per_node.json").write_bytes(times.read_bytes())
    found = GalvatronSearchEngine(args)
    model = {"hidden_size": HIDDEN, "layer_num": layers, "seq_len": seq}
    found.set_search_engine_info(str(home / "models/gpt_fa"), [model], profiles(home, folder, seq, flash))
    found.initialize_search_engine()
    return found


def predict(row: Row) -> dict:
    """Time of a plan that all layers share, summed as its search sums it; no row that it can express has a memory."""
    layers, seq, tp, pp, dp, size, batch = whole(row, "layers", "seq", "tp", "pp", "dp", "microbatch", "global_batch")
    with tempfile.TemporaryDirectory() as folder:
        found = engine(layers, seq, devices_of(row), bool(row["flash"]), Path(folder), {})
    from galvatron.core.search_engine.cost_model import OtherTimeCostModel, TimeCostModel, pipeline_costmodel
    from galvatron.core.search_engine.search_engine import pp_division_even

    choices = {"fsdp": int(row["zero"] == 3)} if dp > 1 else {}
    choices |= {"sp": 0} if tp > 1 else {}
    choices |= {"tp": 1} if tp > 1 and dp > 1 else {}
    choices |= {"cpt": 1} if row["recompute"] == FULL else {}
    lists = (
        found.model_args_list, found.train_args_list, found.parallel_args_list, found.profile_model_args_list,
        found.profile_hardware_args_list,
    )  # fmt: skip
    names = ("model_args", "train_args", "parallel_args", "profile_model_args", "profile_hardware_args")
    own = {name: values[0] for name, values in zip(names, lists, strict=True)}
    rest = OtherTimeCostModel(size, pp, devices_of(row), 0, row["zero"] == 3, tp, tp, [seq], **own).gen_result()
    time = pipeline_costmodel(
        TimeCostModel, [layers], *lists, [[pp, tp, dp, choices]] * layers, pp_division_even([layers], pp),
        [microbatches(row)], batch, tp, rest[1][tp],
    )  # fmt: skip
    return {"time": float(time), "memory": None}


def search(task: dict) -> dict:
    """Its own search of one global batch, with its defaults."""
    row = {**task, "generation": "ampere", "recompute": 0, "zero": 0, "cp": 1, "chunks": 1, "tp": 1, "pp": 1, "dp": task["devices"]}  # fmt: skip
    if reason := why_not(row):
        return {"refused": reason}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        limits = {"settle_bsz": task["batch"], "memory_constraint": round(task["capacity"] / 2**30)}
        layers, seq = whole(task, "layers", "seq")
        found = engine(layers, seq, task["devices"], True, Path(folder), limits)
        best = found.parallelism_optimization()
    return {"plans": len(found.strategies), "best": f"{best:.4g} sequences/s"}


if __name__ == "__main__":
    answer(predict, why_not, search)
