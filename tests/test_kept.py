"""Programs that keep something from forward to forward: they equal the sequential one, or are refused."""

from __future__ import annotations

import copy
import os
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soli
from noted import noted
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.engine import parallelize
from soli.parallel import models
from soli.verify.parity import BOUND, Case, adamw, check
from sweep import spread, swept

DIM = 12


class Plain(nn.Module):
    """Three layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(29, DIM), nn.Linear(DIM, 29)
        self.layers = nn.ModuleList(self.layer() for _ in range(3))

    def layer(self) -> nn.Module:
        return nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Spectral(Plain):
    """Vectors of each weight that every forward improves, whatever the rows."""

    def layer(self) -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM))


class Hooked(Plain):
    """The same by a hook that makes the weight before the layer runs."""

    def layer(self) -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(DIM, DIM))


class Average(Plain):
    """A moving average of what the rows are, changed after the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x - self.mean))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * x.detach().mean((0, 1)))
        return self.head(x)


class Copying(Plain):
    """Moving averages of weights, which begin as the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slow", self.head.weight.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.slow.lerp_(self.head.weight.detach(), 0.1)
        return super().forward(tokens) + torch.tanh(self.embed(tokens)) @ self.slow.t()


class Overwritten(Copying):
    """The same, made anew by each forward: it remembers nothing."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.slow.copy_(self.head.weight.detach())
        return Plain.forward(self, tokens) + torch.tanh(self.embed(tokens)) @ self.slow.t()


class Rounding(Copying):
    """The same, in a way that rounds: the first forward moves it by an epsilon, and the second nothing."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.slow.copy_(self.slow * 0.9 + self.head.weight.detach() * 0.1)
        return Plain.forward(self, tokens) + torch.tanh(self.embed(tokens)) @ self.slow.t()


class Teacher(Plain):
    """Weights that do not train begin as others, and follow them in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def follow(self, slow: nn.Parameter, quick: Tensor) -> None:
        slow.lerp_(quick, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, quick in zip(self.slow.parameters(), self.head.parameters(), strict=True):
                    self.follow(slow, quick)
        return super().forward(tokens) + torch.tanh(self.slow(self.embed(tokens)))


class Exchanging(Teacher):
    """The same, in other memory each time."""

    def follow(self, slow: nn.Parameter, quick: Tensor) -> None:
        slow.data = slow * 0.9 + quick * 0.1


class Queue(Plain):
    """What forwards saw, in a list, of which the last two count once they are there; its object is held by another too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = []
        self.held = {"seen": [self.seen], "last": None}

    def add(self, x: Tensor) -> None:
        self.seen.append(x)
        self.held["last"] = x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if len(self.seen) >= 2:
            x = x + torch.stack(list(self.seen)[-2:]).mean(0)
        if self.training:
            self.add(x.detach().mean((0, 1)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Replaced(Queue):
    """Each time a list of its own."""

    def add(self, x: Tensor) -> None:
        self.seen = [*self.seen, x]


class Seldom(Queue):
    """Two places for ever, written in turn in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = deque([torch.zeros(DIM, dtype=torch.float64) for _ in range(2)])

    def add(self, x: Tensor) -> None:
        self.seen.rotate()
        self.seen[0].copy_(x)


class Assigned(Copying):
    """The same, by a tensor that takes the place of the one before; and one in a list, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.also = [self.head.weight.detach().clone().double()]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.slow = torch.lerp(self.slow, self.head.weight.detach(), 0.1)
            self.also[0].lerp_(self.head.weight.detach(), 0.1)
        return Plain.forward(self, tokens) + torch.tanh(self.embed(tokens)) @ (self.slow + self.also[0]).t()


class Formed(Plain):
    """Buffers that each forward brings to a form which they have; a monitor that nothing comes of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.ones(DIM, DIM).tril())
        self.scale = torch.ones(1, dtype=torch.float64)
        self.wide = self.scale.expand(DIM)
        self.monitor = self.head.weight.detach().clone().double()

    def forward(self, tokens: Tensor) -> Tensor:
        self.low.tril_()
        self.scale.clamp_(0.5, 2.0)
        self.monitor.lerp_(self.head.weight.detach(), 0.1)
        x = self.embed(tokens) @ self.low * self.wide
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Kinds(Plain):
    """Keeps what is nothing to look into, or refers to itself; counts by a dict of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter(a=3)
        self.tree: dict[str, Any] = {}
        self.tree["child"] = [{"parent": self.tree}]
        self.sparse = [
            torch.eye(DIM, dtype=torch.float64).to_sparse(),
            torch.eye(DIM, dtype=torch.float64).to_sparse_csr(),
        ]
        self.frozen = _Frozen(a=1.0)
        self.long = list(range(20_000))
        self.word: Any = "none"

    def forward(self, tokens: Tensor) -> Tensor:
        self.word = []
        x = self.embed(tokens) * self.seen["a"] * self.frozen["a"] * (1 + len(self.long) / 40_000)
        x = torch.sparse.mm(self.sparse[0], x.flatten(0, 1).t()).t().view_as(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class _Frozen(OrderedDict[str, float]):
    """As configurations are that nobody may change."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise AttributeError("nobody may change it")

    clear = update  # type: ignore[assignment]


