"""Many blocks under ZeRO-3, of which ranks have other gradients: what each waits for is issued by the others in one order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases import STEPS, _tokens
from pool import Pool
from soli import losses, parallelize
from soli.core.errors import SoliError
from soli.models.gpt import GPT, GPTConfig
from soli.verify.parity import BOUND, Case, adamw, check
from sweep import spread, swept

BLOCKS = 7


def deep(rows: int, counted: slice) -> Any:
    """A GPT; of some rows no target counts."""
    torch.manual_seed(11)
    model = GPT(GPTConfig(vocab=29, context=7, dim=12, layers=BLOCKS, heads=3, dropout=0.0, tied=True))
    batches = [_tokens(rows, 7, seed=i) for i in range(STEPS)]
    for batch in batches:
        kept = batch["targets"][counted].clone()
        batch["targets"][:] = losses.IGNORE
        batch["targets"][counted] = kept
    return model, losses.cross_entropy("targets"), batches


class Layer(nn.Module):
    """A block of two experts: rows choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, second: Tensor) -> Tensor:
        y = self.norm(x)
        for number, expert in enumerate(self.experts):
            chosen = second == bool(number)
            if chosen.any():
                x = x + torch.where(chosen[:, None], torch.tanh(expert(y)), 0.0)
        return x


