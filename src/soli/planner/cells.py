"""What a cell of a table says: a number, a word that means nothing was said, or neither, which is a mistake."""

import re
from collections.abc import Mapping, Sequence

from soli.core.tables import table

SILENT = re.compile(r"|-|\?|n/?a|none|null|nan|unknown|not (?:stated|known|given).*|see .*|default.*", re.I)
"""Cells that say nothing."""
NUMBER = re.compile(
    r"[~≈]?\s*([+-]?(?:(?:\d{1,3}(?:[,\s]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?)\s*([kKMBT]?)(?=$|[\s(;])(?!\s*(?:\d+(?![\d.]*\s*G)|[x×*]\s*\d))(.*)"
)
_SAID = table(__package__, "columns.toml")["cells"]
UNITS: dict[str, dict[str, float]] = _SAID["units"]
"""What letters behind a number mean, by what it counts."""
MAY_BE_NONE: list[str] = _SAID["may_be_none"]
"""Numbers of which 0 says that there is none."""
FRACTIONS: list[str] = _SAID["fractions"]
REST: list[str] = _SAID["rest"]
"""Numbers of which -1 says that they are what is left, or the usual one."""
OTHERWISE: dict[str, str] = _SAID["otherwise"]
"""Words behind a number that make another one of it: "8 per node" is not of all."""
WRITTEN: dict[str, dict[str, str]] = _SAID["written"]
"""How numbers are written otherwise: a pattern, and what stands in its place."""
TIMES, POWER = re.compile(r"^(\d+)\s*[x×]\s*(\d+)$"), re.compile(r"2\s*(?:\^|\*\*)\s*(\d+)")
"""A number of servers and of the devices of each; a power of two."""
COUNTED = 1e6
"""Parameters above which their number is not one of billions."""
MOST = 1e12


def text(row: Mapping[str, str], name: str) -> str:
    """A cell without its margins; empty where there is none."""
    return (row.get(name) or "").strip()


def true(row: Mapping[str, str], name: str) -> bool:
    """Whether a cell says yes."""
    return text(row, name).lower() in ("true", "1", "yes", "y", "on", "enabled", "✓", "✔", "✅")


def number(row: Mapping[str, str], name: str, columns: Sequence[str], problems: list[str]) -> float | None:
    """The number called `name`, of the first of these columns that says one: "51200 (assumed)" is 51200. Others must not say another."""
    found: dict[str, float] = {}
    for column in columns:
        said = text(row, column)
        if SILENT.fullmatch(said) or (said == "-1" and name in REST):
            continue
        value = parsed(said, name)
        if value is None and not found:
            problems.append(f"{column}: '{said}' is no {'' if name in FRACTIONS else 'whole '}number above 0")
        elif value:
            found[column] = value
    if len(set(found.values())) > 1 and name not in FRACTIONS:
        problems.append(" and ".join(f"{column}={value:g}" for column, value in found.items()) + " cannot both be")
    return next(iter(found.values()), None)


def parsed(said: str, name: str) -> float | None:
    """A number above 0 (or 0, where that may be), or None if it is no such number."""
    for pattern, instead in WRITTEN.get(name, {}).items():
        said = re.sub(pattern, instead, said)
    said = POWER.sub(lambda power: str(2 ** min(int(power[1]), 63)), said)
    if name == "gpus" and (each := TIMES.fullmatch(said)):
        return float(each[1]) * float(each[2])
    found = NUMBER.fullmatch(said)
    if found is None or not any(c.isdigit() for c in found.group(1)):
        return None
    behind, other = found.group(3), OTHERWISE.get(name, "(?!)")
    if re.search(other, behind.split("(")[0], re.I) or re.match(rf"\s*\((?:{other})", behind, re.I):
        return None
    units = UNITS.get(name, {})
    if found.group(2) and found.group(2) not in units:
        return None
    value = float(re.sub(r"[,\s]", "", found.group(1))) * units.get(found.group(2), 1.0)
    if name == "params_b":
        if "," in found.group(1) and value < COUNTED and not found.group(2) and not behind.strip():  # "6,738" is of seven billions, or of thousands
            return None
        value /= 1e9 if value > COUNTED else 1.0
    if value == 0 and name in MAY_BE_NONE:
        return 0.0
    return value if 0 < value < MOST and (name in FRACTIONS or value == int(min(value, MOST))) else None
