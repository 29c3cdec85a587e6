"""plan="auto": what it chooses among, how long a step is said to take, and what it does on real ranks."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_rehearsal import of_tokens, program
from torch import Tensor, nn

from cases import CASES, IN_SUITE, WAYS
from noted import noted
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.core.versions import process_groups
from soli.engine import auto, calibrate
from soli.engine.engine import parallelize
from soli.engine.rehearse import Program, rehearse
from soli.mesh.mesh import build_mesh
from soli.mesh.world import World, join
from soli.models.gpt import GPT, GPTConfig
from soli.parallel.pipeline.run import Pipeline
from soli.planner.candidates import bases, differences, lighter, variants
from soli.planner.hollow import Call
from soli.planner.learn import Learnt
from soli.planner.legality import problems
from soli.planner.machine import PARTS, Machine, estimate
from soli.planner.rehearsal import Action, RankRun, Rehearsal, Sent
from soli.verify.parity import BOUND, Case, adamw, compare, expected_of, under_plan
from sweep import swept


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLI_CACHE", str(tmp_path))


# --- the space --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16])
def test_every_layout_is_looked_at(ranks: int) -> None:
    """One plan at least of every way to share the ranks, each legal, none twice; variants differ in form alone."""
    found = bases(ranks, 64)
    layouts = {(p.dp, p.tp, p.cp, p.pp) for p in found}
    wanted = {
        (dp, tp, cp, pp)
        for dp, tp, cp, pp in itertools.product(range(1, ranks + 1), repeat=4)
        if dp * tp * cp * pp == ranks
    }
    assert layouts == wanted
    assert len(set(found)) == len(found)
    for plan in found:
        assert not problems(plan, ranks)
        others = variants(plan, ranks, 64)
        assert plan not in others
        assert all(not problems(p, ranks) for p in others)
        assert {(p.dp, p.tp, p.cp, p.pp, p.tensor, p.sp) for p in others} <= {
            (plan.dp, plan.tp, plan.cp, plan.pp, plan.tensor, plan.sp)
        }


def test_plans_of_a_layout_differ_in_so_many_choices() -> None:
    for one, other, choices in (
        ("dp=4", "dp=4", 0), ("dp=4", "dp=4,zero=1", 1), ("dp=4,zero=1", "dp=4,zero=1,replicate=2", 1), ("dp=4", "dp=2,tp=2", float("inf")),
        ("dp=2,pp=2,microbatches=2", "dp=2,zero=1,pp=2,schedule=zbv,chunks=2,microbatches=4", 3), ("dp=2,tp=2", "dp=2,tp=2,sp=on", float("inf")),
    ):  # fmt: skip
        assert differences(Plan.parse(one), Plan.parse(other)) == choices


def test_no_plan_needs_more_rows_than_there_are() -> None:
    found = bases(4, 1)
    whole = {"dp=1,cp=4", "dp=1,tp=2,cp=2", "dp=1,tp=2,sp=on,cp=2", "dp=1,tp=4", "dp=1,tp=4,sp=on"}
    assert {str(plan) for plan in found if plan.pp == 1} == whole
    assert {plan.pp for plan in found} == {1, 2, 4}
    assert all(plan.dp == plan.microbatches == 1 for plan in found)


def test_lighter_plans_take_less() -> None:
    """Each step of ZeRO, accumulation and recomputation, as rehearsed."""
    made = program("gpt")
    plan = Plan(dp=2)
    peaks = [rehearse(made, p).peak for p in (plan, *lighter(plan, 2, 8))]
    assert len(peaks) > 5
    assert peaks[-1] < 0.6 * peaks[0]
    assert all(after < peaks[0] for after in peaks[1:])


# --- time -------------------------------------------------------------------------------------------------

MACHINE = Machine(
    fingerprint="", ranks=4, launch=0.0, stream=1e9, crowd=1.0, hidden=0.0, flops=1e9, optimizer=1e9, host=1e9, disk=1e9,
    collectives={"all_reduce 2x1": [[1000, 1.0], [2000, 2.0]], "send 2x1": [[1000, 0.0], [2000, 0.0]]},
)  # fmt: skip


def run(rank: int, actions: str, calls: list[Call]) -> RankRun:
    """A rank whose actions, as "F0 B0", take the calls in turn."""
    made = [Action(a[0], rank, int(a[1:]), (i, i + 1), (0, 0)) for i, a in enumerate(actions.split())]
    return RankRun(rank, 0, 0, 0, calls, [], made)


def work(flops: float) -> Call:
    return Call("mm", ((int(flops), 1),), torch.float32, int(flops), 0)


def test_a_pipeline_waits_as_the_textbook_says() -> None:
    """1F1B of two stages and four microbatches, F = 1 s and B = 2 s: (4 + 1) 3 s; where ranks share a core, 24 s."""
    F, B = work(1e9), work(2e9)
    first = run(0, "F0 F1 B0 F2 B1 F3 B2 B3", [F, F, B, F, B, F, B, B])
    last = run(1, "F0 B0 F1 B1 F2 B2 F3 B3", [F, B] * 4)
    whole = Rehearsal(Plan(dp=1, pp=2, microbatches=4), [first, last])
    found = estimate(whole, MACHINE)
    assert found.time == pytest.approx(15.0)
    assert found.stages == pytest.approx(3.0)
    shared = Machine(**{**vars(MACHINE), "crowd": 2.0, "flops": 5e8})  # twice as long while both compute
    assert estimate(whole, shared).time == pytest.approx(24.0)


def test_ranks_share_the_cores_that_there_are() -> None:
    """Four stages on two cores. One microbatch: no two compute at once. Eight: two cores are busy but at the ends."""
    shared = Machine(**{**vars(MACHINE), "crowd": 2.0, "flops": 5e8})
    F, B = work(1e9), work(2e9)  # a second and two alone

    def taken(m: int, machine: Machine) -> float:
        order = lambda warm: (
            [("F", i) for i in range(warm)]
            + [one for i in range(m) for one in ((("F", warm + i),) if warm + i < m else ()) + (("B", i),)]
        )
        runs = []
        for rank in range(4):
            steps = order(min(3 - rank, m))
            runs.append(
                run(rank, " ".join(f"{kind}{i}" for kind, i in steps), [F if kind == "F" else B for kind, _ in steps])
            )
        return estimate(Rehearsal(Plan(dp=1, pp=4, microbatches=m), runs), machine).time

    assert taken(1, MACHINE) == taken(1, shared) == pytest.approx(12.0)
    assert taken(8, MACHINE) == pytest.approx(3 * (8 + 3))  # a core each
    work_of_all = 4 * 8 * 3 / 2
    assert work_of_all + 1.5 <= taken(8, shared) <= work_of_all + 6  # alone at first for 1 s, at last for 2


def test_collectives_are_interpolated_and_hidden() -> None:
    sent = [Sent("all_reduce", (0, 1), 1500, False), Sent("all_reduce", (0, 1), 4000, True)]
    one = Rehearsal(Plan(dp=2), [RankRun(0, 0, 7, 9, [], sent, [])])
    found = estimate(one, MACHINE)
    assert (found.waited, found.late) == (1.5, 4.0)
    hiding = Machine(**{**vars(MACHINE), "hidden": 0.75})
    assert estimate(one, hiding).late == 1.0
    quicker = Machine(
        **{**vars(MACHINE), "collectives": {k: [[s, t / 2] for s, t in v] for k, v in MACHINE.collectives.items()}}
    )
    assert estimate(one, quicker).time == found.time / 2


def test_what_is_measured_is_learnt() -> None:
    """A machine whose late collectives take twice as long: three steps are enough to say so of a fourth."""
    parts = lambda *numbers: dict(zip(PARTS, numbers, strict=True))
    steps = [parts(1.0, 1.0, 0.1, 0.2, 0.0), parts(1.0, 1.0, 0.1, 3.0, 0.0), parts(1.0, 1.2, 0.1, 1.0, 0.0)]
    learnt = Learnt()
    assert learnt.seconds(steps[0]) == sum(steps[0].values())
    for step in steps:
        learnt.see(step, sum(step.values()) + step["late"])
    other = parts(0.5, 0.5, 0.1, 2.0, 0.0)
    assert learnt.seconds(other) == pytest.approx(5.1, rel=0.03)


def test_a_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLI_CACHE", str(tmp_path))
    calibrate.keep(World(0, 1, torch.device("cpu"), "single", 60.0), MACHINE)
    assert calibrate._kept(tmp_path / f"machine-{MACHINE.fingerprint}.json") == MACHINE


@pytest.mark.parametrize("name", [swept(n) if len(IN_SUITE.get(n, WAYS)) < 2 else n for n in sorted(set(CASES) - {"odd", "skipping"})])
def test_products_can_be_measured_again(name: str) -> None:
    """Those of every model, by what is kept of them; each but a convolution."""
    calls = rehearse(program(name), Plan(dp=1)).ranks[0].calls
    keys = {call.key for call in calls if call.flops}
    assert keys
    for key in keys:
        again = calibrate._again(key, torch.device("cpu"))
        assert (again is None) == key.startswith("convolution")
        if again is not None:
            again()


# --- on real ranks ----------------------------------------------------------------------------------------


def block() -> GPT:
    """A GPT of one: plans are chosen by what is rehearsed and run of them, and more blocks are more of it."""
    torch.manual_seed(11)
    return GPT(GPTConfig(vocab=29, context=7, dim=12, layers=1, heads=3))


def small() -> Program:
    return of_tokens(block().double(), 8, 7)


def chosen(
    probes: int, memory: float | None, folder: str
) -> tuple[str, list[tuple[str, float, float, str]], list[str]]:
    os.environ["SOLI_CACHE"] = folder
    found = auto.choose(small(), join(), 8, memory=memory, probes=probes)
    options = [(o.plan, o.seconds, o.measured, o.refused) for o in found.options]
    return str(found.plan), options, found.lines


@pytest.fixture(scope="module")
def machine(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this machine as two ranks measured it, once for all tests that measure something else."""
    folder = tmp_path_factory.mktemp("machine")
    pool.run(calibrated_for, str(folder), ranks=2, deadline=120)
    return folder


