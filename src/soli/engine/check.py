"""What is checked once, on the first step: that the loss adds up over the rows of the batch, and what forwards change.

The model runs (without gradients) on the rows whole and in two parts. From the shapes of its random calls
on both, dropout learns which dim is the batch; from the losses, soli learns whether
total(whole) = total(part 1) + total(part 2), which is what makes any split of the batch exact. Buffers that the model
changes meanwhile are told from those that it builds once (kept.py).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from soli.core.errors import SoliError, on_all_ranks
from soli.core.events import events
from soli.engine import coupling
from soli.engine.batch import Part, at, few, part_of, rows_of, take, to_device, unwritten
from soli.engine.contract import rounding
from soli.engine.differentiating import Differentiating
from soli.engine.effects import Effects, looked_at
from soli.engine.remembered import LATER
from soli.losses import FromModel
from soli.mesh.collectives import all_gather, all_reduce, extreme, gather_json, raise_together
from soli.parallel import kept

if TYPE_CHECKING:
    from soli.engine.engine import Engine


Loss = tuple[float, float]
"""The sum of a forward's losses and how many were counted."""
MOVED = (
    "the model computes another loss when it is called again on the same rows: what it keeps in no buffer, number, tensor, list or dict of a module (in a "
    "global, a class's attribute, an object) was moved on by the calls of the first step's checks, and training begins from there; in these it is put back"
)
UNSURE = (
    "no first label of a row counts in the rows that were looked at; made to count, the model's own loss {} it, and soli.losses.from_model(shifted={}) "
    "was said: from the first batch on where one counts the loss would be another; say shifted={}, unless the model reads its masks from the labels"
)
UNNAMED = "of the batch the loss alone has {}: the model's forward has **kwargs beside what it names, and is given what it names; name there what it is to have"


