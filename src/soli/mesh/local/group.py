"""The c10d backend `local`: ranks of one host over shared memory, in Python and torch alone.

Why not gloo: its loopback sockets take 0.4 ms for the smallest all-reduce at 2 ranks and 7 ms at 4 (2 cores),
and move 0.75 GB/s. torch has no other backend for CPU tensors without a compiler or MPI.

    import soli.backend
    torch.distributed.init_process_group("local")
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soli.core.errors import SoliError
from soli.core.report import named
from soli.mesh.local import between, identity, messages, operations, sums
from soli.mesh.local.board import Board, Operation
from soli.mesh.local.hosts import Hosts
from soli.mesh.local.progress import LocalWork, engine
from soli.mesh.record import call_site, recorder, watching

_Base: Any = dist.ProcessGroup  # torch's stub of it names only some of the overloads that it calls
Back = Callable[[], None] | None
"""Brings what was received to where it was asked for; None: it is there."""
ANY_SIZE = "all_to_all"
"""Whose tensors may have other sizes on other ranks."""


class LocalGroup(_Base):
    """One group of ranks. Every method returns a Work; tensors are CPU tensors of any layout."""

    def __init__(self, options: Any) -> None:
        """`options`: c10d's _DistributedBackendOptions."""
        store, rank, ranks, timeout = options.store, options.group_rank, options.group_size, options.timeout
        super().__init__(rank, ranks)
        self.timeout, self.ranks, self._name = timeout, ranks, str(options.group_id) or "default"
        numbers = list(options.global_ranks_in_group)  # in the job; empty where they are all
        told = f"{self._name} ({named(numbers)})" if numbers else self._name
        numbers = numbers or list(range(ranks))
        people = identity.exchange(store, rank, ranks, timeout)
        names = list(dict.fromkeys(person.host for person in people))
        members = [[r for r, person in enumerate(people) if person.host == name] for name in names]
        self._here = members[names.index(people[rank].host)]
        host = dist.PrefixStore(f"host{self._here[0]}", store)
        pids = [people[r].pid for r in self._here]
        self.board = Board(host, self._here.index(rank), pids, told, timeout, self._here, numbers)
        self._inboxes = [messages.Inbox(self.board, source) for source in range(len(self._here))]
        # One host: the operations of a board. Several: the same ones, of the hosts and their boards.
        self._do: Any = operations
        self._on: Any = self.board
        if len(members) > 1:
            self._do, self._on = between, Hosts(self.board, store, rank, members, timeout)
        identity.leave_last(store, rank, ranks, timeout)
        self._batch: list[LocalWork] | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return "local"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    group_name = property(getGroupName)

    def __repr__(self) -> str:
        return f"LocalGroup({self.board.name}, {self.board.ranks} of {self.ranks} ranks here)"

    def allocate(self, size: int) -> Tensor:
        """`size` bytes that the ranks of this host share; collectives on tensors in them copy nothing. Collective."""
        return self.board.allocate(size)

    def abandon(self, words: str) -> None:
        """Leave the group after an error: whoever waits in it for this rank raises an error of these words instead."""
        self.board.breaks(self.board.fail(words))

    # --- reductions -----------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = sums.name_of(_op(opts))
        return self._each("all_reduce", op, tensors, op)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        op, root = sums.name_of(opts.reduceOp), opts.rootRank
        return self._each("reduce", f"{op}, root {self.board.numbers[root]}", tensors, op, root)

    def reduce_scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any = None) -> Any:
        op = sums.name_of(_op(opts))
        return _joined([self._reduce_scatter(out, part, op) for out, part in zip(outs, parts, strict=True)], outs)

    def reduce_scatter_single(self, out: Tensor, whole: Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter(out, list(_flat(whole).view(self.ranks, -1).unbind(0)), sums.name_of(_op(opts)))

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], wholes: list[Tensor], opts: Any = None) -> Any:
        return _joined([self.reduce_scatter_single(o, w, opts) for o, w in zip(outs, wholes, strict=True)], outs)

    def _reduce_scatter(self, out: Tensor, parts: Sequence[Tensor], op: str) -> LocalWork:
        flat, back = _target(out)
        sent = [_flat(part) for part in parts]
        _check_sizes("reduce_scatter", [flat.numel()] * len(sent), [part.numel() for part in sent])
        return self._begin("reduce_scatter", op, out, [out], back, flat, sent, op)

    # --- movement -------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._each("broadcast", f"root {self.board.numbers[opts.rootRank]}", tensors, opts.rootRank, form=_bytes)

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        return _joined([self._all_gather(out, tensor) for out, tensor in zip(outs, tensors, strict=True)], outs)

    def allgather_coalesced(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allgather([[row[i] for row in outs] for i in range(len(tensors))], tensors, opts)

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        flat, back = _target(out)
        mine = _flat(tensor)
        _check_sizes("all_gather", [flat.numel()], [mine.numel() * self.ranks])
        targets = [_bytes(part) for part in flat.view(self.ranks, -1).unbind(0)]
        return self._begin("all_gather", "", tensor, [out], back, targets, _bytes(mine))

    def all_gather_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        return _joined([self.all_gather_single(o, t) for o, t in zip(outs, tensors, strict=True)], outs)

    def _all_gather(self, outs: list[Tensor], tensor: Tensor) -> LocalWork:
        targets, back = _targets(outs)
        mine = _flat(tensor)
        _check_sizes("all_gather", [t.numel() for t in targets], [mine.numel()] * len(targets))
        return self._begin("all_gather", "", tensor, outs, back, [_bytes(t) for t in targets], _bytes(mine))

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        root, mine = opts.rootRank, _flat(tensors[0])
        targets, back = _targets(outs[0] if outs else [])
        _check_sizes("gather", [t.numel() for t in targets], [mine.numel()] * len(targets))
        given = [_bytes(t) for t in targets], _bytes(mine), root
        return self._begin("gather", f"root {self.board.numbers[root]}", tensors[0], outs, back, *given)

    def scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> Any:
        root, sent = opts.rootRank, [_bytes(_flat(part)) for part in (parts[0] if parts else [])]
        flat, back = _target(outs[0])
        _check_sizes("scatter", [_bytes(flat).numel()] * len(sent), [part.numel() for part in sent])
        return self._begin("scatter", f"root {self.board.numbers[root]}", outs[0], outs, back, _bytes(flat), sent, root)

    def alltoall(self, outs: list[Tensor], parts: list[Tensor], opts: Any = None) -> Any:
        targets, back = _targets(outs)
        sent = [_bytes(_flat(part)) for part in parts]
        return self._begin(ANY_SIZE, "", outs[0], outs, back, [_bytes(t) for t in targets], sent)

    def all_to_all_single(self, out: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None) -> Any:
        flat, back = _target(out)
        ranks = self.ranks
        row = lambda t: t.numel() // t.shape[0] if t.dim() and t.shape[0] else 1
        targets = _split(flat, [n * row(out) for n in out_sizes] or [flat.numel() // ranks] * ranks)
        sent = _split(_flat(tensor), [n * row(tensor) for n in sizes] or [tensor.numel() // ranks] * ranks)
        return self._begin(ANY_SIZE, "", out, [out], back, [_bytes(t) for t in targets], [_bytes(s) for s in sent])

    def barrier(self, opts: Any = None) -> Any:
        return self._begin("barrier", "", torch.empty(0), [], None)

    # --- messages -------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        data = _flat(tensors[0])
        said = self._operation("send", f"to {target}, tag {tag}", tensors[0], checksum_of=str(data.dtype))
        if target not in self._here:  # gloo has sent when it is received, so no tag may wait for another
            far = between.send(self._on, said, _bytes(data), target, tag)
            return self._issue((id(self), "send", target, tag), far, tensors, None, None)
        place = self._here.index(target)
        steps = messages.send(self.board, said, _bytes(data), place, tag)
        return self._issue((id(self), "send", target), steps, tensors, None, place)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        flat, back = _target(tensors[0])
        data, checksum = _bytes(flat), zlib.crc32(str(flat.dtype).encode())
        self._operation("recv", f"from {source}", tensors[0])  # recorded, where somebody watches
        if source not in self._here:
            far = between.receive(self._on, data, source, tag, checksum)
            work = self._issue((id(self), "receive", source, tag), far, tensors, back, None)
        else:
            inbox = self._inboxes[self._here.index(source)]
            with engine.lock:
                message = inbox.expect(tag, data, checksum)
            work = self._issue(object(), messages.receive(inbox, message, data, checksum), tensors, back, inbox.source)
        work.source.append(source)
        return work

    # --- c10d's other names, and coalescing -----------------------------------------------------------

    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: Any) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any) -> Any:
        works, self._batch = self._batch or [], None
        return _joined(works, [])

    # --- issuing --------------------------------------------------------------------------------------

    def _each(self, name: str, more: str, tensors: list[Tensor], *given: Any, form: Callable[[Tensor], Tensor] = lambda flat: flat) -> Any:
        """The same operation in place on each of `tensors`, which it gets flat, in this form."""
        works = []
        for tensor in tensors:
            flat, back = _target(tensor, keep=True)
            works.append(self._begin(name, more, tensor, [tensor], back, form(flat), *given))
        return _joined(works, tensors)

    def _begin(self, name: str, more: str, tensor: Tensor, outs: list[Any], back: Back, *given: Any) -> LocalWork:
        """Issue the operation of this name with what it is given."""
        steps = getattr(self._do, name)(self._on, self._operation(name, more, tensor), *given)
        return self._issue((id(self), "collective"), steps, outs, back, None)

    def _operation(self, name: str, more: str, tensor: Tensor, checksum_of: str = "") -> Operation:
        if watching(name, tensor, self.ranks):
            nbytes = (self.ranks if name in ("all_gather", "reduce_scatter") else 1) * tensor.numel() * tensor.element_size()
            recorder.add(name, self._name, nbytes, tuple(dist.get_process_group_ranks(self)), "", "torch")
        text, checksum = _words(name, more, tensor.dtype, tuple(tensor.shape), checksum_of)
        return Operation(text, call_site(), checksum)

    def _issue(self, queue: Any, steps: Any, outputs: list[Any], back: Back, peer: int | None) -> LocalWork:
        steps = steps if back is None else _then(steps, back)
        work = LocalWork(self.board, steps, outputs, self.timeout.total_seconds(), peer)
        engine.add(queue, work)
        if self._batch is not None:
            self._batch.append(work)
        return work


@functools.lru_cache(maxsize=4096)
def _words(name: str, more: str, dtype: torch.dtype, shape: tuple[int, ...], same: str) -> tuple[str, int]:
    """What an operation is called, and the checksum of what has to be the same on all ranks."""
    kind = str(dtype).removeprefix("torch.")
    text = f"{name}({more})" if more else name
    same = same or f"{text} {kind} {'' if name == ANY_SIZE else math.prod(shape)}"
    return f"{text} of {kind}{list(shape)}", zlib.crc32(same.encode())


def _then(steps: Any, back: Callable[[], None]) -> Any:
    yield from steps
    back()


def _joined(works: list[LocalWork], outputs: list[Any]) -> Any:
    """One Work for several; a single one stays itself."""
    if len(works) == 1:
        works[0].outputs = outputs or works[0].outputs
        return works[0]
    if not works:
        raise SoliError("a collective was called without tensors")
    return engine.add(object(), LocalWork(works[0].board, _all_of(works), outputs, works[0].seconds, None))


def _all_of(works: list[LocalWork]) -> Any:
    for work in works:
        while not work.done:
            yield
        if work.error is not None:
            raise work.error


def _op(opts: Any) -> Any:
    """The reduction: c10d gives options, or the operator itself, or nothing for a sum."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _refuse(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.is_sparse:
        got = f"a {'sparse' if tensor.is_sparse else tensor.device} tensor"
        raise SoliError("the local backend moves dense CPU tensors", got=got, fix="take nccl for CUDA tensors, or move the tensor to the CPU")


def _flat(tensor: Tensor) -> Tensor:
    """What is sent: the elements in order, copied where they do not lie so."""
    _refuse(tensor)
    return _line(tensor.detach().contiguous())


def _line(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements in a row; of a single one torch keeps whatever stride it had."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _target(tensor: Tensor, keep: bool = False) -> tuple[Tensor, Back]:
    """What is filled, flat; and if it had to be a copy, how to bring it back. `keep`: its values are read too."""
    _refuse(tensor)
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return _line(tensor), None
    copy = tensor.contiguous() if keep else torch.empty(tensor.shape, dtype=tensor.dtype)
    return _line(copy), lambda: (tensor.copy_(copy), None)[1]


def _targets(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Back]:
    pairs = [_target(tensor) for tensor in tensors]
    backs = [back for _, back in pairs if back is not None]
    return [flat for flat, _ in pairs], (lambda: [back() for back in backs].clear()) if backs else None


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _split(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    _check_sizes("all_to_all", [flat.numel()], [sum(sizes)])
    return list(flat.split(list(sizes)))


def _check_sizes(name: str, got: Sequence[int], wanted: Sequence[int]) -> None:
    if list(got) != list(wanted):
        raise SoliError(f"the sizes of {name} do not fit", got=f"{list(got)} elements", allowed=f"{list(wanted)}")
