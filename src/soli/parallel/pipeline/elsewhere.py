"""Parameters of other stages: shapes on the meta device, which write into nothing that is here.

torch (2.11 to 2.13) writes nothing, and says nothing, where a tensor is changed in place by one on the meta device (`here.add_(there)`): an average
of weights, kept by a program between steps, would stay as it began.
"""

from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from soli.core.errors import SoliError
from soli.core.functions import in_place, name_of


class _Away:
    """`of`: the name of a parameter, and where it is."""

    __slots__ = ()  # so that a parameter can become one
    of: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = [one for one in types if one not in (*KINDS, Tensor)]
        if any(one.__torch_function__ is not torch._C._disabled_torch_function_impl for one in others):
            return NotImplemented  # a cut tensor's rules, which look at shapes
        with torch._C.DisableTorchFunctionSubclass():
            return _answer(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise _lacking("a weight of another stage is written to a file", self.of)


class Elsewhere(_Away, Tensor):
    """What was computed from a parameter of another stage."""


class ElsewhereParameter(_Away, nn.Parameter):
    """A parameter of another stage."""


KINDS = (Elsewhere, ElsewhereParameter)


class _Drawing(TorchDispatchMode):
    """Numbers that are drawn for what is not here are drawn, and dropped: what is drawn next is then the same on every rank."""

    device = torch.device("cpu")  # of what is here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            place = lambda x: self.device if isinstance(x, torch.device) else x
            here = lambda x: torch.full_like(x, 0.5, device=self.device) if isinstance(x, Tensor) else place(x)
            func(*tree_map(here, args), **tree_map(here, kwargs or {}))
        return func(*args, **kwargs or {})


def elsewhere(param: nn.Parameter, of: str) -> nn.Parameter:
    """A parameter without values like this one."""
    _Drawing.device = _Drawing.device if param.is_meta else param.device
    nothing = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    nothing.__class__ = ElsewhereParameter
    nothing.of = of  # type: ignore[attr-defined]
    return nothing


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    named = [x.of for x in given if type(x) in KINDS and hasattr(x, "of")]
    written = tree_leaves(args[:1]) if in_place(func) or name_of(func).startswith("_foreach") else []
    what = f"{name_of(func)} is called with a weight of another stage"
    if named and any(isinstance(x, Tensor) and not x.is_meta and x.numel() for x in written):
        raise _lacking(f"{what}, and would write nothing", named[0])
    try:
        with _Drawing():
            out = func(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        alone = all(x.is_meta for x in given)
        if not named or (alone and "meta" not in str(error)):  # a mistake of the program's own
            raise
        raise _lacking(what + (", and its values are not here" if alone else " beside what is here"), named[0]) from error
    return tree_map(lambda x: _marked(x, named), out) if named else out


def _marked(x: Any, named: list[str]) -> Any:
    if type(x) is not Tensor or not x.is_meta:
        return x
    x = x.as_subclass(Elsewhere)
    x.of = named[0]
    return x


def _lacking(what: str, of: str) -> SoliError:
    fix = "use engine.global_state_dict(), which every rank calls, or engine.save(); an average that trains on needs pp=1"
    return SoliError(what, got=of, allowed="weights of one stage together: a rank has those of its own stages", fix=fix)
