"""What the planner's formulas say of soli's memory beside what rehearsals say, of plans that are drawn from its space.

    python benchmarks/formulas.py [--plans 40]

Both are without what a process keeps beside tensors (constants `resident` and `workspace`). A rehearsal is the plan's own program run for
its shapes (engine/rehearse.py), and within 1% of what real ranks are tracked to take (memory-rehearsed.md).
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import record
import torch

import soli
from soli.engine.rehearse import Program, rehearse
from soli.models.gpt import GPT, GPTConfig
from soli.models.llama import Llama, LlamaConfig
from soli.planner.bounds import constants_of
from soli.planner.cost import memory
from soli.planner.hardware.clusters import read_cluster
from soli.planner.legality import resolve
from soli.planner.models import Model
from soli.planner.search import plan_of
from soli.planner.task import Task

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from everyplan import spaces

OUT = Path(__file__).resolve().parent / "results" / "memory-formulas"
RANKS, ROWS = 8, 32
MOST = 8
"""Microbatches of a plan: a rehearsal takes as long as there are."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan's peak, GB."""

    model: str
    plan: str
    microbatch: int
    formula: float
    rehearsed: float

    @property
    def off(self) -> float:
        return self.formula / self.rehearsed - 1


def cases() -> dict[str, tuple[torch.nn.Module, Model]]:
    """Programs with their dimensions."""
    gpt = {"layers": 8, "dim": 1536, "heads": 16, "vocab": 50304}
    llama = {"layers": 8, "dim": 2048, "heads": 16, "vocab": 32000}
    said = lambda c, kv, ffn, gated, tied, seq: Model(
        "", c["layers"], c["dim"], c["heads"], kv, c["dim"] // c["heads"], ffn, gated, c["vocab"], 0, 1, tied, seq
    )  # fmt: skip
    return {
        "gpt": (GPT(GPTConfig(**gpt, context=1024)), said(gpt, 16, 4 * 1536, False, True, 1024)),
        "llama": (Llama(LlamaConfig(**llama, groups=4, hidden=5632)), said(llama, 4, 5632, True, False, 2048)),
    }


def main() -> None:
    """Draw, rehearse and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=40, help="of each model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for name, (model, dimensions) in cases().items():
        tokens = torch.zeros(ROWS, dimensions.seq, dtype=torch.int64)
        batch = {"tokens": tokens, "targets": tokens}
        made, loss_fn = torch.optim.AdamW(model.parameters()), soli.losses.cross_entropy("targets")
        program = Program(model, made, loss_fn, batch, device="cuda")
        task = Task(dimensions, read_cluster(f"h100:{RANKS}"), ROWS, dimensions.seq)
        p = spaces(task)
        kinds = memory.kinds(p, constants_of(task))
        said = sum(part for kind, part in kinds.items() if kind != "workspace") / 1e9
        drawn = np.random.default_rng(args.seed).permutation(np.flatnonzero(p.microbatches <= MOST))
        for i in drawn[: args.plans]:
            plan = plan_of(p, i)
            peak = rehearse(program, resolve(plan, RANKS)).peak / 1e9
            rows.append(Row(name, str(plan), int(p.microbatch[i]), float(said[i]), peak))
            print(f"{name} {plan} {rows[-1].formula:.2f} {peak:.2f} GB {rows[-1].off:+.0%}", flush=True)
    result = record.head() | {"rows": [dataclasses.asdict(row) for row in rows]}
    OUT.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    OUT.with_suffix(".md").write_text(page(result, rows), encoding="utf-8")


def page(result: dict, rows: list[Row]) -> str:
    """The table, and what it comes to."""
    off = sorted(row.off for row in rows)
    size = statistics.mean(map(abs, off))
    lines = [
        "# Memory: by formulas, and rehearsed", "", record.line(result), "",
        f"{len(rows)} plans of {RANKS} ranks, {ROWS} sequences a step, drawn from the space of `soli plan`. What the formulas say is {size:.0%} off "
        f"in the mean; nine in ten are between {off[len(off) // 20]:+.0%} and {off[-1 - len(off) // 20]:+.0%}. Without what a process keeps beside tensors.", "",
        "| model | plan | microbatch | formula, GB | rehearsed, GB | off |", "|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| {r.model} | `{r.plan}` | {r.microbatch} | {r.formula:.2f} | {r.rehearsed:.2f} | {r.off:+.0%} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
