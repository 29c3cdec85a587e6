"""The four questions of arXiv 2506.10426 asked of what was mined and classified: tables of shares with 95% intervals.

Words are counted twice where labels are given: over all fixes by the rules' words, and over the labelled sample by people's. Sizes
are of the fixes by their message: the rules on syntax know how large a commit is, and what they choose is small for that reason.
"""

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from soli.bugs import store
from soli.bugs.agreement import Share, percent
from soli.bugs.labels import Label, selection
from soli.bugs.mine import SMALL, share
from soli.bugs.taxonomy import DIMENSIONS, UNKNOWN
from soli.core.errors import SoliError
from soli.core.tables import table

LINES = (1, 5, 10, 20, 50, 100)
KINDS = {"fixes": "told AND files", "others": "NOT told AND files"}
"""Commits that are fixes by their message, and those that are none; and which rows of the view `judged` these are. Without a source or
build file (pipelines alone) a commit has no size, and is in no table of sizes, lines, strategies of small fixes, files or syntax."""


def study(mined: Path, labels: Sequence[Label] = (), population: Mapping[str, int] | None = None) -> dict[str, Any]:
    """All tables as plain data. `population`: how many commits each sample of labels was drawn from. SoliError where nothing was mined or
    classified."""
    paper = table(__package__, "study.toml")
    with store.opened(mined) as base:
        _whole(base, mined)
        stated = (one for question in paper["question"] for one in question["statements"])
        share = float(next(one["share"] for one in stated if one["kind"] == "share"))  # of small fixes
        said = {
            "paper": {"source": paper["source"], "bugs": paper["bugs"], "share": share}, "labels": _made(labels), "histories": _histories(base),
            "sizes": _sizes(base, paper, labels, population), "lines": {name: _lines(base, of) for name, of in KINDS.items()},
            "words": {name: _words(base, name, labels) for name in DIMENSIONS}, "small": _small(base), "together": _together(base),
            "spread": {name: _spread(base, of) for name, of in KINDS.items()}, "syntax": {name: _syntax(base, of) for name, of in KINDS.items()},
            "left": {name: store.column(base, f"SELECT total({of.replace('AND', 'AND NOT')}) FROM judged")[0] for name, of in KINDS.items()},
            "days": _days(base),
        }  # fmt: skip
    said["questions"] = [_answered(question, said) for question in paper["question"]]
    return said


def _whole(base: sqlite3.Connection, mined: Path) -> None:
    """SoliError where there is nothing to count, or some of it was not looked at, or by other rules."""
    one = lambda query: store.column(base, query)[0]
    if not one("SELECT count(*) FROM judged WHERE told OR fix"):
        fix = "soli bugs mine other histories, or by other --rules"
        raise SoliError("no fix of a bug is in this file", got=mined, fix=fix)
    looked = "SELECT repo, hash FROM verdict WHERE dimension = 'fix'"
    left = one(f"SELECT count(*) FROM judged WHERE (repo, hash) NOT IN ({looked})")
    rules = one("SELECT count(DISTINCT version) FROM verdict WHERE by = 'rules'")
    if left or rules > 1:
        got = f"{mined}: {left} were not looked at, {rules} sets of rules"
        fix = f"soli bugs classify CLONE... --db {mined}, with all of its histories"
        raise SoliError("not all commits in this file are classified, by the same rules", got=got, fix=fix)


def _made(labels: Sequence[Label]) -> dict[str, Any] | None:
    """Whose labels stand beside the rules, and who or what made them."""
    if not labels:
        return None
    first = min(one.labeller for one in labels)
    return {"labeller": first, "made_by": sorted({one.made_by for one in labels if one.labeller == first})}


