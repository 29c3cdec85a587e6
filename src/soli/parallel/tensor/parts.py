"""A weight that is cut, outside of a forward: between steps the program has this rank's part of it, as torch has a tensor.

What is done element by element, or along dims that are not cut, is as right on a part as on the whole. All else (a norm, a product,
an index) would be of other numbers than the program means, and is refused; so it is of what was computed of a part, which is one too.
"""

from collections import ChainMap
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from soli.core.axes import TP
from soli.core.errors import SoliError
from soli.core.functions import in_place, name_of, tensors_in
from soli.parallel.generators import hashed
from soli.parallel.tensor import pointwise, shapes
from soli.parallel.tensor.cut import CutParameter
from soli.parallel.tensor.pointwise import NAMES
from soli.parallel.tensor.rules import local, rule_of
from soli.parallel.tensor.split import Split, origins_of


class WeightPart(Tensor):
    """What was computed between steps of weights that are cut: this rank's part. Copied or saved it is a tensor like any other."""

    cuts: dict[Any, Split]  # as a weight has them
    updating = False  # inside an optimizer's step: True

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    __torch_function__ = CutParameter.__torch_function__


_TRIED: set[Any] = set()
"""Functions that were found to be by elements: optimizers call a thousand a step."""


def updating() -> Any:
    """A context: what is computed of parts is the optimizer's own, and is not marked."""
    return patch.object(WeightPart, "updating", True)


BESIDE = dict[str, list[int]]()
"""What the program put beside parts since ranks last compared it, by function and weight: marks of some elements. What was made by the size of a
part (`torch.randn(p.shape)`, a piece of a vector cut by `p.numel()`) is alike on every rank, where parts of the whole's would differ."""
SOME = 64
BY_ELEMENTS = (local, pointwise.pointwise, pointwise.cast, pointwise.where, shapes.cat, shapes.stack, shapes.repeat)
"""Rules of functions of which parts give parts: each element of the result is of one element of an argument."""


ASKED = {"size", "stride", "numel", "nelement", "__len__", "dim", *NAMES["shapes"]}
"""Functions that ask of a tensor its shape or type alone."""


def _along(name: str, args: tuple, kwargs: dict, count: int) -> set[int] | None:
    """The dims along which elements are chosen, or come together. None: it does not say."""
    if name in ("__getitem__", "__setitem__"):
        index = [i for i in (args[1] if isinstance(args[1], tuple) else (args[1],)) if i is not None]
        for d in [d for d, i in enumerate(index) if i is ...]:
            index[d : d + 1] = [slice(None)] * (count - len(index) + 1)
        each = lambda i: isinstance(i, slice) and i == slice(None)
        mask = lambda i: getattr(i, "dtype", None) is torch.bool and i.dim() == count
        return {d for d, i in enumerate(index) if not each(i) and not mask(i)}
    usual = 0 if name in NAMES["dim_at"] and name not in ("norm", "normalize", "vector_norm") else None
    place = NAMES["dim_at"].get(name, int(name in (*NAMES["reductions"], *NAMES["along"], "softmax", "log_softmax", "flip")))
    dims = kwargs.get("dim", args[place] if 0 < place < len(args) else usual)
    return {d % count for d in dims} if isinstance(dims, tuple | list) else {dims % count} if type(dims) is int else None


def answer(func: Any, args: tuple, kwargs: dict) -> Any:
    """Outside of a forward, where a weight is what this rank has of it. Refused where others' elements would belong to the result."""
    if WeightPart.updating and func in _TRIED:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    by_place = name in (*NAMES["by_place"], *NAMES["drawn"])
    by_elements = not by_place and rule_of(func, name.removeprefix("_foreach_")) in BY_ELEMENTS
    if by_elements and WeightPart.updating:
        _TRIED.add(func)
        return func(*args, **kwargs)
    given = tensors_in((args, kwargs))
    if any(map(_is_absent, given)) and not (rule_of(func, name) is local or name in ASKED):
        return _of_absent(func, args, kwargs, given)
    parts: list[Any] = [x for x in given if type(x) in (WeightPart, CutParameter) and getattr(x, "cuts", None)]
    if not parts or torch._C._current_autograd_node() is not None:  # or a copy, which does not know how it is cut
        return func(*args, **kwargs)
    at_once = name.startswith("_foreach_")  # lists have at each place what belongs together
    groups = list(zip(*(x for x in args if isinstance(x, list | tuple)), strict=False)) if at_once else [(*args, *kwargs.values())]
    whole = _whole_beside(groups, name)
    if by_elements and whole is None:
        _note_beside(func, groups)
        result = func(*args, **kwargs)
        for one, group in zip(result, groups, strict=True) if at_once and result is not None else [(result, given)]:
            _marked(one, name_of(func), given, _cut_of(group))
        return result
    along, cut_along = _along(name, args, kwargs, parts[0].dim()), {split.dim for split in parts[0].cuts.values()}
    apart = not by_place if along is None else not along & cut_along  # from the dims that are cut, or perhaps
    if whole is None and apart:
        views = lambda x: any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in given)
        result = func(*args, **kwargs)
        # what is no view of what is given was computed of all that the rank has
        if along is not None or all(map(views, tensors_in((result,)))):
            return result if WeightPart.updating else _marked(result, "", given, parts)
    raise _refused(func, parts[0].cuts, cut_along, whole, drawn=name in NAMES["drawn"])


