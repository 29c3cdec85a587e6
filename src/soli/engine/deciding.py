"""`plan="auto"` in the Engine: when the plan is chosen, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from soli.core.errors import in_a_line
from soli.core.events import events
from soli.core.plan import Plan
from soli.core.progress import SIZES
from soli.engine import rng
from soli.engine.batch import Part, as_dict, rows_of
from soli.engine.data import is_stream
from soli.engine.taken import Taken, is_beyond
from soli.mesh.collectives import extreme
from soli.parallel.lift import wide
from soli.planner.legality import plain

if TYPE_CHECKING:
    from soli.engine.engine import Engine

PROBES = {"auto": 1, "auto=probe": 3}
"""What asks for a plan, and how many are really run."""
PEEKED = 8
"""Samples of a dataset that stand for a batch."""


@dataclass(frozen=True)
class Wish:
    """For the plan that is best: how many are really run, and bytes that a rank may take (None: what is free)."""

    probes: int
    memory: float | None


@dataclass(frozen=True)
class Option:
    """A plan and what is known of it: bytes, seconds, or why it cannot be."""

    plan: str
    peak: float = 0.0
    states: float = 0.0
    seconds: float = 0.0  # predicted
    parts: dict[str, float] = field(default_factory=dict)
    measured: float = 0.0  # seconds, where it was run
    taken: float = 0.0  # bytes, where it was run
    refused: str = ""
    reads: str = ""  # which layers read values, that a rehearsal takes for 0
    writes: str = ""  # buffers that a step changes: whether as one device would, only a run says

    @property
    def time(self) -> float:
        """Seconds of a step: measured where it was run, else predicted."""
        return self.measured or self.seconds

    def told(self) -> str:
        """What a run took beyond its rehearsal."""
        return f"{self.plan} took {size(self.taken)}, {size(self.taken - self.peak)} more than rehearsed"


def rehearsed(known: dict[str, Option], plan: Plan, taking: Callable[[Plan], Option]) -> Option:
    """What a rehearsal says of a plan; once, since it says the same each time that others are looked for."""
    name = str(plan)
    if name not in known:
        try:
            known[name] = taking(plan)
        except Exception as error:  # any that the user's program may raise; it is told
            known[name] = Option(name, refused=in_a_line(error))
    return known[name]


def ordered(options: dict[str, Option]) -> list[Option]:
    """The quickest first, those that cannot be last."""
    return sorted(options.values(), key=lambda o: (bool(o.refused), o.time))


def fitting(options: dict[str, Option]) -> list[Option]:
    return [option for option in ordered(options) if not option.refused]


@dataclass(frozen=True)
class Choice:
    """What was decided, and of what."""

    plan: Plan
    options: list[Option]  # quickest first, those that cannot be last
    memory: float  # bytes that a rank may take
    lines: list[str]
    plain: bool = False  # nothing could be rehearsed

    def to_json(self) -> str:
        """For the run directory: the plan, the words, and all that was considered."""
        return json.dumps({**asdict(self), "plan": str(self.plan)}, indent=1)


class First:
    """The first step under a chosen plan: what it takes beyond what the plan was seen to take is said. Collective."""

    def __init__(self, choice: Choice) -> None:
        self.option = next(one for one in choice.options if one.plan == str(choice.plan))
        self.limit = choice.memory

    def begin(self, engine: Engine) -> None:
        self.taken = Taken(engine.device, engine.model, engine.optimizer)

    def end(self, engine: Engine) -> None:
        engine._watch = None
        taken = extreme(self.taken.most(), engine.mesh.all, "max", label="bytes of the first step")
        known = max(self.option.taken, self.option.peak)
        if is_beyond(taken, known):
            events.note(
                f"the first step took {size(taken)} a rank, {size(taken - known)} more than a step of {self.option.plan} when it was chosen, of {size(self.limit)}"
                " that are free: give soli.parallelize(..., example=) a batch as large as they are",
                shown=engine.rank == 0,
            )


def decide(engine: Engine, batch: Any, rows: int) -> None:
    """Choose and take a plan. `rows`: of a global batch; 0: those of this one. Collective."""
    from soli.engine import auto, rehearse  # which import the engine

    data = batch.data if isinstance(batch, Part) else batch
    if data is None:
        without_batch(engine)
        return
    rows = rows or rows_of(data)
    program = rehearse.Program(
        engine.model, engine.optimizer, engine.loss_fn.function, rehearse.widened(data, rows), engine.max_norm, engine.hints,
        engine.world_info.backend, engine.world_info.device.type,
    )  # fmt: skip
    wish, gradients = engine._wish, [p.grad for p in engine.model.parameters()]
    with rng.kept(), engine.loss_fn.unchanged():
        choice = auto.choose(program, engine.world_info, rows, memory=wish.memory, probes=wish.probes)
    for param, gradient in zip(engine.model.parameters(), gradients, strict=True):
        # a loss that has the model itself, and not its argument, reached it from a copy
        param.grad = gradient
    engine.choice, engine._watch = choice, None if choice.plain else First(choice)
    events.emit("plan", plan=str(choice.plan), lines=choice.lines, memory=choice.memory)
    if engine.rank == 0 and (engine.world > 1 or choice.plan != Plan(dp=1) or choice.plain):
        print("\n".join(f"soli: {line}" for line in choice.lines), flush=True)
    engine._begin(choice.plan)


def without_batch(engine: Engine) -> None:
    """Data parallelism, since nothing is known of the batch."""
    limit = engine._wish.memory
    unheld = f", and nothing holds it to memory={size(limit)}" if limit else ""
    why = f"the layout was asked for before a batch was seen{unheld}; give soli.parallelize(..., example=batch)"
    plan, line = plain(engine.world, why)
    events.emit("plan", plan=str(plan), lines=[line])
    if engine.rank == 0 and (engine.world > 1 or limit):
        print(f"soli: {line}", flush=True)
    engine._begin(plan)


def size(count: float) -> str:
    """Bytes, in words."""
    unit, name = next((s, n) for s, n in SIZES if count >= s or s == 1)
    return f"{count / unit:.3g} {name}"


def enough(example: Any, ranks: int) -> Any:
    """An example of which every data-parallel rank has a row: its rows again and again."""
    from soli.engine.rehearse import widened

    return widened(example, ranks) if rows_of(example) < ranks else example


def peek(dataset: Any, count: int, collate: Callable[[list[Any]], Any] | None) -> tuple[Any, Any]:
    """The dataset and a batch of its first samples. What can be read only once is put together again."""
    with rng.kept():  # samples may be drawn
        if not is_stream(dataset):
            samples = [dataset[i] for i in range(min(count, len(dataset)))]
        else:
            stream = iter(dataset)
            samples = list(islice(stream, count))
            if stream is dataset:
                dataset = chain(samples, stream)
    return dataset, as_dict((collate or default_collate)(samples)) if samples else Part(None, 0, 0, 0)


def widened(batch: Any, plan: Plan) -> Any:
    """A batch as the model is where all of it is in float64."""
    if plan.precision != "fp64":
        return batch
    made = lambda x: x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else wide(x)
    return replace(batch, data=tree_map(made, batch.data)) if isinstance(batch, Part) else tree_map(made, batch)