def _histories(base: sqlite3.Connection) -> list[dict[str, Any]]:
    query = (
        "SELECT repo, head, commits, (SELECT count(*) FROM fix WHERE fix.repo = history.repo), "
        "(SELECT count(*) FROM other WHERE other.repo = history.repo), "
        "(SELECT min(committed) FROM change WHERE change.repo = history.repo), (SELECT max(committed) FROM change WHERE change.repo = history.repo) "
        "FROM history ORDER BY repo"
    )
    return [
        {"repo": repo, "head": head, "commits": commits, "fixes": fixes, "others": others, "first": _day(first), "last": _day(last)}
        for repo, head, commits, fixes, others, first, last in base.execute(query)
    ]  # fmt: skip


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _sizes(base: sqlite3.Connection, paper: Mapping[str, Any], labels: Sequence[Label], population: Mapping[str, int] | None) -> dict[str, dict[str, Any]]:
    """Of each definition of a size the share of SMALL lines or fewer: of all fixes by their message, each repository's, weighted, before the
    study; by their syntax too; by labels, of chosen and of rejected commits; and of those whose message calls them no fix."""
    sized = set(base.execute("SELECT repo, hash FROM size WHERE files"))
    labels = [one if (one.repo, one.commit) in sized else replace(one, fix="no") for one in labels]  # each still stands for as many
    end = int(datetime.combine(paper["date"], datetime.min.time(), UTC).timestamp())
    found = {}
    for name in store.SIZES:
        rows = base.execute(f'SELECT repo, "{name}", committed FROM judged WHERE {KINDS["fixes"]}').fetchall()
        others = store.column(base, f'SELECT "{name}" FROM judged WHERE {KINDS["others"]}')
        syntax = store.column(base, f'SELECT "{name}" FROM fix WHERE files')
        small = set(base.execute(f'SELECT repo, hash FROM size WHERE "{name}" <= ?', (SMALL,)))
        by = {repo: [size for of, size, _ in rows if of == repo] for repo in sorted({repo for repo, *_ in rows})}
        parts = {repo: share(sum(s <= SMALL for s in sizes), len(sizes)) for repo, sizes in by.items()}
        before = [size for _, size, when in rows if when < end]
        weights = {repo: paper["mix"].get(repo, 0) for repo in by}
        found[name] = {
            "count": len(rows), "median": float(np.median([size for _, size, _ in rows] or [0])),
            "all": share(sum(s <= SMALL for _, s, _ in rows), len(rows)), "repos": parts,
            "alike": _mixed(by, dict.fromkeys(by, 1)),
            "mix": _mixed(by, weights) if all(weights.values()) and len(weights) == len(paper["mix"]) else None,
            "before": share(sum(s <= SMALL for s in before), len(before)) if before else None,
            "others": share(sum(s <= SMALL for s in others), len(others)) if others else None,
            "syntax": share(sum(s <= SMALL for s in syntax), len(syntax)),
            # of all fixes the share that is in `small`: what `selection` calls recall, with commits weighted by what they stand for
            "labels": selection(labels, population, small).recall if labels and population else None,
        }  # fmt: skip
    return found


