"""Whether rows are coupled by less than float32's rounding may be: losses in float64, on a copy of the plain model.

A balancing loss over the tokens of a batch (Switch's, arXiv 2101.03961, 2.2, of weight 0.01) moves a loss by 1e-5 where its rows are taken
apart, which the check of the first step (check.py) cannot tell from rounding. Here the rows in another order say how much rounding there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from soli.core.errors import SoliError
from soli.core.events import events
from soli.engine import between, effects
from soli.engine import state as states
from soli.engine.batch import Caller, Part, few, take, to_device
from soli.engine.contract import depth, total_and_count
from soli.engine.layout import Runner
from soli.mesh.collectives import raise_together
from soli.parallel.lift import lifted
from soli.parallel.statistics import Statistics

if TYPE_CHECKING:
    from soli.engine.engine import Engine

LARGEST = 2**28
"""Parameters of a model that is copied (2 GB)."""
ROWS = 8


def measured(engine: Engine, part: Part) -> list[float]:
    """Losses of some rows, of their two parts, and of the same rows the other way round, and the same four at weights nearby; none where they
    cannot be had: the plan takes no rows apart, the model is large, or does not run in float64. Collective where a rank has a part of the
    weights."""
    if engine.plan.pieces == 1 or engine.mesh.all.simulated or engine.numel > LARGEST:
        return []
    rows = min(few(part, engine.plan), ROWS)
    try:
        with between.modes_kept(engine.model), effects.undone(engine.model, engine.plan):
            cut = engine.parallel is not None and (engine.plan.model_ranks > 1 or engine.plan.zero > 0)
            model = (states.copy_model(engine) if cut else states.plain_copy(engine.model)).double()
            if rows < 2:
                return []
            *found, again = _totals(engine, model, take(part.data, 0, rows), rows)
            # some sums agree at the weights that a run begins with alone: normalised advantages, where the ratio of policies is 1
            _moved(model)
            found += _totals(engine, model, take(part.data, 0, rows), rows)[:-1]
        same = again == found[0] or found[0] != found[0]
        why = "" if same else "a copy computes another loss when it is called again"
    except Exception as error:  # somebody's model, which may not bear to be copied, or float64, or hooks that see the one that was copied
        found, why = [], f"{type(error).__name__}: {error}".split("\n")[0]
    if why:
        events.note(f"whether rows are coupled was not looked at in float64: {why}", shown=engine.rank == 0)
    return [] if why else found


def check(engine: Engine, found: list[float]) -> None:
    """SoliError where the loss of some rows is not that of their two parts. Collective."""
    raise_together(lambda: _explain(engine, found), engine.mesh.all, label="whether rows are coupled")


def _totals(engine: Engine, model: nn.Module, data: Any, rows: int) -> list[float]:
    """What `measured` gives, and the first of them once more."""
    wide = lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
    data = to_device(tree_map(wide, data), next(model.parameters()).device)
    turned = tree_map(lambda x: x.flip(0) if isinstance(x, Tensor) and x.dim() else x, data)
    cut = rows // 2
    norms = Statistics(model, engine.plan, None)
    halves = (take(data, 0, cut), cut, True), (take(data, cut, rows), rows - cut, True)
    wholes = (data, rows, False), (turned, rows, False), (data, rows, False)
    return [_total(engine, model, norms, *piece) for piece in (wholes[0], *halves, *wholes[1:])]


@torch.no_grad()
def _moved(model: nn.Module) -> None:
    """Each weight by a hundredth of what its tensor's weights are, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        if param.is_floating_point() and param.numel():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.device)
            param.add_(noise.to(param.dtype), alpha=0.01 * float(param.square().mean().sqrt()))


def _total(engine: Engine, model: nn.Module, norms: Statistics, data: Any, rows: int, part: bool) -> float:
    runner = Runner(model, Caller(model), engine.loss_fn, data, rows, engine.plan)
    with norms.check(part), norms.computing():
        total, count = total_and_count(runner.run(around=lambda _: lifted()))
    return float(total) if count else 0.0


def _explain(engine: Engine, found: list[float]) -> None:
    for four in (found[:4], found[4:]):
        if four and all(x - x == 0 for x in four):  # else not finite: the step itself reports it
            _add_up(engine, *four)


def _add_up(engine: Engine, whole: float, first: float, second: float, turned: float) -> None:
    rounding = 8 * torch.finfo(torch.float64).eps * depth(engine.model) * (abs(first) + abs(second))
    if abs(whole - first - second) <= rounding + 8 * abs(whole - turned):
        return
    raise SoliError(
        "the loss of a batch is not the sum of its rows' losses: something couples the rows",
        got=f"{whole:.12g} for some rows; {first:.12g} + {second:.12g} for their two parts, in float64",
        allowed="total(batch) = total(rows 1..k) + total(rows k+1..n)",
        fix="a balancing loss over the tokens of a batch is one of this kind: take it over each row's tokens; or run with dp=1, tensor=1d "
        "and no accumulate or microbatches",
    )
