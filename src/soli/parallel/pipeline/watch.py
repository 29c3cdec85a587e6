"""Watching a forward: which values depend on parameters, where they are made and where they are used.

The model's own Python runs, under a TorchFunctionMode. A value is *live* if it depends on a parameter. What depends
on the batch alone (masks, positions, rotary tables) is not: every stage makes it for itself. Calls of units divide a
forward into gaps: gap g is what happens after g calls and before the next. A live value has a name that is the same
in every run and on every rank: (gap, number among the gap's live operations, leaf of the result).

A trace is taken once, of the whole model, before it is cut (`Tracer`); afterwards each stage runs its part of the
same forward (`stage_forward.py`) and compares what it meets with the trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from soli.core.errors import on_all_ranks
from soli.core.frames import in_autograd_function
from soli.core.functions import in_place, name_of, tensors_in
from soli.core.versions import function_modes, mode_popped
from soli.parallel import kept
from soli.parallel.pipeline.functions import READS, seen_by
from soli.parallel.pipeline.units import Flops, Unit
from soli.parallel.wrapping import unwrap, wrap

Name = tuple[int, int, int]
"""(gap, number, leaf); number is OUTPUT for what a unit's call returned, whose gap is the one after it."""
OUTPUT = -1
FOREVER = 10**9  # a gap after all others
TENSOR, CONSTANT = "tensor", "constant"
PLACES = {"device", "get_device", "is_cuda", "is_cpu"}
"""Functions that tell where a tensor lies."""
SEEN_WITHOUT_VALUES = PLACES | {"shape", "size", "dim", "dtype", "ndim", "is_meta", "requires_grad", "numel", "stride"}


@dataclass
class Call:
    """A call of a unit: its name, and what it returned. `leaves`: TENSOR, CONSTANT, or an argument's number.

    `left`: (module, attribute, leaf) where a module keeps what it returned in an attribute too.
    """

    unit: str
    spec: TreeSpec
    leaves: list[Any]
    draws: dict[str, int]  # how many random calls each module inside made
    left: list[tuple[nn.Module, str, int]]


@dataclass
class Trace:
    """What a forward and its loss did. Lists by gap have one entry more than there are calls."""

    calls: list[Call] = field(default_factory=list)
    operations: list[list[str]] = field(default_factory=lambda: [[]])  # with the number of results
    flops: list[float] = field(default_factory=lambda: [0.0])
    last_use: dict[Name, int] = field(default_factory=dict)
    uses_of: dict[int, set[int]] = field(default_factory=dict)  # parameter's id -> gaps
    floating: dict[Name, bool] = field(default_factory=dict)
    aliased: set[tuple[int, int, int]] = field(default_factory=set)  # gaps: made, written through another name, used
    written: dict[str, int] = field(default_factory=dict)  # buffer into which glue writes live values -> gap
    kept_reads: dict[str, int] = field(default_factory=dict)  # buffer or attribute -> first gap; FOREVER: it was set before
    repeated: dict[str, int] = field(default_factory=dict)  # buffer or attribute that glue changes by itself -> last gap
    # numbers and flags in attributes that glue alone changes, and that a forward leaves as they were
    passing: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    changing: dict[str, set[str]] = field(default_factory=dict)  # buffer of units -> those whose forward changes it
    hidden: set[tuple[int, int]] = field(default_factory=set)  # gaps: made in the first, used unseen in the second
    same: dict[Name, Name] = field(default_factory=dict)  # a result that is an argument itself, and whose name holds
    reads: list[tuple[int, str]] = field(default_factory=list)

    def until(self, call: int) -> list[Any]:
        """What every run must repeat: the calls before `call`, and the operations between them; as JSON."""
        return [[one.unit for one in self.calls[:call]], self.operations[: call + 1]]

    def place(self, gap: int) -> str:
        return f"after {self.calls[gap - 1].unit}" if gap else "before the first block"

    def first_read(self) -> int:
        """The first gap in which Python looks at a live value; after the last one if there is none."""
        return min((gap for gap, _ in self.reads), default=len(self.calls))


class _State:
    watch: Watch | None = None


