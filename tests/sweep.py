"""Cases that `make sweep` runs and `make test` leaves out: more of the same, on more ranks, or slower."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def swept(*given: Any) -> Any:
    """A row of `parametrize` that only the sweep runs."""
    return pytest.param(*given, marks=pytest.mark.sweep)


def spread(*columns: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Every combination of the columns' rows, as rows of `parametrize`; all are swept but some in which each row occurs.

    The i-th of these has the i-th row of each column, again from the first where a column is shorter.
    """
    kept = {tuple(i % len(column) for column in columns) for i in range(max(map(len, columns)))}
    made = []
    for places in product(*(range(len(column)) for column in columns)):
        row = tuple(value for column, i in zip(columns, places, strict=True) for value in column[i])
        made.append(row if places in kept else swept(*row))
    return made
