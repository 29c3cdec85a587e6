"""A custom autograd function between blocks, as one operation of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import getattr_static
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from soli.core.versions import PlainFunction, function_modes, mode_popped, pop_mode, push_mode


@contextmanager
def seen_by(watch: TorchFunctionMode) -> Iterator[None]:
    """Where the watch sees operations, a custom function is one to it, of the function's name.

    What is computed inside has no gradient of its own: a stage that was given that, in place of the result, would send none back.
    """
    with ExitStack() as patched:
        # a program may have kept the first of them under another name (scale = Scale.apply), which asks for the second when it is called
        for base in (torch.autograd.Function, PlainFunction):
            patched.enter_context(patch.object(base, "apply", classmethod(_told(watch, getattr_static(base, "apply")))))
        yield


def _told(watch: TorchFunctionMode, apply: Any) -> Any:
    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as again:
                for mode in reversed(inner):  # of the program's own
                    push_mode(mode)
                    again.callback(pop_mode)
                return apply.__get__(None, kind)(*args, **kwargs)

        inner = list[TorchFunctionMode]()
        call.__name__ = f"{kind.__name__}.apply"
        if watch not in function_modes() or getattr(watch, "inside", False):  # inside a block
            return call(*args, **kwargs)
        with ExitStack() as popped:
            while (mode := popped.enter_context(mode_popped())) is not watch:
                inner.append(mode)
            return watch.__torch_function__(call, (), args, kwargs)

    return applied
