"""The engine under pp > 1: how the model is cut, and what of a step is done otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from soli.core.errors import SoliError, on_all_ranks
from soli.core.events import events
from soli.core.layout import even_parts
from soli.engine import microbatch
from soli.engine.batch import Part, at, part_of, rows_of, to_device
from soli.engine.layout import Runner
from soli.mesh.collectives import all_reduce, ending, extreme, gather_json
from soli.parallel.pipeline import schedules, stages, table, watch
from soli.parallel.pipeline.run import Cutting, Pipeline, needs_of
from soli.parallel.pipeline.units import Unit, units
from soli.parallel.units import named_once

if TYPE_CHECKING:
    from soli.engine.engine import Engine


def cutting_of(engine: Engine, batch: Any) -> Cutting:
    """Run the whole model on a few rows, in training and in evaluation, and cut it into balanced stages. Collective."""
    part = part_of(batch, 1, 0)
    if not extreme(part.rows, engine.mesh.all, "min", label="rows of the first batch"):
        fix = "give soli.parallelize(..., example=batch), or a first batch with a row for each rank of dp"
        raise on_all_ranks("the model is cut into stages on the first batch, and some ranks have no row of it", fix=fix)
    runner = Runner.of(engine, part)
    parts, traces = _traces(engine, runner)
    ranks = schedules.rank_of_stages(engine.plan)
    cut = stages.cut(traces[True], parts, ranks, part.rows * (engine.plan.dp or 1) / runner.rows)
    cut = stages.Stages(tuple(gather_json(cut.starts, engine.mesh.all, label="stages")[0]), cut.costs, cut.rank_of)
    _agree(engine, traces, cut.starts[-1])
    for trace, other in permutations(traces.values()):  # what one mode changes, the other may read
        trace.kept_reads |= {name: min(gap, trace.kept_reads.get(name, gap)) for name, gap in other.kept_reads.items()}
    for trace in traces.values():
        stages.check_hidden(trace, cut)
        stages.check_aliases(trace, cut)
        stages.check_buffers(engine.model, trace, cut)
    trained, evaluated = (stages.users(traces[training], cut) for training in (True, False))
    # A unit that was not called may be called by another batch, in the last stage.
    unused = {cut.rank_of[-1]}
    owners = {names[0]: sorted(trained.get(id(param), unused) | evaluated.get(id(param), set())) for names, param in named_once(engine.model)}
    buffers = stages.buffer_owners(engine.model, traces[True], parts, cut)
    _announce(engine, cut, traces[True])
    return Cutting(cut, parts, traces, owners, buffers, needs_of(engine.model, cut, traces))


def _traces(engine: Engine, runner: Runner) -> tuple[list[Unit], dict[bool, watch.Trace]]:
    """Units in a number that is enough for the stages, and the traces of their calls."""
    finer, wanted = 0, engine.plan.stages
    while True:
        parts = units(engine.model, finer)
        trained = _trace(runner, parts, True)
        try:
            traces = {True: trained, False: _trace(runner, parts, False)}
        except SoliError:
            raise
        except Exception as error:  # of somebody's model
            said = f"{type(error).__name__}: {error}".split("\n")[0]
            events.note(f"the model does not run in evaluation, so its stages are those of training alone: {said}", shown=engine.rank == 0)
            traces = {True: trained, False: trained}
        calls = [call.unit for call in traces[True].calls]
        if len(calls) >= wanted:
            return parts, traces
        if units(engine.model, finer + 1) == parts:  # none can be taken apart
            what = f"the model has fewer parts to cut between than the pipeline has stages: {len(calls)} < {wanted}"
            got = f"the first rows call {', '.join(calls) or 'none'} of {len(parts)} parts"
            raise on_all_ranks(what, got=got, allowed=f"pp x stages a rank <= {len(calls)}", fix="use a smaller pp, or fewer chunks")
        finer += 1


def _trace(runner: Runner, parts: list[Unit], training: bool) -> watch.Trace:
    tracers = []

    def around(randomness: Any) -> watch.Tracer:
        tracers.append(watch.Tracer(runner.model, parts, randomness.counted))
        return tracers[0]

    leaves = [x for x in tree_leaves(runner.data) if isinstance(x, torch.Tensor)]
    versions = [x._version for x in leaves]
    with watch.watched(parts):
        runner.run(around, training, leaving=True)
    if versions != [x._version for x in leaves]:
        raise on_all_ranks("the forward writes into the batch, which every stage reads", fix="make a new tensor (x = x * 2 and not x *= 2), or use pp=1")
    return tracers[0].trace


def _agree(engine: Engine, traces: dict[bool, watch.Trace], last: int) -> None:
    """All ranks, in training and in evaluation, must take the same path up to the last stage, which call `last` starts."""
    paths = {training: trace.until(last) for training, trace in traces.items()}
    if traces[False].first_read() <= last:
        what = "the forward looks at a value between its blocks in evaluation, where the last stage has not begun"
        got = ", ".join(sorted({name for gap, name in traces[False].reads if gap <= last}))
        raise on_all_ranks(what, got=got, fix="do it inside a block or after the last one, or use pp=1")
    if paths[True][0] != paths[False][0]:
        what = "the model calls other blocks in evaluation than in training, and has one set of stages for both"
        got = f"{', '.join(paths[False][0])} and {', '.join(paths[True][0])}"
        raise on_all_ranks(what, got=got, fix="call the same blocks in both, or use pp=1")
    everyone = gather_json(list(paths.values()), engine.mesh.all, label="traces")
    if odd := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
        what = "the model's forward takes different paths on the rows of different ranks"
        got = f"ranks {', '.join(map(str, odd))} took another than rank 0"
        raise on_all_ranks(what, got=got, fix="put what depends on the rows inside a block, or use pp=1", seen="uneven-decision")


def _announce(engine: Engine, cut: stages.Stages, trace: watch.Trace) -> None:
    """One line with the stages, and one with what the bubble costs."""
    plan, count = engine.plan, schedules.microbatches(engine.plan)
    ends = [*cut.starts[1:], len(trace.calls)]
    runs = [f"{trace.calls[a].unit}..{trace.calls[b - 1].unit}" if b - a > 1 else trace.calls[a].unit for a, b in zip(cut.starts, ends, strict=True)]
    whole = sum(cut.costs) or 1.0
    text = " | ".join(f"{run} {cost / whole:.0%}" for run, cost in zip(runs, cut.costs, strict=True))
    share = table.bubble(plan)
    waits = f"{plan.schedule} with {plan.microbatches} microbatch{'es' * (plan.microbatches > 1)}: ranks wait for {share:.0%} of a step"
    if count > plan.microbatches:
        waits += f" (empty ones are added, {count - plan.microbatches}: {plan.schedule} takes {count} or more)"
    if share > 0.2:
        more = plan.with_(microbatches=4 * plan.pp)
        waits += f"; microbatches={more.microbatches} would make it {table.bubble(more):.0%}"
    if plan.zero == 3:
        waits += "; parameters are gathered once a step and kept until its end"
    events.emit("note", text=f"stages: {text}; {waits}")
    if engine.rank == 0:
        print(f"soli: stages {text}\nsoli: {waits}", flush=True)


def build(engine: Engine, cutting: Cutting) -> Pipeline:
    """This rank's stages, once the model is laid over the ranks."""
    watch.watch_units(cutting.units)  # around what recomputes them: a unit of another stage is not entered
    return Pipeline(
        engine.model, engine.plan, engine.mesh["pp"], engine.device, cutting, engine.laid.reducer, engine.randomness,
        partial(microbatch.loss, engine), partial(microbatch.need_own, engine), engine.computing, engine.again, lambda rows: _together(engine, rows),
    )  # fmt: skip


