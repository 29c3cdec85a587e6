"""Recompute: what a block's forward made is dropped and made again in backward (arXiv 1604.06174), by torch's checkpoint.

    none        every activation is kept
    selective   a block keeps its inputs and the results of its products with weights (keep.py)
    full        a block keeps its inputs alone

Blocks are the repeated parts of the model. Dropout draws the same numbers again (parallel/randomness.py), ZeRO-3's
parameters are there because the block's output has its gradient by then, and tensor parallelism's sums run again.

An object among a block's arguments that the block writes into, such as a key-value cache, then has tensors whose graph
has the object: a circle through autograd that Python's collector cannot see. A backward opens it; a microbatch without
counted targets has none, and would stay in memory for good. `forget` opens the circles of what is done with.

Under a zero-bubble schedule a microbatch's backward is many (pipeline/split_backward.py), and torch makes a block again in
each of them: four layers of Llama took 5.4 GB where they take 2.0 without recomputation, and a step twice as long. torch's
GraphExecGroup makes it once for all; but what was read is let go of, and both halves read what a product's gradients
need. `holding` keeps it until the graph is gone.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as of_torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError, checkpoint

from soli.core.errors import Problem, SoliError, listing
from soli.core.events import events
from soli.core.plan import SPLIT_BACKWARD, Plan
from soli.parallel import generators, wrapping
from soli.parallel.keep import contexts, differs
from soli.parallel.tensor import reads
from soli.parallel.tensor.cut import levels, marked
from soli.parallel.units import blocks

LOOKS = [False]
"""Whether the step that runs compares what is made again by values too. A block may read what the model sets between the calls of its
blocks (an attribute, a global, a context), and torch compares shapes."""
PLACES = 4096
"""Of a tensor's elements that are compared, at most."""
WITHOUT_VALUES = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _Some:
    """Some of a tensor's elements. Equal: up to the root of epsilon, since sums of a GPU may come in another order."""

    def __init__(self, x: torch.Tensor) -> None:
        each = max(int(PLACES ** (1 / max(x.dim(), 1))), 1)
        some = x.detach()[tuple(slice(None, None, max(-(-n // each), 1)) for n in x.shape)]
        self.bound = torch.finfo(x.dtype).eps ** 0.5 if x.is_floating_point() or x.is_complex() else 0.0
        self.some = (torch.view_as_real(some.resolve_conj()) if x.is_complex() else some).to(torch.float64, copy=True).nan_to_num()

    def __eq__(self, other: object) -> bool:
        if other is None:  # of a step that was not looked at, or of none
            return True
        off = (self.some - other.some).abs() if isinstance(other, _Some) else self.some.new_ones(1)
        return not off.numel() or not bool(off.max() > self.bound * self.some.abs().max())  # in a rehearsal all values are 0

    def __repr__(self) -> str:
        return ", ".join(f"{x:.6g}" for x in self.some.flatten()[:3].tolist())


def look(engine: Any, simulated: bool) -> None:
    """Before a step: an engine's 1st, 3rd, 7th, 15th, ... is looked at, and not the 2nd, by which a rehearsal tells what steps take."""
    _steps[engine] = steps = _steps.get(engine, 0) + 1
    LOOKS[0] = steps & (steps + 1) == 0 and not simulated


def _lies(x: torch.Tensor) -> dict[str, Any]:
    """What torch compares of a tensor when it is made again: as it lies in memory, and not as cut tensors answer, which is not the same
    inside of a rule (the forward, where it is saved) and outside (the end of a recomputation)."""
    with torch._C.DisableTorchFunction():
        found = of_torch._default_meta_extractor(x) | {"values": None}
        seeds = not x.is_floating_point() and not x.is_complex() and x.numel() <= 2  # of attention: left as memory was without dropout
        if LOOKS[0] and x.layout == torch.strided and not x.is_meta and not seeds and x.dtype != torch.uint8:  # workspaces are such bytes
            found["values"] = _Some(x)
        return found


class _Filled(TorchFunctionMode):
    """Around a block whose values are compared: what it makes without values, as rows that are cut off again, is zeros each time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in WITHOUT_VALUES and not made.requires_grad else made


of_torch._allowed_determinism_checks_to_fns["default"] = _lies


class _Handles(dict[Any, Any]):
    """What the backwards of a GraphExecGroup made again, by group; torch sets None when it was read."""

    def __setitem__(self, group: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(group, handle)


class _Holder(of_torch._Holder):
    def __init__(self) -> None:
        self.handles = _Handles()


def holding(plan: Plan) -> AbstractContextManager[object]:
    """Around a step: torch's stand-ins for activations keep what was made again, in soli's blocks and where a model itself calls checkpoint."""
    return patch.object(of_torch, "_Holder", _Holder) if plan.schedule in SPLIT_BACKWARD else nullcontext()


@listing
def problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """What keeps this model from being recomputed."""
    if plan.recompute != "none" and not blocks(model):
        got = f"recompute={plan.recompute}, {type(model).__name__}"
        allowed = "a model with a list of modules (nn.ModuleList, nn.Sequential)"
        fix = "recompute=none, or torch.utils.checkpoint inside the model"
        yield Problem("the model has no repeated blocks to recompute", got=got, allowed=allowed, fix=fix)


def wrap(model: nn.Module, plan: Plan) -> None:
    """Let each block's forward be made again in backward, in place."""
    if plan.recompute == "none":
        return
    for name, module in blocks(model):
        if getattr(module, "gradient_checkpointing", False):  # transformers' word for it
            events.emit("note", text=f"{name} recomputes itself already")
            continue
        wrapping.wrap(module, _again(module, {"context_fn": contexts} if plan.recompute == "selective" else {}))


@contextmanager
def explained() -> Iterator[None]:
    """Say in words what torch found when a block did not compute the same again, or an autograd function gave a gradient of another shape."""
    try:
        yield
    except CheckpointError as error:
        raise _other(str(error)) from error
    except RuntimeError as error:
        if "returned an invalid gradient" not in str(error) or not levels():
            raise
        what = "a backward gives a whole gradient of a tensor of which each rank has a part: an autograd function of the model's own, or what was computed before soli.parallelize and is still held"
        fix = "make it with the tensor that ctx saved (grad * torch.ones_like(x) and not grad.expand(shape)), del what is held, or run with tp=1 and cp=1"
        raise SoliError(what, got=str(error).split("\n")[0], fix=fix) from error


class _Given:
    """Arguments of a block that are no tensors, as long as its microbatch is under way, and which weights it has."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block, self.weights, self.called = block, _weights(block), False
        self.drawn = generators.held() if generators.OTHERS[0] else None  # torch's checkpoint keeps the states of its own alone
        self.tensors = {i: getattr(x, "cuts", {}) for i, x in enumerate(args) if isinstance(x, torch.Tensor)}  # a program's own hooks on what is saved lose how they are cut
        self.args = [None if i in self.tensors else x for i, x in enumerate(args)]
        self.kwargs = kwargs
        self.then = _as_they_are(self.args, kwargs)
        _under_way.add(self)

    def call(self, forward: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """The block with all of its arguments."""
        again, self.called = self.called, True
        args, kwargs = list(self.args), self.kwargs
        # Made again with what its lists had then: the model may have gone on to fill them.
        self.args, self.kwargs = _as_they_are(*self.then)
        for (i, cuts), x in zip(self.tensors.items(), tensors, strict=True):
            args[i] = marked(x, cuts) if type(x) is torch.Tensor else x
        if _weights(self.block) != self.weights:
            what = "a block has other weights when it is recomputed in backward than it had in the forward"
            allowed = "a block that computes with its own parameters"
            fix = "torch.func.functional_call lends weights to a block for one call: let the block's own forward make them, or recompute=none"
            raise SoliError(what, got=type(self.block).__name__, allowed=allowed, fix=fix)
        try:
            with generators.apart(0, self.drawn) if again and self.drawn else nullcontext(), _Filled() if LOOKS[0] else nullcontext():
                return forward(*args, **kwargs)
        except Exception as error:
            if _ended(error):
                raise _StopRecomputationError from None  # no name for the old one, whose frames would have it and it them, with all their tensors
            if again and isinstance(error, RuntimeError | IndexError | TypeError | ValueError):
                raise _other(f"{type(error).__name__}: {error}") from error
            raise


def _ended(error: BaseException | None) -> bool:
    """Whether what is raised, or a library's own words around it, is how torch ends a forward that has made again all that was saved."""
    return error is not None and (isinstance(error, _StopRecomputationError) or _ended(error.__cause__ or error.__context__))


def _other(got: str) -> SoliError:
    """`got`: of torch, which says in its second to fourth line which tensor was another one."""
    lines = got.splitlines()
    cache = "leave out a key-value cache that blocks write into, which is the usual cause"
    usual = "a block that calls torch.utils.checkpoint itself is recomputed already; hand a block as an argument what the model sets between calls of its blocks (an attribute, a global), and enter contexts (sdpa_kernel) inside of it"
    return differs(" ".join(lines[1:4] if "different metadata" in got else lines[:1]), f"{cache}; {usual}; or recompute=none")


def _as_they_are(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments whose lists and dicts are others, with what is in them now."""
    now = lambda x: list(x) if type(x) is list else dict(x) if type(x) is dict else x
    return [now(x) for x in args], {name: now(x) for name, x in kwargs.items()}


def _weights(block: nn.Module) -> list[int]:
    return [id(param) for module in block.modules() for param in module._parameters.values()]


_under_way: weakref.WeakSet[_Given] = weakref.WeakSet()


def forget() -> None:
    """Let go of the arguments of blocks whose backward is over, or will not be."""
    for given in _under_way:
        given.args, given.kwargs, given.then = [], {}, ([], {})
    _under_way.clear()
    LOOKS[0] = False  # what the program recomputes by itself between steps is its own
    reads.forget()


def _refuse_transforms(block: nn.Module) -> NoReturn:
    what = "torch.func (grad, vjp, jvp, jacrev, hessian, vmap) or forward-mode gradients go through a block that is recomputed, or inside it, which torch does not have"
    raise SoliError(what, got=type(block).__name__, fix="use recompute=none")


def _again(block: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    forward = block.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            _refuse_transforms(block)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        versions, held = [x._version for x in given], _Given(block, args, kwargs)
        tensors = [args[i] for i in held.tensors]
        try:
            out = checkpoint(functools.partial(held.call, forward), *tensors, use_reentrant=False, **options)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            _refuse_transforms(block)
        if versions != [x._version for x in given]:
            what = "a block writes into its input, and would write again when it is recomputed"
            raise SoliError(what, got=type(block).__name__, fix="make a new tensor in the block (x = x * 2 and not x *= 2), or recompute=none")
        return out

    return wrapped
