"""One SQLite file with what was mined: SCHEMA is its document. A rerun adds what is new and keeps the rest.

Sizes are views over the lines of files, so that every definition of a fix's size stands beside the others:

    source     added and deleted lines of source and build files        the natural reading of "lines of code"
    larger     of each such file the larger of the two: a changed line counts once
    added      added lines of such files
    all        added and deleted lines of every file, tests and documents too
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from soli.bugs.history import Commit
from soli.bugs.selection import Rules, closes, pull
from soli.core.errors import SoliError

VERSION = 1
SIZES = ("source", "larger", "added", "all")
SCHEMA = f"""
PRAGMA user_version = {VERSION};
CREATE TABLE history (
    repo TEXT PRIMARY KEY,      -- such as deepspeedai/DeepSpeed
    head TEXT NOT NULL,         -- the commit that was HEAD
    commits INTEGER NOT NULL,   -- that HEAD has
    rules TEXT NOT NULL         -- of the rules that decided (Rules.digest)
);
CREATE TABLE change (
    repo TEXT NOT NULL REFERENCES history, hash TEXT NOT NULL,
    written INTEGER NOT NULL, committed INTEGER NOT NULL,  -- seconds since 1970, by its author and by who took it in
    subject TEXT NOT NULL, body TEXT NOT NULL,
    fix INTEGER NOT NULL,       -- 1: taken for a bug's fix
    rule TEXT NOT NULL,         -- that decided (selection.toml)
    pull INTEGER,               -- the pull request that its subject names
    PRIMARY KEY (repo, hash)
);
CREATE TABLE file (
    repo TEXT NOT NULL, hash TEXT NOT NULL, path TEXT NOT NULL, was TEXT NOT NULL,  -- before a renaming, or ''
    kind TEXT NOT NULL,         -- test, ci, docs, example, build, source, config, other
    added INTEGER NOT NULL, deleted INTEGER NOT NULL,
    PRIMARY KEY (repo, hash, path), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE TABLE closed (           -- issues that a change closes: by its message, or by GitHub's own link
    repo TEXT NOT NULL, hash TEXT NOT NULL, issue INTEGER NOT NULL, by TEXT NOT NULL CHECK (by IN ('message', 'github')),
    PRIMARY KEY (repo, hash, issue, by), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE TABLE issue (            -- exported from GitHub (soli bugs export)
    repo TEXT NOT NULL, number INTEGER NOT NULL, title TEXT NOT NULL, body TEXT NOT NULL, labels TEXT NOT NULL,  -- a JSON list
    opened INTEGER NOT NULL, ended INTEGER,  -- seconds since 1970
    PRIMARY KEY (repo, number)
);
CREATE TABLE request (          -- merged pull requests, exported too
    repo TEXT NOT NULL, number INTEGER NOT NULL, hash TEXT, title TEXT NOT NULL, labels TEXT NOT NULL, opened INTEGER NOT NULL,
    merged INTEGER NOT NULL, reviewers INTEGER NOT NULL,
    PRIMARY KEY (repo, number)
);
CREATE VIEW size AS SELECT repo, hash,
    total(CASE WHEN kind IN ('source', 'build') THEN added + deleted END) AS source,
    total(CASE WHEN kind IN ('source', 'build') THEN max(added, deleted) END) AS larger,
    total(CASE WHEN kind IN ('source', 'build') THEN added END) AS added,
    total(added + deleted) AS "all",
    total(kind IN ('source', 'build')) AS files
FROM file GROUP BY repo, hash;
CREATE VIEW fix AS SELECT change.*, source, larger, added, "all", files FROM change JOIN size USING (repo, hash) WHERE fix;
CREATE VIEW time_to_fix AS SELECT closed.repo, closed.hash, issue.number, (change.committed - issue.opened) / 86400.0 AS days,
    issue.labels, request.reviewers
FROM closed JOIN issue ON issue.repo = closed.repo AND issue.number = closed.issue
    JOIN change USING (repo, hash) LEFT JOIN request ON request.repo = closed.repo AND request.number = change.pull;
"""


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, made if there is none; what is done is kept whole or not at all. SoliError where it is something else."""
    fresh = not path.exists()
    base = sqlite3.connect(path)
    try:
        base.execute("PRAGMA foreign_keys = ON")
        found = 0 if fresh else base.execute("PRAGMA user_version").fetchone()[0]
        if fresh:
            base.executescript(SCHEMA)
        elif found != VERSION:
            raise SoliError(
                "this file holds no bugs that this version of soli knows",
                got=f"{path}: version {found}",
                allowed=f"version {VERSION}",
                fix="mine into another file",
            )
        with base:
            yield base
    except sqlite3.DatabaseError as error:
        raise SoliError(
            "this file is no SQLite database, or is damaged",
            got=f"{path}: {error}",
            fix="mine into another file",
        ) from error
    finally:
        base.close()


def add(base: sqlite3.Connection, repo: str, commits: Iterable[Commit], rules: Rules) -> tuple[int, int]:
    """Keep a history's commits; how many there are, and how many of them are new. What rules of another text decided is decided again."""
    before = base.execute("SELECT rules FROM history WHERE repo = ?", (repo,)).fetchone()
    known = {hash_ for (hash_,) in base.execute("SELECT hash FROM change WHERE repo = ?", (repo,))}
    base.execute("INSERT OR IGNORE INTO history VALUES (?, '', 0, ?)", (repo, rules.digest))
    again = before is not None and before[0] != rules.digest
    head, count, new = "", 0, 0
    for commit in commits:
        head, count = head or commit.hash, count + 1
        if commit.hash not in known:
            _insert(base, repo, commit, rules)
            new += 1
        elif again:
            rule = rules.of(commit)
            base.execute(
                "UPDATE change SET fix = ?, rule = ? WHERE repo = ? AND hash = ?",
                (rule.fix, rule.name, repo, commit.hash),
            )
            base.executemany(
                "UPDATE file SET kind = ? WHERE repo = ? AND hash = ? AND path = ?",
                [(rules.kind(f.path), repo, commit.hash, f.path) for f in commit.files],
            )
    base.execute(
        "UPDATE history SET head = ?, commits = ?, rules = ? WHERE repo = ?",
        (head, count, rules.digest, repo),
    )
    return count, new


def _insert(base: sqlite3.Connection, repo: str, commit: Commit, rules: Rules) -> None:
    rule = rules.of(commit)
    one = (repo, commit.hash)
    base.execute(
        "INSERT INTO change VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *one,
            commit.written,
            commit.committed,
            _text(commit.subject),
            _text(commit.body),
            rule.fix,
            rule.name,
            pull(commit.subject),
        ),
    )
    base.executemany(
        "INSERT OR IGNORE INTO file VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(*one, _text(f.path), _text(f.was), rules.kind(f.path), f.added, f.deleted) for f in commit.files],
    )
    base.executemany(
        "INSERT INTO closed VALUES (?, ?, ?, 'message')", [(*one, number) for number in closes(commit)]
    )


def _text(words: str) -> str:
    """What is no UTF-8 as the sign for it."""
    return words.encode(errors="surrogateescape").decode(errors="replace")
