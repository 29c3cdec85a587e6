"""The user's optimizer, over shards: the same object, its parameters exchanged for this rank's pieces.

It is always built on the plain model, so a factory may look at names' shapes to form its groups. Sharding needs an optimizer whose
update is elementwise, a pipeline one that updates each parameter by itself (elementwise.py).
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.errors import Problem, SoliError, listing, on_all_ranks
from soli.core.functions import tensors_in
from soli.core.plan import Plan
from soli.engine.elementwise import RAISED, Cut, by_elements, by_parameters, coupling, wrapped
from soli.parallel.tensor.parts import updating
from soli.parallel.units import Slot

OF_RANK = ("params", "param_names")
"""Of a group, what a rank has its own of."""
Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build(optimizer: Factory | torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer on the plain model's parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        what = "optimizer is neither a torch optimizer nor a function that makes one"
        raise on_all_ranks(what, got=type(optimizer).__name__, allowed="torch.optim.AdamW(model.parameters()), or lambda p: torch.optim.AdamW(p)")
    made = optimizer(list(model.parameters()))
    if not isinstance(made, torch.optim.Optimizer):
        raise on_all_ranks("the optimizer function made no torch optimizer", got=type(made).__name__)
    return made


def scheduled(scheduler: Callable[[Any], Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """What a function of the optimizer makes, if there is one; it is stepped once a step, with nothing."""
    made = scheduler(optimizer) if callable(scheduler) else None
    if scheduler is not None and not hasattr(made, "step"):
        what, got = "scheduler is no function that makes one of an optimizer", scheduler if made is None and not callable(scheduler) else made
        raise on_all_ranks(what, got=type(got).__name__, allowed="scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)")
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        fix = "make it yourself, of engine.optimizer, step it with what engine.evaluate gives, and save its state_dict() by extra={...}"
        raise on_all_ranks("ReduceLROnPlateau goes by a metric, and soli steps its scheduler without one", fix=fix)
    return made


@listing
def problems(optimizer: torch.optim.Optimizer, model: nn.Module, plan: Plan, tried: dict[Cut, str] | None = None) -> Iterator[Problem]:
    """What keeps this optimizer from training this model under a plan. `tried`: what its trials showed, which are made where it is not there."""
    tried = {} if tried is None else tried
    shown = lambda cut: tried[cut] if cut in tried else tried.setdefault(cut, coupling(optimizer, cut))
    known = {id(p) for p in model.parameters()}
    if strange := sum(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        fix = "build the optimizer on this model, after any change to it, and before soli.parallelize"
        yield Problem(f"{strange} parameters of the optimizer are not the model's", fix=fix)
    if any(t.is_meta for t in tensors_in(optimizer.state.values())):
        what = f"{type(optimizer).__name__} makes its states when it is built, and the parameters are deferred"
        yield Problem(what, fix="build the model without soli.deferred()")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{type(optimizer).__name__} evaluates the loss several times a step, by a closure, and engine.step does so once"
        yield Problem(what, allowed="an optimizer whose step() needs no closure, such as AdamW or SGD")
    elif (plan.zero > 0 or plan.tp > 1) and (why := shown(by_elements)):
        told = "cannot be tried, so whether its states can be cut is not known" if RAISED in why else "does not update element by element, so its states cannot be cut"
        what = f"{type(optimizer).__name__} {told}"
        allowed = "zero=0 and tp=1, or an optimizer such as AdamW or SGD"
        yield Problem(what, got=f"zero={plan.zero}, tp={plan.tp}: {why}", allowed=allowed)
    elif (plan.zero > 0 or plan.pp > 1) and (why := shown(by_parameters)):
        others = "updates a parameter by others, by its place among them or by random numbers, and a rank has only some"
        what = f"{type(optimizer).__name__} {'cannot be tried, so whether it updates each parameter by itself is not known' if RAISED in why else others}"
        allowed = "zero=0 and pp=1, or an optimizer such as AdamW or SGD; to clip the gradients' norm: soli.parallelize(clip=)"
        yield Problem(what, got=f"zero={plan.zero}, pp={plan.pp}: {why}", allowed=allowed)
    if plan.zero > 0 and (kept := _kept(optimizer, known)):
        what = f"{type(optimizer).__name__} keeps parameters, their ids, or what is as large as one beside it, and under zero it steps pieces of them in their place"
        yield Problem(what, got=", ".join(kept), allowed="zero=0; options of a parameter in its group, in self.state[p] or as its attributes")
    if plan.zero in (1, 2) and callable(getattr(optimizer, "eval", None)):  # schedule-free ones
        what = f"{type(optimizer).__name__}.eval() writes parameters between steps, and a rank would keep the others' parts as they were"
        yield Problem(what, got=f"zero={plan.zero}", allowed="zero=0 or 3")
    yield from hooked(optimizer, plan)


def _kept(optimizer: torch.optim.Optimizer, known: Container[int]) -> list[str]:
    """Names of attributes and options that hold parameters or their ids, as values or keys; and of parameters' attributes that are as large as they are."""
    held = [(name, value) for one in wrapped(optimizer) for name, value in vars(one).items() if name not in ("state", "param_groups", "defaults")]
    held += [item for group in optimizer.param_groups for item in group.items() if item[0] not in OF_RANK]
    found = [name for name, value in held if any((type(x) is int and x in known) or id(x) in known for x in _within(value))]
    attributes = ((name, x, p) for group in optimizer.param_groups for p in group["params"] for name, x in vars(p).items())
    return found + [f"p.{name}" for name, x, p in attributes if isinstance(x, Tensor) and x.shape == p.shape and x.numel() > 1]


def _within(value: Any) -> Iterator[Any]:
    """It, and what is in it, keys too."""
    yield value
    inner = value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple | set | frozenset) else ()
    for one in inner:
        yield from _within(one)


def need_own_states(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer keeps states in others, which a checkpoint has not: they would begin anew."""
    if others := [type(one).__name__ for one in wrapped(optimizer)[1:] if one.state is not optimizer.state]:
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
        with updating():
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
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if isinstance(state, dict))


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
        pieces = [None if id(p) in absent else slots[id(p)].piece if id(p) in slots else p for p in group["params"]]
        if "param_names" in group:
            group["param_names"] = [name for name, piece in zip(group["param_names"], pieces, strict=True) if piece is not None]
        group["params"] = [piece for piece in pieces if piece is not None]


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
    return value.flatten()[slot.first : slot.first + slot.piece.numel()].reshape(slot.piece.shape).clone()
