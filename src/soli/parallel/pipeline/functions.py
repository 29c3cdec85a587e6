"""A custom autograd function between blocks, as one operation of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from soli.core.versions import function_modes, mode_popped


@contextmanager
def seen_by(watch: TorchFunctionMode) -> Iterator[None]:
    """Where the watch sees operations, a custom function is one to it, of the function's name.

    What is computed inside has no gradient of its own: a stage that was given that, in place of the result, would send none back.
    """
    apply: Any = torch.autograd.Function.apply

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return apply.__func__(kind, *args, **kwargs)

        call.__name__ = f"{kind.__name__}.apply"
        if watch not in function_modes():  # inside a block
            return call(*args, **kwargs)
        with ExitStack() as popped:
            while watch in function_modes():
                popped.enter_context(mode_popped())
            return watch.__torch_function__(call, (), args, kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(applied)):
        yield
