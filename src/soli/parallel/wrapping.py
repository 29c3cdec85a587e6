"""A module's forward inside one of ours, and out of it again."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def wrap(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module compute with `forward`, which calls what it had."""
    inner = module.forward
    # As a function where it is bound to the module: a copy of the module has its own again, not the original's.
    bound = isinstance(inner, MethodType) and inner.__self__ is module
    forward.soli_wraps = (inner.__func__ if bound else inner, bound)  # type: ignore[attr-defined]
    module.forward = forward


def unwrap(module: nn.Module) -> bool:
    """Give the module, or a copy of it, back what it had before the last `wrap`; False where there was none."""
    inner, bound = getattr(module.__dict__.get("forward"), "soli_wraps", (None, False))
    if inner is None:
        return False
    del module.forward
    if not bound:
        module.forward = inner
    elif inner is not type(module).forward:
        module.forward = MethodType(inner, module)
    return True
