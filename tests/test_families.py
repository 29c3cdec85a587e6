"""transformers' families that soli has no code for, as they are."""

from __future__ import annotations

import pytest

import families
from pool import Pool
from soli.verify.parity import BOUND, check
from sweep import spread, swept


def one(name: str, plan: str, ranks: int):
    return check(families.case(name), plan, ranks)


NAMES = list(families.FAMILIES)
PLANS = [("tp=2", 2), ("pp=2,microbatches=3,schedule=zbh1", 2)]
BOTH = ("pp=2,tp=2,sp=on,microbatches=2", 4)
"""Of one family; of the others in the sweep."""


@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [*spread([(name,) for name in NAMES], PLANS), (NAMES[0], *BOTH), *(swept(name, *BOTH) for name in NAMES[1:])],
)
def test_families_equal_sequential(pool: Pool, name: str, plan: str, ranks: int) -> None:
    for row in pool.run(one, name, plan, ranks, ranks=ranks, deadline=60):
        assert row.worst <= BOUND, row
