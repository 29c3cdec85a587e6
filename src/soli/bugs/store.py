"""One SQLite file with what was mined: schema.sql is its document. A rerun adds what is new and keeps the rest.

Sizes are views over the lines of files, so that every definition of a fix's size stands beside the others:

    source     added and deleted lines of source and build files        the natural reading of "lines of code"
    larger     of each such file the larger of the two: a changed line counts once
    added      added lines of such files
    all        added and deleted lines of every file, tests and documents too
"""

import json
import re
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
TOLD = (
    ("locked", "another command is writing this file", "wait for it"),
    ("readonly", "this file cannot be written", "another file"), ("unable to open", "this file cannot be opened", "another file"),
    ("is full", "the disk has no room for this file; what was in it is still there", "make room, or another file"),
    ("", "this file is no SQLite database, or is damaged", "mine into another file"),
)  # fmt: skip
"""Of what SQLite says: what it is, and how to mend it."""
LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Halves of a character, which JSON may have and UTF-8 has not; the others stand for bytes that are no UTF-8."""
SCHEMA = files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")


@contextmanager
def opened(path: Path, *, made: bool = False) -> Iterator[sqlite3.Connection]:
    """The file, `made` if there is none; what is done is kept whole or not at all. SoliError where there is none, or it is something else."""
    if not made and not path.exists():
        raise SoliError("there is no such file", got=path, fix=f"soli bugs mine ... --out {path}")
    try:
        with closing(sqlite3.connect(path)) as base:
            base.execute("PRAGMA foreign_keys = ON")
            found, tables = base.execute("SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version").fetchone()
            if made and not found and not tables:
                base.executescript(SCHEMA.format(CODE=CODE, SURE=SURE, VERSION=VERSION))
            elif found != VERSION:
                what, fix = "this file holds no bugs that this version of soli knows", "mine into another file"
                raise SoliError(what, got=f"{path}: version {found}", allowed=f"version {VERSION}", fix=fix)
            with base:
                yield base
    except sqlite3.DatabaseError as error:
        what, fix = next((what, fix) for sign, what, fix in TOLD if sign in str(error))
        raise SoliError(what, got=f"{path}: {error}", fix=fix) from error


def column(base: sqlite3.Connection, query: str, *given: Any) -> list[Any]:
    """The first value of each row."""
    return [value for value, *_ in base.execute(query, given)]


def put(base: sqlite3.Connection, table: str, *row: Any, known: str = "REPLACE") -> None:
    """A row into a table, in place of what is there; or `known`: IGNORE it then."""
    row = tuple(_text(value) if isinstance(value, str) else value for value in row)
    base.execute(f"INSERT OR {known} INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def add(base: sqlite3.Connection, repo: str, commits: Iterable[Commit], rules: Rules) -> tuple[int, int, int]:
    """Keep a history's commits; how many there are, how many of them are new, and how many HEAD has no more, which go with what was said of them.
    What rules of another text decided is decided again. SoliError where it has none of what is kept: another history is called so."""
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
        raise SoliError("another history of this name is in this file", got=repo, fix="mine into another file, or name the folder owner+name")
    for table in ("verdict", "edited", "closed", "file", "change"):
        base.executemany(f"DELETE FROM {table} {AT}", [(repo, hash_) for hash_ in gone])
    base.execute("UPDATE history SET head = ?, commits = ?, rules = ? WHERE repo = ?", (head, count, rules.digest, repo))
    return count, new, len(gone)


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
    return LONE.sub("\ufffd", words).encode(errors="surrogateescape").decode(errors="replace")


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
