"""Deferred initialisation: build on the meta device now, get the very same values later, tensor by tensor.

`deferred()` records every operation of the block, and the state of the random generator before each
random one. `materialise(tensor)` repeats the operations that this one tensor depends on, so a rank holds at
most one whole tensor at a time beside its shards, and the values equal the eager constructor's bitwise.
In the block each random operation is also run on a temporary tensor, so that the generator stands after it
where it would stand after the eager one.
"""

import gc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import soli.core.versions  # noqa: F401 (shapes of draws that an older torch does not know)
from soli.core.errors import on_all_ranks


@dataclass(frozen=True)
class _View:
    """A deferred tensor as it was at one operation: which storage, and which view of it."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Entry:
    """One operation: what it was given and gave. A _View stands for each tensor that is deferred."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: list[_View]
    touches: frozenset[int]  # the storages that it writes
    reads: frozenset[int]
    generator: Tensor | None  # state before it, if it draws


_logs: dict[int, tuple[Any, list[_Entry]]] = {}
"""Storage -> itself, kept so that none is taken for another (it holds no memory), and the log that knows it."""
_WRITES = "_soli_writes"
"""The attribute of a deferred tensor: how often it had been written when its block ended."""


@contextmanager
def deferred() -> Iterator[None]:
    """Build a model on the meta device: `with soli.deferred(): model = GPT(config)`."""
    with _NotMeta(), _Recorder():
        yield
    sweep()
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor) and _on_meta(tensor) and _key(tensor) in _logs:
            setattr(tensor, _WRITES, tensor._version)


def sweep() -> None:
    """Forget the storages that nobody has any more, and with the last one of a block its log."""
    for key in list(_logs):
        if torch._C._storage_Use_Count(key) == 1:
            del _logs[key]


def is_deferred(tensor: Tensor) -> bool:
    return _key(tensor) in _logs


def materialise(tensor: Tensor, name: str = "a tensor") -> Tensor:
    """The values of one deferred tensor, on the CPU: bitwise what the eager constructor gives."""
    entries = _needed(tensor, name)
    real: dict[int, Tensor] = {}
    with torch.random.fork_rng(devices=()), torch.no_grad():
        for entry in entries:
            if entry.generator is not None:
                torch.set_rng_state(entry.generator)
            args, kwargs = tree_map(lambda x: _real(x, real), (entry.args, entry.kwargs))
            results = [t for t in tree_leaves(entry.func(*args, **kwargs)) if isinstance(t, Tensor)]
            for meta, result in zip(entry.outputs, results, strict=True):
                real.setdefault(meta.storage, result)
        return torch.as_strided(real[_key(tensor)], tensor.shape, tensor.stride(), tensor.storage_offset()).clone()


def fingerprint(tensor: Tensor, name: str = "a tensor") -> int:
    """A checksum of how a tensor is made: equal on two ranks, so will the values be."""
    mark = 0
    for entry in _needed(tensor, name):
        leaves = [x for x in tree_leaves((entry.args, entry.kwargs)) if not isinstance(x, Tensor)]
        constants = [(x.shape, x.stride, x.offset) if isinstance(x, _View) else repr(x) for x in leaves]
        mark = zlib.crc32(f"{entry.func}{constants}".encode(), mark)
        if entry.generator is not None:
            mark = zlib.crc32(entry.generator.numpy().tobytes(), mark)
    return mark


