"""Where a program is: its module and line."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import __file__ as _torch_file
from torch import nn

from soli.core.frames import owner

_SOLI, _TORCH = str(Path(__file__).parent.parent), str(Path(_torch_file).parent)


def here() -> str:
    """The module whose forward runs, and the file and line in it (or in what it calls) outside of soli and torch."""
    frame, line, module = sys._getframe(1), "", ""
    while frame is not None and not (line and module):
        name = frame.f_code.co_filename
        if not line and not name.startswith((_SOLI, _TORCH, "<")):
            line = f"{name}:{frame.f_lineno}"
        if not module and frame.f_code.co_name == "forward" and isinstance(own := owner(frame), nn.Module):
            module = type(own).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return " at ".join(x for x in (module, line) if x) or "unknown"
