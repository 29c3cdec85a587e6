"""The user's optimizer, over shards: the same object, its parameters exchanged for this rank's pieces.

It is always built on the plain model, so a factory may look at names' shapes to form its groups. Sharding
needs an optimizer whose update is elementwise, a pipeline one that updates each parameter by itself; that is found out by
trying it on matrices, whole and in pieces that optimizers of their own have, as ranks do, not by a list of names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
    elif (plan.zero > 0 or plan.tp > 1) and not elementwise(optimizer):
        what = f"{type(optimizer).__name__} does not update element by element, so its states cannot be cut"
        allowed = "zero=0 and tp=1, or an optimizer such as AdamW or SGD"
        yield Problem(what, got=f"zero={plan.zero}, tp={plan.tp}", allowed=allowed)
    elif plan.pp > 1 and separable(optimizer) is False:
        what = f"{type(optimizer).__name__} updates a parameter by others, or by random numbers, and a stage has only its own parameters"
        allowed = "pp=1, or an optimizer such as AdamW or SGD; to clip the gradients' norm: soli.parallelize(clip=)"
        yield Problem(what, got=f"pp={plan.pp}", allowed=allowed)
    yield from hooked(optimizer, plan)


def hooked(optimizer: torch.optim.Optimizer, plan: Plan) -> Iterator[Problem]:
    """Hooks that would see a rank's parts."""
    # a wrapper may have none
    kept = (vars(optimizer).get(f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    hooks = [hook for each in kept for hook in each.values()]
    if hooks and (plan.zero > 0 or plan.tp > 1 or plan.pp > 1):
        what = "the optimizer has hooks on its step, which would see a rank's own parts of the parameters"
        fix = "do it between steps (docs/contract.md), clip by soli.parallelize(clip=), or use zero=0, tp=1 and pp=1"
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


SMALL, LARGE = (4, 6), (136, 144)
OTHERS = {1: (24,), 3: (4, 2, 3), 4: (2, 3, 2, 2), 5: (2, 3, 2, 2, 1)}
"""Shapes that are tried: some optimizers treat large matrices otherwise (Adafactor of PaLM from 128 on), or convolutions."""
STEPS, MOST = 10, 200
"""Some begin with steps of another kind (ADOPT), use a norm of the step before (AvaGrad), or project where gradient and weight are at
right angles, which by chance they are not at once (AdamP). As many as an option says and two more, which may be a step that something
begins with."""


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps on a matrix equal those of two optimizers that have a part of its elements each."""
    halves = lambda tensors: [part for x in tensors for part in (x.flatten()[:11], x.flatten()[11:])]
    dims = {p.dim() for group in optimizer.param_groups for p in group["params"]}
    return all(
        _alike(optimizer, [shape], halves) for shape in (SMALL, LARGE, *(OTHERS[d] for d in dims if d in OTHERS))
    )


def separable(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether steps on two matrices equal those of two optimizers with one each; None if that cannot be tried."""
    return _alike(optimizer, [SMALL, LARGE], list)


def _alike(
    optimizer: torch.optim.Optimizer, shapes: list[tuple[int, ...]], cut: Callable[[list[Tensor]], list[Tensor]]
) -> bool | None:
    """Whether steps on tensors equal those of optimizers that have one of the pieces each, under every group's options. In float64, up
    to the rounding of a vector kernel's tail: some dozens of operations an element."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    start = draw()
    for group in optimizer.param_groups:
        options = _options(optimizer, group)
        said = (*options.values(), *vars(optimizer).values(), 0)
        steps = min(max(STEPS, *(v + 2 for v in said if type(v) is int)), MOST)
        grads = [draw() for _ in range(steps)]
        try:
            whole = _stepped(optimizer, options, start, grads)
            pieces = [
                _stepped(optimizer, options, [piece], [[cut(step)[i]] for step in grads])
                for i, piece in enumerate(cut(start))
            ]
        except Exception:  # somebody's own class: it wants matrices (Muon), or is no optimizer of plain parameters
            return None
        apart = ([piece[0][0] for piece in pieces], pieces[0][1])
        # what it knows of the gradients, such as a distance to go (D-Adaptation), is of all parameters
        if any(numbers != whole[1] for _, numbers in pieces):
            return False
        flat = [torch.cat([x.flatten() for x in each]) for each, _ in (whole, apart)]
        rounding = 32 * steps * torch.finfo(torch.float64).eps * max(float(x.abs().max()) for x in start)
        if not (flat[0] - flat[1]).abs().max() <= rounding:
            return False
    return True


def _options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Those of a group that its class takes, without what is of another device."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {k: v for k, v in group.items() if k in optimizer.defaults and k in accepted}
    plain: dict[str, Any] = {"fused": None, "foreach": None, "capturable": False}
    if options.get("lr") == 0:  # until a warmup begins
        plain["lr"] = group.get("initial_lr") or 1e-3
    return {k: plain.get(k, v) for k, v in options.items()}


def _stepped(
    like: torch.optim.Optimizer, options: dict[str, Any], values: list[Tensor], grads: list[list[Tensor]]
) -> tuple[list[Tensor], list[float]]:
    """Parameters after steps, and the numbers that the optimizer's group has then."""
    params = [nn.Parameter(value.clone()) for value in values]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        accepted = inspect.signature(type(like).__init__).parameters
        made = type(like)(params, **copy.deepcopy(options))
        for name, value in vars(like).items():  # options that are attributes
            if name in accepted and isinstance(value, int | float | str | tuple):
                setattr(made, name, value)
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            made.step()
    numbers = (x for _, x in sorted(made.param_groups[0].items()) if isinstance(x, int | float) or _is_number(x))
    return [param.detach() for param in params], [round(float(x), 12) for x in numbers]


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta


def guard(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Let state_dict() and load_state_dict() of an optimizer that has a rank's parts say so."""

    def refuse(*_: Any) -> None:
        fix = "engine.save(path) and engine.load(path) have them whole, and engine.global_state_dict(optimizer=True)"
        raise SoliError("the optimizer has this rank's part of its states", fix=fix)

    if plan.zero or plan.tp > 1 or plan.pp > 1:
        for when in ("register_state_dict_pre_hook", "register_load_state_dict_pre_hook"):
            getattr(optimizer, when, lambda hook: None)(refuse)  # a wrapper may have none


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
