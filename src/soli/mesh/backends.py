"""Which backend CPU ranks talk over, and why; and of how many cores. Imports no torch: the launcher and `soli env` ask too."""

import os
import platform
import sys
from pathlib import Path

from soli.core.errors import on_all_ranks

CPU_BACKENDS = ("local", "gloo")
TESTED = ("x86_64",)
"""Processors on which the local backend has been run: its handshakes rest on the order of stores."""


def processor() -> str:
    """The name of this machine's processor; empty where nothing says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_backend(said: str | None = None) -> tuple[str, str]:
    """(backend, why). `said` is the user's wish, else SOLI_BACKEND; without one the best that works here."""
    if wish := said or os.environ.get("SOLI_BACKEND"):
        if wish not in CPU_BACKENDS:
            raise on_all_ranks(f"{'--backend' if said else 'SOLI_BACKEND'} names a backend that soli does not have for CPU tensors", got=wish, allowed=", ".join(CPU_BACKENDS))
        return wish, "--backend says so" if said else "SOLI_BACKEND says so"
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "gloo", "the local backend needs Linux with memfd"
    if platform.machine() not in TESTED:
        return ("gloo", f"the local backend has not been tested on {platform.machine()}: ask for it if you like")
    return "local", "ranks of one machine meet in shared memory, hosts over gloo"
