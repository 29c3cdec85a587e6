"""Word of what takes longer than two seconds, on stderr. What is quicker says nothing."""

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
    """Around work of `total` units (0: nobody knows); it calls what it is given with the units just done.

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
    """What is done, of how much where that is known."""
    if not done and not total:
        return ""
    size, digits = 1.0, 0
    if unit == "bytes":
        size, unit = next(one for one in SIZES if max(done, total) >= one[0])
        digits = 1
    return f"{done / size:.{digits}f}" + (f" of {total / size:.{digits}f}" if total else "") + f" {unit}, "
