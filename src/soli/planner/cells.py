"""What a cell of a table says: a number, a word that means nothing was said, or neither, which is a mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping

SILENT = re.compile(r"|-|\?|n/?a|none|null|nan|unknown|not (?:stated|known|given).*|see .*|default.*", re.I)
"""Cells that say nothing."""
NUMBER = re.compile(r"[~≈]?\s*([+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?)\s*([kKMBT]?)(?=$|[\s(;])(.*)")
UNITS: dict[str, dict[str, float]] = {
    "seq": {"k": 1024, "K": 1024},
    "params_b": {"K": 1e-6, "M": 1e-3, "B": 1.0, "T": 1e3},
}
"""What letters behind a number mean, by what it counts."""
MAY_BE_NONE = (
    "chunks",
    "chunk_layers",
    "ep",
    "experts",
    "topk",
    "accumulate",
    "shared",
    "shard_group",
    "again",
)
"""Numbers of which 0 says that there is none."""
FRACTIONS = ("params_b", "time", "memory", "states")
MOST = 1e12


def text(row: Mapping[str, str], name: str) -> str:
    """A cell without its margins; empty where there is none."""
    return (row.get(name) or "").strip()


def true(row: Mapping[str, str], name: str) -> bool:
    """Whether a cell says yes."""
    return text(row, name).lower() in ("true", "1", "yes", "on")


def number(row: Mapping[str, str], name: str, columns: tuple[str, ...], problems: list[str]) -> float | None:
    """The number called `name`, from the first of these columns that says one: "51200 (assumed)" is 51200."""
    for column in columns:
        said = text(row, column)
        if SILENT.fullmatch(said):
            continue
        value = parsed(said, name)
        if value is None:
            problems.append(f"{column}: '{said}' is no {'' if name in FRACTIONS else 'whole '}number above 0")
        elif value > 0:
            return value
    return None


def parsed(said: str, name: str) -> float | None:
    """A number above 0 (or 0, where that may be), or None if it is no such number."""
    found = NUMBER.fullmatch(said)
    if found is None or not any(c.isdigit() for c in found.group(1)):
        return None
    units = UNITS.get(name, {})
    if found.group(2) and found.group(2) not in units:
        return None
    value = float(found.group(1).replace(",", "")) * units.get(found.group(2), 1.0)
    if value == 0 and name in MAY_BE_NONE:
        return 0.0
    whole = name in FRACTIONS or value == int(min(value, MOST))
    return value if 0 < value < MOST and whole else None
