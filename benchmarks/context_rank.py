"""One rank of context.py: a Llama of one sequence under one plan; its step times, or the longest sequence that fits."""

import argparse
import json
import os
import time
from pathlib import Path

import probe
import torch
import torch.distributed as dist
from rank import Meeting, finish
from torch import Tensor

import soli
from soli.mesh import collectives
from soli.models.llama import Llama, LlamaConfig
from soli.parallel.context import sequence

MIB = 2**20
GRAIN = 64  # tokens


def engine_of(plan: str, config: dict) -> soli.Engine:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return soli.parallelize(
        Llama(LlamaConfig(**config)),
        soli.losses.cross_entropy("targets"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        plan=plan,
    )


def batch_of(tokens: int, vocabulary: int) -> dict[str, Tensor]:
    """One row."""
    generator = torch.Generator().manual_seed(tokens)
    drawn = torch.randint(vocabulary, (1, tokens + 1), generator=generator)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:].clone()}


def contiguous() -> None:
    """Let every rank have one run of the sequence: what zigzag is measured against. soli itself has no such choice."""
    real = sequence.spans_of
    sequence.spans_of = lambda size, ranks, zigzag: real(size, ranks, False)


def waited(into: list[float]) -> None:
    """Add what this rank waits for keys, values and heads of others to the last of `into`."""
    real = collectives.Pending.wait

    def wait(pending: collectives.Pending) -> None:
        began = time.perf_counter()
        real(pending)
        if pending._record is not None and pending._record.axis.startswith("cp"):
            into[-1] += time.perf_counter() - began

    collectives.Pending.wait = wait  # type: ignore[method-assign]


def times(engine: soli.Engine, meeting: Meeting, tokens: int, warmup: int, steps: int, vocabulary: int) -> dict:
    """Seconds of each step, and of waiting in it."""
    batch, waits, wall, losses = batch_of(tokens, vocabulary), [0.0], [], []
    waited(waits)
    for _ in range(warmup + steps):
        waits.append(0.0)
        meeting.wait()
        began = time.perf_counter()
        losses.append(float(engine.step(batch)))
        wall.append(time.perf_counter() - began)
    return {"step_s": wall[warmup:], "wait_s": waits[1 + warmup :], "losses": losses}


def longest(engine: soli.Engine, budget: float, first: int, vocabulary: int) -> dict:
    """The most tokens, in steps of GRAIN a rank, whose step grows no rank by more than `budget` MiB: by bisection."""
    ranks = int(os.environ["WORLD_SIZE"])
    engine.step(batch_of(GRAIN * ranks, vocabulary))  # the optimizer's states are there from here on
    tried: dict[int, float] = {}

    def grows(grains: int) -> float:
        tokens = grains * GRAIN * ranks
        if tokens not in tried:
            batch = batch_of(tokens, vocabulary)
            probe.trim()
            probe.reset_peak()
            before = probe.memory()["rss"]
            engine.step(batch)
            most = torch.tensor((probe.memory()["peak"] - before) / MIB)
            if ranks > 1:
                dist.all_reduce(most, dist.ReduceOp.MAX)
            tried[tokens] = round(float(most), 2)
        return tried[tokens]

    if grows(1) > budget:
        raise ValueError(f"a step of {GRAIN} tokens a rank grows by {grows(1)} MiB, more than {budget:g}")
    low, high = 1, max(2, first // (GRAIN * ranks))
    while grows(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if grows(middle) <= budget else (low, middle)
    return {"tokens": low * GRAIN * ranks, "tried": tried}


def measure(meeting: Meeting, args: argparse.Namespace) -> dict:
    """Step times, or with a budget the longest sequence."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if args.contiguous:
        contiguous()
    engine, vocabulary = engine_of(args.plan, args.config), args.config["vocab"]
    if args.budget is None:
        return times(engine, meeting, args.tokens, args.warmup, args.steps, vocabulary)
    return longest(engine, args.budget, args.tokens, vocabulary)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--config", type=json.loads, required=True, help="LlamaConfig as JSON")
    parser.add_argument("--contiguous", action="store_true")
    parser.add_argument("--budget", type=float, help="MiB: look for the longest sequence, do not time")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    finish(args.out, lambda meeting: measure(meeting, args))


if __name__ == "__main__":
    main()
