"""Losses that keep something from call to call equal the sequential program's, or are refused."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.test_kept import Plain, tokens_of
from torch import Tensor, nn

from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from soli.engine.remembered import Remembering
from soli.losses import LossFn
from soli.verify.parity import BOUND, Case, adamw, check
from sweep import spread

PLAIN = losses.cross_entropy("targets")
Annealed = tuple[Tensor, float]
calls = 0


def annealed(output: Tensor, batch: Any, step: int) -> Annealed:
    """A second term whose weight grows with the step."""
    total, count = PLAIN(output, batch)
    return total + min(1.0, step / 5) * output.square().sum() / 100, float(count)


def by_list() -> LossFn:
    steps = [0]

    def loss(output: Tensor, batch: Any) -> Annealed:
        steps[0] += 1
        return annealed(output, batch, steps[0])

    return loss


def by_variable() -> LossFn:
    step = 0

    def loss(output: Tensor, batch: Any) -> Annealed:
        nonlocal step
        step += 1
        return annealed(output, batch, step)

    return loss


def by_global() -> LossFn:
    global calls
    calls = 0
    return of_global


def of_global(output: Tensor, batch: Any) -> Annealed:
    global calls
    calls += 1
    return annealed(output, batch, calls)


class Schedule:
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.steps = {"done": 0}

    def loss(self, scale: int, output: Tensor, batch: Any) -> Annealed:
        self.steps["done"] += scale
        total, count = annealed(output, batch, self.steps["done"])
        self.seen.append(float(total.detach()))
        return total, count


def by_attribute() -> LossFn:
    return functools.partial(Schedule().loss, 1)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, output: Tensor, batch: Any) -> Annealed:
        self.step += 1
        return annealed(output, batch, int(self.step))


def by_function() -> LossFn:
    def loss(output: Tensor, batch: Any) -> Annealed:
        loss.calls = getattr(loss, "calls", 0) + 1  # type: ignore[attr-defined]
        return annealed(output, batch, loss.calls)  # type: ignore[attr-defined]

    return loss


def by_window() -> LossFn:
    seen = deque[int](maxlen=2)

    def loss(output: Tensor, batch: Any) -> Annealed:
        seen.append(1)
        return annealed(output, batch, len(seen))

    return loss


def by_both() -> LossFn:
    """Of an attribute and a global of one name, the second counts."""

    def loss(output: Tensor, batch: Any) -> Annealed:
        CALLS[0] += 1
        return annealed(output, batch, CALLS[0])

    CALLS[0] = 0
    loss.CALLS = "its calls are counted"  # type: ignore[attr-defined]
    return loss


def by_made() -> LossFn:
    """A window that the first call makes."""

    def loss(output: Tensor, batch: Any) -> Annealed:
        loss.seen = getattr(loss, "seen", deque[int](maxlen=2))  # type: ignore[attr-defined]
        loss.seen.append(1)  # type: ignore[attr-defined]
        return annealed(output, batch, len(loss.seen))  # type: ignore[attr-defined]

    return loss


class Averaged:
    """A loss relative to what it was in the last calls, from the third on."""

    def __init__(self) -> None:
        self.window = deque[float](maxlen=8)

    def __call__(self, output: Tensor, batch: Any) -> Annealed:
        total, count = PLAIN(output, batch)
        self.window.append(float(total.detach()) / float(count))
        mean = sum(self.window) / len(self.window) if len(self.window) > 2 else 1.0
        return total / mean, float(count)


class Centred:
    """As DINO's centre of what a teacher says (arXiv 2104.14294, 3.1): a mean over the rows that were seen."""

    def __init__(self) -> None:
        self.center = torch.zeros(29, dtype=torch.float64)

    def __call__(self, output: Tensor, batch: Any) -> Annealed:
        total, count = PLAIN(output, batch)
        total = total + (output - self.center).square().sum() / 100
        self.center = 0.9 * self.center + 0.1 * output.detach().mean((0, 1))
        return total, float(count)


CALLS = [0]
KINDS = [by_list, by_variable, by_global, by_attribute, by_function, by_window, by_both, by_made, Module]
PLANS = ["dp=1", "dp=2,zero=1", "dp=2,accumulate=2", "pp=2,microbatches=4", "tp=2", "cp=2,recompute=full"]


def case_of(kind: Callable[[], LossFn]) -> Case:
    def make() -> Any:
        torch.manual_seed(3)
        return Plain(), kind(), [tokens_of(n, i) for i, n in enumerate((8, 9, 7))]

    return Case(kind.__name__, make, adamw)


