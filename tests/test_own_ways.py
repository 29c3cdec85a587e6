"""What programs do by themselves: take from their batches, compute blocks again, convert norms; and batches of one row a rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.test_kept import DIM, Normal, Plain, case_of, error_of
from tests.test_scripts import engine_of, said_by
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from noted import noted
from pool import Pool
from soli.verify.parity import BOUND, Case, check

# --- a row a rank ---------------------------------------------------------------------------------------------


def advantage(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Of rewards by their mean over the batch, as policy gradients have it: of one row it is 0."""
    each = F.cross_entropy(out.mT, batch["targets"], reduction="none").mean(1)
    reward = batch["tokens"].double().mean(1)
    return ((reward - reward.mean()) * each).sum(), len(out)


def centred(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (out - out.mean(0)).square().sum() + out.sum(), len(out)


def by_row(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(out.mT, batch["targets"], reduction="none").mean(1).sum(), len(out)


def a_row_each(loss_fn: Any, plan: str, rows: int, streamed: bool, longer: bool = False) -> str:
    engine, batches = engine_of(Plain, plan, loss_fn=loss_fn)
    batch = {name: x[:rows] for name, x in batches[0].items()}
    if not streamed:
        return said_by(engine.step, batch)
    samples = [{name: x[i] for name, x in batch.items()} for i in range(rows)]
    if longer:
        samples[0] = {name: torch.cat([x, x]) for name, x in samples[0].items()}
    part = next(iter(engine.batches(samples, rows, shuffle=False)))
    before = noted()
    said = said_by(engine.step, part)
    return f"{said}, noted" if any("what couples rows is not seen" in event["text"] for event in noted() if event not in before) else said


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("loss_fn", [advantage, centred, by_row])
def test_rows_of_other_ranks_show_what_couples_one_row_a_rank(pool: Pool, loss_fn: Any, rows: int, plan: str) -> None:
    for streamed in (False, True)[: 1 + (rows == 2)]:
        said = pool.run(a_row_each, loss_fn, plan, rows, streamed, ranks=2)
        if loss_fn is by_row:
            assert said == ["it ran"] * 2
        else:
            assert all("something couples the rows" in words for words in said), said


class Measured(Plain):
    """It asks that lengths, which are no tensor, be those of its rows."""

    def forward(self, tokens: Tensor, lengths: Any) -> Tensor:
        if (tokens != 0).sum(1).tolist() != [int(n) for n in lengths]:
            raise ValueError("these lengths are not those of the rows")
        return super().forward(tokens)


def with_lengths(streamed: bool) -> str:
    engine, batches = engine_of(Measured, "dp=2")
    tokens = batches[0]["tokens"][:2].clamp(min=1)
    tokens[1, 3:] = 0
    batch = {"tokens": tokens, "targets": batches[0]["targets"][:2], "lengths": np.array([6, 3])}
    if not streamed:
        return said_by(engine.step, batch)
    samples = [{name: x[i] for name, x in batch.items()} for i in range(2)]
    stream = engine.batches(samples, 2, shuffle=False, collate=beside_arrays)
    return said_by(engine.step, next(iter(stream)))


def beside_arrays(samples: list[dict[str, Any]]) -> dict[str, Any]:
    found = {name: torch.stack([one[name] for one in samples]) for name in ("tokens", "targets")}
    return found | {"lengths": np.array([one["lengths"] for one in samples])}


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_are_exchanged_with_all_that_is_of_them(pool: Pool, streamed: bool) -> None:
    assert pool.run(with_lengths, streamed, ranks=2) == ["it ran"] * 2


def test_rows_of_other_lengths_are_not_exchanged(pool: Pool) -> None:
    assert pool.run(a_row_each, by_row, "dp=2", 2, True, True, ranks=2) == ["it ran, noted"] * 2


# --- batches that are taken from ------------------------------------------------------------------------------


class Popping(Plain):
    """Its forward takes what it needs out of a dict of the batch, and puts something else into it."""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs["scale"] = inputs["scale"] * 0.5 + 1
        return super().forward(inputs.pop("tokens")) * inputs["scale"]


def taking(out: Tensor, batch: dict[str, Any]) -> tuple[Tensor, int]:
    targets = batch.pop("targets")
    batch["weight"] = batch["weight"] * 3 + 1
    each = F.cross_entropy(out.mT, targets, reduction="none").mean(1)
    return (each * batch["weight"]).sum(), len(out)


def taken_from() -> Any:
    torch.manual_seed(3)
    batches = [
        {
            "inputs": {"tokens": batch["tokens"], "scale": torch.ones(len(batch["tokens"]), 1, 1, dtype=torch.float64)},
            "targets": batch["targets"], "weight": torch.arange(1.0, 1 + len(batch["targets"]), dtype=torch.float64),
        }
        for batch in case_of(Plain).make()[2]
    ]  # fmt: skip
    torch.manual_seed(3)
    return Popping(), taking, batches


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,accumulate=2", "dp=1,recompute=full", "dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_a_batch_is_the_calls_own_to_take_from(pool: Pool, plan: str) -> None:
    case = Case("taken_from", taken_from, case_of(Plain).optimizer)
    ranks = 1 if plan.startswith("dp=1") else 2
    assert all(error < BOUND for error in pool.run(partial(taken_apart, case), plan, ranks=ranks))


def taken_apart(case: Case, plan: str) -> float:
    return check(case, plan, 0).worst


# --- norms that were converted --------------------------------------------------------------------------------


class Converted(Normal):
    """As the usual line of scripts for several devices has it; torch's own forward would ask for CUDA."""

    def layer(self) -> nn.Module:
        return nn.SyncBatchNorm(DIM)


class Acting(nn.SyncBatchNorm):
    """A norm with an activation, by a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class OfItsOwn(Normal):
    def layer(self) -> nn.Module:
        return Acting(DIM)


class Followed(Normal):
    """The same in two modules."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(DIM), nn.ReLU())


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
@pytest.mark.parametrize(("kind", "plain"), [(Converted, Normal), (OfItsOwn, Followed)])
def test_synchronised_norms_are_the_engines(pool: Pool, kind: type, plain: type, plan: str) -> None:
    expected = pytest.approx(losses_of(plain, "dp=1"), rel=BOUND)
    assert pool.run(losses_of, kind, plan, ranks=2) == [expected] * 2


def losses_of(kind: type[nn.Module], plan: str) -> list[float]:
    engine, batches = engine_of(kind, plan)
    found = [float(engine.step(batch)) for batch in batches]
    assert not [name for module in engine.copy_model().modules() for name in vars(module) if name == "forward"]
    return found


# --- blocks that are computed again ---------------------------------------------------------------------------


def policy(ctx: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputing(Plain):
    """It computes its layers again by itself."""

    how: Any = None

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        options = {"context_fn": self.how} if self.how else {}
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False, **options)
        return self.head(x)


class Selecting(Recomputing):
    """Whose products are kept, as torch's own recipe has it."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), nn.Tanh())

    how = staticmethod(partial(create_selective_checkpoint_contexts, policy))


@pytest.mark.parametrize(("kind", "plan"), [(Selecting, "tp=2"), (Selecting, "dp=2"), (Recomputing, "tp=2,recompute=full"), (Recomputing, "tp=2")])
def test_blocks_that_a_program_computes_again_itself(pool: Pool, kind: type, plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=2))
