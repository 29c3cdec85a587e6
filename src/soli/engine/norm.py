"""The norm of the whole gradient, and what to say when it is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from soli.core.errors import SoliError
from soli.engine import state as states
from soli.mesh.collectives import all_reduce

if TYPE_CHECKING:
    from soli.engine.engine import Engine
    from soli.parallel.units import Slot, Unit


def gradient_norm(engine: Engine) -> float:
    """The 2-norm of the summed gradient, each parameter counted once. Collective over shard, row, tp and pp."""
    mesh = engine.mesh
    squares = torch.zeros(3, dtype=torch.float64)  # of what is whole, cut over tp, cut over a grid
    for unit in engine.laid.reducer.units:
        for cut, part in unit.norm_parts() if unit.counted else []:
            squares[cut] += torch.linalg.vector_norm(part).double().cpu() ** 2
    if mesh["row"].size == 1:
        all_reduce(squares, mesh["shard"], label="gradient norm")
    else:
        all_reduce(squares[:2], mesh.shard, label="gradient norm")
        all_reduce(squares[2:], mesh["shard"], label="gradient norm")
        all_reduce(squares[2:], mesh["row"], label="gradient norm")
    all_reduce(squares[1:], mesh["tp"], label="gradient norm")
    all_reduce(squares, mesh["pp"], label="gradient norm")
    return float(squares.sum().sqrt())


def refuse(engine: Engine) -> None:
    """Raise: this step's gradient is not finite."""
    bad = [s.name for u in engine.laid.reducer.units for s in u.slots if not _finite(u, s)]
    raise SoliError(
        f"the gradient of step {engine.step_count + 1} is not finite; nothing was updated",
        got=f"in this rank's part of {', '.join(bad[:4]) or 'no parameter'}",
        fix="lower the learning rate, clip, or look for a division by zero in the backward of that module",
        exit_code=1,
        everywhere=True,
    )


def _finite(unit: Unit, slot: Slot) -> bool:
    return all(bool(t.isfinite().all()) for _, t in states.gradient(unit, slot).pieces)
