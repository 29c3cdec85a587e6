"""Rehearsed memory against tracked memory: the same program on real ranks, every storage followed.

`make memory` runs the rows of the parity matrix that cover every pair of its choices; with --all every row. A rehearsal
takes every microbatch to have a target, and to go back. So a row's steps are run twice: with a target in every place,
where the peak should be the rehearsed one, and with those of the case, where it should be no higher.
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
from torch import Tensor
from torch.utils._pytree import tree_map

from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.engine import Engine, parallelize
from soli.engine.rehearse import Program, rehearse
from soli.losses import IGNORE
from soli.mesh.backends import cpu_backend
from soli.planner.hollow import Tracker
from soli.planner.legality import resolve
from soli.planner.rehearsal import Rehearsal
from soli.verify import cases, foreign
from soli.verify.cases import CASES
from soli.verify.pool import Pool

BOUND = 0.01
STEPS = 3
"""Of which the least peak counts: a collective's thread lets go of its buffers a moment after it is waited for."""


@dataclass(frozen=True)
class Row:
    """Bytes of the ranks that have the most."""

    model: str
    plan: str
    ranks: int
    states: int
    states_rehearsed: int
    peak: int  # with a target in every place
    peak_rehearsed: int
    given: int  # with the targets of the case
    reads: str = ""  # which layers read values, that a rehearsal takes for 0

    @property
    def error(self) -> float:
        """Of the peak, relative: how far it is off, or how much more than rehearsed another batch takes."""
        return max(abs(self.peak_rehearsed - self.peak) / self.peak, 1 - self.peak_rehearsed / self.given)


def full(batch: Any) -> Any:
    """The batch with a target in every place."""
    return tree_map(lambda x: x.masked_fill(x == IGNORE, 0) if isinstance(x, Tensor) else x, batch)


def tracked(name: str, plan: str) -> tuple[int, int, int]:
    """States, peak of full batches and peak of the case's on this rank, really run. Collective."""
    case = CASES[name]
    model, loss_fn, batches = case.make()
    model.double()
    whole = full(batches[0])
    tracker = Tracker()
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.see(tensor)
    with tracker:
        engine = parallelize(model, loss_fn, optimizer=case.optimizer, clip=case.clip, plan=plan)
        engine.step(batches[0])
        gc.collect()  # what only cycles keep
        states = tracker.bytes
        given, peak = (_least_peak(tracker, engine, batch) for batch in (batches[0], whole))
    return states, peak, given


def _least_peak(tracker: Tracker, engine: Engine, batch: Any) -> int:
    peaks = []
    for _ in range(STEPS):
        gc.collect()
        tracker.peak = tracker.bytes
        engine.step(batch)
        peaks.append(tracker.peak)
    return min(peaks)


def rehearsed(name: str, plan: str, ranks: int) -> Rehearsal:
    """A rehearsal in this process."""
    case = CASES[name]
    model, loss_fn, batches = case.make()
    model.double()
    made: Any = case.optimizer(model.parameters())
    program = Program(model, made, loss_fn, full(batches[0]), case.clip, backend=cpu_backend()[0])
    return rehearse(program, resolve(Plan.parse(plan), ranks))


def _both(name: str, plan: str, ranks: int) -> tuple[tuple[int, int, int], tuple[int, int, str] | None]:
    mine = tracked(name, plan)
    if ranks > 1 and torch.distributed.get_rank():
        return mine, None
    found = rehearsed(name, plan, ranks)
    return mine, (found.states, found.peak, ", ".join(place.split()[0] for place in found.reads))


def row(pool: Pool, name: str, plan: str, ranks: int) -> Row:
    """One case under one plan."""
    found = pool.run(_both, name, plan, ranks, ranks=ranks, deadline=120)
    states, peak, given = (max(one[0][i] for one in found) for i in range(3))
    wanted = found[0][1]
    return Row(name, plan, ranks, states, wanted[0], peak, wanted[1], given, wanted[2])


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
        "Bytes of the rank that has the most, between the second step and the first (states) and at a step's fullest",
        "moment (peak): of a rehearsal in one process, and of real ranks on which every storage is followed, at the",
        f"least of {STEPS} steps. Made by `{command}`. {len(found)} {rows}; {exact} peaks are",
        f"the same to the byte, {len(over)} are more than {BOUND:.0%} off. States differ by the step counts of AdamW, 4 bytes",
        "each, which the rehearsed rank has fewer of than another one. A rehearsal takes every microbatch to have a target",
        "and to go back: so has the peak's batch, and one in which some have none (masked) may take less, and no more.",
        "`reads`: this model chooses its path by values, and the rehearsal says so. In `skipping` the rows of a batch",
        "choose which layers run, and those of another rank choose others.",
        "",
        "| model | plan | ranks | states | rehearsed | peak | rehearsed | masked | off | reads |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r.model} | `{r.plan}` | {r.ranks} | {r.states} | {r.states_rehearsed} | {r.peak} | {r.peak_rehearsed} | "
            f"{r.given} | {r.error:.2%} | {r.reads} |"
            for r in found
        ),
        "",
    ]
    results.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
