"""The record of every collective a rank issues: operation, axis, bytes, call site.

`bytes` is the size of the whole buffer that the operation is about: what is reduced (all_reduce,
reduce_scatter), what comes out (all_gather), what is sent (broadcast, all_to_all, send). What crosses
the wire follows from it: 2(n-1)/n of it for an all-reduce, (n-1)/n for the two halves.

soli's own collectives (`collectives.py`) are recorded always. Those that PyTorch issues itself (DDP's
reducer, FSDP2, DTensor, functional collectives, pipelining) are recorded inside `record_torch()`: a
dispatch mode costs microseconds on *every* operation, so it is not on by default.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from soli.core.functions import need_operator, tensors_in
from soli.core.report import is_users

KEPT = 100_000
_SOLI = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_issuing = threading.local()


@dataclass
class Record:
    """One collective, as issued by this rank."""

    sequence: int
    operation: str
    axis: str
    bytes: int
    label: str
    site: str
    by: str = "soli"
    ranks: tuple[int, ...] = ()
    issued: float = field(default_factory=time.time)
    done: bool = False
    late: bool = False  # others may run meanwhile: it is waited for later

    def __str__(self) -> str:
        what = f" of {self.label}" if self.label else ""
        return f"{self.operation}{what} over {self.axis} (ranks {list(self.ranks)}), #{self.sequence}, at {self.site}"


class Recorder:
    """The newest records of this rank, oldest first."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.issued = 0
        self.watches = False  # what others issue too

    def add(self, operation: str, axis: str, nbytes: int, ranks: tuple[int, ...], label: str, by: str) -> Record:
        record = Record(self.issued, operation, axis, nbytes, label, call_site(), by, ranks)
        self.issued += 1
        self.records.append(record)
        return record

    @contextmanager
    def apart(self) -> Iterator[deque[Record]]:
        """Within, records go to the list that this gives, and are none of this rank's: of a simulated world."""
        with patch.multiple(self, records=deque(), issued=self.issued):
            yield self.records

    def clear(self) -> None:
        self.records.clear()


recorder = Recorder()


def call_site() -> str:
    """file:line of the nearest frame outside soli, Python and packages; the nearest soli frame if all are inside."""
    frame = sys._getframe(2)
    inside = ""
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _kind(name)
        if kind == "user":
            return f"{name}:{frame.f_lineno}" + (f" ({inside})" if inside else "")
        if kind == "soli" and not inside:
            inside = f"{name[len(_SOLI) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return inside or "unknown"


@cache
def _kind(name: str) -> str:
    """Whose file it is, kept: every collective asks for every frame."""
    if name.startswith(_SOLI):
        return "seam" if "/mesh/" in name else "soli"
    return "torch" if name.startswith(_TORCH) or not is_users(name) else "user"


@contextmanager
def issuing() -> Iterator[None]:
    """Marks collectives as soli's own, so that `record_torch` does not count them a second time."""
    _issuing.depth = getattr(_issuing, "depth", 0) + 1
    try:
        yield
    finally:
        _issuing.depth -= 1


@contextmanager
def record_torch() -> Iterator[Recorder]:
    """Also record the collectives that PyTorch's own engines issue in this block."""
    with patch.object(recorder, "watches", True), _TorchCollectives():
        yield recorder


_told: list[Callable[[str, bool], None]] = []


@contextmanager
def telling(told: Callable[[str, bool], None]) -> Iterator[None]:
    """Calls `told`, with the operation, and whether numbers of rows may be in it, before whatever this block sends that is not soli's own."""
    _told.append(told)
    try:
        with record_torch():
            yield
    finally:
        _told.remove(told)


def watching(operation: str, sent: Tensor, ranks: int) -> bool:
    """Whether a backend in Python, whose calls are not dispatched, is to record what it is asked for."""
    return recorder.watches and _of_others(operation, [sent], ranks)


def _of_others(operation: str, sent: list[Tensor], ranks: int) -> bool:
    """Whether what is about to be sent is not soli's own. Objects, and a number a rank as meters have, are nothing of rows; nor does one rank send."""
    if getattr(_issuing, "depth", 0):
        return False
    for told in _told:
        told(operation, ranks != 1 and any(x.numel() > ranks for x in sent if x.is_floating_point() or x.is_complex()))
    return True


_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier")


def _operation(name: str) -> str | None:
    """Of c10d's names and those of functional collectives (allreduce_coalesced_, _allgather_base_), what they all are."""
    return next((one for one in _OPERATIONS if name.replace("_", "").startswith(one.replace("_", ""))), None)


class _TorchCollectives(TorchDispatchMode):
    """Sees c10d and functional collectives as they are dispatched, from Python and from C++ alike."""

    supports_higher_order_operators = True  # they come here, and are refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        need_operator(func)
        if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return func(*args, **(kwargs or {}))
        operation = _operation(func.name().split("::")[1])
        axis, ranks = _group_of(args) if operation else ("", ())
        others = operation is not None and _of_others(operation, tensors_in(args), len(ranks))
        with issuing():  # a backend in Python would record it once more
            result = func(*args, **(kwargs or {}))
        if others and operation:
            size = lambda side: sum(t.numel() * t.element_size() for t in tensors_in((side,)))
            recorder.add(operation, axis, max(map(size, (*args, result))), ranks, "", "torch")
        return result


def _group_of(args: tuple[Any, ...]) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of the process group among a collective's arguments."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    for arg in args:
        if isinstance(arg, str) and arg not in ("sum", "avg", "min", "max", "product"):
            group = _resolve_process_group(arg)  # type: ignore[arg-type]
        elif isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group = dist.ProcessGroup.unbox(arg)
        else:
            continue
        return group.group_desc or group.group_name, tuple(dist.get_process_group_ranks(group))
    return "unknown", ()
