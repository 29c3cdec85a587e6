"""Law 1 on a GPU: `python benchmarks/gpu_parity.py`, a part of `make gpu-check`.

The rows of tests/test_parity.py (every two choices of a plan together, every model in each way), of ranks on this machine's GPUs: over
NCCL where each has one; where they share one over gloo, and once more over NCCL, each as if it were on a host of its own. The
sequential program runs on the GPU too, in float64: what dropout draws is a device's own.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record
import torch

from soli.core.errors import SoliError
from soli.mesh.backends import cores
from soli.verify.parity import BOUND, Row, check

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from cases import CASES, selection
from pool import Pool

OUT = Path(__file__).resolve().parent / "results" / "gpu-parity"
RANKS = 4
DEADLINE = 60.0


@dataclasses.dataclass
class Found:
    """A row over a backend: the worst relative error, or why there is none."""

    backend: str
    row: Row
    error: str = ""


def main() -> int:
    """Run every row; 1 if one is over the bound or did not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="rows that are not begun by then are left out, and counted"
    )
    parser.add_argument("--pools", type=int, default=max(cores() // RANKS, 1), help="of ranks, at once")
    parser.add_argument("--out", type=Path, default=OUT, help="without a suffix")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_parity.py runs on GPUs, and torch finds none here")
    backends = ["nccl"] if torch.cuda.device_count() >= RANKS else ["gloo", "nccl"]
    rows = selection(most_ranks=RANKS)
    found: list[Found] = []
    for number, backend in enumerate(backends):
        if backend == "nccl":
            os.environ["SOLI_POOL_NCCL"] = "1"
        until = time.monotonic() + args.seconds / len(backends)
        found += over(backend, rows if not number else [row for row in rows if row[2] > 1], args.pools, until)
    result = record.head() | {
        "device": torch.cuda.get_device_name(), "devices": torch.cuda.device_count(), "bound": BOUND,
        "asked": len(rows) + sum(row[2] > 1 for row in rows) * (len(backends) - 1), "rows": [dataclasses.asdict(one) for one in found],
    }  # fmt: skip
    record.write(result, page(result, found), args.out)
    bad = [one for one in found if one.error or one.row.worst > BOUND]
    print(f"{len(found)} of {result['asked']} rows, {len(bad)} over {BOUND:g} or not run")
    for one in bad:
        print(f"{one.row.model} {one.row.plan} over {one.backend}: {one.row.worst:.1e} {one.row.tensor}\n{one.error}")
    return 1 if bad or len(found) < result["asked"] else 0


def over(backend: str, rows: list[tuple[str, str, int]], pools: int, until: float) -> list[Found]:
    """All rows, by so many pools of ranks at once."""
    waiting = iter(rows)  # next() is atomic

    def work(_: int) -> list[Found]:
        pool, found = Pool(RANKS, "forkserver"), []
        for row in waiting:
            found.append(one(pool, backend, *row))
            print(found[-1].row, backend, found[-1].error, flush=True)
            if time.monotonic() > until:
                break
        pool.close()
        return found

    with ThreadPoolExecutor(pools) as threads:
        return list(itertools.chain.from_iterable(threads.map(work, range(pools))))


def one(pool: Pool, backend: str, name: str, plan: str, ranks: int) -> Found:
    """A row."""
    try:
        rows = pool.run(checked, name, plan, ranks, ranks=ranks, deadline=DEADLINE)
    except SoliError as error:
        return Found(backend, Row(name, plan, ranks, float("inf"), ""), str(error))
    return Found(backend, max(rows, key=lambda row: row.worst))


def checked(name: str, plan: str, ranks: int) -> Row:
    """On every rank."""
    return check(CASES[name], plan, ranks)


def page(result: dict, found: list[Found]) -> str:
    """The table."""
    done, lost = [f for f in found if not f.error], [f for f in found if f.error]
    worst = {b: [f.row.worst for f in done if f.backend == b] for b in dict.fromkeys(f.backend for f in done)}
    told = "; ".join(
        f"over {b} {len(w)} rows, the worst {max(w):.1e}, the median {statistics.median(w):.1e}"
        for b, w in worst.items()
    )
    lines = [
        "# Parity on a GPU", "", record.line(result), "",
        f"{result['devices']} {result['device']}: the sequential program and each plan, three steps in float64; {len(found)} of {result['asked']} rows were run. "
        f"{told}. The bound is {BOUND:g}. {len(lost)} failed. "
        "Ranks that share a GPU talk over gloo; over NCCL each of them is told that it is on a host of its own.", "",
        "| model | plan | ranks | over | worst relative error | of |", "|---|---|---:|---|---:|---|",
    ]  # fmt: skip
    lines += [
        f"| {f.row.model} | `{f.row.plan}` | {f.row.ranks} | {f.backend} | {f'{f.row.worst:.1e} | {f.row.tensor}' if not f.error else 'failed |'} |"
        for f in found
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
