"""Other planners beside soli on the same published rows: `python benchmarks/planners.py [--clone NAME=FOLDER ...]`.

Writes results/planners.json and .md. Each planner runs in its own environment (envs.py) by its program in rivals/, with its
own files and defaults; rows it cannot express are counted with the reason. soli stands beside each on exactly the rows that
this planner could say: by its shipped constants, which are fitted to these rows, and by constants fitted without the row's
table, since the others were not fitted to these rows either.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envs
import numpy as np
import planner
import record
from planner import Table, errors, ranking, sweeps
from planners_page import page

from soli.core.tables import table
from soli.planner.cells import text, true
from soli.planner.cost.constants import chain, known
from soli.planner.cost.points import of_device
from soli.planner.hardware.clusters import read_cluster
from soli.planner.hardware.devices import devices
from soli.planner.models import Model
from soli.planner.predict import family_of
from soli.planner.rows import TESTS, Row
from soli.planner.search import Task, search

HERE = Path(__file__).resolve().parent
SAME = 3  # plans of a workload that make a sweep


@dataclass(frozen=True)
class Tool:
    """A planner: its environment, its program, and where its code is from if not from the package index."""

    env: str
    words: tuple[str, ...]
    repository: str = ""
    commit: str = ""
    needs: bool = False  # without the clone there is nothing to run
    searches: bool = False


LLM = ("llm-analysis", ("of_llm_analysis.py", "--efficiency"), "cli99/llm-analysis", "d841e40aec8c84b9e76ba9cfbce67418adb172bd")  # fmt: skip
TOOLS = {
    "calculon": Tool("calculon", ("of_calculon.py",), "calculon-ai/calculon", "caa4b11f8fe1fee3ba57adaacb7590d7deabd053", True, True),
    "llm-analysis": Tool(LLM[0], (*LLM[1], "1"), *LLM[2:]),
    "llm-analysis, 0.5": Tool(LLM[0], (*LLM[1], "0.5"), *LLM[2:]),
    "SimuMax": Tool("simumax", ("of_simumax.py",), "MooreThreads/SimuMax", "4dcaae513ba7679d56c116a17cd4a691ec41e252", True, True),
    "Galvatron": Tool("galvatron", ("of_galvatron.py",), searches=True),
}  # fmt: skip

COMMON = {"seq": 2048, "vocab": 51200, "gated": 0, "experts": 0, "active": 1, "head_size": 128}
MODELS = {
    "GPT 7B": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384},
    "GPT 70B": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 32768},
}
TASKS = (
    ("GPT 7B", "a100:2", 32), ("GPT 7B", "a100:8", 128), ("GPT 7B", "a100:8x8", 512), ("GPT 7B", "a100:8x128", 2048),
    ("GPT 70B", "a100:8x8", 512), ("GPT 70B", "a100:8x128", 2048),
)  # fmt: skip
"""Models, clusters, and sequences of a step there. The first is small enough that everything ends."""


# --- rows -------------------------------------------------------------------------------------------------


def rows_of(tables: Sequence[Table]) -> tuple[list[tuple[str, Row]], list[dict[str, Any]]]:
    """Measured rows that soli can read, with their tables; and each as the others are told it."""
    kept = [
        (table.name, row, asked(row, raw))
        for table in tables
        for row, raw in zip(table.rows, table.raw, strict=True)
        if not row.refused and planner.usable(row)
    ]
    return [(name, row) for name, row, _ in kept], [told for _, _, told in kept]


def asked(row: Row, raw: dict[str, str]) -> dict[str, Any]:
    """A row as every planner is told it: soli's point, and what it says of overlap, which soli's constants hold."""
    q = row.point
    device = row.device
    names = ("fp4", "fp8", "bf16", "fp16")
    precision = next(name for name in names if device.tflops.get(name, 0) * 1e12 == q["peak"])
    overlaps = {
        "hides_gradients": "overlap-grad-reduce" in text(raw, "shard") or true(raw, "overlap_grad"),
        "hides_tp": "tp-comm-overlap" in text(raw, "shard"),
    }
    return {**q, **overlaps, "device": device.name, "generation": row.generation, "precision": precision}


def call(tool: Tool, clone: Path | None, message: dict, deadline: float) -> Any:
    """What a planner's program answers; a word where it does not."""
    words = [str(envs.python_of(tool.env)), *tool.words, *(["--clone", str(clone)] if clone else [])]
    variables = {**os.environ, **envs.variables_of(tool.env), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=HERE / "rivals", env=variables, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        said, complaint = process.communicate(json.dumps(message), timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"stopped after {deadline:g} s"
    if process.returncode:
        return f"it fails: {(complaint.strip().splitlines() or ['no word'])[-1][:160]}"
    return json.loads(said)


def why_not(tool: Tool, clone: Path | None) -> str:
    """Why a planner cannot be run here; empty where it can."""
    state = envs.state_of(tool.env)
    if not state["ok"]:
        return state["reason"]
    if tool.needs and clone is None:
        return f"it is not on the package index: give --clone {tool.env}=FOLDER, a clone of github.com/{tool.repository} at {tool.commit[:7]}"
    return ""


def version(tool: Tool, clone: Path | None) -> str:
    """What was run: the clone's commit, or the index's version."""
    if clone is None:
        versions = envs.state_of(tool.env)["versions"]
        name = envs.SPECS[tool.env].packages[0]
        return f"{name} {versions[name]} of the package index"
    head, changed = (
        subprocess.run(["git", "-C", str(clone), *words], capture_output=True, text=True, check=True).stdout.strip()
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )  # fmt: skip
    odd = "" if head == tool.commit else f", not {tool.commit[:7]}"
    return f"{tool.repository} at {head[:7]}{odd}{', changed' if changed else ''}"


# --- figures ----------------------------------------------------------------------------------------------


def figures(
    rows: Sequence[Row], sources: Sequence[str], found: dict[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """Errors and choices of one table, of each kind; only rows that all kinds say count."""
    groups = sweeps(rows, sources, SAME)
    times = np.logical_and.reduce([np.isfinite(time) for time, _ in found.values()])
    memories = np.logical_and.reduce([np.isfinite(memory) for _, memory in found.values()])
    return {
        kind: {
            "time": errors(np.where(times, time, np.nan)),
            "memory": errors(np.where(memories, memory, np.nan)),
            "choice": ranking(rows, time, groups),
        }
        for kind, (time, memory) in found.items()
    }


def compare(
    rows: list[tuple[str, Row]], said: list[dict], own: dict[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """One planner beside soli, table by table."""
    theirs = np.full((2, len(rows)), np.nan)
    for i, ((_, row), answer) in enumerate(zip(rows, said, strict=True)):
        for k, (what, measured) in enumerate((("time", row.time), ("memory", row.memory))):
            if measured and answer.get(what):
                theirs[k, i] = answer[what] / measured
    found = {"it": (theirs[0], theirs[1]), **own}
    result = {}
    for name, chosen in chosen_tables(rows):
        inside = [i for i in chosen if "refused" not in said[i]]
        reasons = Counter(reason_of(said[i]["refused"]) for i in chosen if "refused" in said[i])
        mine = [rows[i][1] for i in inside]
        part = {kind: (time[inside], memory[inside]) for kind, (time, memory) in found.items()}
        result[name] = {
            "rows": len(chosen), "expressed": len(inside), "refused": dict(reasons.most_common()),
            "does not fit, it says": sum(said[i].get("fits") is False for i in inside),
            **(figures(mine, [rows[i][0] for i in inside], part) if inside else {}),
        }  # fmt: skip
    return result


def reason_of(refused: str) -> str:
    """What rows have in common that a planner stops at, whatever their numbers."""
    return re.sub(r"\d[\d.,]*", "N", refused) if refused.startswith("it stops") else refused


def chosen_tables(rows: list[tuple[str, Row]]) -> list[tuple[str, list[int]]]:
    """Each table's rows, and all but tests of toy sizes."""
    names = dict.fromkeys(name for name, _ in rows)
    found = [(name, [i for i, (source, _) in enumerate(rows) if source == name]) for name in names]
    return [*found, ("all but tests", [i for i, (_, row) in enumerate(rows) if row.framework != TESTS])]


def own_ratios(rows: list[tuple[str, Row]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """soli's own: as shipped, and without the row's table."""
    plain, sources = [row for _, row in rows], [source for source, _ in rows]
    shipped = {chain(*family)[-1]: known(*family) for family in map(family_of, plain)}
    layers = {name: np.array(said["layers"]) for name, said in table("soli.planner", "layers.toml").items()}
    numbers = [sorted(set(sources)).index(source) for source in sources]
    return {
        "soli": planner.off(plain, shipped, layers),
        "soli, table left out": planner.held_out(plain, sources, numbers),
    }


# --- searches ---------------------------------------------------------------------------------------------


def tasks() -> list[dict[str, Any]]:
    """What is searched for."""
    device = devices()["a100"]
    base = {
        **of_device(device, "bf16"),
        **COMMON,
        "device": "a100",
        "generation": device.generation,
        "precision": "bf16",
    }
    return [
        {**base, **MODELS[name], "model": name, "cluster": cluster, "devices": read_cluster(cluster).size, "batch": batch}
        for name, cluster, batch in TASKS
    ]  # fmt: skip


def searched_by_soli(task: dict) -> dict[str, Any]:
    """Its own search, every plan looked at."""
    names = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "seq")
    model = Model("", **{n: task[n] for n in names}, gated=False, experts=0, active=1, tied=True)
    start = time.process_time()
    found = search(Task(model, read_cluster(task["cluster"]), task["batch"], task["seq"], framework="megatron"))
    return {"seconds": time.process_time() - start, "plans": found.counted}


def searched(tool: Tool, clone: Path | None, every: list[dict], deadline: float) -> list[dict[str, Any]]:
    """A planner's searches. calculon counts its space first: where that would outlast the deadline at the rate of a search
    that ended, this is said instead."""
    found, rate = [], 0.0
    for task in every:
        print(f"  {tool.env}: {task['model']} on {task['cluster']}", file=sys.stderr, flush=True)
        if tool.env == "calculon":
            plans = call(tool, clone, {"task": {**task, "count": True}}, deadline)["plans"]
            if rate and plans / rate > 2 * deadline:
                found.append({"plans": plans, "projected": plans / rate})
                continue
        said = call(tool, clone, {"task": task}, deadline)
        found.append(said if isinstance(said, dict) else {"why": said})
        if "plans" in found[-1]:
            rate = found[-1]["plans"] / found[-1]["seconds"]
    return found


def main() -> None:
    """Rows, then searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clone", action="append", default=[], metavar="NAME=FOLDER", help="calculon, simumax, llm-analysis"
    )
    parser.add_argument("--deadline", type=float, default=600, help="seconds of one search")
    parser.add_argument("--no-search", action="store_true", help="rows only; searches stay those of OUT")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "planners", help="without a suffix")
    args = parser.parse_args()
    if odd := [word for word in args.clone if not Path(word.partition("=")[2] or "?").is_dir()]:
        parser.error(f"--clone NAME=FOLDER: no folder in {', '.join(odd)}")
    clones = {name: Path(folder).resolve() for name, _, folder in (word.partition("=") for word in args.clone)}
    rows, told = rows_of([Table(name) for name in planner.TABLES])
    message = {"rows": told}
    result: dict[str, Any] = {**record.head(), "rows": len(rows), "tools": {}, "searches": {}}
    result["command"] = re.sub(r"=\S+", "=FOLDER", str(result["command"]))
    ready = {}
    for name, tool in TOOLS.items():
        reason, clone = why_not(tool, clones.get(tool.env)), clones.get(tool.env)
        said = reason or call(tool, clone, message, 3600)
        if isinstance(said, str):
            result["tools"][name] = {"not run": said}
            continue
        ready[name] = said
        result["tools"][name] = {"version": version(tool, clone)}
        print(f"  {name}: {sum('refused' not in one for one in said)} rows", file=sys.stderr, flush=True)
    own = own_ratios(rows)
    for name, said in ready.items():
        result["tools"][name]["tables"] = compare(rows, said, own)
    if not args.no_search:
        every = tasks()
        result["searches"]["soli"] = [searched_by_soli(task) for task in every]
        for name in (n for n in ready if TOOLS[n].searches):
            result["searches"][name] = searched(TOOLS[name], clones.get(TOOLS[name].env), every, args.deadline)
        result["tasks"] = [{k: task[k] for k in ("model", "cluster", "devices", "batch")} for task in every]
    elif (before := args.out.with_suffix(".json")).exists():
        told = json.loads(before.read_text(encoding="utf-8"))
        kept = {"searches": told["searches"], "tasks": told.get("tasks", [])}
        result |= kept | {"searched": told.get("searched", told["date"])}
    record.write(result, page(result), args.out)
    print(page(result))


if __name__ == "__main__":
    main()
