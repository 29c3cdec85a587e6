"""A module's forward inside one of ours, and out of it again."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from soli.core.errors import SoliError


class _Wrapped:
    """The forward of a module. A copy of the module (an average of weights) computes with its own, as before any `wrap`."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], inner: Any, bound: bool) -> None:
        functools.update_wrapper(self, forward)
        self.module, self.forward, self.soli_wraps = module, forward, (inner, bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        what = "a model that recomputes is not written by itself: its blocks compute with functions of this run"
        raise SoliError(what, fix="engine.copy_model() is a plain one, engine.save(path) a checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        inner, bound = self.soli_wraps
        while isinstance(inner, _Wrapped):
            inner, bound = inner.soli_wraps
        copied = memo.get(id(self.module), self.module)
        return _Wrapped(copied, MethodType(inner, copied) if bound else inner, inner, bound)


def wrap(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module compute with `forward`, which calls what it had."""
    inner = module.forward
    # As a function where it is bound to the module: a copy of the module has its own again, not the original's.
    bound = isinstance(inner, MethodType) and inner.__self__ is module
    forward = functools.wraps(inner)(forward)
    module.forward = _Wrapped(module, forward, getattr(inner, "__func__", inner) if bound else inner, bound)


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
