"""Stages of unequal length, and tensor parallelism over grids, in the cost of clusters' plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyplan import spaces
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.parallel.pipeline.stages import balanced
from soli.planner import explain
from soli.planner.cost import borders, grids, memory, pipeline
from soli.planner.cost.points import CUBE, FULL, GRID, Points
from soli.planner.cost.ranks import ranks
from soli.planner.cost.step import step
from soli.planner.search import costs, plan_of, search
from test_cost import ONE, point, simulated, usual
from test_search import LLAMA, SMALL, task

# --- borders ----------------------------------------------------------------------------------------------


def longest(starts: list[int], sizes: list[float]) -> float:
    return max(sum(sizes[a:b]) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(2, 12), st.sampled_from([1, 2]), st.integers(1, 60))
def test_borders_are_the_best_that_there_are(layers: int, pp: int, chunks: int, vocab: int) -> None:
    """Against the engine's own cut, a dynamic program over every cut: no longer stage, and no shorter one."""
    if pp * chunks > layers:
        return
    p = borders.placed(point(layers=layers, pp=pp, chunks=chunks, vocab=1000 * vocab))
    ends = float(borders.last_by_layer(p)[0])
    sizes = [1.0] * layers + [ends]
    each, last = p.own_layers[0] / chunks, p.own_layers[0] / chunks - p.fewer[0]
    assert max(each, last + ends) == pytest.approx(longest(balanced(sizes, pp * chunks), sizes))
    assert 0 <= last <= each
    assert each * (pp * chunks - 1) + last >= layers


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(2, 12), st.sampled_from([1, 2]), st.integers(1, 60))
def test_no_rank_of_the_engines_cut_has_more_layers_than_is_said(layers: int, pp: int, chunks: int, vocab: int) -> None:
    """The first rank, the last, and any between; the embedding's lookup takes a thousandth of a layer."""
    if pp * chunks > layers:
        return
    p = borders.placed(point(layers=layers, pp=pp, chunks=chunks, vocab=1000 * vocab))
    sizes = [1e-3] + [1.0] * layers + [float(borders.last_by_layer(p)[0])]
    starts = balanced(sizes, pp * chunks)
    each = [sum(0 < unit <= layers for unit in range(a, b)) for a, b in pairwise([*starts, len(sizes)])]
    own = [sum(each[rank::pp]) for rank in range(pp)]
    first, between, last = (float(rank.layers[0]) for rank in ranks(p))
    assert own[0] <= first
    assert max(own[1:-1], default=0) <= between
    assert own[-1] <= last


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("last", [0.0, 1.5, 4.0])
def test_unequal_stages_take_what_a_simulation_takes(m: int, last: float) -> None:
    """Four stages of 4, 4, 4 and 2 layers, the last with `last` layers' time beside them.

    Exact but where the last is the shorter one: then too long by no more than what it is shorter, once.
    """
    p = replace(point(layers=14, pp=4, global_batch=m), longest=np.array([4.0]), fewer=np.array([2.0]))
    one, none = np.array([3.0]), np.zeros(1)
    got = sum(pipeline.spent(p, 4 * one, none, last * one, none, one))[0]
    forward = [4.0, 4.0, 4.0, 2.0 + last]
    took = simulated(forward, [2 * f for f in forward], m)
    if last >= 2.0 or m == 1:
        assert got == pytest.approx(took, rel=1e-12)
    assert 0 <= round(got - took, 9) <= 3 * max(2.0 - last, 0.0)


def test_a_large_vocabulary_moves_layers_from_the_last_stage() -> None:
    wide = replace(LLAMA, vocab=512000)
    said = {"pp": 8.0, "chunks": 1.0, "schedule": 0.0, "tp": 1.0, "cp": 1.0}
    asked = task(wide, "h100:8x2", batch=64, seq=2048, fixed=said)
    found = search(asked)
    assert found.points.fewer[0] > 0
    assert "the last of" in explain.note(found.points, 0)
    equal = replace(found.points, longest=0 * found.points.longest, fewer=0 * found.points.fewer)
    assert found.cost.time[0] < costs(asked, equal).time[0]
    assert not spaces(replace(asked, framework="nanotron")).fewer.any()


# --- grids ------------------------------------------------------------------------------------------------

FREE = usual(net_share=1.0, latency_scale=0.5)


def apart(tensor: float, tp: int, rows: int, hidden: float = 4096.0, tokens: float = 8192.0) -> Points:
    """A GPT's layer over servers of one device each, whose network has no latency and moves a byte a second."""
    return point(
        tp=tp, tensor=tensor, rows=rows, hidden=hidden, ffn=4 * hidden, heads=64, kv_heads=64, head_size=hidden / 64,
        seq=tokens / 64, microbatch=64, global_batch=64, node=1, net=1.0, net_latency=1e-12, link_latency=1e-12,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 4), (8, 8), (16, 4)])
