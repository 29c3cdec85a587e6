"""2D, 2.5D and 3D tensor parallelism end to end: parity, bytes, memory, checkpoints, bad input, broken rules.

A grid has r rows and c columns; 2.5D has d copies of it; a cube has the edge q.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import CASES
from noted import bytes_by
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.engine import Engine, parallelize
from soli.mesh.record import recorder
from soli.models.gpt import GPT, GPTConfig
from soli.parallel.tensor import cube, moves, norms, summa
from soli.planner.legality import nearest, problems, resolve
from soli.verify.parity import BOUND, Case, adamw, check, compare, expected_of, under_plan
from soli.verify.tolerance import bound
from sweep import swept
from typed import soli

DEADLINE = 60
GRID, WIDE, DEEP, CUBE = ("tp=4,tensor=2d", "tp=6,tensor=2d,rows=3", "tp=8,tensor=2.5d,depth=2", "tp=8,tensor=3d")


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest) -> Callable[[int], Pool]:
    """The pool that has so many ranks; the large one is started when it is first asked for."""
    return lambda ranks: request.getfixturevalue("pool" if ranks <= 4 else "many")


# --- parity -------------------------------------------------------------------------------------------------


def one(name: str, plan: str, ranks: int):
    return check(CASES[name], plan, ranks)


ROWS = [
    # What a row of the matrix (test_parity.py) shows with another model is in the sweep.
    # A square: four ranks, each with half of the rows, of the hidden size and of every weight's sums.
    swept("gpt-dropout", GRID + ",zero=1,recompute=selective", 4),
    swept("gpt-ragged", GRID + ",zero=2,accumulate=2", 4),
    swept("gpt-masked", GRID + ",zero=3,recompute=full", 4),
    swept("llama", GRID + ",zero=3,accumulate=3", 4),
    swept("t5", GRID + ",zero=2", 4),
    swept("vit", GRID + ",zero=3", 4),
    swept("hf-gpt2", GRID + ",zero=1", 4),
    # Other shapes, with data parallelism, stages and a cut sequence.
    swept("hf-vit", "dp=2,tp=2,tensor=2d,rows=2,replicate=2,zero=3,recompute=selective", 4),
    ("llama", "dp=2,tp=2,tensor=2d,rows=1,zero=2", 4),
    swept("gpt-ragged", "pp=2,tp=2,tensor=2d,rows=2,microbatches=2,schedule=gpipe,zero=1", 4),
    swept("gpt-masked", "pp=2,tp=2,tensor=2d,rows=2,microbatches=2", 4),
    swept("bert", "pp=2,tp=2,tensor=2d,rows=2,microbatches=2,schedule=interleaved,chunks=2,zero=3", 4),
    ("gpt-start", "cp=2,tp=2,tensor=2d,rows=2,zero=1", 4),
    swept("t5", "cp=2,tp=2,tensor=2d,rows=1,zero=3,recompute=full", 4),
    swept("llama", WIDE + ",zero=3", 6),
    # Copies of a grid.
    ("gpt-dropout", DEEP + ",zero=2", 8),
    # A cube. Every model under one, and nine ranks in a square: `make parity`.
    swept("gpt-masked", CUBE + ",zero=3,accumulate=2", 8),
    ("vit", CUBE + ",zero=3", 8),
    # Stages of cubes: with dropout its attention is written out, and what leaves it is cut otherwise.
    swept("vit", "pp=2," + CUBE + ",microbatches=2", 16),
    # What a rank of a cube sends on are parts of others' rows; a batch of one row beside those of two.
    swept("hf-bert", "pp=2," + CUBE + ",microbatches=2", 16),
    # Dropout that a check leaves out is a view of the same shape, of a row that other ranks have nothing of.
    swept("hf-gpt2", "pp=2," + CUBE + ",microbatches=2", 16),
]


@pytest.mark.parametrize(("name", "plan", "ranks"), ROWS)
def test_a_grid_equals_one_rank(ranks_of: Callable[[int], Pool], name: str, plan: str, ranks: int) -> None:
    for row in ranks_of(ranks).run(one, name, plan, ranks, ranks=ranks, deadline=DEADLINE):
        assert row.worst <= BOUND, row


# --- bytes --------------------------------------------------------------------------------------------------

B, T, H, V, LAYERS, HEADS, FLOAT32 = 8, 6, 16, 32, 2, 4, 4


def gpt(dim: int = H, dropout: float = 0.0) -> GPT:
    torch.manual_seed(3)
    config = GPTConfig(vocab=V, context=T, dim=dim, layers=LAYERS, heads=HEADS, dropout=dropout, tied=False)
    return GPT(config)


def tokens(rows: int = B, seed: int = 0) -> dict[str, Tensor]:
    drawn = torch.randint(V, (rows, T + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


LOSS = losses.cross_entropy("targets")


def laid(plan: str, model: nn.Module | None = None, clip: float | None = None, rows: int = B) -> Engine:
    made = model if model is not None else gpt()
    return parallelize(made, LOSS, optimizer=adamw, plan=plan, clip=clip, example=tokens(rows))


def step_bytes(plan: str) -> dict[tuple[str, str], int]:
    """Of the third step: the checks of the first ones are behind it."""
    engine = laid(plan)
    for _ in range(2):
        engine.step(tokens())
    recorder.clear()
    engine.step(tokens(seed=1))
    return {key: n for key, n in bytes_by(recorder).items() if key[1] != "dp"}  # dp: the loss's own numbers


MATRICES = [*[(H, H, i == 3) for i in range(4)], (4 * H, H, False), (H, 4 * H, True)]
"""New size, summed size, whether it is a block's second product: q, k, v, out; up, down."""
PRODUCTS = [*MATRICES * LAYERS, (V, H, False)]
NORMS = 2 * LAYERS + 1
VECTORS = LAYERS * (4 * H + 4 * H + H) + NORMS * 2 * H + T * H
"""Elements of biases, norms and positions."""


