"""What a program does to its model between steps: modes hold, changes that training could not follow are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.test_kept import DIM, Plain, case_of
from torch import Tensor, nn

from soli.core.errors import SoliError
from soli.engine.engine import Engine, parallelize
from soli.verify.parity import BOUND, adamw, check
from soli.verify.pool import Pool


class Frozen(Plain):
    """The statistics and the dropout of its second layer are off, as a fine-tuning program has them."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.4))

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].eval()


def error_and_modes(plan: str) -> tuple[float, list[bool]]:
    case = case_of(Frozen)
    model, loss_fn, batches = case.make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    engine.evaluate([batches[1]])
    return check(case, plan, 0).worst, [module.training for module in engine.model.modules()]


@pytest.mark.parametrize("plan", ["dp=2,zero=3,recompute=full", "tp=2", "pp=2,microbatches=2"])
def test_modules_in_evaluation_mode_stay_so(pool: Pool, plan: str) -> None:
    expected = [module.training for module in Frozen().modules()]
    for error, modes in pool.run(error_and_modes, plan, ranks=2):
        assert error < BOUND
        assert modes == expected


def test_a_model_in_evaluation_mode_is_trained_and_it_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, loss_fn, batches = case_of(Plain).make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan="dp=1")
    for batch in batches:
        model.eval()
        engine.step(batch)
    assert model.training
    assert capsys.readouterr().out.count("the model was in evaluation mode") == 1


def exchanged(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def tied(model: nn.Module) -> None:
    model.head.weight = model.embed.weight


def frozen(model: nn.Module) -> None:
    model.embed.requires_grad_(False)


def hooked(model: nn.Module) -> None:
    model.embed.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def replaced(model: nn.Module) -> None:
    model.head.bias.data = torch.zeros_like(model.head.bias)


def written(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.bias.fill_(0.5)


def attempt(plan: str, change: Callable[[nn.Module], None]) -> tuple[str, Tensor]:
    """What the second step says after a change, and the bias then."""
    model, loss_fn, batches = case_of(Plain).make()
    engine: Engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    change(engine.model)
    try:
        engine.step(batches[1])
    except SoliError as error:
        return str(error), torch.empty(0)
    return "", engine.global_state_dict()["head.bias"]


@pytest.mark.parametrize(
    ("change", "plan", "said"),
    [
        (exchanged, "dp=2", "exchanged for others"),
        (tied, "dp=2,zero=1", "got     head.weight"),
        (frozen, "tp=2", "frozen or unfrozen"),
        (hooked, "dp=2,zero=1", "got     embed.weight"),
        (replaced, "dp=2,zero=1", "got     head.bias\n"),
        (replaced, "dp=2,zero=1", "or write in place"),
        (replaced, "dp=2,zero=3", "use zero=0"),
    ],
)
def test_changes_that_training_cannot_follow_are_refused(
    pool: Pool, change: Callable[[nn.Module], None], plan: str, said: str
) -> None:
    for text, _ in pool.run(attempt, plan, change, ranks=2):
        assert said in text


@pytest.mark.parametrize(
    ("change", "plan"),
    [(replaced, "dp=2"), (written, "dp=2"), (written, "dp=2,zero=1"), (written, "dp=2,zero=2")],
)
def test_changes_that_it_can_follow_are_followed(
    pool: Pool, change: Callable[[nn.Module], None], plan: str
) -> None:
    (alone, sequential), *_ = pool.run(attempt, "dp=1", change, ranks=1)
    assert not alone
    for text, bias in pool.run(attempt, plan, change, ranks=2):
        assert not text
        torch.testing.assert_close(bias, sequential, rtol=1e-10, atol=1e-12)
