"""What a model keeps, in buffers and attributes, and whether a forward changes it: once a step, or by the rows that it sees.

Batch statistics, moving averages, the vectors of a spectral norm: one forward over the whole batch changes them once. A
plan runs several, over parts of the batch, on ranks that would each keep something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.errors import SoliError, listed
from soli.core.plan import Plan

MOST = 10_000
"""Elements of a list or dict that is looked into."""


class Held:
    """A list, dict, deque or set, and what it held: copies of tensors' values, and all else as it is."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.keys = list(owner) if isinstance(owner, dict) else []
        self.inside = [(x, _held(x)) for x in (owner.values() if isinstance(owner, dict) else owner)]

    def same(self, other: Held) -> bool:
        """Whether both held the same: tensors of the same values, in the same order, under the same keys."""
        if type(self.owner) is not type(other.owner) or len(self.inside) != len(other.inside):
            return False
        if isinstance(self.owner, set):
            return {x for x, _ in self.inside} == {x for x, _ in other.inside}
        pairs = zip(self.inside, other.inside, strict=True)
        return all(map(same, self.keys, other.keys)) and all(same(a, b) for (_, a), (_, b) in pairs)

    def give(self) -> Any:
        """The same object, with the same objects inside, and in its tensors the values that they had."""
        for x, before in self.inside:
            if isinstance(before, Held):
                before.give()
            elif isinstance(before, Tensor) and isinstance(x, Tensor) and not same(x, before):
                with torch.no_grad():
                    x.copy_(before)
        objects = [x for x, _ in self.inside]
        if isinstance(self.owner, list):
            self.owner[:] = objects
        else:
            self.owner.clear()
            (self.owner.extend if isinstance(self.owner, deque) else self.owner.update)(
                zip(self.keys, objects, strict=True) if isinstance(self.owner, dict) else objects
            )
        return self.owner


def _held(x: Any) -> Any:
    """What is remembered of an object in a list: of a tensor its values. Weights are no state, and another stage's tensors have none."""
    if isinstance(x, Tensor):
        return x if isinstance(x, nn.Parameter) or x.is_meta else x.detach().clone()
    return Held(x) if _holds(x) else x


def _holds(x: Any) -> bool:
    return isinstance(x, list | dict | deque | set) and len(x) <= MOST


Value = Tensor | float | None | tuple[Tensor, ...] | Held  # an LSTM's state is a pair
_OF_TORCH = frozenset(vars(nn.Module()))


class Snapshot(dict[str, Value]):
    """Values by name, and the hooks that each module had: transformers' models put on some in their first forward."""

    hooks: dict[nn.Module, list[dict[int, Any]]]

    def __or__(self, other: dict[str, Value]) -> Snapshot:  # type: ignore[override]
        made = Snapshot({**self, **other})
        made.hooks = self.hooks
        return made


def values(model: nn.Module, weights: Collection[str] = ()) -> Snapshot:
    """Copies of all buffers, of the numbers, tensors, lists and dicts that modules have in attributes, and of some parameters."""
    named = ((name, param) for name, param in model.named_parameters() if name in weights)
    found = Snapshot({name: _copy(value) for name, value in (*_named(model), *named)})
    found.hooks = {module: [hooks.copy() for hooks in _hooks(module)] for module in model.modules()}
    return found


def changed(model: nn.Module, before: dict[str, Value]) -> dict[str, Value]:
    """Those that have other values now, with these."""
    now = values(model, [name for name, _ in model.named_parameters() if name in before])
    return {name: value for name, value in now.items() if name not in before or not same(before[name], value)}


def in_state(model: nn.Module, values: dict[str, Value]) -> dict[str, Value]:
    """Those of the values that are in buffers and parameters, and in no attribute."""
    state = {name for name, _ in (*model.named_buffers(), *model.named_parameters())}
    return {name: value for name, value in values.items() if name in state}


def restore(model: nn.Module, before: Snapshot, tensors: bool = True) -> None:
    """Give buffers and attributes the values that they had, and modules their hooks. Buffers that are new, or of another shape, stay;
    attributes that are new go. What modules have that were not there, stays. `tensors=False`: tensors in attributes stay."""
    for module, known in before.hooks.items():
        for hooks, had in zip(_hooks(module), known, strict=True):
            if hooks.keys() != had.keys():
                hooks.clear()
                hooks.update(had)
    with torch.no_grad():
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            old = before.get(name)
            if isinstance(old, Tensor) and old.shape == tensor.shape:
                tensor.copy_(old)
    for path, module in model.named_modules():
        for key, value in _attributes(module) if module in before.hooks else ():
            name = f"{path}.{key}".lstrip(".")
            if (isinstance(value, Tensor | tuple) or _holds(value)) and not tensors:
                continue
            if name not in before:
                del vars(module)[key]
            elif not same(before[name], value):
                vars(module)[key] = _copy(before[name])


