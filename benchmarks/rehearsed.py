"""Rehearsed memory against tracked memory: the same program on real ranks, every storage followed.

`make memory` runs the rows of the parity matrix that cover every pair of its plans' choices; with --all every row; with --again
those of the kept table that are off, or whose plan has one of the texts that follow. A rehearsal takes every microbatch
to have a target, and to go back. So a row whose step is not what was rehearsed is run more often: with a target in every
place, where the peak should be the rehearsed one, and with those of the case, where it should be no higher.
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
from pages import write_page, write_rows
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

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import cases
from cases import CASES
from pool import Pool

BOUND = 0.01
RESULTS = Path("benchmarks/results/memory-rehearsed")
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
    peak: int
    peak_rehearsed: int
    given: int = 0  # with the targets of the case, where `peak` is with all and not what it was with these
    reads: str = ""  # which layers read values, that a rehearsal takes for 0

    @property
    def error(self) -> float:
        """Relative: how far states or peak are off, or how much more than rehearsed the case's batch takes."""
        more = 1 - self.peak_rehearsed / self.given if self.given else 0.0
        states = abs(self.states_rehearsed - self.states) / self.states
        return max(abs(self.peak_rehearsed - self.peak) / self.peak, states, more)


def full(batch: Any) -> Any:
    """The batch with a target in every place."""
    return tree_map(lambda x: x.masked_fill(x == IGNORE, 0) if isinstance(x, Tensor) else x, batch)


def tracked(name: str, plan: str, often: bool) -> tuple[int, int, int]:
    """States, peak of a step and 0 on this rank, really run; or peak of full batches and of the case's. Collective."""
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
        given = _least_peak(tracker, engine, batches[0], STEPS if often else 1)
        if not often:
            return states, given, 0
        return states, _least_peak(tracker, engine, whole, STEPS), given


def _least_peak(tracker: Tracker, engine: Engine, batch: Any, steps: int) -> int:
    peaks = []
    for _ in range(steps):
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


def _both(name: str, plan: str, ranks: int, often: bool) -> tuple[tuple[int, int, int], tuple[int, int, str] | None]:
    mine = tracked(name, plan, often)
    if ranks > 1 and torch.distributed.get_rank():
        return mine, None
    found = rehearsed(name, plan, ranks)
    return mine, (found.states, found.peak, ", ".join(place.split()[0] for place in found.reads))


def row(pool: Pool, name: str, plan: str, ranks: int) -> Row:
    """One case under one plan."""
    for often in (False, True):
        found = pool.run(_both, name, plan, ranks, often, ranks=ranks, deadline=120)
        states, peak, given = (max(one[0][i] for one in found) for i in range(3))
        wanted = found[0][1]
        one = Row(name, plan, ranks, states, wanted[0], peak, wanted[1], given, wanted[2])
        if one.error <= BOUND:
            break
    return one


def run(rows: Iterable[tuple[str, str, int]]) -> tuple[list[Row], list[str]]:
    """All of these; and what did not run."""
    pool, found, failed = Pool(16), [], []
    for name, plan, ranks in rows:
        try:
            found.append(row(pool, name, plan, ranks))
        except SoliError as error:
            failed.append(f"{name} {plan} on {ranks} ranks:\n{error}")
            print(failed[-1], flush=True)
            continue
        one = found[-1]
        exact = "" if one.states == one.states_rehearsed else f"  states {one.states_rehearsed} for {one.states}"
        print(f"{name:12} {plan:40} {ranks:2} ranks  peak {one.peak:9} {one.error:.2%}{exact}", flush=True)
    pool.close()
    return found, failed


def main() -> int:
    """Run and write the table; 1 if a row is over the bound or did not run."""
    every, again = "--all" in sys.argv, "--again" in sys.argv
    kept = _kept() if again else []
    texts = [text for text in sys.argv[1:] if not text.startswith("--")]
    off = [
        (one.model, one.plan, one.ranks)
        for one in kept
        if one.error > BOUND or one.given or any(text in one.plan for text in texts)
    ]
    found, failed = run(off if again else cases.rows() if every else cases.selection(4))
    if again:
        new = {(one.model, one.plan, one.ranks): one for one in found}
        found = [new.get((one.model, one.plan, one.ranks), one) for one in kept]
    bad = [one for one in found if one.error > BOUND]
    exact = sum(one.peak == one.peak_rehearsed for one in found)
    print(f"{len(found)} rows, {exact} to the byte, {len(bad)} over {BOUND:.0%}, {len(failed)} did not run")
    if not failed:
        _write(found, exact, every=every or len(found) > len(list(cases.selection(4))))
    return 1 if bad or failed else 0


def _kept() -> list[Row]:
    """The table that there is."""
    said = json.loads(RESULTS.with_suffix(".json").read_text(encoding="utf-8"))
    return [Row(**one) for one in said["rows"]]


def _write(found: list[Row], exact: int, *, every: bool) -> None:
    command = "python benchmarks/rehearsed.py --all" if every else "make memory"
    rows = (
        "rows, the whole parity matrix"
        if every
        else "rows that cover every pair of choices of the parity matrix' plans"
    )
    about = {"machine": platform.machine(), "bound": BOUND}
    write_rows(RESULTS.with_suffix(".json"), command, [asdict(one) for one in found], **about)
    over = [one for one in found if one.error > BOUND]
    words = [
        "# Memory: rehearsed, and tracked in a real run",
        "",
        "Bytes of the rank that has the most, between the second step and the first (states) and at a step's fullest",
        "moment (peak): of a rehearsal in one process, and of real ranks on which every storage is followed.",
        f"Made by `{command}`. {len(found)} {rows}; {exact} peaks are",
        f"the same to the byte, {len(over)} are more than {BOUND:.0%} off. States differ by the step counts of AdamW, 4 bytes",
        "each, which the rehearsed rank has fewer of than another one. A rehearsal takes every microbatch to have a target",
        "and to go back. Where a step's peak was more than 1% off, the row has the least of three steps of a batch with a",
        "target in every place, and of one in which some have none (masked), which may take less, and no more.",
        "`reads`: this model chooses its path by values, and the rehearsal says so. In `skipping` the rows of a batch",
        "choose which layers run, and those of another rank choose others.",
    ]
    titles = "model | plan | ranks | states | rehearsed | peak | rehearsed | masked | off | reads"
    cells = (
        f"{r.model} | `{r.plan}` | {r.ranks} | {r.states} | {r.states_rehearsed} | {r.peak} | {r.peak_rehearsed} | "
        f"{r.given or ''} | {r.error:.2%} | {r.reads}"
        for r in found
    )
    write_page(RESULTS.with_suffix(".md"), words, titles, cells)


if __name__ == "__main__":
    sys.exit(main())
