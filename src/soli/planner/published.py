"""Published models by name, where nothing else says their dimensions: published.toml has them, each with its source."""

from __future__ import annotations

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
    said = published()[name]["dims"]
    experts, shared = said.get("experts", 0), said.get("shared", 0)
    return Model(
        name=name,
        layers=said["layers"],
        hidden=said["hidden"],
        heads=said["heads"],
        kv_heads=said.get("kv_heads", said["heads"]),
        head_size=said.get("head_size", said["hidden"] // said["heads"]),
        ffn=said["ffn"],
        gated=said.get("gated", False),
        vocab=said["vocab"],
        experts=experts,
        active=said["routed"] + shared if experts else 1,
        tied=said.get("tied", False),
        seq=said["seq"],
        shared=shared,
        compressed=said.get("compressed", 0),
    )


def plain_name(text: str) -> str:
    """A name as `match` has it: without its publisher, and 1.3B is not 13B."""
    return re.sub(r"[-_ ./]", "", re.sub(r"(?<=\d)\.(?=\d)", "p", re.sub(r"^[\w.-]+/(?=[a-z])", "", text.lower())))


def named(text: str) -> Model | None:
    """The published model that a name means, with as many layers as the name says; None if it means none."""
    plain = plain_name(text)
    entry = next((name for name, one in published().items() if re.search(one["match"], plain)), None)
    if re.search(r"distill|vl\d|vl$|vision", plain):  # as large as others, of other programs
        return None
    if entry is None:
        return None
    model, part = of_entry(entry), LAYERS.search(text)
    return replace(model, layers=int(part[1] or part[2])) if part else model


def near(text: str) -> list[str]:
    """The names that are most alike."""
    return difflib.get_close_matches(text.lower(), published(), n=3, cutoff=0.4)
