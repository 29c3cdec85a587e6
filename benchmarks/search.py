"""How long the planner's search takes: `python benchmarks/search.py`. Writes results/search.json and .md.

One process, one thread: dense models and mixtures of experts on 64 to 100 000 devices. Each search finds the best ten layouts
of all plans; rounds alternate.
"""

import argparse
import resource
import statistics
import time
from pathlib import Path

import record

from soli.planner.hardware.clusters import read_cluster
from soli.planner.models import Model
from soli.planner.search import Task, search

HERE = Path(__file__).resolve().parent
MODELS = {
    "Llama 8B": Model("Llama 8B", 32, 4096, 32, 8, 128, 14336, True, 128256, 0, 1, False, 8192),
    "Llama 70B": Model("Llama 70B", 80, 8192, 64, 8, 128, 28672, True, 128256, 0, 1, False, 8192),
    "Llama 405B": Model("Llama 405B", 126, 16384, 128, 8, 128, 53248, True, 128256, 0, 1, False, 8192),
}
MIXTURES = {
    "Mixtral 8x22B": Model("Mixtral 8x22B", 56, 6144, 48, 8, 128, 16384, True, 32768, 8, 2, False, 8192),
    "Qwen3 30B-A3B": Model("Qwen3 30B-A3B", 48, 2048, 32, 4, 128, 768, True, 151936, 128, 8, False, 8192),
    "256 experts of 2048": Model("256 experts", 60, 7168, 128, 128, 128, 2048, True, 129280, 256, 9, False, 8192, 1),
}
CLUSTERS = {"h100:8x8": 512, "h100:8x64": 1024, "h100:8x640": 2048, "h100:8x2048": 8192, "h100:8x12288": 16384, "h100:8x12500": 100000}  # fmt: skip


EQUAL = CLUSTERS | {"h100:8x640": 2560, "h100:8x12288": 24576}
"""Sequences that experts' programs can share out equally."""


def tasks() -> dict[tuple[str, str], Task]:
    """soli's plans of dense models, Megatron-LM's of mixtures, which soli does not share out yet."""
    dense = {
        (name, c): Task(model, read_cluster(c), batch, 8192)
        for name, model in MODELS.items()
        for c, batch in CLUSTERS.items()
    }
    mixed = {
        (name, c): Task(model, read_cluster(c), batch, 8192, framework="megatron")
        for name, model in MIXTURES.items()
        for c, batch in EQUAL.items()
    }
    return dense | mixed


def main() -> None:
    """Times in alternating rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "search", help="without a suffix")
    args = parser.parse_args()
    times: dict[tuple[str, str], list[float]] = {}
    busy: dict[tuple[str, str], list[float]] = {}
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    asked = tasks()
    for _ in range(args.rounds):
        for key, task in asked.items():
            start, worked = time.perf_counter(), time.process_time()
            found = search(task)
            times.setdefault(key, []).append(time.perf_counter() - start)
            busy.setdefault(key, []).append(time.process_time() - worked)
            counts[key] = found.counted, found.looked
    rows = [
        {
            "model": name, "cluster": cluster, "framework": asked[name, cluster].framework,
            "devices": read_cluster(cluster).size, "global_batch": asked[name, cluster].batch,
            "plans": counts[name, cluster][0], "looked": counts[name, cluster][1],
            "seconds": statistics.median(found), "least": min(found), "most": max(found), "busy": statistics.median(busy[name, cluster]),
        }
        for (name, cluster), found in times.items()
    ]  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {**record.head(), "rounds": args.rounds, "rows": rows, "peak_mib": round(peak)}
    record.write(result, markdown(result), args.out)
    print(markdown(result))


def markdown(result: dict) -> str:
    """The table."""
    lines = [
        "# How long the search takes", "", record.line(result), "",
        f"The best ten layouts of all plans: *looked* plans were computed, the bounds of the others say that they are slower or too large. Seconds, median of {result['rounds']} alternating rounds [least, most]; one thread; and the median seconds of its core, which others may have used too; the "
        f"process took {result['peak_mib']} MiB at most.", "",
        "| model | program | cluster | devices | sequences | plans | looked | s | of the core |", "|---|---|---|---:|---:|---:|---:|---|---:|",
    ]  # fmt: skip
    lines += [
        f"| {r['model']} | {r['framework']} | {r['cluster']} | {r['devices']} | {r['global_batch']} | {r['plans']} | {r['looked']} "
        f"| {r['seconds']:.2f} [{r['least']:.2f}, {r['most']:.2f}] | {r['busy']:.2f} |"
        for r in result["rows"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
