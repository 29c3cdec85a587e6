"""Schedules beside 1F1B: how long and how large, against the order that torch runs, event by event."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest

from everyplan import spaces
from soli.core.errors import SoliError
from soli.core.pipelines import ready_at
from soli.core.plan import SPLIT_BACKWARD, Plan
from soli.parallel.pipeline import table
from soli.planner import bounds, explain
from soli.planner.cost import arithmetic, memory, pipeline, schedules
from soli.planner.cost.points import FULL, GPIPE, NONE, ZBH2, ZBV
from soli.planner.cost.step import layer, running, step
from soli.planner.offers import SCHEDULES
from soli.planner.search import plan_of, search
from test_cost import ONE, point, usual
from test_search import LLAMA, SMALL, task

OTHERS = ("gpipe", "zbh1", "zbv", "dualpipev")
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.3, 0.8), (1.0, 2.0, 1.0), (1.0, 1.6, 0.6), (1.0, 2.6, 0.9), (1.0, 1.05, 0.2), (2.0, 4.5, 2.0)]  # fmt: skip


def simulated(plan: Plan, price: Callable[[str, int], float]) -> tuple[float, list[float]]:
    """Seconds of a step, and the most that each rank keeps in microbatches of all its layers; `price` of a kind at a stage."""
    waiting = table.order(plan)
    done: dict[tuple[str, int, int], float] = {}
    clock, kept, most = [0.0] * plan.pp, [0] * plan.pp, [0] * plan.pp
    while any(waiting):
        for rank, steps in enumerate(waiting):
            while steps and (ready := ready_at(steps[0], done, plan.stages - 1)) is not None:
                kind, stage, number = steps.pop(0)
                clock[rank] = max(ready, clock[rank]) + price(kind, stage)
                done[kind, stage, number] = clock[rank]
                kept[rank] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
                most[rank] = max(most[rank], kept[rank])
    return max(clock), [n * plan.pp / plan.stages for n in most]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (2, 8), (4, 8), (4, 20), (8, 16), (8, 32)])
def test_a_step_takes_and_keeps_what_a_simulation_does(name: str, pp: int, m: int) -> None:
    plan = Plan(pp=pp, microbatches=m, schedule=name)
    halves = plan.stages // pp
    p = point(pp=pp, chunks=halves, global_batch=m, schedule=SCHEDULES[name], layers=pp * halves)
    for forward, inputs, weights in COSTS:
        price = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
        length, kept = simulated(plan, lambda kind, stage, price=price: price[kind])  # type: ignore[misc]
        whole = np.array([(forward + inputs + weights) * halves])
        parts = np.array([forward * halves]) / whole, np.array([weights * halves]) / whole
        waits = schedules.waits(p, whole, whole, *parts)
        none = np.zeros(1)
        busy, waiting = pipeline.spent_otherwise(p, whole, waits, none, none, none, none)
        assert (busy + waiting)[0] == pytest.approx(length)
        assert pipeline.in_flight(p)[0] == max(kept)
    assert pipeline.in_flight(p, pp - 1)[0] == kept[-1]


@pytest.mark.parametrize(("pp", "m"), [(4, 1), (4, 3), (8, 2), (8, 6), (8, 12)])
def test_few_microbatches_fill_as_few_waits(pp: int, m: int) -> None:
    p = point(pp=pp, global_batch=m, schedule=SCHEDULES["zbh1"], layers=pp)
    for forward, inputs, weights in COSTS:
        price = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
        length, _ = simulated(Plan(pp=pp, microbatches=m, schedule="zbh1"), lambda kind, _, price=price: price[kind])
        whole, none = np.array([forward + inputs + weights]), np.zeros(1)
        waits = schedules.waits(p, whole, whole, forward / whole, weights / whole)
        assert sum(pipeline.spent_otherwise(p, whole, waits, none, none, none, none))[0] == pytest.approx(length)


@pytest.mark.parametrize(("m", "waits", "keeps"), [(2, 17.0, 2), (16, 3.5, 15), (64, 3.5, 15)])
def test_the_second_handmade_order_waits_less_and_keeps_more(m: int, waits: float, keeps: int) -> None:
    """ZB-H2 (arXiv 2401.10241, table 1): 7 (F + B - 2 W) of 8 stages, 15 microbatches; of two but one W that fills."""
    p, whole = point(pp=8, global_batch=m, schedule=ZBH2, layers=8), np.array([3.5])
    assert schedules.waits(p, whole, whole, 1 / whole, 1 / whole)[0] == pytest.approx(7 * 2.5 - (m == 2) * 1.0 - (m > 2) * 14)
    assert schedules.kept(p)[0] == keeps


@pytest.mark.parametrize("name", SPLIT_BACKWARD)
@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_what_waits_for_its_second_half_is_counted(name: str, pp: int, m: int) -> None:
    """By torch's order: microbatches whose first half is done and whose second is not, of the first rank and of the last."""
    plan = Plan(pp=pp, microbatches=m, schedule=name)
    halves = plan.stages // pp
    p = point(pp=pp, chunks=halves, global_batch=m, schedule=SCHEDULES[name], layers=pp * halves)
    for rank, steps in enumerate(table.order(plan)):
        waits = accumulate({"I": 1, "W": -1}.get(kind, 0) for kind, _, _ in steps)
        if rank in (0, pp - 1) or name == "zbh1":
            assert schedules.undone(p, float(rank))[0] == max(waits) / halves


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 8), (4, 24), (8, 32)])
@pytest.mark.parametrize(("first", "last"), [(0.1, 0.6), (0.0, 0.3), (0.2, 1.5)])
def test_tables_at_the_ends_lengthen_it(name: str, pp: int, m: int, first: float, last: float) -> None:
    """A third of a table's time is its forward's. Never shorter than the simulation, and little longer; 1F1B is neither (test_cost.py)."""
    plan = Plan(pp=pp, microbatches=m, schedule=name)
    halves = plan.stages // pp
    more = {0: first, plan.stages - 1: last}
    thirds = {"F": 1, "I": 1, "W": 1, "B": 2}
    length, _ = simulated(plan, lambda kind, stage: thirds[kind] * (1 / halves + more.get(stage, 0.0) / 3))
    p = point(pp=pp, chunks=halves, global_batch=m, schedule=SCHEDULES[name], layers=pp * halves)
    whole, third = np.array([3.0]), np.array([1 / 3])
    waits = schedules.waits(p, whole, whole, third, third)
    got = sum(pipeline.spent_otherwise(p, whole, waits, np.array([first]), np.array([last]), np.zeros(1), np.zeros(1)))
    most = {"gpipe": 0.0, "zbh1": 0.004}.get(name, 0.06)
    assert -1e-9 <= got[0] / length - 1 <= most + 1e-9