class FirstStep:
    """`check` runs until it has seen a batch of which every rank has a row, and again in modes of its modules that are new."""

    def __init__(self) -> None:
        self.modes = set[tuple[bool, ...]]()
        self._losses: list[coupling.Sum] | None = None
        self.size = 0.0  # what a loss is of, where its terms cancel
        self.looked = list[int]()  # the steps in which what the loss trains is looked at
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._evaluated = False
        self.row: Any = None  # of an earlier batch, for a rank that has none

    def before(self, engine: Engine, example: Any) -> None:
        """What is looked at while every rank has the whole weights, if it has; else it is gathered in `check`."""
        if engine.plan.model_ranks > 1 and not any(p.is_meta for p in engine.model.parameters()):
            self._losses = coupling.measured(engine, part_of(example, 1, 0))
            self.size = coupling.size_of(self._losses)

    def wanted(self, model: nn.Module, part: Part, ranks: int) -> bool:
        return part.total >= ranks and _modes(model) not in self.modes

    def evaluating(self, engine: Engine, part: Part) -> None:
        """Learn which dim is the batch in what an evaluation draws, once, from its first batch of which every rank has a row. Collective."""
        if self._evaluated or part.total < engine.dp.size:
            return
        data, rows = to_device(part.data, engine.device), part.rows
        with kept.unchanged(engine.model), engine.loss_fn.unchanged():
            _run(engine, data, rows)  # on all that the evaluation runs on: it need not run on fewer
            draws = _anywhere(engine, engine.randomness.drawing, "whether an evaluation draws")
            if draws and rows > 1:
                _in_parts(engine, data, rows)
            elif draws:
                _run(engine, at(data, [0, 0]), 2)
        raise_together(lambda: engine.randomness.finish_probe(evaluating=True), engine.mesh.all, label="what an evaluation draws")
        self._evaluated = True

    def check(self, engine: Engine, part: Part) -> None:
        """Raises SoliError where the loss is a mean, rows are coupled, or what is kept changes by them. Collective."""
        model, simulated = engine.model, engine.mesh.all.simulated
        start, objects = kept.values(model), [x for _, x in kept.tensors(model)]
        engine.loss_fn.kept.clear()  # a counter that went on since an earlier check did not follow its rows
        data, rows = _looked_at(engine, part)
        self.row = at(data, [0]) if engine.dp.size > 1 else None
        effects, whole = _watched(engine, data, rows, part.total)
        weights = {} if engine.plan.zero == 3 else effects.before  # there they are gone by now
        if engine.pipeline is not None:
            engine.pipeline.written |= set(weights)  # in any of its modes
        start |= weights
        before, moved = kept.values(model, weights), kept.changed(model, start)
        look = Look(engine, data, rows, _in_parts(engine, data, rows), start, before, moved, whole)
        changes, sums = _changes(look, kept.Changes(weights), effects.written | weights.keys(), objects)
        first, sure = _counts_first(look)
        losses = self._losses
        if losses is None:
            losses = coupling.measured(engine, part)
            self.size = coupling.size_of(losses)
        size, split = self.size * rows, engine.plan.pieces > 1
        apart = bool(look.parts) and not _adds_up(sums, engine, size)
        again = look.whole if simulated else look.run()
        look.back()
        doubted = _anywhere(engine, apart, "whether losses do not add up") or split
        twice = _twice(look, sums, split) if doubted and look.parts and not simulated else []
        kept.restore(model, start)

        def verdict() -> None:
            engine.randomness.finish_probe()
            effects.explain(engine.plan, engine.pipeline)
            changes.explain(engine.plan)
            engine.loss_fn.explain(engine.plan)
            if apart and not kept.same(again, look.whole) and split:
                _refuse_memory()
            if look.parts:
                _explain(sums, [rows, rows // 2, rows - rows // 2], engine, size, twice)
            if first is not None and sure:
                _refuse_shift(first)

        raise_together(verdict, engine.mesh.all, label="whether losses add up")
        if first is not None and not sure:
            events.note(UNSURE.format("counts" if first else "does not count", first, not first), shown=engine.rank == 0)
        _say_padding(engine, part)
        if not self.modes and (unnamed := engine._call.unnamed(part.data)):
            events.note(UNNAMED.format(", ".join(unnamed)), shown=engine.rank == 0)
        coupling.check(engine, losses)
        if abs(again[0] - look.whole[0]) > rounding(engine, look.whole[1]) * (abs(look.whole[0]) + size):
            events.note(MOVED, shown=engine.rank == 0)
        self.modes.add(_modes(model))


@dataclass
class Look:
    """The rows that are looked at, and what a first forward of them found."""

    engine: Engine
    data: Any
    rows: int
    parts: list[tuple[int, int]]  # its halves; none where the model does not run on them
    start: kept.Snapshot  # what was kept before any forward, and weights that one changes
    before: kept.Snapshot  # the same after the first
    moved: dict[str, kept.Value]  # what that changed
    whole: Loss  # of all rows

    def run(self, learn: bool = True) -> Loss:
        return _run(self.engine, self.data, self.rows, learn=learn)

    def run_part(self, a: int, b: int, learn: bool = True) -> Loss:
        return _run(self.engine, take(self.data, a, b), b - a, part=True, learn=learn)

    def back(self) -> None:
        """What is kept is as the first forward left it."""
        kept.restore(self.engine.model, self.before)


def _looked_at(engine: Engine, part: Part) -> tuple[Any, int]:
    """The rows that are looked at, two or more, and how many they are. Collective."""
    rows = few(part, engine.plan)
    data = to_device(take(part.data, 0, rows), engine.device)
    return (_two(engine, data), 2) if _anywhere(engine, rows < 2, "whether a rank has one row") else (data, rows)


def _two(engine: Engine, data: Any) -> Any:
    """This rank's first row and the next rank's, as a row alone shows nothing of what couples it. Where others have other sizes, or other things than tensors, its own: two, or one twice. Collective."""
    own, data, dp = take(data, 0, 2), at(data, [0, 0]), engine.dp
    leaves = [x for x in tree_leaves(data) if isinstance(x, torch.Tensor) and x.dim() and x.numel()]
    plain = lambda x: x.tolist() if hasattr(x, "tolist") else x
    forms = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) and x.dim() else repr(plain(x)) for x in tree_leaves(data)]
    if not all(other == forms for other in gather_json(forms, dp, label="forms of a row")):
        events.note("a rank has one row, and the others' have other sizes or other things than tensors: what couples rows is not seen in it; a first batch of two rows a rank shows it", shown=engine.rank == 0)
        return own if rows_of(own) > 1 else data
    for x in leaves if not dp.simulated else ():
        mine = x[0].contiguous().view(-1).view(torch.uint8)
        all_gather(whole := mine.new_empty(dp.size * mine.numel()), mine, dp, label="a row of the next rank")
        x[1] = whole.view(dp.size, -1)[(dp.index + 1) % dp.size].view(x.dtype).view(x[1].shape)
    return data


