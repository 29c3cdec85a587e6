"""Cut tensors: a rank's part of a logical tensor, which answers to the logical shape.

PyTorch's DTensor is this, and more: any mesh, any placement, below autograd. Measured on CPU (2 ranks, GPT of 12
layers), its tensor parallel step takes 1.6 times the CPU time of layers written by hand, it reduces the gradients
of q, k and v apart (72 all-reduces where 48 do), and it refuses heads that ranks do not divide. Here a function of
torch on a cut tensor is answered *above* autograd, once in the forward: a rule computes on local parts and says how
the result is cut; the backward is autograd's own on plain local tensors. A model's Python runs as it is: it asks a
cut tensor for its shape, gets the logical one, and splits heads with it.

A function without a rule gets whole tensors: right, slow, and said once. While a layout is sought (finder), it is
the layout that gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from soli.core.events import events
from soli.core.functions import in_place, name_of
from soli.mesh.collectives import Axis
from soli.parallel.tensor import moves
from soli.parallel.tensor.split import Misfit, Split

if TYPE_CHECKING:
    from soli.parallel.reduce import Reducer
    from soli.parallel.tensor.finder import Finder

Rule = Callable[["Run", Any, tuple, dict], Any]
"""(run, function, args, kwargs) -> what the function returns, cut tensors as such."""


@dataclass
class Run:
    """What rules need: the axis, whether the sequence is cut too, and the finder while a layout is sought."""

    axis: Axis
    ranks: int  # of the plan: while a layout is sought the axis has size 1
    sequence: bool = False
    overlap: bool = False  # the backward of a product may send while it computes
    finder: Finder | None = None
    reducer: Reducer | None = None  # keeps parameters' gradients that are parts of sums, to sum them at once
    noted: set[str] = field(default_factory=set)


class _State:
    run: Run | None = None


@contextmanager
def running(run: Run | None) -> Iterator[None]:
    """Inside, cut tensors are logical ones. Outside they are what they hold."""
    before, _State.run = _State.run, run
    try:
        yield
    finally:
        _State.run = before


class Cut(Tensor):
    """A local part. `cut_as` says of what; None while a layout is sought and `view_of` a weight is not decided."""

    cut_as: Split | None
    view_of: tuple[CutParameter, tuple[int, ...]] | None  # the weight, and which of its dims each dim is

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = self.detach().clone()
            if self.cut_as is not None:
                copied = cut(copied, self.cut_as)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class CutParameter(nn.Parameter):
    """A parameter that is cut, or, while a layout is sought, may be (`cut_as` is None until it is)."""

    cut_as: Split | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Answer a function of torch that was called with a cut tensor."""
    run = _State.run
    with torch._C.DisableTorchFunctionSubclass():
        if run is None:
            return func(*args, **kwargs)
        from soli.parallel.tensor.rules import (
            ALWAYS,
            rule_of,
            written_in_python,
        )  # they are made of what stands here

        name = getattr(func, "__name__", "")
        try:
            if name in ALWAYS:
                return ALWAYS[name](run, func, args, kwargs)
            if not _any_cut(args) and not (kwargs and _any_cut(kwargs.values())):
                if run.finder is None:
                    return func(*args, **kwargs)
                if written_in_python(func) and (rule := rule_of(func, name)) is not None:
                    return rule(run, func, args, kwargs)  # its lines may hold products
                return run.finder.follow(func(*args, **kwargs), name, args)
            rule = rule_of(func, name)
            return rule(run, func, args, kwargs) if rule is not None else unknown(run, func, args, kwargs)
        except Misfit as misfit:
            return misfitted(run, misfit, func, args, kwargs)


def _any_cut(values: Any) -> bool:
    for x in values:
        if type(x) in (Cut, CutParameter):
            if x.cut_as is not None:
                return True
        elif type(x) in (list, tuple) and _any_cut(x):
            return True
    return False


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """For rules: a function on logical tensors (inside a rule torch's own calls see local parts)."""
    return dispatch(func, args, kwargs)


def misfitted(run: Run, misfit: Misfit, func: Any, args: tuple, kwargs: dict) -> Any:
    """The layout gives way while it is sought; afterwards the tensors are made whole."""
    if run.finder is not None:
        cuts = [x for x in tree_leaves((args, kwargs)) if split_of(x) is not None]
        if run.finder.answer(misfit, name_of(func), cuts):
            return dispatch(func, args, kwargs)
    else:
        note(run, f"{name_of(func)}: {misfit.why}; it computes on whole tensors")
    target = kwargs.get("out", args[0] if args and in_place(func) else None)
    split = split_of(target)
    if target is None or split is None:
        return func(*tree_map(lambda x: whole(run, x), args), **tree_map(lambda x: whole(run, x), kwargs))
    total = whole(run, target).clone()
    args, kwargs = tree_map(lambda x: total if x is target else whole(run, x), (args, kwargs))
    result = func(*args, **kwargs)
    target.copy_(part_of(run, total, split))  # what was written is this rank's part of it
    return target if result is total else result


