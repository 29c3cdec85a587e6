"""Whether rows are coupled by less than float32's rounding may be: losses in float64, on a copy of the plain model.

A balancing loss over the tokens of a batch (Switch's, arXiv 2101.03961, 2.2, of weight 0.01) moves a loss by 1e-5 where its rows are taken
apart, which the check of the first step (check.py) cannot tell from rounding. Here the rows in another order say how much rounding there is.
Some losses add up where their gradients do not (x / x.detach(), whose value is 1): so the gradient along one direction is looked at too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from soli.core.errors import SoliError, listed
from soli.core.events import events
from soli.core.progress import busy
from soli.engine import between, effects
from soli.engine import state as states
from soli.engine.batch import Caller, Part, at, few, take, to_device
from soli.engine.contract import depth, total_and_count
from soli.engine.layout import Runner
from soli.mesh.collectives import extreme, raise_together
from soli.parallel import kept
from soli.parallel.lift import lifted, wide
from soli.parallel.statistics import Statistics

if TYPE_CHECKING:
    from soli.engine.engine import Engine

LOOK = "the first step is looked at in float64"
LARGEST, SMALL = 2**27, 2**24
"""Parameters of a model that is copied (1 GB, and its gradients); and where there may be no room for a graph, or one part alone is looked at."""
ROWS, PAIR = 8, 2
"""Of losses at most, and of gradients, which keep a forward's whole graph in float64; where batch statistics train as many as of losses: those of
two rows are 1 and -1, and make rounding large."""
MUCH = 2**32
"""Parameters times elements of the batch, of those rows: where there would be more, there are fewer rows, and two at least (8.6 GFLOP of a transformer's
forward; with eight rows of 256 tokens, 29 million parameters had a first step that took as long as 16 others)."""
DRAWN = 65537
"""A prime: no width of a matrix divides it, so that rows differ."""
WAYS = (0.0, 0.01, -0.02)
"""Weights that losses are looked at with, by how much they are moved. Some sums agree at those that a run begins with alone (normalised
advantages, where the ratio of policies is 1), or on one side of them (KTO's divergence from the reference, a mean that is clamped at 0)."""
LARGER = 8.0
"""A loss that gradients are taken of once more: a power of two, which rounds nothing."""
HALF = 1e-4
"""How much of its gradients a model may lose that computes with halves of its own: the smallest ones."""


@dataclass(frozen=True)
class Sum:
    """A loss; where gradients were asked for, of it: the sum of |gradient x weight| (what rounding a loss bears, even one near 0), the
    gradient along a direction, and the sum of the sizes that this is of. `moved`: the buffers that such a pass changes."""

    total: float = 0.0
    size: float = 0.0
    along: float = 0.0
    along_size: float = 0.0
    moved: frozenset[str] = frozenset()


def size_of(found: list[Sum]) -> float:
    """What a row's loss is of, where its terms cancel."""
    return max((x.size for x in found if x.size - x.size == 0), default=0.0)


def measured(engine: Engine, part: Part) -> list[Sum]:
    """Losses of some rows, of their two parts, and of the same rows the other way round, at weights nearby on either side too, and of two rows with
    gradients, and of a larger loss of theirs (these and the whole's alone where the plan takes no rows apart); none where they cannot be had: the model
    is large, or does not run in float64. Collective where a rank has a part of the weights."""
    alone, found = engine.plan.pieces == 1, list[Sum]()
    largest = SMALL if alone or engine.plan.recompute != "none" else LARGEST
    if engine.mesh.all.simulated:
        return []
    if engine.numel > largest:
        text = f"whether rows are coupled, or the size of gradients matters, is not looked at above {largest:,} parameters under this plan"
        events.note(text, shown=engine.rank == 0 and not alone)
        return []
    rows = _rows(engine, part)
    pair = rows if engine.statistics.active else min(few(part, engine.plan), PAIR)
    # as many passes on each rank: a model may send by itself
    more = extreme(rows > pair, engine.mesh.all, "max", label="whether more than two rows are looked at")
    try:
        with between.modes_kept(engine.model), kept.unchanged(engine.model), busy(LOOK, shown=engine.rank == 0):
            cut = engine.parallel is not None and (engine.plan.model_ranks > 1 or engine.plan.zero > 0)
            model = (states.copy_model(engine) if cut else states.plain_copy(engine.model))._apply(wide)
            if pair < 1 + (not alone):
                return []
            alike = effects.Unwritten(model, engine.model), effects.Unwritten(model, engine.model)
            for way in () if alone else WAYS:
                if way:
                    _moved(model, way)
                if more or way != WAYS[-1]:  # of the last ones there are gradients too
                    found += _totals(engine, model, take(part.data, 0, rows), rows, alike)
            found += _totals(engine, model, take(part.data, 0, pair), pair, alike, gradients=True)
        same = found[-1].total == found[-5].total or found[-5].total != found[-5].total
        why = "" if same else "a copy computes another loss when it is called again"
    except Exception as error:  # somebody's model, which may not bear to be copied, or float64, or hooks that see the one that was copied
        if isinstance(error, SoliError) and error.everywhere:
            raise
        found, why = [], f"{type(error).__name__}: {error}".split("\n")[0]
    if why:
        text = f"whether rows are coupled (a balancing loss over a batch's tokens), or the size of gradients matters, was not looked at in float64, so a loss may be another one by as little as float32 rounds: {why}"
        events.note(text, shown=engine.rank == 0 and not alone)
    return [] if why else [replace(x, size=x.size / pair) for x in found]


def check(engine: Engine, found: list[Sum]) -> None:
    """SoliError where the loss of some rows is not that of their two parts. Collective."""
    raise_together(lambda: _explain(engine, found), engine.mesh.all, label="whether rows are coupled")


def _rows(engine: Engine, part: Part) -> int:
    """That losses are looked at of."""
    of_row = max((x.numel() for x in tree_leaves(part.data) if isinstance(x, Tensor)), default=0) / max(part.rows, 1)
    return min(few(part, engine.plan), max(PAIR, min(ROWS, int(MUCH / (engine.numel * of_row + 1)))))


def _totals(engine: Engine, model: nn.Module, data: Any, rows: int, alike: tuple[effects.Unwritten, effects.Unwritten], gradients: bool = False) -> list[Sum]:
    """Of all rows, of their two parts, the other way round, and with gradients of a larger loss. `alike`: passes without gradients, and with."""
    data = to_device(tree_map(wide, data), next(model.parameters()).device)
    turned, cut = at(data, list(range(rows))[::-1]), rows // 2
    norms = Statistics(model, engine.plan, None)
    halves = (take(data, 0, cut), cut, True), (take(data, cut, rows), rows - cut, True)
    wholes = (data, rows, False), (turned, rows, False), (data, rows, False)
    pieces = (wholes[0], *halves, *wholes[1:])
    scales = [1.0, 1.0, 1.0, 0.0, LARGER] if gradients else [0.0] * 5
    for kind in alike:  # with the same weights in both
        kind.noting = gradients
    alone = (1, 2) if engine.plan.runs > 1 else (1, 2, 3)
    left_out = alone if engine.plan.pieces == 1 else () if gradients else (4,)

    def total(piece: tuple[Any, int, bool], scale: float) -> Sum:
        """`scale`: of the loss that gradients are taken of, and given for 1 of; 0: there are none."""
        data, rows, part = piece
        runner = Runner(model, Caller(model), _left_by(model, engine.model)(engine.loss_fn), data, rows, engine.plan)
        with norms.check(part), norms.computing():
            pulled = lambda found: _pulled(model, *total_and_count(found), scale)
            sums = runner.run(around=lambda _: lifted(), gradients=scale > 0, then=pulled, alike=alike[scale > 0])
            return replace(sums, moved=alike[scale > 0].moved)

    each = enumerate(zip(pieces, scales, strict=True))
    return [Sum() if i in left_out else total(piece, scale) for i, (piece, scale) in each]


@torch.no_grad()
def _moved(model: nn.Module, way: float) -> None:
    """Each weight by so much of what its tensor's weights are, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        if param.is_floating_point() and param.numel():
            param.add_(_noise(param, generator).to(param.dtype), alpha=way * float(param.square().mean().sqrt()))


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """As many normal numbers; of a large tensor the same ones again and again, since drawing takes as long as a forward of few rows."""
    drawn = torch.randn(min(like.numel(), DRAWN), generator=generator, dtype=torch.float64).to(like.device)
    return drawn.repeat(-(-like.numel() // DRAWN))[: like.numel()].view(like.shape)


@contextmanager
def _left_by(copied: nn.Module, model: nn.Module) -> Iterator[None]:
    """A loss function that reads attributes of the model's modules (each block's auxiliary loss) finds what the copy's forward left in them."""
    left = dict(copied.named_modules())
    with ExitStack() as put:
        for name, module in model.named_modules():
            own = {key: value for key, value in vars(left.get(name, module)).items() if key not in kept.OF_TORCH}
            put.enter_context(patch.dict(vars(module), own))
        yield


