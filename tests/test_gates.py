"""Weights that begin as zeros (gates, second matrices of adapters): what is behind them is refused where a plan does it otherwise, though no
loss of a first step shows it; and programs that are right train as alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from soli.verify.parity import BOUND, Case, adamw, check

DIM = 12


class Gated(nn.Module):
    """Three layers between an embedding and a head, and something behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(29, DIM), nn.Linear(DIM, 29)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(DIM))
        self.begin()

    def begin(self) -> None:
        pass

    def behind(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.gate * self.behind(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Remembering(Gated):
    """What the rows before were."""

    def begin(self) -> None:
        self.last: list[Tensor] = []

    def behind(self, x: Tensor) -> Tensor:
        self.last.append(x.detach().mean((0, 1)))
        return x * self.last[max(len(self.last) - 3, 0)]


class Fitting(Gated):
    """What the first rows of all set for good."""

    def begin(self) -> None:
        self.centre: Tensor | None = None

    def behind(self, x: Tensor) -> Tensor:
        self.centre = x.detach().mean((0, 1)) if self.centre is None else self.centre
        return x - self.centre


class Counting(Gated):
    """An adapter whose scale grows with its calls, as a warm-up does."""

    def begin(self) -> None:
        self.gate.requires_grad_(False)
        self.calls, self.first, self.second = 0, nn.Parameter(torch.randn(3, DIM)), nn.Parameter(torch.zeros(DIM, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(tokens)
        return super().forward(tokens) + self.head(x @ self.first.t() @ self.second.t() * self.calls / 10)


class Flagging(Gated):
    """Its first call is another one."""

    def begin(self) -> None:
        self.warm = False

    def behind(self, x: Tensor) -> Tensor:
        warm, self.warm = self.warm, True
        return x * (2.0 if warm else 1.0)


class Following(Gated):
    """An average of a weight that begins as the weight."""

    def begin(self) -> None:
        self.slow = self.head.weight.detach().clone().double()

    def behind(self, x: Tensor) -> Tensor:
        if self.training:
            self.slow = torch.lerp(self.slow, self.head.weight.detach(), 0.1)
        return torch.tanh(x @ self.slow.t() @ self.slow)


class Centred(Gated):
    """Rows that are coupled behind a gate and before a head of zeros: neither has a gradient that shows it."""

    def begin(self) -> None:
        nn.init.zeros_(self.head.weight)

    def behind(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Signs(Gated):
    """Gradients by their signs alone."""

    def begin(self) -> None:
        self.inner = nn.Linear(DIM, DIM)

    def behind(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.sign() * 0.01)
        return y


class Watching(Gated):
    """Keeps what it computed for others to look at, how often, and an average of it: nothing comes of them."""

    def begin(self) -> None:
        self.calls, self.seen, self.mean, self.sizes = 0, list[Tensor](), torch.zeros(DIM, dtype=torch.float64), {1: 1.0}

    def behind(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.detach())
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x * self.sizes.setdefault(len(x), 1.0)


class Replacing(Gated):
    """Gives its gate other memory, of its values, and remembers where it began."""

    def begin(self) -> None:
        self.began: list[Tensor] = []

    def behind(self, x: Tensor) -> Tensor:
        self.gate.data = self.gate.data.clamp(-1, 1)
        self.began = self.began or [self.gate.detach().clone(), *copy.deepcopy(self.layers[0]).parameters()]
        return x * (1 + self.gate - self.began[0])


class Choosing(Gated):
    """Weights that stay zeros, as an index; and a root and a logarithm of a gate."""

    def begin(self) -> None:
        self.choice = nn.Parameter(torch.zeros(1))

    def behind(self, x: Tensor) -> Tensor:
        table = torch.ones(1, dtype=x.dtype)
        return x * table[torch.ceil(self.choice.detach()).long()] + (1 + self.gate).sqrt() + torch.log1p(self.gate)


class Bare(Choosing):
    """Where such a weight's numbers are none once it is open."""

    def behind(self, x: Tensor) -> Tensor:
        return x + (-self.choice.detach()).sqrt()


class Residual(Gated):
    """As residual networks begin: the last norm of a branch has weights of zeros, its head too."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(DIM)
        nn.init.zeros_(self.norm.weight)
        nn.init.zeros_(self.head.weight)

    def behind(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.norm(x.transpose(1, 2)).transpose(1, 2)


def case_of(kind: type[Gated]) -> Case:
    def make() -> Any:
        torch.manual_seed(3)
        return kind(), losses.cross_entropy("targets"), [tokens_of(n, i) for i, n in enumerate((8, 9, 7))]

    return Case(kind.__name__, make, adamw)


def tokens_of(rows: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(29, (rows, 7), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}


def error_of(kind: type[Gated], plan: str) -> float:
    return check(case_of(kind), plan, 0).worst


def refusal(kind: type[Gated], plan: str) -> str:
    model, loss_fn, batches = case_of(kind).make()
    try:
        engine = parallelize(model.double(), loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
        engine.step(batches[0])
    except SoliError as error:
        return str(error)
    return "it ran"


BY_ROWS, RUNS = "changes what the model keeps by the rows that it sees", "changes what the model keeps, and"
OPEN = "in float64, with small numbers in weights that begin as zeros"


@pytest.mark.parametrize(
    ("kind", "plans", "said"),
    [
        (Remembering, ("accumulate=2", "dp=2,zero=3", "tp=2,accumulate=2"), (BY_ROWS, "last")),
        (Fitting, ("accumulate=2", "dp=2"), (BY_ROWS, "centre")),
        (Counting, ("accumulate=2", "recompute=full", "pp=2,microbatches=2"), (RUNS, "calls")),
        (Flagging, ("accumulate=2", "zero=3,accumulate=2"), (RUNS, "warm")),
        (Following, ("accumulate=2", "recompute=full"), (RUNS, "slow")),
        (Centred, ("accumulate=2", "dp=2", "tp=2,accumulate=2"), ("something couples the rows", OPEN)),
        (Signs, ("dp=1", "accumulate=2", "tp=2"), ("gradients do not grow with the loss", OPEN)),
    ],
)
def test_what_a_closed_gate_hides_is_seen(pool: Pool, kind: type[Gated], plans: tuple[str, ...], said: tuple[str, str]) -> None:
    for plan in plans:
        ranks = 2 if any(way in plan for way in ("dp=2", "tp=2", "pp=2")) else 1
        for text in pool.run(refusal, kind, plan, ranks=ranks):
            assert all(words in text for words in said), (plan, text)


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        (Gated, ("accumulate=2", "recompute=full", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2")),
        (Remembering, ("dp=1", "tp=2")),
        (Centred, ("dp=1", "tp=2")),
        (Watching, ("accumulate=2", "dp=2,zero=3", "tp=2,accumulate=2")),
        (Replacing, ("dp=1", "accumulate=2", "dp=2")),
        (Choosing, ("accumulate=2", "dp=2,zero=3", "tp=2")),
        (Bare, ("accumulate=2", "dp=2,zero=3")),
        (Residual, ("dp=1", "dp=2,zero=3", "tp=2")),
    ],
)
def test_what_is_right_behind_a_gate_trains_as_alone(pool: Pool, kind: type[Gated], plans: tuple[str, ...]) -> None:
    for plan in plans:
        ranks = 2 if any(way in plan for way in ("dp=2", "tp=2", "pp=2")) else 1
        assert max(pool.run(error_of, kind, plan, ranks=ranks)) < BOUND, plan
