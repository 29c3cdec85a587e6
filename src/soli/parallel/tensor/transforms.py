"""What computes with cut tensors and is no function of torch that a rule answers: torch.func.vmap, and the program's own hooks on
gradients and autograd functions.

vmap hands out tensors that forget how they were cut: it is given whole ones. Gradients that come to a hook, or to the backward of an
autograd function, are cut as what they are gradients of, so that its lines mean what they say. What it then gives a whole tensor
beside cut ones (a weight, a scale) has to be the same on all ranks, and is not where a sum over a dim that is cut is left to
autograd: that is looked at once for each call. In blocks the first step compares all gradients with those of the block whole.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import getattr_static
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import apis
from torch.utils._pytree import tree_leaves, tree_map

from soli.core.errors import on_all_ranks
from soli.core.versions import PlainFunction, functions
from soli.mesh.collectives import all_reduce
from soli.parallel.tensor import cut as cutting
from soli.parallel.tensor import moves
from soli.parallel.tensor.cut import Cut, Run, any_cut, dispatch, levels, marked, plain
from soli.parallel.tensor.split import Split

_OF_TORCH = apis.vmap_impl, functions.unwrap_dead_wrappers
_APPLY: Any = getattr_static(PlainFunction, "apply")


def seen() -> ExitStack:
    """Inside, they are."""
    patched = ExitStack()
    patched.enter_context(patch.object(apis, "vmap_impl", _vmap))
    patched.enter_context(patch.object(functions, "unwrap_dead_wrappers", _given))
    patched.enter_context(patch.object(PlainFunction, "apply", classmethod(_called)))
    for name in ("as_tensor", "asarray", "tensor"):  # which take a cut tensor's memory for an array's, and ask nobody
        patched.enter_context(patch.object(torch, name, partial(_of_tensor, name == "tensor", getattr(torch, name))))
    return patched


def _of_tensor(anew: bool, make: Any, *args: Any, **kwargs: Any) -> Any:
    """as_tensor, asarray and tensor, of a tensor that is one already."""
    x = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if type(x) is not Cut:
        return make(*args, **kwargs)
    found = (x.detach() if anew else x).to(dtype=kwargs.get("dtype"), device=kwargs.get("device"), copy=bool(anew or kwargs.get("copy")))
    return found.requires_grad_() if kwargs.get("requires_grad") else found


def vmap(x: Tensor) -> Tensor:
    """To whoever asks how it computes on a cut tensor: as a function of which nothing is known."""
    return x


def _vmap(*args: Any, **kwargs: Any) -> Any:
    args, kwargs = tree_map(_for_vmap, (args, kwargs))
    return _OF_TORCH[0](*args, **kwargs)


def _for_vmap(x: Any) -> Any:
    for run in levels():
        x = dispatch(vmap, (x,), {}) if any_cut((x,), run.axis.name) else x
    return x


def of_cut(hook: Callable[[Tensor], Any], cuts: dict[str, Split]) -> Callable[[Tensor], Any]:
    """A hook of the program's own on the gradient of a cut tensor, as one on what the rank has."""

    def called(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        followed = type(gradient) is Cut  # an autograd function's of the program's own, for which it is to stay so
        result = hook(marked(gradient.view_as(gradient), cuts))
        for level, run in enumerate(levels()):
            split = cuts.get(run.axis.name)
            if result is not None and split is not None and not any_cut((result,), run.axis.name):
                with cutting.inside(levels(), level):
                    result = cutting.cut(cutting.part_of(run, result, split), split)
        return result if result is None or followed else plain(result)

    return called


def _given(args: tuple) -> tuple:
    """The arguments of every autograd function, whatever name its `apply` has, go through here."""
    if not cutting.ruling():
        with torch._C.DisableTorchFunctionSubclass():
            cutting.follow_back(args)
    for run in levels() if torch.is_grad_enabled() and not cutting.ruling() else ():
        if run.axis.size > 1 and not run.partial and any_cut(args, run.axis.name):
            run.calls += 1
            if run.calls not in run.compared:
                args = tuple(_followed(run, x) for x in args)
    return _OF_TORCH[1](args)


def _called(kind: Any, *args: Any) -> Any:
    """An autograd function of the program's own that sums over positions, which cp cuts: the gradient of such a result is a part of a sum
    on each rank, and it is handed all of it. A weight beside would be given all of its gradient on every rank, too often."""
    out = _APPLY.__get__(None, kind)(*args)
    if not torch.is_grad_enabled() or cutting.ruling() or kind.__module__.split(".")[0] in ("soli", "torch"):
        return out
    for level, run in enumerate(levels()):
        is_whole = lambda x, over=run.axis.name: isinstance(x, Tensor) and x.requires_grad and not any_cut((x,), over)
        if run.partial and run.axis.size > 1 and any_cut(args, run.axis.name) and any(map(is_whole, tree_leaves(out))):
            if any(map(is_whole, args)):
                what = "an autograd function of the model's own sums over the sequence, which is cut, and has a weight beside it"
                fix = "let it return what it computes by positions, and sum that and multiply by weights outside of it; or run without cp"
                raise on_all_ranks(what, got=f"{kind.__name__}, a result that is not cut along {run.axis.name}", fix=fix)
            with cutting.inside(levels(), level):
                out = tree_map(lambda x, here=run.axis, whole=is_whole: cutting.across(moves.enter, x, here) if whole(x) else x, out)
    return out


def _followed(run: Run, x: Any) -> Any:
    """A whole tensor whose gradient will be looked at."""
    if not isinstance(x, Tensor) or not x.requires_grad or any_cut((x,), run.axis.name):
        return x
    with torch._C.DisableTorchFunction():  # it is no hook of the program's
        same = x.view_as(x)
        same.register_hook(partial(_compare, run, run.calls))
        return marked(same, x.cuts) if type(x) is Cut else same


def _compare(run: Run, call: int, gradient: Tensor | None) -> None:
    """Collective. Rounding is epsilon times a few, parts of a sum are of its size: between them is the root of epsilon."""
    if gradient is None:
        return
    both = torch.stack([gradient, -gradient]).detach()
    all_reduce(both, run.axis, "max", label="gradients of an autograd function of the model's own")
    if (largest := float(both.abs().max())) > 0:  # zeros, as behind a head that begins with them, say nothing yet
        run.compared.add(call)
    if float(both.sum(0).max()) > torch.finfo(gradient.dtype).eps ** 0.5 * largest:
        what = "the backward of an autograd function of the model's own sums over what is cut"
        got = f"a gradient {list(gradient.shape)} of a whole tensor, as of a weight, that differs between the ranks of {run.axis.name}"
        raise on_all_ranks(what, got=got, fix="let the function give gradients of what it computes by elements, and multiply by weights outside of it; or run with tp=1")
