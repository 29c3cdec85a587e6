"""`soli env`: this machine, what works on it, and what does not and why. Made to be pasted."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("soli", "torch", "numpy", "safetensors", "tokenizers", "transformers", "datasets", "tensorboard")


def show(as_json: bool) -> str:
    """The report as text, or as JSON."""
    facts = gather()
    if as_json:
        return json.dumps(facts, indent=2)
    return "\n".join(f"{key:<22} {_text(value)}" for key, value in facts.items())


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def gather() -> dict[str, Any]:
    """Everything that a bug report needs."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    facts: dict[str, Any] = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free",
        "/dev/shm": f"{shm.total / 2**30:.1f} GiB, {shm.free / 2**30:.1f} free" if shm else "not there",
        "open files": _open_files(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "threads of torch": torch.get_num_threads(),
    }
    facts |= {name: _version(name) for name in PACKAGES}
    facts |= {f"GPU {i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if not torch.cuda.is_available():
        built = torch.version.cuda
        facts["CUDA"] = "no device" if built else "no: this torch is built without CUDA"
    facts["gloo"] = _try_gloo()
    facts["nccl"] = _nccl()
    return facts


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"


def _open_files() -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{soft} (hard limit {hard})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _try_gloo() -> str:
    """Not a flag but a group of one rank and a sum on it."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "no: this torch is built without it"
    try:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except RuntimeError as error:
        return f"no: {str(error).splitlines()[0]}"
    return "works"


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "no: this torch is built without it"
    return "built in" if torch.cuda.is_available() else "built in, but there is no CUDA device"
