"""Context parallelism on one machine: `python benchmarks/context.py`. Writes results/context.json and .md.

Step times of one long sequence: ring with zigzag and without, Ulysses, rings of scores, beside one process on the same
work; and the longest sequence whose step fits a fixed memory a rank, on 1, 2, 4 and 8 ranks.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import record
from launch import launch
from memory import GLOO, MALLOC

HERE = Path(__file__).resolve().parent
TIMED = {"vocab": 256, "dim": 256, "layers": 2, "heads": 8, "groups": 8, "hidden": 704}
DEEP = {"vocab": 256, "dim": 384, "layers": 4, "heads": 8, "groups": 8, "hidden": 1024}
KINDS = {
    "one process": ("dp=1", False), "ring": ("cp={}", False), "ring, contiguous": ("cp={}", True),
    "ulysses": ("cp={},context=ulysses", False), "scores": ("cp={},context=scores", False),
}  # fmt: skip


def main() -> None:
    """Times in alternating rounds, then memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of the sequence that is timed")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=128.0, help="MiB that a step may grow a rank by")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "context", help="without a suffix")
    args = parser.parse_args()
    result: dict = {**record.head(), "timed": TIMED, "deep": DEEP, "tokens": args.tokens, "budget_mib": args.budget}
    runs: dict[tuple[str, int, int], list[list[dict]]] = {}
    for _ in range(args.rounds):
        for name, ranks, threads in timed(args.ranks):
            plan, apart = KINDS[name]
            words = ["--plan", plan.format(ranks), "--config", json.dumps(TIMED), "--tokens", str(args.tokens)]
            words += ["--contiguous"] if apart else []
            found = started(words, ranks, {"OMP_NUM_THREADS": str(threads)})
            runs.setdefault((name, ranks, threads), []).append(found)
            print(f"{name}, {ranks} ranks: {step_of(found):.3f} s", flush=True)
    result["times"] = [row(*key, rounds) for key, rounds in runs.items()]
    result["longest"] = []
    for ranks in (1, 2, 4, 8):
        plan = f"cp={ranks}" if ranks > 1 else "dp=1"
        words = ["--plan", plan, "--config", json.dumps(DEEP), "--budget", str(args.budget)]
        first = started([*words, "--tokens", str(512 * ranks)], ranks, MALLOC | GLOO)[0]
        result["longest"].append({"ranks": ranks, **first})
        print(f"{ranks} ranks: {first['tokens']} tokens", flush=True)
        record.write(result, markdown(result), args.out)
    print(markdown(result))


def timed(many: list[int]) -> list[tuple[str, int, int]]:
    """(what, ranks, threads a rank): one process on one core and on two, then each kind on each number of ranks."""
    kinds = [name for name in KINDS if name != "one process"]
    return [("one process", 1, 1), ("one process", 1, 2), *((name, n, 1) for n in many for name in kinds)]


def started(words: list[str], ranks: int, extra: dict[str, str]) -> list[dict]:
    """The ranks' records."""
    outcome = launch([sys.executable, str(HERE / "context_rank.py"), *words], ranks, 900.0, extra)
    if outcome.error:
        raise SystemExit(f"{' '.join(words)}: {outcome.error}")
    return outcome.records


def step_of(ranks: list[dict]) -> float:
    """Seconds: of each step the slowest rank, of these the median."""
    return statistics.median(max(steps) for steps in zip(*(r["step_s"] for r in ranks), strict=True))


def row(name: str, ranks: int, threads: int, rounds: list[list[dict]]) -> dict:
    """The medians over the rounds. waits: the mean rank's share of the step in which it waits for others' blocks."""
    waits = [
        statistics.fmean(w for r in records for w in r["wait_s"])
        / statistics.fmean(s for r in records for s in r["step_s"])
        for records in rounds
    ]
    steps = [step_of(records) for records in rounds]
    return {
        "kind": name, "ranks": ranks, "threads": threads, "step_s": statistics.median(steps),
        "least_s": min(steps), "most_s": max(steps), "waits": statistics.median(waits),
        "loss": rounds[0][0]["losses"][-1],
    }  # fmt: skip


def markdown(result: dict) -> str:
    """Both tables."""
    about, rows = result["machine"], result["times"]
    one = next(r for r in rows if (r["ranks"], r["threads"]) == (1, 1))
    both = next(r for r in rows if (r["ranks"], r["threads"]) == (1, 2))
    lines = [
        "# Context parallelism on one machine",
        "",
        record.line(result),
        "",
        f"One row of {result['tokens']} tokens, a Llama {result['timed']}, float32, causal. step: seconds, the slowest "
        "rank, median of the rounds' medians [least, most]. share: the step over one thread's divided by the cores that "
        "compute (two at most), 1 being all of them all the time. waits: the part of a step in which a rank waits for "
        "what others send: communication that is not hidden, and ranks that have more to do.",
        "",
        "| | ranks | threads a rank | step s | over one thread | over two threads | share | waits | loss |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for r in rows:
        step, cores = r["step_s"], min(about["cores"], r["ranks"] * r["threads"])
        lines.append(
            f"| {r['kind']} | {r['ranks']} | {r['threads']} | {step:.3f} [{r['least_s']:.3f}, {r['most_s']:.3f}] "
            f"| {step / one['step_s']:.2f} | {step / both['step_s']:.2f} | {one['step_s'] / cores / step:.2f} "
            f"| {r['waits']:.1%} | {r['loss']:.6f} |"
        )
    lines += [
        "",
        f"The longest sequence whose step grows no rank by more than {result['budget_mib']:g} MiB over what it holds "
        f"between steps (VmHWM, malloc gives back at once, gloo), a Llama {result['deep']}:",
        "",
        "| ranks | tokens | of one rank | grew by MiB | tokens a rank |",
        "|---:|---:|---:|---:|---:|",
    ]
    for r in result["longest"]:
        least = result["longest"][0]["tokens"]
        lines.append(
            f"| {r['ranks']} | {r['tokens']} | {r['tokens'] / least:.2f} | {r['tried'][str(r['tokens'])]:.0f} "
            f"| {r['tokens'] // r['ranks']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