def calibrated_for(folder: str) -> None:
    os.environ["SOLI_CACHE"] = folder
    auto.Auto(small(), join(), 8, None, 1)._look([Plan.parse("dp=2")])


def test_a_folder_that_calibrations_cannot_go_into_is_said_before_it_is_measured(pool: Pool, tmp_path: Path) -> None:
    """Root writes anywhere: below a file is nowhere. The others do not wait for a rank that cannot."""
    (tmp_path / "file").touch()
    with pytest.raises(SoliError, match=r"cannot be kept(.|\n)*file/x: Not a directory(.|\n)*SOLI_CACHE=FOLDER"):
        pool.run(calibrated_for, str(tmp_path / "file" / "x"), ranks=2, deadline=60)


def test_a_full_disk_is_said_before_it_is_measured(pool: Pool, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file has room on it; what is kept later, when there is none for that either, leaves nothing half written."""
    with pytest.raises(SoliError, match=r"cannot be kept(.|\n)*disk/x: No space left(.|\n)*16 MB free(.|\n)*SOLI_CACHE=FOLDER"):
        pool.run(calibrated_for, str(small_disk / "x"), ranks=2, deadline=60)
    with (small_disk / "filler").open("wb", buffering=0) as file:
        assert file.write(bytes(1 << 20)) < 1 << 20
    monkeypatch.setenv("SOLI_CACHE", str(small_disk / "x"))
    with pytest.raises(SoliError, match=r"cannot be kept(.|\n)*No space left"):
        calibrate.keep(World(0, 1, torch.device("cpu"), "single", 60.0), MACHINE)
    assert not list((small_disk / "x").iterdir())


@pytest.fixture
def known(machine: Path, tmp_path: Path) -> str:
    """A cache of the test's own, with the machine in it."""
    shutil.copytree(machine, tmp_path, dirs_exist_ok=True)
    return str(tmp_path)


def test_probes_are_run_and_all_ranks_take_the_quickest(launched: Pool, known: str) -> None:
    found = launched.run(chosen, 3, None, known, ranks=2, deadline=240)
    assert found[0][0] == found[1][0]
    plan, options, lines = found[0]
    measured = {name: seconds for name, _, seconds, _ in options if seconds}
    assert len(measured) >= 3
    assert options[0][0] == plan == min(measured, key=lambda name: measured[name])
    assert (len(lines), "measured" in lines[0], plan in lines[0]) == (3, True, True)
    layouts = {(p.dp, p.tp, p.cp, p.pp) for p in map(Plan.parse, measured)}
    assert len(layouts) >= 3
    fitting = [run or seconds for _, seconds, run, refused in options if not refused]
    assert fitting == sorted(fitting)
    assert min(fitting) > 0
    assert {Plan.parse(o[0]).tp for o in options} == {1, 2}


def finished(folder: str) -> dict[str, float]:
    os.environ["SOLI_CACHE"] = folder
    made = auto.Auto(small(), join(), 8, None, 3)
    made._look([Plan.parse(plan) for plan in ("dp=2", "dp=2,zero=1", "dp=1,pp=2,microbatches=2")])
    for plan, seconds in (("dp=2", 1e-6), ("dp=2,zero=1", 1.2e-6), ("dp=1,pp=2,microbatches=2", 1.3e-6)):
        made.options[plan] = replace(made.options[plan], measured=seconds)
    made._finish()
    return {plan: option.measured for plan, option in made.options.items()}


def test_what_a_probe_measured_by_luck_does_not_stand(pool: Pool, known: str) -> None:
    """What was nearly as quick as the best is run twice more, and has the median; what was slower is not."""
    found = pool.run(finished, known, ranks=2, deadline=120)[0]
    assert found["dp=1,pp=2,microbatches=2"] == 1.3e-6
    assert min(found["dp=2"], found["dp=2,zero=1"]) > 1e-4


def climbed(folder: str, predicted: dict[str, float]) -> dict[str, float]:
    """What is measured of pipelines after the last of them took a microsecond, if they are predicted so."""
    os.environ["SOLI_CACHE"] = folder
    made = auto.Auto(small(), join(), 8, None, 3)
    made._look([Plan.parse(plan) for plan in predicted])
    for plan, seconds in predicted.items():
        made.options[plan] = replace(made.options[plan], seconds=seconds)
    best = list(predicted)[-1]
    made.options[best] = replace(made.options[best], measured=1e-6)
    made._climb()
    return {plan: option.measured for plan, option in made.options.items() if option.measured}


def test_what_is_beside_the_best_is_run(pool: Pool, known: str) -> None:
    """Other forms of its layout that differ in one choice, whatever is nearer by prediction; not what is much slower."""
    pipe = "dp=1,pp=2,microbatches=2"
    predicted = {
        f"{pipe},schedule=interleaved,chunks=2": 2.6e-6,
        f"{pipe},schedule=zbv,chunks=2": 2.4e-6,
        "dp=1,pp=2,microbatches=4": 1e-6,
        "dp=1,tp=2": 1e-6,
        pipe: 2.4e-6,
        f"{pipe},schedule=zbh1": 2.4e-6,
    }
    predicted = {str(Plan.parse(plan)): seconds for plan, seconds in predicted.items()}
    found = pool.run(climbed, known, predicted, ranks=2, deadline=120)[0]
    run = {plan for plan, seconds in found.items() if seconds != 1e-6}
    assert run == {str(Plan.parse(plan)) for plan in (pipe, f"{pipe},schedule=zbv,chunks=2")}
    assert min(found[plan] for plan in run) > 1e-4


def following(folder: str, predicted: float, probes: int) -> list[str]:
    """What runs after a pipeline that took a second, where data parallelism is predicted so; each takes 1.5 s then."""
    os.environ["SOLI_CACHE"] = folder
    made = auto.Auto(small(), join(), 8, None, probes)
    made._look([Plan.parse(plan) for plan in ("dp=2", "dp=1,pp=2,microbatches=2")])
    pipeline = made.options["dp=1,pp=2,microbatches=2"]
    made.options[pipeline.plan] = replace(pipeline, measured=1.0)
    made._vary()
    found = []
    while True:
        for plan in ("dp=2", "dp=2,zero=1"):
            made.options[plan] = replace(made.options[plan], seconds=predicted)
        for plan, option in made.options.items():
            if "pp" in plan:
                made.options[plan] = replace(option, seconds=9.0)
        option = made._next(len(found) + 3)
        if option is None:
            return found
        made.options[option.plan] = replace(option, measured=1.5)
        found.append(option.plan)


def test_data_parallelism_is_run_beside_what_cuts_blocks(pool: Pool, known: str) -> None:
    """However far its prediction is off, within what a calibration can be; all its forms where plans are probed."""
    both = ["dp=2", "dp=2,zero=1"]
    for predicted, probes, then in ((2.4, 1, both[:1]), (2.4, 3, both), (2.6, 3, [])):
        run = pool.run(following, known, predicted, probes, ranks=2, deadline=120)[0]
        assert sorted(run) == then


def calibrations(folder: str, budget: float) -> tuple[dict[str, Any], int]:
    os.environ["SOLI_CACHE"] = folder
    usual, calibrate.BUDGET = calibrate.BUDGET, budget
    world = join()
    mesh = build_mesh(Plan(dp=world.size), world)
    before = len(process_groups())
    try:
        machine, _ = calibrate.calibrated(world, mesh, fresh=True)
    finally:
        calibrate.BUDGET = usual
    return machine.collectives, len(process_groups()) - before


@pytest.mark.parametrize(("budget", "every"), [(60.0, True), (0.0, False)])
def test_every_group_is_measured_before_any_with_many_bytes(
    pool: Pool, tmp_path: Path, budget: float, every: bool
) -> None:
    """A group that is not measured is taken for a quicker one. Without time there are two sizes of all ranks."""
    found = pool.run(calibrations, str(tmp_path), budget, ranks=4, deadline=120)
    assert found[0] == found[1]
    tables, left = found[0]
    assert left == 0
    assert {key.split()[1] for key in tables} == ({"4x1", "2x1", "2x2"} if every else {"4x1"})
    assert {len(table) for table in tables.values()} == {4 if every else 2}


def test_the_next_size_is_expected_as_the_last_two_say() -> None:
    assert calibrate._expected([], 4096) == 0.0
    assert calibrate._expected([[100, 2.0]], 4096) == 2.0
    assert calibrate._expected([[100, 2.0], [200, 3.0]], 400) == 5.0
    assert calibrate._expected([[100, 3.0], [200, 2.0]], 400) == 2.0  # noise


def failing_alone(error: type[Exception]) -> tuple[bool, str, list[str]]:
    """A trial that one rank leaves while the other waits for it; and what can be done after it."""
    forward_only, left = Pipeline.forward_only, 0

    def raises(self: Pipeline, data: Any, rows: int) -> tuple[float, float]:
        nonlocal left
        left += 1
        raise error("rank 1 cannot")

    if join().rank == 1:
        Pipeline.forward_only = raises
    try:
        made = auto.Auto(small(), join(), 8, None, 1)
        bad, good = (Plan.parse(plan) for plan in ("dp=1,pp=2,microbatches=2", "dp=2"))
        made._look([bad, good])
        made._look = lambda *_, **__: None  # type: ignore[method-assign]  # no lighter ones
        held = made._holds(made.options[str(bad)], 2)
        assert left == int(join().rank == 1)
        assert made._holds(made.options[str(good)], 2)
    finally:
        Pipeline.forward_only = forward_only
    return held, made.options[str(bad)].refused, made.notes + made._unrun()


@pytest.mark.parametrize(("backend", "error"), [("local", SoliError), swept("gloo", torch.OutOfMemoryError)])
@pytest.mark.usefixtures("known")
def test_a_plan_that_one_rank_cannot_run_is_refused_on_all(
    monkeypatch: pytest.MonkeyPatch, backend: str, error: type[Exception]
) -> None:
    """Long before the deadline: the other rank waits for what does not come."""
    monkeypatch.setenv("SOLI_BACKEND", backend)
    ranks = Pool(2, "forkserver")
    try:
        (other, why, notes), (own, said, _) = ranks.run(failing_alone, error, ranks=2, deadline=60)
    finally:
        ranks.close()
    assert not own
    assert not other
    assert "rank 1 cannot" in said
    assert why
    short = error is torch.OutOfMemoryError
    assert any("ran out of memory, of which" in note if short else "did not run" in note for note in notes)
    if backend == "local":
        assert "rank 1 cannot" in why


def tried() -> tuple[int, int]:
    """Files that are open after three trials, and after the same three again."""
    counts = []
    for plan in ("dp=1,tp=2", "dp=1,pp=2,microbatches=2", "dp=1,cp=2") * 2:
        auto.trial(small(), Plan.parse(plan), join(), 1)
        counts.append((len(process_groups()), len(os.listdir("/proc/self/fd"))))
    assert counts[0][0] == counts[-1][0]
    return counts[2][1], counts[5][1]


def test_trials_leave_no_group_behind(pool: Pool) -> None:
    """Each has threads, sockets and shared memory: steps took twice as long after some eighty, between hosts."""
    for first, last in pool.run(tried, ranks=2, deadline=120):
        assert last == first


def test_where_memory_is_short_plans_are_lighter(pool: Pool, known: str) -> None:
    """As rehearsed: with the memory of a step in two pieces and not of a whole one, the whole one is not begun."""
    made = small()
    whole = rehearse(made, Plan(dp=2)).peak
    least = min(rehearse(made, p).peak for p in lighter(Plan(dp=2), 2, 8))
    memory = auto.HEADROOM * (whole + least) / 2
    options = pool.run(looked, memory, known, ranks=2, deadline=120)[0]
    assert "dp=2" not in [plan for plan, peak, refused in options if not refused]
    assert all(peak * auto.HEADROOM <= memory for _, peak, refused in options if not refused)
    with pytest.raises(SoliError, match="no plan fits: the least takes"):
        pool.run(chosen, 1, least / 4, known, ranks=1, deadline=120)
    with pytest.raises(SoliError, match=r"(?s)no plan fits: the least takes .* had an equal part and nothing else"):
        pool.run(chosen, 1, 1e3, known, ranks=2, deadline=120)


def looked(memory: float, folder: str) -> list[tuple[str, float, str]]:
    os.environ["SOLI_CACHE"] = folder
    made = auto.Auto(small(), join(), 8, memory, 1)
    made._look([Plan(dp=2), Plan(dp=1, tp=2)])
    return [(o.plan, o.peak, o.refused) for o in made.options.values()]


def trained(folder: str) -> tuple[float, str, str]:
    os.environ["SOLI_CACHE"] = folder
    _, loss_fn, batches = CASES["gpt"].make()
    case = Case("block", lambda: (block(), loss_fn, batches), adamw)
    return (*compare(under_plan(case, "auto"), expected_of(case)), "")


def test_training_under_auto_is_sequential_training(launched: Pool, known: str) -> None:
    for worst, tensor, _ in launched.run(trained, known, ranks=2, deadline=120):
        assert worst <= BOUND, tensor


class Hoards(nn.Module):
    """Takes memory that is no tensor's, with the rows of a batch: a rehearsal cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512)
        self.kept: list[bytearray] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [bytearray(b"x") * (20 << 20) for _ in range(len(x) // 8)]
        return self.inner(x)


@pytest.mark.sweep  # test_every_plan_is_tried_before_it_is_begun has it on two ranks
def test_a_plan_that_takes_more_than_rehearsed_is_not_begun(capsys: Any) -> None:
    """Half of what is free is rehearsed, and twice of it taken: smaller pieces, before the first step."""
    model = Hoards()
    batch = (torch.randn(64, 512), torch.randn(64, 512))
    engine = parallelize(model, losses.mse(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="auto", memory=60e6)
    auto_tight, auto.TIGHT = auto.TIGHT, 0.0
    try:
        engine.step(batch)
    finally:
        auto.TIGHT = auto_tight
    assert engine.choice is not None
    refused = [o for o in engine.choice.options if "more than rehearsed" in o.refused]
    assert [o.plan for o in refused][:1] == ["dp=1"]
    assert engine.plan.accumulate > 1


def begun(folder: str) -> tuple[list[str], str, list[bool]]:
    """What is chosen where a step takes more than its rehearsal; whether training is that of the plan from the start."""
    os.environ["SOLI_CACHE"] = folder
    plans, weights, said = ["auto"], [], ""
    bases, auto.bases = auto.bases, lambda ranks, *_, **__: [Plan(dp=ranks)]
    try:
        for plan in plans:
            torch.manual_seed(0)
            model, rows = Hoards(), torch.randn(16 * join().size, 512)
            engine = parallelize(model, losses.mse(), optimizer=lambda p: torch.optim.AdamW(p), plan=plan, memory=40e6)
            for _ in range(2):
                engine.step((rows, rows))
            weights.append([*engine.global_state_dict().values(), torch.rand(4)])
            if engine.choice is not None:
                assert all(o.peak < auto.TIGHT * 40e6 / 2 for o in engine.choice.options)
                plans.append(str(engine.plan))
                said = engine.choice.lines[2]
    finally:
        auto.bases = bases
    return plans, said, list(map(torch.equal, *weights))


@pytest.mark.parametrize("ranks", [swept(1), 2])
def test_every_plan_is_tried_before_it_is_begun(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Far below half of what is free by its rehearsal, and above it really: seen on a copy, with both numbers."""
    for plans, said, same in pool.run(begun, str(tmp_path), ranks=ranks, deadline=120):
        assert Plan.parse(plans[1]).pieces >= 4 * ranks
        assert re.search(
            r"took [4-9]\d.* MB, [4-9]\d.* MB more than rehearsed and more than the 40 MB that are free", said
        )
        assert same == [True] * 3


def test_out_of_memory_on_a_copy_is_a_lighter_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next lighter plan, and what the allocator said."""
    trial = auto.trial

    def short(program: Any, plan: Plan, *more: Any) -> Any:
        if plan.accumulate < 4:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        return trial(program, plan, *more)

    monkeypatch.setattr(auto, "trial", short)
    batch = (torch.randn(16, 4), torch.randn(16, 4))
    engine = parallelize(nn.Linear(4, 4), losses.mse(), optimizer=torch.optim.SGD, plan="auto")
    engine.step(batch)
    assert engine.choice is not None
    assert str(engine.plan) == "dp=1,accumulate=4"
    assert "dp=1 ran out of memory, of which" in engine.choice.lines[2]


def test_a_search_near_the_limit_ends_and_says_what_took_more(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Each plan is rehearsed once and run once, what took more is told with what is tried next, and the end has them all."""
    seen: list[Plan] = []
    tried: list[Plan] = []
    monkeypatch.setattr(auto, "rehearse", lambda program, plan: (seen.append(plan), rehearse(program, plan))[1])
    monkeypatch.setattr(auto, "trial", lambda program, plan, *_: (tried.append(plan), (0.1, 2e9))[1])
    forms = [Plan(dp=1), *lighter(Plan(dp=1), 1, 8)]
    with pytest.raises(SoliError) as caught:
        auto.choose(small(), join(), 8, memory=1e9)
    assert seen == tried == forms
    told = capsys.readouterr().out
    for plan in forms:
        more = f"{plan} took 2 GB, 2 GB more than rehearsed and more than the 1 GB that are free"
        assert told.count(f"soli: {more}") == 1
        assert f"{plan} took 2 GB" in caught.value.problems[0].got.split("; ")
        assert (f"{plan} is tried next, of which" in told) == (plan != forms[0])


def test_what_was_measured_stands_when_others_are_looked_for() -> None:
    made = auto.Auto(small(), join(), 8, 1e9, 1)
    made._look([Plan(dp=1)])
    made.options["dp=1"] = run_ = replace(made.options["dp=1"], measured=0.1, taken=5e8)
    made._look([Plan(dp=1)], again=True)
    assert made.options == {"dp=1": run_}


def test_a_limit_that_nothing_holds_a_plan_to_is_said_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for its plan before a batch; without a limit there is nothing to choose."""
    for memory, said in (
        (None, ""),
        (2e9, "before a batch was seen, and nothing holds it to memory=2 GB; give soli.pa"),
    ):
        engine = parallelize(nn.Linear(4, 4), losses.mse(), optimizer=torch.optim.SGD, plan="auto", memory=memory)
        assert str(engine.plan) == "dp=1"
        out = capsys.readouterr().out
        assert said in out if said else not out


def first_steps(folder: str) -> tuple[str, list[str]]:
    """What is said of a first step whose batch is larger than the example, and of the next. Under dp, whatever is quickest here."""
    os.environ["SOLI_CACHE"] = folder
    batch = lambda rows: (torch.randn(rows, 512), torch.randn(rows, 512))
    usual, auto.bases = auto.bases, lambda ranks, *_, **__: [Plan(dp=ranks)]
    try:
        with redirect_stdout(io.StringIO()) as said:
            engine = parallelize(Hoards(), losses.mse(), optimizer=torch.optim.SGD, plan="auto", example=batch(8))
            for _ in range(2):
                engine.step(batch(256))
    finally:
        auto.bases = usual
    texts = [event["text"] for event in noted()]
    return said.getvalue(), [text for text in texts if "first step" in text]


def test_a_first_step_that_takes_more_is_told_once(pool: Pool, known: str) -> None:
    """By how much, on every rank an event, on one a line."""
    found = pool.run(first_steps, known, ranks=2, deadline=120)
    told = r"the first step took [23]\d\d MB a rank, [23]\d\d MB more than a step of \S+ when it was chosen"
    assert [len(re.findall(told, said)) for said, _ in found] == [1, 0]
    assert [len(texts) for _, texts in found] == [1, 1]


class Chooses(Hoards):
    """A layer that only values lead to; a rehearsal has none."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return super().forward(x) if y.abs().sum() > 0 else y


def test_what_only_values_lead_to_is_tried_first_and_told() -> None:
    """No rehearsal sees what it takes, whatever it says is free: a copy does, before the first step."""
    engine = parallelize(
        Chooses(), losses.mse(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="auto", memory=60e6
    )
    engine.step((torch.randn(64, 512), torch.randn(64, 512)))
    assert engine.choice is not None
    assert [o.plan for o in engine.choice.options if "more than rehearsed" in o.refused][:1] == ["dp=1"]
    assert engine.plan.accumulate > 1
    assert "layers read values, rehearsed as 0" in engine.choice.lines[2]
    assert f"Chooses at {__file__}:" in engine.choice.lines[2]


def test_trials_leave_no_gradient_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that reads the model from outside reaches the model itself from a copy: its first step is the plain one."""
    monkeypatch.setattr(auto, "TIGHT", 0.0)
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    weights = []
    for plan in ("auto", "dp=1"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)

        def loss(out: Tensor, batch: Any, model: nn.Linear = model) -> tuple[Tensor, int]:
            return ((out - batch[1]) ** 2).sum() + model.weight.square().sum() * 0.1 * len(out), len(out)

        engine = parallelize(model, loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
        engine.step(batch)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def rows_seen(folder: str) -> tuple[list[int], list[int]]:
    os.environ["SOLI_CACHE"] = folder
    seen = []
    for source in (list(range(20)), iter(range(20))):
        data = [(torch.full((4,), float(i)), torch.zeros(4)) for i in source]
        model = nn.Linear(4, 4)
        engine = parallelize(model, losses.mse(), optimizer=lambda p: torch.optim.SGD(p, lr=0.0), plan="auto")
        stream: Any = data if isinstance(source, list) else Once(data)
        steps = [int(engine.step(b) is not None) * b.rows for b in engine.batches(stream, 8, shuffle=False)]
        seen.append(sum(steps))
    return seen, []


class Once:
    """A stream that is read once."""

    def __init__(self, data: list[Any]) -> None:
        self._left = iter(data)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._left)


def test_looking_ahead_loses_no_row() -> None:
    assert rows_seen(os.environ["SOLI_CACHE"])[0] == [20, 20]


def test_what_cannot_be_rehearsed_is_said_and_plain() -> None:
    """A program that looks at its values still trains, by the plain plan, and the reason is told."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y + y.unique().numel() * 0

    engine = parallelize(Counts(), losses.mse(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="auto")
    engine.step((torch.randn(4, 4), torch.zeros(4, 4)))
    assert engine.choice is not None
    assert "cannot be rehearsed" in engine.choice.lines[0]
    assert "Counts" in engine.choice.lines[1]


def test_calibrate_measures_and_keeps(tmp_path: Path) -> None:
    """Every collective of every group of two ranks, by JSON; the second time it is read, and a damaged file is told."""
    environment = {**os.environ, "SOLI_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "soli.cli.main", "calibrate", "-n", "2"]
    first = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stderr
    said = json.loads(first.stdout)
    operations = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange", "send"}
    assert {key.split()[0] for key in said["collectives"]} == operations
    assert all(seconds > 0 for table in said["collectives"].values() for _, seconds in table)
    assert said["crowd"] >= 1
    (kept,) = tmp_path.glob("machine-*.json")
    kept.write_text("{", encoding="utf-8")
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "is no calibration" in again.stderr
    assert re.search(r"measured in [0-9.]+ s", again.stdout)
    assert json.loads(kept.read_text(encoding="utf-8"))["ranks"] == 2