def _mixed(by: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Share:
    """The share when each repository counts by its weight; the interval is the normal approximation of a stratified sample."""
    total = sum(weights.values())
    value = spread = 0.0
    for repo, sizes in by.items():
        part = sum(size <= SMALL for size in sizes) / len(sizes)
        value += weights[repo] / total * part
        spread += (weights[repo] / total) ** 2 * part * (1 - part) / len(sizes)
    half = 1.96 * spread**0.5
    return value, max(value - half, 0.0), min(value + half, 1.0)


def _lines(base: sqlite3.Connection, of: str) -> list[Share]:
    """Shares of at most so many source lines (LINES)."""
    sizes = np.array(store.column(base, f"SELECT source FROM judged WHERE {of}"))
    return [share(int((sizes <= most).sum()), len(sizes)) for most in LINES]


def _words(base: sqlite3.Connection, dimension: str, labels: Sequence[Label]) -> dict[str, Any]:
    """Of one dimension each word's count and share: by rules in all, each repository and year, and by labels (of the first labeller, of chosen fixes)."""
    query = "SELECT repo, word, committed FROM class JOIN fix USING (repo, hash) WHERE dimension = ?"
    rows = [(repo, word, _day(when)[:4]) for repo, word, when in base.execute(query, (dimension,))]
    known = list(DIMENSIONS[dimension])
    repos, years = (sorted({row[i] for row in rows}) for i in (0, 2))
    first = min((one.labeller for one in labels), default="")
    told = [getattr(one, dimension) for one in labels if (one.labeller, one.sample, one.fix) == (first, "fix", "yes")]
    return {
        "all": _shares(known, [word for _, word, _ in rows]),
        "repos": {repo: _shares(known, [word for of, word, _ in rows if of == repo]) for repo in repos},
        "years": {year: dict(Counter(word for _, word, of in rows if of == year)) for year in years},
        "labels": {"count": len(told), "words": _shares(known, told)} if told else None,
    }


def _shares(known: Sequence[str], words: Sequence[str]) -> dict[str, tuple[int, Share]]:
    counts = Counter(words)
    return {word: (counts[word], share(counts[word], len(words))) for word in sorted(known, key=lambda w: -counts[w])}


def _small(base: sqlite3.Connection) -> dict[str, tuple[int, Share]]:
    """Strategies of the fixes of SMALL source lines or fewer."""
    of = f"SELECT word FROM class JOIN judged USING (repo, hash) WHERE {KINDS['fixes']} AND dimension = 'strategy' AND source <= ?"
    return _shares(list(DIMENSIONS["strategy"]), store.column(base, of, SMALL))


def _together(base: sqlite3.Connection) -> dict[str, dict[str, int]]:
    """How many fixes have each symptom and cause."""
    found: dict[str, dict[str, int]] = {}
    query = (
        "SELECT a.word, b.word, count(*) FROM class AS a JOIN class AS b USING (repo, hash) "
        "WHERE a.dimension = 'symptom' AND b.dimension = 'cause' GROUP BY 1, 2"
    )
    for symptom, cause, count in base.execute(query):
        found.setdefault(symptom, {})[cause] = count
    return found


def _spread(base: sqlite3.Connection, of: str) -> dict[str, Any]:
    """Source files, and folders of them, that a change touches."""
    folders: dict[tuple[str, str], list[str]] = {}
    query = f"SELECT repo, hash, path FROM file JOIN judged USING (repo, hash) WHERE {of} AND kind IN ('source', 'build')"
    for repo, hash_, path in base.execute(query):
        folders.setdefault((repo, hash_), []).append(path.rpartition("/")[0])
    return {
        "count": len(folders),
        "one file": share(sum(len(each) == 1 for each in folders.values()), len(folders)),
        "one folder": share(sum(len(set(each)) == 1 for each in folders.values()), len(folders)),
        "median": float(np.median([len(each) for each in folders.values()] or [0])),
    }


def _syntax(base: sqlite3.Connection, of: str) -> dict[str, Any]:
    """What is done to syntax: the share of these commits that do it."""
    edited = f"FROM edited JOIN judged USING (repo, hash) WHERE {of}"
    total = store.column(base, f"SELECT count(DISTINCT repo || hash) {edited}")[0]
    rows = base.execute(f"SELECT what, count(*) {edited} AND what != '' GROUP BY what")
    return {"count": total, "shares": {what: share(n, total) for what, n in rows}}


def _days(base: sqlite3.Connection) -> dict[str, Any] | None:
    """Days from an issue's opening to the commit that closes it, and reviewers, where GitHub's export was taken in."""
    rows = list(base.execute("SELECT days, reviewers FROM time_to_fix JOIN fix USING (repo, hash) WHERE days >= 0"))
    if not rows:
        return None
    reviewers = [n for _, n in rows if n is not None]
    return {
        "count": len(rows), "quartiles": [float(q) for q in np.percentile([days for days, _ in rows], (25, 50, 75))],
        "reviewers": float(np.median(reviewers)) if reviewers else None,
    }  # fmt: skip


def _answered(question: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    checked = ((one["text"], *_checked(one, question, said)) for one in question["statements"])
    statements = [{"text": text, "verdict": verdict, "why": why} for text, verdict, why in checked]
    return {"name": question["name"], "dimension": question.get("dimension", ""), "statements": statements}


def _checked(one: Mapping[str, Any], question: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[str, str]:
    """agrees, does not agree, cannot be told; and why."""
    if one["kind"] == "unseen":
        return "git alone cannot tell", one["why"]
    if one["kind"] == "share":
        return _share_checked(one, said["sizes"])
    dimension = said["words"][question["dimension"]]
    tables = {"rules": said["small"] if "small" in one else dimension["all"]}
    if dimension["labels"] and "small" not in one:
        tables["labels"] = dimension["labels"]["words"]
    found = {by: compared(one["kind"], one["words"], table) for by, table in tables.items()}
    # labels where there are any: what the rules say is biased to the words that are frequent
    best = list(found)[-1]
    return f"{found[best][0]} (by {best})", "; ".join(f"by {by}: {reason}" for by, (_, reason) in found.items())


def _share_checked(one: Mapping[str, Any], sizes: Mapping[str, Any]) -> tuple[str, str]:
    """By each definition of a size; a share between those of two definitions is borne out by neither, and by no third way to count ruled out."""
    parts = {name: row["all"] for name, row in sorted(sizes.items(), key=lambda row: row[1]["all"][0])}
    inside = [name for name, part in parts.items() if part[1] <= one["share"] <= part[2]]
    below = [name for name, part in parts.items() if part[2] < one["share"]]
    above = [name for name, part in parts.items() if part[1] > one["share"]]
    why = f"by what is counted: {', '.join(f'{name} {percent(part)}' for name, part in parts.items())}"
    if inside:
        return f"agrees by {', '.join(inside)}" + " and not by the others" * bool(below or above), why
    if below and above:
        return f"it depends on what is counted: more than {below[-1]}, less than {above[0]}", why
    return "does not agree", why


def compared(kind: str, words: Sequence[str], table: Mapping[str, tuple[int, Share]]) -> tuple[str, str]:
    """Whether shares bear a statement out, by their intervals: it does not agree where one contradicts it beyond them."""
    shares = {word: part for word, (_, part) in table.items() if word != UNKNOWN}
    said = ", ".join(f"{word} {percent(part)}" for word, part in sorted(shares.items(), key=lambda one: -one[1][0]))
    named = [shares.get(word, (0.0, 0.0, 0.0)) for word in words]
    others = [part for word, part in shares.items() if word not in words]
    if kind == "present":
        return ("agrees" if all(part[1] > 0 for part in named) else "does not agree"), said
    if kind == "order":
        pairs = list(zip(named, named[1:], strict=False))
    elif kind == "first":
        pairs = [(part, other) for part in named for other in others]
    else:
        pairs = [(other, part) for part in named for other in others]
    if any(larger[2] < smaller[1] for larger, smaller in pairs):
        return "does not agree", said
    if all(larger[0] >= smaller[0] and larger[0] for larger, smaller in pairs):  # of two that nothing has none is rarer
        return "agrees" if all(larger[1] > smaller[2] for larger, smaller in pairs) else "agrees, within the intervals", said
    return "cannot be told: the intervals overlap", said
