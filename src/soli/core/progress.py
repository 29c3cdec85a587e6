"""Word of what takes longer than two seconds, on stderr. What is quicker says nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_SECONDS = 2.0
LONGEST_SECONDS = 30.0  # between two lines
SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))

Add = Callable[[int], None]


@contextmanager
def busy(what: str, total: int = 0, *, unit: str = "bytes", shown: bool = True) -> Iterator[Add]:
    """Around work of `total` units; it calls what it is given with the units just done.

    From the second second on a line says how far it is, then ever more rarely. `shown`: on one rank of many.
    """
    began, done, over = time.monotonic(), [0], threading.Event()

    def add(count: int) -> None:
        done[0] += count

    def tell() -> None:
        pause = QUIET_SECONDS
        while not over.wait(pause):
            spent = time.monotonic() - began
            print(f"soli: {what}: {_amount(done[0], total, unit)}{spent:.0f} s", file=sys.stderr, flush=True)
            pause = min(2 * pause, LONGEST_SECONDS)

    if shown:
        threading.Thread(target=tell, name="soli-progress", daemon=True).start()
    try:
        yield add
    finally:
        over.set()


def _amount(done: int, total: int, unit: str) -> str:
    if not total:
        return ""
    if unit != "bytes":
        return f"{done} of {total} {unit}, "
    size, name = next((s, n) for s, n in SIZES if total >= s)
    return f"{done / size:.1f} of {total / size:.1f} {name}, "
