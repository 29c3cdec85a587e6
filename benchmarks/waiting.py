"""What waiting costs: `python benchmarks/waiting.py`. Writes results/waiting.json and .md.

idle: one rank comes two seconds late to a barrier; the CPU time that each of the others spends meanwhile.
busy: two ranks compute while all others wait in a barrier; their time over that of the same with nobody waiting.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import record
from launch import launch

HERE = Path(__file__).resolve().parent
LATE_SECONDS, COMPUTE_STEPS = 2.0, 60


def main() -> None:
    """Measure both backends at several numbers of ranks, alternating."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank-of", choices=["gloo", "local"], help="used by this program itself")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "waiting")
    args = parser.parse_args()
    if args.rank_of:
        return rank(args.rank_of, args.out)
    runs: dict[tuple[str, int], list[list[dict]]] = {}
    for _ in range(args.rounds):
        for n in args.ranks:
            for backend in ("gloo", "local"):
                outcome = launch([sys.executable, str(HERE / "waiting.py"), "--rank-of", backend], n, 120.0)
                if outcome.error:
                    raise SystemExit(f"{backend}, {n} ranks: {outcome.error}")
                runs.setdefault((backend, n), []).append(outcome.records)
                print(f"{backend}, {n} ranks: ok", flush=True)
    rows = [row(backend, n, records) for (backend, n), records in runs.items()]
    result = {**record.head(), "rows": rows}
    lines = [
        f"{result['date']}, `{result['command']}`, {result['machine']['cores']} cores. Medians of {args.rounds} rounds.",
        "",
        f"idle: CPU ms of a rank that waits {LATE_SECONDS:g} s. busy: time of two ranks that compute while the others "
        "wait, over the same with nobody waiting.",
        "",
        "| backend | ranks | idle | busy |",
        "|---|---:|---:|---:|",
        *(f"| {r['backend']} | {r['ranks']} | {r['idle_ms']:.1f} | {r['busy']:.3f} |" for r in rows),
    ]
    record.write(result, "\n".join(lines) + "\n", args.out)
    print("\n".join(lines))


def row(backend: str, n: int, rounds: list[list[dict]]) -> dict:
    """Medians over the rounds; of the waiting ranks the one that spent most, of the computing ones the slower."""
    idle = [max(r["idle_s"] for r in records[1:]) for records in rounds]
    busy = [max(r["with"] for r in records[:2]) / max(r["alone"] for r in records[:2]) for records in rounds]
    return {"backend": backend, "ranks": n, "idle_ms": 1e3 * statistics.median(idle), "busy": statistics.median(busy)}


def rank(backend: str, out: Path) -> None:
    """One rank: wait, compute with nobody waiting, compute while the others wait."""
    import torch
    import torch.distributed as dist

    import soli.backend  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    me = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    matrix = torch.randn(512, 512)

    def compute() -> float:
        began = time.perf_counter()
        for _ in range(COMPUTE_STEPS):
            matrix @ matrix
        return time.perf_counter() - began

    def sleep_until(key: str) -> None:
        """Wait without any backend."""
        while not store.check([key]):
            time.sleep(0.05)

    found = {"idle_s": 0.0, "alone": 0.0, "with": 0.0}
    compute()
    dist.barrier()
    if me == 0:
        time.sleep(LATE_SECONDS)
    before = time.process_time()
    dist.barrier()
    found["idle_s"] = time.process_time() - before
    if me < 2:
        found["alone"] = compute()
        store.set(f"alone{me}", "1")
    sleep_until("alone0")
    sleep_until("alone1")
    dist.barrier()
    if me < 2:
        time.sleep(0.2)  # the others are in the barrier now
        found["with"] = compute()
    dist.barrier()
    out.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
