"""Forward and backward of one microbatch on one rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from soli.core.errors import SoliError, on_all_ranks
from soli.core.events import events
from soli.engine.batch import Part, at, to_device
from soli.engine.contract import total_and_count
from soli.parallel import recompute
from soli.parallel.pipeline.split_backward import children_first

if TYPE_CHECKING:
    from soli.engine.engine import Engine


def all_of(engine: Engine, pieces: list[Part]) -> tuple[float, float]:
    """Total and count of this rank's microbatches, one after another; the gradients are reduced."""
    reducer, total, count = engine.laid.reducer, 0.0, 0.0
    for number, piece in enumerate(pieces):
        reducer.begin_backward(last=number == len(pieces) - 1)
        more, counted = forward_backward(engine, piece)
        total, count = total + more, count + counted
        reducer.finish_backward()
    return total, count


def forward_backward(engine: Engine, piece: Part) -> tuple[float, float]:
    """Its total and count. An empty one has none, joins the collectives of the others, and calls the model on an earlier row: what counts calls counts them on all ranks."""
    gatherer = engine.laid.gatherer
    with engine.randomness.begin(engine.step_count, piece.start, max(piece.rows, 1)):
        gatherer.begin_forward(training=True)
        total, count = None, 0.0
        if piece.rows or engine._first.row is not None:
            data = to_device(piece.data if piece.rows else at(engine._first.row, [0]), engine.device)
            with nullcontext() if piece.rows else engine.loss_fn.counting(), engine.randomness.forward(), engine.computing():
                total, count = loss(engine, data)
            total, count = (total, count) if piece.rows else (None, 0.0)
        gatherer.end_forward()
        gatherer.begin_backward()
        engine.randomness.backward()
        value = float(total.detach()) if total is not None and count else 0.0
        if total is not None and total.requires_grad and (count or _together(engine)):  # a term may be of none of these rows
            with engine.randomness.forward(), engine.again():
                (total * engine.seed_of_loss).backward()
        elif total is not None:
            engine.laid.reducer.uncounted(total)
        total = None  # and its graph: without targets nothing went back and freed it
        gatherer.end_backward()
    recompute.forget()
    return value, count


def need_own(engine: Engine, made: list[Tensor], count: float, data: Any) -> None:
    """SoliError where `made`, the loss or what goes to a next stage, trains tensors that are not the model's: nobody sums their gradients; a note where nobody has to. Looked at in
    two steps: a leaf that is no parameter may be made in the forward, to take a gradient of, and then it is not there in the second."""
    first, steps = engine._first, dict.fromkeys((*engine._first.looked, engine.step_count))
    if not torch.is_grad_enabled() or len(steps) > 2:
        return
    first.looked = list(steps)
    own = {id(x) for x in (*engine.model.parameters(), *engine.model.buffers(), *tree_leaves(data))}
    leaves = [getattr(node, "variable", None) for node in children_first([x.grad_fn for x in made if x.grad_fn is not None])]
    others = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in own}
    again = len(steps) > 1
    strange = sum(isinstance(leaf, nn.Parameter) or (again and key in first.leaves and first.leaves[key]() is leaf) for key, leaf in others.items())
    if strange and (engine.world > 1 or engine.plan.pieces > 1):
        what = f"the loss trains {strange} tensors that are not the model's parameters: no rank sums their gradients, which are of what it has itself"
        fix = "make the criterion a module of the model, whose forward returns what it makes (its options can be a parameter group's); or requires_grad_(False) where nobody trains them"
        raise on_all_ranks(what, allowed="parameters of the model that soli.parallelize was given", fix=fix)
    if strange and count != 1 and again:
        events.note(f"the loss trains {strange} tensors that are not the model's parameters: their gradients are of its sum, {count:g} times those of its mean", shown=True)
    first.leaves |= {} if again else {key: ref(leaf) for key, leaf in others.items()}


def _together(engine: Engine) -> bool:
    """Whether other ranks wait for this one in the backward."""
    return engine.plan.together or engine.statistics.active


def loss(engine: Engine, data: Any) -> tuple[Tensor, float]:
    """Total and count; dicts and lists of the batch are the call's own, to put into and take out of. Without counted targets there is no gradient: the total may be 0/0, and nobody differentiates it.

    On a grid others wait in the backward for this rank's part of their products, and norms of the batch for its sums: zeros go back instead.
    """
    output = engine._call(data := tree_map(lambda x: x, data))
    total, count = total_and_count(engine.loss_fn(output, data))
    need_own(engine, [total], count, data)
    engine.laid.reducer.differentiated |= total.requires_grad
    if engine.mesh.all.simulated and torch.is_grad_enabled():
        count = count or 1.0  # other rows have targets
    elif not count and not total.is_meta and torch.isfinite(total) and total != 0:
        what = "rows of which no target is counted have a loss, which would be left out"
        allowed = "a total of 0, or one that is not finite, where the count is 0"
        fix = "add only what belongs to counted targets, or count what the loss is of (its tokens)"
        raise SoliError(what, got=f"{float(total.detach()):.6g}", allowed=allowed, fix=fix)
    if (count and total.requires_grad) or not (_together(engine) and torch.is_grad_enabled()):
        return total, count
    kind = type(output).__name__
    read = {*children_first([total.grad_fn])} if total.grad_fn is not None else None  # what the loss leaves out has no gradient
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim() and x.requires_grad]
    outputs = [x for x in outputs if read is None or x.grad_fn in read] or outputs
    engine.laid.reducer.blank = read is None and engine.pipeline is None
    total, output = total.detach() if count else total.new_zeros(()), None  # the graph of the loss goes before there is another
    if not outputs and not any(p.requires_grad for p in engine.model.parameters()):
        return total, count
    if not outputs:
        what = "no target of this rank's rows is counted or in the loss, and the model returns nothing but its loss to go back from"
        fix = "return the logits too, give every row a target, or use tensor=1d and GroupNorm"
        raise SoliError(what, got=kind, fix=fix)
    return sum(((x * 0).sum().nan_to_num() for x in outputs), total), count
