"""The closed forms of the network bench against what the lab's GPT records in a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sweep import swept

ROOT = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path[:0] = [str(ROOT / "network"), str(ROOT)]  # both have a launch.py: the lab's is tested here

import forms  # noqa: E402
import torch  # noqa: E402
import workload  # noqa: E402
from entries import soli_engine  # noqa: E402

from pool import Pool  # noqa: E402
from soli.core.plan import Plan  # noqa: E402
from soli.mesh.record import recorder  # noqa: E402
from soli.planner.legality import resolve  # noqa: E402

SIZE = workload.Size(layers=2, width=32, heads=8, vocabulary=64, tokens=8, batch=8)
LATER = {"all_reduce": 2}
"""Times (n - 1) / n of its bytes, that a rank sends: one for what is not here."""


def sent(plan: str) -> float:
    """Bytes that a rank sends in the third step, before which parameters are not compared, in the mean over those of each of its collectives."""
    workload.SIZES["lab"] = SIZE
    torch.manual_seed(0)
    step = soli_engine.build(plan, "lab")
    batches = workload.build_batches("lab")
    step(batches[0])
    step(batches[1])
    recorder.clear()
    step(batches[0])
    return sum(
        LATER.get(r.operation, 1) * (len(r.ranks) - 1) / len(r.ranks) * r.bytes
        for r in recorder.records
        if len(r.ranks) > 1
    )


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("tp=4", 4),
        ("tp=4,sp=on", 4),
        ("dp=4", 4),
        ("dp=4,zero=1", 4),
        ("tp=4,tensor=2d", 4),
        ("tp=4,tensor=2d,rows=4", 4),
        swept("tp=8,tensor=2d,rows=4", 8),
        ("tp=8,tensor=2.5d,depth=2", 8),
        ("tp=8,tensor=3d", 8),
    ],
)
def test_the_forms_are_what_is_sent(request: pytest.FixtureRequest, plan: str, ranks: int) -> None:
    """But for some numbers of each rank, and one or two of each parameter: the loss, what must be alike, the flags of those used."""
    size = forms.Size(SIZE.layers, SIZE.width, SIZE.vocabulary, SIZE.tokens, SIZE.batch)
    form = 4 * forms.sent(resolve(Plan.parse(plan), ranks), size)
    pool: Pool = request.getfixturevalue("pool" if ranks <= 4 else "many")
    found = pool.run(sent, plan, ranks=ranks, deadline=60)
    small = 16 * (5 * ranks + len(list(workload.GPT(SIZE).parameters())))
    assert 0 <= sum(found) / ranks - form <= small
