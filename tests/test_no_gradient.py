"""No gradient, a gradient of zeros, and one that a program sets: an optimizer tells them apart, as weights decay under one of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from pool import Pool
from soli import losses, parallelize
from soli.core.errors import SoliError
from soli.verify.parity import BOUND, Case, adamw, check, expected_of, under_plan


class Routed(nn.Module):
    """Two experts; a row goes through the one that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x, kind):
        out = x
        for number, expert in enumerate(self.experts):
            at = (kind == number).nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, expert(x[at]))
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(3, 5)

    def forward(self, x, kind):
        for block in self.blocks:
            x = block(x, kind)
        return self.head(x)


def uncounted() -> tuple[nn.Module, Any, list[Any]]:
    """From the second batch on the second expert has rows, and none of them has a target that counts."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step in range(3):
        targets = torch.randint(5, (4,), generator=generator)
        targets[2:] = targets[2:] if not step else losses.IGNORE
        kind = torch.tensor([0, 0, 1, 1] if step else [0, 1, 0, 1])
        batches.append({"x": torch.randn(4, 3, generator=generator).double(), "kind": kind, "targets": targets})
    return Experts(), losses.cross_entropy("targets"), batches


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return x + torch.tanh(self.up(x)), self.gate(x)


class Read(nn.Module):
    """Gates that are read without their gradient, where all blocks are done."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, tokens):
        x, gates = self.embed(tokens), []
        for block in self.blocks:
            x, gate = block(x)
            gates.append(gate)
        return self.head(x * (1 + torch.cat(gates, -1).detach().sigmoid().mean(-1, keepdim=True)))


def detached() -> tuple[nn.Module, Any, list[Any]]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randint(12, (4, 8), generator=generator)
    return Read(), losses.cross_entropy("targets"), [{"tokens": draw(), "targets": draw()} for _ in range(3)]