def outcome(kind: Callable[[], LossFn], plan: str) -> float | str:
    try:
        return check(case_of(kind), plan, 0).worst
    except SoliError as error:
        return str(error)


@pytest.mark.parametrize(("kind", "plan"), spread([(kind,) for kind in KINDS], [(plan,) for plan in PLANS]))
def test_what_counts_calls_counts_steps(pool: Pool, kind: Callable[[], LossFn], plan: str) -> None:
    for found in pool.run(outcome, kind, plan, ranks=1 if plan == "dp=1" else 2):
        assert isinstance(found, float), found
        assert found < BOUND


@pytest.mark.parametrize(("kind", "name"), [(Centred, "center"), (Averaged, "window")])
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_kept_of_the_rows_is_refused_where_they_are_taken_apart(pool: Pool, kind: Callable[[], LossFn], name: str, plan: str) -> None:
    for found in pool.run(outcome, kind, plan, ranks=1 if plan == "dp=1" else 2):
        if plan in ("dp=1", "tp=2", "cp=2,recompute=full"):
            assert isinstance(found, float), found
            assert found < BOUND
        else:
            assert "keeps something of the rows" in str(found)
            assert name in str(found)


def test_a_meter_beside_dropout_in_a_loss_is_not_taken_for_draws_that_rows_change() -> None:
    seen = deque[float](maxlen=50)

    def loss(output: Tensor, batch: Any) -> Annealed:
        total, count = PLAIN(torch.nn.functional.dropout(output, 0.1), batch)
        seen.append(float(total.detach()))
        return total, float(count)

    torch.manual_seed(3)
    engine = parallelize(Plain(), loss, optimizer=adamw, plan="dp=1,accumulate=2")
    engine.step(tokens_of(8, 0))
    assert len(seen) == 2


def test_evaluation_goes_on_and_trials_leave_no_trace() -> None:
    model, loss_fn, batches = case_of(by_list).make()
    steps = loss_fn.__closure__[0].cell_contents
    engine = parallelize(model, loss_fn, optimizer=adamw, plan="auto", example=batches[0])
    assert steps == [0]
    engine.step(batches[0])
    engine.step(batches[1])
    assert steps == [2]
    engine.evaluate(batches)
    assert steps == [5]


def test_a_meter_has_every_microbatch() -> None:
    schedule = Schedule()
    model, _, batches = case_of(by_attribute).make()
    engine = parallelize(model, functools.partial(schedule.loss, 1), optimizer=adamw, plan="dp=1,accumulate=2")
    loss = engine.step(batches[0])
    assert len(schedule.seen) == 2
    assert sum(schedule.seen) / engine.last.count == pytest.approx(float(loss), rel=1e-6)
    assert schedule.steps == {"done": 1}


def test_a_loss_that_keeps_nothing_is_no_longer_looked_at() -> None:
    loss = Remembering(PLAIN)
    output, batch = torch.zeros(2, 6, 29), tokens_of(2, 0)
    assert loss(output, batch)[1] == 12
    assert not loss.kept


class Node:
    def __init__(self, after: Any) -> None:
        self.after, self.calls = after, 0


def test_a_long_chain_of_objects_is_not_followed_to_its_end() -> None:
    chain: Any = None
    for _ in range(3000):
        chain = Node(chain)

    def counted(output: Tensor, batch: Any) -> Annealed:
        chain.calls += 1
        return output.sum() * chain.calls, 1

    loss = Remembering(counted)
    assert float(loss(torch.ones(3), None)[0]) == float(loss(torch.ones(3), None)[0]) == 3
    assert chain.calls == 0


def test_tensors_that_cannot_be_compared_are_left_alone() -> None:
    """A loss over a graph, whose matrix is sparse: it is no state, and a call leaves the counter beside it as it was."""
    matrix, steps = torch.eye(3, dtype=torch.float64).to_sparse(), [0]

    def loss(output: Tensor, batch: Any) -> Annealed:
        steps[0] += 1
        return torch.sparse.mm(matrix, output).sum() * steps[0], 3.0

    remembering, output = Remembering(loss), torch.ones(3, 2, dtype=torch.float64)
    assert [float(remembering(output, None)[0]) for _ in range(2)] == [6.0, 6.0]
    assert steps == [0]
    assert not remembering.by_rows