def bytes_2d(r: int, c: int) -> dict[tuple[str, str], int]:
    """As summa.linear says: an input's panels go over tp and come back as gradients, a weight's over row.

    `t` tokens a rank. A norm adds up two numbers a token forward and two backward, the loss four; the table of words
    is gathered over row, and what is looked up is added up over tp.
    """
    t = B // r * T
    inputs = sum(t * k * FLOAT32 for _, k, _ in PRODUCTS)
    weights = sum(n // c * k * FLOAT32 for n, k, _ in PRODUCTS)
    table, looked_up = V // c * H * FLOAT32, t * H * FLOAT32
    rows = 5 * 8 * c  # five numbers from each rank of tp, by which rows and options that differ are found
    found = {
        ("broadcast", "tp"): 2 * inputs,
        ("reduce", "tp"): inputs,
        ("reduce_scatter", "tp"): looked_up,
        ("all_gather", "tp"): looked_up,
        ("all_reduce", "tp"): (4 * NORMS + 4) * t * FLOAT32 + rows,
        ("broadcast", "row"): 2 * weights,
        ("reduce", "row"): weights,
        ("all_gather", "row"): table,
        ("reduce_scatter", "row"): table,
    }
    over = {"tp": c, "row": r}
    return {key: n for key, n in found.items() if over[key[1]] > 1} | {
        ("all_reduce", "replicate"): VECTORS // c * FLOAT32 if r > 1 else 0
    }


def bytes_3d(q: int) -> dict[tuple[str, str], int]:
    """As cube.linear says: x is gathered, y scattered over the other axis, W over depth; three times each, of which
    two are gathers of x and W and one of y.

    A block's first product takes tokens from tp to row, its second one takes them back.
    """
    t, whole = B // q * T, FLOAT32
    gathers = {"row": 0, "tp": 0, "depth": 0}
    scatters = dict(gathers)
    for n, k, back in PRODUCTS:
        gather, scatter = ("row", "tp") if back else ("tp", "row")
        x, y, w = t * k // q * whole, t * n // q * whole, n * k // q**2 * whole
        gathers[gather] += 2 * x
        gathers[scatter] += y
        gathers["depth"] += 2 * w
        scatters[gather] += x
        scatters[scatter] += y
        scatters["depth"] += w
    table, looked_up = V * H // q**2 * whole, t * H // q * whole
    gathers["depth"] += table
    scatters["depth"] += table
    gathers["tp"] += looked_up
    scatters["tp"] += looked_up
    own, rows = t // q * whole, 5 * 8 * q
    sums = {
        "row": 4 * NORMS * own + rows + 2 * whole,  # the loss of the parts of the batch, and its gradient
        "tp": (4 + 1) * own + rows,  # the loss of each token, and its gradient
    }
    return (
        {("all_gather", axis): n for axis, n in gathers.items()}
        | {("reduce_scatter", axis): n for axis, n in scatters.items()}
        | {("all_reduce", axis): n for axis, n in sums.items()}
        | {("all_reduce", "replicate"): VECTORS // q * whole}
    )


@pytest.mark.parametrize(
    ("plan", "ranks", "expected"),
    [
        (GRID, 4, bytes_2d(2, 2)),
        ("tp=2,tensor=2d,rows=2", 2, bytes_2d(2, 1)),
        swept("tp=8,tensor=2d,rows=2", 8, bytes_2d(2, 4)),
        (CUBE, 8, bytes_3d(2)),
    ],
)
def test_bytes_of_a_step(
    ranks_of: Callable[[int], Pool], plan: str, ranks: int, expected: dict[tuple[str, str], int]
) -> None:
    for found in ranks_of(ranks).run(step_bytes, plan, ranks=ranks, deadline=DEADLINE):
        assert found == expected


# --- memory -------------------------------------------------------------------------------------------------


def held(plan: str, dim: int) -> tuple[int, int, int]:
    """Elements of parameters, of optimizer states, and of what a forward saves for the backward beside parameters."""
    engine = laid(plan, gpt(dim))
    engine.step(tokens())
    part = engine.dp.size, engine.dp.index
    rows = tokens()["tokens"].chunk(part[0])[part[1]], tokens()["targets"].chunk(part[0])[part[1]]
    batch = dict(zip(("tokens", "targets"), rows, strict=True))
    weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    saved: dict[tuple[int, int], int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights and x.is_floating_point():
            saved[x.data_ptr(), x.numel()] = x.numel()
        return x

    kept: list[Tensor] = []  # alive, so that no two have one address
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or keep(x), lambda x: x)
    with hooks, engine.computing():
        LOSS(engine._call(batch), batch)
    states = sum(x.numel() for s in engine.optimizer.state.values() for x in s.values() if x.dim())
    return sum(p.numel() for p in engine.model.parameters()), states, sum(saved.values())


@pytest.mark.parametrize(("plan", "ranks", "columns", "each"), [(GRID, 4, 2, 4), swept(DEEP, 8, 2, 8), (CUBE, 8, 2, 8)])
def test_memory(ranks_of: Callable[[int], Pool], plan: str, ranks: int, columns: int, each: int) -> None:
    """Parameters and states have a closed form. What is saved is a line in the hidden size: its slope falls by
    `each` (r c, d r c or q^3), and what is left are the logits, which fall too, and numbers a token.

    In a cube numbers a token are cut over depth and one other axis, and tokens' own indices over depth alone.
    """
    pool, blocks = ranks_of(ranks), {GRID: 4, DEEP: 4, CUBE: 8}[plan]
    slopes, offsets = {}, {}
    for where, n in (("dp=1", 1), (plan, ranks)):
        found = {dim: pool.run(held, where, dim, ranks=n, deadline=DEADLINE) for dim in (H, 2 * H)}
        assert all(of == ofs[0] for ofs in found.values() for of in ofs)
        slopes[where] = (found[2 * H][0][2] - found[H][0][2]) / H
        offsets[where] = found[H][0][2] - slopes[where] * H
        if n > 1:
            elements = sum(n * k for n, k, _ in PRODUCTS) + V * H
            assert found[H][0][0] == elements // blocks + VECTORS // columns
            assert found[H][0][1] == 2 * found[H][0][0]
    assert slopes[plan] == slopes["dp=1"] / each
    own = B * T * columns // each  # tokens that a rank has numbers of
    assert offsets[plan] - B * T * V // each <= own * (NORMS + LAYERS * HEADS // columns + 4)


# --- bad input ----------------------------------------------------------------------------------------------

REFUSED = [
    ("tp=6,tensor=2d", 6, ["6 ranks are no square grid", "tp=4 or tp=9", "rows=2 or 3"]),
    ("tp=8,tensor=2d,rows=3", 8, ["rows=3 does not divide the 8 ranks of a grid", "1, 2, 4, 8"]),
    ("tp=8,tensor=2.5d,depth=3", 8, ["tp=8 is no multiple of depth=3", "tp=3 or tp=12", "1 or 2 or 4 or 8"]),
    ("tp=12,tensor=2.5d,depth=2", 12, ["6 ranks are no square grid", "tp=8 or tp=18", "rows=2 or 3"]),
    ("tp=4,tensor=3d", 4, ["4 ranks are no cube", "tp = q x q x q", "tp=8"]),
    ("tp=8,tensor=3d,rows=2", 8, ["'rows' are of a grid", "leave rows out"]),
    ("tp=8,tensor=3d,depth=2", 8, ["'depth' counts the copies of a grid", "tensor=2.5d, or leave depth out"]),
    ("tp=4,depth=2", 4, ["tensor=1d has one", "leave depth out"]),
    ("tp=4,rows=2", 4, ["tensor=1d has none", "leave rows out"]),
    ("tp=4,tensor=2d,sp=on", 4, ["'sp' cuts the sequence", "sp=on, tensor=2d", "leave sp out"]),
    ("pp=2,tp=2,tensor=2d,rows=2,schedule=zbh1", 4, ["'zbh1' computes gradients", "gpipe, 1f1b, interleaved"]),
    ("pp=2,tp=8,tensor=3d,schedule=zbv", 16, ["'zbv' computes gradients", "schedule=1f1b"]),
    ("pp=2,tp=4,tensor=2d,schedule=dualpipev", 8, ["'dualpipev' computes gradients", "schedule=1f1b"]),
    (
        "pp=2,tp=6,tensor=2d,sp=on,schedule=zbv",
        8,
        ["= 12", "no square grid", "'sp' cuts", "'zbv' computes"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "world", "words"), REFUSED)
def test_a_grid_that_cannot_be_is_refused(plan: str, world: int, words: list[str]) -> None:
    """All that is wrong at once, with what would do; and the nearest plan, which can run."""
    asked = Plan.parse(plan)
    with pytest.raises(SoliError) as refused:
        resolve(asked, world)
    text = str(refused.value)
    assert refused.value.everywhere
    assert all(word in text for word in [*words, "the nearest plan that can run"]), text
    assert problems(nearest(asked, world), world) == []


def test_depth_of_a_grid_that_has_none_is_one_problem() -> None:
    (found,) = problems(Plan.parse("tp=4,tensor=2d,depth=2"), 4)
    assert "'depth' counts the copies of a grid" in str(SoliError([found]))


@pytest.mark.parametrize(
    ("plan", "world", "near"),
    [
        ("tp=6,tensor=2d", 6, "tp=6,tensor=2d,rows=2"),
        ("tp=12,tensor=2.5d,depth=2", 12, "tp=12,tensor=2.5d,rows=2,depth=2"),
        ("tp=8,tensor=2.5d,depth=3", 8, "tp=8,tensor=2.5d,depth=2"),
        ("tp=8,tensor=3d,rows=2,depth=2", 8, "tp=8,tensor=3d"),
        ("tp=8,tensor=3d,sp=on", 8, "tp=8,tensor=3d"),
        ("tp=4,tensor=2d,sp=on", 4, "tp=4,tensor=2d"),
    ],
)
def test_the_nearest_plan_keeps_the_grid(plan: str, world: int, near: str) -> None:
    assert str(nearest(Plan.parse(plan), world).with_(dp=None)) == near


def test_every_plan_that_is_accepted_uses_every_rank() -> None:
    for kind in ("1d", "2d", "2.5d", "3d"):
        for tp in range(1, 28):
            for depth in (1, 2, 3):
                for rows in range(5):
                    plan = Plan(tp=tp, tensor=kind, depth=depth, rows=rows)
                    if problems(plan, tp):
                        continue
                    deep, tall, wide = plan.grid
                    copies = depth if kind == "2.5d" else 1
                    assert copies * deep * tall * wide == tp, plan
                    assert kind == "1d" or not rows or tall == rows
                    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("words", [("train", "--plan"), ("plan",)])
def test_the_command_refuses_a_grid_before_a_rank_starts(words: tuple[str, ...]) -> None:
    done = soli(*words, "tp=6,tensor=2d,sp=on", "-n", "6")
    assert done.returncode == 2
    assert done.stderr.count("6 ranks are no square grid") == 1, done.stderr
    assert done.stderr.count("'sp' cuts the sequence") == 1
    assert "Traceback" not in done.stderr


def too_few(plan: str, least: int) -> list[str]:
    """A batch that is too small, from the user, from engine.batches and in an evaluation; then one that is not."""
    data = [{n: x[0] for n, x in tokens(1, seed=i).items()} for i in range(2 * least - 1)]
    engine, found = laid(plan, rows=least), []
    for call in (
        lambda: engine.step(tokens(least - 1)),
        lambda: [engine.step(batch) for batch in engine.batches(data, least, name=None)],
        lambda: engine.evaluate(engine.batches(data, least, name=None)),
    ):
        try:
            call()
            found.append("")
        except SoliError as error:
            found.append(str(error))
    engine.step(tokens(least))
    return found


@pytest.mark.parametrize(
    ("plan", "ranks", "least"),
    [(GRID, 4, 2), ("dp=2,tp=2,tensor=2d,rows=2", 4, 4), swept(DEEP, 8, 4), swept(CUBE, 8, 2)],
)
def test_too_few_rows_are_refused(ranks_of: Callable[[int], Pool], plan: str, ranks: int, least: int) -> None:
    for first, ragged, evaluated in ranks_of(ranks).run(too_few, plan, least, ranks=ranks, deadline=DEADLINE):
        assert f"{least - 1} rows" in first
        for said in (ragged, evaluated):
            assert f"at least {least} rows in every batch" in said
            assert f"{least - 1} rows" in said
            assert "fill the ragged last batch" in said


# --- checkpoints, norm and clipping -------------------------------------------------------------------------


def saved_or_loaded(plan: str, path: str, load: str) -> tuple[dict[str, Tensor], float]:
    """The whole tensors of a run that saves after two steps, or of one that loads; and the loss of its next step."""
    engine = laid(plan, gpt(dropout=0.1).double())
    if load:
        engine.load(load)
    else:
        for seed in range(2):
            engine.step(tokens(seed=seed))
        engine.save(path)
    whole = {name: x.clone() for name, x in engine.global_state_dict(optimizer=True).items()}
    return whole, float(engine.step(tokens(seed=7)))


CHECKPOINTS = [(GRID, 4), ("dp=1", 1), ("tp=2", 2), ("dp=4,zero=3", 4), (GRID + ",zero=3", 4), (CUBE, 8), (CUBE + ",zero=1", 8)]  # fmt: skip


@pytest.mark.parametrize("writer", [GRID + ",zero=1", swept("dp=4,zero=3"), swept(CUBE + ",zero=3")])
def test_checkpoints_go_from_any_plan_to_any(ranks_of: Callable[[int], Pool], tmp_path: Path, writer: str) -> None:
    ranks, path = 8 if "3d" in writer else 4, str(tmp_path / "saved")
    written = ranks_of(ranks).run(saved_or_loaded, writer, path, "", ranks=ranks, deadline=DEADLINE)
    whole, loss = written[0]
    assert any(name.startswith("optimizer.") and x.dim() == 2 for name, x in whole.items())
    for reader, n in CHECKPOINTS[:4] if writer != "dp=4,zero=3" else CHECKPOINTS[4:]:
        for found, then in ranks_of(n).run(saved_or_loaded, reader, "", path, ranks=n, deadline=DEADLINE):
            assert found.keys() == whole.keys()
            assert [name for name in whole if not torch.equal(found[name], whole[name])] == []
            assert then == pytest.approx(loss, rel=BOUND)


def norms_of(plan: str) -> list[tuple[float, float]]:
    """The norm that clipping saw, and the largest parameter after a step of SGD, for three steps."""
    engine = parallelize(gpt().double(), LOSS, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), plan=plan, clip=0.05)
    found = []
    for seed in range(3):
        engine.step(tokens(seed=seed))
        state = engine.global_state_dict()
        found.append((engine.last.grad_norm or 0.0, sum(float(x.square().sum()) for x in state.values())))
    return found


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        swept(f"{GRID},zero=0", 4),
        (f"{GRID},zero=3", 4),
        swept("dp=2,tp=2,tensor=2d,rows=1,zero=1", 4),
        ("dp=2,tp=2,tensor=2d,rows=2,zero=3", 4),
        swept(f"{CUBE},zero=0", 8),
        swept(f"{CUBE},zero=3", 8),  # what is clipped in a cube is in test_a_grid_equals_one_rank
    ],
)
def test_the_norm_of_the_gradient(ranks_of: Callable[[int], Pool], plan: str, ranks: int) -> None:
    expected = ranks_of(1).run(norms_of, "dp=1", ranks=1)[0]
    assert all(norm > 0.05 for norm, _ in expected)  # so that it is clipped
    for found in ranks_of(ranks).run(norms_of, plan, ranks=ranks, deadline=DEADLINE):
        assert [x for pair in found for x in pair] == pytest.approx([x for pair in expected for x in pair], rel=BOUND)


