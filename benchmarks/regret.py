"""How much longer a step takes under the plan that plan="auto" chooses than under the best: `make regret`, needs root.

For each model and network of this machine every plan of the space (planner/candidates.py: all layouts, all their
variants) runs two steps; then auto and auto=probe choose, with a calibration of their own; then the eight best and what
was chosen run five rounds of eight steps more, in turns (three of four, where the JSON has four times of a plan). Regret: the median of the chosen over that of the best, less 1.
The variants of a layout that takes twice as long as the best one are not run, unless with --all: `gain` is how many
times as fast as its layout a variant was at most. A case that is cut off goes on where it was (results/regret-*.part.json).
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "network"))  # its launch, and not the one beside this file

import record
from lab import end_well, lab, stopped
from launch import launch
from network import LabError, Network, spell

from soli.core.plan import Plan

WITHIN = 2.0
RANK = Path(__file__).resolve().parent / "regret_rank.py"
OUT = Path(__file__).resolve().parent / "results" / "regret"
MODELS = ("gpt", "llama", "bert", "vit")
NETWORKS = {"full": (1, None), "two-level": (2, 1000.0), "slow": (4, 1000.0)}
"""Hosts, Mbit/s of a host's link."""
EVERY = [f"{model}:{network}:{ranks}" for ranks in (4, 8) for network in NETWORKS for model in MODELS]


def main() -> None:
    """Measure what was asked for, and write it down after every launch."""
    end_well()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=EVERY, help="such as gpt:full:4; the other rows stay as they are", choices=EVERY,
        metavar="MODEL:NETWORK:RANKS",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="every variant of every layout")
    parser.add_argument("--reuse", action="store_true", help="choose again among plans as they were measured before")
    parser.add_argument("--deadline", type=float, default=3600.0)
    args = parser.parse_args()
    written = OUT.with_suffix(".json")
    rows = (
        {_name(row): row for row in json.loads(written.read_text(encoding="utf-8"))["rows"]} if written.exists() else {}
    )
    for one in args.only:
        model, network, ranks = one.split(":")
        hosts, rate = NETWORKS[network]
        command = [str(RANK), "--model", model, *([] if args.all else ["--within", str(WITHIN)])]
        with lab(Network(hosts, int(ranks) // hosts, rate, 0.0)) as made, tempfile.TemporaryDirectory() as cache:
            if args.reuse and "measured" in rows.get(one, {}):
                known = Path(cache) / "known.json"
                before = {"plans": rows[one]["measured"], "slow": rows[one]["slow"]}
                known.write_text(json.dumps(before), encoding="utf-8")
                command += ["--known", str(known)]
            kept = OUT.with_name(f"regret-{one.replace(':', '-')}.part.json")
            command += ["--kept", str(kept)]
            outcome = launch(made, command, args.deadline, {"SOLI_BACKEND": "local", "SOLI_CACHE": cache})
            if not outcome.error:
                kept.unlink(missing_ok=True)
        head = record.head()
        row = {"model": model, "network": network, "ranks": int(ranks), "rate": spell(rate), "date": head["date"]}
        row |= {"error": outcome.error} if outcome.error else judged(outcome.records[0], int(ranks))
        rows[one] = row
        print({k: v for k, v in row.items() if k not in ("measured", "predicted", "auto_ran", "probe_ran")}, flush=True)
        result = {**head, "rows": [rows[name] for name in EVERY if name in rows]}
        record.write(result, page(result), OUT)
    print(page(result))


def _name(row: dict) -> str:
    return f"{row['model']}:{row['network']}:{row['ranks']}"


def _layout(plan: str) -> tuple:
    one = Plan.parse(plan)
    return one.dp, one.tp, one.cp, one.pp, one.tensor, one.depth, one.sp


def _gains(plans: dict) -> Iterator[float]:
    """How many times as fast as a layout, as bases() gives it, its quickest variant is: of every layout."""
    for first in {_layout(plan): None for plan in plans}:
        alike = [times[0] for plan, times in plans.items() if _layout(plan) == first]
        yield alike[0] / min(alike)


def judged(found: dict, ranks: int) -> dict:
    """Regret of both choices, and how the predictions stand to what was measured."""
    seconds = {plan: statistics.median(times[1:] or times) for plan, times in found["plans"].items()}
    sure = {plan: seconds[plan] for plan, times in found["plans"].items() if len(times) > 1}
    best = min(sure, key=lambda plan: sure[plan])
    predicted = found["auto"]["predicted"]
    both = [(predicted[plan], seconds[plan]) for plan in predicted if plan in seconds]
    return {
        "plans": len(seconds), "refused": len(found["refused"]), "best": best, "best_s": sure[best],
        "auto": found["auto"]["plan"], "auto_regret": sure[found["auto"]["plan"]] / sure[best] - 1,
        "probe": found["probe"]["plan"], "probe_regret": sure[found["probe"]["plan"]] / sure[best] - 1,
        "dp_regret": min(s for plan, s in seconds.items() if _layout(plan) == _layout(f"dp={ranks}")) / sure[best] - 1,
        "slow": found["slow"], "gain": max(_gains(found["plans"])),
        "median_regret": statistics.median(seconds.values()) / sure[best] - 1,
        "auto_seconds": found["auto"]["seconds"], "probe_seconds": found["probe"]["seconds"],
        "error_median": statistics.median(abs(p / s - 1) for p, s in both),
        "measured": found["plans"], "predicted": predicted, "auto_ran": found["auto"]["ran"], "probe_ran": found["probe"]["ran"],
    }  # fmt: skip


def page(result: dict) -> str:
    """The results for people."""
    lines = [
        "# What plan=\"auto\" chooses, beside every plan measured",
        "", record.line(result), "", " ".join(__doc__.split("\n\n")[1].split()), "",
        "Two cores are all that the ranks have. `two-level`: two hosts (network namespaces), 1 Gbit/s between them; `slow`:",
        "four hosts. `dp`: regret of the best of data parallelism and ZeRO-1; `any`: of the median plan.",
        "`off`: median of |predicted / measured - 1| over the plans that",
        "auto rehearsed. The rows are of several runs; when each was made is in the JSON file.", "",
        "| ranks | network | model | plans | best | auto | regret | auto=probe | regret | dp | any | gain | off | seconds to choose |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    done = [row for row in result["rows"] if "error" not in row]
    for r in done:
        lines.append(
            f"| {r['ranks']} | {r['network']} | {r['model']} | {r['plans']} | `{r['best']}` {1e3 * r['best_s']:.0f} ms | `{r['auto']}` | "
            f"{r['auto_regret']:.1%} | `{r['probe']}` | {r['probe_regret']:.1%} | {r['dp_regret']:.1%} | "
            f"{r['median_regret']:.0%} | {r['gain']:.2f} | {r['error_median']:.0%} | {r['auto_seconds']:.0f}, {r['probe_seconds']:.0f} |"
        )
    for key in ("auto_regret", "probe_regret") if done else ():
        values = [r[key] for r in done]
        lines += ["", f"{key.replace('_', ' ')}: mean {statistics.mean(values):.1%}, worst {max(values):.1%}"]
    lines += [
        f"\n{r['model']} on {r['network']} ({r['ranks']} ranks) did not run: {r['error']}"
        for r in result["rows"]
        if "error" in r
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(stopped("regret", error))
