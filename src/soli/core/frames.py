"""Whose code runs in a frame."""

from __future__ import annotations

import sys
from inspect import CO_OPTIMIZED
from traceback import walk_stack
from types import FrameType
from typing import Any

from torch.autograd import function


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