# --- broken rules -------------------------------------------------------------------------------------------


def drops_a_panel() -> Any:
    real = summa.panels
    summa.panels = lambda *given: real(*given)[:-1]
    return summa, "panels", real


def forgets_to_add_up_a_norm() -> Any:
    real = moves.summed
    norms.moves.summed = lambda x, axis, label, *more: x if "norm" in label else real(x, axis, label, *more)
    return moves, "summed", real


def scatters_to_the_wrong_rank() -> Any:
    real = cube.scattered_later

    def wrong(x: Tensor, split: Any, axis: Any, label: str) -> Any:
        if label == cube.OUTPUT:
            x = x.flip(split.dim)
        return real(x, split, axis, label)

    cube.scattered_later = wrong
    return cube, "scattered_later", real


def forgets_a_gradient() -> Any:
    real = summa._gradients

    def wrong(*given: Any) -> Any:
        dx, dw = real(*given)
        return dx, None if dw is None else dw * (given[5].index == 0)

    summa._gradients = wrong
    return summa, "_gradients", real


def does_not_gather_over_depth() -> Any:
    real = cube._gradients

    def wrong(*given: Any) -> Any:
        dx, dw = real(*given)
        return dx, None if dw is None else dw * (1 + 1e-9)

    cube._gradients = wrong
    return cube, "_gradients", real


