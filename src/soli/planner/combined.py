"""Plans that a table has in one cell: "TP8 PP4 DP2", "tp=8,pp=4", "dp2tp4pp1", "FSDP", "3D (tp=4, pp=4)"."""

import re

from soli.planner.cells import SILENT, text
from soli.planner.columns import PLANS
from soli.planner.row import Row, Said
from soli.planner.spellings import sharding

NAME = re.compile(r"tp|pp|dp|cp|ep|etp|vpp?")
AROUND = {"", "parallel", "parallelism", "model", "plan", "mesh", "layout", "strategy", "degree", "degrees", "size", "sizes"}
"""Words of a heading that has names of degrees and nothing else, and as many numbers in its cell: "TP/PP/DP", "Parallelism (TP, PP)"."""
DEGREE = re.compile(r"(?:(?<![a-z])|(?<=\dx))(tp|pp|dp|cp|ep|etp|vpp?)(?:[\s_]*[=:]|[\s_]*-(?!1(?!\d)))?\s*(\d+)")
"""A degree; -1 is what is left."""
SEQUENCE = re.compile(r"\bsp\b(?!\s*[=:]?\s*\d)")
"""Megatron's sequence parallelism, which has the degree of tp; another's has its own."""
ULYSSES = re.compile(r"(?:deepspeed[\s-]*)?ulysses\W*(\d+)")
PLAIN = re.compile(r"\b[2-5]d\b|\bx\b|\bparallel(?:ism)?\b|\bhybrid\b(?![\s_-]*shard)|\bdp[\s=:]*-1\b")
"""Words that say no more than that there is a plan."""
BETWEEN = " \t,;:+/|&()[]{}_-×*·"


def combined(row: dict[str, str], said: Said, found: Row) -> None:
    """Puts what such cells say where columns of its own are silent."""
    _named(row)
    if degree := ULYSSES.fullmatch(text(row, "sp").lower()):
        said["ulysses"], row["sp"] = float(degree[1]), ""
    for column in (name for names in PLANS.values() for name in names):
        cell = text(row, column).lower()
        if SILENT.fullmatch(cell):
            continue
        for degree in DEGREE.finditer(cell):
            name, value = "chunks" if degree[1].startswith("v") else degree[1], float(degree[2])
            own = said[name]
            if own is not None and (own or 1.0) != (value or 1.0):
                found.refused.append(f"{column}: '{degree[0]}' and {name}={own:g} cannot both be")
            said[name] = own or value
        if column in PLANS["words"]:
            _words(row, column, cell, found)


def _named(row: dict[str, str]) -> None:
    """Puts what a heading of several degrees has in its cell among plans."""
    for column in list(row):
        words, sizes = column.replace("x", "_").split("_"), re.findall(r"\d+", row[column])
        names = [word for word in words if NAME.fullmatch(word)]
        if len(names) > 1 and len(names) == len(sizes) and {*words} <= {*names, *AROUND}:
            del row[column]
            row["plan"] = " ".join([row.get("plan", ""), *map("".join, zip(names, sizes, strict=True))]).strip()


def _words(row: dict[str, str], column: str, cell: str, found: Row) -> None:
    """What is left of such a cell beside degrees says how states are shared out, or is not understood."""
    left = SEQUENCE.sub(" ", DEGREE.sub(" ", cell))
    rest = PLAIN.sub(" ", left).strip(BETWEEN)
    states = sharding(rest) if rest else None
    if SEQUENCE.search(DEGREE.sub(" ", cell)):
        row["sp"] = text(row, "sp") or "on"
    cells = (text(row, name).lower() for name in ("shard", "zero", "fsdp", "dist_opt"))
    own = any(cell == "none" or not SILENT.fullmatch(cell) for cell in cells)
    other = states is None or states.zero != (sharding(text(row, "shard")) or states).zero
    if states and not own:
        row["shard"] = rest
    elif other and (rest or left == cell):
        found.inferred.append(f"{column}: '{rest or cell}' is not counted")