def _together(engine: Engine, rows: list[int]) -> list[tuple[int, ...]]:
    """Of each microbatch the rows of all ranks that compute products together with this one. Collective there."""
    if not engine.plan.together:
        return [() for _ in rows]
    depth, row = engine.mesh["depth"], engine.mesh["row"]
    found = torch.zeros(depth.size, row.size, len(rows), dtype=torch.float64)
    found[depth.index, row.index] = torch.tensor(rows, dtype=torch.float64)
    for axis in (depth, row):
        all_reduce(found, axis, label="rows of microbatches")
    return [tuple(map(int, count)) for count in found.flatten(0, 1).T.tolist()]


def together_ending(engine: Engine, alike: bool = False) -> AbstractContextManager[None]:
    """Around what a rank computes by itself, of its stages or parts: where one fails alone none can go on. `alike`: all compute at once."""
    if engine.mesh.all.simulated:
        return nullcontext()
    mine = ", ".join(str(stage.stage_index) for stage in (engine.pipeline.mine if engine.pipeline else ()))
    who = f"rank {engine.rank}{mine and f' (stage {mine})'} failed after {engine.step_count} steps"
    return ending(engine.mesh.every, who, engine.mesh.all.size if alike else 0)


def forward_backward(engine: Engine, pipeline: Pipeline, pieces: list[Part]) -> tuple[float, float]:
    """Total and count of this rank's pieces (zero but on the last stage); the gradients are reduced."""
    reducer, gatherer = engine.laid.reducer, engine.laid.gatherer
    gatherer.hold_all()
    reducer.begin_backward(last=False)
    total, count, none = 0.0, 0.0, engine._first.row is not None and not any(piece.rows for piece in pieces)
    pieces = [Part(at(engine._first.row, [0]), 0, 1, pieces[0].total)] if none else pieces  # see microbatch.forward_backward
    for a, b in even_parts(len(pieces), min(engine.plan.accumulate, len(pieces))):
        flush = [replace(piece, data=to_device(piece.data, engine.device)) for piece in pieces[a:b]]
        # Shorter than the schedule's: the rest is empty.
        flush += [Part(None, 0, 0, pieces[0].total)] * (pipeline.count - len(flush))
        with together_ending(engine), engine.loss_fn.counting() if none else nullcontext():
            more, counted = pipeline.step(flush, engine.step_count, 0.0 if none else engine.seed_of_loss)
        total, count = (0.0, 0.0) if none else (total + more, count + counted)
    for slot in [slot for unit in reducer.units for slot in unit.slots] if none else ():
        slot.arrived = False  # an earlier row's zeros use no parameter
    if none:
        reducer.zeros.clear()
    reducer.begin_backward(last=True)
    reducer.finish_backward()
    for unit in reducer.units:
        if unit.grad_shard is not None:
            all_reduce(unit.grad_shard, unit.copies, label=f"gradients of {unit.name}")
    gatherer.end_pass()
    return total, count


def forward_only(engine: Engine, pipeline: Pipeline, data: Any) -> tuple[float, float]:
    """See Engine.forward_only."""
    engine.laid.gatherer.hold_all()
    with together_ending(engine):
        found = pipeline.forward_only(data, rows_of(data)) if data is not None else (0.0, 0.0)
    engine.laid.gatherer.end_pass()
    return found


def agree_on_use(engine: Engine) -> None:
    """A parameter that several stages have is used if one of them used it."""
    for unit in engine.laid.reducer.units:
        flags = torch.tensor([float(slot.used) for slot in unit.slots])
        all_reduce(flags, unit.copies, "max", label="used parameters")
        for slot, flag in zip(unit.slots, flags.tolist(), strict=True):
            slot.used = bool(flag)
