"""One rank of run.py: an engine of soli for each plan, all in one process, and their steps in turns.

Writes what it has to LAB_RECORD after every turn: {"at": the plan now, "plans": {plan: {"error": why} or
{"turns": [{"step_s", "cpu_s", "tx", "rx"}], "losses": [...]}}}. A plan that soli refuses leaves the others be; one
that fails in a step ends the process, as nobody knows what the groups are in then.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import workload
from entries import Step, soli_engine
from link import crossed
from meeting import Meeting

import soli

RECORD: dict = {"at": "", "plans": {}}


def main() -> None:
    """Build all plans, then rounds over those that were built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", nargs="+", required=True)
    parser.add_argument("--size", type=json.loads, required=True, help="workload.Size as JSON")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    workload.SIZES["lab"] = workload.Size(**args.size)
    meeting = Meeting()
    steps = built(meeting, args.plans)
    for plan in steps:
        RECORD["plans"][plan] = {"turns": [], "losses": []}
    for _ in range(args.rounds):
        for plan, step in steps.items():
            note(plan)
            found = RECORD["plans"][plan]
            found["turns"].append(turn(meeting, step, found["losses"], args.warmup, args.steps))
    note("")
    meeting.gather()


def built(meeting: Meeting, plans: list[str]) -> dict[str, Step]:
    """The steps of the plans that every rank could build; the others' errors are noted."""
    steps = {}
    for plan in plans:
        note(plan)
        step, why = build(plan)
        # all ranks keep it or none: one that went on alone would wait for the others
        reasons = [f"{said} (rank {rank})" for rank, said in enumerate(meeting.gather(why)) if said]
        if step is None or reasons:
            RECORD["plans"][plan] = {"error": reasons[0]}
        else:
            steps[plan] = step
    return steps


def build(plan: str) -> tuple[Step | None, str]:
    """(the plan's training step, "") or (None, why soli has none)."""
    torch.manual_seed(workload.SEED)
    try:
        return soli_engine.build(plan, "lab"), ""
    except soli.SoliError as error:
        return None, f"refused: {one_line(error)}"
    except Exception as error:
        traceback.print_exc()
        return None, f"failed: {one_line(error)}"


def turn(meeting: Meeting, step: Step, losses: list[float], warmup: int, steps: int) -> dict:
    """`warmup` steps after the other plans' and `steps` that count: this rank's seconds, the host's bytes a step."""
    batches = workload.build_batches("lab")
    wall, cpu = [], []
    before = crossed()
    for i in range(warmup + steps):
        if i == warmup:
            meeting.gather()
            before = crossed()
        meeting.gather()
        started, ticks = time.perf_counter(), time.process_time()
        loss = step(batches[len(losses) % len(batches)])
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - ticks)
        losses.append(float(loss))
    meeting.gather()
    after = crossed()
    sent = {name: round((after[name] - before[name]) / steps) for name in after}
    return {"step_s": wall[warmup:], "cpu_s": cpu[warmup:], **sent}


def note(plan: str) -> None:
    """Write down what there is, so that a rank that is killed has left it."""
    RECORD["at"] = plan
    file = Path(os.environ["LAB_RECORD"])
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(RECORD))
    fresh.replace(file)


def one_line(error: Exception) -> str:
    """The error in one line, under its name."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or '(no message)'}"[:400]


def finish(main: Callable[[], None]) -> None:
    """Run the rank's `main` and end the process: with 1, and the reason in its record, where it fails."""
    code = 0
    try:
        main()
    except Exception as error:
        traceback.print_exc()
        RECORD["error"], code = one_line(error), 1
        note(RECORD["at"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter teardown: the end of threads and groups is not what is measured here


if __name__ == "__main__":
    finish(main)
