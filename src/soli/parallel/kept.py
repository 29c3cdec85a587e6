"""What a model keeps, in buffers and attributes, and whether a forward changes it: once a step, or by the rows that it sees.

Batch statistics, moving averages, the vectors of a spectral norm: one forward over the whole batch changes them once. A
plan runs several, over parts of the batch, on ranks that would each keep something else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.errors import SoliError, listed
from soli.core.plan import Plan

FOLLOWED = (list, dict, OrderedDict, defaultdict, Counter, deque, set)
"""Types that are looked into; of other ones, and of arrays and objects in these, it is not seen whether they change."""
MOST = 10_000
"""Elements, of all lists and dicts of an attribute, that are looked at; of the rest whether it is the same object."""


class Held:
    """A list, dict, deque or set, and what it held: of tensors, and of lists in it, what these held too; of all else which objects."""

    def __init__(self, owner: Any, seen: dict[int, Any] | None = None) -> None:
        self.owner, seen = owner, {} if seen is None else seen
        seen[id(owner)] = owner
        self.keys = list(owner) if isinstance(owner, dict) else []
        self.inside = [(x, _held(x, seen)) for x in (owner.values() if isinstance(owner, dict) else owner)]

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
        if self.same(Held(self.owner)):
            return self.owner
        objects = [_given(x, before) for x, before in self.inside]
        self.owner.clear()
        if isinstance(self.owner, dict):
            for key, x in zip(self.keys, objects, strict=True):
                self.owner[key] = x
        else:
            (self.owner.update if isinstance(self.owner, set) else self.owner.extend)(objects)
        return self.owner


def _held(x: Any, seen: dict[int, Any]) -> Any:
    """What is remembered of an object in a list: of a tensor its values, once. Weights are no state, and another stage's tensors have none."""
    if id(x) in seen or len(seen) > MOST:
        return x
    if _holds(x):
        return Held(x, seen)
    if isinstance(x, Tensor) and comparable(x) and not isinstance(x, nn.Parameter):
        seen[id(x)] = x
        return x.detach().clone()
    return x


def _given(x: Any, before: Any) -> Any:
    """An object as it was; a tensor that cannot be written into is replaced by one with its values."""
    if isinstance(before, Held):
        return before.give()
    if not isinstance(before, Tensor) or same(x, before):
        return x
    if x.shape != before.shape or x.is_inference() or expanded(x):
        return before.clone()
    with torch.no_grad():
        return x.copy_(before)


def entries(x: Any) -> dict[Any, Any] | None:
    """What lies in a list or a dict, by place or key, or in another object's attributes; of more than MOST nothing. None: nobody looks into it."""
    if isinstance(x, Tensor | nn.Module | type | ModuleType):
        return None
    found: dict[Any, Any] | None = getattr(x, "__dict__", {} if isinstance(x, Iterator) else None)
    if isinstance(x, (tuple, *FOLLOWED)):
        found = x if isinstance(x, dict) else dict(enumerate(x))
    return {} if found is not None and len(found) > MOST else found


def _holds(x: Any) -> bool:
    return type(x) in FOLLOWED and len(x) <= MOST


def comparable(x: Tensor) -> bool:
    """Whether it has values here that can be compared: no sparse one, none of 8-bit floats, none of another stage."""
    plain = x.layout == torch.strided and not x.is_nested and not x.is_meta
    return plain and (x.dtype.itemsize > 1 or x.dtype in (torch.bool, torch.uint8, torch.int8))


