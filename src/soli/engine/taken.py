"""The bytes that a run takes: as the device's allocator counts them, or of the CPU the operating system."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

HEADROOM = 1.15
"""What allocators take beyond the tensors that live: fragments, and workspaces of kernels."""
BESIDE = 64e6
"""Bytes that a process takes beside its tensors when a program first runs: code, threads, workspaces of libraries."""
_CLEAR = Path("/proc/self/clear_refs")


class Taken:
    """Since it was made: the most bytes, with those that the model and its optimizer had by then."""

    def __init__(self, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.device, now = device, 0.0
        give_back()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            now = float(torch.cuda.memory_allocated(device))
        elif _CLEAR.exists():
            _CLEAR.write_text("5")  # Linux, proc(5): the highest resident size is counted from here
            now = _status("VmRSS")
        self.beside = now - _held(model, optimizer)

    def most(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device)) - self.beside
        return (_status("VmHWM") if _CLEAR.exists() else 0.0) - self.beside


def give_back() -> None:
    """What is free, of cycles too, goes back to the system, and counts when it is taken again: an allocator keeps it, in ever more pieces."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def is_beyond(taken: float, expected: float) -> bool:
    """Whether it is more than what was expected explains."""
    return taken > HEADROOM * expected + BESIDE


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that they have."""
    groups: list[Any] = [optimizer.param_groups, list(optimizer.state.values())]
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(groups)]
    storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor) and not x.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _status(name: str) -> float:
    """Bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
