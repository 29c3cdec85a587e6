"""Law 1 for every case and every plan, in float64; and that the proof can fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import CASES, IN_SUITE, WAYS, Row, choices, refused, rows, selection, suite
from pool import Pool
from soli import losses
from soli.engine import agreed as engine_module
from soli.parallel import data
from soli.parallel.lift import lifted
from soli.parallel.reduce import Reducer
from soli.parallel.units import buckets
from soli.verify.parity import BOUND, Case, adamw, check, compare, expected_of, under_plan
from sweep import swept


def one(name: str, plan: str, ranks: int):
    return check(CASES[name], plan, ranks)


SUITE = suite(most_ranks=4)


@pytest.mark.parametrize(
    ("name", "plan", "ranks"), [*SUITE, *(swept(*row) for row in selection(most_ranks=4) if row not in SUITE)]
)
def test_plan_equals_sequential(pool: Pool, name: str, plan: str, ranks: int) -> None:
    for row in pool.run(one, name, plan, ranks, ranks=ranks):
        assert row.worst <= BOUND, row


@pytest.mark.parametrize("most", [2, swept(4)])
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(CASES)),
    ranks=st.integers(2, 4),
    zero=st.integers(0, 3),
    accumulate=st.integers(1, 5),
    model=st.sampled_from(["", "tp=2", "tp=2,sp=on", "pp=2,microbatches=3", "pp=2,schedule=zbv"]),
)
def test_drawn_plans_equal_sequential(
    launched: Pool, most: int, name: str, ranks: int, zero: int, accumulate: int, model: str
) -> None:
    ranks = most if model else min(ranks, most)
    plan = f"dp={most // 2 if model else ranks},zero={zero},accumulate={accumulate}" + (f",{model}" if model else "")
    assume(not refused(name, plan))
    for row in launched.run(one, name, plan, ranks, ranks=ranks):
        assert row.worst <= BOUND, row


def in_small_buckets(limit: int):
    with patch.object(data, "buckets", partial(buckets, limit=limit)):
        return one("gpt", "tp=2,sp=on", 2)


@pytest.mark.parametrize("limit", [2**11, 2**13])
def test_buckets_of_uneven_parts_end_alike(pool: Pool, limit: int) -> None:
    for row in pool.run(in_small_buckets, limit, ranks=2):
        assert row.worst <= BOUND, row


class Classifier(nn.Module):
    """One rank of tp has a single element of the head's bias, the other two."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first, self.norm = nn.Linear(8, 3), nn.Linear(6, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.first(x))))


def classified():
    def make():
        torch.manual_seed(5)
        draw = lambda size: torch.randn(8, size).double()
        return Classifier(), losses.mse("y"), [{"x": draw(6), "y": draw(3)} for _ in range(2)]

    return check(Case("classified", make, adamw), "dp=2,tp=2,zero=3", 4)


def test_units_of_uneven_parts_hold_the_same(pool: Pool) -> None:
    for row in pool.run(classified, ranks=4):
        assert row.worst <= BOUND, row


@pytest.mark.parametrize(("select", "alike"), [(suite, IN_SUITE), (selection, {})])
def test_the_selection_leaves_no_pair_out(select: Callable[[int], list[Row]], alike: dict[str, tuple[str, ...]]) -> None:
    """Every two choices of a plan together, and every model cut, sharded and recomputed in each way, or in those named."""
    chosen, small = select(4), [row for row in rows() if row[2] <= 4]

    def pairs(found):
        each = [choices(plan) for _, plan, _ in found]
        return {frozenset((a, b)) for keys in each for a in keys for b in keys}

    def ways(found):
        return {(name, key.split("=")[0]) for name, plan, _ in found for key in choices(plan)}

    assert pairs(chosen) == pairs(small)
    assert {(name, key) for name, key in ways(small) if key in alike.get(name, WAYS)} <= ways(chosen)
    assert {name for name, _, _ in chosen} == CASES.keys()
    assert len(chosen) < len(small) / 20


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


class Casting(torch.nn.Module):
    """Casts to float32 in the ways that models from elsewhere do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = y.float() * torch.rsqrt(y.to(torch.float32).pow(2).mean(-1, keepdim=True) + torch.full((1,), 1e-6))
        y = torch.nn.functional.softmax(y, dim=-1, dtype=torch.float32) @ torch.ones(8, 8, dtype=torch.float)
        return y.to(dtype=torch.float32).cumsum(-1).to(x.dtype)


def test_float32_inside_a_model_is_lifted() -> None:
    torch.manual_seed(0)
    model, x = Casting().double(), torch.randn(64, 8).double()
    y = model.linear(x)
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).softmax(-1) @ torch.ones(8, 8).double()
    exact = y.cumsum(-1)
    with lifted():
        assert (model(x) - exact).abs().max() <= 1e-14
    assert (model(x) - exact).abs().max() > 1e-10  # what the proof would have to forgive otherwise
    assert torch.get_default_dtype() == torch.float32


def grouped(product: Any, x: Tensor, weights: Tensor) -> list[Tensor]:
    """A product of groups of rows, one of which has none, and its gradients; nothing is asked of rows after the last group."""
    made = product(x, weights, offs=torch.tensor([2, 2, 7], dtype=torch.int32))[:7]
    of_x, of_weights = torch.autograd.grad(made.square().sum(), (x, weights))
    return [made, of_x[:7], of_weights]


def test_products_of_groups_of_rows_are_there_in_float64() -> None:
    """torch has them in no float64."""
    torch.manual_seed(0)
    given = torch.randn(10, 16, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    found = grouped(torch._grouped_mm, *given)
    for product in (torch._grouped_mm, nn.functional.grouped_mm):
        with lifted():
            wide = grouped(product, *(x.detach().double().requires_grad_() for x in given))
        assert {x.dtype for x in wide} == {torch.float64}
        for one, other in zip(found, wide, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def test_constants_in_float32_are_lifted_where_torch_takes_no_two_types() -> None:
    """Class weights of a loss, a product with a constant; what writes into a constant is not done to a copy of it."""
    torch.manual_seed(0)
    weights, x, target, kept = torch.linspace(0.5, 2, 8), torch.randn(64, 8).double(), torch.arange(64) % 8, torch.zeros(8)
    wanted = nn.functional.cross_entropy(x, target, weights.double()), x @ weights.double()
    with lifted():
        found = nn.functional.cross_entropy(x, target, weight=weights), x @ weights
        kept.add_(x[0])
        with pytest.raises(RuntimeError):
            kept.addmv_(x[:8], weights)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(kept, x[0].float())
