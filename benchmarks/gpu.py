"""soli on one GPU: `python benchmarks/gpu.py [--steps 8]`, a part of `make gpu-check`.

Of each model and plan: seconds of a step beside a loop written by hand with the same autocast and optimizer, in turns; bytes as
torch's allocator counts them beside those rehearsed, and both beside what `soli plan` says of the device. Refused where there is no GPU.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soli
from soli.core.plan import Plan
from soli.engine.rehearse import Program, rehearse
from soli.models.gpt import GPT, GPTConfig
from soli.models.llama import Llama, LlamaConfig
from soli.planner.explain import Choice, choice
from soli.planner.hardware.clusters import read_cluster
from soli.planner.legality import resolve
from soli.planner.models import Model
from soli.planner.search import costs
from soli.planner.task import Task

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from everyplan import spaces
from t5 import T5, T5Config

OUT = Path(__file__).resolve().parent / "results" / "gpu"
PLANS = tuple(f"dp=1,precision=bf16{more}" for more in ("", ",recompute=selective", ",recompute=full", ",accumulate=4"))
LOSS = soli.losses.cross_entropy("targets")
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses of all steps, seconds of one, and GB of the fullest moment."""

    losses: list[float]
    step: float
    taken: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One model under one plan: seconds of a step, and GB of the fullest moment."""

    model: str
    plan: str
    hand_s: float | None  # None: not run
    step_s: float
    taken: float
    rehearsed: float
    said_s: float | None  # None: of a model that formulas do not describe
    said_low_s: float | None
    said_high_s: float | None
    said: float | None  # GB, without what a process keeps beside tensors
    worst: float  # of the losses, relative to those of the loop by hand


class Itself(nn.Module):
    """A T5 that writes what it reads: attention written out, biases of positions."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.inner = T5(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, tokens)


def cases() -> dict[str, tuple[Callable[[], nn.Module], Model, int]]:
    """What makes a model, its dimensions (of T5 those of the batch alone), and sequences of a step."""
    return {
        "GPT of 24 layers, 1024 wide": (
            lambda: GPT(GPTConfig(vocab=50304, dim=1024, layers=24, heads=16, context=1024)),
            Model("", 24, 1024, 16, 16, 64, 4096, False, 50304, 0, 1, True, 1024),
            16,
        ),
        "Llama of 16 layers, 2048 wide": (
            lambda: Llama(LlamaConfig(vocab=32000, dim=2048, layers=16, heads=16, groups=4, hidden=5632)),
            Model("", 16, 2048, 16, 4, 128, 5632, True, 32000, 0, 1, False, 2048),
            8,
        ),
        "T5 of 8 and 8 layers, 1024 wide": (
            lambda: Itself(T5Config(vocab=32128, dim=1024, layers=8, heads=16, hidden=4096, dropout=0.0)),
            Model("", 0, 0, 0, 0, 0, 0, False, 32128, 0, 1, False, 512),
            16,
        ),
    }  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--cluster", help="what soli plan is told; left out: by the device's name")
    parser.add_argument("--out", type=Path, default=OUT, help="without a suffix")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py measures a GPU, and torch finds none here")
    name = torch.cuda.get_device_name()
    cluster = args.cluster or f"{name.split()[1].lower()}:1"
    asked = [(case, plan) for case in cases() for plan in PLANS]
    with ProcessPoolExecutor(len(asked), get_context("spawn")) as pool:  # before anything is timed
        peaks = dict(zip(asked, pool.map(rehearsed, *zip(*asked, strict=True)), strict=True))
    rows = []
    for case in cases():
        for row in of_model(case, cluster, peaks, args.steps):
            rows.append(row)
            print(row, flush=True)
    result = record.head() | {"device": name, "rounds": ROUNDS, "steps": args.steps, "rows": [dataclasses.asdict(row) for row in rows]}  # fmt: skip
    record.write(result, page(result, rows), args.out)


def of_model(case: str, cluster: str, peaks: dict[tuple[str, str], float], steps: int) -> list[Row]:
    """A row a plan. The loop by hand runs in turns with a plan that recomputes nothing, and does the same."""
    _, dimensions, sequences = cases()[case]
    batch = batch_of(dimensions, sequences)
    hands: dict[int, list[Run]] = {}
    found = []
    for plan in PLANS:
        pieces, same = Plan.parse(plan).accumulate, Plan.parse(plan).recompute == "none"
        hand, ours = hands.setdefault(pieces, []), []
        for _ in range(ROUNDS if same else 1):
            if same:
                hand.append(timed(by_hand(case, batch, pieces), steps))
            ours.append(timed(by_soli(case, batch, plan), steps))
        told = said(dimensions, cluster, sequences, plan) if dimensions.layers else None
        middle = lambda runs: statistics.median(run.step for run in runs)
        worst = max(abs(a - b) / b for a, b in zip(ours[0].losses, hand[0].losses, strict=True))
        formulas = [None] * 4 if told is None else [
            told.step_time_s, told.time_low_s, told.time_high_s, told.memory_gb - told.memory_parts_gb["workspace"]
        ]  # fmt: skip
        row = Row(case, plan, middle(hand), middle(ours), ours[0].taken, peaks[case, plan], *formulas, worst)
        found.append(row)
    return found