def _watched(engine: Engine, data: Any, rows: int, total: int) -> tuple[Effects, Loss]:
    """A first forward, and what else it did. `total`: rows of the batch."""
    with Differentiating(engine.plan), looked_at(engine.model, engine.plan) as effects:
        try:
            return effects, _run(engine, data, rows)
        except Exception as error:  # under zero=3 there may be nothing to write into, or to read
            effects.explain(engine.plan, engine.pipeline)
            if isinstance(error, RuntimeError | IndexError | AssertionError) and rows < total:
                error.add_note(
                    f"soli: on {rows} of the batch's {total} rows. If the model runs on all of them alone (plan dp=1), as on the "
                    "nodes of a graph, they are no rows that can be shared out: let a row be what is computed by itself (one graph)"
                )
            raise


def _changes(look: Look, changes: kept.Changes, written: set[str], objects: list[torch.Tensor]) -> tuple[kept.Changes, list[Loss]]:
    """What forwards change of what the model keeps, and the losses of all rows and of each part. Collective.

    `written`: what the first forward was seen to write into. `objects`: the tensors that were kept before it.
    """
    engine, model, moved = look.engine, look.engine.model, look.moved
    onward, idle, aside = False, False, len(moved) > len(kept.in_state(model, moved))
    if _anywhere(engine, bool(moved), "whether a forward changes what is kept"):
        onward = _from_start(look, changes)
    if _anywhere(engine, aside, "whether a forward changes attributes"):
        idle = _idle(look)
        look.back()
    sums = [look.whole]
    for part in look.parts:
        sums.append(look.run_part(*part))
        changes.again.append(kept.changed(model, look.before))
        look.back()
    still = _left(model, written, objects, changes) if engine.plan.runs > 1 else []
    if _anywhere(engine, bool(still), "whether a forward writes what was there"):
        changes.begin_alike = _remembered(look, still)
        look.back()
    if onward:
        changes.begin_alike += kept.in_state(model, moved) if idle else moved
    return changes.in_state(model) if idle else changes, sums


def _from_start(look: Look, changes: kept.Changes) -> bool:
    """Note what each part changes from the start, as all rows did, and take the whole's loss from what that left. Whether it is another one
    from the start: a flag that a step's first microbatch sets is there for the second."""
    model, onward = look.engine.model, False
    changes.once.append(look.moved)  # two parts of one size are alike to what counts rows
    for part in look.parts:
        kept.restore(model, look.start)
        look.run_part(*part)
        changes.once.append(kept.changed(model, look.start))
    look.back()
    look.engine.randomness.forget()
    look.whole = look.run()  # the losses are compared from the same values
    if look.engine.plan.runs > 1:
        kept.restore(model, look.start)
        onward = not kept.same(look.run(), look.whole)
    look.back()
    return onward


