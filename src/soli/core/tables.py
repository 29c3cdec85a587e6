"""Tables that are part of soli: TOML files beside the code that reads them."""

import tomllib
from importlib.resources import files
from typing import Any


def table(package: str, name: str) -> dict[str, Any]:
    """What a TOML file of one of soli's packages says."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
