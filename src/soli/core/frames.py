"""Whose code runs in a frame, and where a program is: its module and line."""

import sys
from collections.abc import Iterable
from inspect import CO_OPTIMIZED
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import function

_SOLI, _TORCH = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)


def in_autograd_function() -> bool:
    """Whether the code that runs was called by the forward of a torch.autograd.Function."""
    codes = (frame.f_code for frame, _ in walk_stack(sys._getframe(1)))
    return any(code.co_name == "apply" and code.co_filename == function.__file__ for code in codes)


def owner(frame: FrameType) -> Any:
    """What the first argument of a frame's function stands for: `self` of a method, whatever it is called there. Else None.

    Before Python 3.13 reading a frame's names makes a copy of all of them, and the frame keeps it (PEP 667): tensors
    that its function has let go of would stay in memory until it ends. So the copy is emptied.
    """
    code = frame.f_code
    if not code.co_argcount or not code.co_flags & CO_OPTIMIZED:  # of a file or a class the names are no copy
        return None
    names = frame.f_locals
    found = names.get(code.co_varnames[0])
    if sys.version_info < (3, 13):
        names.clear()
    return found


def here() -> str:
    """The module whose forward runs, and the file and line in it (or in what it calls) outside of soli and torch."""
    module, line = place(walk_stack(sys._getframe(1)), _SOLI)
    return " at ".join(x for x in (module, line) if x) or "unknown"


def place(frames: Iterable[tuple[FrameType, int]], own: str) -> tuple[str, str]:
    """Of frames and their lines, the innermost first: the first module whose forward runs, and the first file and line outside of torch
    and of a folder; each empty where there is none."""
    line, module = "", ""
    for frame, number in frames:
        name = frame.f_code.co_filename
        if not line and not name.startswith((own, _TORCH, "<")):
            line = f"{name}:{number}"
        if not module and frame.f_code.co_name == "forward" and isinstance(runs := owner(frame), nn.Module):
            module = type(runs).__name__
        if line and module:
            break
    return module, line
