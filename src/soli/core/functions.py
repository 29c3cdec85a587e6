"""What a function of torch is called, what it writes into, and which tensors it is given."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from soli.core.errors import SoliError

_QUESTIONS = ("__invert__", "__int__", "__index__", "__iter__", "__init__")


def name_of(func: Any) -> str:
    """Its name; of the getter of an attribute, the attribute's."""
    name = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__) if name == "__get__" else str(name)


def in_place(func: Any) -> bool:
    """Whether it writes into its first argument."""
    name = name_of(func)
    return name.startswith(("__set", "__i")) and name not in _QUESTIONS if name.startswith("__") else name.endswith("_")


def need_operator(func: Any) -> None:
    """SoliError for an operator that is given functions, whose operations nobody here would see."""
    if isinstance(func, HigherOrderOperator):
        what = "an operator of torch that is given functions is not followed"
        raise SoliError(what, got=func.name(), fix="F.scaled_dot_product_attention with a mask in place of flex_attention, torch.where or a Python loop in place of control flow")


def held(x: Tensor) -> Tensor:
    """What this rank has of a tensor, without a graph, and as a tensor of torch's own: a weight that is cut answers as a whole one's part."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach()


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Those among an operation's arguments or results, in order. torch's pytree takes five times as long, a fifth of a rehearsal."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation writes."""
    said = enumerate(func._schema.arguments)
    return tuple((at, a.name) for at, a in said if a.alias_info is not None and a.alias_info.is_write)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    return tensors_in(args[at] if at < len(args) else kwargs.get(name) for at, name in _writes(func))
