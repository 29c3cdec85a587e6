"""Rehearsed memory against tracked memory: the same program on real ranks, every storage followed.

`make memory` runs the rows of the parity matrix that cover every pair of its choices; with --all every row.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.engine import parallelize
from soli.engine.rehearse import Program, rehearse
from soli.mesh.backends import cpu_backend
from soli.planner.hollow import Tracker
from soli.planner.legality import resolve
from soli.verify import cases, foreign
from soli.verify.cases import CASES
from soli.verify.pool import Pool

BOUND = 0.01


@dataclass(frozen=True)
class Row:
    """Bytes of the ranks that have the most."""

    model: str
    plan: str
    ranks: int
    states: int
    states_rehearsed: int
    peak: int
    peak_rehearsed: int

    @property
    def error(self) -> float:
        """Of the peak, relative."""
        return abs(self.peak_rehearsed - self.peak) / self.peak


def tracked(name: str, plan: str) -> tuple[int, int]:
    """States and peak of the second step of a case on this rank, really run. Collective."""
    case = CASES[name]
    model, loss_fn, batches = case.make()
    model.double()
    tracker = Tracker()
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.see(tensor)
    with tracker:
        engine = parallelize(model, loss_fn, optimizer=case.optimizer, clip=case.clip, plan=plan)
        engine.step(batches[0])
        gc.collect()  # what only cycles keep
        states = tracker.peak = tracker.bytes
        engine.step(batches[0])
    return states, tracker.peak


def rehearsed(name: str, plan: str, ranks: int) -> tuple[int, int]:
    """The same of a rehearsal in this process."""
    case = CASES[name]
    model, loss_fn, batches = case.make()
    model.double()
    made: Any = case.optimizer(model.parameters())
    program = Program(model, made, loss_fn, batches[0], case.clip, backend=cpu_backend()[0])
    found = rehearse(program, resolve(Plan.parse(plan), ranks))
    return max(run.states for run in found.ranks), found.peak


def _both(name: str, plan: str, ranks: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
    mine = tracked(name, plan)
    first = torch.distributed.get_rank() == 0 if ranks > 1 else True
    return mine, rehearsed(name, plan, ranks) if first else None


def row(pool: Pool, name: str, plan: str, ranks: int) -> Row:
    """One case under one plan."""
    found = pool.run(_both, name, plan, ranks, ranks=ranks, deadline=120)
    states, peak = (max(one[0][i] for one in found) for i in range(2))
    wanted = found[0][1]
    return Row(name, plan, ranks, states, wanted[0], peak, wanted[1])


def run(rows: Iterable[tuple[str, str, int]]) -> tuple[list[Row], list[str]]:
    """All of these; and what did not run."""
    pool, found, failed = Pool(16), [], []
    pool.run(foreign.ready, ranks=16, deadline=120)
    for name, plan, ranks in rows:
        try:
            found.append(row(pool, name, plan, ranks))
        except SoliError as error:
            failed.append(f"{name} {plan} on {ranks} ranks:\n{error}")
            print(failed[-1], flush=True)
            continue
        one = found[-1]
        exact = (
            "" if one.states == one.states_rehearsed else f"  states {one.states_rehearsed} for {one.states}"
        )
        print(f"{name:12} {plan:40} {ranks:2} ranks  peak {one.peak:9} {one.error:.2%}{exact}", flush=True)
    pool.close()
    return found, failed


def main() -> int:
    """Run and write the table; 1 if a row is over the bound or did not run."""
    found, failed = run(cases.rows() if "--all" in sys.argv else cases.selection(4))
    bad = [one for one in found if one.error > BOUND]
    exact = sum(one.peak == one.peak_rehearsed for one in found)
    print(f"{len(found)} rows, {exact} to the byte, {len(bad)} over {BOUND:.0%}, {len(failed)} did not run")
    if not failed:
        _write(found, exact, every="--all" in sys.argv)
    return 1 if bad or failed else 0


def _write(found: list[Row], exact: int, *, every: bool) -> None:
    results = Path("benchmarks/results/memory-rehearsed")
    command = "python -m soli.verify.memory --all" if every else "make memory"
    rows = (
        "rows, the whole parity matrix"
        if every
        else "rows that cover every pair of the parity matrix' choices"
    )
    said = {
        "command": command,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "bound": BOUND,
        "rows": [asdict(one) for one in found],
    }
    results.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    over = [one for one in found if one.error > BOUND]
    lines = [
        "# Memory: rehearsed, and tracked in a real run",
        "",
        "Bytes of the rank that has the most, between the second step and the first (states) and at the second step's",
        "fullest moment (peak): of a rehearsal in one process, and of real ranks on which every storage is followed.",
        f"Made by `{command}`. {len(found)} {rows}; {exact} peaks are",
        f"the same to the byte, {len(over)} are more than {BOUND:.0%} off. States differ by the step counts of AdamW, 4 bytes",
        "each, which the rehearsed rank has fewer of than another one. In `odd` and `skipping` the rows of a batch choose",
        "which layers run, and those of another rank choose others. The first rows of models of transformers count no target: a microbatch of",
        "them alone has no backward, and a rehearsal takes every one to have one.",
        "",
        "| model | plan | ranks | states | rehearsed | peak | rehearsed | off |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {r.model} | `{r.plan}` | {r.ranks} | {r.states} | {r.states_rehearsed} | {r.peak} | {r.peak_rehearsed} | "
            f"{r.error:.2%} |"
            for r in found
        ),
        "",
    ]
    results.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
