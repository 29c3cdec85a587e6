"""Step times of plans over slow links: `python benchmarks/network/run.py --ranks 4 --rates none 1gbit 100mbit`.

For every rate and latency a lab, in it one launch whose ranks build an engine for each plan and take turns.
A plan is soli's text and nothing here knows its words. Writes results/network-steps.json and .md after every lab.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import page
import paper
from lab import Lab, end_well, figures, lab, stopped
from launch import launch
from network import LabError, Network, parse_rate
from paper import record

PLANS = ["dp=4", "dp=4,zero=3", "tp=4", "tp=4,sp=on", "dp=2,tp=2", "pp=4,microbatches=8"]
RANK = Path(__file__).resolve().parent / "engine_rank.py"


def main() -> None:
    """Measure what was asked for and write it down; LabError where not even the first lab can be."""
    end_well()
    args = arguments()
    result: dict = paper.head() | {
        "backend": args.backend, "size": size(args), "warmup": args.warmup, "steps": args.steps,
        "rounds": args.rounds, "noise": paper.noise([]), "labs": [],
    }  # fmt: skip
    hosts = args.ranks // args.per_host

    def write() -> None:
        page.compare(result["labs"])
        record.write(result, page.markdown(result), args.out)

    paper.measured(
        args, result, lambda rate, latency: Network(hosts, args.per_host, rate, latency), lambda network: measure_all(network, args), write,
        {"hosts": hosts, "per_host": args.per_host, "plans": {}},
    )  # fmt: skip
    print(page.markdown(result))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument(
        "--rates", "--rate", nargs="+", type=parse_rate, default=[None, 1000.0, 100.0],
        help="of each host's link: 100mbit, 1gbit, none (not shaped, without latency: what is left is computing)",
    )  # fmt: skip
    parser.add_argument("--latencies", "--latency", nargs="+", type=float, default=[0.0], help="ms, one way")
    parser.add_argument("--plans", nargs="+", default=PLANS, help="as soli reads them")
    parser.add_argument("--backend", choices=("local", "gloo"), default="local")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
    parser.add_argument("--warmup", type=int, default=1, help="steps of a plan in each round that are not counted")
    parser.add_argument("--steps", type=int, default=3, help="steps of a plan in each round that are")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every plan")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds after which a launch is killed")
    parser.add_argument("--out", type=Path, default=paper.RESULTS / "network-steps", help="without a suffix")
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.per_host) < 1 or args.warmup < 0:
        parser.error("--steps, --rounds and --per-host are at least 1, --warmup at least 0")
    if args.ranks % args.per_host:
        parser.error(f"{args.ranks} ranks cannot lie on hosts of {args.per_host}")
    args.plans = list(dict.fromkeys(args.plans))
    return args


def size(args: argparse.Namespace) -> dict[str, int]:
    """workload.Size, as a dictionary."""
    names = {"layers": "layers", "width": "width", "heads": "heads", "vocabulary": "vocabulary"}
    return {k: getattr(args, v) for k, v in names.items()} | {"tokens": args.sequence, "batch": args.batch}


def measure_all(network: Network, args: argparse.Namespace) -> dict:
    """One lab: a row for every plan, and what the network said of itself."""
    with lab(network) as made:
        began = time.monotonic()
        plans = measure(made, args)
        for plan, row in plans.items():
            said = row.get("error") or f"{paper.between(row['step_ms'])} ms a step"
            print(f"  {plan}: {said}", flush=True)
        return {"plans": plans, "network": figures(made), "seconds": round(time.monotonic() - began, 1)}


def measure(made: Lab, args: argparse.Namespace) -> dict[str, dict]:
    """The plans' rows. One that brings its process down is noted, and the others start again without it."""
    rows: dict[str, dict] = {}
    left = list(args.plans)
    while left:
        command = [
            str(RANK), "--plans", *left, "--size", json.dumps(size(args)), "--warmup", str(args.warmup),
            "--steps", str(args.steps), "--rounds", str(args.rounds),
        ]  # fmt: skip
        extra = {"SOLI_BACKEND": args.backend, "SOLI_DEADLINE": str(args.deadline / 2)}
        outcome = launch(made, command, args.deadline, extra)
        if not outcome.error:
            rows |= page.rows([r["plans"] for r in outcome.records])
            break
        # what stopped them: the rank that failed says where it was, else the first that says anything
        spoke = outcome.records if outcome.failed is None else [outcome.records[outcome.failed], *outcome.records]
        culprit = next((r["at"] for r in spoke if r.get("at")), None)
        for plan in left if culprit is None else [culprit]:
            rows[plan] = {"error": outcome.error}
        left = [plan for plan in left if plan not in rows]
    return {plan: rows[plan] for plan in args.plans}


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(stopped("run", error))
