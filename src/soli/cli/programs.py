"""A user's program as the commands take it: FILE.py:NAME, a function that returns a model, a batch and perhaps its loss."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from soli.core.errors import SoliError

RETURNS = "(model, batch) or (model, batch, loss_fn)"
FORM = f"FILE.py:NAME, a function that returns {RETURNS}"


def named(text: str) -> tuple[Path, str] | None:
    """The file and the function that such a text names; None: it names no program."""
    found = re.fullmatch(r"(.+\.py)(?::(.*))?", text)
    return (Path(found[1]), found[2] or "") if found else None


def from_file(path: Path, name: str) -> tuple[Any, Any, Any]:
    """What the function of a file returns: the model, a batch and its loss (None: the model's own)."""
    module = _loaded(path)
    function = getattr(module, name, None) if name else None
    if not callable(function) or inspect.isclass(function):
        here = [
            n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        raise SoliError(f"{path} has no function '{name}'", allowed=", ".join(here) or "none", fix=FORM)
    try:
        result = function()
    except SoliError:
        raise
    except Exception as error:
        raise _failed(f"{name}() of {path} fails", error, path) from error
    return _checked(name, result)


def _loaded(path: Path) -> ModuleType:
    if not path.is_file():
        raise SoliError("there is no such file", got=str(path), allowed=FORM)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SoliError("the file is no Python module", got=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except SoliError:
        raise
    except Exception as error:
        raise _failed(f"{path} cannot be imported", error, path) from error
    return module


def _failed(what: str, error: Exception, path: Path) -> SoliError:
    """The error of the user's own code, with the last line of the file that was on the way to it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    at = f"{path}:{lines[-1]}: " if lines and not isinstance(error, SyntaxError) else ""
    return SoliError(
        what, got=f"{at}{type(error).__name__}: {error}", fix="run the file by itself with Python"
    )


def _checked(name: str, result: Any) -> tuple[Any, Any, Any]:
    from torch.nn import Module

    if not (isinstance(result, tuple) and len(result) in (2, 3)):
        raise SoliError(f"{name}() returned {type(result).__name__}", allowed=RETURNS)
    if not isinstance(result[0], Module):
        raise SoliError(
            f"the model that {name}() returned is no torch.nn.Module",
            got=type(result[0]).__name__,
            allowed=RETURNS,
        )
    if len(result) == 3 and not (result[2] is None or callable(result[2])):
        raise SoliError(
            f"the loss that {name}() returned is no function", got=type(result[2]).__name__, allowed=RETURNS
        )
    return result if len(result) == 3 else (*result, None)
