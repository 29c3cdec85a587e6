"""The engine's contract: resume, checkpoints across plans, losses that are means, data order, precision."""

from __future__ import annotations

import gc
import random
import re
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import soli
from noted import noted
from pool import Pool
from soli import losses
from soli.checkpoint.tensorfile import headers
from soli.checkpoint.transfer import export
from soli.core.errors import SoliError
from soli.core.events import events
from soli.core.plan import Plan
from soli.engine import coupling, elementwise
from soli.engine import optimizer as optimizers
from soli.engine.engine import parallelize
from soli.models.gpt import GPT, GPTConfig
from soli.verify import tolerance
from soli.verify.parity import adamw

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
    [("dp=2,zero=3", 2, "dp=1", 1), ("dp=1", 1, "dp=2,zero=1", 2), ("dp=4,replicate=2,zero=2", 4, "dp=3,zero=3", 3)],
)
def test_a_checkpoint_has_no_plan(pool: Pool, tmp_path: Path, first: str, n: int, second: str, m: int) -> None:
    path = str(tmp_path / "c")
    wrote = pool.run(stopped, first, "", path, 12, True, True, False, ranks=n)
    read = pool.run(stopped, "", second, path, 12, True, False, True, ranks=m)
    expected, state = pool.run(straight, "dp=1", 12, ranks=1)[0]
    got = wrote[0][0] + read[0][0]
    bound = tolerance.bound(model(), 6 * 3, 12, torch.float32)
    assert got == pytest.approx(expected, rel=bound)
    for key, value in state.items():
        torch.testing.assert_close(read[0][1][key], value, rtol=bound, atol=bound)


class Placed(nn.Module):
    """Words that tp cuts unevenly, and places that it does not cut: they begin elsewhere in the unit of each of its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.fc = nn.Embedding(11, 8), nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(torch.tanh(self.fc(self.words(x) + self.places(torch.arange(x.shape[1])))), self.words.weight)


def placed(plan: str, path: str, load: bool):
    torch.manual_seed(0)
    x = torch.randint(11, (8, 5))
    batch, loss = {"x": x, "targets": x}, losses.cross_entropy("targets")
    engine = parallelize(Placed(), loss, optimizer=torch.optim.AdamW, plan=plan, example=batch)
    if load:
        engine.load(path)
    else:
        engine.step(batch)
        engine.save(path)
        engine.save(path + "behind", wait=False)
        engine.saving.wait()
    return engine.global_state_dict(optimizer=True)


@pytest.mark.parametrize("zero", [1, 3])
def test_what_tp_does_not_cut_is_saved_once(pool: Pool, tmp_path: Path, zero: int) -> None:
    path, plan = str(tmp_path / "c"), f"dp=2,tp=2,zero={zero}"
    saved = pool.run(placed, plan, path, False, ranks=4)[0]
    assert len(saved) == 16
    for other, ranks, end in (("dp=1", 1, "behind"), ("tp=2", 2, ""), (f"dp=2,tp=2,zero={4 - zero}", 4, "behind")):
        for found in pool.run(placed, other, path + end, True, ranks=ranks):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved)


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


class Augmented:
    """Adds noise of three kinds to its samples."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"x": torch.tensor([float(number), *noise], dtype=torch.float64)}


class Seldom(Augmented):
    """Draws for its last samples alone."""

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(number), random.random() if number > 17 else 0.0])}


class Counted(Augmented):
    """Draws nothing, and has a way to get many at once."""

    many = 0

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(number)])}

    def __getitems__(self, numbers: list[int]) -> list[dict[str, torch.Tensor]]:
        self.many += 1
        return [self[number] for number in numbers]


def drawn(plan: str, workers: int, kind=Augmented):
    """Samples by their numbers, and the default generator's next number."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    engine = engine_for(plan)
    found = [b.data["x"] for b in engine.batches(kind(), 6, epochs=2, workers=workers) if b.rows]
    return torch.cat(found), random.random(), float(np.random.rand())


def test_what_samples_draw_is_theirs(pool: Pool) -> None:
    """Not the rank's, the worker's or the one's before."""
    ((one, *after),) = pool.run(drawn, "dp=1", 0, ranks=1)
    assert len({tuple(row.tolist()[1:]) for row in one}) == 46
    known = {tuple(row.tolist()) for row in one}
    for plan, ranks in (("dp=2", 2), ("dp=3,zero=2", 3), ("", 0)):
        found = pool.run(drawn, plan, 0, ranks=ranks) if plan else [drawn("dp=1", 2)]
        assert {tuple(row.tolist()) for rows, *_ in found for row in rows} == known
        assert all(rest == after for _, *rest in found)


