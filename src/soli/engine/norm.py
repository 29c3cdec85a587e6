"""The norm of the whole gradient, and what to say when it is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from soli.core.axes import DEPTH, ROW, TP
from soli.core.errors import failure, listed
from soli.core.report import named
from soli.engine import withheld
from soli.mesh.collectives import Axis, all_reduce, gather_json

if TYPE_CHECKING:
    from soli.engine.engine import Engine


def gradient_norm(engine: Engine) -> float:
    """The 2-norm of the summed gradient, each parameter counted once. Collective over all that it is cut over."""
    mesh, kinds = engine.mesh, engine.plan.cuts
    squares = torch.zeros(len(kinds), dtype=torch.float64)
    for unit in engine.laid.reducer.units:
        for cut, part in unit.norm_parts():
            squares[kinds.index(cut)] += torch.linalg.vector_norm(part).double().cpu() ** 2

    def add_up(axis: Axis, among: list[int]) -> None:
        part = squares[among]
        all_reduce(part, axis, label="gradient norm")
        squares[among] = part

    shards = [mesh.sharing(cut)[1] for cut in kinds]
    for axis in dict.fromkeys(shards):
        add_up(axis, [i for i, other in enumerate(shards) if other == axis])
    for name in (DEPTH, ROW, TP):
        if mesh[name].size > 1:
            add_up(mesh[name], [i for i, cut in enumerate(kinds) if name in cut])
    all_reduce(squares, mesh["pp"], label="gradient norm")
    return float(squares.sum().sqrt())


def forget(engine: Engine) -> None:
    """Drop the gradients that wait for update(), and what is known of them."""
    engine._count, engine._norm, engine._factor, engine._seed_scale = 0.0, None, 1.0, 1.0
    engine.laid.reducer.drop()
    withheld.fill(engine.model, False, left_out=True)


def refuse(engine: Engine) -> None:
    """Raise: this step's gradient is not finite, and of which parameters on which ranks. Collective."""
    mine = lambda unit, slot: unit.owned_tensor(slot, unit.grad_shard, unit.low).pieces
    finite = lambda unit, slot: all(bool(t.isfinite().all()) for _, t in mine(unit, slot))
    bad = [s.name for u in engine.laid.reducer.units for s in u.slots if not finite(u, s)]
    forget(engine)
    told = gather_json(bad, engine.mesh.all, label="gradients that are not finite")
    ranks = named([rank for rank, names in enumerate(told) if names])
    what = f"the gradient of step {engine.step_count + 1} is not finite; nothing was updated"
    got = f"on {ranks}, of {listed(list(dict.fromkeys(name for names in told for name in names)))}"
    raise failure(what, got=got, fix="lower the learning rate, clip, or look for a division by zero in the backward of that module", everywhere=True)


def refuse_loss(engine: Engine, bad: list[str], totals: Tensor) -> None:
    """Raise: this step's loss is not finite on some ranks."""
    engine.laid.reducer.drop()
    what = f"the loss of step {engine.step_count + 1} is not finite on {', '.join(bad)}; nothing was updated"
    fix = "look for NaN or infinity in that rank's rows of the batch, or for a learning rate that is too high"
    if engine.plan.zero == 3:
        fix += "; under zero=3 a parameter used outside its block's forward reads as NaN"
    raise failure(what, got=f"totals by data-parallel rank: {[float(t) for t in totals]}", fix=fix, everywhere=True)