def broken(how: Callable[[], Any], plan: str, looked_at: bool) -> str:
    """What the check says of a rule that is broken; with `looked_at` off, of what parity finds instead."""
    case = Case("small", lambda: (gpt(), LOSS, [tokens(seed=seed) for seed in range(2)]), adamw)
    module, name, real = how()
    try:
        if looked_at:
            model, loss_fn, batches = case.make()
            parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan, example=batches[0])
            return "nothing"
        from soli.engine import layout

        compared, layout.check.compare = layout.check.compare, lambda *given: None
        try:
            worst, where = compare(under_plan(case, plan), expected_of(case))
        finally:
            layout.check.compare = compared
        return f"{where} is off" if worst > BOUND else "nothing"
    except SoliError as error:
        return str(error)
    finally:
        setattr(module, name, real)


@pytest.mark.parametrize(
    ("how", "plan", "ranks"),
    [
        (drops_a_panel, GRID, 4),
        (forgets_to_add_up_a_norm, GRID, 4),
        (forgets_a_gradient, GRID, 4),
        swept(forgets_to_add_up_a_norm, CUBE, 8),
        (scatters_to_the_wrong_rank, CUBE, 8),
        swept(does_not_gather_over_depth, CUBE, 8),
    ],
)
def test_a_broken_rule_is_found(ranks_of: Callable[[int], Pool], how: Callable[[], Any], plan: str, ranks: int) -> None:
    pool = ranks_of(ranks)
    for said in pool.run(broken, how, plan, True, ranks=ranks, deadline=DEADLINE):
        assert "does not compute what it computes whole" in said
    for said in pool.run(broken, how, plan, False, ranks=ranks, deadline=DEADLINE):
        assert "is off" in said or "computes another loss" in said


