"""The engine's contract: resume, checkpoints across plans, losses that are means, data order, precision."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import soli
from soli import losses
from soli.core.errors import SoliError
from soli.core.events import events
from soli.engine.engine import parallelize
from soli.models.gpt import GPT, GPTConfig
from soli.verify import tolerance
from soli.verify.pool import Pool

DATA = [
    {"x": torch.randn(5, generator=torch.Generator().manual_seed(i)), "targets": torch.ones(3) * (i % 3)}
    for i in range(23)
]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x):
        return self.net(x)


def engine_for(plan: str, **options):
    return parallelize(
        Named(),
        losses.mse("targets"),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        clip=1.0,
        plan=plan,
        **options,
    )


def straight(plan: str, steps: int, epochs: int = 9):
    engine = engine_for(plan)
    found = []
    for batch in engine.batches(DATA, 6, epochs=epochs):
        found.append(float(engine.step(batch)))
        if engine.step_count == steps:
            break
    return found, engine.global_state_dict(optimizer=True)


def stopped(first: str, second: str, path: str, steps: int, wait: bool, write: bool, read: bool):
    """Half of the steps under one plan, then the other half under another, in new objects."""
    found: list[float] = []
    if write:
        engine = engine_for(first)
        for batch in engine.batches(DATA, 6, epochs=9):
            found.append(float(engine.step(batch)))
            if engine.step_count == steps // 2:
                break
        engine.save(path, extra={"note": [1, 2]}, wait=wait)
        if engine.saving is not None:
            engine.saving.wait()
    if not read:
        return found, {}
    torch.manual_seed(99)
    again = engine_for(second)
    assert again.load(path) == {"note": [1, 2]}
    for batch in again.batches(DATA, 6, epochs=9):
        found.append(float(again.step(batch)))
        if again.step_count == steps:
            break
    return found, again.global_state_dict(optimizer=True)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2,accumulate=2", "dp=2,zero=3"])
def test_a_stopped_run_equals_a_straight_one_bitwise(pool: Pool, tmp_path: Path, plan: str) -> None:
    whole = pool.run(straight, plan, 12, ranks=2)
    halves = pool.run(stopped, plan, plan, str(tmp_path / "c"), 12, plan.endswith("1"), True, True, ranks=2)
    for (losses_a, state_a), (losses_b, state_b) in zip(whole, halves, strict=True):
        assert losses_a == losses_b
        assert state_a.keys() == state_b.keys()
        assert len(state_a) > 12
        assert all(torch.equal(state_a[key], state_b[key]) for key in state_a)


@pytest.mark.parametrize(
    ("first", "n", "second", "m"),
    [
        ("dp=2,zero=3", 2, "dp=1", 1),
        ("dp=1", 1, "dp=2,zero=1", 2),
        ("dp=4,replicate=2,zero=2", 4, "dp=3,zero=3", 3),
    ],
)
def test_a_checkpoint_has_no_plan(
    pool: Pool, tmp_path: Path, first: str, n: int, second: str, m: int
) -> None:
    path = str(tmp_path / "c")
    wrote = pool.run(stopped, first, "", path, 12, True, True, False, ranks=n)
    read = pool.run(stopped, "", second, path, 12, True, False, True, ranks=m)
    expected, state = pool.run(straight, "dp=1", 12, ranks=1)[0]
    got = wrote[0][0] + read[0][0]
    bound = tolerance.bound(model(), 6 * 3, 12, torch.float32)
    assert got == pytest.approx(expected, rel=bound)
    for key, value in state.items():
        torch.testing.assert_close(read[0][1][key], value, rtol=bound, atol=bound)


def same_state(path: str, plan: str):
    engine = engine_for(plan)
    if plan == "dp=2,zero=3":
        for batch in engine.batches(DATA, 6):
            engine.step(batch)
        engine.save(path)
    else:
        engine.load(path)
    return engine.global_state_dict(optimizer=True)


def test_global_tensors_are_bitwise_equal_after_loading(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    saved = pool.run(same_state, path, "dp=2,zero=3", ranks=2)[0]
    for plan, ranks in (("dp=1", 1), ("dp=3,zero=2", 3), ("dp=4,replicate=2,zero=1", 4)):
        for loaded in pool.run(same_state, path, plan, ranks=ranks):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[key], saved[key]) for key in saved), plan


def orders(plan: str, shuffle: bool):
    engine = engine_for(plan)
    return [batch.data["x"] for batch in engine.batches(DATA, 6, epochs=2, shuffle=shuffle) if batch.rows]


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_plan_changes_the_order_of_the_data(pool: Pool, shuffle: bool) -> None:
    one = torch.cat(pool.run(orders, "dp=1", shuffle, ranks=1)[0])
    parts = pool.run(orders, "dp=2", shuffle, ranks=2)
    sizes = [sum(len(x) for x in part) for part in parts]
    assert sum(sizes) == len(one) == 46
    rebuilt = torch.cat([torch.cat(pair) for pair in zip(*parts, strict=True)])
    assert torch.equal(rebuilt, one)
    assert torch.equal(one[:23].sort(0).values, one[23:].sort(0).values)
    assert torch.equal(one[:23], one[23:]) is not shuffle


def mean_loss(output, batch):
    return (output - batch["targets"]).square().mean(), output.numel()


def coupled(output, batch):
    return (output - output.mean(0)).square().sum(), output.numel()


@pytest.mark.parametrize(
    ("loss", "plan", "words"),
    [
        (mean_loss, "dp=1", "is a mean over the batch"),
        (coupled, "accumulate=2", "couples the rows"),
        (lambda o, b: o.sum(), "dp=1", "returned no (total, count)"),
        (lambda o, b: (o, 1), "dp=1", "no 0-d tensor"),
    ],
)
def test_wrong_losses_are_explained(loss, plan: str, words: str) -> None:
    engine = parallelize(Named(), loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    with pytest.raises(SoliError, match=words.replace("(", r"\(").replace(")", r"\)")) as caught:
        engine.step({"x": torch.randn(8, 5), "targets": torch.randn(8, 3)})
    assert caught.value.exit_code == 2


def refused(make, options: dict[str, object]) -> str:
    made, optimizer = make()
    with pytest.raises(SoliError) as caught:
        parallelize(made, losses.mse("targets"), optimizer=optimizer, **options)
    return str(caught.value)


def test_what_is_refused_before_training() -> None:
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)
    assert "no parameters" in refused(lambda: (nn.Identity(), sgd), {"plan": "dp=1"})
    batchnorm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert "batch normalisation" in refused(lambda: (batchnorm, sgd), {"plan": "accumulate=2"})
    assert "not the model's" in refused(lambda: (model(), sgd(model().parameters())), {"plan": "dp=1"})
    adafactor = lambda p: torch.optim.Adafactor(p)
    assert "Adafactor does not update element by element" in refused(
        lambda: (model(), adafactor), {"plan": "zero=1"}
    )
    assert "1 are there" in refused(lambda: (model(), sgd), {"plan": "dp=2"})


def nan_rows():
    engine = engine_for("dp=2,zero=3")
    batch = {"x": torch.randn(4, 5), "targets": torch.zeros(4, 3)}
    engine.step(batch)
    before = engine.global_state_dict()
    batch["x"][3, 0] = float("nan")
    try:
        engine.step(batch)
    except SoliError as error:
        after = engine.global_state_dict()
        return str(error), all(torch.equal(before[k], after[k]) for k in before)
    return "", False


def test_nan_in_the_data_names_the_rank_and_updates_nothing(pool: Pool) -> None:
    for text, unchanged in pool.run(nan_rows, ranks=2):
        assert "step 2 is not finite on rank 1" in text
        assert unchanged


def half(precision: str):
    engine = engine_for(f"dp=2,zero=2,precision={precision}")
    found = [float(engine.step(batch)) for batch in engine.batches(DATA, 6, epochs=3)]
    if precision == "fp16":
        engine.loss_scale.scale = 2.0**40
        before = engine.global_state_dict()
        engine.step({"x": torch.randn(4, 5) * 1e3, "targets": torch.zeros(4, 3)})
        after = engine.global_state_dict()
        skipped = engine.last.skipped and all(torch.equal(before[k], after[k]) for k in before)
        return found, skipped, engine.loss_scale.scale
    return found, True, 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_follow_float32(pool: Pool, precision: str) -> None:
    expected = pool.run(half, "fp32", ranks=2)[0][0]
    (a, skipped, scale), (b, _, _) = pool.run(half, precision, ranks=2)
    assert a == b
    # Each of a step's three products rounds to 16 bits, and each of the steps adds to it.
    bound = 3 * len(a) * torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float16).eps
    assert a == pytest.approx(expected, rel=bound)
    assert a != expected
    assert skipped
    assert scale in (0, 2.0**39)


def test_evaluation_is_the_mean_over_all_targets() -> None:
    engine = engine_for("dp=1")
    got = engine.evaluate(engine.batches(DATA, 6, shuffle=False, name=None))
    x, t = torch.stack([d["x"] for d in DATA]), torch.stack([d["targets"] for d in DATA])
    assert got == pytest.approx(float((engine.model(x) - t).detach().square().mean()), rel=1e-6)


def different_seeds(_: int):
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    plain = nn.Linear(4, 4)
    engine = parallelize(
        plain, losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=2,zero=3"
    )
    return engine.global_state_dict()["weight"], [e["text"] for e in events.of_kind("note")]


def test_ranks_without_a_seed_start_from_rank_0(pool: Pool) -> None:
    (a, notes), (b, _) = pool.run(different_seeds, 0, ranks=2)
    torch.manual_seed(0)
    assert torch.equal(a, b)
    assert torch.equal(a, nn.Linear(4, 4).weight)
    assert any("rank 0's" in note for note in notes)


def test_gpt_generates_from_a_plain_copy() -> None:
    torch.manual_seed(0)
    engine = soli.parallelize(
        GPT(GPTConfig(vocab=11, dim=8, layers=1, heads=2, context=4)),
        losses.cross_entropy("targets"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    tokens = torch.randint(11, (2, 4))
    assert torch.equal(engine.copy_model()(tokens), engine.model(tokens))


@pytest.mark.parametrize("plan", ["dp=1", "zero=3", "recompute=full,accumulate=2"])
def test_an_engine_that_is_forgotten_frees_its_parameters(plan: str) -> None:
    """Hooks of parameters lie where Python's collector does not look: they must not hold what holds the parameters."""
    model = GPT(GPTConfig(vocab=11, dim=8, layers=2, heads=2, context=4))
    engine = soli.parallelize(
        model, losses.cross_entropy("targets"), optimizer=lambda p: torch.optim.Adam(p, lr=0.1), plan=plan
    )
    tokens = torch.randint(11, (4, 4))
    engine.step({"tokens": tokens, "targets": tokens})
    kept = [weakref.ref(p) for p in model.parameters()]
    del engine, model
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