def test_samples_that_draw_late_draw_by_their_number_too(pool: Pool) -> None:
    ((one, *_),) = pool.run(drawn, "dp=1", 0, Seldom, ranks=1)
    known = {tuple(row.tolist()) for row in one}
    assert len({noise for number, noise in known if number > 17}) == 10  # of five samples in two epochs
    for rows, *_ in pool.run(drawn, "dp=2", 0, Seldom, ranks=2):
        assert {tuple(row.tolist()) for row in rows} <= known


def test_a_dataset_that_draws_nothing_is_asked_for_many_at_once() -> None:
    data = Counted()
    list(engine_for("dp=1").batches(data, 4, epochs=1))
    assert data.many == 6


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


class Writing(nn.Linear):
    """Some calls write into the weight what it is."""

    calls, often = 0, 3

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        if self.calls % self.often == 0:
            with torch.no_grad():
                self.weight.mul_(1.0)
        return super().forward(input)


@pytest.mark.parametrize("every", [True, False])
def test_weights_that_some_calls_write_into_are_told(every: bool) -> None:
    """Only the first of the passes in float64 is looked at, where it writes nothing."""
    Writing.calls, Writing.often = 0, 1 if every else 3
    made = nn.Sequential(Writing(4, 3))
    engine = parallelize(made, losses.mse("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="accumulate=2")
    with events.apart():
        engine.step({"input": torch.randn(8, 4), "y": torch.randn(8, 3)})
        assert ["writes into parameters at some calls" in note["text"] for note in noted()] == [True] * (not every)


class Following(nn.Linear):
    """A slow copy follows where there are gradients."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.slow.copy_(self.weight)
        return super().forward(input) + nn.functional.linear(input, self.slow)


def test_passes_with_gradients_may_write_what_others_do_not() -> None:
    made = Following(4, 3)
    made.slow = nn.Parameter(made.weight.detach().clone(), requires_grad=False)
    engine = parallelize(made, losses.mse("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="accumulate=2")
    with events.apart():
        engine.step({"input": torch.randn(8, 4), "y": torch.randn(8, 3)})
        assert noted() == []


def test_a_forward_that_exchanges_a_weight_leaves_it_alone_in_checks() -> None:
    made = nn.Linear(4, 3, bias=False)
    was = made.weight.detach().clone()

    def halved(module: nn.Module, given: Any) -> None:
        module.weight = nn.Parameter(module.weight.detach() * 0.5)

    made.register_forward_pre_hook(halved)
    engine = parallelize(made, losses.mse("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.0), plan="dp=1")
    engine.step({"input": torch.randn(8, 4), "y": torch.randn(8, 3)})
    assert torch.equal(made.weight.detach(), was * 0.5)


@pytest.mark.parametrize(("much", "seen"), [(coupling.MUCH, {8, 4, 2, 1}), (0, {2, 1})])
def test_rows_are_told_to_be_coupled_by_two_where_more_are_much(monkeypatch, much: int, seen: set[int]) -> None:
    """By less than float32's rounding may be."""
    monkeypatch.setattr(coupling, "MUCH", much)
    rows: set[int] = set()

    def little(output, batch):
        rows.update([len(output)] if output.dtype == torch.float64 else [])
        return output.square().sum() + 1e-7 * len(output) * output.mean(0).square().sum(), len(output)

    torch.manual_seed(0)
    engine = parallelize(nn.Linear(4, 3), little, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="accumulate=2")
    with pytest.raises(SoliError, match="couples the rows"):
        engine.step({"input": torch.randn(16, 4)})
    assert rows == seen


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_mean_is_told_from_statistics_of_the_batch(reduction: str) -> None:
    """On one device rows may depend on each other, by as much as a mean is off."""
    told = 0
    for seed in range(20):
        torch.manual_seed(seed)
        batch = {"input": torch.randn(4, 4), "y": torch.randint(0, 3, (4,))}
        made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        made[2].weight.data.mul_(3)
        loss = lambda out, batch: (nn.functional.cross_entropy(out, batch["y"], reduction=reduction), len(out))
        engine = parallelize(made, loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
        try:
            engine.step(batch)
        except SoliError as error:
            told += "is a mean over the batch" in str(error)
    assert told == (20 if reduction == "mean" else 0)


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
    assert "Adafactor does not update element by element" in refused(lambda: (model(), adafactor), {"plan": "zero=1"})
    assert "1 are there" in refused(lambda: (model(), sgd), {"plan": "dp=2"})
    for options in ({"plan": {"dp": 1}}, {"clip": -1.0}, {"clip": 0}, {"roles": {"0.*": "row", "frist.*": "row"}}):
        (name,) = options
        told = refused(lambda: (model(), sgd), {"plan": "dp=1"} | options)
        assert re.search({"plan": "plan is a text", "clip": "above 0, or None", "roles": r"'frist\.\*' is of no weight"}[name], told)
        assert told.count("'0.*'") == 0
    told = refused(lambda: (model(), sgd), {"plan": "dp=1", "roles": {"0.bias": "column", "0.*": "replicated"}})
    assert "'0.bias' is of no matrix" in told
    assert "'0.*'" not in told
    for wrong in (0.0, "1"):
        engine = engine_for("dp=1")
        engine.forward_backward({"x": torch.randn(4, 5), "targets": torch.randn(4, 3)})
        with pytest.raises(SoliError, match="clipped to a norm above 0"):
            engine.clip(wrong)
    with pytest.raises(SoliError, match="model is a module"):
        parallelize(3, losses.mse("targets"), optimizer=sgd, plan="dp=1")
    for loss, words in ((losses.mse, r"call it: soli\.losses\.mse\(\)"), (nn.MSELoss(), "MSELoss is no loss function")):
        with pytest.raises(SoliError, match=words):
            parallelize(model(), loss, optimizer=sgd, plan="dp=1")
    plateau = {"plan": "dp=1", "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}
    assert "ReduceLROnPlateau goes by a metric" in refused(lambda: (model(), sgd), plateau)


class Clipped(torch.optim.SGD):
    """Clips by the norm of all its gradients, as LAMB's trust in them."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.div_(norm.clamp(min=1.0))
        return super().step(closure)


class Factored(torch.optim.SGD):
    """Scales large matrices by their rows."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and min(p.shape) >= 100:
                    p.grad.div_(p.grad.norm(dim=1, keepdim=True))
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p.grad))
        return super().step(closure)


class Late(Clipped):
    """By the norm of all gradients from its third step on."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure) if self.steps > 2 else torch.optim.SGD.step(self, closure)


class Projecting(torch.optim.SGD):
    """As AdamP (arXiv 2006.08217): where a gradient is at right angles to its weight, what points along the weight is left out."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                along = (p * p.grad).sum() / p.norm() / p.grad.norm()
                if along.abs() < 0.1 / p.numel() ** 0.5:
                    p.grad.sub_(p.detach() * (p.grad * p.detach()).sum() / p.detach().square().sum())
        return super().step(closure)


class Measuring(torch.optim.SGD):
    """As D-Adaptation (arXiv 2301.07733): keeps how large the gradients were, for a step size of later."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + sum(float(p.grad.square().sum()) for p in group["params"])
        return super().step(closure)


class Flagged(Clipped):
    """Only where a group says so."""

    def __init__(self, params, lr=0.1, norms=False):
        super().__init__(params, lr=lr)
        self.defaults["norms"] = norms
        for group in self.param_groups:
            group.setdefault("norms", norms)

    def step(self, closure=None):
        flagged = any(group["norms"] for group in self.param_groups)
        return super().step(closure) if flagged else torch.optim.SGD.step(self, closure)


def hooked(params):
    made = torch.optim.SGD(params, lr=0.1)
    made.register_step_pre_hook(lambda optimizer, *_: None)
    return made


def normed(grad):
    return grad / grad.norm()


class Changed(torch.optim.SGD):
    """By what an attribute says that no argument is named as, or a key of a group without a default."""

    def __init__(self, params, change=None):
        super().__init__(params, lr=0.1)
        self._change = change

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                change = group.get("change", self._change)
                p.grad = change(p.grad) if change else p.grad
        return super().step(closure)


class Bounded(Clipped):
    """Clips where it is told to."""

    def __init__(self, params, most=None):
        super().__init__(params, lr=0.1)
        self.limit = most

    def step(self, closure=None):
        return super().step(closure) if self.limit else torch.optim.SGD.step(self, closure)


def set_later(params):
    made = Changed(params)
    made._change = normed
    return made


def patched(params):
    made = torch.optim.SGD(params, lr=0.1)
    of_class = made.step
    made.step = lambda closure=None: (torch.nn.utils.clip_grad_norm_(params, 0.1), of_class())
    return made


class ByPlace(torch.optim.SGD):
    """A rate of its own for each parameter of a group."""

    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad.div_(1 + i)
        return super().step(closure)


class Anchored(torch.optim.SGD):
    """Draws parameters to what they were."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.anchor = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        for p, a in zip((p for group in self.param_groups for p in group["params"]), self.anchor):  # noqa: B905
            p.grad.add_(p.detach() - a)
        return super().step(closure)


class Skipping(torch.optim.SGD):
    """Takes no step, or gives a parameter no gradient, where one is beyond a limit, so many times the last, or not finite."""

    def __init__(self, params, skips, alone=False):
        super().__init__(params, lr=0.1)
        self.skips, self.alone = skips, alone

    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"]]
        for some in [[p] for p in given] if self.alone else [given]:
            norm = sum(p.grad.square().sum() for p in some).sqrt()
            last = self.state[some[0]].setdefault("last", norm)
            self.state[some[0]]["last"] = norm
            if self.skips(norm, last):
                for p in some:
                    p.grad = None
        return super().step(closure)


class Marked(torch.optim.SGD):
    """Divides a gradient by its norm where its parameter is marked, or has a name."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p, name in zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True):
                p.grad = normed(p.grad) if getattr(p, "lars", False) or name == "2" else p.grad
        return super().step(closure)


def marked(params, **said):
    for name, value in said.items():
        setattr(params[0], name, value)
    return Marked(params, lr=0.1)


class Turned(torch.optim.SGD):
    """As Shampoo (arXiv 1802.09568): a matrix by its own eigenvalues, which are none where a gradient is not finite."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / (1 + torch.linalg.eigvalsh(p.grad.outer(p.grad) if p.dim() == 1 else p.grad @ p.grad.mT).max())
        return super().step(closure)


class Kept(torch.optim.SGD):
    """A rate of each parameter, by its id."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.rates = {id(p): 1.0 for group in self.param_groups for p in group["params"]}


class Modes(torch.optim.SGD):
    """As schedule-free ones (arXiv 2405.15682): an evaluation sees other weights than the gradient."""

    def eval(self) -> None:
        pass


class Ahead(torch.optim.Optimizer):
    """As Lookahead (arXiv 1907.08610): a wrapper that does not call Optimizer.__init__, and keeps slow weights."""

    def __init__(self, base):
        self.base, self.steps = base, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.steps % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (Clipped, "dp=2,zero=1", "does not update element by element"),
        (Clipped, "tp=2", "does not update element by element"),
        (Clipped, "pp=2,microbatches=2", "Clipped updates a parameter by others"),
        (Factored, "dp=2,zero=3", "cannot be tried, so whether its states can be cut is not known"),
        (Noisy, "pp=2,microbatches=2", "or by random numbers"),
        (Late, "dp=2,zero=1", "does not update element by element"),
        (Late, "pp=2,microbatches=2", "Late updates a parameter by others"),
        (Projecting, "tp=2", "does not update element by element"),
        (Measuring, "dp=2,zero=2", "does not update element by element"),
        (Measuring, "pp=2,microbatches=2", "Measuring updates a parameter by others"),
        (lambda p: Flagged([{"params": p[:1]}, {"params": p[1:], "norms": True}]), "tp=2", "element by element"),
        (lambda p: Changed(p, normed), "dp=2,zero=1", "does not update element by element"),
        (lambda p: Changed([{"params": p, "change": normed}]), "tp=2", "does not update element by element"),
        (set_later, "dp=2,zero=3", "does not update element by element"),
        (lambda p: Changed(p, lambda g: normed(g) if g.norm() < 0.5 else g), "tp=2", "does not update element by element"),
        (lambda p: Changed(p, lambda g: normed(g) if g.norm() > 1e3 else g), "tp=2", "does not update element by element"),
        (lambda p: Ahead(Changed(p, normed)), "tp=2", "does not update element by element"),
        (lambda p: Bounded(p, 0.1), "pp=2,microbatches=2", "Bounded updates a parameter by others"),
        (patched, "dp=2,zero=1", "or another step than its class has"),
        (lambda p: Ahead(patched(p)), "pp=2,microbatches=2", "or another step than its class has"),
        (ByPlace, "dp=2,zero=1", "by others, by its place among them"),
        (lambda p: Changed(p, lambda g: normed(g) if g.shape[-1:] == (5,) else g), "tp=2", "becomes another in a trial"),
        *((lambda p: Skipping(p, lambda norm, _: norm > 5.3), plan, word) for plan, word in (("dp=2,zero=1", "element by element"), ("pp=2,microbatches=2", "by others"))),
        *((lambda p: Skipping(p, lambda norm, _: not norm.isfinite()), plan, word) for plan, word in (("tp=2", "element by element"), ("pp=2,microbatches=2", "by others"))),
        (lambda p: Skipping(p, lambda norm, _: norm > 0.15, alone=True), "tp=2", "element by element"),
        (lambda p: Skipping(p, lambda norm, last: norm > 50 * last, alone=True), "dp=2,zero=3", "element by element"),
        (Kept, "dp=2,zero=1", "Kept keeps parameters, their ids"),
        (lambda p: torch.optim.SGD([{"params": p, "rates": [{id(p[0]): 1.0}]}], lr=0.1), "dp=2,zero=3", "SGD keeps parameters, their ids"),
        (lambda p: marked(p, mask=torch.ones_like(p[0])), "dp=2,zero=1", "Marked keeps parameters, their ids"),
        (lambda p: marked(p, lars=True), "dp=2,zero=1", "element by element"),
        (lambda p: Marked([(str(i), x) for i, x in enumerate(p)], lr=0.1), "tp=2", "element by element"),
        (Anchored, "pp=2,microbatches=2", "it keeps a tensor of (9, 5), as a parameter is"),
        (Modes, "dp=2,zero=1", "Modes.eval() writes parameters between steps"),
        (hooked, "dp=2,zero=1", "the optimizer has hooks on its step"),
        (hooked, "pp=2,microbatches=2", "the optimizer has hooks on its step"),
    ],
)
def test_optimizers_that_see_more_than_a_rank_has_are_refused(make, plan: str, words: str) -> None:
    made = model()
    optimizer = make(list(made.parameters()))
    found = list(optimizers.problems(optimizer, made, Plan.parse(plan)))
    assert any(words in str(one) for one in found), found


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_optimizers_that_update_by_themselves_are_not(plan: str) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam):
        made = model()
        groups = [{"params": list(made.parameters())[:2]}, {"params": list(made.parameters())[2:], "weight_decay": 0.0}]
        assert not list(optimizers.problems(kind(groups, lr=0.1), made, Plan.parse(plan)))
    made = model()
    scheduled = torch.optim.AdamW(made.parameters(), lr=torch.tensor(0.1))
    torch.optim.lr_scheduler.StepLR(scheduled, 3)
    for one in (scheduled, Ahead(torch.optim.Adam(made.parameters(), foreach=True)), Changed(made.parameters())):
        assert not list(optimizers.problems(one, made, Plan.parse(plan)))
    assert not elementwise.coupling(Turned(model().parameters(), lr=0.1), elementwise.by_parameters)
    matrices = Factored(
        [p for p in model().parameters() if p.dim() == 2], lr=0.1
    )  # by the rows of one matrix: a stage has them all
    assert not elementwise.coupling(matrices, elementwise.by_parameters)
    assert elementwise.coupling(matrices, elementwise.by_elements)


class Whitened(torch.optim.SGD):
    """Keeps a matrix of as many rows and columns as a parameter's first dim (Shampoo's)."""

    largest = 0

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            matrix = torch.outer(p.grad.flatten(), p.grad.flatten()) if p.dim() < 2 else p.grad @ p.grad.mT
            Whitened.largest = max(Whitened.largest, len(matrix))
            p.sub_((matrix @ p.grad.flatten(1) if p.dim() > 1 else matrix @ p.grad).view_as(p), alpha=1e-3)


def test_an_optimizer_of_matrices_is_told_by_small_tensors() -> None:
    """Of a piece of a large matrix under zero they would be of its elements: 9,792 times as many."""
    assert elementwise.coupling(Whitened(model().parameters(), lr=0.1), elementwise.by_elements)
    assert Whitened.largest <= 24


class Chain(torch.optim.SGD):
    """Steps another, which has its own state."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.others = [torch.optim.AdamW(self.param_groups[0]["params"])]

    def step(self, closure=None):
        self.others[0].step()
        return super().step(closure)


def test_states_that_no_checkpoint_would_have_are_told(tmp_path: Path) -> None:
    engine = parallelize(Named(), losses.mse("targets"), optimizer=Chain, plan="dp=1")
    engine.step({"x": torch.randn(4, 5), "targets": torch.randn(4, 3)})
    with pytest.raises(SoliError, match="Chain steps optimizers with states of their own"):
        engine.save(tmp_path / "c")


def test_what_cannot_be_copied_is_shared_by_a_trial() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    optimizer.lock, optimizer.lines = threading.Lock(), (i for i in range(3))
    assert not list(optimizers.problems(optimizer, made, Plan.parse("tp=2")))
    many = torch.optim.AdamW([{"params": [p], "layer_id": i} for i, p in enumerate([nn.Parameter(torch.ones(3, 4)) for _ in range(120)])])
    with patch.object(torch.optim.AdamW, "step", autospec=True, side_effect=torch.optim.AdamW.step) as steps:
        assert not elementwise.coupling(many, elementwise.by_elements)
    assert steps.call_count < 3 * 120  # as many as the largest number would be


class Rated(torch.optim.SGD):
    """A rate of each parameter, by its attribute, which changes, and by its name."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                p.grad.mul_(getattr(p, "rate", 1.0) * (0.5 if "bias" in name else 1.0))
        return super().step(closure)


def rated(plan):
    model = Named()
    engine = parallelize(
        model,
        losses.mse("targets"),
        optimizer=Rated(model.named_parameters(), lr=0.1),
        plan=plan,
        example={"x": torch.ones(4, 5), "targets": torch.ones(4, 3)},
    )
    found = []
    for batch in engine.batches(DATA, 6, epochs=1):
        next(engine.model.parameters()).rate = 0.1 / (1 + len(found))
        found.append(float(engine.step(batch)))
    return found


def test_what_a_program_says_of_a_parameter_is_of_its_pieces_too(pool: Pool) -> None:
    alone = rated("dp=1")
    expected = pytest.approx(alone, rel=tolerance.bound(Named(), 6 * 3, len(alone), torch.float32))
    for plan in ("dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"):
        assert pool.run(rated, plan, ranks=2) == [expected] * 2


def ahead(plan):
    engine = parallelize(
        Named(),
        losses.mse("targets"),
        optimizer=lambda p: Ahead(torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        plan=plan,
        example={"x": torch.ones(4, 5), "targets": torch.ones(4, 3)},
    )
    found = [float(engine.step(batch)) for batch in engine.batches(DATA, 6, epochs=1)]
    if plan == "dp=1":
        return found
    for one in (engine.optimizer, engine.optimizer.base):
        with pytest.raises(SoliError, match="this rank's part of its states"):
            one.state_dict()
    return found


def test_a_wrapper_of_an_optimizer_has_no_hooks_and_trains(pool: Pool) -> None:
    alone = ahead("dp=1")
    expected = pytest.approx(alone, rel=tolerance.bound(Named(), 6 * 3, len(alone), torch.float32))
    for plan in ("pp=2,microbatches=2", "dp=2,zero=1"):
        assert pool.run(ahead, plan, ranks=2) == [expected] * 2


@pytest.mark.parametrize("shared", ["all", "some"])
def test_two_engines_on_a_parameter_are_refused(shared: str) -> None:
    body = nn.Linear(4, 4)
    first, second = nn.Sequential(body, nn.Linear(4, 2)), nn.Sequential(body, nn.Tanh(), nn.Linear(4, 2))
    make = lambda model: parallelize(model, losses.mse(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    make(first)
    with pytest.raises(SoliError, match="another engine trains some") as caught:
        make(first if shared == "all" else second)
    assert ("1.weight" in str(caught.value)) == (shared == "all")


def test_states_of_deferred_parameters_are_refused() -> None:
    """Under every plan: they would have no values."""
    with soli.deferred():
        model = nn.Linear(4, 2)
    with pytest.raises(SoliError, match="Adagrad makes its states when it is built"):
        parallelize(model, losses.mse(1), optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1), plan="dp=1")


def test_losses_are_never_in_16_bits() -> None:
    """What soli's losses make of logits in 16 bits is what fp32 makes of the same."""
    logits, targets = torch.randn(1, 7, 50).bfloat16(), torch.randint(50, (1, 7))
    by_hand = lambda x, y: torch.nn.functional.cross_entropy(x.float()[0], y[0], reduction="sum")
    assert torch.equal(losses.cross_entropy("y")(logits, {"y": targets})[0], by_hand(logits, targets))
    assert torch.equal(losses.causal_lm("y")(logits, {"y": targets})[0], by_hand(logits[:, :-1], targets[:, 1:]))


def test_rows_that_count_nothing_have_no_loss() -> None:
    """What they add would be left out, and what is left out would depend on the plan."""

    def loss(out, batch):
        kept = batch["targets"][:, 0] > 0
        return ((out[kept] - batch["targets"][kept]) ** 2).sum() + (out**2).sum() * 0.1, float(kept.sum())

    engine = parallelize(Named(), loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="accumulate=4")
    targets = torch.ones(8, 3) * (torch.arange(8) >= 2)[:, None]
    with pytest.raises(SoliError, match="no target is counted have a loss"):
        engine.step({"x": torch.randn(8, 5), "targets": targets})


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
        engine.forward_backward({"x": torch.randn(4, 5) * 1e3, "targets": torch.zeros(4, 3)})
        engine.clip()
        engine.discard()  # a loop that looks at the norm by itself
        engine.forward_backward({"x": torch.randn(4, 5) * 1e3, "targets": torch.zeros(4, 3)})
        engine.discard()  # and one that looks at the loss alone
        return found, skipped and engine.last.skipped, engine.loss_scale.scale
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
    assert scale in (0, 2.0**37)  # three steps were too large


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
    return engine.global_state_dict()["weight"], [e["text"] for e in noted()]


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


# --- what a ported loop does between forward_backward and update ------------------------------------------


def line() -> tuple[nn.Module, Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    made = nn.Linear(3, 2)
    engine = parallelize(made, losses.mse(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    return made, engine, (torch.randn(4, 3), torch.randn(4, 2))


@pytest.mark.parametrize(
    "use",
    [
        lambda made: nn.utils.clip_grad_norm_(made.parameters(), 0.1),
        lambda made: nn.utils.clip_grad_value_(made.parameters(), 0.1),
        lambda made: [p.grad.mul_(0.5) for p in made.parameters() if p.grad is not None],
        lambda made: made.weight.grad.norm(),
    ],
)
def test_gradients_are_not_where_a_loop_looks_for_them(use: Any) -> None:
    """Each found None, and did nothing, without a word."""
    made, engine, batch = line()
    engine.forward_backward(batch)
    with pytest.raises(SoliError, match=r"p\.grad is not where soli keeps the gradients"):
        use(made)
    engine.update()
    other, straight, batch = line()
    straight.step(batch)
    assert made.weight.grad is None
    assert torch.equal(made.weight, other.weight)


def test_a_backward_of_its_own_before_the_update_is_refused() -> None:
    made, engine, batch = line()
    engine.forward_backward(batch)
    with pytest.raises(SoliError, match="a backward that is none of a step"):
        made.weight.square().sum().backward()
    engine.update()
    other, straight, batch = line()
    straight.step(batch)
    assert torch.equal(made.weight, other.weight)


def test_a_model_is_deferred_while_another_waits_for_its_update() -> None:
    """Deferred tensors are found among all of the process, what stands in the gradients' place too."""
    _, engine, batch = line()
    engine.forward_backward(batch)
    with soli.deferred():
        made = nn.Linear(3, 2)
    assert made.weight.is_meta
    engine.update()


def test_a_step_that_is_left_out_changes_nothing() -> None:
    made, engine, batch = line()
    before = made.weight.detach().clone()
    first = engine.forward_backward(batch)
    engine.discard()
    assert engine.last.skipped
    assert torch.equal(made.weight, before)
    assert float(engine.step(batch)) == float(first)
    assert not torch.equal(made.weight, before)
    with pytest.raises(SoliError, match="before forward_backward"):
        engine.discard()


def test_a_batch_that_asks_for_gradients_is_refused() -> None:
    _, engine, (x, y) = line()
    with pytest.raises(SoliError, match="would get those of the loss's sum"):
        engine.step((x.requires_grad_(), y))


def written_over(path: str, write: bool) -> str:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    engine = parallelize(made, losses.mse(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="tp=2")
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    if not write:
        engine.step(batch)
        engine.save(path, wait=False)
        assert engine.load(path) == {}  # it is still being written
        try:
            made[0].reset_parameters()
        except SoliError as error:
            return str(error)
        return "it ran"
    engine.load(path)
    with torch.no_grad():
        made[2].bias.mul_(2)
    try:
        engine.step(batch)
    except SoliError as error:
        return str(error)
    return "it ran"


def test_what_is_written_between_load_and_the_first_step_is_not_lost(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(written_over, str(tmp_path / "c"), False, ranks=2):
        assert "kaiming_uniform_ of 0.weight" in said  # every rank would draw the same into its part
    for said in pool.run(written_over, str(tmp_path / "c"), True, ranks=2):
        assert "wrote into parameters or buffers after load()" in said


class OnlyComplex(nn.Module):
    """It has no weight that is real."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.complex128) for sizes in ((3, 8), (8, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.to(torch.complex128))).abs()


def only_complex(plan: str, twice: bool = False) -> list[float]:
    model, draw = OnlyComplex(), torch.Generator().manual_seed(0)
    batch = {name: torch.randn(6, size, generator=draw, dtype=torch.float64) for name, size in (("x", 3), ("y", 2))}

    def distance(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
        output = output + model(batch["x"]) if twice else output
        return (output - batch["y"]).square().sum(), output.numel()

    engine = parallelize(model, distance, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    return [float(engine.step(batch)) for _ in range(3)]


def test_weights_may_all_be_complex(pool: Pool) -> None:
    model = OnlyComplex()
    assert not any(p.is_floating_point() for p in model.parameters())
    for plan in ("dp=2,zero=1", "tp=2"):
        for found in pool.run(only_complex, plan, ranks=2):
            assert found == pytest.approx(only_complex("dp=1"), rel=1e-10)


def complex_saved(plan: str, path: str, loaded: bool) -> list[float]:
    """Losses of two steps after a checkpoint of complex weights is written, or read."""
    draw = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(6, size, generator=draw, dtype=torch.float64) for name, size in (("x", 3), ("y", 2))}
    loss = lambda output, batch: ((output - batch["y"]).square().sum(), output.numel())
    engine = parallelize(OnlyComplex(), loss, optimizer=adamw, plan=plan, example=batch)
    if loaded:
        engine.load(path)
    else:
        engine.step(batch)
        engine.save(path)
    return [float(engine.step(batch)) for _ in range(2)]


def test_complex_weights_are_saved(pool: Pool, tmp_path: Path) -> None:
    """safetensors has no name for pairs of float64."""
    expected = pool.run(complex_saved, "dp=2,zero=3", str(tmp_path / "c"), False, ranks=2)[0]
    for plan in ("tp=2", "dp=2,zero=1"):
        for found in pool.run(complex_saved, plan, str(tmp_path / "c"), True, ranks=2):
            assert found == pytest.approx(expected, rel=1e-10)
    export(tmp_path / "c", tmp_path / "out.safetensors")
    assert headers(tmp_path / "out.safetensors")["up.weight"] == ((8, 3, 2), torch.float64)


class Rounding(OnlyComplex):
    """It asks for float32's complex numbers, as Fourier operators do: what that rounds couples no rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros(len(x), 3, dtype=torch.cfloat)
        z[:] = x
        return self.down(self.up((z * (0.1 + 0.2j)).to(self.up.weight.dtype))).abs().float()


def rounded(plan: str) -> float:
    model, draw = Rounding().to(torch.complex64), torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(6, 3, generator=draw), "y": torch.randn(6, 2, generator=draw)}
    loss = lambda output, batch: ((output - batch["y"]).square().sum(), output.numel())
    return float(parallelize(model, loss, optimizer=adamw, plan=plan).step(batch))


def test_numbers_of_float32s_complex_type_are_judged_in_float64(pool: Pool) -> None:
    for plan in ("dp=2", "tp=2"):
        for found in pool.run(rounded, plan, ranks=2):
            assert found == pytest.approx(rounded("dp=1"), rel=1e-5)


def told_what_a_loss_can_do() -> str:
    try:
        only_complex("tp=2", twice=True)
    except SoliError as error:
        return str(error)
    return "it ran"


def test_a_loss_that_calls_the_model_is_told_what_to_do(pool: Pool) -> None:
    assert all("in a loss: let the forward of a module around it" in said for said in pool.run(told_what_a_loss_can_do, ranks=2))
