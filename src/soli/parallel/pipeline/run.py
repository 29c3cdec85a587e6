"""A rank's stages, and how microbatches go through them.

A step is one flush of torch's schedule. What a stage must know of a microbatch before it arrives (the shapes of what
crosses, and of what earlier units returned) is sent along once for each shape of microbatch, in a forward without
gradients (`forward_only`); evaluation is that forward too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.mesh.collectives import Axis, receive, receive_json, send, send_json
from soli.mesh.record import issuing
from soli.mesh.simulate import holding
from soli.parallel import kept
from soli.parallel.pipeline import schedules
from soli.parallel.pipeline.stage import Crossing, Flight, Known, Stage, handed
from soli.parallel.pipeline.stage_forward import Finished, StageForward
from soli.parallel.pipeline.stages import Stages, early, requiring
from soli.parallel.pipeline.table import Action
from soli.parallel.pipeline.units import Unit
from soli.parallel.pipeline.watch import Name, Trace
from soli.parallel.randomness import Randomness
from soli.parallel.reduce import Reducer
from soli.parallel.tensor.cut import Cut, plain
from soli.parallel.tensor.split import Split


@dataclass
class Cutting:
    """How a model is cut into stages: what the dry runs in training and in evaluation found."""

    stages: Stages
    units: list[Unit]
    traces: dict[bool, Trace]  # by training
    owners: dict[str, list[int]]  # parameter's first name -> pp ranks
    buffers: dict[str, int]
    needs: dict[tuple[bool, int], list[tuple[Name, bool]]]  # (training, stage) -> what it is given

    def first_owner(self, name: str) -> int:
        return self.owners[name][0]


def needs_of(model: nn.Module, stages: Stages, traces: dict[bool, Trace]) -> dict[tuple[bool, int], list[tuple[Name, bool]]]:
    """What each stage is given, and whether it has a gradient; by (training, stage)."""
    modes = product(traces, range(stages.count))
    return {(t, stage): requiring(model, traces[t], stages.incoming(traces[t], stage)) for t, stage in modes}


@dataclass(eq=False, repr=False)
class Pipeline:
    """`call(data) -> (total, count)`: the model and its loss. `computing()`, `again()`: what it runs in, forward
    and when it is recomputed. `own(made, count, data)`: SoliError where it trains what is not the model's. `together(rows)`: of each microbatch the rows of all ranks that compute its products together."""

    model: nn.Module
    plan: Plan
    axis: Axis
    device: torch.device
    cutting: Cutting
    reducer: Reducer
    randomness: Randomness
    call: Callable[[Any], tuple[Tensor, float]]
    own: Callable[[list[Tensor], float, Any], None]
    computing: Callable[[], AbstractContextManager[Any]]
    again: Callable[[], AbstractContextManager[Any]]
    together: Callable[[list[int]], list[tuple[int, ...]]]

    def __post_init__(self) -> None:
        self.stages = self.cutting.stages
        self.weights = [p for p in self.model.parameters() if p.requires_grad and not p.is_meta]  # of this rank
        self.mine = [Stage(self, index) for index in self.stages.of_rank(self.axis.index)]
        self.actions: list[Action] = []  # of the newest flush; seconds of time.perf_counter
        self.pieces, self.written = list[Any](), set[str]()  # microbatches; parameters that a forward writes
        self.keys: list[Any] = []
        self.count = schedules.microbatches(self.plan)
        self.schedule = schedules.build(self.plan, self.mine, self.count)
        self.present = {name for name, unit in self.cutting.units if not any(p.is_meta for p in unit.parameters())}
        # what a forward leaves as it was, and of which its begin alone would not; by training
        self.passing = {mode: [trace.passing[n] for n in early(trace, self.stages)] for mode, trace in self.cutting.traces.items()}
        self._step, self._scale, self._total, self._counted = 0, 1.0, 0.0, 0.0

    @property
    def last_rank(self) -> int:
        """The rank that has the last stage, of those that share this one's rows and tp part."""
        return self.axis.ranks[self.stages.rank_of[-1]]

    # --- a step ---------------------------------------------------------------------------------------

    def step(self, pieces: list[Any], step: int, scale: float) -> tuple[float, float]:
        """Forward and backward of `count` microbatches (some without rows). The sums of the last stage's rank.

        `scale` multiplies what is differentiated. The gradients are in the reducer.
        """
        self.pieces, self._step, self._scale = pieces, step, scale
        rows = self.together([piece.rows for piece in pieces])
        self.keys = [key_of(piece.data, each) if piece.rows else None for piece, each in zip(pieces, rows, strict=True)]
        for piece, key in zip(pieces, self.keys, strict=True):
            if piece.rows and key not in self.mine[0].known:
                self._learn(piece, key)
        self._total, self._counted = 0.0, 0.0
        self.actions = []
        with issuing(), holding(self.axis.group):  # messages are recorded where they are made
            self.schedule._step_microbatches(target_mbs=[None] * len(pieces), return_outputs=False)
        self.pieces = []
        return self._total, self._counted

    @contextmanager
    def timed(self, kind: str, stage: int, number: int) -> Iterator[None]:
        """Note when an action ran."""
        start = time.perf_counter()
        yield
        self.actions.append(Action(kind, stage, number, start, time.perf_counter()))

    def _learn(self, piece: Any, key: Any) -> None:
        """Let the shapes of a microbatch be known on every stage; nothing of the model changes."""
        began = self.randomness.begin(self._step, piece.start, piece.rows)
        with kept.unchanged(self.model, weights=self.written), began, self.randomness.forward(gradients=False):
            self._forward_only(piece.data, key)

    def compute(self, stage: Stage, number: int, flight: Flight, known: Known) -> None:
        """The forward of one microbatch on one stage; `flight` gets what is sent, or the loss."""
        piece = self.pieces[number]
        began = self.randomness.begin(self._step, piece.start, piece.rows)
        with began as flight.randomness, self.randomness.forward():
            forward, result = self._forward(stage, piece.data, known, flight.leaves)
            if result is None:
                flight.outputs = _outputs(forward, known)
                return self.own(flight.outputs, 1.0, (piece.data, flight.leaves))
            total, count = result
            if count:  # without counted targets there is no gradient: the total may be 0/0
                self._total, self._counted = self._total + float(total.detach()), self._counted + count
            if count or self.plan.together:
                flight.outputs = [total * self._scale]
            else:
                self.reducer.uncounted(total)

    @contextmanager
    def backward(self, flight: Flight) -> Iterator[None]:
        """Around a backward: recomputation draws as the forward did."""
        with self.randomness.resume(flight.randomness), self.randomness.forward(), self.again():
            yield

    # --- a forward ------------------------------------------------------------------------------------

    def _forward(self, stage: Stage, data: Any, known: Known, leaves: list[Tensor]) -> tuple[StageForward, tuple[Tensor, float] | None]:
        index = stage.stage_index
        received = {v.name: handed(x, v) for v, x in zip(known.incoming, leaves, strict=True)}
        forward = StageForward(self, index, received, known.shapes)
        self.randomness.restart()
        passing = [(module, key, getattr(module, key)) for module, key in self.passing[self.model.training]]
        result = None
        with self.computing(), forward, suppress(Finished):
            result = self.call(data)
        if (result is None) == stage.is_last:
            what = "the forward took another path than on the first batch: it ended before the next stage's blocks"
            raise SoliError(what, got=f"stage {index}", fix="call the same blocks for every batch, or use pp=1")
        for module, key, before in passing:
            if result is not None and not kept.same(before, getattr(module, key)):
                what = f"{key} of {type(module).__name__} ends a forward otherwise than it began, which it did not on the first rows"
                raise SoliError(what, got=f"{before} before, {getattr(module, key)} after", fix="put it back in every forward, or use pp=1")
            vars(module)[key] = before  # as it is after the whole forward
        if known.own is not None and forward.forms != known.own:
            raise shapes_differ(index, forward.forms, known.own)
        known.own = forward.forms
        return forward, result

    def forward_only(self, data: Any, rows: int) -> tuple[float, float]:
        """Total and count of a batch, on the last stage's rank (0 on the others), in the model's present mode."""
        return self._forward_only(data, key_of(data, self.together([rows])[0], self.model.training))

    @torch.no_grad()
    def _forward_only(self, data: Any, key: Any) -> tuple[float, float]:
        total, count = 0.0, 0.0
        before: tuple[Stage, list[Tensor], Any] | None = None
        pending = []
        for stage in self.mine:
            index, new = stage.stage_index, key not in stage.known
            local = before is not None and before[0].stage_index == index - 1
            if stage.is_first:
                known, leaves = stage.known.get(key) or Known([], [], []), []
            elif before is not None and local:
                known = stage.known.get(key) or self._known(index, before[2])
                leaves = before[1]
            else:
                source = stage.peer(index - 1)
                what = "shapes of a microbatch"
                known = stage.known.get(key) or self._known(index, receive_json(self.axis, source, label=what))
                leaves = [torch.empty(v.form[0], dtype=v.form[1], device=self.device) for v in known.incoming]
                for x in leaves:
                    receive(x, self.axis, source, label="activation")
            forward, result = self._forward(stage, data, known, leaves)
            if result is not None:
                total, count = float(result[0]) if result[1] else 0.0, result[1]
                stage.known[key] = known
                break
            if new:
                outputs, header = self._outgoing(stage, known, forward)
                stage.known[key] = known
            else:
                outputs, header = _outputs(forward, known), None
            before = (stage, outputs, header)
            if self.stages.rank_of[index + 1] != self.axis.index:
                to = stage.peer(index + 1)
                if new:
                    send_json(header, self.axis, to, label="shapes of a microbatch")
                pending += [send(x, self.axis, to, label="activation", wait=False) for x in outputs]
        for one in pending:
            one.wait()
        return total, count

    def _outgoing(self, stage: Stage, known: Known, forward: StageForward) -> tuple[list[Tensor], Any]:
        """What goes to the next stage, and what that one must know to receive it; kept in `known`."""
        following = self.cutting.needs[self.model.training, stage.stage_index + 1]
        values = [_found(forward, name) for name, _ in following]
        if any(x.is_nested for x in values):
            raise SoliError("a nested tensor goes from stage to stage, which sends padded ones", got=f"stage {stage.stage_index}", fix="make and pad it inside a block, or use pp=1")
        known.outgoing = [
            Crossing(name, (tuple(plain(x).shape), x.dtype), dict(x.cuts) if type(x) is Cut else {}, requires)
            for (name, requires), x in zip(following, values, strict=True)
        ]
        calls = [list(map(_form_said, call)) for call in (*known.shapes, *forward.forms)]
        outgoing = [[list(v.form[0]), _word(v.form[1]), _said(v.cuts)] for v in known.outgoing]
        return [plain(x) for x in values], [calls, outgoing]

    def _known(self, stage: int, header: Any) -> Known:
        calls, values = header
        names = self.cutting.needs[self.model.training, stage]
        incoming = [
            Crossing(name, (tuple(shape), getattr(torch, dtype)), _read(cuts), requires)
            for (name, requires), (shape, dtype, cuts) in zip(names, values, strict=True)
        ]
        return Known([[_form_read(said) for said in call] for call in calls], incoming, [])


