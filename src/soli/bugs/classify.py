"""Classification of what was mined: which commits are fixes, and of what, by rules on message and changed syntax, then by a model where
it is asked for.

Verdicts go into the table `verdict` of the mined file (store.py). What is there already, by the same rules or model, stays.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from soli.bugs import store
from soli.bugs.changes import LANGUAGES, batched, changes, patches
from soli.bugs.classification import FIX, Classifier, classifier, decided, places, verdict
from soli.bugs.endpoint import Endpoint, Nonsense, Unreachable
from soli.bugs.mine import histories
from soli.bugs.syntax import edits
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.errors import SoliError
from soli.core.progress import busy

RULES = "rules"
READ = ("source", "build")  # kinds of files whose syntax is looked at
LINES = 200  # of a diff that a model is shown
ANSWERS = 20  # answers that are kept together
NONSENSE = 5  # answers in a row that say nothing


@dataclass(frozen=True)
class Classified:
    """`fixes`: in the file, `unread` of them without a file whose syntax can be read. `looked`: commits that were looked at now. `taken`,
    `dropped`: fixes by their syntax that are none by their message, and the other way round. `words`: how many fixes have each; `unsure`:
    how many have one of less than store.SURE. `asked`: of a model, `nonsense`: its answers that were none, `said`: what kept it from
    going on."""

    fixes: int
    unread: int
    looked: int
    taken: int
    dropped: int
    words: dict[str, dict[str, int]]
    unsure: dict[str, int]
    asked: int = 0
    nonsense: int = 0
    said: str = ""


def classify(repos: Sequence[Path], mined: Path, rules: Path | None = None, endpoint: Endpoint | None = None, at_most: int = 1000) -> Classified:
    """Every fix of these histories. SoliError where a history was not mined, or is not whole."""
    made, where = classifier(rules), histories(repos)
    with store.opened(mined) as base:
        known = set(store.column(base, "SELECT repo FROM history"))
    if lacking := set(where) - known:
        raise SoliError("these histories were not mined into this file", got=f"{', '.join(sorted(lacking))} (it has {', '.join(sorted(known))})", fix=f"soli bugs mine ... --out {mined}")
    looked = sum(_by_rules(repo, path, mined, made) for repo, path in where.items())
    asked, nonsense, said = _by_model(where, mined, endpoint, at_most) if endpoint else (0, 0, "")
    with store.opened(mined) as base:
        return _summary(base, looked, asked, nonsense, said)


def looked_at(base: sqlite3.Connection, repo: str, path: Path, hashes: Sequence[str]) -> Iterator[tuple[str, dict[str, str], dict[str, int]]]:
    """What rules see of each of these commits, and how often each kind of edit is made."""
    for hash_, changed in changes(path, hashes):
        key = (repo, hash_)
        subject, body, rule = base.execute(f"SELECT subject, body, rule FROM change {store.AT}", key).fetchone()
        files = base.execute(f"SELECT kind, path, added + deleted FROM file {store.AT}", key).fetchall()
        kinds = {file: kind for kind, file, _ in files}
        found = [edit for one in changed if kinds.get(one.path) in READ for edit in edits(one)]
        yield hash_, places(subject, body, files, found, rule), Counter(edit.what for edit in found)


def _by_rules(repo: str, path: Path, mined: Path, made: Classifier) -> int:
    """Decide which commits are fixes, and of what; how many were looked at. What these rules have seen stays."""
    with store.opened(mined) as base:
        base.execute("DELETE FROM verdict WHERE repo = ? AND by = ? AND version != ?", (repo, RULES, made.digest))
        seen = f"SELECT hash FROM verdict WHERE repo = ? AND by = '{RULES}'"
        code = f"SELECT hash FROM change WHERE repo = ? AND {store.CODE}"
        todo = sorted(store.column(base, f"{code} EXCEPT {seen}", repo, repo))
    with busy(f"classifying {repo}", len(todo), unit="commits") as add:
        for some in batched(todo):  # what is done is kept, if the rest is interrupted
            with store.opened(mined) as base:
                for hash_, of, done in looked_at(base, repo, path, some):
                    _keep(base, repo, hash_, of, made)
                    store.edited(base, repo, hash_, done)
                    add(1)
    return len(todo)


def _keep(base: sqlite3.Connection, repo: str, hash_: str, of: Mapping[str, str], made: Classifier) -> None:
    """Say of a commit whether it is a fix, and of what."""
    said = {"fix": decided(made, of)}
    if said["fix"].word == FIX[0]:
        said |= {dimension: verdict(made.dimensions[dimension], of) for dimension in DIMENSIONS}
    for dimension, one in said.items():
        store.say(base, (repo, hash_, dimension, one.word, one.confidence, RULES, made.digest), one.evidence)


def _by_model(where: Mapping[str, Path], mined: Path, endpoint: Endpoint, at_most: int) -> tuple[int, int, str]:
    """Ask of the fixes of which the rules are least sure; how many answers came, how many were none, and why no more were asked for."""
    with store.opened(mined) as base:
        rows = base.execute(
            "SELECT repo, hash FROM verdict WHERE by = ? AND dimension != 'fix' GROUP BY repo, hash HAVING min(confidence) < ? "
            "AND NOT EXISTS (SELECT 1 FROM verdict AS other WHERE other.repo = verdict.repo AND other.hash = verdict.hash "
            "AND other.by = 'model' AND other.version = ?) ORDER BY min(confidence)",
            (RULES, store.SURE, endpoint.model),
        ).fetchall()
    todo = [(repo, hash_) for repo, hash_ in rows if repo in where][:at_most]
    asked = unread = in_a_row = 0
    with busy(f"asking {endpoint.model}", len(todo), unit="fixes") as add:
        for start in range(0, len(todo), ANSWERS):
            with store.opened(mined) as base:
                for repo, hash_ in todo[start : start + ANSWERS]:
                    try:
                        words, why = endpoint.ask(shown(base, repo, where[repo], hash_))
                    except Unreachable as error:
                        return asked, unread, f"it does not answer: {error}"
                    except Nonsense as error:
                        unread, in_a_row = unread + 1, in_a_row + 1
                        if in_a_row == NONSENSE:
                            return asked, unread, f"{NONSENSE} answers in a row say nothing: {error}"
                        continue
                    asked, in_a_row = asked + 1, 0
                    for dimension, word in words.items():
                        store.say(base, (repo, hash_, dimension, word, None, "model", endpoint.model), (why,))
                    add(1)
    return asked, unread, ""


def shown(base: sqlite3.Connection, repo: str, path: Path, hash_: str) -> str:
    """A fix as a model, or a person, reads it."""
    subject, body = base.execute(f"SELECT subject, body FROM change {store.AT}", (repo, hash_)).fetchone()
    return f"{repo} {hash_}\n{subject}\n\n{body[:2000]}\n\n{patches(path, [hash_], LINES)[hash_]}"


def _summary(base: sqlite3.Connection, looked: int, asked: int, nonsense: int, said: str) -> Classified:
    query = "SELECT word, count(*) FROM class WHERE dimension = ? GROUP BY word ORDER BY 2 DESC, word"
    words = {dimension: dict(base.execute(query, (dimension,))) for dimension in DIMENSIONS}
    unsure = dict(base.execute("SELECT dimension, count(*) FROM class WHERE confidence < ? GROUP BY dimension", (store.SURE,)))
    fixes = store.column(base, "SELECT count(*) FROM fix")[0]
    taken, dropped = base.execute(
        "SELECT total(word = 'yes' AND NOT fix), total(word = 'no' AND fix) FROM change JOIN verdict USING (repo, hash) WHERE dimension = 'fix'"
    ).fetchone()
    readable = " OR ".join(f"path LIKE '%{suffix}'" for suffix in LANGUAGES)
    unread = fixes - store.column(base, f"SELECT count(DISTINCT repo || hash) FROM fix JOIN file USING (repo, hash) WHERE {readable}")[0]
    return Classified(fixes, unread, looked, int(taken), int(dropped), words, unsure, asked, nonsense, said)