@contextmanager
def unchanged(model: nn.Module, tensors: bool = True) -> Iterator[None]:
    """What is kept is as before afterwards. `tensors=False`: but for tensors in attributes."""
    before = values(model)
    try:
        yield
    finally:
        restore(model, before, tensors)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors in attributes, themselves."""
    yield from ((name, value) for name, value in _named(model) if isinstance(value, Tensor) and not value.is_meta)


def shift(model: nn.Module, names: Collection[str]) -> None:
    """Give floating-point ones of those other values, near by."""
    with torch.no_grad():
        for name, tensor in tensors(model):
            if name in names and tensor.is_floating_point():
                tensor.add_(0.01 * (1 + tensor.abs()))


def _named(model: nn.Module) -> Iterator[tuple[str, Value]]:
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, value in _attributes(module):
            yield f"{path}.{key}".lstrip("."), value


def _attributes(module: nn.Module) -> list[tuple[str, Value]]:
    """Without what stands for a value of another stage."""
    return [
        (key, value)
        for key, value in vars(module).items()
        if key not in _OF_TORCH and (isinstance(value, int | float | NoneType) or _holds(value) or _whole(value))
    ]


def _whole(value: Any) -> bool:
    """A tensor with values, or a plain tuple of them."""
    if type(value) is tuple and value:
        return all(isinstance(one, Tensor) and not one.is_meta for one in value)
    return isinstance(value, Tensor) and not value.is_meta


def _hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def _copy(value: Any) -> Value:
    """Of an attribute; of what was copied before the attribute, as it was."""
    if isinstance(value, Held):
        return value.give()
    if _holds(value):
        return Held(value)
    if isinstance(value, tuple):
        return tuple(one.detach().clone() for one in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


@dataclass
class Changes:
    """What forwards changed, each beginning with the same values: over rows and their two parts from what was before any forward
    (`once`), and over the parts from what a forward over both left (`again`). `weights`: parameters that were changed."""

    weights: Collection[str]
    once: list[dict[str, Value]] = field(default_factory=list)
    again: list[dict[str, Value]] = field(default_factory=list)
    # whose values the first forward left as they were, and would not have left others: averages that begin as a copy
    begin_alike: list[str] = field(default_factory=list)

    def in_state(self, model: nn.Module) -> Changes:
        """The same without attributes."""
        once, again = ([in_state(model, found) for found in some] for some in (self.once, self.again))
        return Changes(self.weights, once, again, self.begin_alike)

    def explain(self, plan: Plan) -> None:
        """Raises SoliError where a plan would change what is kept otherwise than one forward over the batch does."""
        by_rows = sorted(_differing(self.once) | _differing(self.again))
        # Weights are changed by the tokens of a rank; what is computed of them for a buffer is of all ranks of cp.
        if plan.pieces == 1:
            by_rows = [name for name in by_rows if name in self.weights and plan.cp > 1]
        first = [*(self.again[0] if self.again else ()), *self.begin_alike]
        if by_rows:
            raise SoliError(
                "the forward changes what the model keeps by the rows that it sees: no part of a batch changes it as the "
                "whole does",
                got=listed(by_rows),
                allowed="buffers, attributes and weights that stay as they are, or change alike whatever the rows",
                fix="put the module in eval(), leave out max_norm= of embeddings, change what is kept between steps (of the "
                "loss's batch, alike on every rank), or run with dp=1, cp=1, tensor=1d and no microbatches",
            )
        if first and plan.runs > 1:
            raise SoliError(
                f"the forward changes what the model keeps, and {plan} runs it {plan.runs} times a step",
                got=listed(first),
                allowed="buffers and attributes that stay as they are where a step has microbatches or computes again",
                fix="put the module in eval(), change what is kept between steps, or run without accumulate, microbatches "
                "and recompute",
            )


def _differing(found: list[dict[str, Value]]) -> set[str]:
    """What was not changed alike by all of them."""
    if not found:
        return set()
    first, *others = found
    alike = {n for n in first if all(n in one and same(first[n], one[n]) for one in others)}
    return set().union(*found) - alike


def same(a: Any, b: Any) -> bool:
    """Whether two values as they were copied are the same; NaN is as NaN in tensors."""
    if a is b:
        return True
    if isinstance(a, Held) or isinstance(b, Held):
        return isinstance(a, Held) and isinstance(b, Held) and a.same(b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and not (a.is_meta or b.is_meta) and torch.equal(_number(a), _number(b))
    return type(a) is type(b) and isinstance(a, int | float | str) and a == b


def _number(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.detach()) if x.is_floating_point() else x.detach()