def unknown(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    """A function without a rule."""
    splits = [s for x in tree_leaves((args, kwargs)) if (s := split_of(x)) is not None]
    if not splits:
        return func(*args, **kwargs)
    raise Misfit(frozenset().union(*(s.origins for s in splits)), "nothing is known of it on cut tensors")


def note(run: Run, text: str) -> None:
    if text not in run.noted:
        run.noted.add(text)
        events.emit("note", text=text)
        if run.axis.ranks[0] == 0 and run.axis.index == 0:
            print(f"soli: {text}", flush=True)


# --- one tensor -----------------------------------------------------------------------------------------


def split_of(x: Any) -> Split | None:
    return x.cut_as if type(x) in (Cut, CutParameter) else None


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The logical shape."""
    split = split_of(x)
    if split is None:
        return tuple(x.shape)
    return (*x.shape[: split.dim], split.size, *x.shape[split.dim + 1 :])


def cut(x: Tensor, split: Split) -> Tensor:
    """Mark a plain local tensor as a part."""
    if type(x) is not Tensor:  # an operation that returned its argument
        if split_of(x) == split:
            return x
        x = x.view_as(x)
    x.__class__ = Cut
    x.cut_as = split  # type: ignore[attr-defined]
    return x


def whole(run: Run, x: Any) -> Any:
    """The whole value, for a computation that every rank does alike."""
    split = split_of(x)
    if split is None:
        return x
    if run.axis.size == 1:
        return x.view_as(x) if type(x) is Cut else x
    kept = x.__dict__.get("_whole")
    if kept is None or kept[0] != x._version:
        kept = x._whole = (x._version, moves.gather(x, split, run.axis))
    return kept[1]


def entered(run: Run, x: Tensor) -> Tensor:
    """A whole tensor that cut computations read. Asked again it is the same one, so that gradients sum once."""
    if run.axis.size == 1 or not x.requires_grad or not torch.is_grad_enabled() or hasattr(x, "_is_entered"):
        return x
    if isinstance(x, nn.Parameter):
        return moves.enter(x, run.axis) if run.reducer is None else moves.enter_parameter(x, run.reducer)
    return x._read[1] if was_read(x) else keep_read(x, moves.enter(x, run.axis))  # type: ignore[attr-defined]


def shared(run: Run, x: Tensor) -> Tensor:
    """The whole of a tensor that is cut along the sequence, for cut computations to read."""
    split = split_of(x)
    if split is None:
        raise AssertionError("it is cut")
    if run.axis.size == 1:
        return x.view_as(x)
    return x._read[1] if was_read(x) else keep_read(x, moves.share(x, split, run.axis))  # type: ignore[attr-defined]


def was_read(x: Tensor) -> bool:
    """Whether cut computations have read it, as it is."""
    return hasattr(x, "_is_entered") or x.__dict__.get("_read", (None,))[0] == x._version


def first_by(x: Tensor, weight: Tensor) -> bool:
    """Whether the product with this weight is the first to read x: now, or when it ran before a recomputation."""
    return not was_read(x) or x.__dict__.get("_read", (None, None, 0))[2] == id(weight)


def keep_read(x: Tensor, read: Tensor, by: int = 0) -> Tensor:
    """Remember what cut computations read of it, of which the gradient is a part of a sum."""
    if split_of(x) is not None:
        read._is_entered = True  # type: ignore[attr-defined]
    x._read = (x._version, read, by)  # type: ignore[attr-defined]
    return read


def part_of(run: Run, x: Tensor, split: Split) -> Tensor:
    """This rank's part of a whole tensor, as `split` cuts its dim. A dim of size 1 is broadcast, not cut."""
    if x.shape[split.dim] == 1 and split.size != 1:
        return entered(run, x)
    return moves.pick(x, split, run.axis)


def agreed(run: Run, splits: list[Split]) -> Split:
    """The cut of tensors that meet in one dim (which may have several sizes). Misfit where they differ."""
    first = splits[0]
    for other in splits[1:]:
        if first.fits(other):
            first = first.join(other)
            continue
        atoms = [s.atoms for s in splits]
        same = all(
            tuple(p * s.size for p in first.parts) == tuple(p * first.size for p in s.parts) for s in splits
        )
        everyone = frozenset().union(*(s.origins for s in splits))
        if not same:
            raise Misfit(everyone, "tensors meet that are cut in other places")
        least = gcd(*atoms)
        if least >= run.ranks:
            raise Misfit(everyone, f"tensors meet that have {least} units in common", atoms=least)
        coarse = min(splits, key=lambda s: s.atoms)
        raise Misfit(
            coarse.origins or everyone,
            f"it has {coarse.atoms} units and meets tensors of {max(atoms)}, and {run.ranks} ranks share them",
        )
    return first