def _refused(func: Any, cuts: dict[Any, Split], along: set[int], whole: Tensor | None, drawn: bool) -> SoliError:
    what = f"{'numbers are drawn into a weight' if drawn else 'a weight is computed with'} between steps, of which each rank has a part"
    beside = "" if whole is None else f", with what is of the whole one's size, {tuple(whole.shape)}"
    got = f"{name_of(func)} of {', '.join(sorted(origins_of(cuts.values())))}, which is cut along dim {', '.join(map(str, sorted(along)))}{beside}"
    allowed = "draws before soli.parallelize, or into weights that are whole" if drawn else "what is done element by element, of parts alone, or along other dims"
    return SoliError(what, got=got, allowed=allowed, fix='engine.global_state_dict() has it whole, on every rank; to write into it, roles={"that weight": "replicated"}')


def _is_absent(x: Any) -> bool:
    """Whether it is a weight under zero=3, or a view of one, that has one number in the place of all (units.py)."""
    return type(x) in (WeightPart, CutParameter) and x.numel() > 1 and x.untyped_storage().nbytes() == x.element_size()


def _of_absent(func: Any, args: tuple, kwargs: dict, given: list[Any]) -> Any:
    """A view of a weight whose values are on no rank now; what computes with it, or writes into it, is refused."""
    of = next((x.of for x in given if hasattr(x, "of")), "a weight")
    result = None if in_place(func) else func(*args, **kwargs)
    found: list[Any] = tensors_in((result,))
    for x in found:
        if type(x) is Tensor:
            x.__class__, x.cuts, x.of = WeightPart, {}, of  # type: ignore[attr-defined]
    if all(map(_is_absent, found)) and (found or func.__name__ == "__get__"):
        return result
    what = "a weight is computed with, or written into, between steps, and under zero=3 no rank has its values then"
    fix = "engine.global_state_dict() has them, on every rank; to write into weights, zero=2 or less"
    raise SoliError(what, got=f"{name_of(func)} of {of}", allowed="questions of its shape and type", fix=fix)


def _cut_of(given: Any) -> list[Any]:
    """The parts among them."""
    return [x for x in given if getattr(x, "cuts", None)]


def _whole_beside(groups: list[tuple], name: str) -> Tensor | None:
    """A tensor beside parts that was made for the whole of one."""
    for group in groups:
        parts = _cut_of(group)
        found = next((x for x in group if isinstance(x, Tensor) and _is_for_all(x, parts, name)), None)
        if found is not None:
            return found
    return None


def _is_for_all(x: Tensor, parts: list[Any], name: str) -> bool:
    """Whether a tensor that is no part was made for the whole of one: as long along a dim that is cut, or now given its shape."""
    if not parts or getattr(x, "cuts", None):
        return False
    reshaped = name in ("view_as", "reshape_as") and x.shape != parts[0].shape
    pairs = [(split.dim - part.dim(), split.size, part.shape) for part in parts for split in part.cuts.values()]
    return reshaped or any(-d <= x.dim() and x.shape[d] == size != shape[d] for d, size, shape in pairs)


def _note_beside(func: Any, groups: list[tuple]) -> None:
    """Mark what is no part and varies along the dims that are cut: what is the same along them is so on every rank too."""
    for group in groups:
        plain = [x for x in group if isinstance(x, Tensor) and x.dim() and not getattr(x, "cuts", None)]
        for part, x in product(_cut_of(group)[:1], plain):
            # what is cut over other axes alone (a grid's rows, a cube's depth) is alike along this one; a view's cuts have no axis
            at = {split.dim - part.dim() for over, split in part.cuts.items() if over in (TP, split.dim)}
            marks = BESIDE.setdefault(f"{name_of(func)} of {', '.join(sorted(origins_of(part.cuts.values())))}", [])
            if at and all(-d <= x.dim() and x.shape[d] == part.shape[d] and bool((x != x.narrow(d, 0, 1)).any()) for d in at):
                some, length = x.detach().flatten()[:SOME].tolist(), 1 << min(x.numel(), SOME).bit_length() - 1
                marks += [hashed(some[:n]) for n in (length, length // 2) if len(set(some[:n])) > 1]  # one at least is of as many on each rank


def _marked(result: Any, name: str, given: list[Tensor], parts: list[Any]) -> Any:
    """What a function made of parts is one: cut as those of its shape are, or, where it has another or is a view, perhaps along any dim. So is
    a new tensor of its size (nn.init.orthogonal_ makes one to draw into)."""
    for x in tensors_in((result,)):
        if parts and type(x) is Tensor and name not in ("grad", "_grad") and (name[:3] != "new" or x.numel() == parts[0].numel()) and all(x is not y for y in given):
            x.__class__, any_of = WeightPart, next(iter(parts[0].cuts.values()))
            same = [part.cuts for part in parts if part.shape == x.shape and name]
            x.cuts = dict(ChainMap(*same)) if same else {d: any_of.at(d) for d in range(x.dim())}  # type: ignore[attr-defined]
    return result
