"""A program run for its shapes: big tensors take address space and no memory, and nothing of them is computed.

Every operation on a hollow tensor gives hollow ones of the right shape. Views, the batch, and what comes from neither
weights nor activations stay what they are, so that the program takes the path that it would take. What reads a value
of a hollow tensor reads 0: every loss is 0, and the sum of losses is the loss of the sum. A layer that does so may take
another path in a real run; it is noted (`Hollow.reads`). Storages are real ones on
the CPU whose pages nobody touches, so that kernels are chosen, aliases made and memory is freed as in a real run.
(FakeTensor is another type of tensor: its storage has no address, an unfilled value stops the program that looks at
it, and the meta device, on which it stands, means "of another stage" to a pipeline.)
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from soli.core import copies, versions
from soli.core.errors import SoliError, on_all_ranks
from soli.core.frames import here
from soli.core.functions import tensors_in, written_by
from soli.core.tables import table

aten = torch.ops.aten
_NAMES = table(__package__, "operations.toml")
EMPTY, READS, _VIEWS = ({attrgetter(name)(aten) for name in _NAMES[what]} for what in ("empty", "reads", "views"))
ALIASES = READS | _VIEWS
"""What is done to hollow tensors too: a value is 0, another view is one, of a tensor itself too."""
_FLASH = "_scaled_dot_product_flash_attention"
FLOPS = versions.FLOPS | {getattr(aten, f"{_FLASH}_for_cpu{way}"): versions.FLOPS[getattr(aten, _FLASH + way)] for way in ("", "_backward")}
FLOPS |= {aten.mkldnn_rnn_layer: lambda *args, **_: recurrent(*args), aten.mkldnn_rnn_layer_backward: lambda *args, **_: 2 * recurrent(*args)}
"""Of products, by their shapes: torch's own table, attention on the CPU, and an LSTM's layer."""


def recurrent(x: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any) -> int:
    """Flops of a recurrent layer's forward: of each step the input's product and the state's."""
    return 2 * x.shape[0] * x.shape[1] * (input_weight.numel() + hidden_weight.numel())


SMALL = 4096
"""Bytes up to which a hollow tensor is filled with zeros."""
NORESERVE = 0x4000
"""Linux' MAP_NORESERVE, for which Python 3.11 has no name."""
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Call:
    """One operation: its name, the shapes of its tensors, its flops if it is a product, the bytes that it moves."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    flops: int
    bytes: int

    @property
    def key(self) -> str:
        """What tells products apart."""
        return f"{self.name} {[list(shape) for shape in self.shapes]} {str(self.dtype).removeprefix('torch.')}"


def _causal(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a kernel of attention leaves out what a mask hides, half of its flops, which torch's table counts."""
    said = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return bool(said.get("is_causal", False))


class Tracker(TorchDispatchMode):
    """Follows the memory of tensors (`bytes`, `peak`) and notes operations (`calls`). Real or hollow: alike."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.bytes = 0  # of all storages that live now
        self.peak = 0
        self.calls: list[Call] | None = None
        self._resizing: Any = None

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._forget(storage._cdata)
                self._see(storage)
            return result

        self._resizing = patch.object(torch.UntypedStorage, "resize_", resized)  # is not dispatched
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._resizing.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # the shape of a cut tensor is its part's here
            result = self.run(func, args, kwargs or {})
            if not func.is_view:
                made = tensors_in((result,))
                for x in made:
                    self.see(x)
                if self.calls is not None:
                    self._note(func, args, kwargs or {}, result, made)
            return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, made: list[Tensor]) -> None:
        given = tensors_in((args, kwargs))
        both = [*given, *made]
        if both and self.calls is not None:
            count = FLOPS.get(func.overloadpacket)
            flops = int(count(*args, **kwargs, out_val=result)) // (1 + _causal(func, args, kwargs)) if count is not None else 0
            moved = 0 if func in _VIEWS else sum(x.numel() * x.element_size() for x in both if not x.is_meta)
            shapes = tuple(tuple(x.shape) for x in given)
            self.calls.append(Call(func.name().partition("::")[2], shapes, both[0].dtype, flops, moved))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operation itself."""
        return func(*args, **kwargs)

    def see(self, x: Tensor) -> None:
        """Count the memory of a tensor from now on, while it lives. One of another stage has none."""
        storage = x.untyped_storage()
        if storage._cdata not in self._live and storage.device.type != "meta":
            self._see(storage)

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        _, size = self._live.pop(key)
        self.bytes -= size