def _idle(look: Look) -> bool:
    """Whether nothing comes of attributes, as of results that a module keeps for others to look at: the loss is the same with what was in
    them before any forward, and with what several left; of a part of the rows too, which may have set what the first rows set for ever."""
    model, alone = look.engine.model, list[Loss]()
    in_state = kept.in_state(model, look.before)
    for part in look.parts[-1:]:
        alone = [look.run_part(*part, learn=False)]
        kept.restore(model, look.start | in_state)
        alone.append(look.run_part(*part, learn=False))
        look.back()
    kept.restore(model, look.start | in_state)
    first = kept.same(look.run(learn=False), look.whole)
    look.back()
    for _ in range(LATER):
        look.run(learn=False)
    kept.restore(model, kept.values(model) | in_state)
    return kept.same(look.run(learn=False), look.whole) and first and kept.same(alone[:1], alone[1:])


def _remembered(look: Look, names: list[str]) -> list[str]:
    """Of what a forward wrote and left as it was, what it would not have left so: where it begins with other values, others come of it, and of
    these others again. Attributes that move no loss are for others to look at."""
    engine, model = look.engine, look.engine.model
    aside = sorted(set(names) - kept.in_state(model, dict.fromkeys(names)).keys())
    count = int(extreme(len(aside), engine.mesh.all, "max", label="attributes that a forward writes"))
    alone = [_shifted(look, aside[i : i + 1]) for i in range(count)]
    idle = {name for name, loss in zip(aside, alone, strict=False) if kept.same(loss, look.whole)}
    names = [name for name in names if name not in idle]
    _shifted(look, names)
    now = kept.changed(model, look.start)
    moved = [name for name in names if name in now and not kept.same(now[name], look.before[name])]
    if not _anywhere(engine, bool(moved), "whether a forward goes on changing what it left"):
        return []
    left = kept.values(model, names)  # what is only brought to a form (a triangle, a norm) stays as it is from then on
    look.run()
    return [name for name in kept.changed(model, left) if name in moved]


def _shifted(look: Look, names: list[str]) -> Loss:
    """The loss where these begin with other values."""
    kept.restore(look.engine.model, look.start)
    kept.shift(look.engine.model, names)
    return look.run()


