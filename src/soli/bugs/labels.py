"""Labels of commits: a CSV file, a row for each commit and labeller, that says who or what made each; how they agree, and how good the rules are by them."""

import csv
import io
import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from soli.bugs import store
from soli.bugs.agreement import Kappa, confusion, kappa
from soli.bugs.catalogue import mechanisms
from soli.bugs.mine import share
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.errors import Problem, SoliError, blaming, raise_all
from soli.core.files import write_whole

FIX = ("yes", "no", "unsure")
SAMPLES = ("fix", "rest")
"""Of the commits that the rules took for fixes, and of those that they rejected though code was changed."""
ALL = "all of them"
Said = dict[tuple[str, str, str], tuple[str, bool]]
"""Of repository, hash and dimension the word, and whether it is sure."""


@dataclass(frozen=True)
class Label:
    """What one labeller says of one commit. `made_by`: a person's name, or what program. Words of no fix are empty."""

    repo: str
    commit: str
    sample: str
    labeller: str
    made_by: str
    date: str
    fix: str
    symptom: str
    cause: str
    strategy: str
    stage: str
    mechanism: str
    why: str


NAMES = tuple(field.name for field in fields(Label))


def read(path: Path) -> list[Label]:
    """The rows of a file. SoliError with every row that is no label."""
    unread = lambda error: SoliError("the labels cannot be read", got=f"{path}: {error}")
    with blaming(unread, OSError, csv.Error, UnicodeDecodeError), path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, strict=True))
    if not rows or tuple(rows[0]) != NAMES:
        raise SoliError("this is no table of labels", got=f"{path}: {', '.join(rows[0]) if rows else 'no rows'}", allowed=", ".join(NAMES))
    odd = [number for number, row in enumerate(rows, 2) if None in row or None in row.values()]
    raise_all(Problem(f"line {number}: it has not {len(NAMES)} cells") for number in odd)
    found = [Label(**row) for row in rows]
    problems, seen = [], set()
    for number, one in enumerate(found, 2):
        said, key = wrong(one), (one.repo, one.commit, one.labeller)
        if key in seen:
            said.append((f"{one.labeller} labels this commit twice", one.commit))
        seen.add(key)
        problems += [Problem(f"line {number}: {text}", got=got) for text, got in said]
    raise_all(problems)
    return found


def write(path: Path, labels: Iterable[Label]) -> None:
    """As `read` reads them, in one order; the whole file or, where that fails, nothing."""
    text = io.StringIO()
    table = csv.DictWriter(text, NAMES, lineterminator="\n")
    table.writeheader()
    table.writerows(map(vars, sorted(labels, key=lambda one: (one.sample, one.repo, one.commit, one.labeller))))
    write_whole(path, text.getvalue())


def draw(base: sqlite3.Connection, seed: int, counts: Mapping[str, int], of: Collection[str]) -> tuple[dict[str, list[tuple[str, str]]], dict[str, int]]:
    """Repository and hash of so many commits of each sample, uniformly, and how many each stands for. `of`: repositories to draw from.

    The same seed, file and counts give the same ones (Python's Mersenne twister).
    """
    random, drawn, population = Random(seed), {}, {}
    for name, place in zip(SAMPLES, ("fix", "other"), strict=True):
        rows = sorted(row for row in base.execute(f"SELECT repo, hash FROM {place}") if row[0] in of)
        population[name] = len(rows)
        if len(rows) < counts[name]:
            what, fix = f"there are not so many commits to draw from ({name})", "ask for fewer, or mine more histories"
            raise SoliError(what, got=counts[name], allowed=len(rows), fix=fix)
        drawn[name] = random.sample(rows, counts[name])
    return drawn, population


def wrong(one: Label) -> list[tuple[str, str]]:
    """What is wrong with a label, and what it says there."""
    known = {"fix": FIX, "sample": SAMPLES, **DIMENSIONS, "mechanism": mechanisms()}
    free = {"mechanism", *(DIMENSIONS if one.fix != "yes" else ())}  # may be empty
    said = {name: getattr(one, name) for name in known if getattr(one, name) or name not in free}
    wrong = {name: word for name, word in said.items() if word not in known[name]}
    return [(f"'{name}' says none of {', '.join(known[name])}", word) for name, word in wrong.items()]


