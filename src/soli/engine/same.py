"""The model that lies on the ranks against the plain one, on a few rows, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from soli.core.axes import REPLICATE, SHARD, TP
from soli.core.errors import failure, listed, on_all_ranks
from soli.core.events import events
from soli.engine import between, effects
from soli.engine.batch import Part, part_of, to_device, unwritten
from soli.engine.contract import depth, rounding, total_and_count
from soli.engine.layout import Runner
from soli.mesh.collectives import Axis, all_reduce, raise_together

if TYPE_CHECKING:
    from soli.engine.engine import Engine


ELEMENTS = 1024
"""Of each tensor of a batch that are looked at each step."""


@dataclass
class Sample:
    """A few rows, and their loss under the plain model. `loss` is None where there are no rows."""

    data: Any
    rows: int
    loss: tuple[float, float] | None


def sample(engine: Engine, batch: Any) -> Sample | None:
    """Before the model is laid over the ranks. None for a deferred model, which has no values yet, or a simulated world."""
    if engine.mesh.all.simulated or any(p.is_meta for p in engine.model.parameters()):
        return None
    runner = Runner.of(engine, part_of(batch, 1, 0))
    if not runner.rows:
        return Sample(None, 0, None)
    total, count = total_and_count(runner.run())
    return Sample(runner.data, runner.rows, (float(total) if count else 0.0, count))


def mark(engine: Engine, batch: Any) -> float:
    """A number that tells batches apart: some elements of each tensor. Only where several ranks are given the same one."""
    alone = engine.dp.size if isinstance(batch, Part) else 1
    if engine.world == alone or engine.mesh.all.simulated:
        return 0.0
    total = 0.0
    for number, x in enumerate(tree_leaves(batch.data if isinstance(batch, Part) else batch), 1):
        if isinstance(x, int | float) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufc"):
            x = torch.from_numpy(np.array(x, dtype=np.complex128 if np.iscomplexobj(x) else np.float64))
        if isinstance(x, Tensor) and x.numel():
            total += number * float(_weighed(x).sum())
    return total


def apart_along(engine: Engine, numbers: list[float], facts: Tensor, on_tp: float = 0.0) -> float:
    """Sum `facts`, which stages have of their own, over pp. Whether ranks that have the same rows differ in any of the numbers, or those of tp
    in another one, or saw that some do."""
    found = 0.0
    for name, axis in engine.mesh.axes.items():
        if axis.size == 1 or name in (REPLICATE, SHARD, *engine.plan.apart):
            continue
        told = torch.zeros(axis.size, len(numbers) + 2, dtype=torch.float64)
        told[axis.index] = torch.tensor([*numbers, on_tp * (name == TP), found], dtype=torch.float64)
        message = torch.cat([told.flatten(), facts if axis.name == "pp" else facts[:0]])
        all_reduce(message, axis, label="rows, loss and count of the last stage")
        if axis.name == "pp":
            facts.copy_(message[told.numel() :])
        told = message[: told.numel()].view_as(told)
        if not axis.simulated:
            found = float(told[:, -1].any() or (told[:, :-1] != told[0, :-1]).any())
    return found


def apart(engine: Engine, given: Iterable[tuple[str, Tensor]], axis: Axis, least: float = 0.0) -> list[str]:
    """The names of tensors of which ranks along an axis, which had the same, have others now: some elements of each are compared, where they
    are as many (a cache grows with the rows of a rank). `least`: how exact numbers are taken to be, at most. Collective."""
    named = [(name, x) for name, x in given if x.layout == torch.strided and not x.is_meta]
    if not named or axis.size == 1 or engine.mesh.all.simulated:
        return []
    found = torch.zeros(axis.size, 3, len(named), dtype=torch.float64)
    for number, (_, x) in enumerate(named):
        weighed = _weighed(x)
        found[axis.index, :, number] = torch.stack([weighed.sum(), weighed.abs().sum(), torch.tensor(x.numel())])
    all_reduce(found, axis, label="buffers, or weights that are whole")
    marks, sizes, counts = found.unbind(1)
    rounds = [max(least, torch.finfo(x.dtype).eps) if x.is_floating_point() or x.is_complex() else 0.0 for _, x in named]
    bound = 8 * depth(engine.model) * torch.tensor(rounds, dtype=torch.float64) * sizes.amax(0)
    others = ((marks - marks[0]).abs().amax(0) > bound) & (counts == counts[0]).all(0)
    return [name for (name, _), one in zip(named, others.tolist(), strict=True) if one]


def _weighed(x: Tensor) -> Tensor:
    """Some elements, each by its place."""
    flat = torch.view_as_real(x.detach().resolve_conj()).reshape(-1) if x.is_complex() else x.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // ELEMENTS)].double().nan_to_num(1.0, 2.0, -2.0).cpu()
    return some * torch.arange(1, len(some) + 1)


def agree_on_buffers(engine: Engine) -> None:
    """SoliError where there are such after 1, 3, 7, 15, ... steps: what begins later than a forward was looked at is seen while there are
    few. Collective."""
    if engine.step_count & (engine.step_count + 1) == 0 and (found := apart(engine, engine.model.named_buffers(), engine.dp)):
        what = f"ranks that had the same buffers have others after {engine.step_count} steps: a forward changes them by the rows that it sees"
        allowed = "buffers that stay as they are, or change alike whatever the rows; the first step is looked at, and this began later"
        fix = "change them between steps (of the loss's batch, alike on every rank), from the first step on, or run with dp=1"
        raise on_all_ranks(what, got=listed(found), allowed=allowed, fix=fix)


def say_buffers(engine: Engine) -> None:
    """Before they are saved: what of them is one rank's. Collective."""
    if found := apart(engine, engine.model.named_buffers(), engine.dp):
        text = f"buffers that are not the same on all ranks any more are saved as the first has them: {listed(found)}"
        events.note(text, shown=engine.rank == 0)


def check_loss(engine: Engine, sample: Sample) -> None:
    """The laid-out model's loss of the sample must be the plain model's, up to rounding. Collective.

    Blocks are checked one by one in float64 (check.py); this looks at what stands between and around them too.
    """
    data = to_device(sample.data, engine.device) if sample.rows else None
    undone = effects.undone(engine.model, engine.plan)
    with between.modes_kept(engine.model), undone, engine.randomness.probe(max(sample.rows, 1), learn=False), unwritten(data):
        between.training(engine.model)
        sums = torch.tensor(engine.forward_only(data), dtype=torch.float64)
    all_reduce(sums, engine.mesh["pp"], label="loss and count of the last stage")
    raise_together(lambda: _compare(engine, sample, *sums.tolist()), engine.mesh.all, label="whether losses are the same")


def _compare(engine: Engine, sample: Sample, total: float, count: float) -> None:
    if sample.loss is None:
        return
    whole, counted = sample.loss
    bound, finite = rounding(engine, count) * (abs(whole) + engine._first.size * sample.rows), whole - whole == 0
    if count != counted or (finite and not abs(total - whole) <= bound):
        what = f"the model computes another loss under {engine.plan} than on one device; nothing was trained"
        left = "blocks may leave something for each other in an object or an attribute, which other ranks do not see: pass it as an argument"
        fix = f"{left}; or say with roles={{...}} what is whole, or use another plan"
        raise failure(what, got=f"{total:.9g} over {count:g} targets, and {whole:.9g} over {counted:g}", fix=fix)
