"""One SQLite file with what was mined: SCHEMA is its document. A rerun adds what is new and keeps the rest.

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
from contextlib import contextmanager
from pathlib import Path

from soli.bugs.history import Commit
from soli.bugs.selection import Rules, closes, pull
from soli.core.errors import SoliError

VERSION = 2
SIZES = ("source", "larger", "added", "all")
CODE = "(fix OR rule NOT IN ('merge', 'nothing', 'beside'))"  # changes that code is a part of
SURE = 0.6  # of a word by rules, below which a model's counts
SCHEMA = f"""
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
    fix INTEGER NOT NULL,       -- 1: taken for a bug's fix by its message
    rule TEXT NOT NULL,         -- that decided so (selection.toml)
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
CREATE VIEW time_to_fix AS SELECT closed.repo, closed.hash, issue.number, (change.committed - issue.opened) / 86400.0 AS days,
    issue.labels, request.reviewers
FROM (SELECT DISTINCT repo, hash, issue FROM closed) AS closed JOIN issue ON issue.repo = closed.repo AND issue.number = closed.issue
    JOIN change USING (repo, hash) LEFT JOIN request ON request.repo = closed.repo AND request.number = change.pull;
CREATE TABLE verdict (          -- what a fix is of, by rules or a model (soli bugs classify)
    repo TEXT NOT NULL, hash TEXT NOT NULL,
    dimension TEXT NOT NULL, word TEXT NOT NULL,  -- of taxonomy.py; or fix: yes or no, which stands above the rules of selection
    confidence REAL,            -- the rules' probability of the word; a model gives none
    by TEXT NOT NULL CHECK (by IN ('rules', 'model')),
    version TEXT NOT NULL,      -- the rules' digest (Classifier.digest), or the model's name
    evidence TEXT NOT NULL,     -- a JSON list: the rules that spoke for the word with what they matched, or the model's reason
    PRIMARY KEY (repo, hash, dimension, by), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE TABLE edited (           -- what a change does to the syntax of its source and build files
    repo TEXT NOT NULL, hash TEXT NOT NULL, what TEXT NOT NULL,  -- such as "condition added" (syntax.py); '' where nothing was done
    count INTEGER NOT NULL, PRIMARY KEY (repo, hash, what), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE VIEW judged AS           -- commits that change code. told: whether each is a fix by its message; fix: by its syntax too, where that was read
SELECT change.repo, change.hash, written, committed, subject, body, coalesce(word = 'yes', fix) AS fix, fix AS told, rule, pull, source, larger, added, "all", files
FROM change JOIN size USING (repo, hash) LEFT JOIN verdict ON verdict.repo = change.repo AND verdict.hash = change.hash AND dimension = 'fix'
WHERE {CODE};
CREATE VIEW fix AS SELECT * FROM judged WHERE fix;
CREATE VIEW other AS SELECT * FROM judged WHERE NOT fix;  -- the control group
CREATE VIEW class AS            -- the word that counts: a model's where it was asked and the rules have less than {SURE}, else the rules'
SELECT repo, hash, dimension, word, confidence, by FROM verdict AS one WHERE by = 'rules' AND dimension != 'fix' AND
    (confidence >= {SURE} OR NOT EXISTS (SELECT 1 FROM verdict AS other WHERE (other.repo, other.hash, other.dimension, other.by) =
        (one.repo, one.hash, one.dimension, 'model')))
UNION ALL SELECT model.repo, model.hash, model.dimension, model.word, model.confidence, model.by FROM verdict AS model
    JOIN verdict AS rules USING (repo, hash, dimension) WHERE model.by = 'model' AND rules.by = 'rules' AND rules.confidence < {SURE};
PRAGMA user_version = {VERSION};
"""


@contextmanager
def opened(path: Path, *, made: bool = False) -> Iterator[sqlite3.Connection]:
    """The file, `made` if there is none; what is done is kept whole or not at all. SoliError where there is none, or it is something else."""
    fresh = not path.exists()
    if fresh and not made:
        raise SoliError("there is no such file", got=str(path), fix=f"soli bugs mine ... --out {path}")
    try:
        base = sqlite3.connect(path)
    except sqlite3.OperationalError as error:
        raise SoliError("this file cannot be opened", got=f"{path}: {error}", fix="another --out") from error
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
        if "locked" in str(error):
            raise SoliError("another command is writing this file", got=str(path), fix="wait for it") from error
        if "readonly" in str(error) or "unable to open" in str(error):
            raise SoliError("this file cannot be written", got=f"{path}: {error}") from error
        raise SoliError(
            "this file is no SQLite database, or is damaged",
            got=f"{path}: {error}",
            fix="mine into another file",
        ) from error
    finally:
        base.close()


def add(base: sqlite3.Connection, repo: str, commits: Iterable[Commit], rules: Rules) -> tuple[int, int]:
    """Keep a history's commits; how many there are, and how many of them are new. What rules of another text decided is decided again, and what
    HEAD has no more goes. SoliError where it has none of what is kept: another history is called so."""
    before = base.execute("SELECT rules FROM history WHERE repo = ?", (repo,)).fetchone()
    known = {hash_ for (hash_,) in base.execute("SELECT hash FROM change WHERE repo = ?", (repo,))}
    base.execute("INSERT OR IGNORE INTO history VALUES (?, '', 0, ?)", (repo, rules.digest))
    again = before is not None and before[0] != rules.digest
    if again:  # what fixes are of hangs on which they are
        base.execute("DELETE FROM verdict WHERE repo = ? AND by = 'rules'", (repo,))
    head, count, new, gone = "", 0, 0, set(known)
    for commit in commits:
        gone.discard(commit.hash)
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
    if known and gone == known:
        raise SoliError(
            "another history of this name is in this file",
            got=repo,
            fix="mine into another file, or name the folder owner+name",
        )
    for table in ("verdict", "edited", "closed", "file", "change"):
        base.executemany(f"DELETE FROM {table} WHERE repo = ? AND hash = ?", [(repo, h) for h in gone])
    base.execute(
        "UPDATE history SET head = ?, commits = ?, rules = ? WHERE repo = ?",
        (head, count, rules.digest, repo),
    )
    return count, new


def _insert(base: sqlite3.Connection, repo: str, commit: Commit, rules: Rules) -> None:
    rule = rules.of(commit)
    one = (repo, commit.hash)
    said = (commit.written, commit.committed, _text(commit.subject), _text(commit.body))
    row = (*one, *said, rule.fix, rule.name, pull(commit.subject))
    base.execute("INSERT INTO change VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    base.executemany(
        "INSERT OR IGNORE INTO file VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(*one, _text(f.path), _text(f.was), rules.kind(f.path), f.added, f.deleted) for f in commit.files],
    )
    base.executemany("INSERT INTO closed VALUES (?, ?, ?, 'message')", [(*one, number) for number in closes(commit)])


def _text(words: str) -> str:
    """What is no UTF-8 as the sign for it."""
    return words.encode(errors="surrogateescape").decode(errors="replace")


Told = tuple[str, str, str, str, float | None, str, str]
"""A verdict: a row of that table without its evidence."""


def say(base: sqlite3.Connection, told: Told, evidence: Sequence[str]) -> None:
    """Keep a verdict; an earlier one by the same goes."""
    row = (*told, json.dumps(list(map(_text, evidence))))
    base.execute("INSERT OR REPLACE INTO verdict VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def edited(base: sqlite3.Connection, repo: str, hash_: str, done: Mapping[str, int]) -> None:
    """Keep what a change does to syntax."""
    base.execute("DELETE FROM edited WHERE repo = ? AND hash = ?", (repo, hash_))
    rows = [(repo, hash_, what, count) for what, count in (done or {"": 0}).items()]
    base.executemany("INSERT INTO edited VALUES (?, ?, ?, ?)", rows)
