"""What Linux says about this process and this machine. Only /proc and libc."""

import ctypes
import os
import platform
from pathlib import Path


def memory() -> dict[str, int]:
    """This process's resident memory in bytes: rss now, peak since the last `reset_peak`, and rss by kind."""
    names = {"VmRSS": "rss", "VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in names:
            found[names[key]] = int(rest.split()[0]) * 1024
    return found


def reset_peak() -> None:
    """Start the peak (VmHWM) again from the present."""
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Give what malloc keeps but does not use back to the kernel (glibc; elsewhere it says so)."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError) as error:
        print(f"probe: malloc_trim is not there ({error}); freed memory may be counted", flush=True)


def cpu_ticks() -> dict[str, int]:
    """The machine's clock ticks since boot: busy, steal (taken by other guests of the host) and all."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _wait, irq, soft, steal = fields
    return {"busy": user + nice + system + irq + soft, "steal": steal, "all": sum(fields)}


def cpu_shares(before: dict[str, int], after: dict[str, int], own_seconds: float) -> dict[str, float]:
    """Fractions of all cores' time between two readings: what the host took, and what other programs took."""
    total = max(1, after["all"] - before["all"])
    own = own_seconds * os.sysconf("SC_CLK_TCK")
    others = max(0.0, after["busy"] - before["busy"] - own)
    return {"steal": round((after["steal"] - before["steal"]) / total, 4), "others": round(others / total, 4)}


def machine() -> dict[str, object]:
    """Processor, cores, memory and kernel."""
    model = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.processor() or platform.machine(),
    )
    total = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemTotal"))
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(total.split()[1]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