def key_of(data: Any, rows: tuple[int, ...], training: bool = True) -> Any:
    """What of a batch the shapes inside a model depend on: on a grid also the rows of others, parts of which a rank sends on."""
    return (training, rows, tuple((tuple(x.shape), x.dtype) for x in tree_leaves(data) if isinstance(x, Tensor)))


def _outputs(forward: StageForward, known: Known) -> list[Tensor]:
    found = [plain(_found(forward, value.name)) for value in known.outgoing]
    now, then = [(tuple(x.shape), x.dtype) for x in found], [value.form for value in known.outgoing]
    if now != then:
        raise shapes_differ(forward.stage, now, then)
    return found


def shapes_differ(stage: int, now: list[Any], then: list[Any]) -> SoliError:
    differ = [pair for pair in zip_longest(now, then) if pair[0] != pair[1]]
    here, before = (", ".join(str(pair[i]) for pair in differ) for i in (0, 1))
    what = "the shapes inside the model depend on the values of the batch, and a pipeline must know them before"
    got = f"stage {stage}: {here}; for the last batch of the same shape {before}"
    return SoliError(what, got=got, allowed="shapes that follow from the batch's", fix="pad instead of selecting rows or positions by value, or use pp=1")


def _found(forward: StageForward, name: Name) -> Tensor:
    if name not in forward.made:
        what = "the forward took another path than on the first batch: a value that a later stage uses was not made"
        raise SoliError(what, got=f"stage {forward.stage}, value {name}", fix="call the same operations between the blocks for every batch, or use pp=1")
    return forward.made[name]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form_said(form: Any) -> Any:
    return {"shape": form[0], "dtype": _word(form[1])} if isinstance(form, tuple) else form


def _form_read(said: Any) -> Any:
    return (tuple(said["shape"]), getattr(torch, said["dtype"])) if isinstance(said, dict) else said


def _said(cuts: dict[str, Split]) -> Any:
    return {axis: [s.dim, s.parts, s.atoms, sorted(s.origins), s.lead, s.axis, s.spans] for axis, s in cuts.items()}


def _read(said: Any) -> dict[str, Split]:
    found = {}
    for axis, (dim, parts, atoms, origins, lead, over, spans) in said.items():
        by_rank = tuple(tuple((a, b) for a, b in own) for own in spans)
        found[axis] = Split(dim, tuple(parts), atoms, frozenset(origins), tuple(lead), over, by_rank)
    return found