class Shaping(Plain):
    """Asks a layer's weight for its type alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        start = self.layers[2].weight.new_zeros(x.shape) + torch.zeros_like(self.layers[1].bias)
        for layer in self.layers:
            x = x + torch.tanh(layer(x + start))
        return self.head(x)


class Recorder(Plain):
    """Results that it keeps for others to look at, and a table by what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.tables: dict[int, Tensor] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        size = len(tokens)
        if size not in self.tables:
            self.tables[size] = torch.ones(size, 1, 1, dtype=torch.float64)
        x = self.embed(tokens) * self.tables[size]
        self.maps.append(x.detach())
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Warming(Plain):
    """An average of what the rows are, from the fourth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.training:
            self.count += 1
            if self.count > 3:
                self.mean.lerp_(x.detach().mean((0, 1)), 0.3)
        for layer in self.layers:
            x = x + torch.tanh(layer(x - self.mean))
        return self.head(x)


class Looking(Plain):
    """A forward that asks for the size of a layer's weights, before that layer runs; NaN is no error there."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.layers[1].weight.norm() > 0.5:
            x = x / 2
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Inside(Plain):
    """A layer that asks for its own; and what belongs to no block, anywhere."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.embed.weight.norm() > 0.5:
            x = x / 2
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Once(Plain):
    """A table that the first forward builds: it stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.places.numel() < tokens.shape[1]:
            self.places = torch.arange(tokens.shape[1]).double()
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * (1 + self.places[:, None] / 10)
        return self.head(x)


class Recurrent(Plain):
    """Refers to its weights weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.rnn = nn.LSTM(DIM, DIM, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class Normal(Plain):
    """Statistics of the whole batch, which each row is computed with, and of which averages are kept."""

    def layer(self) -> nn.Module:
        return nn.BatchNorm1d(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x.transpose(1, 2)).transpose(1, 2))
        return self.head(x)


class Bare(Plain):
    """Neither scales nor averages: in evaluation too it is of the batch."""

    def layer(self) -> nn.Module:
        return nn.BatchNorm1d(DIM, affine=False, track_running_stats=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x.flatten(0, 1))).view_as(x)
        return self.head(x)


class Acting(Bare):
    """A norm of somebody's library, whose own forward calls the function and goes on."""

    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            averages = (self.running_mean, self.running_var) if self.training else (None, None)
            x = nn.functional.batch_norm(x, *averages, self.weight, self.bias, True, 0.3, self.eps)
            return torch.relu(x)

    def layer(self) -> nn.Module:
        return self.Norm(DIM)