@dataclass(frozen=True)
class Pair:
    """Two labellers: kappa of whether it is a fix, and of each dimension where both say that it is one; where they differ."""

    first: str
    second: str
    fix: Kappa
    dimensions: dict[str, Kappa]
    differ: list[tuple[Label, Label]]


def by_labeller(labels: Iterable[Label]) -> dict[str, dict[tuple[str, str], Label]]:
    """Each labeller's, by repository and commit."""
    by: dict[str, dict[tuple[str, str], Label]] = {}
    for one in labels:
        by.setdefault(one.labeller, {})[one.repo, one.commit] = one
    return by


def pairs(labels: Iterable[Label]) -> list[Pair]:
    """Every two labellers, on the commits that both have."""
    by, found = by_labeller(labels), []
    alike = lambda name, of: kappa([getattr(a, name) for a, _ in of], [getattr(b, name) for _, b in of])
    for first, second in combinations(sorted(by), 2):
        both = [(by[first][key], by[second][key]) for key in by[first] if key in by[second]]
        agreed = [(a, b) for a, b in both if a.fix == b.fix == "yes"]
        differ = [(a, b) for a, b in both if any(getattr(a, name) != getattr(b, name) for name in ("fix", *DIMENSIONS))]
        words = {name: alike(name, agreed) for name in DIMENSIONS}
        found.append(Pair(first, second, alike("fix", both), words, differ))
    return found


@dataclass(frozen=True)
class Selection:
    """How good rules are, with 95% intervals: of what they choose the share that are fixes, and of all fixes what they choose."""

    precision: tuple[float, float, float]
    recall: tuple[float, float, float]
    fixes: int  # among the labelled commits


def selection(labels: Iterable[Label], population: Mapping[str, int], chosen: Collection[tuple[str, str]], *, strict: bool = True) -> Selection:
    """Of the rules that chose these commits, which need not be those of the day when the samples were drawn.

    `population`: how many commits each sample was drawn from, and so stands for: a labelled commit counts for population / drawn
    (Horvitz and Thompson 1952). `strict`: a commit is a fix if all labellers say so; else if one does. The intervals are
    those of 2,000 samples drawn again from each sample (percentile bootstrap).
    """
    said: dict[str, dict[tuple[str, str], list[bool]]] = {name: {} for name in SAMPLES}
    for one in labels:
        said[one.sample].setdefault((one.repo, one.commit), []).append(one.fix == "yes")
    strata = []
    for name, votes in said.items():
        rows = [(key in chosen, (all if strict else any)(each)) for key, each in votes.items()]
        if not rows and population[name]:
            what = "of a sample no commit is labelled, so nothing is known of what it stands for"
            raise SoliError(what, got=f"{name}: {population[name]} commits", fix="soli bugs label --fixes N --rest N ..., and labels of both")
        strata.append((np.array(rows, dtype=float).reshape(-1, 2), population[name] / max(len(rows), 1)))
    random = np.random.default_rng(0)
    drawn = lambda rows: rows[random.integers(len(rows), size=len(rows))] if len(rows) else rows
    again = [_shares([(drawn(rows), weight) for rows, weight in strata]) for _ in range(2000)]
    found = _shares(strata)
    low, high = np.nanpercentile(np.array(again), (2.5, 97.5), axis=0)
    precision, recall = ((found[i], float(low[i]), float(high[i])) for i in (0, 1))
    return Selection(precision, recall, int(sum(rows[:, 1].sum() for rows, _ in strata)))


def population(sample: Path) -> dict[str, int]:
    """How many commits each sample was drawn from, as a file says that `soli bugs label` wrote."""
    allowed = '{"population": {"fix": 2651, "rest": 8504}}'
    silent = lambda error: SoliError("this does not say what was drawn from", got=f"{sample}: {error!r}", allowed=allowed)
    with blaming(silent, OSError, ValueError, KeyError, TypeError):
        said = json.loads(sample.read_text(encoding="utf-8"))["population"]
        return {name: int(said[name]) for name in SAMPLES}