@pytest.mark.parametrize("hidden", [1024.0, 8192.0])
def test_grids_take_what_is_derived(rows: int, columns: int, hidden: float) -> None:
    """docs/communication.md, 4: in 2D 3 (C-1) S_x + 3 (R-1) S_w over all ranks, S_x = 9 T H and S_w = 12 H^2; and norms.

    In a broadcast the link to its root is idle: what n ranks take by turns takes n/(n-1) of that.
    """
    tokens = 8192.0
    p = apart(GRID, rows * columns, rows, hidden, tokens)
    norms = 8 * 2 * (columns - 1) / columns * 4 * tokens / rows
    wanted = 2 * 3 * (columns * 9 * tokens * hidden + rows * 12 * hidden**2) / (rows * columns) + norms
    assert sum(grids.of_layer(p, FREE))[0] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("q", [2, 3, 4])
@pytest.mark.parametrize("hidden", [1024.0, 8192.0])
def test_cubes_take_what_is_derived(q: int, hidden: float) -> None:
    """docs/communication.md, 6: (q-1)(45 + 36 r) T H over all ranks, r = H/T; and norms."""
    tokens = 8192.0
    p = apart(CUBE, q**3, q, hidden, tokens)
    norms = 8 * 2 * (q - 1) / q * 4 * tokens / q**2
    wanted = 2 * (q - 1) * (45 + 36 * hidden / tokens) * tokens * hidden / q**3 + norms
    assert sum(grids.of_layer(p, FREE))[0] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("kind", "tp", "rows"), [(GRID, 16, 4), (GRID, 16, 8), (CUBE, 8, 2), (CUBE, 64, 4)])
def test_a_grid_keeps_its_share_of_all(kind: float, tp: int, rows: int) -> None:
    """Matrices and activations a p-th; vectors a column's; and no time or bytes of a single device's are lost."""
    cut, whole = apart(kind, tp, rows), apart(0, 1, 1)
    vectors = memory.NORMS * 4096
    columns = float(cut.columns[0])
    assert columns == (rows if kind == CUBE else tp / rows)
    assert memory.of_layer(cut)[0] - vectors / columns == pytest.approx((memory.of_layer(whole)[0] - vectors) / tp)  # fmt: skip
    assert memory.parameters(cut) == pytest.approx(memory.parameters(whole))
    assert memory.activations_of_layer(cut) * tp == pytest.approx(memory.activations_of_layer(whole))
    assert step(cut, ONE).memory < step(whole, ONE).memory
    again = step(replace(cut, recompute=np.full(1, FULL)), ONE)
    assert again.time > step(cut, ONE).time
    assert again.memory < step(cut, ONE).memory


def test_grids_are_chosen_where_they_send_less() -> None:
    """64 servers of one device, all of tp: by the forms 3D moves half of 1D; over one server's links 1D is quicker."""
    fixed = {"tp": 64.0}
    model = replace(SMALL, heads=64, kv_heads=64, head_size=64, hidden=4096, ffn=16384)
    asked = task(model, "h100:1x64", batch=64, seq=2048, fixed=fixed)
    found = search(asked)
    assert plan_of(found.points, 0).tensor == "3d"
    line = search(asked.with_fixed({"tensor": 0.0}))
    assert line.cost.time[0] > found.cost.time[0]
    near = search(task(model, "h100:8x8", batch=64, seq=2048))
    assert plan_of(near.points, 0).tensor == "1d"
    for word, kind in (("2d", GRID), ("3d", CUBE)):
        only = search(asked.with_fixed(explain.fixed_of(f"tensor={word}")))
        assert set(only.points.tensor) == {kind}
        assert Plan.parse(str(plan_of(only.points, 0))).tensor == word


@pytest.mark.parametrize(
    ("fixed", "framework", "said"),
    [
        ({"tensor": GRID, "sp": 1.0}, "soli", "a grid has cut what sp cuts"),
        ({"tensor": CUBE, "schedule": 3.0, "pp": 2.0}, "soli", "computes? both gradients|both gradients at once"),
        ({"tensor": GRID}, "megatron", "does not run tensor=2d or 3d"),
    ],
)
def test_what_grids_cannot_be(fixed: dict[str, float], framework: str, said: str) -> None:
    with pytest.raises(SoliError, match=said):
        search(task(cluster="h100:8", fixed=fixed, framework=framework))


def test_copies_of_a_grid_are_data_parallelism() -> None:
    with pytest.raises(SoliError, match="tensor=2d") as caught:
        explain.fixed_of("tensor=2.5d")
    assert "dp" in str(caught.value)
