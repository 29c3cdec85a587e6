"""Plan: text, TOML and JSON round-trip; every problem at once; the nearest plan is legal."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soli.core.axes import AXES, coordinates, peers
from soli.core.errors import SoliError
from soli.core.plan import CHOICES, Plan
from soli.planner.explain import fixed_of
from soli.planner.legality import nearest, problems, resolve

degree = st.integers(1, 64)
plans = st.builds(
    Plan,
    dp=st.none() | degree,
    replicate=degree,
    zero=st.integers(0, 3),
    tp=degree,
    pp=degree,
    cp=degree,
    sp=st.booleans(),
    accumulate=degree,
    recompute=st.sampled_from(["none", "selective", "full", "0.25"]),
    **{key: st.sampled_from(values) for key, values in CHOICES.items()},
)


@given(plans)
def test_three_forms_round_trip(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_toml(plan.to_toml()) == plan


@given(plans, st.integers(1, 24))
def test_nearest_plan_is_legal_and_a_legal_plan_is_its_own_nearest(plan: Plan, world: int) -> None:
    near = nearest(plan, world)
    assert not problems(near, world)
    if not problems(plan, world):
        assert near == plan


def test_all_problems_of_a_text_at_once() -> None:
    with pytest.raises(SoliError) as caught:
        Plan.parse("dpp=2,zero=7,precison=fp32,schedule=1f2b,tp=x,tp=2,foo")
    text = str(caught.value)
    for part in ("'dpp'", "did you mean 'precision'", "'zero'", "'1f1b'", "'tp'", "'foo'"):
        assert part in text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("read", [Plan.parse, fixed_of])
def test_keys_that_no_comma_parts_are_told_how_to_be(read: Callable[[str], object]) -> None:
    for text, meant in (("tp=2 pp=3", "tp=2,pp=3"), ("recompute=full; pp=2", "recompute=full,pp=2")):
        with pytest.raises(SoliError, match=f"part them by commas: {meant}"):
            read(text)
    assert Plan.parse("tp = 2 , pp= 3") == Plan(tp=2, pp=3)


def test_what_is_no_switch_in_a_file() -> None:
    for text in ("sp = [1]", "sp = 1", "sp = {}"):
        with pytest.raises(SoliError, match="'sp' of the plan cannot be read"):
            Plan.from_toml(text)


def test_all_problems_for_a_world_at_once_with_the_nearest_plan() -> None:
    with pytest.raises(SoliError) as caught:
        resolve(Plan.parse("dp=3,tp=2,zero=2,replicate=2,precision=fp8"), 4)
    text = str(caught.value)
    for part in (
        "tp=2",
        "precision=fp8",
        "4 are there",
        "replicate=2 does not divide dp=3",
        'plan="replicate=2,zero=2,tp=2"',
    ):
        assert part in text


def test_dp_takes_the_ranks_that_are_over() -> None:
    assert resolve(Plan(), 6) == Plan(dp=6)


@given(st.tuples(*(st.integers(1, 4) for _ in AXES)))
def test_axes_partition_the_ranks(degrees: tuple[int, ...]) -> None:
    sizes = dict(zip(AXES, degrees, strict=True))
    world = range(math.prod(degrees))
    assert len({tuple(coordinates(r, sizes).values()) for r in world}) == len(world)
    for axis in AXES:
        families = {tuple(peers(rank, axis, sizes)) for rank in world}
        assert sorted(rank for family in families for rank in family) == list(world)
        assert all(coordinates(f[i], sizes)[axis] == i for f in families for i in range(sizes[axis]))