def batch_of(dimensions: Model, sequences: int) -> dict[str, Tensor]:
    """Tokens, and those that follow them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(dimensions.vocab, (sequences, dimensions.seq + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def made(case: str) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return cases()[case][0]()


def by_hand(case: str, batch: dict[str, Tensor], pieces: int) -> Callable[[], float]:
    """A training loop as anyone writes it, over so many pieces of the batch, its loss in fp32."""
    model = made(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = (batch[name].cuda().chunk(pieces) for name in ("tokens", "targets"))

    def step() -> float:
        total = 0.0
        for some, wanted in zip(tokens, targets, strict=True):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(some).flatten(0, 1).float(), wanted.flatten()) / pieces
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def by_soli(case: str, batch: dict[str, Tensor], plan: str) -> Callable[[], float]:
    """The same by the engine."""
    engine = soli.parallelize(
        made(case), LOSS, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), plan=plan
    )  # fmt: skip
    return lambda: float(engine.step(batch))


def timed(step: Callable[[], float], steps: int) -> Run:
    """The first two steps make states and buffers, and are not counted."""
    losses = [step(), step()]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    spent = []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    taken = torch.cuda.max_memory_allocated() / 1e9
    del step
    gc.collect()
    return Run(losses, statistics.median(spent), taken)


def rehearsed(case: str, plan: str) -> float:
    """GB of the fullest moment, by a rehearsal."""
    make, dimensions, sequences = cases()[case]
    model = make()
    program = Program(
        model, torch.optim.AdamW(model.parameters()), LOSS, batch_of(dimensions, sequences), device="cuda"
    )
    return rehearse(program, resolve(Plan.parse(plan), 1)).peak / 1e9


def said(dimensions: Model, cluster: str, sequences: int, plan: str) -> Choice:
    """What `soli plan` says of the plan."""
    wanted = Plan.parse(plan)
    task = Task(dimensions, read_cluster(cluster), sequences, dimensions.seq)
    p = spaces(task)
    cost = costs(task, p)
    each = (choice(task, p, cost, i) for i in range(len(p)))
    of = lambda plan: (plan.accumulate, plan.recompute)
    return next(one for one in each if not one.note and of(Plan.parse(one.plan)) == of(wanted))


def page(result: dict, rows: list[Row]) -> str:
    """The table, and what it comes to."""
    slower = statistics.mean(r.step_s / r.hand_s for r in rows if r.hand_s and "recompute" not in r.plan)
    lines = [
        "# soli on one GPU", "", record.line(result), "",
        f"{result['device']}, one rank, bf16 (autocast), AdamW; {result['rounds']} rounds of {result['steps']} steps, in turns with a loop written by hand, which recomputes nothing. "
        f"soli takes {slower:.3f} of its time where it does the same. Memory: the most that torch's allocator gave in a step. "
        "By formulas: what `soli plan` says of transformers of one stack, seconds with their interval, and GB without what a process keeps beside tensors.", "",
        "| model | plan | by hand, ms | soli, ms | by formulas, ms | taken, GB | rehearsed, GB | off | by formulas, GB | off | losses differ by |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for r in rows:
        hand = f"{r.hand_s * 1e3:.1f}" if r.hand_s else "not run"
        told, formulas = "", " | "
        if r.said_s and r.said_low_s and r.said_high_s and r.said:
            told = f"{r.said_s * 1e3:.0f} ({r.said_low_s * 1e3:.0f} to {r.said_high_s * 1e3:.0f})"
            formulas = f"{r.said:.2f} | {r.said / r.taken - 1:+.1%}"
        times = f"{hand} | {r.step_s * 1e3:.1f} | {told}"
        sizes = f"{r.taken:.2f} | {r.rehearsed:.2f} | {r.rehearsed / r.taken - 1:+.1%} | {formulas}"
        lines.append(f"| {r.model} | `{r.plan}` | {times} | {sizes} | {r.worst:.1e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
