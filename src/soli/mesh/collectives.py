"""The seam for communication: the only file that calls torch's collectives. Everything is recorded here.

Each function takes an `Axis` (a named group of ranks); on an axis of size 1 it costs nothing. With
`wait=False` it returns at once and `Pending.wait()` completes it: use the result only after that.

On gloo, `reduce_scatter` is sends, receives and a sum, and `all_gather` is sends and receives: gloo's own
reduce-scatter is an all-reduce inside. Measured here (2 cores, torch 2.13, buffer of 67 MB, ms):

    ranks   reduce_scatter: gloo's  ours    all_gather: gloo's  ours    all_reduce: gloo's (both)
      2                      99.8   49.2                70.6    22.5                48.2
      4                     197.7  114.6               134.2    50.3               116.6

Between two ranks `reduce` is a send and a sum: gloo's sends 1.5 times the buffer (half of it each way, and the half
that is wanted again). The sum runs in the order of the ranks, so it is the same on every run. gloo moves CPU memory; CUDA
tensors over gloo (several ranks on one GPU) are staged through it. NCCL's own collectives are used as
they are.

A rank of gloo says that it is ready to receive on the connection on which it sends: what it sends delays the word, and
two ranks that send each other something take turns instead (1 MB each way at 10 Mbit/s: 1.74 s, and 0.89 s where both
ask before they send). So all receives are begun before all sends, and what cannot be ordered so has two groups, whose
connections are two: `Axis.turn`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soli.core.errors import SoliError, failure
from soli.core.report import user_line
from soli.core.versions import all_gather_flat, job_store, reduce_scatter_flat
from soli.mesh.local.group import LocalGroup
from soli.mesh.record import Record, issuing, recorder
from soli.mesh.simulate import Absent

Begin = Callable[[], list[Any]]
"""Issues a collective: torch's works of it."""
Finish = Callable[[], object]
"""What is left to do when a collective has arrived."""
LAST = 1 << 20
"""The tag of a message that nobody sends."""
OPERATORS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Axis:
    """A named group of ranks of which this rank is number `index`. `group` is None where size is 1."""

    name: str
    size: int = 1
    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = None
    backend: str = "gloo"  # with nccl, CPU tensors are gloo's
    other: Any = None  # a second group of the same ranks, where collectives take turns

    def turn(self, number: int) -> Axis:
        """This axis for the `number`-th of collectives of which two are under way: they are not to share a group."""
        return replace(self, group=self.other) if number % 2 and self.other is not None else self

    @property
    def simulated(self) -> bool:
        """Whether the other ranks are not there: what this one sends and receives is recorded alone."""
        return isinstance(self.group, Absent)

    def on_gloo(self, tensor: Tensor) -> bool:
        return self.backend == "gloo" or (self.backend == "nccl" and tensor.device.type == "cpu")


class Pending:
    """A collective under way. `wait()` completes it, names it if it fails, and may be called again. `kept`: whose memory must stay until then."""

    def __init__(self, works: list[Any], record: Record | None, finish: Finish | None = None, kept: Tensor | None = None) -> None:
        self._works, self.record, self._finish, self._kept = works, record, finish, kept

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except (RuntimeError, SoliError) as error:
                raise _failed(self.record, error) from error
        if self._finish is not None:
            self._finish()
        if self.record is not None:
            self.record.done = True
        self._works, self._finish, self._kept = [], None, None


NOTHING = Pending([], None)