class Contrast(Plain):
    """Each row is what it is beside the others."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x - x.mean(0, keepdim=True))


class Both(Normal):
    """Each row is what it is beside the others, and what couples them else is a norm's."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x - x.mean(0, keepdim=True)


def tokens_of(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(29, (rows, 7), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}


class Flagged(Plain):
    """Its first forward is another one, and says so to the others, in an attribute or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.first = True

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens) * (2.0 if self.first else 1.0)
        self.end()
        return out

    def end(self) -> None:
        self.first = False


class FlaggedBuffer(Flagged):
    def begin(self) -> None:
        self.register_buffer("first", torch.ones(()))

    def end(self) -> None:
        self.first.zero_()


class Fitted(Plain):
    """The first rows ever seen set its centre, in an attribute, for good."""

    def __init__(self) -> None:
        super().__init__()
        self.fit: dict[str, Tensor] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if "centre" not in self.fit:
            self.fit["centre"] = x.detach().mean((0, 1))
        return super().forward(tokens) + self.head(torch.tanh(x - self.fit["centre"]))


class Sharing(Plain):
    """Other names of a weight's memory, which follow it as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.share()

    def share(self) -> None:
        self.register_buffer("table", self.head.weight.data)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + torch.tanh(self.embed(tokens)) @ self.table.reshape(DIM, 29)


class SharingView(Sharing):
    def share(self) -> None:
        self.table = self.head.weight.detach().t()


class SharingInList(Sharing):
    def share(self) -> None:
        self.held = {"tables": [self.head.weight.data]}

    @property
    def table(self) -> Tensor:
        return self.held["tables"][0]


class SharingInTuple(SharingInList):
    def share(self) -> None:
        self.held = {"tables": (self.head.weight.data, "table")}


class SharingInMixedTuple(Sharing):
    def share(self) -> None:
        self.held = (self.head.weight.data, "table")

    @property
    def table(self) -> Tensor:
        return self.held[0]


class Columns(Sharing):
    """Weights that are columns of one matrix: each lies between the other's rows."""

    def share(self) -> None:
        self.table = self.head.weight
        whole = self.layers[0].weight.detach().repeat(1, 2)
        self.layers[0].weight, self.layers[1].weight = (nn.Parameter(x) for x in whole.chunk(2, 1))


class ColumnsInCommon(Columns):
    def share(self) -> None:
        super().share()
        whole = self.layers[0].weight.detach().repeat(1, 2)
        self.layers[0].weight, self.layers[1].weight = nn.Parameter(whole[:, :DIM]), nn.Parameter(whole[:, DIM - 1 : -1])


class SharingWeight(Sharing):
    def share(self) -> None:
        self.table = nn.Parameter(self.head.weight.data)


class Tied(Sharing):
    """One weight in two places, and weights that are pieces of one memory."""

    def share(self) -> None:
        self.table = self.head.weight
        whole = self.layers[0].weight.detach().repeat(2, 1)
        self.layers[0].weight, self.layers[1].weight = (nn.Parameter(x) for x in whole.chunk(2))


def case_of(kind: type[nn.Module]) -> Case:
    def make() -> Any:
        torch.manual_seed(3)
        return kind(), losses.cross_entropy("targets"), [tokens_of(n, i) for i, n in enumerate((8, 9, 7))]

    return Case(kind.__name__, make, adamw)


def error_of(kind: type[nn.Module], plan: str) -> float:
    return check(case_of(kind), plan, 0).worst


@pytest.mark.parametrize("kind", [Flagged, FlaggedBuffer])
def test_a_flag_that_the_first_forward_sets_is_there_for_the_second_microbatch(kind: type[nn.Module]) -> None:
    assert error_of(kind, "dp=1") < BOUND
    for plan in ("dp=1,accumulate=2", "dp=1,recompute=full"):
        assert "changes what the model keeps, and" in refusal(kind, plan)


class Rebound(Plain):
    """Gives the name of a buffer to another tensor: a buffer, a part of one, a weight, as rotary embeddings do that follow the length."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = to
        self.register_buffer("table", torch.arange(1.0, 1 + 2 * DIM * DIM).reshape(2 * DIM, DIM) / DIM)
        self.register_buffer("used", torch.ones(DIM, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        self.used = {"buffer": self.table[:DIM], "weight": self.layers[1].weight.detach()}[self.to]
        return super().forward(tokens) + 0.1 * self.used.sum()


@pytest.mark.parametrize("to", ["buffer", "weight"])
def test_a_buffer_that_becomes_another_tensor_is_put_back_and_not_written_into(to: str) -> None:
    """What it had held before was copied into the other one."""
    model, alone = Rebound(to).double(), Rebound(to).double()
    alone.load_state_dict(model.state_dict())
    engine = parallelize(model, losses.cross_entropy("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in (tokens_of(n, i) for i, n in enumerate((8, 9, 7))):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(alone(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        optimizer.step()
        assert torch.allclose(engine.step(batch), loss, rtol=BOUND, atol=0)
    assert all(torch.allclose(a, b, rtol=BOUND, atol=BOUND) for a, b in zip(model.state_dict().values(), alone.state_dict().values(), strict=True))


def test_what_the_first_rows_set_for_good_is_seen(pool: Pool) -> None:
    assert error_of(Fitted, "dp=1") < BOUND
    for plan in ("dp=2", "dp=2,zero=3"):
        assert all("changes what the model keeps by the rows that it sees" in said for said in pool.run(refusal, Fitted, plan, ranks=2))
    assert max(pool.run(error_of, Fitted, "tp=2", ranks=2)) < BOUND


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Sharing, "table"), (SharingView, "table"), (SharingInList, "held"), (SharingWeight, "table"), (SharingInTuple, "held"), (SharingInMixedTuple, "held"), (ColumnsInCommon, "layers.1.weight in layers.0.weight"), (Tied, ""), (Columns, "")],
)
def test_memory_of_a_weight_has_one_name_where_it_is_put_elsewhere(kind: type[nn.Module], name: str) -> None:
    assert error_of(kind, "dp=1") < BOUND
    for plan in ("zero=1", "zero=3"):
        said = refusal(kind, plan)
        assert said == "it ran" if kind in (Tied, Columns) else ("lie in the memory of weights that train" in said and name in said)
    found = models.problems(kind(), Plan.parse("dp=1,tp=2")), models.problems(kind(), Plan.parse("dp=1,pp=2"))
    assert [len(problems) for problems in found] == [kind not in (Tied, Columns)] * 2


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Spectral, "dp=2,zero=3"),
        (Hooked, "dp=2,zero=3"),
        (Spectral, "tp=2"),
        (Spectral, "pp=2,microbatches=1"),
        (Average, "cp=2"),
        (Average, "tp=2"),
        (Once, "dp=2,accumulate=2,recompute=full"),
        (Once, "pp=2,microbatches=4"),
        (Recurrent, "pp=2,microbatches=4"),
        (Recurrent, "dp=2,zero=3,accumulate=2"),
    ],
)
def test_what_is_kept_is_what_one_forward_keeps(pool: Pool, kind: type[nn.Module], plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=2))


@pytest.mark.parametrize(
    ("kind", "plan"), spread([(Normal,), (Contrast,)], [("tp=2,sp=on",), ("cp=2",), ("pp=2,microbatches=1",)])
)
def test_rows_may_depend_on_each_other_where_all_are_together(pool: Pool, kind: type[nn.Module], plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=2))


APART = ["dp=2", "tp=2,accumulate=2", "pp=2,microbatches=2", "tp=4,tensor=2d"]


@pytest.mark.parametrize(
    ("kind", "said", "plan"),
    [
        *((Contrast, "run with dp=1, tensor=1d and no", plan) for plan in APART),
        *((Normal, "plans of dp and zero, without accumulate", plan) for plan in APART[1:]),
        (Normal, "got     layers.0, layers.1, layers.2, plan dp=2,recompute=full", "dp=2,recompute=full"),
        (Both, "couples the rows", "dp=2"),
    ],
)
def test_rows_that_depend_on_each_other_are_not_taken_apart(
    pool: Pool, kind: type[nn.Module], said: str, plan: str
) -> None:
    for text in pool.run(refusal, kind, plan, ranks=4 if "2d" in plan else 2):
        assert said in text


def normal(kind: type[nn.Module], plan: str) -> dict[str, Tensor]:
    """All weights and statistics after three steps and an evaluation between them."""
    model, loss_fn, batches = case_of(kind).make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan)
    for batch in batches:
        engine.step(batch)
        engine.evaluate([batch])
    return engine.global_state_dict()


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        swept(Normal, "dp=2"),
        (Normal, "dp=3,zero=1"),
        (Normal, "dp=4,replicate=2,zero=3"),
        (Bare, "dp=2,zero=2"),
        (Acting, "dp=2"),
    ],
)
def test_batch_normalisation_is_over_all_ranks(pool: Pool, kind: type[nn.Module], plan: str) -> None:
    ranks = int(plan[3])
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=ranks))
    (expected,) = pool.run(normal, kind, "dp=1", ranks=1)
    for found in pool.run(normal, kind, plan, ranks=ranks):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def first_statistics(plan: str) -> Tensor:
    """Of the first norm after one step: what it normalises is the same on any rank, to the bit."""
    model, loss_fn, batches = case_of(Normal).make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    state = engine.global_state_dict()
    return torch.cat([state["layers.0.running_mean"], state["layers.0.running_var"]])


def test_batch_normalisation_in_sixteen_bits(pool: Pool) -> None:
    """Sums are of 32: the ranks' statistics are those of one process to the rounding of so many terms."""
    (expected,) = pool.run(first_statistics, "dp=1,precision=bf16", ranks=1)
    terms = 8 * 6
    for found in pool.run(first_statistics, "dp=2,precision=bf16", ranks=2):
        bound = terms * torch.finfo(torch.float32).eps * float(expected.abs().max())
        assert float((found - expected).abs().max()) <= bound


def few_values(rows: int, size: int) -> str:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    engine = parallelize(Net(), losses.mse("y"), optimizer=adamw, plan="dp=2")
    torch.manual_seed(0)
    data = [{"x": torch.randn(3), "y": torch.randn(4)} for _ in range(rows)]
    try:
        for batch in engine.batches(data, size):
            engine.step(batch)
    except (SoliError, ValueError) as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize(
    ("rows", "size", "said"), [(5, 4, "normalise the batch together, and some have no row"), (6, 2, "it ran")]
)
def test_ranks_that_normalise_together_have_rows(pool: Pool, rows: int, size: int, said: str) -> None:
    for text in pool.run(few_values, rows, size, ranks=2):
        assert said in text


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        (Spectral, "dp=2,accumulate=2", "dp=2,accumulate=2 runs it 2 times a step"),
        (Spectral, "pp=2,microbatches=4", "runs it 4 times a step"),
        (Spectral, "dp=2,recompute=full", "runs it 2 times a step"),
        (Average, "dp=2", "by the rows that it sees"),
        (Average, "tp=2,accumulate=2", "by the rows that it sees"),
        (Average, "pp=2,microbatches=1", "mean is changed in the forward, and several stages have it"),
    ],
)
def test_what_a_plan_would_keep_otherwise_is_refused(pool: Pool, kind: type[nn.Module], plan: str, said: str) -> None:
    for text in pool.run(refusal, kind, plan, ranks=2):
        assert said in text
        assert ("mean" if kind is Average else "parametrizations.weight.0._u") in text


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        (Copying, "dp=1,accumulate=2", "slow"),
        (Copying, "dp=1,recompute=full", "slow"),
        (Rounding, "dp=1,accumulate=2", "slow"),
        (Teacher, "dp=1,accumulate=2", "slow.bias, slow.weight"),
        (Exchanging, "dp=1,accumulate=2", "slow.bias, slow.weight"),
        (Assigned, "dp=1,accumulate=2", "also, slow"),
        (Queue, "dp=2", "seen"),
        (Replaced, "dp=1,accumulate=2", "seen"),
        (Seldom, "dp=2", "seen"),
        (Looking, "dp=2,zero=3", "layers.1.weight"),
    ],
)
def test_what_was_kept_without_a_word_is_refused(pool: Pool, kind: type[nn.Module], plan: str, said: str) -> None:
    """An average that begins as its weights, lists that are read later, buffers that begin late, a block's weights outside of it."""
    for text in pool.run(refusal, kind, plan, ranks=2 if "dp=2" in plan else 1):
        assert said in text


