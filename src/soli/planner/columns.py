"""Columns of a table by the names that others have for them (columns.toml), and those that nothing here reads."""

import re
from collections.abc import Mapping
from functools import cache

from soli.core.tables import table
from soli.planner.cells import SILENT

_TABLES = table(__package__, "columns.toml")
COLUMNS: dict[str, list[str]] = _TABLES["numbers"]
"""A number's name here, and the columns that may have it."""
WORDS: dict[str, list[str]] = _TABLES["words"]
"""The same of what is said in words."""
BESIDE: dict[str, list[str]] = _TABLES["beside"]
"""Columns of numbers that count where their own say nothing."""
PLANS: dict[str, list[str]] = _TABLES["plans"]
"""Columns that have a whole plan in a cell."""
TIMES: dict[str, float] = _TABLES["times"]
MEMORIES: dict[str, float] = _TABLES["memories"]
STATES: dict[str, float] = _TABLES["states"]
"""Columns of what was measured, and their units: seconds; bytes; and of these what is there between steps."""
SYSTEMS: list[str] = _TABLES["systems"]["words"]
"""Columns that name a device where none does that is of devices."""
KNOWN = {name for columns in (*COLUMNS.values(), *WORDS.values()) for name in columns}
_NAMES = {*KNOWN, *TIMES, *MEMORIES, *STATES}.union(*BESIDE.values(), *PLANS.values())
_GLUED = {name.replace("_", ""): name for name in sorted(_NAMES)}
SECTION = re.compile(r"^(?:model|training|parallelism|trainer|config|cfg|args|strategy|distributed)\.")


TOKENS = re.compile(r"(?i:tok)|\d\s?M$")
"""A batch that is counted in tokens."""


@cache
def plain(name: str) -> str:
    """How names of columns are compared: "Global Batch Size", "model.hidden-size", "#GPUs", "Number of layers", "SeqLen (T)"."""
    said = SECTION.sub("", name.strip().lower())
    made = [re.sub(r"[^a-z0-9]+", "_", words).strip("_") for words in (said, re.sub(r"\(\s*[ac-jln-z]\s*\)", " ", said))]
    tries = [*made, *(re.sub(r"^(?:total_)?(?:number_|num_|no_|n_)?of_|^(?:number|no)_", "num_", one) for one in made)]
    glued = (_GLUED[one] for name in made if (one := name.replace("_", "")) in _GLUED)
    return next((one for one in tries if one in _NAMES), next(glued, made[0]))


def spelt(row: Mapping[str, str]) -> dict[str, str]:
    """A row's cells by the plain names of its columns, and by ours of what is said in words; a batch of tokens is no batch of sequences."""
    cells: dict[str, str] = {}
    for column, cell in row.items():
        if isinstance(column, str) and isinstance(cell, str) and not cells.get(plain(column)):
            cells[plain(column)] = re.sub(r"(?i)^\s*(?:-|\?|n/?a|nan|null|unknown)?\s*$", "", cell).strip()
    for name, columns in WORDS.items():
        if said := [cells[column] for column in columns if column in cells]:
            cells[name] = next(filter(None, said), "")
    for name, columns in BESIDE.items():
        own = next((cells[one] for one in COLUMNS[name] if not SILENT.fullmatch(cells.get(one, ""))), "")
        for column in columns:
            if cells.get(column) and cells[column] == (own := own or cells[column]):
                cells[COLUMNS[name][0]] = cells.pop(column)
    both = next((cells[one] for one in COLUMNS["experts"] if "+" in cells.get(one, "")), "")  # routed ones and shared
    cells["shared_experts"] = cells.get("shared_experts") or both
    if flavor := cells.get("flavor"):
        cells["model"] = f"{cells.get('model', '')} {flavor}"
    for column in (*COLUMNS["global_batch"], *COLUMNS["batch"]):
        if TOKENS.search(cell := cells.get(column, "")) and not re.search("per|/", cell):
            cells[COLUMNS["batch_tokens"][0]] = cells.pop(column)
    return cells


def strangers(row: Mapping[str, str]) -> list[str]:
    """Columns of a table whose names say nothing here."""
    known = {*_NAMES, *WORDS, *SYSTEMS, *_TABLES["unread"]["about"], "flavor", ""}
    return [name for name in row if isinstance(name, str) and plain(name) not in known]


def told_by(cells: Mapping[str, str]) -> str:
    """What a row tells in words: of its attention, program and notes, and in columns that nobody knows."""
    said = [cells.get(name, "") for name in ("attn_backend", "notes", "framework")]
    for column, cell in cells.items():
        if column not in KNOWN and column not in WORDS and column not in _TABLES["unread"]["about"]:
            if re.fullmatch(r"(?i)true|yes|on|1", cell):
                said.append(column)
            elif not re.fullmatch(r"(?i)[\d.,eE+-]*|false|off|no|none|null|nan|n/a", cell):
                said.append(f"{column} {cell}")
    return "; ".join(filter(None, said))


def unread(cells: Mapping[str, str]) -> list[str]:
    """What a row says in columns that nobody reads, whose names are of what time or memory depends on."""
    matters, idle, no = (re.compile(_TABLES["unread"][name]) for name in ("matters", "idle", "no"))
    others = [column for column in cells if matters.search(column) and not idle.search(column)]
    read = {*KNOWN, *WORDS, *PLANS["words"]}
    said = {column: cells[column] for column in others if column not in read}
    silent = [column for column, cell in said.items() if SILENT.fullmatch(cell) or no.fullmatch(cell)]
    return [f"{column}={cell} is not counted" for column, cell in said.items() if column not in silent]
