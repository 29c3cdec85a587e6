"""A module's forward inside one of ours, and out of it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def wrap(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module compute with `forward`, which calls what it had."""
    forward.soli_wraps = module.forward  # type: ignore[attr-defined]
    module.forward = forward


def unwrap(module: nn.Module) -> bool:
    """Give the module back what it had before the last `wrap`; False where there was none."""
    inner = getattr(module.__dict__.get("forward"), "soli_wraps", None)
    if inner is None:
        return False
    del module.forward
    if getattr(inner, "__func__", None) is not type(module).forward:  # not the class's: it had its own
        module.forward = inner
    return True
