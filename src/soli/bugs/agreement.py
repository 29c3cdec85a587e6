"""How far two labellers agree."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Share = tuple[float, float, float]
"""A number and its interval."""


@dataclass(frozen=True)
class Kappa:
    """Cohen's kappa of so many things, its 95% interval, and the share that is labelled alike."""

    value: float
    low: float
    high: float
    alike: float
    count: int

    def __str__(self) -> str:
        return bounded((self.value, self.low, self.high)) if self.count else "-"

    @property
    def told(self) -> str:
        """All of it in words."""
        return f"kappa {self}, {self.alike:.0%} of {self.count} alike" if self.count else "none to compare"


def bounded(part: Share) -> str:
    """A number with its interval, as people read it."""
    return f"{part[0]:.2f} ({part[1]:.2f} to {part[2]:.2f})"


def percent(part: Share | None) -> str:
    """A share as people read it, with its interval."""
    return f"{part[0]:.0%} ({100 * part[1]:.0f} to {100 * part[2]:.0f})" if part else "-"


def kappa(first: Sequence[str], second: Sequence[str]) -> Kappa:
    """(p_o - p_e) / (1 - p_e), p_e by each labeller's own shares (Cohen 1960); the interval is by the large-sample variance of
    Fleiss, Cohen and Everitt (1969), equation 13. Where both say one word of everything it is 1, of nothing nan.
    """
    words, count = sorted({*first, *second}), len(first)
    if not count:
        return Kappa(np.nan, np.nan, np.nan, np.nan, 0)
    table = np.array(confusion(words, first, second)) / count
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


def confusion(words: Sequence[str], first: Sequence[str], second: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """How often the first says one word (down) where the second says another (across)."""
    both = Counter(zip(first, second, strict=True))
    return tuple(tuple(both[a, b] for b in words) for a in words)
