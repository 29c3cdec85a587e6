"""TOML files: tables that are part of soli, beside the code that reads them, and those of its users."""

import tomllib
from importlib.abc import Traversable
from importlib.resources import files
from pathlib import Path
from typing import Any

from soli.core.errors import SoliError, blaming


def table(package: str, name: str) -> dict[str, Any]:
    """What a TOML file of one of soli's packages says."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def read(path: Path | Traversable, what: str) -> tuple[dict[str, Any], str]:
    """What a file says, and its text. `what`: what it is, in the SoliError where it cannot be read or is no TOML."""
    unread = blaming(lambda error: SoliError(f"{what} cannot be read", got=f"{path}: {error.strerror}"), OSError)
    other = lambda error: SoliError(f"{what} is not TOML", got=f"{path}: {error}")
    with unread, blaming(other, ValueError, RecursionError):
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
