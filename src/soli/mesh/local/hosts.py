"""What joins the hosts of a group: its first rank on each host, its leader, talks to the other leaders over gloo.

gloo is PyTorch's backend for CPU tensors between machines. Here it carries bytes; sums are ours, so that they
have one order. Whatever breaks on one host is left in the store, where those of the other hosts who wait look
ten times a second.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soli.core.errors import SoliError
from soli.mesh.local.board import ABROAD, DIFFERENT, LOOK_SECONDS, WORDS, Board, Operation, Step
from soli.mesh.local.sums import combine

SAID = 1024  # bytes of what leaders tell each other of an operation
GRACE_SECONDS = 1.0  # for the other hosts to say that they are late too


class Hosts:
    """A group over several hosts, seen from one rank. `members[h]` are the group's ranks on host h."""

    def __init__(self, board: Board, store: Any, rank: int, members: list[list[int]], timeout: timedelta) -> None:
        self.board, self.rank, self.members, self.store = board, rank, members, store
        self.called = [[board.numbers[r] for r in ranks] for ranks in members]  # by the job
        self._store_gone = 0.0  # since when
        self.ranks = sum(map(len, members))
        self.host = next(h for h, ranks in enumerate(members) if rank in ranks)
        self.leads = board.rank == 0
        self.everyone: Any = dist.ProcessGroupGloo(dist.PrefixStore("ranks", store), rank, self.ranks, timeout)
        self.leaders: Any = None
        if self.leads:
            self.leaders = dist.ProcessGroupGloo(dist.PrefixStore("leaders", store), self.host, len(members), timeout)
        board.on_broken, board.on_look = self._broken, self._look
        board.on_late = self._late

    # --- among the leaders ----------------------------------------------------------------------------

    def agree(self, operation: Operation) -> Step:
        """Leaders only: all hosts are about to do the same, or all raise."""
        said = f"{operation.checksum}\n{operation.text} at {operation.site}".encode()[:SAID]
        mine = torch.zeros(SAID, dtype=torch.uint8)
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        rows = torch.empty(len(self.members), SAID, dtype=torch.uint8)
        yield from self.gathered(rows, mine)
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").split("\n", 1) for row in rows]
        if any(text[0] != texts[0][0] for text in texts):
            lines = [f"  ranks {ranks}: {text[1]}" for ranks, text in zip(self.called, texts, strict=True)]
            raise self.board.fail(f"the hosts of group {self.board.name} {DIFFERENT}\n" + "\n".join(lines))

    def gathered(self, rows: Tensor, mine: Tensor) -> Step:
        """Leaders only: `mine` [b] bytes of host h into `rows[h]` [H, b] of every host."""
        if mine.numel():
            yield from self.finish(lambda: self.leaders.allgather([list(rows.unbind(0))], [mine]))

    def summed(self, tensor: Tensor, op: str) -> Step:
        """Leaders only: reduce `tensor` [n] in place over the hosts, in their order."""
        count, hosts = tensor.numel(), len(self.members)
        if not count:
            return
        size = -(-count // hosts)
        padded = torch.zeros(hosts * size, dtype=tensor.dtype)
        padded[:count] = tensor
        parts = torch.empty(hosts, size, dtype=tensor.dtype)
        sizes = [size * tensor.element_size()] * hosts
        yield from self.exchanged(parts.view(torch.uint8).view(-1), padded.view(torch.uint8), sizes, sizes)
        total = torch.empty(size, dtype=tensor.dtype)
        combine(list(parts.unbind(0)), total, op)
        yield from self.gathered(padded.view(torch.uint8).view(hosts, -1), total.view(torch.uint8))
        tensor.copy_(padded[:count])

    def exchanged(self, out: Tensor, sent: Tensor, out_sizes: list[int], sizes: list[int]) -> Step:
        """Leaders only: `sizes[h]` bytes of `sent` to host h, `out_sizes[h]` bytes of `out` from it."""
        options = dist.AllToAllOptions()
        if sum(out_sizes) + sum(sizes):
            yield from self.finish(lambda: self.leaders.alltoall_base(out, sent, out_sizes, sizes, options))

    def told(self, data: Tensor, host: int) -> Step:
        """Leaders only: `data` [b] bytes of one host's leader on all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = host, 0
        if data.numel():
            yield from self.finish(lambda: self.leaders.broadcast([data], options))

    # --- gloo's work, as steps ------------------------------------------------------------------------

    def finish(self, begin: Callable[[], Any]) -> Step:
        """Until gloo has done what `begin` asks of it."""
        waits = self.board.rank * WORDS + ABROAD
        try:
            work = begin()
            future = work.get_future()  # gloo completes it before the work: asking the work would miss the ring
            future.add_done_callback(lambda _: self.board.ring(self.board.rank))
            self.board.words[waits] = 1
            while not future.done():
                yield
            self.board.words[waits] = 0
            work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def in_thread(self, call: Callable[[], Any]) -> Step:
        """A message of gloo cannot be asked whether it has arrived: a thread waits for it."""
        ended: list[Exception | None] = []

        def run() -> None:
            try:
                call()
                ended.append(None)
            except RuntimeError as error:
                ended.append(error)
            self.board.ring(self.board.rank)

        threading.Thread(target=run, name="soli-message", daemon=True).start()
        while not ended:
            yield
        if ended[0] is not None:
            raise self._failed(ended[0])

    # --- what goes wrong on another host --------------------------------------------------------------

    def _look(self) -> None:
        try:
            found = self.store.get("failed").decode() if self.store.check(["failed"]) else ""
            self._store_gone = 0.0
        except RuntimeError as error:
            # A rank that has all it needs may end, with the store, while what it sent is still on its way here.
            self._store_gone = self._store_gone or time.monotonic()
            if time.monotonic() - self._store_gone < GRACE_SECONDS:
                return
            found = f"the host with the store of group {self.board.name} is gone\n  {error}"
        if found:
            raise self.board.fail(found)

    def _failed(self, error: Exception) -> Exception:
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:  # a host that found something says it before its connections close
            try:
                self._look()
            except SoliError as found:
                return found
            time.sleep(0.02)
        others = [ranks for host, ranks in enumerate(self.called) if host != self.host]
        first = str(error).strip().split("\n")[0]
        return self.board.fail(f"a host of group {self.board.name} is gone, one of ranks {others}\n  {first}")

    def _broken(self, error: Exception) -> None:
        try:
            first = self.store.add("failures", 1) == 1
        except RuntimeError:  # the store is gone: that is what `error` says
            return
        if first:
            self.store.set("failed", str(error))
        time.sleep(3 * LOOK_SECONDS)  # this process may end now, and the store with it: let the others look

    def _late(self) -> str:
        """Which hosts have not come as far as this one: they do not say that they wait. Empty: not known."""
        try:
            self.store.set(f"waits{self.host}", "1")
            time.sleep(GRACE_SECONDS)
            absent = [r for h, r in enumerate(self.called) if not self.store.check([f"waits{h}"])]
        except RuntimeError:  # the store is gone, with its host; who stands where is said all the same
            return ""
        return f"none of ranks {', '.join(map(str, absent))} arrived from the other hosts" if absent else ""
