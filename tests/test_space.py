"""The space of plans and what is left out of it: every plan, bounds that nothing is below, the best of all."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyplan import spaces
from soli.core.errors import SoliError
from soli.core.layout import even_parts
from soli.core.plan import Plan
from soli.planner import bounds, explain, legality, space
from soli.planner.cost import arithmetic, communication, context, memory, pipeline
from soli.planner.cost.constants import MEANINGS, spread_of
from soli.planner.cost.points import CUBE, FULL, NONE, RING, SELECTIVE, ULYSSES, Points
from soli.planner.cost.step import layer as layer_of
from soli.planner.cost.step import layers as layers_of
from soli.planner.cost.step import step
from soli.planner.models import Model
from soli.planner.offers import SCHEDULES, TENSORS
from soli.planner.search import (  # fmt: skip
    FEW_WAYS,
    begun,
    costs,
    different,
    holds,
    peaks,
    plan_of,
    search,
    thriftiest,
)
from soli.planner.task import Task
from test_cost import BASE, ONE, point
from test_search import LLAMA, SMALL, task

MOE = Model("moe", 12, 1024, 16, 16, 64, 2048, True, 51200, 8, 3, True, 2048, 1)
NAMES = (
    "tp",
    "cp",
    "pp",
    "dp",
    "ep",
    "tensor",
    "rows",
    "sp",
    "context",
    "microbatch",
    "schedule",
    "chunks",
    "recompute",
    "again",
    "zero",
    "replicate",
    "offload",
)


DEEP = ("deepspeed", "megatron-deepspeed")
"""Whose pipeline has one schedule and ZeRO-1 at most, and whose cp is Ulysses beside dp alone."""


def lying(asked: Task) -> list[tuple[int, ...]]:
    """tp, cp, pp, dp, ep, the kind of tp's grid and its rows, by loops."""
    n, model = asked.cluster.size, asked.model
    degrees = [d for d in range(1, n + 1) if n % d == 0]
    shares = [d for d in range(1, model.experts + 1) if model.experts % d == 0] or [1]
    found = []
    for tp, cp, pp, dp in product(degrees, repeat=4):
        if tp * cp * pp * dp != n or asked.seq % cp or pp > model.layers:
            continue
        shapes = [("1d", 1, tp)]
        if asked.framework == "soli" and not model.experts:
            shapes += [("2d", a, b) for a, b in product(range(2, tp), repeat=2) if a * b == tp]
            shapes += [("3d", q, q) for q in range(2, tp) if q**3 == tp]
        for kind, rows, columns in shapes:
            if model.heads % columns or (model.kv_heads % columns and columns % model.kv_heads):
                continue
            for ep in shares if asked.framework != "soli" else [1]:
                many, few = max(ep, dp * cp), min(ep, dp * cp)
                if many % few == 0 and (ep <= dp * cp or tp % (ep // (dp * cp)) == 0):
                    found.append((tp, cp, pp, dp, ep, TENSORS[kind], rows))
    return found


def sharding(asked: Task, tp: int, cp: int, dp: int, ep: int) -> list[tuple[int, ...]]:
    """Every way to shard."""
    expert_ranks = tp * dp * cp // ep
    same = max(expert_ranks // min(expert_ranks, tp), 1)  # ranks with the same experts
    return [
        (zero, copies, offload)
        for zero in range(4)
        for copies in range(1, dp + 1)
        if dp % copies == 0 and (copies == 1 if zero == 0 else dp * cp // copies > 1)
        for offload in ((0, 1) if zero and asked.framework in ("megatron", *DEEP) else (0,))
        if asked.framework not in DEEP or copies == 1 or zero == 3
        if not asked.model.experts or same % copies == 0
    ]


def ordering(asked: Task, pp: int) -> list[tuple[str, int]]:
    """Schedules, and stages of a rank."""
    if pp == 1:
        return [("1f1b", 1)]
    looped = [("interleaved", n) for n in (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)] * (asked.framework not in DEEP)
    more = [("gpipe", 1), ("zbv", 2), ("dualpipev", 2)] * (asked.framework in ("soli", "fsdp"))
    return [("1f1b", 1), *looped, *more, *([("zbh1", 1)] if asked.framework == "soli" else [])]


def recomputing(asked: Task) -> list[tuple[float, int]]:
    """What all layers recompute; and layers of a stage that recompute all, where others recompute nothing."""
    some = range(1, asked.model.layers) if asked.framework != "soli" else ()
    return [(NONE, 0), (SELECTIVE, 0), (FULL, 0), *((NONE, again) for again in some)]


def brute(asked: Task) -> set[tuple[float, ...]]:
    """Every plan, by loops and by what the rules say."""
    model, found = asked.model, set()
    for tp, cp, pp, dp, ep, tensor, rows in lying(asked):
        columns = rows if tensor == CUBE else tp // rows
        exchanged = cp > 1 and model.heads % (columns * cp) == 0 and asked.framework != "fsdp"
        choices = product(
            (0, 1),
            (RING, ULYSSES) if exchanged else (RING,),
            (1, 2, 4, 8, 16, 32),
            ordering(asked, pp),
            recomputing(asked),
            sharding(asked, tp, cp, dp, ep),
        )
        for sp, crossing, microbatch, (schedule, chunks), (recompute, again), shards in choices:
            times = -(-asked.batch // (dp * microbatch))
            most = 2 * asked.batch - 1 if asked.framework == "soli" else asked.batch  # which cuts it down again
            if dp * microbatch > most or (sp and (tp == 1 or asked.seq // cp % tp)):
                continue
            if asked.framework in DEEP and (
                (cp > 1 and (crossing == RING or tp * pp > 1))
                or (pp > 1 and shards[0] > 1)
                or (sp and asked.framework == "deepspeed")
            ):
                continue
            part = ceil(ceil(asked.batch / dp) / times) if asked.framework == "soli" else microbatch
            if tensor and (sp or schedule in ("zbh1", "zbv", "dualpipev")):
                continue
            if tensor and part % (rows * rows if tensor == CUBE else rows):
                continue
            if pp * chunks > model.layers or (schedule in ("interleaved", "zbh1") and times % pp):
                continue
            if schedule in ("zbv", "dualpipev") and times < 2 * pp:
                continue
            if again and again >= model.layers / pp / chunks:
                continue
            if asked.framework == "soli" or asked.batch % (dp * microbatch) == 0:
                found.add((tp, cp, pp, dp, ep, tensor, rows, sp, crossing, part, SCHEDULES[schedule], chunks, recompute, again * chunks, *shards))  # fmt: skip
    return found


@pytest.mark.parametrize("name", DEEP)
def test_a_program_is_offered_what_it_has(name: str) -> None:
    asked = task(replace(MOE, layers=6), "a100:4", batch=8, seq=2048, framework=name, memory=20e9)
    p = spaces(asked)
    got = list(zip(*(getattr(p, key).tolist() for key in NAMES), strict=True))
    assert len(set(got)) == len(got) == space.counted(asked)
    assert set(got) == brute(asked)
    times = costs(asked, p).time[peaks(asked, p) <= asked.limit]
    assert search(asked).cost.time[0] == pytest.approx(times.min(), rel=1e-12)
    for words in ("pp=2,zero=3", "chunks=2,pp=2", "cp=2,tp=2", "context=ring", "replicate=2,zero=2", "schedule=zbv"):
        with pytest.raises(SoliError, match=f"{name} does not run"):
            search(asked.with_fixed(explain.fixed_of(words)))


@pytest.mark.parametrize("batch", [48, 100, 131, 256])
def test_microbatches_are_as_large_as_the_engine_cuts_them(batch: int) -> None:
    """100 sequences of 8 replicas in two parts are 7 and 6 of 13, not 8 and 8."""
    table = space.layouts(task(SMALL, "h100:8x3", batch=batch, seq=2048))
    for dp, size in {*zip(table["dp"].astype(int).tolist(), table["microbatch"].astype(int).tolist(), strict=True)}:
        own = max(b - a for a, b in even_parts(batch, dp))
        assert max(b - a for a, b in even_parts(own, -(-batch // (dp * size)))) == size
    if batch == 100:
        assert 7.0 in table["microbatch"][table["dp"] == 8]


def test_a_stage_that_has_one_layer_more_is_charged() -> None:
    """94 layers in 32 stages: three each, and the last ones less. A program that nobody says can do it is not offered it."""
    asked = lambda name: task(replace(SMALL, layers=94, vocab=2048), "h100:8", batch=32, seq=2048, framework=name).with_fixed({"pp": 8, "chunks": 4})  # fmt: skip
    own = spaces(asked("megatron")).own_layers
    assert len(own)
    assert set(own) == {12.0}
    assert not space.size(space.layouts(asked("nanotron")))


ASKED = [
    *(task(SMALL, cluster, batch=48, seq=2048) for cluster in ("h100:1", "a100:8", "h100:6x2", "h100:8x3")),
    *(task(MOE, cluster, batch=32, seq=2048, framework=name) for cluster, name in (("h100:8", "soli"), ("h100:8x2", "megatron"), ("a100:4", "fsdp"))),
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED, ids=lambda t: f"{t.model.name}-{t.cluster}-{t.framework}")
def test_the_space_is_every_plan(asked: Task) -> None:
    p = spaces(asked)
    some = p.by_product > 0  # what torchtitan calls selective is computed as so many layers
    p = replace(p, recompute=np.where(some, SELECTIVE, p.recompute), again=np.where(some, 0.0, p.again))
    got = list(zip(*(getattr(p, name).tolist() for name in NAMES), strict=True))
    assert len(set(got)) == len(got) == space.counted(asked)
    assert set(got) == brute(asked)


@lru_cache(maxsize=1)
def everything(place: int) -> tuple[Points, np.ndarray, np.ndarray]:
    """Every point of the space of one of ASKED, what it takes and how long: whatever memory there is."""
    p = spaces(ASKED[place])
    return p, peaks(ASKED[place], p), costs(ASKED[place], p).time


@pytest.mark.parametrize("memory", [0.0, 16e9, 8e9, 3e9])
@pytest.mark.parametrize("asked", ASKED, ids=lambda t: f"{t.model.name}-{t.cluster}-{t.framework}")
def test_what_is_left_out_is_not_the_best(asked: Task, memory: float) -> None:
    """Against every point of the space: the same ten layouts with the same times, and the same least memory."""
    p, sizes, times = everything(ASKED.index(asked))
    asked = replace(asked, memory=memory)
    fits = sizes <= asked.limit
    best: dict[tuple[float, ...], float] = {}
    for i in np.flatnonzero(fits):
        key = (p.tp[i], p.cp[i], p.pp[i], p.dp[i], p.ep[i], p.tensor[i], p.zero[i] >= 3)
        best[key] = min(best.get(key, np.inf), float(times[i]))
    found = search(asked)
    assert found.looked <= found.counted == len(p)
    assert found.fit <= fits.sum()
    got = [float(found.cost.time[i]) for i in different(found, 10)]
    assert got == pytest.approx(sorted(best.values())[:10], rel=1e-12)
    assert (np.diff(found.cost.time) >= 0).all()
    assert (peaks(asked, found.points) <= asked.limit).all()
    assert thriftiest(asked)[1] == pytest.approx(sizes.min(), rel=1e-12)
    assert holds(asked) == fits.any()
    if not fits.any():
        assert found.least == pytest.approx(sizes.min(), rel=1e-12)


def test_of_plans_that_are_near_the_quickest_the_simplest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every point of the space: the fewest choices, and of these the least time; the quickest is what it was."""
    asked = replace(ASKED[4], memory=20e9)
    p = spaces(asked)
    p = p.take(peaks(asked, p) <= asked.limit)
    times, others = costs(asked, p).time, 0
    for near in (0.0, 0.0252, 0.3):
        monkeypatch.setattr(explain, "spread_of", lambda name, near=near: spread_of(name) | {"near": near})
        close = np.flatnonzero(times <= times.min() * (1 + near))
        choices = np.array([choices_of(p, i) for i in close])
        least = times[close[choices == choices.min()]].min()
        found = explain.answer(asked, 3)
        assert found.simplest.step_time_s == pytest.approx(least, rel=1e-12)
        assert found.best[0].step_time_s == pytest.approx(times.min(), rel=1e-12)
        assert (f"{found.simplest.plan} takes" in found.why) == (found.best[0] != found.simplest)
        others += found.best[0] != found.simplest
    assert others


def choices_of(p: Points, i: int) -> int:
    """What a plan says beyond dp, by its words."""
    plan = plan_of(p, i)
    said = (plan.tp > 1, plan.cp > 1, plan.pp > 1, plan.ep > 1, plan.tensor != "1d")
    return sum((*said, plan.schedule != "1f1b", plan.recompute != "none", plan.zero > 1, plan.offload != "none"))


@pytest.mark.parametrize("asked", ASKED, ids=lambda t: f"{t.model.name}-{t.cluster}-{t.framework}")
def test_no_plan_is_below_its_bounds(asked: Task) -> None:
    layouts = space.layouts(asked)
    layouts["row"] = np.arange(space.size(layouts), dtype=float)
    stages = space.stages(asked, layouts)
    stages["line"] = np.arange(space.size(stages), dtype=float)
    whole = space.shards(asked, stages)
    least = {**whole, "again": whole["most"]}
    p = space.points_of(asked, whole)
    times, sizes = costs(asked, p).time, peaks(asked, space.points_of(asked, least))
    row, line = whole["row"].astype(int), whole["line"].astype(int)
    assert (bounds.time_of_layouts(asked, layouts)[row] <= times).all()
    assert (bounds.time_of_stages(asked, stages)[line] <= times).all()
    shards, gathers = bounds.time_of_shards(asked, stages, whole), whole["zero"] >= 3
    assert shards[~gathers] == pytest.approx(times[~gathers], rel=1e-12)
    assert (shards[gathers] <= times[gathers]).all()
    assert (bounds.memory_of_layouts(asked, layouts)[row] <= sizes).all()
    assert (bounds.memory_of_stages(asked, stages)[line] <= sizes).all()


@pytest.mark.parametrize("asked", ASKED, ids=lambda t: f"{t.model.name}-{t.cluster}-{t.framework}")
def test_what_plans_have_alike_costs_what_it_costs_at_each(asked: Task) -> None:
    """Fields [1] beside those [N], and all of them [N], on places that are not the first ones too."""
    p = space.points_of(asked, space.shards(asked, space.stages(asked, space.layouts(asked))))
    at = np.arange(0, len(p), 7)
    whole = p.spread()
    assert {len(getattr(whole, f.name)) for f in fields(Points)} == {len(p)}
    assert {1, len(p)} >= {len(getattr(p, f.name)) for f in fields(Points)}
    for some, other in ((p, whole), (p.take(at), whole.take(at))):
        one, each = costs(asked, some), costs(asked, other)
        for f in fields(one):
            np.testing.assert_array_equal(getattr(one, f.name), getattr(each, f.name), err_msg=f.name)
            assert getattr(one, f.name).shape == (len(some),)


def test_rows_that_differ() -> None:
    draw = np.random.default_rng(0)
    rows = draw.integers(0, [2, 70000, 1, 5], size=(4000, 4)).astype(float)
    found, place = space.distinct(rows)
    np.testing.assert_array_equal(found, np.unique(rows, axis=0))
    np.testing.assert_array_equal(found[place], rows)


@pytest.mark.parametrize("asked", ASKED, ids=lambda t: f"{t.model.name}-{t.cluster}-{t.framework}")
@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_search_begins_at_what_a_few_plans_take(asked: Task, count: int) -> None:
    """The last of so many layouts, which is a plan of the space: the best ones are no slower."""
    few = asked.with_fixed(FEW_WAYS)
    if not space.counted(few):  # of one device there is nothing to shard
        assert begun(asked, count) == np.inf
        return
    found = search(few, count)
    places = different(found, count)
    last = found.cost.time[places[-1]] if len(places) == count else np.inf
    assert begun(asked, count) == pytest.approx(last, rel=1e-8)
    assert begun(asked, count) >= last


def test_every_plan_is_one_that_the_engine_takes() -> None:
    """Every ninth, in the order of their words."""
    for asked in (task(cluster="h100:8x2", batch=64), task(MOE, "h100:8x2", batch=64, seq=2048)):
        p = spaces(asked)
        plans = {plan_of(p, i) for i in range(len(p))}
        assert len(plans) > 1000
        for plan in sorted(plans, key=str)[::9]:
            assert not legality.problems(plan, 16), str(plan)
            assert Plan.parse(str(plan)) == plan


WIDER = [("ep", 1.0), ("ep", 4.0), ("replicate", 1.0), ("replicate", 2.0), ("context", RING), ("context", ULYSSES), ("offload", 0.0), ("offload", 1.0), ("recompute", 3.0), ("recompute", FULL)]  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(WIDER), st.floats(1.0, 4.0), st.sampled_from([3e9, 6e9, 12e9]))
def test_a_wider_choice_or_more_memory_is_never_slower(choice: tuple[str, float], times: float, memory: float) -> None:
    asked = task(MOE, "a100:8x2", batch=64, seq=2048, framework="megatron", memory=memory)
    whole, part = search(asked, 1), search(asked.with_fixed(dict([choice])), 1)
    more = search(replace(asked, memory=memory * times), 1)
    assert part.counted < whole.counted == more.counted
    if len(part.points):
        assert whole.cost.time[0] <= part.cost.time[0]
    if len(whole.points):
        assert more.cost.time[0] <= whole.cost.time[0]


# --- copies of shards -------------------------------------------------------------------------------------


def hybrid(**changes: float) -> float:
    """Seconds that a step's gradients take."""
    p = point(**{"dp": 64, "zero": 2, "whole": 1, **changes})
    dense, experts = memory.trained(p)
    summed = communication.sums(p, ONE, dense, experts, memory.of_tables(p))
    return float(communication.of_gradients(p, summed)[0])


def test_copies_sum_what_they_have_of_a_shard() -> None:
    """docs/communication.md, 2: scatter and gather over 8 ranks of a server, all-reduce of an eighth over 8 servers."""
    p = point(dp=64, zero=2, whole=1)
    count = memory.trained(p)[0]
    eight, one = np.array([8.0]), np.array([1.0])
    inside = communication.gather(p, ONE, count * p.summed, eight, one) + communication.gather(p, ONE, count * 2, eight, one)  # fmt: skip
    between = communication.all_reduce(p, ONE, count * p.summed / 8, eight, eight)
    assert hybrid(replicate=8) == pytest.approx(float((inside + between)[0]))
    third = point(dp=64, zero=3, whole=1, replicate=8)
    tables = communication.gather(third, ONE, memory.of_tables(third) * (2 + third.summed), eight, one)
    assert hybrid(zero=3, replicate=8) == pytest.approx(float((tables + between)[0]))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_copy_has_a_whole(zero: int) -> None:
    """Memory and gathers of dp=64 in 8 copies are those of dp=8; the update is of an eighth."""
    copies, few = (step(point(dp=dp, zero=zero, replicate=r, global_batch=dp), ONE) for dp, r in ((64, 8), (8, 1)))
    for name in ("memory", "states", "exposed", "update"):
        assert getattr(copies, name) == getattr(few, name), name
    assert copies.gradients > few.gradients


def test_gathers_stay_inside_servers_where_copies_let_them() -> None:
    asked = task(cluster="h100:8x8", batch=512, seq=1024, framework="fsdp", fixed={"zero": 3.0, "tp": 1.0, "cp": 1.0, "pp": 1.0, "microbatch": 1.0})  # fmt: skip
    found = search(asked)
    assert found.points.replicate[0] > 1
    alone = search(asked.with_fixed({"replicate": 1.0}))
    assert found.cost.exposed[0] <= alone.cost.exposed[0]
    assert found.cost.memory[0] > alone.cost.memory[0]
    assert "replicate=" in str(plan_of(found.points, 0))
    with pytest.raises(SoliError, match="copies are of sharded states"):
        search(task(fixed={"replicate": 2.0, "zero": 0.0}))
    with pytest.raises(SoliError, match="replicate=3 does not divide dp=8"):
        search(task(fixed={"replicate": 3.0, "dp": 8.0}))


# --- recomputing some layers ------------------------------------------------------------------------------


def quickest_mix(times: tuple[float, float], sizes: tuple[float, float], layers: int, room: float) -> float:
    """Seconds of layers each of which keeps or recomputes, within a room: HiGHS over one choice a layer."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    cost, taken = np.tile(times, layers), np.tile(sizes, layers)
    one = np.kron(np.eye(layers), np.ones(2))
    found = milp(
        cost,
        integrality=np.ones(2 * layers),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one, 1, 1), LinearConstraint(taken[None] / 1e9, -np.inf, room / 1e9)],
    )
    return float(found.fun) if found.success else np.inf


@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize("room", [4e9, 7e9, 8e9, 12e9, 13e9])
def test_as_many_layers_are_recomputed_as_a_solver_would(pp: int, room: float) -> None:
    fixed = {"pp": float(pp), "dp": 2.0, "zero": 1.0, "microbatch": 4.0, "tp": 1.0, "replicate": 1.0, "cp": 1.0}
    asked = task(replace(SMALL, layers=24, vocab=1024), f"a100:{2 * pp}", batch=64, seq=2048, memory=room, framework="megatron", fixed=fixed | {"chunks": 1.0, "offload": 0.0})  # fmt: skip
    plain = space.shards(asked, space.stages(asked, space.layouts(asked)))
    p = space.points_of(asked, plain)
    none, full = (np.flatnonzero((plain["recompute"] == level) & (plain["most"] == 0))[0] for level in (NONE, FULL))
    k = bounds.constants_of(asked)
    layer, layers = layer_of(p, k)[0], 24 // pp
    kept = k.activation_scale * memory.activations_of_layer(p) * pipeline.in_flight(p)
    # What does not depend on how many are kept: all but the layers' own, the one that is recomputed among it.
    sizes = peaks(asked, p) / bounds.high(asked)
    rest = sizes[full] - layers * kept[full]
    best = quickest_mix((layer[none], layer[full]), (kept[none], kept[full]), layers, room / bounds.high(asked) - rest)  # fmt: skip
    everything = sizes[none] <= room / bounds.high(asked)
    found = search(asked) if holds(asked) else None
    if found is None:
        assert best == np.inf
        return
    got = layers_of(found.points.take([0]), bounds.constants_of(asked))[0][0]
    assert got == pytest.approx(layers * layer[none] if everything else best, rel=1e-9)


def test_recomputing_some_layers_is_between_all_and_none() -> None:
    fixed = {"microbatch": 4.0, "tp": 1.0, "cp": 1.0, "pp": 1.0, "offload": 0.0}
    roomy = task(SMALL, "a100:2", batch=64, seq=2048, framework="megatron", fixed=fixed)
    ends = [search(roomy.with_fixed({"recompute": level})).cost.memory[0] for level in (NONE, FULL)]
    asked = replace(roomy, memory=float(np.mean(ends)) * bounds.high(roomy))
    best = search(asked)
    assert 0 < best.points.again[0] < 12
    for level in (NONE, FULL):
        other = search(asked.with_fixed({"recompute": level}))
        assert not len(other.points) or other.cost.time[0] > best.cost.time[0]
    assert explain.answer(asked, 1).best[0].note == f"{best.points.again[0]:g} of a rank's 12 layers computed again"
    said = plan_of(best.points, 0).recompute
    assert 0 < float(said) < 1
    assert "recompute=some" in explain.why_not(asked, {"recompute": 3.0})
    with pytest.raises(SoliError, match="soli does not run recompute=some"):
        search(replace(asked, framework="soli", fixed={"recompute": 3.0}))


# --- context ----------------------------------------------------------------------------------------------


def test_heads_are_exchanged_for_positions() -> None:
    """docs/communication.md, 7: a rank sends (p-1)/p of (2 h + 2 g') E l B each way, in four calls."""
    p = point(cp=4, tp=2, context=ULYSSES, heads=16, kv_heads=4, head_size=128, seq=4096)
    forward, backward = context.crossing(p, ONE)
    rate = BASE["link"] * MEANINGS["link_share"].default
    sent = 3 / 4 * (2 * 8 + 2 * 4) * 128 * 1024 * 2  # two key heads a rank of tp, wanted by four of cp
    assert (
        forward == backward == pytest.approx(sent / rate + 4 * BASE["link_latency"] * MEANINGS["latency_scale"].default)
    )
    # One rank a server: between servers a gather is bytes by rate, inside it is what was measured (rings.py).
    ring = point(cp=4, tp=2, heads=16, kv_heads=4, head_size=128, seq=4096, node=1)
    volume = 3 / 4 * 2 * 4096 * 2 * 128 * 2
    latency = 2 * BASE["net_latency"] * MEANINGS["latency_scale"].default
    rate = BASE["net"] * MEANINGS["net_share"].default
    assert context.crossing(ring, ONE)[0] == pytest.approx(volume / rate + latency)


def test_where_keys_are_many_heads_are_exchanged() -> None:
    """Less is sent where p > 2 (h + g') / 3 g: always of equal heads, of 32 heads on 8 from 4 ranks."""
    assert len(set(spaces(task(cluster="h100:8x2", batch=16, seq=8192)).context)) == 2
    same = {"cp": 8.0, "pp": 1.0, "tp": 1.0, "microbatch": 1.0, "dp": 1.0}
    for model in (LLAMA, replace(LLAMA, kv_heads=32)):
        asked = task(model, "h200:8x1", batch=16, seq=8192, fixed=same)
        best = search(asked)
        assert best.points.context[0] == ULYSSES
        assert plan_of(best.points, 0).context == "ulysses"
        assert search(asked.with_fixed({"context": RING})).cost.time[0] > best.cost.time[0]
    with pytest.raises(SoliError, match="context=ulysses and cp=1 contradict"):
        search(task(fixed={"context": ULYSSES, "cp": 1.0}))
    with pytest.raises(SoliError, match="fsdp does not run context=ulysses"):
        search(task(fixed={"context": ULYSSES}, framework="fsdp"))
    assert explain.fixed_of("context=ulysses") == {"context": ULYSSES}


# --- offload and precision --------------------------------------------------------------------------------


def test_the_optimizer_moves_to_the_host_where_nothing_else_fits() -> None:
    fixed = {"zero": 1.0, "tp": 1.0, "pp": 1.0, "cp": 1.0, "replicate": 1.0, "recompute": FULL, "microbatch": 1.0}
    asked = task(cluster="h200:8x1", batch=64, framework="megatron", fixed=fixed)
    moved, kept = (search(asked.with_fixed({"offload": n})) for n in (1.0, 0.0))
    p, k = moved.points.take([0]), bounds.constants_of(asked)
    count = memory.trained(p)[0][0]
    stays = memory.states(replace(p, offload=np.zeros(1)), k) - memory.states(p, k)
    assert stays[0] == pytest.approx(12 * count / 8)  # the copy in fp32 and two moments
    # A way to the host and back; there the processors update what the eight devices of the server have.
    there = 4 + 8 * arithmetic.HOST_ADAM
    assert moved.cost.update[0] == pytest.approx(count / 8 * there / asked.cluster.device.host_gbs / 1e9)
    assert kept.cost.time[0] < moved.cost.time[0]
    less, more = (thriftiest(asked.with_fixed({"offload": n}))[1] for n in (1.0, 0.0))
    tight = replace(asked, memory=(less + more) / 2)
    assert not holds(tight.with_fixed({"offload": 0.0}))
    found = search(tight)
    assert plan_of(found.points, 0).offload == "optimizer"
    with pytest.raises(SoliError, match="soli does not run offload=optimizer"):
        search(replace(tight, framework="soli", fixed={"offload": 1.0}))


def test_eight_bits_are_quicker_where_the_program_has_them() -> None:
    wide = task(framework="megatron", batch=128)
    best, narrow = search(wide), search(replace(wide, precision="fp8"))
    assert narrow.cost.time[0] < best.cost.time[0]
    assert plan_of(narrow.points, 0).precision == "fp8"


def test_a_precision_is_chosen_among_those_that_are_asked_for() -> None:
    one, other, both = (search(task(framework="megatron", batch=128, precision=said), 20) for said in ("bf16", "fp8", "bf16,fp8"))  # fmt: skip
    assert both.counted == one.counted + other.counted
    times = sorted((*one.cost.time[different(one, 20)], *other.cost.time[different(other, 20)]))[:20]
    assert both.cost.time[different(both, 20)] == pytest.approx(times, rel=1e-12)
    assert plan_of(both.points, 0).precision == "fp8"
    assert search(both.task.with_fixed(explain.fixed_of("precision=bf16"))).cost.time[0] == one.cost.time[0]
    asked = task(framework="megatron", batch=128)
    assert "precision=fp8: at best" in explain.why_not(asked, explain.fixed_of("precision=fp8"))


# --- experts ----------------------------------------------------------------------------------------------


def test_experts_are_shared_out_where_the_program_can() -> None:
    asked = task(MOE, "h100:8x2", batch=64, seq=2048, framework="megatron")
    assert set(spaces(asked).ep) == {1, 2, 4, 8}
    best = search(asked).cost.time[0]
    for ep in (1.0, 2.0, 8.0):
        found = search(replace(asked, fixed={"ep": ep}))
        assert (found.points.ep == ep).all()
        assert found.cost.time[0] >= best
    assert "ep=8" in explain.why_not(asked, {"ep": 8.0})
    assert explain.fixed_of("ep=4,tp=2") == {"ep": 4.0, "tp": 2.0}


@pytest.mark.parametrize(
    ("model", "framework", "fixed", "said"),
    [
        (MOE, "soli", {"ep": 2.0}, "soli does not run ep=2 yet"),
        (MOE, "megatron", {"ep": 3.0}, "ep=3 does not divide the 8 experts"),
        (SMALL, "megatron", {"ep": 2.0}, "ep=2 is of experts, and there are none in"),
    ],
)
def test_what_cannot_be_is_said(model: Model, framework: str, fixed: dict[str, float], said: str) -> None:
    with pytest.raises(SoliError) as refused:
        search(task(model, "h100:8x2", batch=64, seq=2048, framework=framework, fixed=fixed))
    assert said in str(refused.value)


def test_shared_experts_are_kept_and_computed_but_not_sent() -> None:
    """Counted one by one: each layer has one MLP more; its product runs, its tokens stay."""
    more, less = (spaces(task(replace(MOE, shared=n, active=2 + n), "h100:1", batch=1, seq=64)) for n in (1, 0))
    assert replace(MOE, shared=1).parameters - replace(MOE, shared=0).parameters == 12 * 3 * 1024 * 2048
    flops = explain.flops(more, 0) - explain.flops(less, 0)
    assert flops == pytest.approx(6 * 12 * 3 * 1024 * 2048)
    asked = task(MOE, "h100:8x4", batch=64, seq=2048, framework="megatron", fixed={"ep": 8.0, "tp": 1.0, "cp": 1.0, "pp": 1.0})  # fmt: skip
    with_it, without = (
        costs(one, spaces(one)) for one in (asked, replace(asked, model=replace(MOE, shared=0, active=2)))
    )
    assert with_it.time.sum() > without.time.sum()
    plain = spaces(asked).zero < 3
    assert with_it.exposed[plain] == pytest.approx(without.exposed[plain])
    assert (with_it.memory > without.memory).all()


def test_windows_are_charged_of_programs_whose_kernels_know_them() -> None:
    """soli gives torch's attention a mask, which leaves nothing out; flops are of the scores that are computed."""
    windows = replace(SMALL, window=256, windowed=0.5)
    for framework, share in (("megatron", 1 - 0.5 * (1 - 384 / 2048) ** 2), ("soli", 1.0)):
        one = dict.fromkeys(("tp", "cp", "pp", "dp"), 1.0)
        some, whole = (spaces(task(model, "h100:1x1", batch=4, seq=2048, framework=framework, fixed=one)) for model in (windows, SMALL))
        took = [arithmetic.attention(p, ONE)[0] for p in (some, whole)]
        np.testing.assert_allclose(took[0] / took[1], share, rtol=1e-12)
        scores = 6 * SMALL.layers * 2048 * SMALL.heads * SMALL.head_size
        assert explain.flops(whole, 0) - explain.flops(some, 0) == pytest.approx((1 - share) * scores)