def _pulled(model: nn.Module, total: Tensor, count: float, scale: float) -> Sum:
    """A loss and its gradient along one direction, the same at every call."""
    if not (count and scale and total.requires_grad):
        return Sum(float(total.detach())) if count else Sum()
    params, generator = [p for p in model.parameters() if p.requires_grad], torch.Generator().manual_seed(1)
    for param in params:
        param.grad = None
    (total * scale).backward(inputs=params)  # lifted too, where blocks are made again (lift.py)
    size = along = along_size = 0.0
    with torch._C.DisableTorchFunction():  # it is not of the program
        for param in params:
            way, gradient = _noise(param, generator), param.grad
            if gradient is not None:
                size += float((gradient * param.detach()).abs().sum())
                along += float((gradient.real * way).sum())
                along_size += float((gradient.real * way).abs().sum())
    return Sum(float(total.detach()), size / scale, along / scale, along_size / scale)


def _explain(engine: Engine, found: list[Sum]) -> None:
    size = size_of(found)
    for i in range(0, len(found), 5):
        whole, *parts, again = found[i : i + 5]
        if moved := sorted(whole.moved - parts[-1].moved) if max(engine.plan.pieces, engine.plan.runs) > 1 else []:
            what = "the forward changes what the model keeps where gradients are taken, and not without them"
            fix = "change it in every training forward (module.training), or between steps; or run with dp=1 and no accumulate, microbatches or recompute"
            raise SoliError(what, got=listed(moved), allowed="buffers that change in every training forward, or in none", fix=fix)
        if whole.total - whole.total != 0:
            continue  # not finite: the step itself reports it
        if engine.plan.pieces > 1:
            _add_up(engine, size, whole, *parts)
        _in_proportion(whole, again)