def late(plan: str, folder: str) -> tuple[int, str, list[str]]:
    """The steps that a buffer got by which begins to follow the rows at the fourth, what was said then, and what of a save before."""
    model, loss_fn, _ = case_of(Warming).make()
    engine = parallelize(model.double(), loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    said = lambda: [event["text"] for event in noted() if "saved as the first" in event["text"]]
    before = len(said())  # of other runs of this process
    notes = lambda: said()[before:]
    try:
        for number in range(8):
            engine.step(tokens_of(8, number))
            if number in (2, 3):
                engine.save(f"{folder}/{number}")
                assert len(notes()) == (number == 3 and engine.dp.size > 1)
    except SoliError as error:
        return engine.step_count, str(error), notes()
    return engine.step_count, "", notes()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_buffers_that_ranks_have_apart_are_seen(pool: Pool, plan: str, tmp_path: Path) -> None:
    """Refused after 1, 3, 7, ... steps, and said wherever they are saved."""
    for found, said, (note,) in pool.run(late, plan, str(tmp_path), ranks=2):
        assert found == 7
        assert "others after 7 steps" in said
        assert "mean" in said
        assert note.endswith("mean")
    assert pool.run(late, "dp=1", str(tmp_path / "alone"), ranks=1) == [(8, "", [])]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Copying, "dp=2"),
        (Copying, "dp=1"),
        (Overwritten, "dp=2,accumulate=2"),
        (Teacher, "dp=2,zero=2"),
        (Exchanging, "dp=2"),
        (Assigned, "dp=2"),
        (Formed, "dp=2,accumulate=2"),
        (Kinds, "dp=2,accumulate=2"),
        (Kinds, "dp=2,zero=3"),
        (Shaping, "dp=2,zero=3"),
        (Queue, "dp=1"),
        (Queue, "tp=2"),
        (Replaced, "dp=1"),
        (Seldom, "dp=1"),
        (Seldom, "tp=2"),
        (Recorder, "dp=2,accumulate=2"),
        (Warming, "dp=1"),
        (Looking, "dp=2,zero=2"),
        (Looking, "tp=2"),
        (Inside, "dp=2,zero=3"),
    ],
)
def test_lists_averages_and_weights_of_others_are_as_in_one_process(
    pool: Pool, kind: type[nn.Module], plan: str
) -> None:
    """What checks run leaves nothing behind in a list, a dict or a deque, nor in tensors in them."""
    ranks = 1 if "dp=1" in plan else 2
    (expected,) = pool.run(trained_alone, kind, ranks=1)
    for found in pool.run(trained_by_soli, kind, plan, ranks=ranks):
        assert found == pytest.approx(expected, rel=BOUND)


