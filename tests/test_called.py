"""What counts its calls, or keeps something from one to the next, where a rank has no row, a batch another size, or a forward fills what its loss empties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.test_kept import DIM, Plain, case_of
from tests.test_scripts import sgd
from torch import Tensor, nn
from torch.nn import functional as F

from pool import Pool
from soli import parallelize
from soli.core.errors import SoliError
from soli.parallel.tensor.check import _furthest
from soli.verify.parity import BOUND

SIZES = (4, 4, 1, 4, 3)


class Counting(Plain):
    """Each forward in training is told apart by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(tokens) * (1 + 0.1 * self.calls)


def counting() -> Callable[[Any, Any], tuple[Tensor, int]]:
    """A loss with a weight that grows with its calls, to a limit."""
    calls = [0]

    def loss(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        calls[0] += 1
        return each_of(out, batch).sum() + min(1.0, 0.1 * calls[0]) * out.square().sum(), len(out)

    return loss


def averaging() -> Callable[[Any, Any], tuple[Tensor, int]]:
    """A loss that is divided by its own running mean."""
    kept: dict[str, Tensor] = {}

    def loss(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        each = each_of(out, batch)
        now = each.detach().mean()
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * now if kept else now
        return (each / kept["mean"]).sum(), len(out)

    return loss


def each_of(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.mT, batch["targets"], reduction="none").mean(1)


def summing() -> Callable[[Any, Any], tuple[Tensor, int]]:
    return lambda out, batch: (each_of(out, batch).sum(), len(out))


def batches(sizes: tuple[int, ...]) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{name: torch.randint(0, 29, (n, 6), generator=draw) for name in ("tokens", "targets")} for n in sizes]


def by_hand(kind: type[nn.Module], make_loss: Any, sizes: tuple[int, ...], before: Any = lambda number, model: None) -> list[float]:
    model, loss_fn = case_of(kind).make()[0].double().train(), make_loss()
    optimizer, found = sgd(model.parameters()), []
    for number, batch in enumerate(batches(sizes)):
        before(number, model)
        total, count = loss_fn(model(batch["tokens"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        found.append(float(total / count))
    return found


def by_soli(plan: str, kind: type[nn.Module], make_loss: Any, sizes: tuple[int, ...], before: Any = lambda number, model: None) -> list[float]:
    model, found = case_of(kind).make()[0].double(), []
    engine = parallelize(model, make_loss(), optimizer=sgd, plan=plan)
    for number, batch in enumerate(batches(sizes)):
        before(number, model)
        found.append(float(engine.step(batch)))
    return found


def alike(found: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)) < BOUND


ONCE = [("dp=2", 2), ("dp=2,zero=2", 2), ("dp=2,zero=3", 2), ("dp=2,tp=2", 4)]
"""Plans that run a forward once a step: of more a model that counts its own is refused."""
COUNTED = [(Counting, summing, *each) for each in ONCE] + [(Plain, counting, *each) for each in (*ONCE, ("dp=2,accumulate=2", 2), ("dp=2,pp=2,microbatches=2", 4))]


@pytest.mark.parametrize(("kind", "make_loss", "plan", "ranks"), COUNTED)
def test_what_counts_calls_counts_on_ranks_without_rows(pool: Pool, plan: str, ranks: int, kind: Any, make_loss: Any) -> None:
    expected = by_hand(kind, make_loss, SIZES)
    assert all(alike(found, expected) for found in pool.run(by_soli, plan, kind, make_loss, SIZES, ranks=ranks))


class Writing(Plain):
    """It writes into what it is given."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.add_(29) - 29)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_a_row_that_is_kept_for_ranks_without_rows_stays_as_it_is(pool: Pool, plan: str) -> None:
    expected = by_hand(Writing, counting, (4, 1, 1, 1, 4))
    assert all(alike(found, expected) for found in pool.run(by_soli, plan, Writing, counting, (4, 1, 1, 1, 4), ranks=2))


class Branching(Plain):
    """A row takes one of two ways."""

    def layer(self) -> nn.Module:
        return Branch()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        taken = x[:, 0, 0] > 0
        return sum(way(x) * mine[:, None, None] for way, mine in zip(self.ways, (taken, ~taken), strict=True) if mine.any())


def branches_of(plan: str) -> list[float]:
    """Of a last batch of one row, by an optimizer that moves what has a gradient of zeros."""
    model, found = case_of(Branching).make()[0].double(), []
    engine = parallelize(model, summing(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), plan=plan)
    for batch in batches((8, 8, 1, 1, 8)):
        found.append(float(engine.step(batch)))
    return found


@pytest.mark.parametrize(("plan", "ranks"), [("dp=2", 2), ("dp=2,zero=2", 2), ("dp=2,pp=2,microbatches=1", 4)])
def test_what_no_row_of_a_batch_uses_is_not_used_by_an_earlier_row(pool: Pool, plan: str, ranks: int) -> None:
    expected = branches_of("dp=1")
    assert all(alike(found, expected) for found in pool.run(branches_of, plan, ranks=ranks))


SEEN = [0]


def metering(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    SEEN[0] += len(out)
    return each_of(out, batch).sum(), len(out)


def seen_by(plan: str) -> int:
    SEEN[0] = 0
    by_soli(plan, Plain, lambda: metering, SIZES)
    return SEEN[0]


def test_meters_see_the_rows_of_their_batches_alone(pool: Pool) -> None:
    assert sum(pool.run(seen_by, "dp=2", ranks=2)) == sum(SIZES)


@pytest.mark.parametrize("sizes", [(4, 4, 3, 5), (4, 2, 6, 2)])
def test_a_batch_of_another_size_moves_what_a_loss_keeps_once(pool: Pool, sizes: tuple[int, ...]) -> None:
    expected = by_hand(Plain, averaging, sizes)
    assert all(alike(found, expected) for found in pool.run(by_soli, "pp=2,microbatches=1", Plain, averaging, sizes, ranks=2))
    assert alike(by_soli("dp=1", Plain, averaging, sizes), expected)


def still_from_the_third(number: int, model: nn.Module) -> None:
    if number == 2:
        model.layers[0].eval()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,accumulate=2"])
def test_a_loss_that_counts_is_looked_at_again_when_a_module_changes_its_mode(pool: Pool, plan: str) -> None:
    expected = by_hand(Plain, counting, SIZES, still_from_the_third)
    assert all(alike(found, expected) for found in pool.run(by_soli, plan, Plain, counting, SIZES, still_from_the_third, ranks=2))


# --- what a forward fills and its loss empties ----------------------------------------------------------------


BALANCE: list[Tensor] = []


class Balanced(Plain):
    """Blocks put what balances them into a list of the program's, as MegaBlocks and Megatron-LM do."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            BALANCE.append(x.square().sum())
        return self.head(x)


def emptying() -> Callable[[Any, Any], tuple[Tensor, int]]:
    def loss(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        total = each_of(out, batch).sum() + 0.01 * sum(BALANCE)
        BALANCE.clear()
        return total, len(out)

    return loss


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "dp=2,accumulate=2"])
def test_a_list_of_the_programs_that_forwards_fill_and_the_loss_empties(pool: Pool, plan: str) -> None:
    expected = by_hand(Balanced, emptying, (4, 4, 6))
    assert alike(by_soli("dp=1", Balanced, emptying, (4, 4, 6)), expected)
    assert alike(by_soli("dp=1,accumulate=2", Balanced, emptying, (4, 4, 6)), expected)
    assert all(alike(found, expected) for found in pool.run(by_soli, plan, Balanced, emptying, (4, 4, 6), ranks=2))


class Many(Balanced):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Identity() for _ in range(1100))


def test_a_list_that_forwards_of_many_modules_fill() -> None:
    assert alike(by_soli("dp=1,accumulate=2", Many, emptying, (4, 4, 6)), by_hand(Many, emptying, (4, 4, 6)))


CALLS = [0]


class Globally(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        CALLS[0] += 1
        return super().forward(tokens)


def annealed(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return each_of(out, batch).sum() * (1 + 0.1 * CALLS[0]), len(out)


@pytest.mark.parametrize("plan", ["dp=1,accumulate=2", "dp=2,accumulate=2"])
def test_what_a_forward_counts_in_a_global_is_not_taken_for_the_losses(pool: Pool, plan: str) -> None:
    for said in pool.run(refused, plan, Globally, lambda_of_annealed, ranks=2) if "dp=2" in plan else [refused(plan, Globally, lambda_of_annealed)]:
        assert "computes another loss when it is called again" in said


def lambda_of_annealed() -> Any:
    return annealed


# --- what is between blocks -----------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Tensor


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, state: State) -> State:
        return State(state.hidden + torch.tanh(self.inner(state.hidden)))


class InDataclasses(Plain):
    def layer(self) -> nn.Module:
        return Boxed()

    def forward(self, tokens: Tensor) -> Tensor:
        state = State(self.embed(tokens))
        for layer in self.layers:
            state = layer(state)
        return self.head(state.hidden)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,zero=3,accumulate=2"])
def test_dataclasses_between_blocks_whose_weights_are_gathered(pool: Pool, plan: str) -> None:
    expected = by_hand(InDataclasses, summing, (4, 6))
    assert all(alike(found, expected) for found in pool.run(by_soli, plan, InDataclasses, summing, (4, 6), ranks=2))


class Jagged(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.nested.nested_tensor(list(self.embed(tokens).unbind()), layout=torch.jagged)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.stack([self.head(one) for one in x.unbind()])


class Mean(nn.Module):
    """Of each of a nested tensor's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(one) for one in x.unbind()])


class MadeJagged(Plain):
    """Blocks take rows apart themselves."""

    def layer(self) -> nn.Module:
        return Mean()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged))
        return self.head(x)


class Mapped(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.vmap(lambda row: row * row.softmax(0))(self.embed(tokens))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def refused(plan: str, kind: type[nn.Module], make_loss: Any = summing) -> str:
    try:
        by_soli(plan, kind, make_loss, (4,))
    except SoliError as error:
        return str(error)
    return "it ran"


def test_what_no_stage_can_hand_on_is_refused_in_words(pool: Pool) -> None:
    said = pool.run(refused, "pp=2,microbatches=2", Jagged, ranks=2)
    assert any("tensors that are not nested" in text for text in said), said
    said = pool.run(refused, "pp=2,microbatches=2", MadeJagged, ranks=2)
    assert any("a nested tensor goes from stage to stage" in text for text in said), said
    said = pool.run(refused, "pp=2,chunks=2,schedule=interleaved,microbatches=2", Mapped, ranks=2)
    assert any("use pp=1" in text and "meta" not in text for text in said), said


def test_a_tensor_that_is_no_number_is_the_furthest_off_wherever_it_comes() -> None:
    one, nan = torch.ones(1), torch.full((1,), float("nan"))
    expected = {"output 0": one, "output 1": one}
    for got in ({"output 0": nan, "output 1": one}, {"output 0": one, "output 1": nan}):
        assert _furthest(None, expected, got, {}, None, None)[0] == float("inf")
    masked = torch.tensor([1.0, -torch.inf, 3.0])
    assert _furthest(None, {"output 0": masked}, {"output 0": masked.clone()}, {}, None, None) == (0.0, "")
    assert _furthest(None, {"output 0": masked}, {"output 0": torch.tensor([1.0, -torch.inf, 4.0])}, {}, None, None)[0] == 1 / 3
