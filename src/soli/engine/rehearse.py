"""A plan rehearsed: its very program run for the shapes alone, in this process, one rank for each stage.

What comes of it is exact, since it is not a model of the program: the bytes that a rank keeps between steps and at
its fullest moment, every operation with its shapes, every collective with its ranks and bytes, every action of a
pipeline. Nothing is computed and nothing is sent (planner/hollow.py, mesh/simulate.py).
"""

import gc
import io
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from soli.core.axes import DEPTH, REPLICATE, ROW, SHARD, TP, coordinates
from soli.core.errors import raise_all
from soli.core.events import events
from soli.core.plan import Plan
from soli.engine import optimizer as optimizers
from soli.engine.batch import at, rows_of
from soli.engine.elementwise import Cut
from soli.engine.engine import Engine, problems
from soli.engine.on_cuda import as_on
from soli.engine.taken import give_back
from soli.losses import LossFn
from soli.mesh.record import Record, recorder
from soli.mesh.simulate import Absent, NotYetError
from soli.mesh.world import World
from soli.planner.hollow import Hollow, hollowed
from soli.planner.rehearsal import Action, RankRun, Rehearsal, Sent


@dataclass(frozen=True)
class Program:
    """What is laid over ranks: as `parallelize` takes it. `batch`: a global one. `device`: the type of those that it will run on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    batch: Any
    clip: float | None = None
    roles: dict[str, str] = field(default_factory=dict)
    backend: str = "gloo"
    device: str = "cpu"
    tried: dict[Cut, str] = field(default_factory=dict, compare=False)  # what trials of the optimizer showed: it is the same under every plan


def rehearse(program: Program, plan: Plan) -> Rehearsal:
    """The second step of a program under a resolved plan. SoliError where the plan or the program cannot be run."""
    parts = {0, plan.cp - 1}  # the first and the last part of a sequence are the longest, by how it is cut
    found = Rehearsal(plan, [run for part in sorted(parts) for run in _stages(program, plan, part)])
    give_back()  # else 80 rehearsals of a T5 took 20 GB
    return found


def _stages(program: Program, plan: Plan, part: int) -> list[RankRun]:
    """A rank of each stage, the first of those with a part of the sequence: it has the most rows and the largest parts."""
    absent, world = Absent(), (plan.dp or 1) * plan.model_ranks
    ranks = [rank for rank in range(world) if _leads(rank, plan, part)]
    found: dict[int, RankRun] = {}
    while len(found) < len(ranks):
        before = len(found)
        for rank in ranks:
            if rank in found:
                continue
            absent.begin()
            place = World(rank, world, torch.device("cpu"), program.backend, 60.0, absent)
            try:
                found[rank] = _run(program, plan, place, part)
            except NotYetError:
                continue
        if len(found) == before and not absent.heard():
            raise AssertionError("every stage waits for what another one says")
    return [found[rank] for rank in ranks]


def _leads(rank: int, plan: Plan, part: int) -> bool:
    where = coordinates(rank, plan.sizes)
    data = where[REPLICATE] * plan.sizes[SHARD] + where[SHARD]
    return data == part and all(where[axis] == 0 for axis in (DEPTH, ROW, TP))


def _run(program: Program, plan: Plan, world: World, part: int) -> RankRun:
    hollow = Hollow()
    with unseen(), recorder.apart() as records:
        model, optimizer = hollowed(hollow, program.model, program.optimizer)
        raise_all(problems(model, program.roles, plan) + optimizers.problems(program.optimizer, program.model, plan, program.tried))
        with hollow, as_on(program.device):
            engine = Engine(model, program.loss_fn, optimizer, None, program.clip, plan, 0, world, program.roles)
            engine.step(program.batch)  # makes the optimizer's states
            actions: list[Action] = []
            if engine.pipeline is not None:
                engine.pipeline.timed = _noting(hollow, records, actions)  # type: ignore[method-assign]
            records.clear()
            gc.collect()  # what only cycles keep
            states = hollow.peak = hollow.bytes
            hollow.calls = []
            buffers = _buffers(engine.model)
            engine.step(program.batch)
            writes = tuple(sorted(name for name, _ in _buffers(engine.model) - buffers))
    sent = [Sent(r.operation, r.ranks, r.bytes, r.late) for r in records]
    return RankRun(world.rank, part, states, hollow.peak, hollow.calls, sent, actions, tuple(hollow.reads), writes)


def _buffers(model: nn.Module) -> set[tuple[str, tuple[int, int]]]:
    """With what says whether one was written or replaced: values say nothing here."""
    return {(name, (id(buffer), buffer._version)) for name, buffer in model.named_buffers()}


def _noting(hollow: Hollow, records: deque[Record], actions: list[Action]) -> Any:
    """In the place of Pipeline.timed: which calls and collectives an action has."""

    def now() -> tuple[int, int]:
        return len(hollow.calls or []), len(records)

    @contextmanager
    def timed(kind: str, stage: int, number: int) -> Iterator[None]:
        start = now()
        yield
        calls, sent = zip(start, now(), strict=True)
        actions.append(Action(kind, stage, number, calls, sent))

    return timed


@contextmanager
def unseen() -> Iterator[None]:
    """Nothing is printed or kept, and the random numbers go on as if nothing had been run."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    quiet, random = redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=devices)
    with events.apart(), quiet, random, ExitStack() as afterwards:
        gc.freeze()  # so that collecting looks at what is new
        afterwards.callback(gc.unfreeze)
        yield


def widened(batch: Any, rows: int) -> Any:
    """A batch of so many rows, those that there are again and again. Zeros take no memory before they are read."""
    places = (torch.arange(rows) % rows_of(batch)).tolist()
    blank = lambda x: isinstance(x, torch.Tensor) and x.dim() and not x.any()
    return tree_map(lambda x: x.new_zeros(rows, *x.shape[1:]) if blank(x) else at(x, places), batch)