# --- other precisions ---------------------------------------------------------------------------------------


def losses_in(plan: str) -> list[float]:
    engine = parallelize(gpt(), LOSS, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan, clip=1.0)
    return [float(engine.step(tokens(seed=seed))) for seed in range(4)]


@pytest.mark.parametrize(
    ("precision", "plan", "ranks"),
    [("bf16", GRID, 4), swept("fp32", GRID, 4), swept("bf16", CUBE, 8), swept("fp32", CUBE, 8)],
)
def test_other_precisions(ranks_of: Callable[[int], Pool], plan: str, ranks: int, precision: str) -> None:
    """As near to one rank as the roundings on the longest path through a step allow."""
    expected = ranks_of(1).run(losses_in, f"dp=1,precision={precision}", ranks=1)[0]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    allowed = min(bound(gpt(), B * T, 4, dtype), 1e-2)
    for found in ranks_of(ranks).run(losses_in, f"{plan},precision={precision}", ranks=ranks, deadline=DEADLINE):
        assert found == pytest.approx(expected, rel=allowed)
        assert found[-1] < found[0]


# --- odd models ---------------------------------------------------------------------------------------------


class RootMeanSquare(nn.Module):
    """Written by hand, as most models from elsewhere have it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class ByHand(nn.Module):
    """LayerNorm from mean and var."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(dim) + 0.5), nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.weight + self.bias


