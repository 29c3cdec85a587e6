"""The processes of one launch: wait for them until the first fails or the time is up, and end all they started."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable


def wait(
    ranks: list[subprocess.Popen], until: float, grace: float, watch: Callable[[], None] = lambda: None
) -> tuple[int | None, bool]:
    """(the rank that failed first or None, whether the time was up before any did).

    until: of time.monotonic(). grace: seconds that the others get after the first failure, to say why themselves.
    watch: called every 50 ms; what it raises ends the waiting.
    """
    first = None
    while None in [process.poll() for process in ranks]:  # every one is asked, not only until one still runs
        watch()
        if first is None:
            first = next((i for i, p in enumerate(ranks) if p.returncode not in (None, 0)), None)
            if first is not None:
                until = min(until, time.monotonic() + grace)
        if time.monotonic() > until:
            return first, first is None
        time.sleep(0.05)
    failed = next((i for i, p in enumerate(ranks) if p.returncode != 0), None)
    return (first if first is not None else failed), False


def kill(ranks: list[subprocess.Popen]) -> None:
    """End every process of every rank's session, and reap the ranks."""
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):  # gone already, with all it started, as it should be
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
