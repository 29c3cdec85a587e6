"""How long the planner's search takes: `python benchmarks/search.py`. Writes results/search.json and .md.

One process, one thread: dense models on 64 to 100 000 devices. Each search looks at every plan; rounds alternate.
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
CLUSTERS = {"h100:8x8": 512, "h100:8x64": 1024, "h100:8x640": 2048, "h100:8x2048": 8192, "h100:8x12288": 16384, "h100:8x12500": 100000}  # fmt: skip


def main() -> None:
    """Times in alternating rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "search", help="without a suffix")
    args = parser.parse_args()
    times: dict[tuple[str, str], list[float]] = {}
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for _ in range(args.rounds):
        for name, model in MODELS.items():
            for cluster, batch in CLUSTERS.items():
                task = Task(model, read_cluster(cluster), batch, 8192)
                start = time.perf_counter()
                found = search(task)
                times.setdefault((name, cluster), []).append(time.perf_counter() - start)
                counts[name, cluster] = found.counted, len(found.points)
    rows = [
        {
            "model": name, "cluster": cluster, "devices": read_cluster(cluster).size, "global_batch": CLUSTERS[cluster],
            "plans": counts[name, cluster][0], "fit": counts[name, cluster][1],
            "seconds": statistics.median(found), "least": min(found), "most": max(found),
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
        f"Every plan is looked at. Seconds, median of {result['rounds']} alternating rounds [least, most]; one thread; the "
        f"process took {result['peak_mib']} MiB at most.", "",
        "| model | cluster | devices | sequences | plans | fit | s |", "|---|---|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['model']} | {r['cluster']} | {r['devices']} | {r['global_batch']} | {r['plans']} | {r['fit']} "
        f"| {r['seconds']:.2f} [{r['least']:.2f}, {r['most']:.2f}] |"
        for r in result["rows"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
