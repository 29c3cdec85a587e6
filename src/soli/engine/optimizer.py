"""The user's optimizer, over shards: the same object, its parameters exchanged for this rank's pieces.

It is always built on the plain model, so a factory may look at names' shapes to form its groups. Sharding
needs an optimizer whose update is elementwise, a pipeline one that updates each parameter by itself; that is found out by
trying copies of it on small tensors, whole and in pieces that optimizers of their own have, as ranks do, not by a list of names.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from soli.core import copies
from soli.core.errors import Problem, SoliError, listing, on_all_ranks
from soli.core.plan import Plan
from soli.parallel.units import Slot

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build(optimizer: Factory | torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer on the plain model's parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        what = "optimizer is neither a torch optimizer nor a function that makes one"
        allowed = "torch.optim.AdamW(model.parameters()), or lambda p: torch.optim.AdamW(p)"
        raise on_all_ranks(what, got=type(optimizer).__name__, allowed=allowed)
    made = optimizer(list(model.parameters()))
    if not isinstance(made, torch.optim.Optimizer):
        raise on_all_ranks("the optimizer function made no torch optimizer", got=type(made).__name__)
    return made


def scheduled(scheduler: Callable[[Any], Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """What a function of the optimizer makes, if there is one; it is stepped once a step, with nothing."""
    if scheduler is not None and not callable(scheduler):
        what = "scheduler is no function that makes one of an optimizer"
        allowed = "scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)"
        raise on_all_ranks(what, got=type(scheduler).__name__, allowed=allowed)
    made = scheduler(optimizer) if scheduler is not None else None
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        fix = "make it yourself, of engine.optimizer, and step it with what engine.evaluate gives"
        raise on_all_ranks("ReduceLROnPlateau goes by a metric, and soli steps its scheduler without one", fix=fix)
    return made


@listing
def problems(optimizer: torch.optim.Optimizer, model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """What keeps this optimizer from training this model under a plan."""
    known = {id(p) for p in model.parameters()}
    strange = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strange:
        fix = "build the optimizer on this model, after any change to it, and before soli.parallelize"
        yield Problem(f"{strange} parameters of the optimizer are not the model's", fix=fix)
    if any(t.is_meta for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)):
        yield Problem(
            f"{type(optimizer).__name__} makes its states when it is built, and the parameters are deferred",
            fix="build the model without soli.deferred()",
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        yield Problem(
            f"{type(optimizer).__name__} evaluates the loss several times a step, by a closure, and engine.step does so once",
            allowed="an optimizer whose step() needs no closure, such as AdamW or SGD",
        )
    elif (plan.zero > 0 or plan.tp > 1) and (why := coupling(optimizer, by_elements)):
        told = "cannot be tried, so whether its states can be cut is not known" if RAISED in why else "does not update element by element, so its states cannot be cut"
        what = f"{type(optimizer).__name__} {told}"
        allowed = "zero=0 and tp=1, or an optimizer such as AdamW or SGD"
        yield Problem(what, got=f"zero={plan.zero}, tp={plan.tp}: {why}", allowed=allowed)
    elif (plan.zero > 0 or plan.pp > 1) and (why := coupling(optimizer, by_parameters)):
        what = f"{type(optimizer).__name__} updates a parameter by others, by its place among them or by random numbers, and a rank has only some"
        allowed = "zero=0 and pp=1, or an optimizer such as AdamW or SGD; to clip the gradients' norm: soli.parallelize(clip=)"
        yield Problem(what, got=f"zero={plan.zero}, pp={plan.pp}: {why}", allowed=allowed)
    if plan.zero in (1, 2) and callable(getattr(optimizer, "eval", None)):  # schedule-free ones
        what = f"{type(optimizer).__name__}.eval() writes parameters between steps, and a rank would keep the others' parts as they were"
        yield Problem(what, got=f"zero={plan.zero}", allowed="zero=0 or 3")
    yield from hooked(optimizer, plan)


def wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """It, and those that it steps: what a wrapper (Lookahead) has as attributes."""
    found = [optimizer]
    for one in found:
        held = tree_leaves([value for name, value in vars(one).items() if name not in ("state", "param_groups")])
        found += [x for x in held if isinstance(x, torch.optim.Optimizer) and not any(x is y for y in found)]
    return found


def need_own_states(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer keeps states in others, which a checkpoint has not: they would begin anew."""
    others = [type(one).__name__ for one in wrapped(optimizer)[1:] if one.state is not optimizer.state]
    if others:
        what = f"{type(optimizer).__name__} steps optimizers with states of their own, which no checkpoint would have"
        raise on_all_ranks(what, got=", ".join(others), allowed="optimizers that share its state: inner.state = self.state")


