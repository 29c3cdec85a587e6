"""One SQLite file with what was mined: schema.sql is its document. A rerun adds what is new and keeps the rest.

Sizes are views over the lines of files, so that every definition of a fix's size stands beside the others:

    source     added and deleted lines of source and build files        the natural reading of "lines of code"
    larger     of each such file the larger of the two: a changed line counts once
    added      added lines of such files
    all        added and deleted lines of every file, tests and documents too
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from soli.bugs.history import Commit
from soli.bugs.selection import Rules, closes, pull
from soli.core.errors import SoliError

VERSION = 2
SIZES = ("source", "larger", "added", "all")
AT = "WHERE repo = ? AND hash = ?"
CODE = "(fix OR rule NOT IN ('merge', 'nothing', 'beside'))"  # changes that code is a part of
SURE = 0.6  # of a word by rules, below which a model's counts
SCHEMA = files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")


@contextmanager
def opened(path: Path, *, made: bool = False) -> Iterator[sqlite3.Connection]:
    """The file, `made` if there is none; what is done is kept whole or not at all. SoliError where there is none, or it is something else."""
    fresh = not path.exists()
    if fresh and not made:
        raise SoliError("there is no such file", got=path, fix=f"soli bugs mine ... --out {path}")
    try:
        with closing(sqlite3.connect(path)) as base:
            base.execute("PRAGMA foreign_keys = ON")
            if fresh:
                base.executescript(SCHEMA.format(CODE=CODE, SURE=SURE, VERSION=VERSION))
            elif (found := column(base, "PRAGMA user_version")[0]) != VERSION:
                what, fix = "this file holds no bugs that this version of soli knows", "mine into another file"
                raise SoliError(what, got=f"{path}: version {found}", allowed=f"version {VERSION}", fix=fix)
            with base:
                yield base
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise SoliError("another command is writing this file", got=path, fix="wait for it") from error
        if "readonly" in str(error) or "unable to open" in str(error):
            what = f"this file cannot be {'written' if 'readonly' in str(error) else 'opened'}"
            raise SoliError(what, got=f"{path}: {error}", fix="another file") from error
        what = "this file is no SQLite database, or is damaged"
        raise SoliError(what, got=f"{path}: {error}", fix="mine into another file") from error


def column(base: sqlite3.Connection, query: str, *given: Any) -> list[Any]:
    """The first value of each row."""
    return [value for value, *_ in base.execute(query, given)]


def put(base: sqlite3.Connection, table: str, *row: Any, known: str = "REPLACE") -> None:
    """A row into a table, in place of what is there; or `known`: IGNORE it then."""
    base.execute(f"INSERT OR {known} INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def add(base: sqlite3.Connection, repo: str, commits: Iterable[Commit], rules: Rules) -> tuple[int, int]:
    """Keep a history's commits; how many there are, and how many of them are new. What rules of another text decided is decided again, and what
    HEAD has no more goes. SoliError where it has none of what is kept: another history is called so."""
    before = column(base, "SELECT rules FROM history WHERE repo = ?", repo)
    known = set(column(base, "SELECT hash FROM change WHERE repo = ?", repo))
    put(base, "history", repo, "", 0, rules.digest, known="IGNORE")
    again = bool(before) and before[0] != rules.digest
    if again:  # what fixes are of hangs on which they are
        base.execute("DELETE FROM verdict WHERE repo = ? AND by = 'rules'", (repo,))
    head, count, new, gone = "", 0, 0, set(known)
    for commit in commits:
        gone.discard(commit.hash)
        head, count = head or commit.hash, count + 1
        new += commit.hash not in known
        if again or commit.hash not in known:
            _keep(base, repo, commit, rules)
    if known and gone == known:
        fix = "mine into another file, or name the folder owner+name"
        raise SoliError("another history of this name is in this file", got=repo, fix=fix)
    for table in ("verdict", "edited", "closed", "file", "change"):
        base.executemany(f"DELETE FROM {table} {AT}", [(repo, hash_) for hash_ in gone])
    row = (head, count, rules.digest, repo)
    base.execute("UPDATE history SET head = ?, commits = ?, rules = ? WHERE repo = ?", row)
    return count, new


def _keep(base: sqlite3.Connection, repo: str, commit: Commit, rules: Rules) -> None:
    rule = rules.of(commit)
    one = (repo, commit.hash)
    said = (commit.written, commit.committed, _text(commit.subject), _text(commit.body))
    row = (*one, *said, rule.fix, rule.name, pull(commit.subject))
    again = "ON CONFLICT (repo, hash) DO UPDATE SET fix = excluded.fix, rule = excluded.rule"
    base.execute(f"INSERT INTO change VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) {again}", row)
    again = "ON CONFLICT (repo, hash, path) DO UPDATE SET kind = excluded.kind"
    files = [(*one, _text(f.path), _text(f.was), rules.kind(f.path), f.added, f.deleted) for f in commit.files]
    base.executemany(f"INSERT INTO file VALUES (?, ?, ?, ?, ?, ?, ?) {again}", files)
    for number in closes(commit):
        put(base, "closed", *one, number, "message", known="IGNORE")


def _text(words: str) -> str:
    """What is no UTF-8 as the sign for it."""
    return words.encode(errors="surrogateescape").decode(errors="replace")


Told = tuple[str, str, str, str, float | None, str, str]
"""A verdict: a row of that table without its evidence."""


def say(base: sqlite3.Connection, told: Told, evidence: Sequence[str]) -> None:
    """Keep a verdict; an earlier one by the same goes."""
    put(base, "verdict", *told, json.dumps(list(map(_text, evidence))))


def edited(base: sqlite3.Connection, repo: str, hash_: str, done: Mapping[str, int]) -> None:
    """Keep what a change does to syntax."""
    base.execute(f"DELETE FROM edited {AT}", (repo, hash_))
    for what, count in (done or {"": 0}).items():
        put(base, "edited", repo, hash_, what, count)
