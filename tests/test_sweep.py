"""What the sweep takes from `make test` is more of the same: every row of a column stays once."""

from __future__ import annotations

from sweep import spread


def test_every_row_of_every_column_stays() -> None:
    names, plans = [(f"model {i}",) for i in range(4)], [("dp=2", 2), ("tp=2", 2), ("pp=4", 4)]
    rows = spread(names, plans)
    stay = [row for row in rows if not hasattr(row, "marks")]
    swept = [row for row in rows if hasattr(row, "marks")]
    assert {row[:1] for row in stay} == set(names)
    assert {row[1:] for row in stay} == set(plans)
    assert len(stay) == 4
    assert all([mark.name for mark in row.marks] == ["sweep"] for row in swept)
    assert {*stay, *(tuple(row.values) for row in swept)} == {(*a, *b) for a in names for b in plans}
