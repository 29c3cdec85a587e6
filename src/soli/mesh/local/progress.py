"""What is under way in this process: operations that go on whenever somebody waits, and in the background.

Each operation is a generator that yields where it waits for another rank. Operations of one queue (the
collectives of a group, the messages to one rank) run one after the other, those of different queues side by
side. Whoever waits for one advances all; while nobody waits, a thread does, so that `async_op=True` is that.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from soli.core.report import SAY_SECONDS, say
from soli.mesh.local.board import Board
from soli.mesh.local.waiting import SLEEP_SECONDS, Backoff
from soli.mesh.record import call_site

NAP_SECONDS = 50e-6
LONGEST_NAP_SECONDS = 1e-3
WATCH_SECONDS = 0.1  # between two looks at deadlines

_Base: Any = dist.Work  # torch's stub of it has signatures of its own


@contextmanager
def _unseen() -> Iterator[None]:
    """Modes of whoever waits (a recorder, torch's selective checkpoint) are not to see the work that others asked for.

    How much of it falls into one wait depends on timing.
    """
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with torch._C.DisableTorchFunction(), modes:
        yield


class LocalWork(_Base):
    """An operation that was issued: c10d's Work, with a future."""

    def __init__(self, board: Board, steps: Any, outputs: list[Any], deadline: float, peer: int | None) -> None:
        super().__init__()
        self.board, self.steps, self.outputs, self.seconds, self.peer = board, steps, outputs, deadline, peer
        self.began, self.done = time.monotonic(), False
        self.error: Exception | None = None
        self.future: torch.futures.Future | None = None
        self.source: list[int] = []

    def say(self, idle: float) -> None:
        """Let the launcher know that the rank waits, and has looked now. It waits whole: its other threads and hosts bring no news."""
        board, peer = self.board, self.peer
        if threading.current_thread() is threading.main_thread() and board.on_look is None:
            said = board.said(board.rank) if peer is None else f"a message, rank {board.global_ranks[peer]}, at {call_site()}"
            say(f"{said}, group {board.name}", time.time() - idle, time.time())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it is done; raise its error."""
        if timeout is not None and timeout > timedelta(0):
            self.seconds = min(self.seconds, time.monotonic() - self.began + timeout.total_seconds())
        if not self.done:
            engine.drive(self)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done:
            engine.poll()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        return self.outputs

    def source_rank(self) -> int:
        return self.source[0]

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        with engine.lock:
            if self.future is None:
                self.future = torch.futures.Future()
                if self.done:
                    self.settle()
        return self.future

    def settle(self) -> None:
        """Complete the future, if somebody asked for one."""
        if self.future is not None and not self.future.done():
            if self.error is not None:
                self.future.set_exception(self.error)
            else:
                self.future.set_result(self.outputs)


class Engine:
    """The queues of this process, and the thread that looks after them while nobody waits."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[Hashable, deque[LocalWork]] = {}
        self._drivers = 0
        self._there_is_work = threading.Event()
        self._nobody_drives = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def stop(self) -> None:
        """End the thread before the interpreter goes: torch may not be called by a thread that outlives it."""
        self._ends = True
        self._there_is_work.set()
        self._nobody_drives.set()
        if self._thread is not None:
            self._thread.join()

    def add(self, queue: Hashable, work: LocalWork) -> LocalWork:
        """Begin an operation: it goes as far as it can now, the rest follows."""
        with self.lock:
            self.queues.setdefault(queue, deque()).append(work)
            self.poll()
        if not work.done:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="soli-local", daemon=True)
                self._thread.start()
            self._there_is_work.set()
        return work

    def poll(self) -> bool:
        """Advance everything; whether anything moved."""
        finished: list[LocalWork] = []
        with self.lock, torch.inference_mode(), _unseen():
            before = Board.moves
            for queue in list(self.queues):
                works = self.queues[queue]
                while works and self._advance(works[0]):
                    finished.append(works.popleft())
                if not works:
                    del self.queues[queue]
            moved = Board.moves != before
        for work in finished:
            work.settle()
        return moved or bool(finished)

    def _advance(self, work: LocalWork) -> bool:
        """One step of an operation; True when it has ended, well or not."""
        if work.done:
            return True
        if work.board.broken is not None:
            work.error, work.done = work.board.broken, True
            return True
        try:
            next(work.steps)
            return False
        except StopIteration:
            pass
        except BaseException as error:  # it is the operation's: whoever waits for it gets it; Ctrl-C ends it halfway, too
            work.error = error if isinstance(error, Exception) else RuntimeError(f"it was interrupted by {type(error).__name__}")
            work.board.breaks(work.error)
            if work.error is not error:
                work.done = True
                raise
        work.done = True
        return True

    def drive(self, work: LocalWork) -> None:
        """Advance everything until `work` has ended."""
        backoff, said = Backoff(work.board.ranks), 0.0
        news = lambda: (self.poll() and backoff.reset()) or work.done
        with self.lock:
            self._drivers += 1
        try:
            while not work.done:
                if not news() and backoff.pause():
                    self.watch()
                    now = time.perf_counter()
                    if now - max(said, backoff.began) > SAY_SECONDS:
                        said = now
                        work.say(now - backoff.began)
                    # Only its own group's ranks wake a sleeper: with more under way it looks up often.
                    work.board.sleep(news, backoff.sleep_seconds() if self._only(work.board) else SLEEP_SECONDS)
        finally:
            if said:
                say("")
            with self.lock:
                self._drivers -= 1
            if not self._drivers:
                self._nobody_drives.set()

    def _only(self, board: Board) -> bool:
        with self.lock:
            return all(work.board is board for works in self.queues.values() for work in works)

    def watch(self) -> None:
        """End what cannot end any more: a rank that is gone, an error elsewhere, a deadline that is over."""
        with self.lock:
            for work in [works[0] for works in self.queues.values() if works]:
                if work.done:
                    continue
                try:
                    work.board.check(work.peer)
                    if time.monotonic() - work.began > work.seconds:
                        raise work.board.late(work.seconds)
                except Exception as error:
                    work.error, work.done = error, True
                    work.board.breaks(error)

    def _serve(self) -> None:
        nap, looked = NAP_SECONDS, time.monotonic()
        while not self._ends:
            if not self.queues:
                self._there_is_work.clear()
                if not self.queues and not self._ends:
                    self._there_is_work.wait()
                nap = NAP_SECONDS
            if self._drivers:
                self._nobody_drives.clear()
                if self._drivers and not self._ends:  # else it was set before it was cleared
                    self._nobody_drives.wait()
                continue
            nap = NAP_SECONDS if self.poll() else min(2 * nap, LONGEST_NAP_SECONDS)
            if time.monotonic() - looked > WATCH_SECONDS:
                looked = time.monotonic()
                self.watch()
            time.sleep(nap)


engine = Engine()
atexit.register(engine.stop)
