"""How far two labellers, or rules and labellers, agree: kappa, the confusion of words, precision and recall of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Kappa:
    """Cohen's kappa of so many things, its 95% interval, and the share that is labelled alike."""

    value: float
    low: float
    high: float
    alike: float
    count: int


def kappa(first: Sequence[str], second: Sequence[str]) -> Kappa:
    """(p_o - p_e) / (1 - p_e), p_e by each labeller's own shares (Cohen 1960); the interval is by the large-sample variance of
    Fleiss, Cohen and Everitt (1969), equation 13. Where both say one word of everything it is 1, of nothing nan.
    """
    words = sorted({*first, *second})
    count = len(first)
    if not count:
        return Kappa(np.nan, np.nan, np.nan, np.nan, 0)
    table = np.zeros((len(words), len(words)))
    for a, b in zip(first, second, strict=True):
        table[words.index(a), words.index(b)] += 1 / count
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    observed, expected = float(np.trace(table)), float(rows @ columns)
    if expected == 1.0:
        return Kappa(1.0, 1.0, 1.0, observed, count)
    value = (observed - expected) / (1 - expected)
    same = np.diag(table) * ((1 - expected) - (rows + columns) * (1 - observed)) ** 2
    other = table * (columns[:, None] + rows[None, :]) ** 2
    spread = same.sum() + (1 - observed) ** 2 * (other.sum() - np.trace(other))
    spread -= (observed * expected - 2 * expected + observed) ** 2
    error = 1.96 * np.sqrt(max(spread, 0.0) / count) / (1 - expected) ** 2
    return Kappa(value, max(value - error, -1.0), min(value + error, 1.0), observed, count)


@dataclass(frozen=True)
class Word:
    """Of one word: how often it was said, how often it was right to say, and both. Shares are nan of nothing."""

    said: int
    right: int
    both: int

    @property
    def precision(self) -> float:
        return self.both / self.said if self.said else float("nan")

    @property
    def recall(self) -> float:
        return self.both / self.right if self.right else float("nan")


def words(said: Sequence[str], right: Sequence[str]) -> dict[str, Word]:
    """Precision and recall of each word, where `right` is taken for the truth."""
    pairs = Counter(zip(said, right, strict=True))
    return {
        word: Word(
            sum(n for (a, _), n in pairs.items() if a == word),
            sum(n for (_, b), n in pairs.items() if b == word),
            pairs[word, word],
        )
        for word in sorted({*said, *right})
    }


def confusion(said: Sequence[str], right: Sequence[str]) -> dict[str, dict[str, int]]:
    """confusion[right][said]: how often."""
    pairs = Counter(zip(said, right, strict=True))
    found = sorted({*said, *right})
    return {b: {a: pairs[a, b] for a in found} for b in found}
