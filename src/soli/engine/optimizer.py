"""The user's optimizer, over shards: the same object, its parameters exchanged for this rank's pieces.

It is always built on the plain model, so a factory may look at names' shapes to form its groups. Sharding
needs an optimizer whose update is elementwise; that is found out by trying it on a small matrix, whole and
cut in pieces, not by a list of names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.errors import Problem, SoliError, listing
from soli.core.plan import Plan
from soli.parallel.units import Slot

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build(optimizer: Factory | torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer on the plain model's parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise SoliError(
            "optimizer is neither a torch optimizer nor a function that makes one",
            got=type(optimizer).__name__,
            allowed="torch.optim.AdamW(model.parameters()), or lambda p: torch.optim.AdamW(p)",
            everywhere=True,
        )
    made = optimizer(list(model.parameters()))
    if not isinstance(made, torch.optim.Optimizer):
        raise SoliError(
            "the optimizer function made no torch optimizer", got=type(made).__name__, everywhere=True
        )
    return made


@listing
def problems(optimizer: torch.optim.Optimizer, model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """What keeps this optimizer from training this model under a plan."""
    known = {id(p) for p in model.parameters()}
    strange = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strange:
        yield Problem(
            f"{strange} parameters of the optimizer are not the model's",
            fix="build the optimizer on this model, after any change to it, and before soli.parallelize",
        )
    if stepped(optimizer):
        yield Problem(
            "the optimizer has already stepped",
            fix="give soli.parallelize a fresh one; a run is continued with engine.load",
        )
    elif (plan.zero or plan.tp > 1) and any(
        t.is_meta for state in optimizer.state.values() for t in _tensors(state)
    ):
        yield Problem(
            f"{type(optimizer).__name__} makes its states when it is built, and the parameters are deferred",
            fix="build the model without soli.deferred(), or use zero=0 and tp=1",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        yield Problem("LBFGS evaluates the loss several times a step, and engine.step does so once")
    elif (plan.zero > 0 or plan.tp > 1) and not elementwise(optimizer):
        yield Problem(
            f"{type(optimizer).__name__} does not update element by element, so its states cannot be cut",
            got=f"zero={plan.zero}, tp={plan.tp}",
            allowed="zero=0 and tp=1, or an optimizer such as AdamW or SGD",
        )


def stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has taken a step. Some (Adagrad) have states from the start, with a step number of 0."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether two steps on a 4 x 6 matrix equal two steps on two parts of its 24 elements.

    In float64, up to the rounding of a vector kernel's tail: some dozens of operations an element.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    grads = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    for key in ("fused", "foreach", "capturable"):
        if key in options:
            options[key] = None if key != "capturable" else False
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {k: v for k, v in options.items() if k in optimizer.defaults and k in accepted}
    try:
        whole = _stepped(type(optimizer), options, [start.clone()], [[g] for g in grads])
        cut = [start.flatten()[:11].clone(), start.flatten()[11:].clone()]
        halves = _stepped(
            type(optimizer), options, cut, [[g.flatten()[:11], g.flatten()[11:]] for g in grads]
        )
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False  # it wants matrices (Muon), or is no optimizer of plain parameters
    rounding = 64 * torch.finfo(torch.float64).eps * float(start.abs().max())
    return bool((whole[0].flatten() - torch.cat(halves)).abs().max() <= rounding)


def _stepped(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    values: list[Tensor],
    grads: list[list[Tensor]],
) -> list[Tensor]:
    params = [nn.Parameter(value) for value in values]
    made = kind(params, **copy.deepcopy(options))
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        made.step()
    return [param.detach() for param in params]


def exchange(optimizer: torch.optim.Optimizer, slots: dict[int, Slot], absent: Container[int] = ()) -> None:
    """Put this rank's pieces in place of the plain parameters, group by group, in place, and cut their states.

    `absent`: ids of the parameters that are not on this rank.
    """
    for param in list(optimizer.state):
        if id(param) in absent:
            del optimizer.state[param]
        slot = slots.get(id(param))
        if slot is not None and (slot.piece is not param or slot.portion is not None):
            state = optimizer.state.pop(param)
            if slot.piece is not None:
                optimizer.state[slot.piece] = {k: _cut(v, slot) for k, v in state.items()}
    for group in optimizer.param_groups:
        group["params"] = [
            piece
            for param in group["params"]
            if id(param) not in absent
            and (piece := slots[id(param)].piece if id(param) in slots else param) is not None
        ]
        if "param_names" in group:
            group.pop("param_names")  # they no longer match; engine.save writes names of its own


def _cut(value: Any, slot: Slot) -> Any:
    """This rank's part of a state that is shaped as its parameter; anything else as it is."""
    if (
        slot.piece is None
        or not isinstance(value, Tensor)
        or tuple(value.shape) != slot.whole_shape
        or not slot.shape
    ):
        return value
    if slot.portion is not None:
        value = slot.portion.taken(value)
    start = slot.first
    return value.flatten()[start : start + slot.piece.numel()].reshape(slot.piece.shape).clone()
