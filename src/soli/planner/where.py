"""Where a program is: its module and line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from torch import __file__ as _torch_file
from torch import nn

from soli.core.frames import owner

_SOLI, _TORCH = str(Path(__file__).parent.parent), str(Path(_torch_file).parent)


def here() -> str:
    """The module whose forward runs, and the file and line in it (or in what it calls) outside of soli and torch."""
    module, line = place(traceback.walk_stack(sys._getframe(1)), _SOLI)
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