def extent(x: Tensor) -> tuple[int, int]:
    """The first byte in the storage, and the one after the last."""
    begin = int(x.storage_offset()) * x.element_size()
    last = sum((size - 1) * int(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size() if x.numel() else begin


def expanded(x: Tensor) -> bool:
    """Whether several of its elements lie in one place."""
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


Value = Tensor | float | None | tuple[Tensor, ...] | Held  # an LSTM's state is a pair
OF_TORCH = frozenset(vars(nn.Module()))


class Snapshot(dict[str, Value]):
    """Values by name, the attributes that each module had, and its hooks: transformers' models put on some in their first forward. Buffers
    themselves: a forward may give one the name of another (`self.used = self.first`)."""

    attributes: dict[nn.Module, set[str]]
    hooks: dict[nn.Module, list[dict[int, Any]]]
    buffers: dict[nn.Module, dict[str, Tensor]]

    def __or__(self, other: dict[str, Value]) -> Snapshot:  # type: ignore[override]
        made = Snapshot({**self, **other})
        made.hooks, made.attributes, made.buffers = self.hooks, self.attributes, self.buffers
        return made


def values(model: nn.Module, weights: Collection[str] = ()) -> Snapshot:
    """Copies of all buffers, of the numbers, tensors, lists and dicts that modules have in attributes, and of some parameters."""
    named = ((name, param) for name, param in model.named_parameters() if name in weights)
    found = Snapshot({name: _copy(value) for name, value in (*_named(model), *named)})
    found.hooks = {module: [hooks.copy() for hooks in _hooks(module)] for module in model.modules()}
    found.attributes = {module: set(vars(module)) for module in model.modules()}
    found.buffers = {module: {key: x for key, x in module._buffers.items() if x is not None} for module in model.modules()}
    return found


def changed(model: nn.Module, before: dict[str, Value]) -> dict[str, Value]:
    """Those that have other values now, with these."""
    now = values(model, [name for name, _ in model.named_parameters() if name in before])
    return {name: value for name, value in now.items() if name not in before or not same(before[name], value)}


def in_state(model: nn.Module, values: dict[str, Value]) -> dict[str, Value]:
    """Those of the values that are in buffers and parameters, and in no attribute."""
    state = {name for name, _ in (*_buffers(model), *model.named_parameters())}
    return {name: value for name, value in values.items() if name in state}


def restore(model: nn.Module, before: Snapshot, tensors: bool = True) -> None:
    """Give buffers and attributes the values that they had, and modules their hooks. Buffers that are new, or of another shape, stay;
    attributes that are new go. What modules have that were not there, stays. `tensors=False`: tensors in attributes stay."""
    for module, known in before.hooks.items():
        for hooks, had in zip(_hooks(module), known, strict=True):
            if hooks.keys() != had.keys():
                hooks.clear()
                hooks.update(had)
    for module, buffers in before.buffers.items():
        for key, x in buffers.items():
            if isinstance(now := module._buffers.get(key), Tensor) and now.shape == x.shape:
                module._buffers[key] = x
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # of a weight that is cut the part that is here
        for name, tensor in (*_buffers(model), *model.named_parameters()):
            old = before.get(name)
            if isinstance(old, Tensor) and old.shape == tensor.shape:
                tensor.is_meta or tensor.copy_(old)  # which would count as a change
    stays = lambda value: not tensors and (isinstance(value, Tensor | tuple) or _holds(value))  # what tensors may lie in
    for path, module in model.named_modules():
        if module not in before.attributes:
            continue
        own, now = before.attributes[module], vars(module)
        for key in [key for key, value in _attributes(module) if key not in own and not stays(value)]:
            del now[key]
        for key in own - OF_TORCH:
            name, value = name_in(path, key), now.get(key)
            if name in before and not stays(value) and not _elsewhere(value) and not same(before[name], Held(value) if _holds(value) else value):
                now[key] = _copy(before[name])


def _elsewhere(value: Any) -> bool:
    """Whether the values of a tensor in an attribute, or of a tuple's, are another stage's."""
    return any(isinstance(x, Tensor) and x.is_meta for x in (value if type(value) is tuple else (value,)))


def unchanged(model: nn.Module, tensors: bool = True, weights: Collection[str] = ()) -> ExitStack:
    """What is kept is as before afterwards, and these parameters. `tensors=False`: but for tensors in attributes."""
    afterwards = ExitStack()
    afterwards.callback(restore, model, values(model, weights), tensors)
    return afterwards


def tensors(model: nn.Module, tuples: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors in attributes and in their lists and dicts, themselves, by the name of the buffer or attribute. `tuples`: in these
    too, though they are not put back in them."""
    for name, value in _named(model):
        yield from ((name, x) for x in _inside(value, set(), tuples))
    for path, module in model.named_modules() if tuples else ():
        mixed = [(key, one) for key, one in vars(module).items() if type(one) is tuple and not _whole(one)]
        yield from ((name_in(path, key), x) for key, one in mixed for x in _inside(one, set(), tuples))


def shift(model: nn.Module, names: Collection[str]) -> None:
    """Give floating-point ones of those other values, near by; once where several lie in one memory."""
    seen: set[int] = set()
    with torch.no_grad():
        for name, tensor in (*tensors(model), *model.named_parameters()):
            memory = tensor.untyped_storage()._cdata
            if name in names and tensor.is_floating_point() and memory not in seen and not expanded(tensor):
                seen.add(memory)
                tensor.add_(0.01 * (1 + tensor.abs()))


def _inside(x: Any, seen: set[int], tuples: bool) -> Iterator[Tensor]:
    if id(x) in seen or len(seen) > MOST:
        return
    seen.add(id(x))
    if _holds(x) or (tuples and type(x) is tuple):
        for one in x.values() if isinstance(x, dict) else x:
            yield from _inside(one, seen, tuples)
    elif isinstance(x, Tensor) and comparable(x) and not isinstance(x, nn.Parameter):
        yield x


def _named(model: nn.Module) -> Iterator[tuple[str, Value]]:
    yield from ((name, buffer) for name, buffer in _buffers(model) if buffer.is_meta or comparable(buffer))
    for path, module in model.named_modules():
        for key, value in _attributes(module):
            yield name_in(path, key), value


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Under each name that one has."""
    return ((name_in(path, key), x) for path, module in model.named_modules() for key, x in module._buffers.items() if x is not None)


def name_in(path: str, key: str) -> str:
    return f"{path}.{key}".lstrip(".")


def marks(model: nn.Module, paths: dict[nn.Module, str]) -> Iterator[tuple[str, Any]]:
    """What tells whether buffers, and attributes of some modules, have changed: of tensors no copies; lists and dicts are left out:
    what is put into one (shapes, times) is mostly read by nobody, and asking for it tells no more."""
    attributes = ((name_in(path, key), x) for module, path in paths.items() for key, x in _attributes(module))
    for name, x in (*model.named_buffers(), *attributes):
        if isinstance(x, Tensor):
            yield name, (id(x), 0 if x.is_inference() else x._version)
        elif not _holds(x):
            yield name, _copy(x)


def _attributes(module: nn.Module) -> list[tuple[str, Value]]:
    """Without what stands for a value of another stage."""
    own = [(key, value) for key, value in vars(module).items() if key not in OF_TORCH]
    return [(key, x) for key, x in own if isinstance(x, int | float | NoneType) or _holds(x) or _whole(x)]


def _whole(value: Any) -> bool:
    """A tensor with values, or a plain tuple of them."""
    if type(value) is tuple and value:
        return all(isinstance(one, Tensor) and comparable(one) for one in value)
    return isinstance(value, Tensor) and comparable(value)


def _hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def _copy(value: Any) -> Value:
    """Of an attribute; of what was copied before the attribute, as it was."""
    if isinstance(value, Held):
        return value.give()
    if _holds(value):
        return Held(value)
    if type(value) is tuple:
        return tuple(one.detach().clone() if isinstance(one, Tensor) else one for one in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


@dataclass
class Changes:
    """What forwards changed, each beginning with the same values: over rows and their two parts from what was before any forward
    (`once`), and over the parts from what a forward over both left (`again`). `weights`: parameters that were changed."""

    weights: Collection[str]
    once: list[dict[str, Value]] = field(default_factory=list)
    again: list[dict[str, Value]] = field(default_factory=list)
    # whose values the first forward left as they were, and would not have left others: averages that begin as a copy; or changed for good,
    # after which losses are others
    begin_alike: list[str] = field(default_factory=list)

    def in_state(self, model: nn.Module) -> Changes:
        """The same without what changed in attributes."""
        once, again = ([in_state(model, found) for found in some] for some in (self.once, self.again))
        return Changes(self.weights, once, again, self.begin_alike)

    def explain(self, plan: Plan) -> None:
        """Raises SoliError where a plan would change what is kept otherwise than one forward over the batch does."""
        by_rows = sorted(_differing(self.once) | _differing(self.again))
        # Weights are changed by the tokens of a rank; what is computed of them for a buffer is of all ranks of cp.
        if plan.pieces == 1:
            by_rows = [name for name in by_rows if name in self.weights and plan.cp > 1]
        first = sorted({*(self.again[0] if self.again else ()), *self.begin_alike})
        if by_rows:
            what = "the forward changes what the model keeps by the rows that it sees: no part of a batch changes it as the whole does"
            allowed = "buffers, attributes and weights that stay as they are, or change alike whatever the rows"
            fix = "put the module in eval(), leave out max_norm= of embeddings, change what is kept between steps (of the loss's batch, alike on every rank), or run with dp=1, cp=1, tensor=1d and no microbatches"
            raise SoliError(what, got=listed(by_rows), allowed=allowed, fix=fix)
        if first and plan.runs > 1:
            what = f"the forward changes what the model keeps, and {plan} runs it {plan.runs} times a step"
            allowed = "buffers and attributes that stay as they are where a step has microbatches or computes again"
            fix = "put the module in eval(), change what is kept between steps, or run without accumulate, microbatches and recompute"
            raise SoliError(what, got=listed(first), allowed=allowed, fix=fix)


def _differing(found: list[dict[str, Value]]) -> set[str]:
    """What was not changed alike by all of them."""
    if not found:
        return set()
    first, *others = found
    return set().union(*found) - {n for n in first if all(n in one and same(first[n], one[n]) for one in others)}


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same: numbers, words and tensors by their values, lists, deques, dicts and tuples of them, all else by what it is; NaN
    is as NaN. Of what modules keep, and loss functions (engine/remembered.py)."""
    if a is b:
        return True
    if isinstance(a, Held) or isinstance(b, Held):
        return isinstance(a, Held) and isinstance(b, Held) and a.same(b)
    if isinstance(a, dict) and type(a) is type(b):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list | deque) and isinstance(b, type(a)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)  # an attribute may begin on the host
        if not (alike and comparable(a) and comparable(b)):
            return False
        if torch.equal(a, b) or not a.is_floating_point():
            return torch.equal(a, b)
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
    return type(a) is type(b) and isinstance(a, int | float | str) and (a == b or (a != a and b != b))
