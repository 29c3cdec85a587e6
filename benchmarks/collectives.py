"""What a step sends under tensor parallelism: `python benchmarks/collectives.py`. Writes results/collectives.json and .md.

One step of each entry on two ranks, the small model, over gloo: how many collectives rank 0 issues of each kind, and
their bytes. soli records its own; those of the others are recorded as torch dispatches them.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

import envs
import record
import workload
from entries import ENTRIES
from launch import launch

HERE = Path(__file__).resolve().parent
NAMES = (
    "tp", "megatron-tp", "tp-dtensor", "soli-tp", "tp-sp", "megatron-tp-sp", "soli-tp-sp", "hf-tp-plan", "soli-hf-tp",
)  # fmt: skip
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def main() -> None:
    """Count every entry's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank-of", help="used by this program itself")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "collectives")
    args = parser.parse_args()
    if args.rank_of:
        return rank(args.rank_of, args.out)
    rows = {}
    for name in NAMES:
        environment = ENTRIES[f"{name}-gloo"].environment
        command = [str(envs.python_of(environment)), str(HERE / "collectives.py"), "--rank-of", name]
        variables = envs.variables_of(environment) | {"BENCH_BACKEND": "gloo", "SOLI_BACKEND": "gloo"}
        outcome = launch(command, 2, 240.0, variables)
        if outcome.error:
            raise SystemExit(f"{name}: {outcome.error}")
        rows[name] = outcome.records[0]
        print(f"{name}: {rows[name]}", flush=True)
    result = {**record.head(), "rows": rows}
    lines = [
        f"{result['date']}, `{result['command']}`. Collectives of one step on rank 0 of two, small model, and MiB.",
        "",
        "| entry | " + " | ".join(KINDS) + " | other |",
        "|---|" + "---:|" * (len(KINDS) + 1),
        *(f"| {name} | " + " | ".join(cells(found)) + " |" for name, found in rows.items()),
    ]
    record.write(result, "\n".join(lines) + "\n", args.out)
    print("\n".join(lines))


def cells(found: dict[str, list[int]]) -> list[str]:
    """Count and MiB of each kind, and of all others together."""
    others = [found[kind] for kind in found if kind not in KINDS]
    columns = [found.get(kind, [0, 0]) for kind in KINDS]
    columns.append([sum(column) for column in zip(*others, strict=True)] if others else [0, 0])
    return [f"{count}, {size / 2**20:.1f}" if count else "" for count, size in columns]


def rank(name: str, out: Path) -> None:
    """One rank: a step to settle, then one that is counted."""
    from soli.mesh.record import record_torch, recorder

    entry = ENTRIES[f"{name}-gloo"]
    step = importlib.import_module(f"entries.{entry.module}").build(entry.mode, "small")
    batches = workload.build_batches("small")
    step(batches[0])
    recorder.clear()
    with contextlib.nullcontext() if entry.system == "soli" else record_torch():
        step(batches[1])
    found: dict[str, list[int]] = {}
    for one in recorder.records:
        count, size = found.get(one.operation, [0, 0])
        found[one.operation] = [count + 1, size + one.bytes]
    out.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # some systems leave threads and groups


if __name__ == "__main__":
    main()