def judged(labels: Iterable[Label], sample: Path, mined: Path) -> dict[str, Selection]:
    """The rules that made a mined file, by labels of commits that were drawn as `sample` says: strictly and not."""
    labels, size = list(labels), population(sample)
    with store.opened(mined) as base:
        chosen = set(base.execute("SELECT repo, hash FROM fix"))
        known = set(base.execute("SELECT repo, hash FROM change"))
    if lacking := {f"{one.repo} {one.commit[:10]}" for one in labels if (one.repo, one.commit) not in known}:
        got = f"{mined} lacks {len(lacking)}: {', '.join(sorted(lacking)[:3])} ..."
        raise SoliError("labelled commits are not in this file", got=got, fix="mine their histories too, as they are now")
    ways = {"all say so": True, "one says so": False}
    return {name: selection(labels, size, chosen, strict=strict) for name, strict in ways.items()}


def _shares(strata: list[tuple[NDArray[np.float64], float]]) -> tuple[float, float]:
    """Precision and recall of [n, 2] rows of chosen and fix, each with its weight."""
    both = sum(weight * (rows[:, 0] * rows[:, 1]).sum() for rows, weight in strata)
    taken, fixes = (sum(weight * rows[:, i].sum() for rows, weight in strata) for i in (0, 1))
    return float(both / taken) if taken else float("nan"), float(both / fixes) if fixes else float("nan")


@dataclass(frozen=True)
class Judged:
    """One dimension by one labeller, or by ALL where they agree. `sure`: kappa of the verdicts with a confidence of store.SURE, which
    no model and nobody is asked about. `matrix`: labels down, verdicts across, in the order of `words`.
    `precision`, `recall`: of each word, with 95% intervals (Wilson 1927); a word that nobody says has none."""

    dimension: str
    labeller: str
    kappa: Kappa
    sure: Kappa
    words: tuple[str, ...]
    matrix: tuple[tuple[int, ...], ...]
    precision: dict[str, tuple[float, float, float]]
    recall: dict[str, tuple[float, float, float]]


def judge_words(labels: Iterable[Label], mined: Path) -> list[Judged]:
    """The verdicts of a classified file on the labelled fixes that it has, by every labeller and by all of them together: kappa, the confusion matrix,
    and of each word precision and recall."""
    with store.opened(mined) as base:
        rows = base.execute("SELECT repo, hash, dimension, word, confidence FROM class")
        said = {(repo, hash_, of): (word, sure >= store.SURE) for repo, hash_, of, word, sure in rows}
    labels = list(labels)
    if not any((one.repo, one.commit, dimension) in said for one in labels for dimension in DIMENSIONS):
        has = ", ".join(sorted({repo for repo, *_ in said})) or "nothing is classified"
        got = f"{mined}: {has}; labels of {', '.join(sorted({one.repo for one in labels}))}"
        raise SoliError("none of these labels is of a fix that this file has", got=got, fix="mine and classify their histories too")
    by, found = by_labeller(labels), []
    fixes = {who: {key: one for key, one in theirs.items() if one.fix == "yes"} for who, theirs in by.items()}
    for dimension in DIMENSIONS:
        words = {who: {key: getattr(one, dimension) for key, one in theirs.items()} for who, theirs in fixes.items()}
        first = next(iter(words.values()), {})
        words[ALL] = {key: word for key, word in first.items() if all(one.get(key) == word for one in words.values())}
        found += [_judged(dimension, who, theirs, said) for who, theirs in words.items()]
    return found


def _judged(dimension: str, who: str, theirs: dict[tuple[str, str], str], said: Said) -> Judged:
    of = [(word, *said[*key, dimension]) for key, word in theirs.items() if (*key, dimension) in said]
    sure = [(a, b) for a, b, sure in of if sure]
    true, guessed = [a for a, _, _ in of], [b for _, b, _ in of]
    words = tuple(word for word in DIMENSIONS[dimension] if word in {*true, *guessed})
    right = {word: sum(a == b == word for a, b, _ in of) for word in words}
    return Judged(
        dimension, who, kappa(true, guessed), kappa([a for a, _ in sure], [b for _, b in sure]), words,
        confusion(words, true, guessed),
        {word: share(right[word], guessed.count(word)) for word in words if word in guessed},
        {word: share(right[word], true.count(word)) for word in words if word in true},
    )  # fmt: skip
