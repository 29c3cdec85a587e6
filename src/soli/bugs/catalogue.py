"""Mechanisms of bugs: what each is, how it shows, how it was fixed, and in which real commits (catalogue.toml)."""

from dataclasses import dataclass
from datetime import date
from functools import cache

from soli.core.errors import SoliError, nearest
from soli.core.tables import table


@dataclass(frozen=True)
class Fix:
    """A commit that fixed one, and how many lines of source it changed."""

    repo: str
    commit: str
    date: date
    lines: int
    subject: str


@dataclass(frozen=True)
class Mechanism:
    """`cause`, `symptom`, `strategy`: words of taxonomy.py. `found`: what reveals it."""

    name: str
    what: str
    shows: str
    cause: str
    symptom: str
    strategy: str
    fixed: str
    found: str
    fixes: tuple[Fix, ...]


@cache
def mechanisms() -> dict[str, Mechanism]:
    """All, by name."""
    said = table(__package__, "catalogue.toml")["mechanism"]
    return {one["name"]: Mechanism(**{**one, "fixes": tuple(Fix(**fix) for fix in one["fixes"])}) for one in said}


def mechanism(name: str) -> Mechanism:
    """One of them. SoliError with the nearest where there is none of this name."""
    known = mechanisms()
    if name not in known:
        raise SoliError("there is no such mechanism", got=name, allowed=", ".join(known), fix=nearest(name, known))
    return known[name]