def allocate(numel: int, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
    """A tensor [numel], not initialised, for collectives over the axis. Collective: all ranks allocate the same.

    On the local backend it lies in memory that the ranks share, and what it takes part in copies nothing.
    """
    if axis.size > 1 and axis.backend == "local" and not axis.simulated and device.type == "cpu" and numel:
        return axis.group.allocate(numel * dtype.itemsize).view(dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum", *, label: str = "", wait: bool = True) -> Pending:
    """Reduce `tensor` in place over the axis."""
    return _in_place(dist.all_reduce, tensor, axis, label, wait, op=OPERATORS[op])


def reduce_scatter(output: Tensor, whole: Tensor, axis: Axis, *, label: str = "", wait: bool = True) -> Pending:
    """Sum `whole` [size * n] over the axis; this rank's n elements land in `output` [n], or its own slot there."""
    if axis.size == 1:
        output.copy_(whole)
        return NOTHING
    record = _record("reduce_scatter", axis, whole, label)
    if not axis.on_gloo(whole):
        return _begun(record, axis, wait, lambda: [reduce_scatter_flat(output, whole, group=axis.group, async_op=True)])
    sent = _staged(whole, axis).view(axis.size, -1)
    received = torch.empty((axis.size - 1, sent.shape[1]), dtype=sent.dtype)
    into = lambda source: received[source - (source > axis.index)]  # in the order of the ranks

    def finish() -> None:
        parts = [*received[: axis.index], sent[axis.index], *received[axis.index :]]
        # In the order of the ranks. Written last: `output` may be this rank's own slot of `whole`.
        so_far = parts[0]
        for part in parts[1:-1]:
            so_far = torch.add(so_far, part, out=received[0])
        if output.device == sent.device:
            torch.add(so_far, parts[-1], out=output)
        else:
            output.copy_(so_far + parts[-1])

    return _begun(record, axis, wait, lambda: _all_pairs(axis, into, lambda target: sent[target]), finish)


def all_gather(whole: Tensor, part: Tensor, axis: Axis, *, label: str = "", wait: bool = True) -> Pending:
    """Lay every rank's `part` [n] side by side in `whole` [size * n]; `part` may be its own slot in it."""
    if axis.size == 1:
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)
        return NOTHING
    record = _record("all_gather", axis, whole, label)
    if not axis.on_gloo(whole):
        return _begun(record, axis, wait, lambda: [all_gather_flat(whole, part, group=axis.group, async_op=True)])
    moved = whole if whole.device.type == "cpu" else torch.empty(whole.shape, dtype=whole.dtype)
    slots = moved.view(axis.size, -1)
    if slots[axis.index].data_ptr() != part.data_ptr():
        slots[axis.index].copy_(part.view(-1))
    pairs = lambda: _all_pairs(axis, lambda source: slots[source], lambda _: slots[axis.index])
    return _begun(record, axis, wait, pairs, _copy_back(whole, moved))


def _all_pairs(axis: Axis, into: Callable[[int], Tensor], of: Callable[[int], Tensor]) -> list[Any]:
    """Receive from every other rank and send to it. Neighbours first, so that no rank is everyone's first."""
    steps = range(1, axis.size)
    sources = [(axis.index - step) % axis.size for step in steps]
    targets = [(axis.index + step) % axis.size for step in steps]
    return [
        *(dist.irecv(into(source), group=axis.group, group_src=source) for source in sources),
        *(dist.isend(of(target), group=axis.group, group_dst=target) for target in targets),
    ]


def broadcast(tensor: Tensor, axis: Axis, source: int = 0, *, label: str = "", wait: bool = True) -> Pending:
    """Give every rank of the axis the `tensor` of rank number `source` of the axis, in place; that one's is only read."""
    return _in_place(dist.broadcast, tensor, axis, label, wait, axis.index != source, group_src=source)


def reduce(tensor: Tensor, axis: Axis, to: int, *, label: str = "", wait: bool = True) -> Pending:
    """Sum `tensor` over the axis into rank number `to`, in place; what the others have afterwards is undefined."""
    if axis.size != 2 or not axis.on_gloo(tensor):
        return _in_place(dist.reduce, tensor, axis, label, wait, axis.index == to, group_dst=to)
    record = _record("reduce", axis, tensor, label)
    if axis.index != to:
        return _sent(record, _staged(tensor, axis).contiguous(), axis, to, wait)
    other = torch.empty(tensor.shape, dtype=tensor.dtype)
    receiving = lambda: [dist.irecv(other, group=axis.group, group_src=1 - to)]
    return _begun(record, axis, wait, receiving, lambda: tensor.add_(other.to(tensor.device)))


def all_to_all(
    output: Tensor, whole: Tensor, axis: Axis, received: list[int] | None = None, sent: list[int] | None = None, *, label: str = "", wait: bool = True,
) -> Pending:  # fmt: skip
    """Rank r of the axis gets `sent[r]` elements of `whole`, in order; `output` holds `received[r]` of each rank r.

    Both tensors are flat; without sizes every rank gets as much as every other.
    """
    if axis.size == 1:
        output.copy_(whole)
        return NOTHING
    record = _record("all_to_all", axis, whole, label)
    moved, into = _staged(whole, axis), _staged(output, axis)
    begin = lambda: [dist.all_to_all_single(into, moved, received, sent, group=axis.group, async_op=True)]
    return _begun(record, axis, wait, begin, _copy_back(output, into))


def exchange(received: Tensor, sent: Tensor, axis: Axis, to: int, source: int, *, label: str = "", wait: bool = True) -> Pending:
    """Send `sent` to rank number `to` of the axis while `received` arrives from rank number `source`."""
    record = _record("exchange", axis, sent, label)
    on = wire(axis, sent.device)
    moved = sent.detach().to(on).contiguous()
    into = received if on == received.device else torch.empty_like(received, device=on)
    one = lambda call, tensor, peer: dist.P2POp(call, tensor, group=axis.group, group_peer=peer)
    begin = lambda: dist.batch_isend_irecv([one(dist.irecv, into, source), one(dist.isend, moved, to)])
    return _begun(record, axis, wait, begin, _copy_back(received, into), moved)


def wire(axis: Axis, device: torch.device) -> torch.device:
    """Where tensors that the axis's backend sends and receives lie."""
    return device if axis.backend == "nccl" else torch.device("cpu")


def send_later(tensor: Tensor, axis: Axis, to: int, label: str) -> Any:
    """For a batch of torch's: send `tensor` to rank number `to` of the axis."""
    _record("send", axis, tensor, label)
    return tensor if axis.simulated else dist.P2POp(dist.isend, tensor.to(wire(axis, tensor.device)), group=axis.group, group_peer=to)


def receive_later(tensor: Tensor, axis: Axis, source: int, label: str) -> Any:
    """For a batch of torch's: receive `tensor`, which lies on the wire's device, from rank number `source`."""
    _record("recv", axis, tensor, label)
    return tensor if axis.simulated else dist.P2POp(dist.irecv, tensor, group=axis.group, group_peer=source)


def send(tensor: Tensor, axis: Axis, to: int, *, label: str = "", wait: bool = True) -> Pending:
    """Send `tensor` to rank number `to` of the axis."""
    record = _record("send", axis, tensor, label)
    return _sent(record, tensor.detach().to(wire(axis, tensor.device)).contiguous(), axis, to, wait)


def _sent(record: Record, moved: Tensor, axis: Axis, to: int, wait: bool) -> Pending:
    return _begun(record, axis, wait, lambda: [dist.isend(moved, group=axis.group, group_dst=to)], kept=moved)


def receive(tensor: Tensor, axis: Axis, source: int, *, label: str = "") -> None:
    """Receive into `tensor` from rank number `source` of the axis."""
    record = _record("recv", axis, tensor, label)
    on = wire(axis, tensor.device)
    moved = tensor if on == tensor.device else torch.empty_like(tensor, device=on)
    begin = lambda: [dist.irecv(moved, group=axis.group, group_src=source)]
    _begun(record, axis, True, begin, _copy_back(tensor, moved))


def send_json(value: Any, axis: Axis, to: int, *, label: str) -> None:
    """Send a JSON-able value. Small and rare things only."""
    if axis.simulated:
        axis.group.tell(value, axis.index, to)
        return
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    send(torch.tensor([data.numel()]), axis, to, label=label)
    send(data, axis, to, label=label)


def receive_json(axis: Axis, source: int, *, label: str) -> Any:
    """Receive what `send_json` sent."""
    if axis.simulated:
        return axis.group.told(source, axis.index)
    size = torch.empty(1, dtype=torch.int64)
    receive(size, axis, source, label=label)
    data = torch.empty(int(size), dtype=torch.uint8)
    receive(data, axis, source, label=label)
    return json.loads(bytes(data.tolist()))


def gather_json(value: Any, axis: Axis, *, label: str = "") -> list[Any]:
    """Every rank's JSON-able `value`, on every rank, in the order of the axis. Small and rare things only."""
    if axis.size == 1 or axis.simulated:
        return [value] * axis.size
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(axis.size, dtype=torch.int64)
    sizes[axis.index] = data.numel()
    all_reduce(sizes, axis, label=label)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: data.numel()] = data
    whole = torch.empty(axis.size * padded.numel(), dtype=torch.uint8)
    all_gather(whole, padded, axis, label=label)
    rows = zip(whole.view(axis.size, -1).tolist(), sizes.tolist(), strict=True)
    return [json.loads(bytes(row[:size])) for row, size in rows]