def _in_proportion(whole: Sum, again: Sum) -> None:
    """A step goes back from the sum of losses, and a program of its own from their mean."""
    if abs(again.along - whole.along) > HALF * whole.along_size and again.along_size:
        what = "gradients do not grow with the loss: the program treats them by their size, and those of a step are of its losses' sum"
        got = f"{whole.along:.9g} along a direction, and {again.along:.9g} of a loss that is {LARGER:g} times as large, divided by that"
        allowed = "hooks, and backwards of autograd functions, that are linear: a factor, another sign, a mask"
        other = "leave out what clips, rounds or normalises them on their way (a hook on an activation or a module, a backward of the program's own)"
        raise SoliError(what, got=got, allowed=allowed, fix=f"clip with soli.parallelize(..., clip=...), which sees gradients of the mean, and {other}")


def _add_up(engine: Engine, size: float, whole: Sum, first: Sum, second: Sum, turned: Sum) -> None:
    what, got = ("loss of a batch", "losses"), (whole.total, first.total, second.total)
    rounding = 8 * torch.finfo(torch.float64).eps * depth(engine.model) * (abs(first.total) + abs(second.total) + size * ROWS)
    # a part that is none where the whole is finite (a deviation of one row) does not add up either
    if abs(got[0] - got[1] - got[2]) <= rounding + 8 * abs(whole.total - turned.total):
        what, got = ("gradient of a batch's loss", "gradients"), (whole.along, first.along, second.along)
        # some compute in float32 whatever they are given, and what their gradients round nothing else tells
        rounding = 8 * torch.finfo(torch.float32).eps * (first.along_size + second.along_size)
        if whole.along - whole.along != 0 or abs(got[0] - got[1] - got[2]) <= rounding:
            return
    words = f"the {what[0]} is not the sum of its rows' {what[1]}: something couples the rows"
    found = f"{got[0]:.12g} for some rows; {got[1]:.12g} + {got[2]:.12g} for their two parts, in float64"
    balancing = "a balancing loss over the tokens of a batch is one of this kind (transformers': config.output_router_logits): take it over each row's tokens, or leave it out; so is a mean over another number than the count that the loss returns"
    fix = f"{balancing}; or run with dp=1, tensor=1d and no accumulate or microbatches"
    raise SoliError(words, got=found, allowed="total(batch) = total(rows 1..k) + total(rows k+1..n)", fix=fix)
