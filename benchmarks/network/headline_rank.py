"""One rank of headline.py: an engine for each plan, all in one process, and their steps at one rate after the other.

Writes to LAB_RECORD at the end, or when it fails: {"plans": {plan: {"error": why} or {"phases": [{"turns", "losses"}]}}}.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import engine_rank
import torch
import workload
from engine_rank import RECORD, note, turn
from meeting import Meeting


def main() -> None:
    """Build all plans; then every phase, and in it rounds of one step of every plan.

    Where links are not shaped, what is measured is computing: each plan has a step before the rounds that does not count.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", nargs="+", required=True)
    parser.add_argument("--size", type=json.loads, required=True, help="workload.Size as JSON")
    parser.add_argument(
        "--phases", type=json.loads, required=True, help="JSON: [{batch: rows, mbit: rate or null, rounds}]"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = workload.Size(**args.size)
    workload.SIZES["lab"] = size
    meeting = Meeting()
    steps = engine_rank.built(meeting, args.plans)
    for plan in steps:
        RECORD["plans"][plan] = {"phases": []}
    for phase in args.phases:
        workload.SIZES["lab"] = replace(size, batch=phase["batch"])
        meeting.gather()
        if meeting.rank == 0:
            ask(phase["mbit"])
        meeting.gather()
        found = {plan: {"turns": [], "losses": []} for plan in steps}
        for number in range(phase["rounds"]):
            warmup = int(phase["mbit"] is None and number == 0)
            for plan, step in steps.items():
                note(plan)
                found[plan]["turns"].append(turn(meeting, step, found[plan]["losses"], warmup, 1))
                if meeting.rank == 0:
                    print(plan, phase, found[plan]["turns"][-1]["step_s"], flush=True)
        for plan, phases in found.items():
            RECORD["plans"][plan]["phases"].append(phases)
    note("")
    meeting.gather()


def ask(mbit: float | None) -> None:
    """Have the launcher shape the links, and wait until it has. Nobody sends meanwhile."""
    folder = Path(os.environ["LAB_MEETING"]).parent
    granted, fresh = folder / "granted", folder / "wish.new"
    granted.unlink(missing_ok=True)
    fresh.write_text(json.dumps(mbit))
    fresh.rename(folder / "wish")
    while not granted.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    engine_rank.finish(main)
