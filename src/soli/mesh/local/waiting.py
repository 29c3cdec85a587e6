"""Waiting for another process, so that those who compute get the cores.

First a short spin, if every rank has a core of its own; then `sched_yield`; then sleep in the kernel on a
futex in shared memory, from which a rank that has news wakes us. A sleeper looks up now and then: after 10 ms,
then half as often each time, at least every 100 ms; a wake-up that is lost costs that and no more. On processors whose number of that system call is not known here
a sleeper looks up every millisecond.
"""

import ctypes
import os
import platform
import time

from soli.mesh.backends import cores

SPIN_SECONDS = 50e-6
YIELD_SECONDS = 500e-6
SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 10e-3, 100e-3
SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # futex(2)
WAIT, WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)


class Backoff:
    """How one wait goes on: `pause()` once for each look that found nothing."""

    def __init__(self, ranks: int) -> None:
        self.spin = SPIN_SECONDS if ranks <= cores() else 0.0
        self.began, self.slept = 0.0, SLEEP_SECONDS / 2

    def reset(self) -> bool:
        """There was news, which is what this says: begin with the short waits again."""
        self.began, self.slept = 0.0, SLEEP_SECONDS / 2
        return True

    def pause(self) -> bool:
        """Wait a little. True: it is time to sleep in the kernel, which the caller does."""
        now = time.perf_counter()
        if not self.began:
            self.began = now
        waited = now - self.began
        if self.spin <= waited < YIELD_SECONDS:
            os.sched_yield()
        return waited >= YIELD_SECONDS

    def sleep_seconds(self) -> float:
        """How long the next sleep in the kernel may last."""
        self.slept = min(2 * self.slept, LONGEST_SLEEP_SECONDS)
        return self.slept


def sleep_on(address: int, seen: int, seconds: float) -> None:
    """Sleep until the 32-bit word at `address` is woken, or is no longer `seen`, or the time (below 1 s) is over."""
    if SYSCALL is None:
        time.sleep(SLEEP_SECONDS / 10)
        return
    limit = ctypes.byref(_Timespec(0, int(seconds * 1e9)))
    _libc.syscall(SYSCALL, ctypes.c_void_p(address), WAIT, ctypes.c_uint32(seen), limit, None, 0)


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`."""
    if SYSCALL is not None:
        _libc.syscall(SYSCALL, ctypes.c_void_p(address), WAKE, 2**31 - 1, None, None, 0)