def trained_by_soli(kind: type[nn.Module], plan: str) -> list[float]:
    model, loss_fn, batches = case_of(kind).make()
    engine = parallelize(model.double(), loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    return [float(engine.step(batch)) for batch in batches]


def chosen(kind: type[nn.Module], said: str, folder: str) -> tuple[str, list[str], list[str], list[float]]:
    os.environ["SOLI_CACHE"] = folder
    model, loss_fn, batches = case_of(kind).make()
    engine = parallelize(model.double(), loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="auto")
    found = [float(engine.step(batch)) for batch in batches]
    assert engine.choice is not None
    refused = [option.plan for option in engine.choice.options if said in option.refused]
    return str(engine.plan), engine.choice.lines, refused, found


@pytest.mark.parametrize(("kind", "said"), [(Average, "by the rows that it sees"), swept(Contrast, "couples the rows")])
def test_auto_takes_a_plan_that_does_as_one_device(
    pool: Pool, tmp_path: Path, kind: type[nn.Module], said: str
) -> None:
    """Plain data parallelism is looked for first, tried on a copy, and not begun."""
    plan, lines, refused, found = pool.run(chosen, kind, said, str(tmp_path), ranks=2, deadline=120)[0]
    assert refused
    assert plan not in refused
    assert said in lines[2]
    assert found == pytest.approx(trained_alone(kind), rel=BOUND)


def mean_of(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    targets = batch["targets"]
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()), float(targets.numel())


def unchosen(folder: str) -> str:
    os.environ["SOLI_CACHE"] = folder
    engine = parallelize(Average(), mean_of, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="auto")
    with pytest.raises(SoliError) as raised:
        engine.step(tokens_of(8, 0))
    return str(raised.value)


def test_where_no_plan_can_run_it_is_said_why_of_each(tmp_path: Path) -> None:
    """And not that memory is short."""
    first, *rest = unchosen(str(tmp_path)).splitlines()
    assert first == "no plan runs this program as it is"
    assert rest[0].startswith("the loss is a mean over the batch and not a sum")
    assert rest[1].split() == ["got", "dp=1"]
    assert rest[2].split()[:3] == ["fix", "return", "the"]


def trained_alone(kind: type[nn.Module]) -> list[float]:
    model, loss_fn, batches = case_of(kind).make()
    optimizer, found = torch.optim.SGD(model.double().parameters(), lr=0.1), []
    for batch in batches:
        total, count = loss_fn(model(batch["tokens"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        found.append((total / count).item())
    return found


def refusal(kind: type[nn.Module], plan: str) -> str:
    try:
        error_of(kind, plan)
    except SoliError as error:
        return str(error)
    return "it ran"


def trained(plan: str, deferred: bool) -> list[float]:
    torch.manual_seed(3)
    if deferred:
        with soli.deferred():
            model = Recurrent()
    else:
        model = Recurrent()
    loss_fn = losses.cross_entropy("targets")
    engine = parallelize(model, loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    return [float(engine.step(tokens_of(8, seed))) for seed in range(3)]


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,microbatches=2"])
def test_recurrent_modules_may_be_deferred(pool: Pool, plan: str) -> None:
    found = [pool.run(trained, plan, deferred, ranks=2) for deferred in (False, True)]
    assert found[0] == found[1]


class Masked(Plain):
    """It makes a mask in its first forward, keeps it, and drops some of what comes of it."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.dropout = nn.Dropout(p)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(6, 6).tril()
        x = self.embed(tokens)
        return self.head(self.dropout(self.layers[0](self.mask.to(x) @ x)))


def test_dropout_of_a_model_that_keeps_a_mask_is_the_same_in_parts() -> None:
    found = []
    for plan, p in (("dp=1", 0.5), ("dp=1,accumulate=2", 0.5), ("dp=1,recompute=full", 0.5), ("dp=1", 0.0)):
        torch.manual_seed(3)
        loss_fn, batches = case_of(Plain).make()[1:]
        engine = parallelize(Masked(p).double(), loss_fn, optimizer=adamw, plan=plan)
        found.append([float(engine.step(batch)) for batch in batches])
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)
    assert found[3] != pytest.approx(found[0], rel=1e-3)  # something is dropped
