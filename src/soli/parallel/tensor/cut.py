"""Cut tensors: a rank's part of a logical tensor, which answers to the logical shape.

PyTorch's DTensor is this, and more: any mesh, any placement, below autograd. Measured on CPU (2 ranks, GPT of 12
layers), its tensor parallel step takes 1.6 times the CPU time of layers written by hand, it reduces the gradients
of q, k and v apart (72 all-reduces where 48 do), and it refuses heads that ranks do not divide. Here a function of
torch on a cut tensor is answered *above* autograd, once in the forward: a rule computes on local parts and says how
the result is cut; the backward is autograd's own on plain local tensors. A model's Python runs as it is: it asks a
cut tensor for its shape, gets the logical one, and splits heads with it.

A function without a rule gets whole tensors: right, slow, and said once. While a layout is sought (finder), it is
the layout that gives way.

A tensor may be cut over several axes (the sequence over cp, heads over tp). The axes are levels, the outermost
first: the rule of one computes on what is, to the next, a logical tensor again, so that each rule knows one axis.

    model          x [b, s, h]          asks for functions of logical tensors
    level 0, cp    x [b, s/2, h]        its rule calls the same function on this rank's part of the sequence
    level 1, tp    x [b, s/2, h/2]      its rule calls it on plain tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves, tree_map

from soli.core.axes import DEPTH, ROW
from soli.core.errors import SoliError, on_all_ranks
from soli.core.events import events
from soli.core.functions import in_place, name_of
from soli.mesh.collectives import Axis
from soli.parallel.tensor import moves
from soli.parallel.tensor.reads import keep_read, read_of, version_of, was_read
from soli.parallel.tensor.split import Misfit, Split, origins_of

if TYPE_CHECKING:
    from soli.parallel.reduce import Reducer
    from soli.parallel.tensor.finder import Finder

Rule = Callable[["Run", Any, tuple, dict], Any]
"""(run, function, args, kwargs) -> what the function returns, cut tensors as such."""


@dataclass(eq=False)
class Run:
    """One level: its axis and what its rules need, and the finder while a layout is sought."""

    axis: Axis
    ranks: int  # of the plan: while a layout is sought the axis has size 1
    sequence: bool = False
    overlap: bool = False  # the backward of a product may send while it computes
    finder: Finder | None = None
    reducer: Reducer | None = None  # keeps parameters' gradients that are parts of sums, to sum them at once
    hidden: bool = False  # hidden sizes are cut, and not between a column and its row alone
    cube: dict[str, Axis] | None = None  # of 3D: all three axes
    row: Axis | None = None  # of a grid (2D): it cuts weights the other way, and this level hidden sizes
    # a gradient of a whole tensor is each rank's part of a sum; elsewhere it is the sum
    partial: bool = False
    context: str = ""  # how attention crosses the axis, where it cuts the sequence of the batch
    rings: tuple[Axis, Axis] | None = None  # of a context over several hosts: inside one, and between them
    begun: bool = False  # the sequence was cut
    longest: int = 0  # of what was too short to be cut
    noted: set[str] = field(default_factory=set)
    calls: int = 0  # of autograd functions of the program's own, in this forward
    compared: set[int] = field(default_factory=set)  # those of them whose gradients were looked at (transforms.py)
    # views of what was gathered, which nobody may write into
    lent: list[tuple[Tensor, int, str]] = field(default_factory=list)


class _State:
    levels: tuple[Run, ...] = ()  # outermost first
    level: int = -1  # the one whose rule is computing


@contextmanager
def running(levels: Sequence[Run]) -> Iterator[None]:
    """Inside, cut tensors are logical ones. Outside they are what they hold."""
    before, _State.levels = _State.levels, tuple(levels)
    try:
        from soli.parallel.tensor.transforms import seen  # it is made of what stands here

        with seen() if levels else nullcontext():
            yield
        if written := [name for run in levels for x, version, name in run.lent if x._version != version]:
            what = "the model writes into a view of a tensor that is cut over ranks: it would write into a copy"
            raise on_all_ranks(what, got=f"in place, of what {written[0]} gave", fix="x[:, 0] = y in place of x[:, 0].copy_(y), or a new tensor")
    finally:
        for run in levels:
            run.lent.clear()
            run.calls = 0
        _State.levels = before


@contextmanager
def inside(levels: Sequence[Run], level: int) -> Iterator[None]:
    """As in a rule of a level: cuts that are asked for are its own."""
    before = _State.levels, _State.level
    _State.levels, _State.level = tuple(levels), level
    try:
        yield
    finally:
        _State.levels, _State.level = before


def levels() -> tuple[Run, ...]:
    """The axes along which tensors are cut now, outermost first."""
    return _State.levels


def ruling() -> bool:
    """Whether a rule is computing."""
    return _State.level >= 0


class Cut(Tensor):
    """A local part. `cuts` says of what, by the axis; a weight that is not decided, or a view of it, has none yet."""

    cuts: dict[str, Split]
    view_of: tuple[CutParameter, tuple[int, ...]] | None  # the weight, and which of its dims each dim is

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = marked(self.detach().clone(), self.cuts)
        memo[id(self)] = copied
        return copied

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """It is given a gradient that is cut as the tensor is."""
        from soli.parallel.tensor.transforms import of_cut  # it is made of what stands here

        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.register_hook(self, of_cut(hook, self.cuts))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class CutParameter(nn.Parameter):
    """A parameter that is cut, or, while a layout is sought, may be (`cuts` is empty until it is). A copy of it is not."""

    cuts: dict[str, Split]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            copied = super().__deepcopy__(memo)
            copied.cuts = {}
            return copied

    __torch_function__ = Cut.__torch_function__


def become_cut(param: nn.Parameter, cuts: dict[str, Split]) -> None:
    """Make a parameter that holds this rank's part one that is cut."""
    param.__class__ = CutParameter
    param.cuts = cuts  # type: ignore[attr-defined]


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Answer a function of torch that was called with a cut tensor: by the next level that cuts one of them."""
    levels, before = outside = _State.levels, _State.level
    with torch._C.DisableTorchFunctionSubclass():
        if not levels:
            from soli.parallel.tensor import parts  # it is made of what stands here

            return parts.answer(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if before < 0 and levels:
            follow_back((*args, *kwargs.values()))
        if before < 0 and len(levels) > 1:
            if levels[-1].cube is not None and (done := _by_cube(levels, func, name, args, kwargs)) is not None:
                return done
            if name in INNERMOST_FIRST:
                args, kwargs = tree_map(_cut_once, (args, kwargs))
                levels = levels[::-1]
        level, last = before + 1, len(levels) - 1
        while level < last and levels[level].finder is None and not _reads_cut(levels[level], args, kwargs):
            level += 1
        if level > last:
            return func(*args, **kwargs)
        _State.levels, _State.level = levels, level
        try:
            if level == last:
                return _answer(levels[level], func, name, args, kwargs)
            with torch._C._EnableTorchFunction():
                return _answer(levels[level], func, name, args, kwargs)
        finally:
            _State.levels, _State.level = outside


def _by_cube(levels: tuple[Run, ...], func: Any, name: str, args: tuple, kwargs: dict) -> Tensor | None:
    from soli.parallel.tensor import threed  # it is made of what stands here

    return threed.product(levels, func, name, args, kwargs) if name in threed.PRODUCTS else None


INNERMOST_FIRST = {"scaled_dot_product_attention"}
"""Functions whose rule for a cut sequence wants what this rank has, its own heads alone: it is asked last."""


def _cut_once(x: Any) -> Any:
    """A tensor of which no dim is cut by two levels, so that it is the same which level comes first."""
    if type(x) is not Cut:
        return x
    dims = [x.cuts[run.axis.name].dim for run in _State.levels if run.axis.name in x.cuts]
    for level in reversed(range(len(_State.levels))):
        name = _State.levels[level].axis.name
        if name in x.cuts and dims.count(x.cuts[name].dim) > 1:
            dims.remove(x.cuts[name].dim)
            x = whole_at(x, level)
    return x


def _reads_cut(run: Run, args: tuple, kwargs: dict) -> bool:
    return any_cut(args, run.axis.name) or bool(kwargs and any_cut(kwargs.values(), run.axis.name))


def _answer(run: Run, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    from soli.parallel.tensor import rules  # they are made of what stands here

    if not args:
        args, kwargs = rules.placed(name, kwargs)
    try:
        if run.hidden and rules.is_of_one_way(func, name):
            if run.finder is not None:
                run.finder.read([x for x in tree_leaves(args) if type(x) is CutParameter], name_of(func))
            refuse_grids(run, name_of(func), args)
        if torch._C._functorch.maybe_current_level() is not None and _reads_cut(run, args, kwargs):
            _refuse_transforms(run, func, args, kwargs)
        if name in rules.ALWAYS:
            return rules.ALWAYS[name](run, func, args, kwargs)
        if not _reads_cut(run, args, kwargs):
            if run.finder is None:
                return func(*args, **kwargs)
            if rules.written_in_python(func) and (rule := rules.rule_of(func, name)) is not None:
                return rule(run, func, args, kwargs)  # its lines may hold products
            return run.finder.follow(func(*args, **kwargs), name, args)
        rule = rules.rule_of(func, name)
        return rule(run, func, args, kwargs) if rule is not None else unknown(run, func, args, kwargs)
    except Misfit as misfit:
        return misfitted(run, misfit, func, args, kwargs)


def _refuse_transforms(run: Run, func: Any, args: tuple, kwargs: dict) -> None:
    """What torch.func.vmap hands out forgets how it was cut, and what it calls cannot send."""
    if run.finder is not None:
        unknown(run, func, args, kwargs)
    what = "torch.func transforms a function that computes with tensors cut over ranks"
    got = f"{name_of(func)} of a tensor that is cut along {run.axis.name}"
    fix = "write the function for the whole batch (einsum, a loop), or run without " + run.axis.name
    raise SoliError(what, got=got, allowed="vmap, grad and the like of whole tensors", fix=fix)


def refuse_grids(run: Run, name: str, args: Sequence[Any]) -> None:
    """A weight that a grid has cut both ways is for products and lookups alone."""
    leaves = [x for x in tree_leaves(args) if type(x) is CutParameter]
    if found := [x.cuts for x in leaves if DEPTH in x.cuts or (run.row is not None and ROW in x.cuts)]:
        everyone = origins_of(split for cuts in found for split in cuts.values())
        raise Misfit(everyone, f"{name} reads a weight that a grid has cut both ways", flat=True)


def any_cut(values: Any, axis: str) -> bool:
    """Whether one of them is cut along the axis."""
    for x in values:
        if type(x) in (Cut, CutParameter):
            if axis in x.cuts:
                return True
        elif type(x) in (list, tuple) and any_cut(x, axis):
            return True
    return False


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """For rules: a function on logical tensors (inside a rule torch's own calls see local parts)."""
    with inside(_State.levels, _State.level - 1):
        return dispatch(func, args, kwargs)


def body(function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """For rules: a function written in Python, its own lines on logical tensors."""
    with inside(_State.levels, _State.level - 1), torch._C._EnableTorchFunction():
        return function(*args, **kwargs)


def misfitted(run: Run, misfit: Misfit, func: Any, args: tuple, kwargs: dict) -> Any:
    """The layout gives way while it is sought; afterwards the tensors are made whole."""
    if run.finder is not None:
        cuts = [x for x in tree_leaves((args, kwargs)) if split_of(x) is not None]
        if run.finder.answer(misfit, name_of(func), cuts):
            return call(func, *args, **kwargs)
    elif misfit.flat:
        raise SoliError(f"{misfit.why}, which it did not on the first batch", got=", ".join(sorted(misfit.origins)), fix='say so before: roles={"that weight": "replicated"}')
    else:
        note(run, f"{name_of(func)}: {misfit.why}; it computes on whole tensors")
    into = tree_leaves(kwargs.get("out", args[0] if args and in_place(func) else ()))  # several of torch._foreach_mul_
    totals = {id(x): (x, whole(run, x).clone(), split) for x in into if (split := split_of(x)) is not None}
    args, kwargs = tree_map(lambda x: totals[id(x)][1] if id(x) in totals else whole(run, x), (args, kwargs))
    found = func(*args, **kwargs)
    if run.finder is None and not in_place(func) and not totals:
        views = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x._is_view()]
        run.lent += [(x, x._version, name_of(func)) for x in views]
    for target, total, split in totals.values():
        target.copy_(part_of(run, total, split))  # what was written is this rank's part of it
    targets = {id(total): target for target, total, _ in totals.values()}
    return tree_map(lambda x: targets.get(id(x), x), found)


def unknown(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    """A function without a rule."""
    splits = [s for x in tree_leaves((args, kwargs)) if (s := split_of(x)) is not None]
    if not splits:
        return func(*args, **kwargs)
    raise Misfit(origins_of(splits), "nothing is known of it on cut tensors")


def note(run: Run, text: str) -> None:
    if text not in run.noted:
        run.noted.add(text)
        events.note(text, shown=run.axis.ranks[0] == 0 and run.axis.index == 0)


# --- one tensor -----------------------------------------------------------------------------------------


def split_of(x: Any) -> Split | None:
    """How the level whose rule is computing cuts a tensor."""
    return None if type(x) not in (Cut, CutParameter) else x.cuts.get(_State.levels[_State.level].axis.name)


def blamed(values: Iterable[Any]) -> frozenset[str]:
    """The parameters whose layout led to the cuts of these."""
    return origins_of(s for x in values if (s := split_of(x)) is not None)


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The logical shape, to the level whose rule is computing; outside of rules, the model's."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = list(x.shape)
    if type(x) in (Cut, CutParameter) and x.cuts:  # type: ignore[attr-defined]
        if type(x) is CutParameter:
            for name in (DEPTH, ROW):
                if name in x.cuts:
                    shape[x.cuts[name].dim] = x.cuts[name].size
        for run in reversed(_State.levels[max(_State.level, 0) :]):
            split = x.cuts.get(run.axis.name)  # type: ignore[attr-defined]
            if split is not None:
                shape[split.dim] = split.size
    return tuple(shape)


def cut(x: Tensor, split: Split) -> Tensor:
    """Mark what this rank has as a part."""
    if type(x) in (Cut, CutParameter):
        if split_of(x) == split:
            return x  # an operation that returned its argument
        if split_of(x) is not None or type(x) is CutParameter:
            below = deeper(x)
            with torch._C.DisableTorchFunctionSubclass():
                x = marked(x.view_as(x), below)
    return marked(x, {**(x.cuts if type(x) is Cut else {}), _State.levels[_State.level].axis.name: split})


def marked(x: Tensor, cuts: dict[str, Split]) -> Tensor:
    """A tensor that is cut so; the same object. Nothing cut: a plain tensor."""
    if not cuts and type(x) is Tensor:
        return x
    x.__class__ = Cut
    x.cuts = cuts  # type: ignore[attr-defined]
    return x


def plain(x: Tensor) -> Tensor:
    """What this rank has, as a tensor of torch's. A function of autograd's that saves it finds no cut tensor later."""
    with torch._C.DisableTorchFunctionSubclass():
        follow_back((x,))
        return x.view_as(x) if type(x) is Cut else x


def follow_back(given: Iterable[Any]) -> None:
    """Where a result of the program's own autograd functions is among them, the function's backward gets a gradient that is cut as it is."""
    for x in given:
        if type(x) in (list, tuple):
            follow_back(x)
        elif type(x) is Cut and isinstance(x.grad_fn, BackwardCFunction):
            number, known = x.grad_fn._sequence_nr(), x.__dict__.get("_followed")
            if number != known and type(x.grad_fn)._forward_cls.__module__.split(".")[0] not in ("soli", "torch"):
                x._followed = number
                cuts = x.cuts
                Tensor.register_hook(x, lambda g, cuts=cuts: g if g is None else marked(g.view_as(g), cuts))


def deeper(x: Tensor) -> dict[str, Split]:
    """How the levels below this one cut a tensor."""
    if type(x) not in (Cut, CutParameter):
        return {}
    cuts: dict[str, Split] = x.cuts  # type: ignore[attr-defined]
    return {run.axis.name: cuts[run.axis.name] for run in _State.levels[_State.level + 1 :] if run.axis.name in cuts}


def across(move: Callable[..., Any], x: Tensor, *given: Any, **more: Any) -> Any:
    """A move over this level's axis, of what this rank has. What deeper levels cut stays cut, but not along the same dim."""
    below = deeper(x)
    for split in given:
        if isinstance(split, Split) and any(s.dim == split.dim for s in below.values()):
            for level in reversed(range(_State.level + 1, len(_State.levels))):
                found = below.get(_State.levels[level].axis.name)
                if found is not None and found.dim == split.dim:
                    x = whole_at(x, level)
            below = deeper(x)
    with torch._C.DisableTorchFunctionSubclass():
        result = move(x, *given, **more)
    return marked(result, below)


def whole_at(x: Tensor, level: int) -> Tensor:
    """A tensor made whole at a deeper level; what other levels cut stays cut."""
    run = _State.levels[level]
    others = {name: split for name, split in x.cuts.items() if name != run.axis.name}  # type: ignore[attr-defined]
    with inside(_State.levels, level), torch._C.DisableTorchFunctionSubclass():
        follow_back((x,))
        result = whole(run, x)
        return marked(result.view_as(result), others)


def whole(run: Run, x: Any) -> Any:
    """The whole value, for a computation that every rank does alike."""
    split = split_of(x)
    if split is None:
        return x
    if run.axis.size == 1:
        return x.view_as(x) if type(x) is Cut else x
    move = moves.gather_both if run.partial else moves.gather
    # it outlives the step, and what is gathered of it belongs to one backward
    if isinstance(x, nn.Parameter):
        return across(move, x, split, run.axis)
    known = x.__dict__.setdefault("_whole", {})
    state = version_of(x), x.requires_grad and torch.is_grad_enabled()
    if run.axis.name not in known or known[run.axis.name][0] != state:
        known[run.axis.name] = state, across(move, x, split, run.axis)
    return known[run.axis.name][1]


def added(run: Run, x: Tensor, *, fresh: bool = False) -> Tensor:
    """The sum over the axis of what every rank has. `fresh`: nobody else has x, which may be summed in place."""
    return across(moves.reduce_both, x, run.axis) if run.partial else across(moves.reduce, x, run.axis, fresh=fresh)


def entered(run: Run, x: Tensor) -> Tensor:
    """A whole tensor that cut computations read. Asked again it is the same one, so that gradients sum once."""
    with torch._C.DisableTorchFunctionSubclass():
        if run.axis.size == 1 or run.partial or not x.requires_grad or not torch.is_grad_enabled() or hasattr(x, "_is_entered"):
            return x
    if isinstance(x, nn.Parameter):
        if run.reducer is None or x._backward_hooks:  # which are to see the gradient
            return across(moves.enter, x, run.axis)
        return across(moves.enter_parameter, x, run.reducer)
    return read_of(x) if was_read(x) else keep_read(x, across(moves.enter, x, run.axis), is_cut=False)


def shared(run: Run, x: Tensor) -> Tensor:
    """The whole of a tensor that is cut along the sequence, for cut computations to read."""
    split = split_of(x)
    assert split is not None, "it is cut"
    if run.axis.size == 1:
        return x.view_as(x)
    if run.partial:
        return whole(run, x)
    return read_of(x) if was_read(x) else keep_read(x, across(moves.share, x, split, run.axis), is_cut=True)


def part_of(run: Run, x: Tensor, split: Split) -> Tensor:
    """This rank's part of a whole tensor, as `split` cuts its dim. A dim of size 1 is broadcast, not cut."""
    if shape_of(x)[split.dim] == 1 and split.size != 1:
        return entered(run, x)
    return across(moves.own_part if run.partial else moves.pick, x, split, run.axis)