def hooked(optimizer: torch.optim.Optimizer, plan: Plan) -> Iterator[Problem]:
    """Hooks that would see a rank's parts, and steps in the place of a class's, which cannot be tried."""
    # a wrapper may have none
    kept = (vars(one).get(f"_optimizer_step_{when}_hooks", {}) for one in wrapped(optimizer) for when in ("pre", "post"))
    hooks = [hook for each in kept for hook in each.values()]
    own = [(vars(one).get("step"), type(one).step) for one in wrapped(optimizer)]
    hooks += [step for step, of_class in own if step and getattr(step, "__wrapped__", None) is not of_class]  # a scheduler's counts
    if hooks and (plan.zero > 0 or plan.tp > 1 or plan.pp > 1):
        what = "the optimizer has hooks on its step, or another step than its class has, which would see a rank's own parts of the parameters"
        fix = "do it between steps (docs/contract.md), clip by soli.parallelize(clip=), write step in a class, or use zero=0, tp=1 and pp=1"
        yield Problem(what, got=", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in hooks), fix=fix)


def step(optimizer: torch.optim.Optimizer) -> None:
    """A step, without a closure."""
    try:
        optimizer.step()
    except Exception as error:
        if not type(optimizer).__module__.startswith("torch."):
            error.add_note(
                f"soli: the engine calls {type(optimizer).__name__}.step() once a step and without a closure; an optimizer that "
                "evaluates the loss again (SAM) cannot be stepped so (docs/porting.md)."
            )
        raise


def stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has taken a step. Some (Adagrad) have states from the start, with a step number of 0."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


SMALL, LARGE, VECTOR = (4, 6), (136, 144), (24,)
OTHERS = {0: ((), ()), 1: (VECTOR, VECTOR), 2: (SMALL, SMALL, LARGE), 3: ((4, 2, 3),), 4: ((2, 3, 2, 2),), 5: ((2, 3, 2, 2, 1),)}
"""Shapes that are tried, by their dims: some optimizers treat large matrices otherwise (Adafactor of PaLM from 128 on), or convolutions."""
OWN, MOST_OWN = 20_000, 16
"""Elements of shapes of the model that are tried too (of a larger one its rows or columns), and how many of them."""
STEPS, MOST, TRIED = 10, 200, 20_000
"""Some begin with steps of another kind (ADOPT), use a norm of the step before (AvaGrad), or project where gradient and weight are at
right angles, which by chance they are not at once (AdamP). As many as an option says and two more, which may be a step that something
begins with; fewer of more than 100 tensors, so that no more of them are stepped."""
SCALES = 1.0, 1e-3, 1e3
"""Of gradients by turns: some look at a norm where it is beyond a limit."""
RAISED = "a trial on small tensors raised"
Cut = Callable[[int, Tensor, int], Tensor]
"""Of the tensor of a number what the first or second of two ranks has, flat; of no elements: not there."""


def by_elements(number: int, x: Tensor, rank: int) -> Tensor:
    """A part of its elements each, not by its rows."""
    return x.flatten().tensor_split([max(1, min(11, (x.numel() - 1) // 2))])[rank]


def by_parameters(number: int, x: Tensor, rank: int) -> Tensor:
    """Every other one each."""
    return x if number % 2 == rank else x.flatten()[:0]


def coupling(optimizer: torch.optim.Optimizer, cut: Cut) -> str:
    """What shows that steps of a copy of this very optimizer are not those of two that have a cut each; "" if they are. In float64, up
    to the rounding of a vector kernel's tail: some dozens of operations an element."""
    shapes = _shapes(optimizer)
    held = [*optimizer.param_groups, *map(vars, wrapped(optimizer))]
    said = [x for one in held for value in one.values() for x in (value.values() if isinstance(value, dict) else (value,))]
    most = max(STEPS, min(MOST, TRIED // max(len(shapes), 1)))
    steps = min(max([STEPS, *(x + 2 for x in said if type(x) is int)]), most)
    try:
        whole, numbers = _stepped(optimizer, shapes, steps, lambda _, x, rank: x, 0)
        ranks = [_stepped(optimizer, shapes, steps, cut, rank) for rank in range(2)]
    except Exception as error:  # the program's own code: it wants matrices (Muon), or what no copy has
        return f"{RAISED} {type(error).__name__}: {error}"
    # what it knows of the gradients, such as a distance to go (D-Adaptation), is of all parameters
    if any(other != numbers for _, other in ranks):
        return "a number in its groups is another in a trial"
    rounding = 32 * steps * torch.finfo(torch.float64).eps * max([4.0, *(float(x.abs().max()) for x in whole)])
    for i, x in enumerate(whole):
        for rank, (parts, _) in enumerate(ranks):
            if not ((cut(i, x, rank) - parts[i]).abs() <= rounding).all():
                return f"a tensor of {tuple(x.shape)} becomes another in a trial"
    return ""


def _shapes(optimizer: torch.optim.Optimizer) -> list[tuple[int, tuple[int, ...]]]:
    """Those that are tried, each with the number of a group that has such."""
    found, own = [], dict[tuple[int, ...], int]()
    for number, group in enumerate(optimizer.param_groups):
        given = dict.fromkeys(tuple(p.shape) for p in group["params"])
        found += [(number, shape) for dim in dict.fromkeys(map(len, given)) for shape in OTHERS.get(dim, ())]
        for shape, kept in product(given, (0, -1)):
            large = math.prod(shape) > OWN
            tried = tuple(min(n, 2) if large and i != kept % len(shape) else n for i, n in enumerate(shape))
            if 0 < math.prod(tried) <= OWN:
                own.setdefault(tried, number)
    return found + [(number, shape) for shape, number in list(own.items())[:MOST_OWN]]


def _stepped(
    like: torch.optim.Optimizer, shapes: list[tuple[int, tuple[int, ...]]], steps: int, cut: Cut, rank: int
) -> tuple[list[Tensor], list[float]]:
    """Parameters after steps of a copy that has what a rank has of each tensor, and the numbers that its groups have then."""
    pool = torch.randn(2 * OWN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def drawn(i: int, step: int) -> Tensor:
        first, shape = (997 * step + 89 * i) % OWN, shapes[i][1]
        return cut(i, pool[first : first + math.prod(shape)].view(shape), rank).clone()

    params = [nn.Parameter(drawn(i, 0)) for i in range(len(shapes))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        there = [(number, p) for (number, _), p in zip(shapes, params, strict=True) if p.numel()]
        made = _tried(like, [[p for number, p in there if number == g] for g in range(len(like.param_groups))])
        for step in range(steps):
            for i, param in enumerate(params):
                param.grad = drawn(i, step + 1).mul_(SCALES[step % len(SCALES)])
            made.step()
    numbers = (x for group in made.param_groups for _, x in sorted(group.items()) if isinstance(x, int | float) or _is_number(x))
    return [param.detach() for param in params], [round(float(x), 12) for x in numbers]


def _tried(like: torch.optim.Optimizer, lists: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """A copy with all that it is, before its first step, on these parameters, and without what is of another device."""
    given, state, accepted = like.param_groups, like.state, inspect.signature(type(like).__init__).parameters
    memo: dict[int, Any] = {id(given): (groups := []), id(state): (states := defaultdict[Any, Any](dict))}
    for group, params in zip(given, lists, strict=True):
        plain: dict[str, Any] = {"fused": None, "foreach": None, "capturable": False}
        if group.get("lr") == 0:  # until a warmup begins
            plain["lr"] = group.get("initial_lr") or 1e-3
        options = {k: plain.get(k, v.cpu() if _is_number(v) else v) for k, v in group.items() if k != "params"}
        memo[id(group)] = copy.deepcopy(options, memo) | {"params": params}
        groups.append(memo[id(group)])
        # some (Adagrad) make states when they are built; where that takes more than options, a step without them raises, and is told
        with suppress(Exception):
            if state and params:
                taken = {k: v for k, v in groups[-1].items() if k in like.defaults and k in accepted}
                states.update(type(like)(params, **taken).state)
    made = copies.optimizer(like, memo)
    sizes = {p.shape for group in given for p in group["params"] if p.numel() > 1}
    if kept := [tuple(x.shape) for x in memo.values() if isinstance(x, Tensor) and x.shape in sizes]:
        raise TypeError(f"it keeps a tensor of {kept[0]}, as a parameter is, and soli cuts only those in self.state[p]")
    return made


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta


def guard(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Let state_dict() and load_state_dict() of an optimizer that has a rank's parts say so."""

    def refuse(*_: Any) -> None:
        fix = "engine.save(path) and engine.load(path) have them whole, and engine.global_state_dict(optimizer=True)"
        raise SoliError("the optimizer has this rank's part of its states", fix=fix)

    if plan.zero or plan.tp > 1 or plan.pp > 1:
        for one, when in product(wrapped(optimizer), ("state_dict", "load_state_dict")):
            vars(one).setdefault(f"_optimizer_{when}_pre_hooks", OrderedDict())  # a wrapper may have none
            getattr(one, f"register_{when}_pre_hook")(refuse)


def exchange(optimizer: torch.optim.Optimizer, slots: dict[int, Slot], absent: Container[int] = ()) -> None:
    """Put this rank's pieces in place of the plain parameters, group by group, in place, and cut their states.

    `absent`: ids of the parameters that are not on this rank.
    """
    for param in list(optimizer.state):
        if id(param) in absent:
            del optimizer.state[param]
        slot = slots.get(id(param))
        if slot is not None:
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
        group.pop("param_names", None)  # they no longer match; engine.save writes names of its own


def _cut(value: Any, slot: Slot) -> Any:
    """This rank's part of a state that is shaped as its parameter, where that lies; anything else as it is."""
    if slot.piece is None or not isinstance(value, Tensor) or tuple(value.shape) != slot.whole_shape or not slot.shape:
        return value
    double = slot.piece.dtype == torch.float64 and value.is_floating_point()
    value = value.to(slot.piece.device, torch.float64 if double else value.dtype)
    if slot.piece.shape == value.shape and slot.portion is None:
        return value
    if slot.portion is not None:
        value = slot.portion.taken(value)
    start = slot.first
    return value.flatten()[start : start + slot.piece.numel()].reshape(slot.piece.shape).clone()
