"""Published models by name, where nothing else says their dimensions: published.toml has them, each with its source."""

import difflib
import re
from dataclasses import replace
from functools import cache
from typing import Any

from soli.core.tables import table
from soli.planner.models import Model

LAYERS = re.compile(r"(?:^|[-_ ])l(\d+)\b|\b(\d+)[-_ ]?layers?\b", re.I)
"""A name that says of how many layers a part of a model has: deepseek-v2-l4."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """The entries of published.toml."""
    return table(__package__, "published.toml")


def of_entry(name: str) -> Model:
    """The model of an entry."""
    dims = published()[name]["dims"]
    usual = {"kv_heads": dims["heads"], "head_size": dims["hidden"] // dims["heads"], "gated": False, "tied": False}
    said = {**usual, "experts": 0, **dims}
    active = said.pop("routed") + said.get("shared", 0) if said["experts"] else 1
    return Model(name=name, active=active, **said)


def plain_name(text: str) -> str:
    """A name as `match` has it: without its publisher, and 1.3B is not 13B."""
    words = re.sub(r"(?<=\d) ?billion", "b", re.sub(r"^[\w.-]+/(?=[a-z])", "", text.lower().replace("×", "x")))
    return re.sub(r"[-_ ./()]", "", re.sub(r"(?<=\d)\.(?=\d)", "p", words))


def named(text: str) -> Model | None:
    """The published model that a name means, with as many layers as the name says; None if it means none."""
    plain = plain_name(text)
    entry = next((name for name, one in published().items() if re.search(one["match"], plain)), None)
    if entry is None or re.search(r"distill|vl\d|vl$|vision", plain):  # as large as others, of other programs
        return None
    model, part = of_entry(entry), LAYERS.search(text)
    layers = int(part[1] or part[2]) if part else model.layers
    return replace(model, layers=layers, plain=min(model.plain, layers))


def near(text: str) -> list[str]:
    """The names that are most alike."""
    return difflib.get_close_matches(text.lower(), published(), n=3, cutoff=0.4)
