"""How good rules that classify are, by labels: kappa, the confusion matrix, and of each word precision and recall."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from soli.bugs import store
from soli.bugs.agreement import Kappa, confusion, kappa
from soli.bugs.labels import Label, by_labeller
from soli.bugs.mine import share
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.errors import SoliError

ALL = "all of them"
Said = dict[tuple[str, str, str], tuple[str, bool]]
"""Of repository, hash and dimension the word, and whether it is sure."""


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


def judge(labels: Iterable[Label], mined: Path) -> list[Judged]:
    """The verdicts of a classified file on the labelled fixes that it has, by every labeller and by all of them together."""
    with store.opened(mined) as base:
        rows = base.execute("SELECT repo, hash, dimension, word, confidence FROM class")
        said = {(repo, hash_, of): (word, sure >= store.SURE) for repo, hash_, of, word, sure in rows}
    labels = list(labels)
    if not any((one.repo, one.commit, dimension) in said for one in labels for dimension in DIMENSIONS):
        has = ", ".join(sorted({repo for repo, *_ in said})) or "nothing is classified"
        got = f"{mined}: {has}; labels of {', '.join(sorted({one.repo for one in labels}))}"
        fix = "mine and classify their histories too"
        raise SoliError("none of these labels is of a fix that this file has", got=got, fix=fix)
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
