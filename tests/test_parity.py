"""Law 1 for every case and every plan, in float64; and that the proof can fail."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soli.engine import engine as engine_module
from soli.parallel.reduce import Reducer
from soli.verify.cases import CASES, PLANS
from soli.verify.parity import BOUND, check, compare, expected_of, under_plan
from soli.verify.pool import Pool


def one(name: str, plan: str, ranks: int):
    return check(CASES[name], plan, ranks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ranks", "plan"), [(n, plan) for n, plans in PLANS.items() for plan in plans])
def test_plan_equals_sequential(pool: Pool, name: str, ranks: int, plan: str) -> None:
    for row in pool.run(one, name, plan, ranks, ranks=ranks):
        assert row.worst <= BOUND, row


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(sorted(CASES)),
    ranks=st.integers(2, 4),
    zero=st.integers(0, 3),
    accumulate=st.integers(1, 5),
)
def test_drawn_plans_equal_sequential(pool: Pool, name: str, ranks: int, zero: int, accumulate: int) -> None:
    plan = f"dp={ranks},zero={zero},accumulate={accumulate}"
    for row in pool.run(one, name, plan, ranks, ranks=ranks):
        assert row.worst <= BOUND, row


def broken(how: str):
    """The same comparison with one thing wrong."""
    case = CASES["gpt-masked"]
    if how == "one target too many":
        real = engine_module.all_reduce

        def wrong(tensor, axis, op="sum", *, label="", wait=True):
            done = real(tensor, axis, op, label=label, wait=wait)
            if label.startswith("loss"):
                tensor[axis.size] += 1.0
            return done

        engine_module.all_reduce = wrong
        try:
            return compare(under_plan(case, "dp=2"), expected_of(case))
        finally:
            engine_module.all_reduce = real
    real_land = Reducer._land

    def no_reduction(self):
        unit, _ = self._flying.popleft()
        with torch.no_grad():
            unit.grad_shard.mul_(1.0 + 1e-9)

    Reducer._land = no_reduction
    try:
        return compare(under_plan(case, "dp=1"), expected_of(case))
    finally:
        Reducer._land = real_land


@pytest.mark.parametrize(("how", "ranks"), [("one target too many", 2), ("a gradient off by 1e-9", 1)])
def test_the_proof_fails_where_it_should(pool: Pool, how: str, ranks: int) -> None:
    for worst, _ in pool.run(broken, how, ranks=ranks):
        assert worst > BOUND