class Hollow(Tracker):
    """Computes nothing of hollow tensors; see above."""

    def __init__(self) -> None:
        super().__init__()
        self._hollow: dict[int, weakref.ref[Any]] = {}
        self.reads: dict[str, None] = {}  # modules, and where they read a value

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.is_view:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if kwargs.get("device") == META or any(x.is_meta for x in given):
            return func(*args, **kwargs)  # of another stage
        if not given:
            return self._made(func, args, kwargs)
        if not any(self.is_hollow(x) for x in given):
            result = func(*args, **kwargs)
            return self.mark(result) if func in EMPTY and result.is_floating_point() else result
        if func in ALIASES:
            if func in READS and " at " in (place := here()):
                self.reads[place] = None
            return func(*args, **kwargs)
        return True if func is aten.equal.default else self._shaped(func, args, kwargs)

    def is_hollow(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._hollow

    def mark(self, x: Tensor) -> Tensor:
        """From now on nothing of this tensor is computed."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._hollow:
            self._hollow[key] = weakref.ref(storage, lambda _: self._hollow.pop(key, None))
        if storage.nbytes() <= SMALL:
            x.zero_()
        return x

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor from nothing: a hollow one where it is big and not of whole numbers."""
        if _makes(func):
            shape = func(*args, **{**kwargs, "device": META, "pin_memory": False})
            big = shape.numel() * shape.element_size() > SMALL
            if shape.is_floating_point() and (big or func in EMPTY):
                return self._like(Form(tuple(shape.shape), shape.stride(), shape.dtype))
        return func(*args, **kwargs)

    def _like(self, form: Form) -> Tensor:
        return self.mark(untouched(form.shape, form.stride, form.dtype))

    def _shaped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operation gives by the shapes of its tensors; what it writes is hollow afterwards."""
        for x in written_by(func, args, kwargs):
            self.mark(x)
        if func._schema.is_mutable and not func._schema.returns:
            return None
        if func is aten.index.Tensor or func is aten.index_put_.default:
            args = (args[0], [_counted(x, self) for x in args[1]], *args[2:])
        given = tensors_in((args, kwargs))
        forms, shape = _results(func, args, kwargs, given)
        made = [self._like(form) if isinstance(form, Form) else given[form] if isinstance(form, int) else None for form in forms]
        return made[0] if shape is None else tree_unflatten(made, shape)


@dataclass(frozen=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_known: dict[Any, tuple[list[Form | int | None], Any]] = {}
"""Results by operation and arguments: a model's layers are alike, and the meta device takes a millisecond to answer."""


def _results(func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> tuple[list[Form | int | None], Any]:
    """Of an operation on the tensors `given`: the forms of new tensors, the numbers of those that are results too, and their structure,
    None where one tensor is all."""
    first = {id(x): i for i, x in reversed(list(enumerate(given)))}
    key = (func, _said((args, kwargs), first))
    if key not in _known:
        metas = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META) for x in given]

        def meta(x: Any) -> Any:
            if isinstance(x, Tensor):
                return metas[first[id(x)]]
            return META if isinstance(x, torch.device) else x

        args, kwargs = tree_map(meta, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise _unknown(func, error) from error
        results, shape = tree_flatten(result)
        back = {id(x): i for i, x in reversed(list(enumerate(metas)))}
        _known[key] = [_form(x, back) for x in results], None if isinstance(result, Tensor) else shape
    return _known[key]


def _said(x: Any, first: dict[int, int]) -> Any:
    """What tells one call from another, to look it up by: forms of tensors, which are the same one, and other values with their types."""
    if isinstance(x, Tensor):
        return first[id(x)], x.shape, x.stride(), x.dtype
    if isinstance(x, (list, tuple)):
        return type(x), *(_said(value, first) for value in x)
    if isinstance(x, dict):
        return tuple((name, _said(value, first)) for name, value in x.items())
    return type(x), x


def _form(x: Any, back: dict[int, int]) -> Form | int | None:
    if not isinstance(x, Tensor):
        return None
    return back[id(x)] if id(x) in back else Form(tuple(x.shape), x.stride(), x.dtype)


@cache
def _makes(func: Any) -> bool:
    """Whether an operation makes tensors on a device that it is told."""
    return func.namespace == "aten" and any(a.name == "device" for a in func._schema.arguments)


def _counted(index: Any, hollow: Hollow) -> Any:
    """A mask whose values are known as the places that it chooses: how many is then a shape."""
    if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and not hollow.is_hollow(index):
        return index.nonzero()[:, 0] if index.dim() == 1 else index
    return index


class ValuesError(SoliError):
    """A program asks for what only its values say."""


def _unknown(func: Any, error: Exception) -> SoliError:
    name = func.name().partition("::")[2]
    got = f"{here()}: {str(error).strip().splitlines()[0][:160]}"
    if not isinstance(error, NotImplementedError) and "meta" not in str(error):
        fix = "run the model on its batch by itself"
        return on_all_ranks(f"the program fails: {name}", got=got, allowed="shapes that the operation takes", fix=fix)
    what = f"what the model does depends on values that only a real run has: {name}"
    fix = 'name the plan (plan="dp=..."): the planner runs a program without its values'
    return ValuesError(what, got=got, fix=fix, everywhere=True)


def untouched(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose pages nobody has touched. An allocator's are refused where they are more at once than the machine has (vm.overcommit_memory=0)."""
    with suppress(RuntimeError):
        return torch.empty_strided(shape, stride, dtype=dtype)
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    pages = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, stride)


def hollowed(hollow: Hollow, model: nn.Module, *more: Any) -> Any:
    """A copy of the model and of what refers to it (its optimizer), with hollow parameters, and states that are as large."""
    memo: dict[int, Any] = {}
    sizes = {param.shape for param in model.parameters()}
    states = [x for one in more for x in tensors_in(one.state.values())]
    for x in [*model.parameters(), *(x for x in states if x.is_floating_point() and x.shape in sizes)]:
        empty = untouched(x.shape, x.stride(), x.dtype)
        memo[id(x)] = hollow.mark(empty)
        if isinstance(x, nn.Parameter):
            memo[id(x)] = nn.Parameter(empty, x.requires_grad)
        hollow.see(empty)
    return (copies.deep(model, memo), *(copies.optimizer(one, memo) for one in more))