def raise_together(check: Callable[[], None], axis: Axis, *, label: str) -> None:
    """Call `check`, which sends nothing itself, on every rank: a SoliError of one is raised on all. Collective.

    Where one rank alone stopped, the others would go on and wait for it.
    """
    error: SoliError | None = None
    try:
        check()
    except SoliError as caught:
        error = caught
    told = gather_json(None if error is None else error.to_json(), axis, label=label)
    if error is not None:
        raise error
    for said in filter(None, told):
        other = SoliError.from_json(said)
        other.consequence = True
        raise other


class Failures:
    """What the first rank that failed alone has said, for all to find. `trials`: how many worlds of this job have passed."""

    trials = 0

    @classmethod
    def first(cls, words: str = "") -> str:
        """`words`: what this rank has to say, where none has before."""
        key = f"soli: first failure of world {cls.trials}"
        with suppress(RuntimeError, ValueError):  # the store is gone with the rank that had it, or there is none
            store = job_store()
            if words or store.check([key]):
                return str((store.compare_set(key, "", words) if words else store.get(key)).decode())
        return words

    @classmethod
    def of_all(cls, ranks: int) -> bool:
        """Whether all of so many ranks have come here within 2 seconds, each with an error of its own; none where one failed alone before."""
        key = f"soli: failures of world {cls.trials}"
        with suppress(RuntimeError, ValueError):
            store = job_store()
            turn, place = divmod(store.add(key, 1) - 1, ranks)
            if place == ranks - 1:
                store.set(f"{key}, of all, turn {turn}", "")
            store.wait([f"{key}, of all, turn {turn}"], timedelta(seconds=2))
            return not cls.first()
        return False