class _NotMeta(TorchFunctionMode):
    """Answers `is_meta` as the eager constructor would hear it: torch.nn.init skips meta tensors silently."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            return False
        if func in _READS and _on_meta(args[0]):
            with _disable_current_modes():  # the recorder's, which would take this for a part of the model
                return func(materialise(args[0]), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is deferred, heard past _NotMeta."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[_Entry] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors and not any(_on_meta(t) for t in tensors):
            return func(*args, **kwargs)  # constants among themselves stay real
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(materialise(args[0]))  # the constructor looks at a value (trunc_normal_ does)
        _refuse_lost_write(func, args, tensors)
        generator = _draw(func, args, kwargs)
        # Before the call: t_() and its like change the tensor that they are given.
        device = {} if kwargs.get("device") is None else {"device": torch.device("cpu")}
        seen_args, seen_kwargs = tree_map(_seen, (args, kwargs | device))
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        if "device" in meta_kwargs or not tensors:
            meta_kwargs["device"] = torch.device("meta")
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError as error:
            what = "the constructor does something whose shape depends on values, which are not there yet"
            fix = "build this model without soli.deferred(), or rewrite that line (torch.where for a mask)"
            raise on_all_ranks(what, got=f"{func}: {str(error).splitlines()[0]}", fix=fix) from error
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self._record(func, seen_args, seen_kwargs, outputs, generator)
        # in-place operations return the tensor they were given
        mutable = func._schema.is_mutable and isinstance(result, Tensor) and args and isinstance(args[0], Tensor)
        return args[0] if mutable and _on_meta(args[0]) else result

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor], generator: Tensor | None) -> None:
        reads = frozenset(x.storage for x in tree_leaves((args, kwargs)) if isinstance(x, _View))
        touches = frozenset(_key(t) for t in outputs) | (reads if func._schema.is_mutable else frozenset())
        self.log.append(_Entry(func, args, kwargs, [_view(t) for t in outputs], touches, reads, generator))
        for tensor in outputs:
            _logs.setdefault(_key(tensor), (tensor.untyped_storage(), self.log))


def _view(tensor: Tensor) -> _View:
    return _View(_key(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _seen(x: Any) -> Any:
    """What the log keeps of an argument. A constant may change later; what the operation saw is what counts."""
    return x if not isinstance(x, Tensor) else _view(x) if _on_meta(x) else x.clone()


def _refuse_lost_write(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """A real tensor cannot take values that do not exist yet."""
    if func._schema.is_mutable and tensors and not _on_meta(tensors[0]) and args and args[0] is tensors[0]:
        fix = "make the constant with torch.zeros or another factory inside the block, and write into that"
        raise on_all_ranks("a constant is changed by a tensor that is deferred", got=str(func), fix=fix)


def _draw(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Run a random operation for real on temporary tensors; returns the generator's state before it."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    if any(isinstance(x, torch.Generator) for x in tree_leaves((args, kwargs))):
        fix = "use torch's default generator (torch.manual_seed), or build the model eagerly"
        raise on_all_ranks("the model draws from a generator of its own under soli.deferred()", got=str(func), fix=fix)
    before = torch.get_rng_state()
    # What is only written may hold anything; what is read must be there, for some draws (gamma's, Poisson's)
    # take as many numbers as the values ask for.
    written: Any = args[0] if func._schema.is_mutable and args else None

    def make(x: Any) -> Any:
        if not (isinstance(x, Tensor) and _on_meta(x)):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if x is written else materialise(x)

    args, kwargs = tree_map(make, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    func(*args, **kwargs)
    return before


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _real(x: Any, real: dict[int, Tensor]) -> Any:
    """The real tensor for a deferred one: the same view of the real storage."""
    if isinstance(x, _View):
        return torch.as_strided(real[x.storage], x.shape, x.stride, x.offset)
    return x.clone() if isinstance(x, Tensor) else x


def _needed(tensor: Tensor, name: str) -> list[_Entry]:
    """The operations that a tensor's values depend on, in order."""
    known = _logs.get(_key(tensor))
    if known is None:
        raise on_all_ranks(f"{name} is on the meta device and nothing is known of its values", fix="build and change the model (dtype, size) inside `with soli.deferred():`")
    if getattr(tensor, _WRITES, tensor._version) != tensor._version:
        raise on_all_ranks(f"{name} was changed after its soli.deferred() block, which cannot be known here", fix="change it inside the block")
    wanted, found = {_key(tensor)}, []
    for entry in reversed(known[1]):
        if entry.touches & wanted:
            found.append(entry)
            wanted |= entry.reads
    return found[::-1]
