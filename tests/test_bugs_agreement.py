"""Kappa and its interval, by hand and against draws whose kappa is known."""

from __future__ import annotations

import math

import pytest

from soli.bugs.agreement import kappa


def table(rows: list[list[int]]) -> tuple[list[str], list[str]]:
    pairs = [(str(i), str(j)) for i, row in enumerate(rows) for j, n in enumerate(row) for _ in range(n)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def test_kappa_is_that_of_worked_examples() -> None:
    """By hand: 0.7 alike and 0.41 by chance of 200 pairs; 0.7 and 0.5 of 50."""
    three = kappa(*table([[88, 14, 18], [10, 40, 10], [2, 6, 12]]))
    assert three.value == pytest.approx((0.7 - 0.41) / 0.59)
    assert (round(three.alike, 2), three.count) == (0.70, 200)
    two = kappa(*table([[20, 5], [10, 15]]))
    assert two.value == pytest.approx(0.4)


def test_the_interval_holds_as_often_as_it_says() -> None:
    """Two labellers of a known kappa, drawn again and again: 0.6 of the labels are copied, the others are their own."""
    import numpy as np

    random = np.random.default_rng(0)
    shares, inside = [0.5, 0.3, 0.2], 0
    for _ in range(400):
        first = random.choice(3, 150, p=shares)
        second = np.where(random.random(150) < 0.6, first, random.choice(3, 150, p=shares))
        found = kappa([str(x) for x in first], [str(x) for x in second])
        inside += found.low <= 0.6 <= found.high
    assert 0.92 <= inside / 400 <= 0.98


def test_ends() -> None:
    assert kappa(["a", "b"], ["a", "b"]).value == 1.0
    assert kappa(["a", "a"], ["a", "a"]).value == 1.0
    assert kappa(["a", "b"], ["b", "a"]).value == -1.0
    assert math.isnan(kappa([], []).value)


@pytest.mark.parametrize("count", [1, 3, 6, 7, 10, 49, 100])
def test_one_word_for_everything_is_whole_agreement(count: int) -> None:
    assert kappa(["a"] * count, ["a"] * count).value == 1.0
