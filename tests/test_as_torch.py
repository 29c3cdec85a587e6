"""What torch's own calls do in corners, the engine's do: clipping, copies, counts, indices, keywords; or they are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pool import Pool
from soli import losses, parallelize
from soli.core import copies
from soli.core.errors import SoliError
from soli.engine import check as looked
from soli.verify.parity import BOUND, Case, adamw, check

EPSILON = torch.finfo(torch.float64).eps


def linear(rows: int = 4, outputs: int = 1) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(3, outputs).double(), (torch.randn(rows, 3).double(), torch.randn(rows, outputs).double())


def trained(model: nn.Module, loss_fn: Any = None, plan: str = "dp=1", **more: Any) -> Any:
    return parallelize(model, loss_fn or losses.mse(1), optimizer=lambda p: torch.optim.SGD(p, lr=1.0), plan=plan, **more)


@pytest.mark.parametrize(("norm", "limits"), [(2e-7, [1e-6]), (0.9995e-3, [1e-3]), (0.5, [0.1, 0.5]), (0.5, [0.5, 0.1])])
def test_gradients_are_clipped_as_torch_does(norm: float, limits: list[float]) -> None:
    """By the limit over the norm and 1e-6, if that is less than 1; and what was clipped once stays so."""
    (alone, (x, y)), (model, batch) = linear(), linear()
    before = alone.weight.detach().clone()
    gradients = torch.autograd.grad(F.mse_loss(alone(x), y), list(alone.parameters()))
    scale = norm / float(torch.cat([g.flatten() for g in gradients]).norm())
    (F.mse_loss(alone(x), y) * scale).backward()
    norms = [float(nn.utils.clip_grad_norm_(alone.parameters(), limit)) for limit in limits]
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    engine = trained(model, lambda output, batch: ((output - batch[1]).square().sum() * scale, batch[1].numel()))
    engine.forward_backward(batch)
    assert [engine.clip(limit) for limit in limits] == pytest.approx(norms, rel=64 * EPSILON)
    engine.update()
    moved, wanted = (one.weight.detach() - before for one in (model, alone))
    assert float((moved - wanted).norm()) <= 64 * EPSILON * float(before.norm())


class Keeping(nn.Module):
    """A module that keeps a result, with its graph, as weight_norm does and experts keep their auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(3, 1), None

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.kept = {"loss": out.pow(2).sum(), "all": [out]}
        return out


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("make", [Keeping, lambda: nn.utils.weight_norm(nn.Linear(3, 1)), lambda: nn.utils.spectral_norm(nn.Linear(3, 1))])
def test_a_model_whose_modules_keep_results_has_copies(make: Any) -> None:
    _, batch = linear()
    engine = trained(make().double())
    engine.step(batch)
    copied = engine.copy_model().eval()
    engine.model.eval()
    assert torch.equal(copied(batch[0]), engine.model(batch[0]))
    pair = copies.deep((engine.model, 1))  # as a trial has them
    assert torch.equal(pair[0](batch[0]), engine.model(batch[0]))


def test_what_a_loss_takes_out_is_there_for_the_step() -> None:
    """The first step's looks call it too."""
    model, (x, y) = linear()
    state = {"first": 10.0}
    want = 10 * F.mse_loss(model(x), y).item()
    engine = trained(model, lambda output, batch: ((output - batch[1]).square().sum() * state.pop("first", 1.0), batch[1].numel()))
    assert float(engine.step((x, y))) == pytest.approx(want, rel=64 * EPSILON)
    assert state == {}


def test_modes_that_come_back_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, batch = linear()
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Linear(3, 1)).double()
    engine, looks, real = trained(model, plan="dp=1,accumulate=2"), [], looked.FirstStep.check
    monkeypatch.setattr(looked.FirstStep, "check", lambda *args, **kwargs: (looks.append(1), real(*args, **kwargs))[1])
    for step in range(6):
        model[1].train(step % 2 == 0)
        engine.step(batch)
    assert len(looks) == 2


def other_batches(kind: str) -> str:
    """Each rank's own global batch from the second step on."""
    model, _ = linear()
    rank = torch.distributed.get_rank()

    def loss(output: Tensor, batch: Any) -> Any:
        return ((output - torch.as_tensor(np.array(batch["y"]))) ** 2).sum(), len(output)

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Any, weight: float = 1.0) -> Tensor:
            return self.inner(torch.as_tensor(np.array(x))) * weight

    engine = trained(Weighed(), loss, "dp=2")
    for step in range(3):
        drawn = np.random.default_rng(step + 10 * rank * (kind == "arrays") * bool(step))
        x, y = drawn.normal(size=(4, 3)), drawn.normal(size=(4, 1))
        batch: dict[str, Any] = {"x": x, "y": y} if kind == "arrays" else {"x": torch.tensor(x), "y": torch.tensor(y)}
        batch |= {"x": x[::-1], "y": y[::-1], "id": 2**64 + step, "raw": np.zeros(4, dtype=">f4")} if kind == "as they lie" else {}
        batch |= {"weight": 0.5 + 0.25 * rank * bool(step)} if kind == "number" else {}
        try:
            engine.step(batch)
        except SoliError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", ["arrays", "number", "alike", "as they lie"])
