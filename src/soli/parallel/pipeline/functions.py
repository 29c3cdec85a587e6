"""A custom autograd function between blocks, as one operation of a forward."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import getattr_static
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from soli.core.functions import name_of
from soli.core.tables import table
from soli.core.versions import PlainFunction, function_modes, mode_popped, pop_mode, push_mode

READS = frozenset(table("soli.parallel", "functions.toml")["read"])
"""Functions that tell Python what is in a tensor, or whose result's shape does."""


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


class _Looking(TorchFunctionMode):
    """What Python reads of tensors inside a custom function (`x.abs().max().item()`): a stage without the values has none of it."""

    def __init__(self, looks: list[str]) -> None:
        super().__init__()
        self.looks = looks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(func) in READS:
            self.looks.append(name_of(func))
        return func(*args, **(kwargs or {}))


def _told(watch: TorchFunctionMode, apply: Any) -> Any:
    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        real, inner, looks = apply.__get__(None, kind), list[TorchFunctionMode](), list[str]()
        if watch not in function_modes() or getattr(watch, "inside", False):  # inside a block
            return real(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as again:
                for mode in reversed(inner):  # of the program's own
                    push_mode(mode)
                    again.callback(pop_mode)
                again.enter_context(_Looking(looks))
                return real(*args, **kwargs)

        call.__name__, call.looks = f"{kind.__name__}.apply", looks  # type: ignore[attr-defined]
        with ExitStack() as popped:
            while (mode := popped.enter_context(mode_popped())) is not watch:
                inner.append(mode)
            return watch.__torch_function__(call, (), args, kwargs)

    return applied
