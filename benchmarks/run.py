"""Step time of every system: `python benchmarks/run.py --sizes small big --rounds 3 [--only NAME ...]`.

Alternating rounds (entry A, B, C, ..., then again), each run a fresh launch of its ranks. Writes
results/step-time-SIZES.json and .md after every round, so that a long measurement that is stopped is not lost.
"""

import argparse
import statistics
from pathlib import Path

import envs
import probe
import record
import table
import workload
from entries import ENTRIES, Entry
from launch import launch

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure what was asked for and write it down."""
    args = arguments()
    wanted = args.only or [name for name, entry in ENTRIES.items() if not entry.asked]
    references = list(dict.fromkeys(ENTRIES[name].reference for name in wanted))
    names = [*references, *(name for name in ENTRIES if name in wanted and name not in references)]
    result = describe(args, names)
    shares: list[dict[str, float]] = []
    for size in args.sizes:
        runs: dict[str, list[dict]] = {name: [] for name in names}
        for turn in range(args.rounds):
            for name in names:
                found = measure(name, size, args)
                runs[name].append(found)
                if "shares" in found:
                    shares.append(found["shares"])
                said = found.get("error") or f"{found['step_ms']:.1f} ms a step"
                print(f"{size} round {turn + 1}/{args.rounds} {name}: {said}", flush=True)
            result["sizes"][size] = table.rows(runs)
            result["raw"][size] = runs
            result["noise"] = noise(result["sizes"], shares)
            record.write(result, table.markdown(result), args.out)
    print(table.markdown(result))
    print(f"written: {args.out}.json and {args.out}.md")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(workload.SIZES), default=list(workload.SIZES))
    parser.add_argument("--steps", type=int, default=12, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), metavar="NAME", help=", ".join(ENTRIES))
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds after which a run is killed")
    parser.add_argument("--out", type=Path, help="without a suffix; default: results/step-time-SIZES")
    args = parser.parse_args()
    args.out = args.out or HERE / "results" / "-".join(["step-time", *args.sizes])
    if min(args.steps, args.rounds) < 1 or args.warmup < 0:
        parser.error("--steps and --rounds are at least 1, --warmup at least 0")
    return args


def measure(name: str, size: str, args: argparse.Namespace) -> dict:
    """One launch of one entry: its digest, or {"error": why there is none}."""
    entry = ENTRIES[name]
    state = envs.state_of(entry.environment)
    if not state["ok"]:
        return {"error": state["reason"], "skipped": True}
    command = [
        str(envs.python_of(entry.environment)), str(HERE / "rank.py"), "--entry", name, "--size", size,
        "--warmup", str(args.warmup), "--steps", str(args.steps),
    ]  # fmt: skip
    before = probe.cpu_ticks()
    outcome = launch(command, entry.world, args.deadline, variables_of(entry))
    shares = probe.cpu_shares(before, probe.cpu_ticks(), outcome.cpu_seconds)
    found = {"error": outcome.error} if outcome.error else table.digest(outcome.records)
    return {**found, "seconds": round(outcome.seconds, 1), "shares": shares}


def variables_of(entry: Entry) -> dict[str, str]:
    """What the ranks of an entry find in their environment besides what all have."""
    backend = {"BENCH_BACKEND": entry.backend, "SOLI_BACKEND": entry.backend}
    return envs.variables_of(entry.environment) | backend


def noise(sizes: dict[str, dict[str, dict]], shares: list[dict[str, float]]) -> dict[str, float]:
    """How quiet the machine was: mean shares of the runs, and the rounds' spread."""
    steps = [row["step_ms"] for rows in sizes.values() for row in rows.values() if "step_ms" in row]
    spreads = [(s["max"] - s["min"]) / s["median"] for s in steps]
    return {
        "steal": round(statistics.fmean([s["steal"] for s in shares] or [0.0]), 4),
        "others": round(statistics.fmean([s["others"] for s in shares] or [0.0]), 4),
        "round_spread": round(statistics.median(spreads or [0.0]), 4),
    }


def describe(args: argparse.Namespace, names: list[str]) -> dict:
    """The head of the record: where, with what, when, how."""
    result = record.head()
    for environment in sorted({ENTRIES[n].environment for n in names} - {"base"}):
        result["versions"] |= {k: v for k, v in envs.state_of(environment)["versions"].items() if k != "torch"}
    return result | {
        "steps": args.steps,
        "warmup": args.warmup,
        "rounds": args.rounds,
        "loss_tolerance": table.LOSS_TOLERANCE,
        "noise": {"steal": 0.0, "others": 0.0, "round_spread": 0.0},
        "sizes": {},
        "raw": {},
    }


if __name__ == "__main__":
    main()
