"""What ranks must have alike in a step: numbers that tell it apart travel with its loss, and words are asked for after a difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from soli.core.errors import failure, listed, on_all_ranks
from soli.engine import norm, pipelined, same
from soli.engine.batch import Part
from soli.mesh.collectives import Axis, all_reduce, gather_json
from soli.parallel.generators import hashed

if TYPE_CHECKING:
    from soli.engine.engine import Engine

Facts = dict[str, Any]
"""What a rank has, by what it is called."""


class Agreement:
    """What this rank takes its steps with."""

    def __init__(self) -> None:
        self.rows, self.common = 0.0, 0.0  # marks of a step's batch: see `marks`
        self.place: Facts = {}  # of that batch in its stream
        self.limit: float | None = None  # of the newest clip()
        self.states: int | None = None  # of the optimizer, when it had stepped
        self._options: Facts = {}
        self._number = 0.0

    def begin(self, engine: Engine, batch: Any) -> None:
        """A step has this batch."""
        self.rows, self.common = marks(engine, batch).tolist()

    def seal(self, engine: Engine) -> float:
        """A number of all that is the same on every rank but the rows."""
        if engine.world == 1 or engine.mesh.all.simulated:
            return 0.0
        found = options(engine)
        if found != self._options:
            self._options, self._number = found, _number(found)
        return _number(self._number, engine.step_count)

    def sums(self, engine: Engine, total: float, count: float) -> tuple[Tensor, float]:
        """One small reduction: every rank's total and count in slots of their own, what must be alike, and which parameters were used."""
        size, reducer = engine.dp.size, engine.laid.reducer
        flags, seal = reducer.used_flags(), self.seal(engine)
        facts = torch.tensor([0.0] * 5 * size + flags, dtype=torch.float64)
        mine = facts[: 5 * size].view(5, size)
        mine[:2, engine.dp.index] = torch.tensor([total, count], dtype=torch.float64)
        apart = same.apart_along(engine, [self.rows, seal], facts[: 2 * size])
        mine[2:, engine.dp.index] = torch.tensor([self.common, seal, apart], dtype=torch.float64)
        all_reduce(facts, engine.dp, label="loss, count and used parameters")
        if not engine.mesh.all.simulated and (mine[4].any() or (mine[2:4] != mine[2:4, :1]).any()):
            self._explain(engine)
        reducer.set_used([bool(flag) for flag in facts[5 * size :].tolist()])
        if engine.pipeline is not None:
            pipelined.agree_on_use(engine)
        totals, counts = mine[:2]
        shift = 0 if engine.pipeline is None else engine.pipeline.last_rank - engine.rank  # losses are its
        bad = [f"rank {r + shift}" for r, t in zip(engine.dp.ranks, totals.tolist(), strict=True) if t - t != 0]
        if bad:
            norm.refuse_loss(engine, bad, totals)
        counted = float(counts.sum()) or float(engine.mesh.all.simulated)
        if not counted:
            raise on_all_ranks("no target of the global batch was counted", got="count = 0 on every rank")
        return totals, counted

    def _explain(self, engine: Engine) -> None:
        """SoliError that says which rank differs, and in what. Collective."""
        need_same_place(engine)
        at = f"at step {engine.step_count + 1}, and nothing was updated"
        need_alike(
            options(engine) | {"steps before": engine.step_count},
            engine.mesh.all,
            f"would take another step than the others {at}",
            "give every rank the same optimizer, options, scheduler, clip and seed, and change them alike on all of them",
        )
        same.need_same_rows(engine, self.rows, self.common, at)


def marks(engine: Engine, batch: Any) -> Tensor:
    """Numbers that tell a batch apart: of this rank's rows, and of what all ranks of dp have alike of it."""
    mark = common = same.mark(engine, batch)
    engine._agreed.place = (batch.place or {}) if isinstance(batch, Part) else {}
    if isinstance(batch, Part):
        common = _number(engine._agreed.place) if batch.place else 0.0
    return torch.tensor([mark, common], dtype=torch.float64)


def _number(*facts: Any) -> float:
    return float(hashed(*facts) >> 11)  # which a float64 has exactly


def evaluated(engine: Engine, found: Tensor, seen: Tensor) -> Tensor:
    """An evaluation's total and count, summed over all ranks, which have seen the same batches. Collective."""
    rows, common = seen.tolist()
    told = found.new_zeros(2, engine.dp.size)
    apart = same.apart_along(engine, [rows], found)
    told[:, engine.dp.index] = torch.tensor([common, apart], dtype=torch.float64)
    sums = torch.cat([found, told.flatten()])
    all_reduce(sums, engine.dp, label="evaluation loss and count")
    told = sums[2:].view_as(told)
    if not engine.mesh.all.simulated and (told[1].any() or (told[0] != told[0, 0]).any()):
        need_same_place(engine)
        same.need_same_rows(engine, rows, common, f"in an evaluation after {engine.step_count} steps")
    return sums[:2]


def options(engine: Engine) -> Facts:
    """What the optimizer's step goes by, besides gradients and parameters."""
    made, agreed = engine.optimizer, engine._agreed
    found: Facts = {
        "optimizer": type(made).__name__,
        "scheduler": type(engine.scheduler).__name__,
        "clip": engine.max_norm,
        "the limit of the newest clip()": agreed.limit,
        "seed": engine.seed,
        "states as the newest step left them": agreed.states in (None, len(made.state)),
    }
    for number, group in enumerate(made.param_groups):
        found |= {f"{key} of group {number}": _plain(value) for key, value in group.items() if key != "params"}
    return found


def _plain(value: Any) -> Any:
    """A value that is written alike on every rank that has it."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def need_same_place(engine: Engine) -> None:
    """SoliError where ranks take their rows from other batches, or other streams. Collective."""
    need_alike(
        engine._agreed.place,
        engine.mesh.all,
        f"would read other batches than the others after {engine.step_count} steps, and nothing was updated",
        "ask engine.batches for the same on every rank, of the same dataset, and take or skip the same batches on all of them",
    )


def need_alike(facts: Facts, axis: Axis, what: str, fix: str) -> None:
    """SoliError where not all ranks have the same; it names those that differ from most, or from rank 0 where as many do. Collective."""
    told = gather_json({name: repr(value) for name, value in facts.items()}, axis, label="what ranks have alike")
    odd, words = set[int](), []
    for name in dict.fromkeys(name for one in told for name in one):
        values = [one.get(name, "not there") for one in told]
        usual = max(values, key=values.count)
        others = [rank for rank, value in enumerate(values) if value != usual]
        words += [f"{name}: {values[rank]}, and {usual} on the others" for rank in others[:1]]
        odd |= set(others)
    if odd:
        named = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, sorted(odd)))}"
        raise failure(f"{named} {what}", got=listed(words), fix=fix, everywhere=True)