class Watch(TorchFunctionMode, ABC):
    """Sees every function of torch that the model's own code calls outside its units. `run`: one number for each."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        Watch.runs += 1
        self.run = Watch.runs
        self.gap, self.number, self.inside = 0, 0, False

    def __enter__(self) -> Any:
        _State.watch, self._functions = self, seen_by(self)
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        _State.watch = None
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        args = args or tuple(kwargs.pop(name) for name in ("tensor",) if name in kwargs)  # nn.init names all that it is given
        live = live_in((args, kwargs))
        if not live:
            return func(*args, **kwargs)
        if name_of(func) in ("to", "type_as") and not live_in(args[:1]):
            # only how the other lies is asked for; a constant may come back as it is, and stays no value of a run
            others = {name: value for name, value in kwargs.items() if name not in ("tensor", "other")}
            return args[0].to(self.device_of(live[0]), live[0].dtype, *args[2:], **others)
        return self.met(func, args, kwargs, live)

    def device_of(self, x: Tensor) -> torch.device:
        """Where a live value lies, or would lie."""
        return x.device

    @abstractmethod
    def met(self, func: Any, args: tuple, kwargs: dict, live: list[Tensor]) -> Any:
        """Answer an operation of the model's own code that reads live values."""

    @abstractmethod
    def unit(self, name: str, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Answer the call of a unit."""


def live_in(values: Any) -> list[Tensor]:
    return [x for x in tensors_in(values) if hasattr(x, "_live") or isinstance(x, nn.Parameter)]


def results_of(func: Any, args: tuple, out: Any) -> list[Tensor]:
    """The tensors that an operation made. One that writes in place made its first argument anew."""
    if name_of(func) == "requires_grad_":
        return []
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, list | tuple):
        return [x for x in out if isinstance(x, Tensor)]
    return [args[0]] if out is None and args and isinstance(args[0], Tensor) and name_of(func).startswith("__set") else []


def looks_by(func: Any, args: tuple) -> str:
    """What tells Python what is in a live tensor, or makes a result whose shape depends on it; "": nothing does."""
    name = name_of(func)
    if inside := getattr(func, "looks", None):
        return str(inside[0])
    if name == "__getitem__" and any(x.dtype == torch.bool and x.dim() for x in live_in(args[1:])):
        return "an index by a mask"
    return name if name in READS or (name == "where" and len(args) == 1) else ""


def as_value(func: Any, out: Any) -> Any:
    """A parameter that came back as it is (x.to(where it lies)) as a value of this run, which a parameter, there in all of them, is not."""
    return out.view_as(out) if isinstance(out, nn.Parameter) and not in_place(func) else out


def called_as(func: Any, made: list[Tensor]) -> str:
    """How a trace notes an operation."""
    return name_of(func) if len(made) == 1 else f"{name_of(func)} of {len(made)}"


def unwrapped(out: Any) -> Any:
    """What a unit returned; a parameter as a value."""
    if not any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(out)):
        return out
    return tree_map(lambda x: x.view_as(x) if isinstance(x, nn.Parameter) else x, out)


@contextmanager
def watched(units: list[Unit]) -> Iterator[None]:
    """Units tell the watch of their calls in this block."""
    watch_units(units)
    try:
        yield
    finally:
        for _, module in units:
            unwrap(module)


def watch_units(units: list[Unit]) -> None:
    """Let units tell the watch, where there is one, that they are called."""
    for name, module in units:
        wrap(module, _told(name, module, module.forward))


def _told(name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        watch = _State.watch
        if watch is None or watch.inside:  # in backward (recomputation), or a unit inside a unit
            return forward(*args, **kwargs)
        return watch.unit(name, module, forward, args, kwargs)

    return told


@contextmanager
def inside(watch: Watch) -> Iterator[None]:
    """A unit computes: its own operations are not looked at. The model may be in a mode of its own, as `with torch.device(...)` is one."""
    with patch.object(watch, "inside", True), mode_popped() if function_modes()[-1:] == [watch] else nullcontext():
        yield


def standing_for(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """`make(x)`, the form that a plan gives a value of the model: under the same name, and no operation of the model's.

    A value that a stage does not have stays as it is: another stage gives it the form.
    """
    watch = _State.watch
    if watch is None or watch.inside:
        return make(x)
    if x.is_meta:
        return x
    with inside(watch):
        made = make(x)
    if made is not x and hasattr(x, "_live"):
        made._live, made._run = x._live, watch.run  # type: ignore[attr-defined]
    return made


class _Within(TorchFunctionMode):
    """Inside a unit: finds values of other units that did not come in as arguments but in an object's attribute.

    Looked at are values that depend on arguments or weights; a table that a block makes from nothing may be shared.
    """

    def __init__(self, gap: int, given: set[int], trace: Trace, computed: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.gap, self.given, self.trace, self.computed = gap, given, trace, computed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = results_of(func, args, out)
        if not made and name_of(func) not in READS:
            return out
        depends = False
        for x in tensors_in((args, kwargs or {})):
            self.computed(x)
            if isinstance(x, nn.Parameter):
                depends = True
                self.trace.uses_of.setdefault(id(x), set()).add(self.gap)  # of another module, perhaps
            elif id(x) in self.given:
                depends = True
            else:
                origin = x._live[0] if hasattr(x, "_live") else getattr(x, "_origin", None)
                depends = depends or origin is not None
                if origin not in (None, self.gap):
                    self.trace.hidden.add((origin, self.gap))
        if depends:
            for x in made:
                if id(x) not in self.given:
                    x._origin = self.gap  # type: ignore[attr-defined]
        return out


def storage_of(x: Tensor) -> int:
    try:
        return int(x.untyped_storage()._cdata)
    except NotImplementedError as error:
        what = "a tensor between the blocks has no memory that stages are told apart by: one of torch.func.vmap's, of copies that run at once, or a sparse one"
        raise on_all_ranks(what, got=str(error).split("\n")[0], fix="do it inside a block, call copies one after the other, or use pp=1") from error


def _numbers(x: Any, levels: int = 2) -> Any:
    """Numbers and words in a list, a dict or an object, and in those that lie in these; of an iterator none, which nobody can read."""
    if isinstance(x, int | float | str):
        return x
    inside = kept.entries(x) if levels else None
    if inside is None:
        return None
    return [(key, number) for key, value in inside.items() if (number := _numbers(value, levels - 1)) is not None]


def _left(module: nn.Module, leaves: list[Any]) -> list[tuple[nn.Module, str, int]]:
    """Where modules keep, in an attribute, a tensor that the unit returned."""
    numbers = {id(leaf): number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    held = ((part, name, id(value)) for part in module.modules() for name, value in part.__dict__.items())
    return [(part, name, numbers[key]) for part, name, key in held if key in numbers]


class Tracer(Watch):
    """Takes a trace of one forward and loss. `draws()` tells the random calls so far, by module.

    Of what the model keeps from one forward to the next, in buffers and attributes, it tells where it is read first and changed last. Of
    attributes those of modules that are in no unit: what a unit has for itself is where it runs. Tensors are read where something is computed
    of them, all else where the model's code asks for the attribute.
    """

    def __init__(self, model: nn.Module, units: list[Unit], draws: Callable[[], dict[str, int]]) -> None:
        super().__init__()
        self.model = model
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        inside = {part for _, unit in units for part in unit.modules()}
        self._paths = {module: path for path, module in model.named_modules() if module not in inside}
        # themselves too, so that no other has their id
        self._tensors = {id(x): (name, x) for name, x in (*kept.tensors(model), *model.named_buffers())}
        self._marks, self._changes = dict(kept.marks(model, self._paths)), dict[str, int]()
        self._before, self._by_units = self._marks, set[str]()
        self._lasting = {storage_of(x) for x in (*model.parameters(), *model.buffers())}
        self._storages: list[tuple[Name, int, Tensor]] = []  # the tensors too: memory is not used again
        self._writes: list[tuple[int, int, int, set[Any], int]] = []
        self._filled: list[tuple[Any, int]] = []  # what units were handed, and wrote numbers into: where
        self._step = 0  # of operations and calls
        self._last_step: dict[Name, int] = {}
        self.trace, self.draws = Trace(), draws
        self._flops, self._counted = Flops(), 0.0

    def __enter__(self) -> Any:
        self._flops.__enter__()
        self._asked = self._asking()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._asked.close()
        self._look()
        self._count()
        self._flops.__exit__(*error)
        self._aliases()
        self._storages.clear()
        for buffer in self.model.buffers():  # they stay, and are no values of one run
            for mark in ("_live", "_run", "_origin"):
                buffer.__dict__.pop(mark, None)
        others = self.trace.written.keys() | self.trace.changing
        self.trace.repeated = {name: gap for name, gap in self._changes.items() if name not in others}
        for module, key in ((one, key) for one in self._paths for key in vars(one)):
            name = kept.name_in(self._paths[module], key)
            before = self._before.get(name, getattr(type(module), key, ()))
            if isinstance(before, int | float | None) and kept.same(before, vars(module)[key]) and name not in self._by_units:
                self.trace.passing[name] = module, key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and name_of(func) not in SEEN_WITHOUT_VALUES:
            for x in tensors_in((args, kwargs or {})):
                if hasattr(x, "_origin") and not hasattr(x, "_live"):
                    self.trace.hidden.add((x._origin, self.gap))
                self._computed(x)
        return super().__torch_function__(func, types, args, kwargs)

    def _asking(self) -> ExitStack:
        """The model's own code is seen to ask for attributes until this ends. Lists of modules keep nothing, and blocks may be of them too."""
        tensors, stack = {name for name, _ in self._tensors.values()}, ExitStack()

        def told(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, key: str, *value: Any) -> Any:
                if module in self._paths and (name := kept.name_in(self._paths[module], key)) not in tensors:
                    self.trace.kept_reads.setdefault(name, FOREVER if value else self.gap)
                return real(module, key, *value)

            return call

        for kind in {type(module) for module in self._paths if not type(module).__module__.startswith("torch.")}:
            for name in ("__getattribute__", "__setattr__"):
                stack.enter_context(patch.object(kind, name, told(getattr(kind, name))))
        return stack

    def _computed(self, x: Tensor) -> None:
        """Something is computed of a tensor."""
        if id(x) in self._tensors:
            self.trace.kept_reads.setdefault(self._tensors[id(x)][0], self.gap)

    def _look(self) -> set[str]:
        """In the gap that ends: what changed since the last look?"""
        with torch._C.DisableTorchFunction():  # this reads nothing for the model
            before, self._marks = self._marks, dict(kept.marks(self.model, self._paths))
        found = {name for name, now in self._marks.items() if not kept.same(before.get(name, ()), now)}
        self._changes |= dict.fromkeys(found, self.gap)
        return found

    def met(self, func: Any, args: tuple, kwargs: dict, live: list[Tensor]) -> Any:
        given = [(x, x.clone()) for x in tensors_in((args, kwargs)) if id(x) in self.buffers and kept.comparable(x)]
        out = as_value(func, func(*args, **kwargs))
        looks, made = looks_by(func, args), results_of(func, args, out)
        wrote = bool(made) and in_place(func) and isinstance(args[0], Tensor)
        # running statistics are written without a word: neither the schema says it, nor the version
        written = [x for x, before in given if not kept.same(x, before)] + ([args[0], args[0]._base] if wrote else [])
        self.trace.written |= {self.buffers[id(x)]: self.gap for x in written if id(x) in self.buffers}
        if kwargs.get("out") is not None or (made and in_place(func) and not wrote):  # of several at once (torch._foreach_mul_)
            self.trace.aliased.add((self.gap, self.gap, FOREVER))
        before = getattr(args[0], "_live", None) if wrote else None
        if looks:
            self.trace.reads.append((self.gap, looks))
        if made or looks:
            self._used(live, self.gap)
        if made:
            self.trace.operations[self.gap].append(called_as(func, made))
            for leaf, x in enumerate(made):
                name = (self.gap, self.number, leaf)
                if not wrote and hasattr(x, "_live") and any(x is one for one in live):
                    self.trace.same[name] = x._live
                else:
                    self._made(x, name)
            self.number += 1
            if wrote:
                self._wrote(args[0], {before, args[0]._live})
        return out

    def unit(self, name: str, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if in_autograd_function():
            what = f"{name} is called inside a custom autograd function, whose backward is not cut into stages"
            fix = "torch.utils.checkpoint(..., use_reentrant=False) where that is what does it (a reversible net makes its gradients itself), or pp=1"
            raise on_all_ranks(what, allowed="blocks that the model's forward calls", fix=fix)
        self._count()
        self._look()
        self.gap, self.number = self.gap + 1, 0
        self.trace.operations.append([])
        self.trace.flops.append(0.0)
        given = tree_flatten((args, kwargs))[0]
        objects = [(x, _numbers(x)) for x in (*args, *kwargs.values())]
        self.trace.hidden |= {(gap, self.gap) for x, _ in objects for other, gap in self._filled if x is other}
        self.trace.hidden |= {(x._origin, self.gap) for x in given if hasattr(x, "_origin") and not hasattr(x, "_live")}
        self._used(live_in(given), self.gap)
        for param in module.parameters():
            self.trace.uses_of.setdefault(id(param), set()).add(self.gap)
        before = self.draws()
        within = _Within(self.gap, {id(x) for x in given if isinstance(x, Tensor)}, self.trace, self._computed)
        with inside(self), within:
            out = unwrapped(forward(*args, **kwargs))
        self._filled += [(x, self.gap) for x, before in objects if before is not None and (before != _numbers(x) or isinstance(x, Iterator))]
        self._by_units |= (found := self._look())  # which the stages after this one do not run
        own = {id(buffer) for buffer in module.buffers()}
        for key in found & {key for key, buffer in self.model.named_buffers() if id(buffer) in own}:
            self.trace.changing.setdefault(key, set()).add(name)
        drawn = {m: n - before.get(m, 0) for m, n in self.draws().items() if n != before.get(m, 0)}
        leaves, spec = tree_flatten(out)
        kept = [self._leaf(name, number, leaf, given) for number, leaf in enumerate(leaves)]
        self.trace.calls.append(Call(name, spec, kept, drawn, _left(module, leaves)))
        return out

    def _leaf(self, unit: str, number: int, leaf: Any, given: list[Any]) -> Any:
        if isinstance(leaf, bool | int | float | str | None):
            return CONSTANT
        for place, x in enumerate(given):
            if x is leaf:
                return place
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            self._made(leaf, (self.gap, OUTPUT, number))
            return TENSOR
        what = f"{unit} returns an object that a pipeline cannot hand on"
        allowed = "tensors that are not nested, numbers, text and None, in tuples, lists, dicts and dataclasses of Hugging Face"
        raise on_all_ranks(what, got=type(leaf).__name__, allowed=allowed, fix="return the tensors themselves, or use pp=1")

    def _made(self, x: Tensor, name: Name) -> None:
        x._live, x._run = name, self.run  # type: ignore[attr-defined]
        self.trace.floating[name] = x.is_floating_point() or x.is_complex()
        self._storages.append((name, storage_of(x), x))

    def _wrote(self, target: Tensor, own: set[Any]) -> None:
        """Glue wrote into a tensor: other names of the same memory change with it, which other stages do not see.

        `own`: the names that the tensor had and has.
        """
        base, memory = target._base, storage_of(target)
        # a linear layer gives a view of what it computed, which nothing else has
        given = any(name[1] == OUTPUT and other == memory for name, other, _ in self._storages)
        if base is not None and not hasattr(base, "_live") and not (given and memory not in self._lasting):
            self.trace.aliased.add((self.gap, self.gap, FOREVER))
        self._writes.append((self._step, self.gap, memory, own, len(self._storages)))

    def _aliases(self) -> None:
        for step, gap, storage, own, before in self._writes:
            for name, other, _ in self._storages[:before]:  # what is named later has what was written
                if other == storage and name not in own and self._last_step.get(name, 0) > step:
                    self.trace.aliased.add((name[0], gap, self.trace.last_use[name]))

    def _used(self, live: list[Tensor], gap: int) -> None:
        self._step += 1
        for x in live:
            if isinstance(x, nn.Parameter):
                self.trace.uses_of.setdefault(id(x), set()).add(gap)
            else:
                name = x._live  # type: ignore[attr-defined]
                self.trace.last_use[name] = max(gap, self.trace.last_use.get(name, 0))
                self._last_step[name] = self._step

    def _count(self) -> None:
        self.trace.flops[self.gap] += self._flops.total - self._counted
        self._counted = self._flops.total