def _twice(look: Look, sums: list[Loss], split: bool) -> list[tuple[Loss, Loss]]:
    """The losses of a part's rows, and of these where each is there twice. `split`: the plan takes rows apart."""
    found = []
    for i in (0, 1 - look.rows % 2):  # never more rows than ran, and as many forwards on each rank
        twice = at(look.data, [*range(*look.parts[i])] * 2)
        found.append((sums[i + 1], _run(look.engine, twice, look.rows // 2 * 2, part=split, learn=False)))
        look.back()
    return found


def _modes(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())


def _run(engine: Engine, data: Any, rows: int, part: bool = False, learn: bool = True) -> Loss:
    with engine.randomness.probe(rows, learn), engine.statistics.check(part), unwritten(data):
        sums = torch.tensor(engine.forward_only(data), dtype=torch.float64)
    all_reduce(sums, engine.mesh["pp"], label="loss and count of the last stage")
    total, count = sums.tolist()
    return total, count


def _in_parts(engine: Engine, data: Any, rows: int) -> list[tuple[int, int]]:
    """Where the two halves of the rows begin and end; none where the model does not run on the first alone, and on the second, where there is
    one more: on a graph's nodes, or a picture's channels. SoliError where the plan has to take them apart."""
    halves = [(0, rows // 2), (rows // 2, rows)]  # the second has other rows than the whole, so shapes tell the batch dim
    if engine.mesh.all.simulated:  # what comes of shapes is found where they are run
        return halves
    try:
        with kept.unchanged(engine.model):
            # as many forwards on each rank: where rows are apart, some have fewer of them
            for a, b in halves[: 1 + (engine.plan.pieces == 1)]:
                _run(engine, take(data, a, b), b - a, part=True)
    except SoliError:
        raise
    except Exception as error:  # of somebody's model
        said = f"{type(error).__name__}: {error}".split("\n")[0]
        if engine.plan.pieces > 1:
            allowed = "rows that are computed by themselves, however many there are"
            fix = "let a row be what is computed by itself (one graph, one sequence with its state), or run with dp=1, tensor=1d and no accumulate or microbatches"
            raise SoliError("the model does not run on a part of the batch's rows", got=said, allowed=allowed, fix=fix) from error
        text = f"the loss was not checked to be a sum over rows, as the model does not run on a part of them: {said}"
        events.note(text, shown=engine.rank == 0)
        return []
    return halves


def _left(model: nn.Module, written: set[str], before: list[torch.Tensor], changes: kept.Changes) -> list[str]:
    """What a forward wrote into, or replaced, and left as it was. So it left what is in the state and moved once, and not again: it may be an
    average of what it began as, which rounding moved."""
    moved, again = ((found or [{}])[0] for found in (changes.once, changes.again))
    known = {id(x) for x in before}
    anew = {name for name, x in kept.tensors(model) if id(x) not in known}
    return sorted((written | anew) - (moved.keys() - (kept.in_state(model, moved).keys() - again.keys())))


def _counts_first(look: Look) -> tuple[bool | None, bool]:
    """Whether the model's own loss counts each row's first label, if it is not as was said. None: it is, or nothing tells. And whether that is
    sure: where no first label counts, one that is made to count tells, but a model may read from labels what it masks."""
    engine, data, whole = look.engine, look.data, look.whole
    loss = engine.loss_fn.function
    if not isinstance(loss, FromModel):
        return None, True
    eps = torch.finfo(next((p.dtype for p in engine.model.parameters() if p.is_floating_point()), torch.float32)).eps

    def same(labels: Any) -> bool:
        with kept.unchanged(engine.model):
            total, count = _run(engine, labels, look.rows)
        near = 4 * eps * abs(total * whole[1])
        return kept.same((total, count), whole) or (count != whole[1] and abs(total * whole[1] - whole[0] * count) <= near)

    def moves(end: int | None, counted: bool = True) -> bool | None:
        """Whether other labels make another loss."""
        others = loss.with_others(data, end, counted)
        if not _anywhere(engine, others is not None, "whether there are other labels"):
            return None
        kept_same = same(data if others is None else others)
        return None if others is None else not kept_same

    first, sure = moves(1), True
    if not _anywhere(engine, first is not None, "whether a first label is looked at"):
        first, sure = moves(1, counted=False), False
    if loss.shifted:
        moved = _anywhere(engine, bool(first), "whether a first label counts")
        return True if moved and same(data) and first else None, sure
    # that it moves nothing tells only where others move something: a head of zeros has one loss for all labels
    return False if moves(None) and first is False else None, sure


def _say_padding(engine: Engine, part: Part) -> None:
    """Whether each rank's rows are of another size beyond their first dim: it collates its own, and pads them to its own longest. Collective."""
    mine = [list(x.shape[1:]) for x in tree_leaves(part.data) if isinstance(x, torch.Tensor)]
    others = gather_json(mine, engine.dp, label="sizes of the rows") if engine.dp.size > 1 else [mine]
    if len({str(sizes) for sizes in others if sizes}) > 1:
        text = (
            "each rank collates rows of its own, and they are of other sizes on others (padded to its own longest): a mask and a count that leave "
            "out what is padded make that the same, but a mean over it, a count of it and dropout's draws beside it are others than one process's: "
            "to have these too pad to one length, or collate the global batch and give it to engine.step"
        )
        events.note(text, shown=engine.rank == 0)


def _anywhere(engine: Engine, here: bool, label: str) -> bool:
    """Whether it is so on any rank."""
    return bool(extreme(float(here), engine.mesh.all, "max", label=label))


def _adds_up(sums: list[Loss], engine: Engine, size: float) -> bool:
    """Whether the whole's total is that of its parts, up to rounding."""
    (whole, count), (first, _), (second, _) = sums
    return abs(whole - first - second) <= rounding(engine, count) * (abs(first) + abs(second) + size)


def _refuse_memory() -> None:
    what = "the model computes another loss when it is called again on the same rows"
    allowed = "a forward that depends on its rows and weights, and on buffers and numbers of its modules"
    kept = "something is kept from call to call outside of the modules (an object, a list, a global)"
    raise SoliError(what, allowed=allowed, fix=f"{kept}: keep it in a buffer, or run with dp=1 and no accumulate, microbatches or recompute")


def _refuse_shift(first: bool) -> None:
    counts = "counts the first label of each row" if first else "does not count the first label of each row: it predicts the next one"
    fix = f"soli.parallelize(model, soli.losses.from_model(shifted={not first}), ...)"
    raise on_all_ranks(f"the model's own loss {counts}", got=f"soli.losses.from_model(shifted={first})", fix=fix)


def _explain(sums: list[Loss], rows: list[int], engine: Engine, size: float, twice: list[tuple[Loss, Loss]]) -> None:
    """`twice`: of a part's rows, and of these where each is there twice. A mean stays as it is then; the statistics of a batch norm do too."""
    (whole, count), (first, count1), (second, count2) = sums
    doubled = not (twice and abs(twice[0][1][0] - first) < abs(twice[0][1][0] - 2 * first))  # what is no number of few rows is no mean
    if whole - whole != 0:
        return  # not finite: the step itself reports it
    if abs(count - count1 - count2) > (rounding(engine, count) * count if count % 1 else 0):
        if engine.plan.pieces == 1:
            return  # what is counted may depend on all rows where they are on one device (the hardest half)
        what = "the loss's count does not add up over the rows of the batch"
        got = f"{count:g} for {rows[0]} rows, {count1:g} + {count2:g} for its two parts"
        fix = "a count of 1 usually means a mean: return the sum and the number of counted targets"
        raise SoliError(what, got=got, allowed="the number of targets that were counted", fix=fix)
    if _adds_up(sums, engine, size):
        odd = [(one, two) for one, two in twice if not _adds_up([two, one, one], engine, size) or abs(two[1] - 2 * one[1]) > rounding(engine, count) * count]
        if odd and engine.plan.pieces > 1:
            what = "rows that are there twice have not twice their loss, or count: something couples those that have a key in common, or is there once a batch"
            got = "{:.6g} of {:.6g} counted; for these rows and the same again {:.6g} of {:.6g}".format(*odd[0][0], *odd[0][1])
            fix = "weigh rows by what they or the model have (class weights of the dataset, not of the batch), add to every row its part of such a term; or run with dp=1, tensor=1d and no accumulate or microbatches"
            raise SoliError(what, got=got, allowed="a loss that is the sum of its rows' losses", fix=fix)
        return
    if doubled and engine.plan.pieces == 1:
        return  # rows may depend on each other where all of them are on one device
    got = f"{whole:.6g} for {rows[0]} rows; {first:.6g} + {second:.6g} for its two parts"
    allowed = "total(batch) = total(rows 1..k) + total(rows k+1..n)"
    if doubled:
        what = "the loss of a batch is not the sum of its rows' losses: something couples the rows"
        own = "from_model counts all labels but -100: say ignore=255 where the model leaves out another; else " if isinstance(engine.loss_fn.function, FromModel) else ""
        fix = f"{own}batch statistics and in-batch negatives cannot be split; use losses and norms of single rows, or run with dp=1, tensor=1d and no accumulate or microbatches"
        raise SoliError(what, got=got, allowed=allowed, fix=fix)
    fix = "return the sum (reduction='sum') and the count; soli divides by the count of the global batch. If it is a sum, something couples the rows (in-batch negatives)"
    raise SoliError("the loss is a mean over the batch and not a sum", got=got, allowed=allowed, fix=fix, seen="wrong-scale")
