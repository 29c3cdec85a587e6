"""Deep copies of modules, with functions among their attributes that reach into the module itself: torch's models have such; and of optimizers.

`copy.deepcopy` leaves a function as it is: `self.mlp_forward = lambda x: m.proj(m.act(m.fc(x)))` (minGPT's blocks) in a copy would
compute with the weights of the original.
"""

import copy
from collections import OrderedDict
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from soli.core.functions import tensors_in

T = TypeVar("T")


def deep(x: T, memo: dict[int, Any] | None = None) -> T:
    """`copy.deepcopy(x, memo)`, whose modules' functions have the copies of what they close over."""
    memo = {} if memo is None else memo
    for module in [m for one in (x if isinstance(x, tuple) else (x,)) if isinstance(one, nn.Module) for m in one.modules()]:  # a result that is kept (weight_norm's, a loss of a block) has no copy with its graph
        memo.update({id(t): t.detach().clone() for t in tensors_in(vars(module).values()) if not isinstance(t, nn.Parameter) and not t.is_leaf})
    made = copy.deepcopy(x, memo)
    for module in [one for one in memo.values() if isinstance(one, nn.Module)]:
        for name, value in vars(module).items():
            vars(module)[name] = _rebound(value, memo)
    return made


def optimizer(x: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A deep copy with all attributes, of which torch's own has three; without hooks, and without a step of its own, which would step `x`."""
    made = memo[id(x)] = object.__new__(type(x))
    for name, value in vars(x).items():
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            vars(made)[name] = optimizer(value, memo)
        elif name != "step":
            try:
                vars(made)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
            except TypeError:  # a lock, a file, a generator: what has no copy is the same
                vars(made)[name] = value
    return made


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """A function, or a list or dict of them, with copies in its closure; anything else as it is."""
    if type(value) in (list, dict, OrderedDict):  # hooks are in one of these
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        some = {key: _rebound(one, memo) for key, one in inner.items()}
        if all(some[key] is inner[key] for key in inner):
            return value
        if isinstance(value, dict):
            value.update(some)  # the same dict: handles of hooks point at it
            return value
        return list(some.values())
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(_cell(cell, memo) for cell in value.__closure__)
    if all(a is b for a, b in zip(cells, value.__closure__, strict=True)):
        return value
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__, made.__dict__ = value.__kwdefaults__, dict(value.__dict__)
    return made


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:
        return cell  # not set yet
    if id(held) not in memo or not isinstance(held, nn.Module | Tensor | list | dict):
        return cell
    return memo.setdefault(id(cell), CellType(memo[id(held)]))  # functions that share a variable go on to
