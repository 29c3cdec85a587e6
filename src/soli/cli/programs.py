"""A user's program as the commands take it: FILE.py:NAME, a function that returns a model, a batch and perhaps its loss."""

import importlib.util
import inspect
import re
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from soli.core.errors import SoliError, blaming

Program = tuple[Any, Any, Any]
"""A model, a batch and its loss; None for the last where the model has its own."""
RETURNS = "(model, batch) or (model, batch, loss_fn)"
ROW = "return with the model a batch as its forward takes it: model, {'input_ids': torch.zeros(1, 4096, dtype=torch.int64)}"
FORM = f"FILE.py:NAME, a function that returns {RETURNS}"


def named(text: str) -> tuple[Path, str] | None:
    """The file and the function that such a text names; None: it names no program."""
    found = re.fullmatch(r"(.+\.py)(?::(.*))?", text)
    return (Path(found[1]), found[2] or "") if found else None


def from_file(path: Path, name: str) -> Program:
    """What the function of a file returns: the model, a batch and its loss (None: the model's own)."""
    module = _loaded(path)
    function = getattr(module, name, None) if name else None
    if not callable(function) or inspect.isclass(function):
        here = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise SoliError(f"{path} has no function '{name}'", allowed=", ".join(here) or "none", fix=FORM)
    with blaming(partial(_failed, f"{name}() of {path} fails", path)), redirect_stdout(sys.stderr):  # ours may be JSON
        result = function()
    return _checked(name, result)


OWN = {"gpt": "GPT", "llama": "Llama", "bert": "Bert", "vit": "ViT"}
"""Models of soli.models that a name stands for, and their classes."""
SEQ = 2048
"""Tokens of a row where nobody says it."""


def own(text: str) -> Program | None:
    """One of soli's models without weights, a row for it and its loss, of "gpt:vocab=51200,dim=4096,layers=32,heads=32"; None: it names none."""
    name, _, words = text.partition(":")
    if name not in OWN:
        return None
    import torch

    from soli import losses

    module = importlib.import_module(f"soli.models.{name}")
    config = getattr(module, f"{OWN[name]}Config")
    usual = {field.name: field.default for field in fields(config) if field.type is int}
    said = dict(_size(name, word, (*usual, "seq")) for word in words.split(",") if word)
    if lacking := [key for key, value in usual.items() if value is MISSING and key not in said]:
        raise SoliError(f"the sizes of {name} are not said", got=text, fix=f"soli plan {name}:{','.join(f'{key}=N' for key in (*lacking, 'dim', 'layers', 'heads'))}")
    seq = said.pop("seq", said.get("context", SEQ))
    if "context" in usual:
        said.setdefault("context", seq)
    with blaming(lambda error: SoliError(f"{name} cannot have these sizes", got=f"{text}: {error}"), ValueError), torch.device("meta"):
        sizes = config(**said)
        model = getattr(module, OWN[name])(sizes)
    if name == "vit":
        rows: dict[str, Any] = {"images": torch.zeros(1, sizes.channels, sizes.size, sizes.size)}
        rows["targets"] = torch.zeros(1, dtype=torch.int64)
    else:
        tokens = torch.zeros(1, seq, dtype=torch.int64)
        rows = {"tokens": tokens, "targets": tokens, "mask": torch.ones(1, seq, dtype=torch.bool)}
    return model, rows, losses.cross_entropy("targets")


def _size(name: str, word: str, known: tuple[str, ...]) -> tuple[str, int]:
    key, _, said = word.strip().partition("=")
    if key not in known or not re.fullmatch(r"[1-9]\d{0,8}", said, re.A):
        raise SoliError(f"{name} has no such size", got=word, allowed=", ".join(f"{one}=N" for one in known))
    return key, int(said)


def _loaded(path: Path) -> ModuleType:
    if not path.is_file():
        raise SoliError("there is no such file", got=str(path), allowed=FORM)
    spec = importlib.util.spec_from_file_location(f"_program_{path.stem}", path)  # a name that no library has
    if spec is None or spec.loader is None:
        raise SoliError("the file is no Python module", got=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[module.__name__] = module  # where dataclasses look for what annotations mean
    with blaming(partial(_failed, f"{path} cannot be imported", path)), redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)
    return module


def _failed(what: str, path: Path, error: Exception) -> SoliError:
    """The error of the user's own code, with the last line of the file that was on the way to it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    at = f"{path}:{lines[-1]}: " if lines and not isinstance(error, SyntaxError) else ""
    return SoliError(what, got=f"{at}{type(error).__name__}: {error}", fix="run the file by itself with Python")


def _checked(name: str, result: Any) -> Program:
    from torch.nn import Module

    if not (isinstance(result, tuple) and len(result) in (2, 3)):
        raise SoliError(f"{name}() returned {type(result).__name__}", allowed=RETURNS, fix=ROW)
    model, batch, loss_fn = (*result, None)[:3]
    if not isinstance(model, Module):
        raise SoliError(f"the model that {name}() returned is no torch.nn.Module", got=type(model).__name__, allowed=RETURNS)
    if not (loss_fn is None or callable(loss_fn)):
        raise SoliError(f"the loss that {name}() returned is no function", got=type(loss_fn).__name__, allowed=RETURNS)
    return model, batch, loss_fn
