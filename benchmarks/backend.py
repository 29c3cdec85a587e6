"""Latency and bandwidth of the local backend: `python benchmarks/backend.py [--ranks 2 4 8] [--rounds 3]`.

Alternating rounds over the systems, each a fresh launch that goes through all operations and sizes. Writes
results/backend.json and .md; `docs/draw.py` makes the picture of them.
"""

import argparse
import statistics
from pathlib import Path

import envs
import probe
import record
from launch import launch

HERE = Path(__file__).resolve().parent
SYSTEMS = {"gloo": "base", "local": "base", "local-shared": "base", "deepspeed-shm": "deepspeed"}
"""System -> environment. local-shared: the tensors lie in memory that the ranks share (no copies)."""


def main() -> None:
    """Measure and write after every round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=2**28, help="bytes")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "backend")
    args = parser.parse_args()
    raw: dict[str, list[dict]] = {f"{system} {n}": [] for n in args.ranks for system in SYSTEMS}
    shares = []
    for turn in range(args.rounds):
        for n in args.ranks:
            for system, environment in SYSTEMS.items():
                before = probe.cpu_ticks()
                found, cpu = measure(system, environment, n, args.largest)
                shares.append(probe.cpu_shares(before, probe.cpu_ticks(), cpu))
                raw[f"{system} {n}"].append(found)
                print(f"round {turn + 1}/{args.rounds} {system} {n} ranks: {found.get('error', 'ok')}", flush=True)
        result = {
            **record.head(),
            "rounds": args.rounds,
            "noise": {k: round(statistics.fmean(s[k] for s in shares), 4) for k in ("steal", "others")},
            "rows": rows(raw, args.ranks),
            "raw": raw,
        }
        record.write(result, markdown(result), args.out)
    print(markdown(result))


def measure(system: str, environment: str, n: int, largest: int) -> tuple[dict, float]:
    """One launch: {operation: {bytes: seconds}}, of the slowest rank, and the CPU seconds it took."""
    state = envs.state_of(environment)
    if not state["ok"]:
        return {"error": state["reason"]}, 0.0
    command = [str(envs.python_of(environment)), str(HERE / "backend_rank.py"), system, str(largest)]
    outcome = launch(command, n, 300.0, envs.variables_of(environment))
    for left in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
        left.unlink()  # 66 MB a rank that its operator leaves behind: after some runs the machine is full
    if outcome.error:
        return {"error": outcome.error}, outcome.cpu_seconds
    first = outcome.records[0]
    found = {
        name: {size: max(r[name][size] for r in outcome.records) for size in sizes} for name, sizes in first.items()
    }
    return found, outcome.cpu_seconds


def rows(raw: dict[str, list[dict]], ranks: list[int]) -> list[dict]:
    """One row for each operation, number of ranks and size: milliseconds of each system, medians of the rounds."""
    keys = sorted(
        {
            (name, n, int(size))
            for n in ranks
            for system in SYSTEMS
            for found in raw[f"{system} {n}"]
            if "error" not in found
            for name, sizes in found.items()
            for size in sizes
        }
    )
    table = []
    for name, n, size in keys:
        row: dict = {"operation": name, "ranks": n, "bytes": size}
        for system in SYSTEMS:
            times = [f[name][str(size)] for f in raw[f"{system} {n}"] if str(size) in f.get(name, {})]
            if times:
                row[system] = round(1e3 * statistics.median(times), 4)
        table.append(row)
    return table


def markdown(result: dict) -> str:
    """The table, with what was used and how quiet the machine was."""
    noise = result["noise"]
    lines = [
        f"{result['date']}, `{result['command']}`",
        "",
        f"{result['machine']['processor']}, {result['machine']['cores']} cores; torch {result['versions']['torch']}. "
        f"Milliseconds a call, calls in a row, slowest rank, median of {result['rounds']} alternating rounds. "
        f"The host stole {noise['steal']:.1%}, other programs took {noise['others']:.1%}. `copy`: all ranks copy as "
        "many bytes at once, what memory allows. Ratios: gloo's time over that of the local backend.",
        "",
        "| operation | ranks | bytes | gloo | local | local, shared tensors | DeepSpeed's shared memory | ratio | ratio, shared |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        cells = [f"{row[s]:.4g}" if s in row else "" for s in SYSTEMS]
        ratios = [
            f"{row['gloo'] / row[s]:.1f}" if s in row and "gloo" in row and row["operation"] != "copy" else ""
            for s in ("local", "local-shared")
        ]
        lines.append(f"| {row['operation']} | {row['ranks']} | {row['bytes']:,} | " + " | ".join(cells + ratios) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
