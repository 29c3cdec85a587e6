"""The model that lies on the ranks against the plain one, on a few rows, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from soli.core.errors import failure
from soli.engine.batch import part_of, to_device
from soli.engine.contract import rounding, total_and_count
from soli.engine.layout import Runner
from soli.mesh.collectives import all_reduce

if TYPE_CHECKING:
    from soli.engine.engine import Engine


@dataclass
class Sample:
    """A few rows, and their loss under the plain model. `loss` is None where there are no rows."""

    data: Any
    rows: int
    loss: tuple[float, float] | None


def sample(engine: Engine, batch: Any) -> Sample | None:
    """Before the model is laid over the ranks. None for a deferred model, which has no values yet."""
    if any(p.is_meta for p in engine.model.parameters()):
        return None
    runner = Runner.of(engine, part_of(batch, 1, 0))
    if not runner.rows:
        return Sample(None, 0, None)
    total, count = total_and_count(runner.run())
    return Sample(runner.data, runner.rows, (float(total) if count else 0.0, count))


def check_loss(engine: Engine, sample: Sample) -> None:
    """The laid-out model's loss of the sample must be the plain model's, up to rounding. Collective.

    Blocks are checked one by one in float64 (check.py); this looks at what stands between and around them too.
    """
    data = to_device(sample.data, engine.device) if sample.rows else None
    before = [(b, b.clone()) for b in engine.model.buffers()]
    was_training = engine.model.training
    engine.model.train()
    with engine.randomness.probe(max(sample.rows, 1), learn=False):
        sums = torch.tensor(engine.forward_only(data), dtype=torch.float64)
    engine.model.train(was_training)
    for buffer, value in before:
        buffer.copy_(value)
    all_reduce(sums, engine.mesh["pp"], label="loss and count of the last stage")
    if sample.loss is None:
        return
    (total, count), (whole, counted) = sums.tolist(), sample.loss
    finite = whole - whole == 0
    if count != counted or (finite and not abs(total - whole) <= rounding(engine, count) * abs(whole)):
        raise failure(
            f"the model computes another loss under {engine.plan} than on one device; nothing was trained",
            got=f"{total:.9g} over {count:g} targets, and {whole:.9g} over {counted:g}",
            fix="blocks may leave something for each other in an object or an attribute, which other ranks do not "
            "see: pass it as an argument; or say with roles={...} what is whole, or use another plan",
        )