def test_a_layer_is_its_three_parts() -> None:
    """Alone, and where no launch is the longest: forward, gradients of inputs and of weights; what is recomputed is the second's."""
    k = usual(layer_floor=1e-9)
    for changes in ({}, {"flash": 1}, {"experts": 8, "active": 2}):
        p, full = point(**changes), point(**changes, recompute=FULL)
        none = (np.zeros(1), np.zeros(1))
        forward, weights = (share * layer(p, k)[0] for share in schedules.shares(p, k, none))
        again = layer(full, k)[0] - layer(p, k)[0]
        assert forward == pytest.approx(again)  # a forward once more
        assert weights == pytest.approx(arithmetic.products_forward(p, k))
        assert schedules.shares(full, k, none)[1] * layer(full, k)[0] == pytest.approx(weights)


def test_frozen_weights_have_no_gradient_to_move() -> None:
    p = point(frozen=1)
    assert schedules.shares(p, ONE, (np.zeros(1), np.zeros(1)))[1] == 0


def test_the_first_and_last_stage_of_a_v_are_on_one_rank() -> None:
    """Two tables, the logits, and the time of both; of gpipe all microbatches."""
    small = {"pp": 4, "global_batch": 16, "tied": 0, "hidden": 1024, "layers": 24}
    line, folded, all_first = (point(**small, schedule=n, chunks=c) for n, c in ((0, 1), (ZBV, 2), (GPIPE, 1)))
    assert memory.of_tables(folded) == 2 * memory.of_tables(line)
    assert memory.peak(all_first, ONE) > memory.peak(line, ONE)
    assert running(folded, ONE).busy > running(line, ONE).busy


@pytest.mark.parametrize("name", OTHERS)
def test_a_schedule_can_be_fixed_and_asked_for(name: str) -> None:
    asked = task(LLAMA, "h100:8x4", batch=64, seq=4096)
    found = search(asked.with_fixed(explain.fixed_of(f"schedule={name},pp=4")))
    assert plan_of(found.points, 0).schedule == name
    assert plan_of(found.points, 0).chunks == 1
    assert f"schedule={name}" in explain.why_not(asked, {"schedule": SCHEDULES[name]})
    with pytest.raises(SoliError, match=f"megatron does not run schedule={name}"):
        search(task(framework="megatron", fixed={"schedule": SCHEDULES[name]}))
    with pytest.raises(SoliError, match=f"schedule={name} and pp=1 contradict"):
        search(asked.with_fixed({"schedule": SCHEDULES[name], "pp": 1.0}))
    with pytest.raises(SoliError, match=f"schedule={name} and chunks=2 contradict"):
        search(asked.with_fixed({"schedule": SCHEDULES[name], "chunks": 2.0}))


def test_no_bubble_is_below_another() -> None:
    """Of one layout: gpipe waits as 1f1b does and keeps more, zbh1 waits less and keeps what its second halves need."""
    asked = task(SMALL, "a100:4", batch=32, seq=1024, fixed={"pp": 4.0, "microbatch": 1.0, "recompute": NONE, "zero": 0.0})  # fmt: skip
    p = spaces(asked)
    cost = step(p, bounds.constants_of(asked))
    of = {name: np.flatnonzero((p.schedule == code) & (p.tp == 1))[0] for name, code in SCHEDULES.items()}
    waits = {name: cost.waiting[i] for name, i in of.items()}
    assert waits["gpipe"] == pytest.approx(waits["1f1b"])
    assert waits["zbh1"] < waits["1f1b"]
    assert waits["zbv"] < waits["1f1b"]
    assert cost.memory[of["gpipe"]] > cost.memory[of["1f1b"]]
    assert cost.memory[of["zbh1"]] > cost.memory[of["1f1b"]]
