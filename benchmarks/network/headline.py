"""2D, 2.5D and 3D tensor parallelism against 1D over slow links: `python benchmarks/network/headline.py`.

For every number of ranks one launch, whose links get one rate after the other, beside what the closed forms of forms.py
predict; then the forms alone, for accelerators, from 64 to 4096 ranks. Writes results/network-headline.json and .md after
every launch, and keeps what they have of other numbers of ranks.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import forms
import headline_page
import page
import paper
from lab import Lab, LabError, end_well, figures, lab, reshape, stopped
from launch import launch
from network import TCP_PAYLOAD, Network
from paper import record

from soli.core.plan import Plan
from soli.planner.legality import resolve

PLANS = {
    4: ["tp=4", "tp=4,sp=on", "tp=4,tensor=2d", "tp=4,tensor=2d,rows=4", "dp=4"],
    8: [
        "tp=8", "tp=8,sp=on", "tp=8,tensor=2d,rows=4", "tp=8,tensor=2.5d,depth=2", "tp=8,tensor=3d", "dp=8",
    ],
    16: ["tp=16", "tp=16,sp=on", "tp=16,tensor=2d,rows=8", "tp=16,tensor=2.5d,depth=4", "dp=16"],
    64: ["tp=64", "tp=64,sp=on", "tp=64,tensor=2d,rows=16", "tp=64,tensor=2.5d,depth=4", "tp=64,tensor=3d"],
}  # fmt: skip
"""1D first, without and with sp: the others are measured by the better of the two."""
RANK = Path(__file__).resolve().parent / "headline_rank.py"
SEQUENCE = 16
ROWS = {1024: 64, 4096: 256}
"""Tokens of a step, and as rows."""
FEW = {1024: {None: 5, 1000.0: 5, 100.0: 3}, 4096: {None: 5, 100.0: 3}}
ROUNDS = {
    4: FEW,
    8: FEW,
    16: {1024: {None: 3, 100.0: 3}, 4096: {None: 3, 100.0: 3, 10.0: 2}},
    64: {1024: {None: 1, 1.0: 1}},
}
"""For each number of ranks and of tokens, Mbit/s of a link (None is not shaped) and how many rounds. Computing and
sending for 64 ranks take two cores half a minute: faster links show nothing of the network there."""
SIZE = {"layers": 2, "width": 256, "heads": 64, "vocabulary": 1024}


def main() -> None:
    """Measure what is asked for; LabError where no lab can be."""
    end_well()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=sorted(PLANS), default=sorted(PLANS))
    parser.add_argument("--out", type=Path, default=paper.RESULTS / "network-headline", help="without a suffix")
    args = parser.parse_args()
    known = args.out.with_suffix(".json")
    labs: list[dict] = json.loads(known.read_text())["labs"] if known.exists() else []
    for ranks in args.ranks:
        print(f"{ranks} ranks:", flush=True)
        found = measured(ranks)
        labs = sorted([*(one for one in labs if one["ranks"] != ranks), *found], key=lambda one: one["ranks"])
        write(labs, args.out)


def measured(ranks: int) -> list[dict]:
    """A lab for each number of tokens and rate, all of one launch, and how quiet the machine was meanwhile."""
    phases = [
        {"tokens": tokens, "mbit": rate, "rounds": rounds}
        for tokens, rates in ROUNDS[ranks].items()
        for rate, rounds in rates.items()
    ]
    command = [
        str(RANK), "--plans", *PLANS[ranks], "--size", json.dumps(SIZE | {"tokens": SEQUENCE, "batch": 1}),
        "--phases", json.dumps([{**phase, "batch": ROWS[phase["tokens"]]} for phase in phases]),
    ]  # fmt: skip
    slowest = min(phase["mbit"] for phase in phases if phase["mbit"] is not None)
    shares: list[dict[str, float]] = []
    with paper.watched(shares), lab(Network(ranks, slowest=slowest)) as made:
        extra = {"SOLI_BACKEND": "gloo", "SOLI_DEADLINE": "1800"}
        outcome = launch(made, command, 7200.0, extra, watch=lambda folder: shaped(made, folder))
        if outcome.error:
            raise LabError(f"{ranks} ranks: {outcome.error}")
        dropped = figures(made)["dropped"]
    about = {"noise": paper.noise(shares), "date": record.head()["date"], "dropped": dropped}
    found = []
    for number, phase in enumerate(phases):
        each = [
            {plan: row if "error" in row else row["phases"][number] for plan, row in rank["plans"].items()}
            for rank in outcome.records
        ]
        found.append({"ranks": ranks, **phase, **about, "plans": page.rows(each)})
    return found


def shaped(made: Lab, folder: Path) -> None:
    """Where the ranks have asked for a rate, give it to them."""
    wish = folder / "wish"
    if wish.exists():
        reshape(made, json.loads(wish.read_text()))
        wish.rename(folder / "granted")


def write(labs: list[dict], out: Path) -> None:
    """The predictions beside the rows, and both files."""
    predict(labs)
    result: dict = paper.head() | {
        "command": "python benchmarks/network/headline.py",  # whatever ranks this call was about
        "size": SIZE,
        "labs": labs,
        "beyond": headline_page.beyond(),
    }
    record.write(result, headline_page.markdown(result), out)


def predict(labs: list[dict]) -> None:
    """Into each row: bytes a rank sends by the forms, and the step that they make of this plan's unshaped one.

    over_1d: the step of the better 1D plan over this one's.
    """
    for one in labs:
        size = forms.Size(SIZE["layers"], SIZE["width"], SIZE["vocabulary"], SEQUENCE, ROWS[one["tokens"]])
        free = next((o for o in labs if o["mbit"] is None and all(o[k] == one[k] for k in ("ranks", "tokens"))), None)
        good = {plan: row for plan, row in one["plans"].items() if "step_ms" in row}
        for plan, row in good.items():
            row["form_bytes"] = round(4 * forms.sent(resolve(Plan.parse(plan), one["ranks"]), size))
            row["busy"] = round(row["cpu_ms"]["median"] / len(os.sched_getaffinity(0)) / row["step_ms"]["median"], 3)
            row["sent_bytes"] = round(sum(row["sent"]) / len(row["sent"]))
            base = None if free is None else free["plans"].get(plan, {}).get("step_ms")
            if base is not None and one["mbit"] is not None:
                wire = row["form_bytes"] * 8 / 1e3 / (one["mbit"] * TCP_PAYLOAD)
                row["predicted_ms"] = round(base["median"] + wire, 1)
        medians = {plan: row["step_ms"]["median"] for plan, row in good.items()}
        predicted = {plan: row["predicted_ms"] for plan, row in good.items() if "predicted_ms" in row}
        for steps, name in ((medians, "over_1d"), (predicted, "predicted_over_1d")):
            best = min((steps[p] for p in PLANS[one["ranks"]][:2] if p in steps), default=None)
            for plan, step in steps.items():
                if best is not None:
                    good[plan][name] = round(best / step, 3)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(stopped("headline", error))