@contextmanager
def ending(axes: Iterable[Axis], who: str, alike: int) -> Iterator[None]:
    """Around what a rank computes for others that wait: an error ends it on all of them now, with the words of the first. `alike`: so many
    ranks compute here, and send each other nothing; where each has an error none waits, and it ends nothing."""
    try:
        yield
    except Exception as error:
        found: Exception = error
        if getattr(error, "lost", isinstance(error, dist.DistError) or "third_party/gloo" in str(error)):
            found = _failed(recorder.records[-1], error)
        elif alike and Failures.of_all(alike):
            raise
        else:
            at = user_line(error.__traceback__)
            said = error if isinstance(error, SoliError) else f"{type(error).__name__}: {error}"
            Failures.first(f"{who}{at and f', at {at}'}: {said}")
        end(axes, Failures.first() or str(found))
        if found is error:
            raise
        raise found from error


def end(axes: Iterable[Axis], words: str) -> None:
    """Leave the groups of these axes: whoever waits in them for this rank fails now, and not at the deadline."""
    for group in {id(group): group for axis in axes for group in (axis.group, axis.other)}.values():
        if isinstance(group, LocalGroup):
            group.abandon(words)
        elif isinstance(group, dist.ProcessGroup):
            with suppress(RuntimeError), issuing():  # gloo closes a group's connections when a receive is late
                group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), LAST).wait(timedelta(milliseconds=1))


def extreme(number: float, axis: Axis, op: str, *, label: str) -> float:
    """The largest ("max") or least ("min") of all ranks' numbers, on every rank."""
    found = torch.tensor([number], dtype=torch.float64)
    all_reduce(found, axis, op, label=label)
    return float(found)


def barrier(axis: Axis, *, label: str = "barrier") -> None:
    """Return once every rank of the axis has called it."""
    all_reduce(torch.zeros(1), axis, label=label)


def _in_place(collective: Callable[..., Any], tensor: Tensor, axis: Axis, label: str, wait: bool, written: bool = True, **options: Any) -> Pending:
    """One of torch's collectives that leaves its result where its argument is. `written`: whether this rank has one."""
    if axis.size == 1:
        return NOTHING
    record, moved = _record(collective.__name__, axis, tensor, label), _staged(tensor, axis)
    begin = lambda: [collective(moved, group=axis.group, async_op=True, **options)]
    return _begun(record, axis, wait, begin, _copy_back(tensor, moved) if written else None, moved)


def _record(operation: str, axis: Axis, tensor: Tensor, label: str) -> Record:
    return recorder.add(operation, axis.name, tensor.numel() * tensor.element_size(), axis.ranks, label, "soli")


def _begun(record: Record, axis: Axis, wait: bool, call: Begin, finish: Finish | None = None, kept: Tensor | None = None) -> Pending:
    """Issues a collective, over ranks that are there, and waits for it where that is asked."""
    with issuing():
        try:
            works = [] if axis.simulated else call()
        except RuntimeError as error:
            raise _failed(record, error) from error
    pending = Pending(works, record, finish, kept)
    if wait:
        pending.wait()
    record.late = not wait
    return pending


def _staged(tensor: Tensor, axis: Axis) -> Tensor:
    return tensor.cpu() if tensor.device.type != "cpu" and axis.on_gloo(tensor) else tensor


def _copy_back(tensor: Tensor, moved: Tensor) -> Finish | None:
    return None if moved is tensor else lambda: tensor.copy_(moved)


def _failed(record: Record | None, error: Exception) -> Exception:
    """A collective that did not finish, said in words: those of the rank that failed, or what, where, and what the backend saw."""
    if not getattr(error, "told", False) and (words := Failures.first()):
        found = failure(words)
        found.consequence = found.lost = found.told = True
        return found
    if isinstance(error, SoliError):
        return error
    text = str(error).strip().split("\n")[0]
    if text.startswith("DataLoader worker"):  # torch's handler of signals raises wherever this rank is
        return error
    if "imeout" in text or "imed out" in text:
        why = "a rank did not arrive before the deadline"
    elif "onnection" in text or "peer" in text or "eset" in text:
        why = "a rank is gone (its connection closed)"
    else:
        why = "the backend refused it"
    fix = "look for the first rank that stopped; `soli run` prints it, and where each rank stood"
    found = failure(f"{record}: {why}", got=text, fix=fix, seen="uneven-decision" if "deadline" in why else "")
    found.consequence = found.lost = True
    return found
