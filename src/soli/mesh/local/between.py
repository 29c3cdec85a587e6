"""The collectives of a group that spans hosts: shared memory inside a host, gloo between the leaders.

The same functions as operations.py, over `Hosts` in place of a board. A sum is first that of each host, in the
order of its ranks, then that of the hosts, in theirs: it depends on where the ranks are and on nothing else.

Shapes: n elements (b bytes) of a rank's tensor, N ranks, H hosts with L ranks here. Flat and contiguous.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soli.mesh.local import operations
from soli.mesh.local.board import Operation
from soli.mesh.local.hosts import Hosts
from soli.mesh.local.messages import unlike
from soli.mesh.local.sums import average, widened


def all_reduce(hosts: Hosts, operation: Operation, tensor: Tensor, op: str) -> Any:
    """Reduce `tensor` [n] in place on every rank."""
    wide, inner = widened(tensor, op), "sum" if op == "avg" else op
    yield from operations.reduce(hosts.board, operation, wide, inner, 0)
    if hosts.leads:
        yield from hosts.agree(operation)
        yield from hosts.summed(wide, inner)
    yield from operations.broadcast(hosts.board, operation, wide.view(torch.uint8), 0)
    _finish(wide, tensor, op, hosts.ranks)


def reduce(hosts: Hosts, operation: Operation, tensor: Tensor, op: str, root: int) -> Any:
    """Reduce `tensor` [n] in place on the root alone."""
    yield from all_reduce(hosts, operation, tensor if hosts.rank == root else tensor.clone(), op)


def reduce_scatter(hosts: Hosts, operation: Operation, out: Tensor, parts: Sequence[Tensor], op: str) -> Any:
    """Reduce part r of every rank into `out` [n] of rank r; a rank's `parts` are N tensors [n]."""
    inner = "sum" if op == "avg" else op
    wide = widened(torch.cat([parts[r] for ranks in hosts.members for r in ranks]), op)
    yield from operations.reduce(hosts.board, operation, wide, inner, 0)
    here = len(hosts.members[hosts.host])
    mine = torch.empty(here, out.numel(), dtype=wide.dtype)
    if hosts.leads:
        yield from hosts.agree(operation)
        row = out.numel() * wide.element_size()
        gathered = torch.empty(len(hosts.members), here * out.numel(), dtype=wide.dtype)
        flat, sent = gathered.view(torch.uint8).view(-1), wide.view(torch.uint8)
        sizes = [row * len(ranks) for ranks in hosts.members]
        yield from hosts.exchanged(flat, sent, [row * here] * len(hosts.members), sizes)
        operations.combine(list(gathered.unbind(0)), mine.view(-1), inner)
    own = torch.empty(out.numel(), dtype=wide.dtype)
    rows = mine.view(torch.uint8).unbind(0) if hosts.leads else ()
    yield from operations.scatter(hosts.board, operation, own.view(torch.uint8), rows, 0)
    _finish(own, out, op, hosts.ranks)


def all_gather(hosts: Hosts, operation: Operation, outs: Sequence[Tensor], mine: Tensor) -> Any:
    """`mine` [b] bytes of rank r into `outs[r]` [b] on every rank."""
    size, longest = mine.numel(), max(len(ranks) for ranks in hosts.members)
    rows = torch.empty(len(hosts.members), longest, size, dtype=torch.uint8)
    here = torch.zeros(longest, size, dtype=torch.uint8)
    targets = list(here[: hosts.board.ranks].unbind(0)) if hosts.leads else []
    yield from operations.gather(hosts.board, operation, targets, mine, 0)
    if hosts.leads:
        yield from hosts.agree(operation)
        yield from hosts.gathered(rows.flatten(1), here.flatten())
    yield from operations.broadcast(hosts.board, operation, rows.flatten(), 0)
    for ranks, row in zip(hosts.members, rows, strict=True):
        for place, rank in enumerate(ranks):
            outs[rank].copy_(row[place])


