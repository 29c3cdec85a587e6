"""Where the plans that experts published stand in the planner's order: `python benchmarks/experts.py`.

Writes results/experts.json and .md. Each model of the published tables is planned anew on its own devices, with the
constants of the program that ran it; the expert's plan is looked for among all that fit.
"""

import argparse
from dataclasses import fields, replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import record
from planner import Table

from soli.planner.cost.points import INTERLEAVED, RING
from soli.planner.hardware.clusters import Cluster
from soli.planner.models import Model
from soli.planner.offers import SCHEDULES
from soli.planner.rows import Row
from soli.planner.search import LEVELS, Task, costs, peaks, search
from soli.planner.space import layouts, points_of, rows_of, shards, stages

HERE = Path(__file__).resolve().parent
TABLES = ("megatron_sc21", "megatron_h100_weak_scaling", "megatron_llama_example", "nemo_perf_summary", "megatron_bridge_perf_summary", "nanotron_bench_logs")  # fmt: skip
NAMES = ("tp", "cp", "pp", "dp", "sp", "zero", "recompute", "chunks", "microbatch", "ep")


def main() -> None:
    """One line an expert's plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "experts", help="without a suffix")
    args = parser.parse_args()
    rows: list[dict] = []
    for name in TABLES:
        table = Table(name)
        seen: set[tuple] = set()
        for raw, row in zip(table.raw, table.rows, strict=True):
            usable = not row.refused and row.time is not None and not row.point["frozen"]
            key = tuple(row.point.values())
            if usable and key not in seen:
                seen.add(key)
                rows.append({"table": name, "model": raw["model"], "gpu": raw["gpu"], **placed(row)})
    result: dict[str, Any] = {**record.head(), "rows": rows}
    record.write(result, markdown(result), args.out)
    print(markdown(result))


def placed(row: Row) -> dict:
    """Where a row's plan stands among all plans of its task."""
    task = task_of(row)
    alike = task.with_fixed({"replicate": 1.0, "offload": row.point["offload"]})
    found = stages(alike, layouts(alike))
    plain = rows_of(found, (found["most"] == 0) & (found["context"] == RING) & (found["schedule"] <= INTERLEAVED))
    space = points_of(alike, shards(alike, plain))
    own = np.array([row.point[name] for name in NAMES])
    table = np.stack([getattr(space, name) for name in NAMES], axis=1)
    same = np.flatnonzero((table == own).all(axis=1))
    said = {"devices": task.cluster.size, "plan": spelt(row.point), "inferred": row.inferred}
    if not len(same):
        odd = [n for i, n in enumerate(NAMES) if own[i] not in table[:, i]]
        return {**said, "inside": False, "outside": ", ".join(odd) or "their combination"}
    bounds, cost = peaks(task, space), costs(task, space)
    fits = bounds <= task.limit
    mine = int(same[0])
    times = cost.time[fits]
    best = search(task, 1)
    first, quickest = (best.points, best.cost.time[0]) if len(best.points) else (space.take([mine]), cost.time[mine])
    return {
        **said, "inside": True, "fits": bool(fits[mine]), "plans": int(fits.sum()),
        "quicker": float((times < cost.time[mine]).mean()) if fits.any() else 0.0,
        "gain": float(cost.time[mine] / quickest - 1), "best": spelt({f.name: float(getattr(first, f.name)[0]) for f in fields(first)}),
    }  # fmt: skip


def task_of(row: Row) -> Task:
    """A row's model on its devices."""
    q = row.point
    size = int(q["tp"] * q["pp"] * q["cp"] * q["dp"])
    node = int(min(q["node"], size))
    node = node if size % node == 0 else gcd(size, node)
    device = replace(row.device, node=node, net_gbits=q["net"] * 8 / 1e9)
    precision = next(name for name in ("fp8", "fp4", "bf16", "fp16") if device.tflops.get(name, 0) * 1e12 == q["peak"])
    ints = {n: int(q[n]) for n in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab")}
    model = Model(
        "",
        **ints,
        gated=bool(q["gated"]),
        experts=int(q["experts"]),
        active=int(q["active"]),
        tied=bool(q["tied"]),
        seq=0,
    )
    return Task(model, Cluster(device, size // node), int(q["global_batch"]), int(q["seq"]), precision, framework=row.framework)  # fmt: skip


def spelt(point: dict[str, float]) -> str:
    """A plan in short: what is not 1, 0 or none."""
    level = {value: name for name, value in LEVELS.items()}[point["recompute"]]
    usual = {"zero": 0.0}
    words = [f"{n}={point[n]:g}" for n in NAMES if n not in ("recompute", "sp") and point[n] != usual.get(n, 1.0)]
    words += [f"{n}={point[n]:g}" for n in ("replicate", "again") if point.get(n, 0) > (n == "replicate")]
    words += [word for n, word in (("context", "context=ulysses"), ("offload", "offload=optimizer")) if point.get(n)]
    if point.get("schedule", 0) > INTERLEAVED:
        words.append(next(f"schedule={name}" for name, code in SCHEDULES.items() if code == point["schedule"]))
    words += ["sp=on"] * bool(point["sp"]) + [f"recompute={level}"] * (level != "none")
    return ",".join(words)


def markdown(result: dict) -> str:
    """The table, and what it comes to."""
    rows = result["rows"]
    inside = [r for r in rows if r["inside"]]
    early = [r for r in inside if r["quicker"] <= 0.05]
    lines = [
        "# Where experts' plans stand", "", record.line(result), "",
        f"{len(rows)} different plans that were published with their times; {len(inside)} are in the "
        f"planner's space, {len(early)} of these among the first 5% of the plans that fit. *quicker*: the share of plans that "
        "are predicted to be quicker; *gain*: how much longer the expert's plan is predicted to take than the first. The "
        "plans that are counted have what the tables' have: one copy of shards, ring, 1F1B or interleaved, all layers recomputed alike; "
        "the first is of all plans (*again*: layers of a rank that are computed again). The "
        "same model judges both: this says whether experts and planner agree, not who is right. What a row does not say "
        "(often microbatch and recomputation) is inferred, which is part of the plan that is looked for.", "",
        "| table | model | devices | expert's plan | quicker | gain | first plan |", "|---|---|---:|---|---:|---:|---|",
    ]  # fmt: skip
    for r in rows:
        if not r["inside"]:
            lines.append(
                f"| {r['table']} | {r['model']} | {r['devices']} {r['gpu']} | `{r['plan']}` | outside: {r['outside']} | | |"
            )
            continue
        note = "" if r["fits"] else " (may not fit)"
        lines.append(
            f"| {r['table']} | {r['model']} | {r['devices']} {r['gpu']} | `{r['plan']}`{note} | {r['quicker']:.1%} "
            f"| {r['gain']:.1%} | `{r['best']}` |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