def test_ranks_are_given_the_same_arrays_and_numbers(pool: Pool, kind: str) -> None:
    for said in pool.run(other_batches, kind, ranks=2):
        assert ("batch" in said and "differ" in said) == (kind in ("arrays", "number")), said


def evaluated() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1)).double()
    engine = trained(model, plan="dp=2")
    batches = [(torch.randn(n, 3).double(), torch.randn(n, 1).double()) for n in (8, 4, 1)]
    engine.step(batches[0])
    engine.evaluate(batches[1:2])
    try:
        engine.evaluate(batches[1:])
    except SoliError as error:
        return str(error)
    return ""


def test_norms_without_running_statistics_need_rows_in_evaluation_too(pool: Pool) -> None:
    for said in pool.run(evaluated, ranks=2):
        assert "the ranks normalise the batch together" in said


class Glue(nn.Module):
    """An operation between a column and a row."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.up, self.down, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        self.mixed, self.of = nn.Parameter(torch.randn(8, 8)), of

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(self.of(self, self.up(x), tokens)))


OPERATIONS = {
    "axis": lambda m, h, t: h + h.sum(axis=1, keepdims=True),
    "mean": lambda m, h, t: h - torch.mean(h, axis=-1, keepdims=True),
    "type": lambda m, h, t: h * (t > 3).unsqueeze(-1).type(h.type()),
    "other": lambda m, h, t: torch.matmul(other=m.mixed, input=h),
    "last": lambda m, h, t: h + torch.take_along_dim(h, torch.full((*h.shape[:-1], 1), -1), -1),
}


def tokens(steps: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randint(12, (4, 8), generator=generator)
    return [{"tokens": draw(), "targets": draw()} for _ in range(steps)]


def done(name: str, plan: str) -> Any:
    make = lambda: (Glue(OPERATIONS[name]), losses.cross_entropy("targets"), tokens())
    try:
        return check(Case(name, make, adamw), plan, 2)
    except SoliError as error:
        return str(error)


@pytest.mark.parametrize("plan", ["tp=2", "cp=2", "tp=2,sp=on"])
def test_keywords_and_indices_from_the_end_mean_what_they_mean(pool: Pool, plan: str) -> None:
    for name in OPERATIONS:
        for row in pool.run(done, name, plan, ranks=2):
            assert not isinstance(row, str), (name, row)
            assert row.worst <= BOUND, row


def outside(kind: str, plan: str) -> str:
    """An index of the third batch is outside of what torch takes."""
    batches = tokens(3)
    batches[2]["targets"][1, 1] = -100 if kind == "target" else 1
    at = 9 if kind == "column" else 3

    def of(model: Any, h: Tensor, t: Tensor) -> Tensor:
        return h + h[:, at if model.late else 3].unsqueeze(1)

    def loss(output: Tensor, batch: Any) -> Any:
        return -output.log_softmax(-1).gather(-1, batch["targets"].unsqueeze(-1)).sum(), batch["targets"].numel()

    model = Glue(of).double()
    engine = trained(model, loss, plan)
    for number, batch in enumerate(batches):
        model.late = number == 2
        try:
            engine.step(batch)
        except (SoliError, IndexError, RuntimeError) as error:
            return f"{number} {type(error).__name__}: {error}"
    return "ran"


@pytest.mark.parametrize("kind", ["target", "column"])
def test_an_index_outside_is_an_error_where_the_dim_is_cut_too(pool: Pool, kind: str) -> None:
    for said in pool.run(outside, kind, "tp=2", ranks=2):
        assert said.startswith("2 "), said
        assert "out of" in said or "outside" in said, said


def weighed(plan: str) -> Any:
    """A mean by weights, which begin to differ in later rows alone."""

    def make() -> tuple[nn.Module, Any, list[Any]]:
        batches = []
        for batch in tokens():
            weights = torch.ones(4, 8, 12).double()
            weights[2:, 4:] = 0.0
            batches.append({"tokens": batch["tokens"], "y": F.one_hot(batch["targets"], 12).double(), "weights": weights})

        def loss(output: Tensor, batch: Any) -> Any:
            return F.mse_loss(output, batch["y"], weight=batch["weights"]) * batch["weights"].sum(), batch["weights"].sum()

        return Glue(lambda m, h, t: h), loss, batches

    try:
        return check(Case("weighed", make, adamw), plan, 2).worst
    except SoliError as error:
        return str(error)


@pytest.mark.parametrize("plan", ["tp=2", "cp=2", "dp=2"])
def test_a_mean_by_weights_is_torchs_or_refused(pool: Pool, plan: str) -> None:
    for found in pool.run(weighed, plan, ranks=2):
        assert "a mean by weights" in found if isinstance(found, str) else found <= BOUND, found