def broadcast(hosts: Hosts, operation: Operation, data: Tensor, root: int) -> Any:
    """`data` [b] bytes of the root on every rank."""
    source = next(h for h, ranks in enumerate(hosts.members) if root in ranks)
    if hosts.host == source:
        yield from operations.broadcast(hosts.board, operation, data, hosts.members[source].index(root))
    if hosts.leads:
        yield from hosts.agree(operation)
        yield from hosts.told(data, source)
    if hosts.host != source:
        yield from operations.broadcast(hosts.board, operation, data, 0)


def gather(hosts: Hosts, operation: Operation, outs: Sequence[Tensor], mine: Tensor, root: int) -> Any:
    """`mine` [b] bytes of rank r into `outs[r]` on the root."""
    targets = outs or list(torch.empty(hosts.ranks, mine.numel(), dtype=torch.uint8).unbind(0))
    yield from all_gather(hosts, operation, targets, mine)


def scatter(hosts: Hosts, operation: Operation, out: Tensor, parts: Sequence[Tensor], root: int) -> Any:
    """`parts[r]` [b] bytes of the root into `out` [b] of rank r."""
    whole = torch.cat(list(parts)) if parts else torch.empty(hosts.ranks * out.numel(), dtype=torch.uint8)
    yield from broadcast(hosts, operation, whole, root)
    out.copy_(whole[hosts.rank * out.numel() : (hosts.rank + 1) * out.numel()])


def all_to_all(hosts: Hosts, operation: Operation, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> Any:
    """`parts[r]` bytes of rank s into `outs[s]` of rank r: through memory where s and r share it."""
    sizes = torch.tensor([part.numel() for part in parts])
    table = torch.empty(hosts.ranks, hosts.ranks, dtype=torch.int64)
    yield from all_gather(hosts, operation, table.view(torch.uint8).unbind(0), sizes.view(torch.uint8))
    operations.check_splits(hosts.board, hosts.rank, [out.numel() for out in outs], table)
    here = hosts.members[hosts.host]
    yield from operations.all_to_all(hosts.board, operation, [outs[r] for r in here], [parts[r] for r in here])
    far = [r not in here for r in range(hosts.ranks)]
    out_sizes = [out.numel() if far[r] else 0 for r, out in enumerate(outs)]
    sent_sizes = [part.numel() if far[r] else 0 for r, part in enumerate(parts)]
    sent = torch.cat([part for r, part in enumerate(parts) if far[r]])
    got = torch.empty(sum(out_sizes), dtype=torch.uint8)
    options = dist.AllToAllOptions()
    yield from hosts.finish(lambda: hosts.everyone.alltoall_base(got, sent, out_sizes, sent_sizes, options))
    for rank, piece in enumerate(got.split(out_sizes)):
        if far[rank]:
            outs[rank].copy_(piece)


def barrier(hosts: Hosts, operation: Operation) -> Any:
    """Go on once every rank is here."""
    yield from operations.barrier(hosts.board, operation)
    if hosts.leads:
        yield from hosts.agree(operation)
    yield from operations.barrier(hosts.board, operation)


def send(hosts: Hosts, operation: Operation, data: Tensor, target: int, tag: int) -> Any:
    """`data` [b] bytes to a rank of another host, behind its size and checksum."""
    head = torch.tensor([data.numel(), operation.checksum])
    yield from hosts.in_thread(lambda: hosts.everyone.send([head], target, tag).wait())
    yield from hosts.in_thread(lambda: hosts.everyone.send([data], target, tag).wait())


def receive(hosts: Hosts, data: Tensor, source: int, tag: int, checksum: int) -> Any:
    """The next message with this tag from a rank of another host into `data` [b] bytes."""
    head = torch.empty(2, dtype=torch.int64)
    yield from hosts.in_thread(lambda: hosts.everyone.recv([head], source, tag).wait())
    (total, sent), of = head.tolist(), hosts.board.numbers
    if (total, sent) != (data.numel(), checksum):
        raise unlike(hosts.board, (of[source], of[hosts.rank]), tag, total, data.numel(), sent != checksum)
    yield from hosts.in_thread(lambda: hosts.everyone.recv([data], source, tag).wait())


def _finish(wide: Tensor, tensor: Tensor, op: str, ranks: int) -> None:
    if op == "avg":
        average(wide, ranks)
    if wide.data_ptr() != tensor.data_ptr():
        tensor.copy_(wide)