class Heads(nn.Module):
    """Norms of the batch, whose ranks wait for each other in the backward, and a head that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.read, self.unread = nn.BatchNorm1d(3), nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x):
        x = self.norm(x)
        return {"logits": self.read(x), "other": self.unread(x)}


def one_head(output, batch):
    total = nn.functional.cross_entropy(output["logits"], batch["targets"], reduction="sum", ignore_index=losses.IGNORE)
    return total, (batch["targets"] != losses.IGNORE).sum()


def unread() -> tuple[nn.Module, Any, list[Any]]:
    _, _, batches = uncounted()
    return Heads(), one_head, [{name: value for name, value in batch.items() if name != "kind"} for batch in batches]


def worst(make: Any, plan: str) -> Any:
    return check(Case(make.__name__, make, adamw), plan, 2)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=1,accumulate=2,tp=2", "dp=2,recompute=full", "pp=2,microbatches=2", "pp=2,microbatches=2,schedule=zbh1"])
def test_what_only_rows_without_targets_use_has_a_gradient_of_zeros(pool: Pool, plan: str) -> None:
    """As in one process, where weights decay by it."""
    for row in pool.run(worst, uncounted, plan, ranks=2):
        assert row.worst <= BOUND, row


def test_what_no_loss_reads_has_no_gradient_where_a_rank_has_no_target(pool: Pool) -> None:
    """It goes through the backward for the others, who wait for its part of the norms."""
    for row in pool.run(worst, unread, "dp=2", ranks=2):
        assert row.worst <= BOUND, row


def gates(plan: str) -> tuple[list[str], list[str]]:
    case = Case("detached", detached, adamw)
    none = lambda trace: [name for name, gradient in trace.gradients[0].items() if gradient is None]
    return none(expected_of(case)), none(under_plan(case, plan))


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2", "pp=2,microbatches=2,schedule=zbh1", "pp=2,microbatches=4,schedule=interleaved,chunks=2"])
def test_what_nothing_uses_behind_a_border_has_no_gradient(pool: Pool, plan: str) -> None:
    """Zeros would make its weights decay."""
    for row in pool.run(worst, detached, plan, ranks=2):
        assert row.worst <= BOUND, row
    for alone, here in pool.run(gates, plan, ranks=2):
        assert len(alone) == 8
        assert set(here) == set(alone)


def put(kind: str) -> tuple[str, float]:
    """What is said where a program sets gradients between backward and update, and what the last layer moved by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    batch = torch.randn(4, 3).double(), torch.randn(4, 1).double()
    engine = parallelize(model, losses.mse(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=2")
    before = engine.global_state_dict()["1.weight"].clone()
    engine.forward_backward(batch)
    if kind == "all":
        model.zero_grad()
    else:
        for param in model[1].parameters():
            param.grad = None if kind == "none" else torch.zeros_like(param)
    said = ""
    try:
        engine.update()
    except SoliError as error:
        said = str(error)
    engine.discard()
    engine.step(batch)  # goes on
    engine.forward_backward(batch)
    model.zero_grad()
    engine.discard()  # is what zero_grad() means
    return said, float((engine.global_state_dict()["1.weight"] - before).abs().max())


@pytest.mark.parametrize("kind", ["none", "zeros", "all"])
def test_gradients_that_a_program_sets_are_refused(pool: Pool, kind: str) -> None:
    for said, moved in pool.run(put, kind, ranks=2):
        assert "p.grad was set between forward_backward() and update()" in said
        assert "1.weight" in said
        assert ("0.weight" in said) == (kind == "all")
        assert moved > 0


def labelled(output, batch):
    """Terms that are left out where no row has their labels: of `logits` and of `other`."""
    total = torch.zeros(())
    for name in ("logits", "other"):
        if (has := batch[name]).any():
            total = total + nn.functional.cross_entropy(output[name][has], batch["targets"][has], reduction="sum")
    return total, len(batch["targets"])


class Labelled(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 3, bias=False), (nn.BatchNorm1d(3) if norm else nn.LayerNorm(3))  # what is before a norm has gradients of all rows
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.read, self.other = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x):
        x = self.block(self.norm(self.first(x)))
        return {"logits": self.read(x), "other": self.other(x).masked_fill(torch.arange(5) == 4, -torch.inf)}


def labels(norm: bool) -> tuple[nn.Module, Any, list[Any]]:
    """Of the second rank no row has a label; a head has some in one row, and in the second step in none."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(3):
        some = torch.tensor([False, step != 1, False, False])
        one = torch.tensor([True, step == 1, False, False])
        found.append({"x": torch.randn(4, 3, generator=generator).double(), "targets": torch.randint(4, (4,), generator=generator), "logits": one, "other": some})
    return Labelled(norm), labelled, found


def seldom() -> tuple[nn.Module, Any, list[Any]]:
    return labels(norm=False)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "dp=1,accumulate=4,tp=2", "pp=2,microbatches=4"])
def test_a_term_that_no_row_of_a_rank_has_is_left_out(pool: Pool, plan: str) -> None:
    for row in pool.run(worst, seldom, plan, ranks=2):
        assert row.worst <= BOUND, row


def normed() -> tuple[nn.Module, Any, list[Any]]:
    return labels(norm=True)


def test_a_term_that_no_row_of_a_rank_has_keeps_nobody_waiting(pool: Pool) -> None:
    """Norms of the batch wait for its rows in the backward."""
    for row in pool.run(worst, normed, "dp=2", ranks=2):
        assert row.worst <= BOUND, row


def trains_nothing(kind: str, plan: str) -> tuple[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3) if "normed" in kind else nn.Tanh(), nn.Linear(3, 1)).double()
    batch = torch.randn(4, 3).double(), torch.randn(4, 1).double()
    loss = (lambda output, batch: ((output.detach() - batch[1]).square().sum(), len(output))) if "detached" in kind else losses.mse(1)
    model.requires_grad_("frozen" not in kind)
    engine = parallelize(model, loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    said = ""
    with torch.set_grad_enabled("outside" not in kind):
        try:
            engine.step(batch)
        except SoliError as error:
            said = str(error)
    return said, engine.step_count


@pytest.mark.parametrize(("kind", "plan"), [("detached normed", "dp=2"), ("frozen normed", "dp=2"), ("outside normed", "dp=2"), *product(("detached", "frozen", "outside"), ("dp=2", "dp=2,zero=3", "pp=2,microbatches=2"))])
def test_a_step_that_trains_nothing_is_refused(pool: Pool, kind: str, plan: str) -> None:
    """In one process backward() raises; in a pipeline nobody noticed."""
    for said, steps in pool.run(trains_nothing, kind, plan, ranks=2):
        assert "the loss has no gradient: a step would train nothing" in said
        assert steps == 0


@pytest.mark.parametrize("count", [-4, float("nan"), "4", None, torch.ones(2)])
def test_a_count_is_how_many(count: Any) -> None:
    engine = parallelize(nn.Linear(3, 1), lambda output, batch: (output.sum(), count), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    with pytest.raises(SoliError, match="the loss's count is no number of targets"):
        engine.step((torch.randn(4, 3), torch.randn(4, 1)))