class Router(nn.Module):
    """Mixes three experts by a product of three outputs: fewer than some grids have ranks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.route = nn.Linear(dim, 3)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.route(x).softmax(-1)
        return sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class OddNumber(nn.Module):
    """One product between two residuals, then three."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.one = nn.Linear(dim, dim)
        self.three = nn.ModuleList([nn.Linear(dim, 10), nn.Linear(10, 9), nn.Linear(9, dim)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.one(x))
        y = x
        for layer in self.three:
            y = torch.tanh(layer(y))
        return x + y


class Matrices(nn.Module):
    """Weights [k, n] that are read by x @ w and by addmm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(dim, 2 * dim) / dim), nn.Parameter(torch.rand(dim))
        self.second = nn.Parameter(torch.randn(2 * dim, dim) / dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x @ self.first)
        return torch.addmm(self.bias, y.reshape(-1, y.shape[-1]), self.second).view(x.shape)


class Otherwise(nn.Module):
    """Weights that are read in another way too, and so may not be cut both ways."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.there = nn.Linear(dim, dim, bias=False)
        self.summed = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        back = F.linear(torch.tanh(self.there(x)), self.there.weight.t())
        return self.summed(back) * torch.tanh(self.summed.weight.sum())


class Multiplied(nn.Module):
    """Weights that are multiplied with each other, after the products in which they are cut both ways."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.other, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x)) * torch.tanh(self.other(x)))
        scale = torch.tanh(F.linear(self.down.weight, self.other.weight.mT).sum())
        return F.linear(x, self.up.weight.T @ self.other.weight) * scale


class InPlace(nn.Module):
    """Residuals that are added in place."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(x)))
        y += x
        return y.mul_(0.5)


class Copying(nn.Module):
    """Frozen slow copies of a weight, written into before they are read: by name and by `.data`; and a weight that is summed before."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, dim), nn.Linear(dim, 7)
        self.fast = nn.Linear(dim, dim, bias=False)
        self.slow = nn.ModuleList(nn.Linear(dim, dim, bias=False).requires_grad_(False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow[0].weight.lerp_(self.fast.weight, 0.1)
                self.slow[1].weight.data.mul_(0.9).add_(0.1 * self.fast.weight.data)
        x = self.embedding(x) * torch.tanh(self.fast.weight.sum())
        return self.head(self.slow[1](torch.tanh(self.fast(self.slow[0](x)))))


class Odd(nn.Module):
    """[B, S] tokens -> [B, S, 7]: all of them with residuals and a norm between an embedding and a head."""

    def __init__(self, dim: int, time_first: bool = False) -> None:
        super().__init__()
        self.embedding, self.time_first = nn.Embedding(11, dim), time_first
        kinds = (Router, OddNumber, OddNumber, Matrices, Otherwise, Multiplied, InPlace)
        normed = [nn.Sequential(norm(dim), nn.Linear(dim, dim)) for norm in (RootMeanSquare, ByHand)]
        self.blocks = nn.ModuleList([*normed, *(kind(dim) for kind in kinds)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x.transpose(0, 1).contiguous() if self.time_first else x
        for block in self.blocks:
            x = x + block(self.norm(x))
        x = self.head(x)
        return x.transpose(0, 1) if self.time_first else x


class Pictures(nn.Module):
    """A convolution in front, a class token whose row alone is read."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(2, 12, 2, 2), nn.Parameter(torch.randn(1, 1, 12))
        self.block, self.norm, self.head = InPlace(12), ByHand(12), nn.Linear(12, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.block(self.norm(x))[:, 0])


ODD: dict[str, Callable[[], nn.Module]] = {
    "batch first": lambda: Odd(12),
    "time first, sizes that nothing divides": lambda: Odd(13, time_first=True),
    "pictures": Pictures,
    "copies": lambda: Copying(12),
}


def of_odd(name: str, rows: tuple[int, ...] = (6, 5, 4)) -> Case:
    def make() -> Any:
        torch.manual_seed(8)
        model, batches = ODD[name](), []
        for n in rows:
            draw = torch.Generator().manual_seed(n)
            if name == "pictures":
                x = {"images": torch.randn(n, 2, 4, 4, generator=draw).double()}
                targets = torch.randint(7, (n,), generator=draw)
            else:
                x = {"x": torch.randint(11, (n, 5), generator=draw)}
                targets = torch.randint(7, (n, 5), generator=draw)
            batches.append({**x, "targets": targets})
        return model, losses.cross_entropy("targets"), batches

    return Case(name, make, adamw)


def odd(name: str, plan: str, ranks: int):
    return check(of_odd(name), plan, ranks)


@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        swept("batch first", GRID + ",zero=1", 4),
        swept("time first, sizes that nothing divides", GRID + ",zero=1", 4),
        ("pictures", GRID + ",zero=1", 4),
        ("copies", GRID, 4),
        swept("copies", DEEP, 8),
        swept("copies", CUBE, 8),
        swept("time first, sizes that nothing divides", WIDE, 6),
        swept("batch first", CUBE + ",zero=1", 8),
        ("time first, sizes that nothing divides", CUBE + ",zero=1", 8),
        swept("pictures", CUBE + ",zero=1", 8),
    ],
)
def test_odd_models(ranks_of: Callable[[int], Pool], name: str, plan: str, ranks: int) -> None:
    for row in ranks_of(ranks).run(odd, name, plan, ranks, ranks=ranks, deadline=DEADLINE):
        assert row.worst <= BOUND, row


def one_row_each(plan: str, ranks: int):
    return check(of_odd("pictures", (2, 2, 3)), plan, ranks)


@pytest.mark.parametrize(("plan", "ranks"), [swept(GRID, 4), (CUBE, 8)])
def test_one_row_of_the_batch_for_each_part(ranks_of: Callable[[int], Pool], plan: str, ranks: int) -> None:
    """In a cube ranks of row or tp then have no row at all."""
    for row in ranks_of(ranks).run(one_row_each, plan, ranks, ranks=ranks, deadline=DEADLINE):
        assert row.worst <= BOUND, row