class Chosen(nn.Module):
    """Rows say which blocks they go through, in which order, how often, and to which expert of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))

    def forward(self, x: Tensor, way: Tensor, second: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for step in range(way.shape[1]):
            for number in dict.fromkeys(way[:, step].tolist()):
                here = way[:, step] == number
                if number >= 0:
                    x = torch.where(here[:, None], self.layers[number](x, second), x)
        return x


class Handing(nn.Module):
    """A layer that hands on what the first one made (T5's biases), or makes it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer, self.make = Layer(), nn.Linear(6, 6) if first else None

    def forward(self, x: Tensor, second: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = self.make(x) if self.make is not None else bias
        return self.layer(x + bias, second), bias


class Handed(nn.Module):
    """Blocks one after another; `pieces`: as segments of three that are computed again by the program's own checkpoint."""

    def __init__(self, pieces: bool) -> None:
        super().__init__()
        self.pieces = pieces
        self.layers = nn.ModuleList(Handing(number == 0) for number in range(BLOCKS))

    def forward(self, x: Tensor, second: Tensor) -> Tensor:
        bias = None
        for start in range(0, BLOCKS, 3):
            if self.pieces:
                x, bias = checkpoint(self.some, start, x, second, bias, use_reentrant=False)
            else:
                x, bias = self.some(start, x, second, bias)
        return x

    def some(self, start: int, x: Tensor, second: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers[start : start + 3]:
            x, bias = layer(x, second, bias)
        return x, bias


def handed(second: list[bool], pieces: bool) -> Any:
    torch.manual_seed(7)
    model, generator, batches = Handed(pieces), torch.Generator().manual_seed(2), []
    for _ in range(STEPS):
        x, t = (torch.randn(8, 6, generator=generator).double() for _ in range(2))
        batches.append({"x": x, "targets": t, "second": torch.tensor(second)})
    return model, losses.mse("targets"), batches


def chosen(ways: list[list[int]], second: list[bool], begun: list[list[int]] | None = None) -> Any:
    """Four rows go each of two ways, which are as long; in the first step of others."""
    torch.manual_seed(7)
    model, generator, batches = Chosen(), torch.Generator().manual_seed(2), []
    for step in range(STEPS):
        x, t = (torch.randn(8, 6, generator=generator).double() for _ in range(2))
        way = torch.tensor(begun if begun and not step else ways).repeat_interleave(4, 0)
        batches.append({"x": x, "targets": t, "way": way, "second": torch.tensor(second)})
    return model, losses.mse("targets"), batches


def frozen(ways: list[list[int]]) -> Any:
    """The last block has nothing to train."""
    model, *rest = chosen(ways, SAME)
    model.layers[-1].requires_grad_(False)
    return model, *rest


def ragged(*rows: int) -> Any:
    """Batches of so many rows, as a data loader's last one has fewer."""
    model, loss_fn, _ = deep(8, slice(None))
    return model, loss_fn, [_tokens(n, 7, seed=i) for i, n in enumerate(rows)]


ALL = list(range(BLOCKS))
SAME = [False, True] * 4
KINDS: dict[str, Callable[[], Any]] = {
    "no targets on rank 0": partial(deep, 8, slice(4, None)),
    "no targets on rank 1": partial(deep, 8, slice(4)),
    "rows for fewer microbatches": partial(deep, 5, slice(None)),
    "later on fewer rows than ranks": partial(ragged, 5, 1, 2),
    "later blocks, earlier ones": partial(chosen, [[3, 4, 5, 6], [0, 1, 2, -1]], SAME),
    "earlier blocks, later ones": partial(chosen, [[0, 1, 2, -1], [3, 4, 5, 6]], SAME),
    "every second block": partial(chosen, [[0, 2, 4, 6], [1, 3, 5, -1]], SAME),
    "an expert fewer on rank 0": partial(chosen, [ALL, ALL], [False] * 4 + [False, True] * 2),
    "an expert fewer on rank 1": partial(chosen, [ALL, ALL], [False, True] * 2 + [True] * 4),
    "no block on rank 0": partial(chosen, [[-1] * BLOCKS, ALL], SAME),
    "no block on rank 1": partial(chosen, [ALL, [-1] * BLOCKS], SAME),
    "backwards on rank 1": partial(chosen, [ALL, ALL[::-1]], SAME),
    "later on rank 0 what ran nowhere at first": partial(
        chosen, [[3, 4, 5, 6, 0, 1, 2], [0, 1, 2] + [-1] * 4], SAME, [[0, 1, 2]] * 2
    ),
    "later on rank 1 what ran nowhere at first": partial(
        chosen, [[0, 1, 2] + [-1] * 4, [0, 1, 2, 3, 4, 5, 6]], SAME, [[0, 1, 2]] * 2
    ),
    "handed through, an expert fewer on rank 1": partial(handed, [False, True] * 2 + [True] * 4, pieces=False),
    "segments, an expert fewer on rank 0": partial(handed, [False] * 4 + [False, True] * 2, pieces=True),
    "segments, an expert fewer on rank 1": partial(handed, [False, True] * 2 + [True] * 4, pieces=True),
    "the last frozen, on rank 0 alone": partial(frozen, [ALL, [*ALL[:-1], -1]]),
    "the last frozen, on rank 1 alone": partial(frozen, [[*ALL[:-1], -1], ALL]),
    "twice each": partial(chosen, [ALL + ALL, ALL + ALL], SAME),
    "some twice": partial(chosen, [[0, 1, 1, 2, 3, 4, 5, 5], [0, 1, 1, 5, 5, 6, -1, -1]], SAME),
}
PLANS = ("dp=2,zero=3,accumulate=4", "dp=2,zero=3,recompute=full")
CUT_TOO, SOME = "dp=2,tp=2,sp=on,zero=3", ("later blocks, earlier ones", "an expert fewer on rank 0")
"""Where weights are cut over tp too: some kinds, whose blocks and whose experts differ, and the others in the sweep."""


def one(kind: str, plan: str, ranks: int):
    return check(Case(kind, KINDS[kind], adamw), plan, ranks)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *spread([(kind,) for kind in KINDS], [(plan,) for plan in PLANS]),
        *((kind, CUT_TOO) if kind in SOME else swept(kind, CUT_TOO) for kind in KINDS),
    ],
)
def test_ranks_with_other_gradients_wait_for_none(pool: Pool, kind: str, plan: str) -> None:
    ranks = 4 if "tp" in plan else 2
    for row in pool.run(one, kind, plan, ranks, ranks=ranks):
        assert row.worst <= BOUND, row


def looked_at_first() -> tuple[float, float]:
    """An evaluation of fewer rows than ranks before the first step, and then one step."""
    model, loss_fn, batches = KINDS["rows for fewer microbatches"]()
    model = model.double()
    with torch.no_grad():
        row = {name: value[:1] for name, value in batches[0].items()}
        expected = F.cross_entropy(model(row["tokens"]).flatten(0, 1), row["targets"].flatten())
    engine = parallelize(model, loss_fn, optimizer=adamw, plan="dp=2,zero=3")
    found = engine.evaluate(engine.batches([row_of(row)], 2, shuffle=False, name=None))
    engine.step(batches[0])
    return found, float(expected)


def begun_small() -> str:
    model, loss_fn, batches = ragged(1)
    try:
        parallelize(model.double(), loss_fn, optimizer=adamw, plan="dp=2").step(batches[0])
    except SoliError as error:
        return str(error)
    return "it ran"


def test_a_first_batch_has_a_row_for_each_rank(pool: Pool) -> None:
    for said in pool.run(begun_small, ranks=2):
        assert "the first global batch has fewer rows than there are data-parallel ranks" in said
        assert "1 rows, dp=2" in said


def row_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] for name, value in batch.items()}


def test_a_rank_without_rows_learns_the_order_of_blocks(pool: Pool) -> None:
    for found, expected in pool.run(looked_at_first, ranks=2):
        assert found == pytest.approx(expected, rel=1e-12)
