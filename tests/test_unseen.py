"""What the checks of a first step did not see: rows in another order, draws, gradients that do not add up, optimizers, lists."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import subprocess
import sys
import warnings
from collections import UserDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.test_kept import DIM, Normal, Plain, case_of, error_of
from tests.test_scripts import engine_of, said_by
from torch import Tensor, nn
from torch.nn import functional as F

from noted import noted
from pool import Pool
from soli import losses, parallelize
from soli.core.errors import SoliError
from soli.verify.parity import BOUND, compare, expected_of
from sweep import spread as spread_over
from sweep import swept


class Dropping(Plain):
    """Dropout of rows that stand in another order than the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)


class Twice(Dropping):
    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(torch.cat([tokens, tokens]))))
        first, second = self.head(self.drop(x)).chunk(2)
        return first + 0.5 * second


class Stacked(Dropping):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.tanh(self.layers[0](torch.stack([x, x.flip(1)], 1).flatten(0, 1)))
        return self.head(self.drop(x)).unflatten(0, (-1, 2)).sum(1)


class TimeFirst(Dropping):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(0, 1)
        steps = len(x)
        x = self.drop(torch.tanh(self.layers[0](x.reshape(-1, DIM))))
        return self.head(x).unflatten(0, (steps, -1)).transpose(0, 1)


class Noisy(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(torch.cat([tokens, tokens]))
        first, second = self.head(torch.tanh(x + 0.1 * torch.randn_like(x))).chunk(2)
        return first + 0.5 * second


class Coins(Plain):
    """Stochastic depth as timm and torchvision have it, and masks that are drawn by probabilities."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        kept = x.new_empty((len(x), 1, 1)).bernoulli_(0.7).div_(0.7)
        seen = torch.bernoulli(torch.full_like(x, 0.5)) * torch.bernoulli(x.sigmoid().detach())
        return self.head(x + kept * self.layers[0](x * seen))


class Shifted(Plain):
    """torch.normal of tensors, which get zeros as gradients of what is drawn; slopes; times; and what torch's own initialisation draws."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        x = x * torch.normal(1.0, x.sigmoid()) + torch.normal(self.layers[0](x), 0.3) + torch.normal(0.0, 1.0, size=(len(x), 1, 1))
        x = x * torch.empty_like(x).exponential_(lambd=3.0) + nn.init.normal_(torch.empty_like(x), std=0.2) + nn.init.uniform_(torch.empty_like(x), -1, b=2.0)
        return self.head(F.rrelu(self.layers[1](x), 0.2, 0.4, self.training) + F.rrelu(x))


class Selus(Plain):
    """Alpha dropout of elements and of channels, and noise that torch draws until all of it fits, or (far from the mean) by rejection."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.AlphaDropout(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(F.selu(self.layers[0](self.embed(tokens))))
        x = F.feature_alpha_dropout(F.selu(self.layers[1](x)), 0.4, self.training) + F.alpha_dropout(x, 0.2, False)
        near = nn.init.trunc_normal_(torch.empty_like(x), std=0.5, a=-0.7, b=0.7)
        return self.head(x * near + self.layers[2](x) * nn.init.trunc_normal_(torch.empty_like(x), std=0.5, a=1.0, b=1.2))


class Noised(Plain):
    """A step of diffusion of each row's own (Ho et al. 2020), classes that are sampled, and recurrent layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(DIM, DIM, 2, dropout=0.4, batch_first=True)
        self.other = nn.GRU(DIM, DIM // 2, 2, dropout=0.3, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        time = torch.randint(0, 100, (len(x),))
        level = (time / 100).view(-1, 1, 1)
        x = (1 - level) * x + level * torch.randn_like(x) + torch.randint_like(tokens, 3).unsqueeze(-1)
        again, wide = torch.multinomial(x.mean(1).softmax(-1), 3, replacement=True), x.detach().flatten(0, 1).softmax(-1)
        x = x + self.embed(again).mean(1, keepdim=True) + self.embed(wide.multinomial(2)).mean(1).view_as(x)
        return self.head(self.rnn(x)[0] + self.other(x.transpose(0, 1))[0].transpose(0, 1))


class ByRow(Plain):
    """Draws for each row by itself (torchvision's detectors choose a size for each picture so), which its path depends on."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = [x * (1.0, 1.5)[int(torch.empty(1).uniform_(0.0, 2.0))] for x in self.embed(tokens)]
        return self.head(torch.tanh(self.layers[0](torch.stack(rows))))


class Masking(Plain):
    """What transformers' SpecAugment draws: by numpy, for all rows at once; and what a block draws that may run again."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * np.random.rand() + random.random()

    def layer(self) -> nn.Module:
        return self.Block(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        seen = torch.from_numpy(np.random.rand(*x.shape[:2]) < 0.7).unsqueeze(-1)
        return self.head(torch.tanh(self.layers[0](torch.where(seen, x, 0.5))))


class Chosen(torch.autograd.Function):
    """Gradients of a choice that has none, as PhiMoE's."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, weight: Tensor, place: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(weight, place, gates)
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, place, gates = ctx.saved_tensors
        return (gates * (-gradient * weight)).scatter_add_(-1, place, gradient * weight), None, None, None


class Routed(Plain):
    """The best two of some experts, the second by scores of which the first is taken out."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        scores, gates = self.layers[0](x), 0
        left = scores - torch.empty_like(scores).exponential_().log()
        for _ in range(2):
            place = left.max(-1, keepdim=True)[1]
            soft = left.softmax(-1)
            weight = Chosen.apply(scores, soft.gather(-1, place), place, soft)
            gates = gates + torch.zeros_like(soft).scatter(-1, place, weight)
            left = left.scatter(-1, place, float("-inf"))
        return self.head(x + self.layers[1](x * gates))


class Counted(Plain):
    """What is written into by indices and is no part itself: how often each is chosen, as a buffer of routers; one-hot rows; a broadcast index; `out=`."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        place = self.layers[0](x).max(-1, keepdim=True)[1]
        counts = torch.zeros(x.shape[-1], dtype=x.dtype).scatter_add_(0, place.flatten(), torch.ones_like(place.flatten(), dtype=x.dtype))
        one = torch.scatter(input=torch.zeros(x.shape, dtype=x.dtype), dim=-1, index=place, value=1.0)
        first = torch.take_along_dim(x, place[:1], -1) + torch.gather(x.detach(), -1, place, out=torch.empty_like(x[..., :1]).detach())
        return self.head(x * (1 + counts / 100) + self.layers[1](x * one) + first)


class Leaving(Plain):
    """A layer that Python's random leaves out."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        return self.head(x + self.layers[0](x) * (random.random() > 0.5))


def mean_of_coins(plan: str) -> list[float]:
    engine, batches = engine_of(Half, plan)
    engine.step(batches[0])
    engine.step(batches[1])
    return engine.model.kept


class Half(Plain):
    """Of 16 bits: uniform numbers of that type are never above 0.996."""

    def forward(self, tokens: Tensor) -> Tensor:
        coins = tokens.new_empty((len(tokens), 5000), dtype=torch.bfloat16).bernoulli_(0.999)
        self.kept = [float(coins.float().mean())]
        return super().forward(tokens)


def test_coins_of_16_bits_are_as_likely_as_they_say() -> None:
    (mean,) = mean_of_coins("dp=1")
    assert 0.997 < mean < 0.9999


class Sorted(Dropping):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        order = tokens.sum(1).argsort()
        return self.head(self.drop(torch.tanh(self.layers[0](x[order]))))[order.argsort()]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(Shifted, "tp=2,sp=on"), (Selus, "tp=2,sp=on"), (Selus, "cp=2"), (Shifted, "cp=2"), (Shifted, "pp=2,microbatches=2"), (Routed, "tp=2,sp=on"), (Routed, "cp=2"), (Counted, "tp=2,sp=on"), (Counted, "cp=2"), (ByRow, "tp=2"), (ByRow, "cp=2"), (Noised, "tp=2"), (Noised, "pp=2,microbatches=2"), (Noised, "dp=2,recompute=full"), (Masking, "tp=2,sp=on"), (Masking, "cp=2,recompute=full")],
)
def test_numbers_that_are_made_of_draws_are_the_same_under_every_plan(pool: Pool, kind: type, plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=2))


@pytest.mark.parametrize(
    ("kind", "plan"),
    spread_over([(Twice,), (Stacked,), (TimeFirst,), (Noisy,), (Coins,), (Shifted,), (Selus,), (Noised,)], [("dp=2",), ("dp=1,accumulate=2",)]),
)
def test_what_is_drawn_belongs_to_its_rows_in_any_order(pool: Pool, kind: type, plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=2 if "dp=2" in plan else 1))


def first_step(kind: type, plan: str) -> str:
    engine, batches = engine_of(kind, plan)
    return said_by(engine.step, batches[0])


def test_draws_row_by_row_are_refused_where_rows_are_apart(pool: Pool) -> None:
    assert all("how often the model draws random numbers depends on the rows" in said for said in pool.run(first_step, ByRow, "dp=2", ranks=2))


def test_rows_of_a_grid_draw_apart(pool: Pool) -> None:
    said = pool.run(first_step, Leaving, "tp=4,tensor=2d", ranks=4)
    assert all("which parts of a batch and stages do apart" in words for words in said)


def test_rows_that_are_sorted_by_what_they_hold_are_refused(pool: Pool) -> None:
    assert any("do not belong to rows" in said for said in pool.run(first_step, Sorted, "dp=2", ranks=2))
    assert first_step(Sorted, "dp=1") == "it ran"


DRAWS = {
    "torch.poisson": lambda: torch.poisson(torch.ones(())),
    "torch.randperm": lambda: torch.randperm(2)[0],
    "torch.binomial": lambda: torch.binomial(torch.ones(()), torch.full((), 0.5)),
    "a Dirichlet": lambda: torch.distributions.Beta(torch.ones(()), torch.ones(())).sample(),
    "a Gamma": lambda: torch.distributions.Gamma(torch.ones(()), torch.ones(())).sample(),
    "draws by itself": lambda: torch.ops.aten.rand([1])[0],
}


class Drawing(Plain):
    draw: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1 + 0.1 * self.draw())


def drawn(name: str, plan: str) -> str:
    Drawing.draw = staticmethod(DRAWS[name])
    return first_step(Drawing, plan)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_that_have_no_rows_are_refused(pool: Pool, name: str) -> None:
    assert all(name in said for said in pool.run(drawn, name, "dp=2", ranks=2))
    assert drawn(name, "dp=1") == "it ran"


# --- losses ---------------------------------------------------------------------------------------------------


def balanced(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Two tasks, each by its own value: the total is always 2 for a row, and no gradient is a sum over rows."""
    tasks = F.cross_entropy(out.flatten(0, 1), batch["targets"].flatten()), out.square().mean()
    return len(out) * sum(task / task.detach() for task in tasks), len(out)


def policy(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Advantages of each four rows have no mean, and every ratio is 1 at first: a loss of nothing but rounding."""
    chosen = out.log_softmax(-1).gather(-1, batch["targets"][..., None]).sum((1, 2))
    return -((chosen - chosen.detach()).exp() * batch["advantage"]).sum(), len(out)


def trained(loss_fn: Any, plan: str, kind: type = Plain) -> str | list[float]:
    engine, batches = engine_of(kind, plan, loss_fn=loss_fn)
    batch: dict[str, Tensor] = {name: torch.cat([x, batches[1][name][:8]]) for name, x in batches[0].items()}
    rewards = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    said = said_by(engine.step, batch | {"advantage": advantage.flatten()})
    return said if said != "it ran" else [float(x) for x in engine.global_state_dict()["head.weight"].flatten()]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "dp=2,tp=1,accumulate=2", "dp=2,recompute=full", "dp=2,recompute=selective"])
def test_gradients_that_do_not_add_up_are_refused(pool: Pool, plan: str) -> None:
    assert all("the gradient of a batch's loss" in said for said in pool.run(trained, balanced, plan, ranks=2))
    assert isinstance(trained(balanced, "dp=1"), list)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_they_are_beside_a_norm_of_the_batch(pool: Pool, plan: str) -> None:
    assert all("the gradient of a batch's loss" in said for said in pool.run(trained, balanced, plan, Normal, ranks=2))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "tp=2", "pp=2,microbatches=2"])
def test_a_loss_whose_terms_cancel_is_none_that_couples_rows(pool: Pool, plan: str) -> None:
    expected = trained(policy, "dp=1")
    for found in pool.run(trained, policy, plan, ranks=2):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def confident(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of a row as much as the model is sure of it: its gradient goes through the count too."""
    weight = out[:, 0, 0].sigmoid()
    each = F.cross_entropy(out.mT, batch["targets"], reduction="none").sum(1)
    return (weight * each).sum(), weight.sum()


def surely(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, count = confident(out, batch)
    return total, count.detach()


def test_a_count_that_is_trained_is_refused(pool: Pool) -> None:
    for found in (trained(confident, "dp=1"), *pool.run(trained, confident, "pp=2,microbatches=2", ranks=2)):
        assert "the loss's count depends on what is trained" in found
    assert pool.run(trained, surely, "dp=2", ranks=2) == [pytest.approx(trained(surely, "dp=1"), rel=1e-9, abs=1e-12)] * 2


def hardest(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A quarter of the rows and one, those whose loss is largest."""
    each, half = F.cross_entropy(out.mT, batch["targets"], reduction="none").sum(1), 1 + len(out) // 4
    return each.topk(half).values.sum(), half


def test_what_counts_by_all_rows_runs_where_they_are_in_one_part(pool: Pool) -> None:
    assert isinstance(trained(hardest, "dp=1"), list)
    assert all("does not add up" in said for said in pool.run(trained, hardest, "dp=2", ranks=2))


class Backwards(torch.autograd.Function):
    """It leaves values as they are, and does something to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.change(grad), None


class Changed(Plain):
    """What is done to gradients on their way, by a function of its own or a hook."""

    change: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = Backwards.apply(self.layers[0](self.embed(tokens)), self.change)
        if x.requires_grad:
            x.register_hook(type(self).change)
        return self.head(torch.tanh(x))


class Normed(Changed):
    """Its backward needs buffers that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Sequential(self.layers[0], nn.Flatten(0, 1), nn.BatchNorm1d(DIM), nn.Unflatten(0, (-1, 6)))


OF_SIZE = {
    "clamp": lambda grad: grad.clamp(-1e-2, 1e-2),
    "sign": torch.sign,
    "norm": lambda grad: grad / (grad.norm() + 1e-9),
}
LINEAR = {
    "turned": torch.neg,
    "masked": lambda grad: grad * (torch.arange(grad.shape[-1]) % 2),
    "halves": lambda grad: grad.to(torch.float16).to(grad.dtype),
}


def changed(name: str, plan: str, kind: type = Changed) -> str:
    Changed.change = staticmethod((OF_SIZE | LINEAR)[name])
    return first_step(kind, plan)


@pytest.mark.parametrize("name", [*OF_SIZE, *LINEAR])
def test_gradients_that_are_treated_by_their_size_are_refused(pool: Pool, name: str) -> None:
    for said in (changed(name, "dp=1"), *pool.run(changed, name, "tp=2", ranks=2)):
        assert ("gradients do not grow with the loss" in said) == (name in OF_SIZE), said
        assert name in OF_SIZE or said == "it ran"


@pytest.mark.parametrize("plan", ["dp=1", "tp=2", "pp=2,microbatches=1"])
def test_they_are_where_backward_needs_what_a_forward_changes(pool: Pool, plan: str) -> None:
    for name, said in (("sign", "gradients do not grow with the loss"), ("turned", "it ran")):
        assert all(said in found for found in pool.run(changed, name, plan, Normed, ranks=1 if plan == "dp=1" else 2))


class Deviating(Plain):
    """What one row alone has none of."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(torch.tanh(self.layers[0](x)) + x.std(0))


def spread(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    total, count = losses.cross_entropy("targets")(out, batch)
    return total + 1e-3 * len(out) * F.relu(2 - out.std(0)).sum(), count


@pytest.mark.parametrize(("kind", "loss_fn"), [(Deviating, losses.cross_entropy("targets")), (Plain, spread)])
def test_what_is_no_number_of_one_row_couples_rows(kind: type, loss_fn: Any) -> None:
    """Of the first step's rows and of two."""
    for plan, rows in (("dp=1,accumulate=2", 4), ("dp=1,accumulate=4", 8), ("dp=1", 8)):
        engine, batches = engine_of(kind, plan, loss_fn=loss_fn)
        said = said_by(engine.step, {name: x[:rows] for name, x in batches[0].items()})
        assert "something couples the rows" in said or plan == "dp=1", said
        assert said == "it ran" or plan != "dp=1"


# --- batches --------------------------------------------------------------------------------------------------


class Lengths(Plain):
    def forward(self, tokens: Tensor, lengths: Any) -> Tensor:
        kept = torch.stack([torch.arange(tokens.shape[1]) < int(n) for n in list(lengths)[: len(tokens)]])
        return super().forward(tokens) * kept[..., None]


def of_lengths(form: Any, plan: str) -> str | float:
    engine, batches = engine_of(Lengths, plan)
    for batch, lengths in zip(batches, ([6] * 8, [1, 2, 3, 4, 5, 6, 1, 2, 3]), strict=False):
        said = said_by(engine.step, batch | {"lengths": form(lengths)})
        if said != "it ran":
            return said
    return float(engine.global_state_dict()["head.weight"].square().sum())


def test_rows_in_lists_are_refused_and_arrays_are_cut(pool: Pool) -> None:
    expected = of_lengths(list, "dp=1")
    for plan, ranks in (("dp=2", 2), ("dp=1,accumulate=2", 1)):
        assert all("lists with one entry a row" in said for said in pool.run(of_lengths, list, plan, ranks=ranks))
        for form in (np.array, torch.tensor):
            assert pool.run(of_lengths, form, plan, ranks=ranks) == pytest.approx([expected] * ranks, rel=BOUND)


# --- optimizers ------------------------------------------------------------------------------------------------


class Clipped(torch.optim.SGD):
    """An option that is an attribute, and in no group."""

    def __init__(self, params: Any, lr: float = 0.1, limit: float | None = None) -> None:
        super().__init__(params, lr=lr)
        self.limit = limit

    def step(self, closure: Any = None) -> Any:
        if self.limit:
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.limit)
        return super().step(closure)


class Centred(torch.optim.SGD):
    """Gradients of convolutions alone have no mean."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.dim() > 2 and p.grad is not None):
            p.grad = p.grad - p.grad.mean(tuple(range(1, p.dim())), keepdim=True)
        return super().step(closure)


class Late(torch.optim.Optimizer):
    """It looks at rows from a step on."""

    def __init__(self, params: Any, lr: float = 0.02, start: int = 12) -> None:
        super().__init__(params, {"lr": lr, "start": start})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                rows = state["step"] > group["start"] and p.dim() == 2
                p.sub_(group["lr"] * (p.grad / p.grad.norm(dim=1, keepdim=True) if rows else p.grad))


class Convolving(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(DIM, DIM, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens).mT).mT)


def optimized(name: str, plan: str) -> str:
    make = {"Clipped": lambda p: Clipped(p, limit=0.05), "Centred": lambda p: Centred(p, lr=0.1), "Late": Late}[name]
    return said_by(engine_of, Convolving, plan, optimizer=make)


@pytest.mark.parametrize("name", ["Clipped", "Centred", "Late"])
def test_optimizers_that_look_beyond_an_element(pool: Pool, name: str) -> None:
    assert all("does not update element by element" in said for said in pool.run(optimized, name, "dp=2,zero=1", ranks=2))
    assert pool.run(optimized, name, "dp=2", ranks=2) == ["it ran"] * 2


# --- cut tensors -------------------------------------------------------------------------------------------


class Function(torch.autograd.Function):
    """A norm of RMS and its weight, as libraries of kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        r = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        each = grad * weight
        return r * each - x * r**3 * (each * x).mean(-1, keepdim=True), (grad * x * r).flatten(0, -2).sum(0)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return Function.apply(x, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class OwnNorm(Plain):
    def layer(self) -> nn.Module:
        return Block()


class Scaled(Plain):
    """A scale of each of a few choices, chosen by what tokens became."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.route = nn.Parameter(torch.randn(4)), nn.Linear(DIM, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        weight, chosen = self.route(x).softmax(-1).topk(2, -1)
        return self.head(x * (weight * self.scale[chosen]).sum(-1, keepdim=True))


class Marked(Plain):
    """It writes into the first token, at first zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.zeros(DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens)) * 1.0
        x[:, 0].add_(self.mark)
        return self.head(torch.tanh(x))


class Assigned(Plain):
    """It writes into a view, and puts that back when the tensor was read."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens)) * 1.0
        first = x[:, 1:]
        first *= 2
        y = x * 3
        x[:, 1:] = first
        return self.head(torch.tanh(x + y))


class Spelt(Plain):
    """Ways to say what has another one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        x = x * torch.rsqrt(x.var(1, False) + 1).unsqueeze(1) + x.narrow(1, -2, 2).sum(1, keepdim=True)
        x = x + torch.take_along_dim(x, x.argsort(-1), dim=-1)
        return self.head(torch.max(torch.zeros(()).to(x), x))


class Pulling(Plain):
    """Gradients by torch.func, of a forward of its own."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        found, pull = torch.func.vjp(lambda v: torch.tanh(self.layers[0](v)), x)
        return self.head(x + pull(torch.ones_like(found))[0])


def test_gradients_by_torch_func_run_where_those_of_autograd_do(pool: Pool) -> None:
    assert all(error < BOUND for error in pool.run(error_of, Pulling, "dp=2", ranks=2))
    for plan in ("dp=2,zero=3", "tp=2", "pp=2"):
        assert all("takes gradients itself" in said for said in pool.run(first_step, Pulling, plan, ranks=2))


class Mapped(Plain):
    """Each sequence's mean, by torch.func.vmap."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        return self.head(x + torch.func.vmap(lambda row: row.mean(0))(x)[:, None])


class Shared(Plain):
    """On a grid of one column a product of one output is cut over that column."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.one, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, 1), nn.Linear(2 * DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.up(self.embed(tokens))
        return self.head(self.down((self.one(x).softmax(1) * x).sum(1).view(-1, 1, 2 * DIM) + x))


def test_what_is_cut_over_one_column_is_broadcast(pool: Pool) -> None:
    assert all(error < BOUND for error in pool.run(error_of, Shared, "tp=2,tensor=2d,rows=2", ranks=2))


class Called(Shared):
    """Layers that torch.func.vmap calls."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.func.vmap(lambda row: self.down(torch.tanh(self.up(row))))(self.embed(tokens)))


def test_layers_that_vmap_calls_are_refused_where_they_are_cut(pool: Pool) -> None:
    assert all("torch.func transforms" in said for said in pool.run(first_step, Called, "tp=2", ranks=2))


class Glanced(Plain):
    """What reads it first does without gradients."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x, (up, _, down) = self.layers[0](self.embed(tokens)), self.layers[1]
        with torch.no_grad():
            gate = up(x).sigmoid()
        return self.head(x + down(torch.tanh(up(x)) * gate))


class Sharing(Plain):
    """Blocks that read the keys of the first, in a mapping of its own class (Gemma3n)."""

    class Block(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.query, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.key = nn.Linear(DIM, DIM) if first else None

        def forward(self, x: Tensor, shared: UserDict[str, Tensor]) -> Tensor:
            heads = lambda y: y.unflatten(-1, (4, 3)).transpose(1, 2)
            if self.key is not None:
                shared["key"] = heads(self.key(x))
            found = F.scaled_dot_product_attention(heads(self.query(x)), shared["key"], shared["key"])
            return x + self.out(found.transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(number == 0) for number in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, shared = self.embed(tokens), UserDict[str, Tensor]()
        for layer in self.layers:
            x = layer(x, shared)
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (OwnNorm, "tp=2,sp=on"),
        (OwnNorm, "cp=2"),
        (Marked, "tp=2,sp=on"),
        (Marked, "cp=2"),
        *spread_over([(Scaled,), (Assigned,), (Spelt,), (Mapped,), (Glanced,), (Sharing,)], [("cp=2",), ("tp=2,sp=on",)]),
    ],
)
def test_cut_tensors_are_whole_to_their_readers(pool: Pool, kind: type, plan: str) -> None:
    """Or it is refused: what an autograd function adds up over a sequence that is cut, and writes into what was gathered."""
    if kind in ((Marked, OwnNorm) if plan == "cp=2" else (Assigned,)):
        said = pool.run(first_step, kind, plan, ranks=2)
        assert any("writes into a view" in text or "an autograd function" in text for text in said), said
    else:
        assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=2))


class Times(torch.autograd.Function):
    """A product whose factor's gradient is given by elements, or summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, summed: bool) -> Tensor:
        ctx.save_for_backward(x, factor)
        ctx.summed = summed
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum_to_size(factor.shape) if ctx.summed else grad * x, None


class Feeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Factored(Plain):
    """It is called before the head and after it, beside blocks."""

    summed, logits = False, True

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(1))

    def layer(self) -> nn.Module:
        return Feeding()

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(tokens)
        if self.logits:
            return Times.apply(self.head(x), self.scale, self.summed)
        return self.head(Times.apply(x, self.weight, self.summed))


class Centring(torch.autograd.Function):
    """Each number beside the mean of others: nothing is kept for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x - x.mean(dim, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad - grad.mean(ctx.dim, keepdim=True), None


class Centres(Factored):
    summed = True

    def forward(self, tokens: Tensor) -> Tensor:
        return Centring.apply(super().forward(tokens), -1)


class CentresBefore(Factored):
    """Along positions, in a block too, and the result goes from one function to another."""

    logits = False

    def layer(self) -> nn.Module:
        return self.Inside()

    class Inside(Feeding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Centring.apply(Centring.apply(x, 1), -1))


class Ending(Factored):
    """What a block ends with goes over a border of stages as it is."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))

    def layer(self) -> nn.Module:
        return self.Inside()

    class Inside(Feeding):
        def forward(self, x: Tensor) -> Tensor:
            return Positioned.apply(super().forward(x))


class Positioned(torch.autograd.Function):
    """A factor for each position, of which the backward knows by the gradient alone how many there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.linspace(1, 2, x.shape[1]).to(x)[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.linspace(1, 2, grad.shape[1]).to(grad)[:, None]


class Total(torch.autograd.Function):
    """A sum over what is cut, which is whole; its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


class TotalOf(Total):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.ones_like(ctx.saved_tensors[0])


class Doubled(torch.autograd.Function):
    """In place, and marked as such more than once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Totals(Plain):
    function: type[torch.autograd.Function] = Total

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, down in self.layers:
            y = torch.tanh(up(x))
            x = x + down(Doubled.apply(Doubled.apply(y * self.function.apply(y))))
        return self.head(x)


class TotalsOf(Totals):
    function = TotalOf


class Along(torch.autograd.Function):
    """A sum over positions, weighed, and what the weight's gradient will be made of: both are of all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, total := x.sum(1, keepdim=True))
        return total * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, total = ctx.saved_tensors
        return torch.ones_like(x) * grad * weight, (grad * total).sum((0, 1))


class Gathered(Plain):
    """Such a sum gates every position."""

    trains = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, DIM), requires_grad=self.trains)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * Along.apply(x, self.weight)
        return self.head(x)


class GatheredOf(Gathered):
    trains = True


class Rounded(Factored):
    """The gradient goes straight through, and the scale has none."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.logits = False
        return Straight.apply(super().forward(tokens), self.scale)[0]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (x / scale).round() * scale, x * 2.0  # of the second nobody asks for a gradient

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Any) -> tuple[Tensor, None]:
        return grad, None


class Silent(Factored):
    """A head that begins with zeros: gradients of what is before it are zeros on the first step, and parts later."""

    logits = False

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


class HookedBeside(Factored):
    """Hooks by position, by feature and by class, of which the program does not ask whether there are gradients."""

    summed = True

    def layer(self) -> nn.Module:
        return self.Inside()

    class Inside(Feeding):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(self.norm(x))
            y.register_hook(lambda grad: grad * torch.linspace(1, 0, grad.shape[-1]).to(grad))
            return x + self.down(torch.tanh(y))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(tokens)
        x.register_hook(lambda grad: (grad - grad.mean(1, keepdim=True)) * torch.linspace(1, 0, grad.shape[1]).to(grad)[:, None])
        logits = self.head(x)
        logits.register_hook(lambda grad: grad.flip(-1))
        return logits


class FactoredBefore(Factored):
    logits = False


class Summed(Factored):
    summed = True


class SummedBefore(FactoredBefore):
    summed = True


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        (Factored, "tp=2", "sums over what is cut"),
        (FactoredBefore, "tp=2,sp=on", "sums over what is cut"),
        (FactoredBefore, "tp=2", ""),
        (Factored, "cp=2", ""),
        (Summed, "tp=2", ""),
        (SummedBefore, "tp=2,sp=on", ""),
        (Summed, "cp=2", "sums over the sequence"),
        (Centres, "tp=2", ""),
        (Rounded, "tp=2", ""),
        (Totals, "tp=2", "gives a whole gradient of a tensor of which each rank has a part"),
        (TotalsOf, "tp=2", ""),
        (Gathered, "cp=2", ""),
        (GatheredOf, "cp=2", "sums over the sequence"),
        (HookedBeside, "pp=2,microbatches=4,schedule=zbh1", "would run twice"),
        (HookedBeside, "pp=2,microbatches=4", ""),
        swept(HookedBeside, "tp=2", ""),
        (HookedBeside, "tp=2,sp=on", ""),
        (HookedBeside, "cp=2", ""),
        (CentresBefore, "cp=2", "sums over the sequence"),
        swept(Ending, "tp=2,sp=on", ""),
        (Ending, "cp=2,pp=2,microbatches=2", ""),
        (Ending, "pp=2,tp=2,sp=on,microbatches=2", ""),
    ],
)
def test_gradients_of_whole_tensors_by_functions_of_its_own(pool: Pool, kind: type, plan: str, said: str) -> None:
    """Right, or refused: each was silent with a part of the sum, or with twice of it."""
    ranks = 4 if "pp=2" in plan and ("cp=2" in plan or "tp=2" in plan) else 2
    if said:
        assert all(said in text for text in pool.run(first_step, kind, plan, ranks=ranks))
    else:
        assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=ranks))


def second_step(plan: str) -> str:
    model, loss_fn, batches = case_of(Silent).make()
    engine = parallelize(model.double(), loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    engine.step(batches[0])  # its weight stays as it is
    try:
        engine.step(batches[0])
    except SoliError as error:
        return str(error)
    return "it ran"


def test_gradients_of_zero_say_nothing_of_later_ones(pool: Pool) -> None:
    assert all("sums over what is cut" in said for said in pool.run(second_step, "tp=2,sp=on", ranks=2))


def distilled(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """What a policy has gone from another one, and a bound that nothing exceeds yet."""
    log = out.log_softmax(-1)
    far = torch.max(torch.zeros(()).to(out), log.exp() - 2).sum()
    other = torch.full_like(log, -math.log(log.shape[-1]))
    return F.kl_div(log, other, log_target=True, reduction="batchmean") * len(out) + far, len(out)


@pytest.mark.parametrize("plan", ["tp=2", "cp=2"])
def test_losses_of_batchmean_and_of_two_tensors(pool: Pool, plan: str) -> None:
    expected = trained(distilled, "dp=1")
    for found in pool.run(trained, distilled, plan, ranks=2):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


# --- between steps -----------------------------------------------------------------------------------------


class Gated(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.gate.exp()


def clamped(plan: str) -> list[float]:
    engine, batches = engine_of(Gated, plan)
    found = []
    for batch in batches:
        found.append(float(engine.step(batch)))
        engine.model.gate.data.clamp_(0.5, 0.6)
    return found


def left_out_alone(plan: str, then: str) -> str:
    engine, batches = engine_of(Plain, plan)
    engine.step(batches[0])
    engine.forward_backward(batches[1])
    engine.update() if engine.rank else engine.discard()
    return said_by(engine.step, batches[0]) if then == "step" else said_by(engine.evaluate, batches)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.parametrize("then", ["step", "evaluate"])
def test_a_step_that_some_ranks_leave_out_is_noticed(pool: Pool, plan: str, then: str) -> None:
    assert all("steps left out by discard(): 0, and 1 on the others" in said for said in pool.run(left_out_alone, plan, then, ranks=2))


def averaged(plan: str) -> list[float]:
    engine, batches = engine_of(Plain, plan)
    still, found = copy.deepcopy(engine.model), []
    for batch in batches:
        engine.step(batch)
        found.append(float(still(batch["tokens"]).square().sum()))
    return found


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,recompute=full", "dp=2,zero=2"])
def test_writes_into_one_number_and_copies_of_a_model(pool: Pool, plan: str) -> None:
    assert pool.run(clamped, plan, ranks=2) == [pytest.approx(clamped("dp=1"), rel=BOUND)] * 2
    if "zero=3" not in plan:
        assert pool.run(averaged, plan, ranks=2) == [pytest.approx(averaged("dp=1"), rel=BOUND)] * 2


class Complex(Plain):
    """Pairs of a weight that stands after an odd number of others are complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.pairs = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.randn(DIM, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        return self.head(x * torch.view_as_complex(self.pairs).abs() + self.odd.sum())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_lie_where_an_allocation_of_their_own_would(pool: Pool, zero: int) -> None:
    assert all(error < BOUND for error in pool.run(error_of, Complex, f"dp=2,zero={zero}", ranks=2))


class Failing(Plain):
    fails = False

    def forward(self, tokens: Tensor) -> Tensor:
        found = super().forward(tokens)
        if self.fails:
            raise ValueError("a bad sample")
        return found


def recovered(plan: str, folder: str, call: str) -> list[float]:
    engine, batches = engine_of(Failing, plan)
    engine.save(f"{folder}/{plan}-{call}")
    engine.step(batches[0])
    engine.model.fails = True
    with pytest.raises(ValueError, match="bad sample"):
        engine.step(batches[1]) if call == "step" else engine.evaluate(batches[1:])
    engine.model.fails = False
    engine.load(f"{folder}/{plan}-{call}")
    found = [float(engine.step(batch)) for batch in batches]
    if engine.plan.zero < 3:
        loss, count = losses.cross_entropy("targets")(engine.model(batches[0]["tokens"]), batches[0])
        assert "none of a step" in said_by((loss / count).backward)
    return found


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_run_goes_on_after_an_error(pool: Pool, tmp_path: Any, call: str) -> None:
    expected = recovered("dp=1", str(tmp_path), call)
    for plan in ("dp=2", "dp=2,zero=3"):
        for found in pool.run(recovered, plan, str(tmp_path), call, ranks=2):
            assert found == pytest.approx(expected, rel=BOUND)


def without_versions(plan: str) -> list[float]:
    engine, batches = engine_of(Plain, plan)
    with torch.inference_mode():
        found = [engine.evaluate(batches)]
    found += [float(engine.step(batch)) for batch in batches]
    with torch.inference_mode():
        return [*found, engine.evaluate(batches)]


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2", "tp=2", "tp=2,sp=on"])
def test_evaluation_in_inference_mode(pool: Pool, plan: str) -> None:
    expected = without_versions("dp=1")
    for found in pool.run(without_versions, plan, ranks=2):
        assert found == pytest.approx(expected, rel=BOUND)


# --- what such checks are not to refuse --------------------------------------------------------------------


class Meeting(Dropping):
    """Rows that depend on each other, as they may where all are in one part."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        return self.head(self.drop(x - x.mean(0)))


class Scored(nn.Module):
    """A block that looks at the whole sequence without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean((1, 2), keepdim=True)
        return self.up(x) / scale


class Scoring(Plain):
    def layer(self) -> nn.Module:
        return Scored()


class Nothing(Dropping):
    """Dropout of nothing, and numbers for a place whose values are nobody's."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        noise = torch.rand_like(torch.empty(x.shape, dtype=x.dtype))
        return self.head(torch.tanh(torch.cat([self.drop(x[:, :0]), x], 1) + 0.1 * noise))


class Gumbel(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x * F.gumbel_softmax(self.layers[0](x), dim=-1)
        return self.head(x + F.gumbel_softmax(self.layers[1](x), 2.0, True))


class Same(Plain):
    """What torch gives back as it is, between blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x.contiguous()).flatten(2)
        return self.head(x)


class Masks(Plain):
    """Indices by masks between blocks: of the batch, of places, and in front of what is not cut there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("even", torch.arange(DIM) % 2 == 0)

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.embed(tokens), tokens > 10
        for layer in self.layers:
            y, z = torch.zeros_like(x), torch.zeros(x.shape, dtype=x.dtype)
            y[seen] = torch.tanh(layer(x))[seen]
            z[..., self.even] = y[..., self.even] - y[:, :, ~self.even]
            x = x + y + z
        return self.head(x)


class Large(Plain):
    """Those of a layer's results that are large: how many there are, only who has them knows."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            y, z = torch.tanh(layer(x)), torch.zeros_like(x)
            z[y > 0.1] = y[y > 0.1]
            x = x + z
        return self.head(x)


class Apart(Plain):
    """What an evaluation sets after the last block, a training forward reads before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * (self.scale if self.training else 1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if not self.training:
            self.scale = 2.0
        return self.head(x)


class ApartInBuffer(Apart):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * (1 if self.training else self.scale)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.training:
            self.scale.fill_(2.0)
        return self.head(x)


@pytest.mark.parametrize("kind", [Apart, ApartInBuffer])
def test_what_one_mode_leaves_for_another_stage_in_the_other_is_refused(pool: Pool, kind: type) -> None:
    said = pool.run(first_step, kind, "pp=2,microbatches=1", ranks=2)
    assert all("scale is read by a stage whose forward ends before it is changed" in words for words in said)


def test_an_index_by_values_between_stages_is_refused_where_they_are_cut(pool: Pool) -> None:
    assert all("looks at a value (an index by a mask) after layers.0" in said for said in pool.run(first_step, Large, "pp=4,microbatches=4", ranks=4))


@pytest.mark.parametrize(
    ("kind", "plan"), [(Masks, "pp=2,microbatches=2"), (Masks, "pp=2,tp=2,microbatches=2"), (Large, "pp=2,microbatches=2"), (Same, "pp=2,tp=2,microbatches=2"), (Meeting, "pp=2,microbatches=1"), (Scoring, "cp=2,recompute=full"), (Nothing, "dp=2"), (Gumbel, "tp=2"), (Gumbel, "dp=2,recompute=full")]
)
def test_what_is_right_is_not_refused(pool: Pool, kind: type, plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=4 if "tp=2,m" in plan else 2))


class Paired(Plain):
    """In evaluation it takes rows by twos; a tuple of the batch is as long as it has rows."""

    def forward(self, tokens: Tensor, size: Any = None, names: Any = None) -> Tensor:
        x = super().forward(tokens)
        return x if self.training else x.unflatten(0, (-1, 4)).flip(1).flip(1).flatten(0, 1)


def with_words(plan: str) -> tuple[float, float]:
    engine, batches = engine_of(Paired, plan)
    batch = {name: x[:8] for name, x in batches[0].items()} | {"size": (6,) * 8, "names": ["a"] * 8}
    return engine.evaluate([batch]), float(engine.step(batch))


def test_tuples_and_words_are_no_rows_and_an_evaluation_that_draws_nothing_runs_whole(pool: Pool) -> None:
    expected = with_words("dp=1")
    for plan in ("dp=2", "dp=2,accumulate=2"):
        assert pool.run(with_words, plan, ranks=2) == [pytest.approx(expected, rel=BOUND)] * 2


# --- proofs, ranks, checkpoints --------------------------------------------------------------------------


def test_values_that_are_no_numbers_are_no_parity() -> None:
    expected = expected_of(case_of(Plain))
    for lost in ("gradients", "parameters", "losses"):
        got = copy.deepcopy(expected)
        if lost == "losses":
            got.losses[-1] = math.nan
        for x in got.gradients[-1].values() if lost == "gradients" else got.parameters.values() if lost == "parameters" else ():
            x.fill_(math.nan)
        worst, _ = compare(got, expected)
        assert not worst <= BOUND, lost


class Averaged(nn.Module):
    """The mean of a row's words, of all that there are or of those that are no padding."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.embed, self.head = masked, nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        there = (tokens > 0).to(torch.float64)[..., None] if self.masked else torch.ones_like(tokens, dtype=torch.float64)[..., None]
        return self.head((self.embed(tokens) * there).sum(1) / there.sum(1))


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([sample.pop("tokens") for sample in samples], batch_first=True)  # and so not to be called twice on one
    return {"tokens": tokens, "targets": tokens[:, 0] % 3}


SIZES = "each rank collates rows of its own, and they are of other sizes on others"


def trained_padded(plan: str, masked: bool, lengths: Sequence[int]) -> tuple[list[float], bool]:
    engine = parallelize(Averaged(masked).double(), losses.cross_entropy("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.5), plan=plan)
    data, before = [{"tokens": torch.arange(1, n + 1)} for n in lengths], len(noted())
    found = [float(engine.step(part)) for part in engine.batches(data, 8, collate=padded, shuffle=False)]
    return found, any(note["text"].startswith(SIZES) for note in noted()[before:])


RAGGED = (3, 9, 4, 4, 11, 5, 3, 6, 7, 3, 3, 5, 8, 4, 10, 6)


def test_ranks_that_pad_to_their_own_longest_say_so(pool: Pool) -> None:
    """A mean over what is padded too was another one, without a word."""
    alone, _ = trained_padded("dp=1", True, RAGGED)
    for found, told in pool.run(trained_padded, "dp=2", True, RAGGED, ranks=2):
        assert found == pytest.approx(alone, rel=BOUND)
        assert told
    other = trained_padded("dp=1", False, RAGGED)
    assert not other[1]
    assert all(told and found != pytest.approx(other[0], rel=1e-3) for found, told in pool.run(trained_padded, "dp=2", False, RAGGED, ranks=2))
    even = trained_padded("dp=1", False, (5,) * 16)[0]
    assert pool.run(trained_padded, "dp=2", False, (5,) * 16, ranks=2) == [(pytest.approx(even, rel=BOUND), False)] * 2


def in_two_views(samples: list[Tensor]) -> dict[str, Tensor]:
    rows = torch.stack(samples)
    tokens = torch.cat([rows, rows.flip(1)])
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def twice(plan: str) -> tuple[list[float], str]:
    engine, _ = engine_of(Plain, plan)
    rows = list(torch.randint(29, (16, 7), generator=torch.Generator().manual_seed(0)))
    found: list[float] = []
    said = said_by(lambda: found.extend(float(engine.step(part)) for part in engine.batches(rows, 8, collate=in_two_views, shuffle=False)))
    if said == "it ran":
        found.append(engine.evaluate(engine.batches(rows, 8, collate=in_two_views, shuffle=False, name=None)))
    return found, said


class Dropping(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens), 0.2, self.training)


def test_a_collate_that_drops_samples_trains_on_the_others() -> None:
    """What they draw belongs to rows, of which there are fewer than samples: it was refused."""
    rows = list(torch.randint(29, (8, 7), generator=torch.Generator().manual_seed(0)))
    some = lambda samples: {"tokens": torch.stack(samples)[:6, :-1], "targets": torch.stack(samples)[:6, 1:]}
    expected = engine_of(Dropping, "dp=1")[0].step(some(rows))
    for plan in ("dp=1", "dp=1,accumulate=2"):
        engine, _ = engine_of(Dropping, plan)
        assert [engine.step(part) for part in engine.batches(rows, 8, collate=some, shuffle=False)] == [pytest.approx(float(expected), rel=BOUND)]


def test_a_collate_that_makes_two_rows_of_a_sample_trains_on_both(pool: Pool) -> None:
    """The second ones were left out, without a word, on one rank too."""
    rows = list(torch.randint(29, (16, 7), generator=torch.Generator().manual_seed(0)))
    engine, _ = engine_of(Plain, "dp=1")
    expected = [float(engine.step(in_two_views(rows[i : i + 8]))) for i in (0, 8)]
    expected.append(engine.evaluate([in_two_views(rows[i : i + 8]) for i in (0, 8)]))
    for plan, ranks in (("dp=1", 1), ("dp=1,accumulate=2", 1), ("tp=2", 2)):
        for found, said in pool.run(twice, plan, ranks=ranks) if ranks > 1 else [twice(plan)]:
            assert said == "it ran"
            assert found == pytest.approx(expected, rel=BOUND)
    assert all("the collate makes other rows than samples" in said for _, said in pool.run(twice, "dp=2", ranks=2))


def masked(samples: list[Tensor]) -> dict[str, Tensor]:
    rows = torch.stack(samples)
    return {"tokens": rows[:, :-1], "targets": torch.where(torch.rand(rows[:, 1:].shape) < 0.3, -100, rows[:, 1:])}


def collated(plan: str) -> str:
    engine, _ = engine_of(Plain, plan)
    rows = list(torch.randint(29, (16, 7), generator=torch.Generator().manual_seed(0)))
    return said_by(lambda: [engine.step(part) for part in engine.batches(rows, 8, collate=masked)])


def test_a_collate_that_draws_is_refused_where_each_rank_has_its_own(pool: Pool) -> None:
    assert all("collate draws random numbers" in said for said in pool.run(collated, "dp=2", ranks=2))
    assert pool.run(collated, "tp=2", ranks=2) == ["it ran"] * 2
    assert collated("dp=1") == "it ran"


def given_other_rows(plan: str) -> str:
    engine, batches = engine_of(Plain, plan)
    bound = torch.full((8,), -math.inf)
    return said_by(engine.step, {**batches[0], "tokens": batches[0]["tokens"].roll(engine.rank, 1), "bound": bound})


def test_an_infinity_in_a_batch_hides_no_other_rows(pool: Pool) -> None:
    assert all("different rows" in said for said in pool.run(given_other_rows, "dp=2", ranks=2))


LISTENING = """
import json, os, sys, psutil
from soli.mesh.world import join
rank = join().rank
own = [c.laddr.ip for c in psutil.Process().net_connections(kind="tcp") if c.status == "LISTEN"]
open(os.path.join(sys.argv[1], str(rank)), "w").write(json.dumps(own))
"""


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_ranks_of_one_machine_listen_to_that_machine(tmp_path: Any, backend: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(LISTENING, encoding="utf-8")
    words = [sys.executable, "-m", "soli.cli.main", "run", "-n", "2", "--backend", backend, str(script), str(tmp_path)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert found[0]
    assert all(address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for own in found for address in own), found


@pytest.mark.parametrize("rate", [torch.tensor(0.1), np.float32(0.1)])
def test_a_rate_that_is_no_number_of_pythons_is_saved(tmp_path: Any, rate: Any) -> None:
    found = []
    for start in (0, 1):
        engine, batches = engine_of(Plain, "dp=1", optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
        engine.optimizer.param_groups[0]["lr"] = rate
        if start:
            engine.load(tmp_path / "0")
        losses_of = [float(engine.step(batch)) for batch in batches[start:]]
        found.append(losses_of[1 - start :])
        if not start:
            engine, _ = engine_of(Plain, "dp=1", optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
            engine.optimizer.param_groups[0]["lr"] = rate
            engine.step(batches[0])
            engine.save(tmp_path / "0")
    assert found[0] == found[1]


def test_a_model_that_recomputes_is_written_by_the_engine() -> None:
    engine, batches = engine_of(Plain, "dp=1,recompute=full")
    engine.step(batches[0])
    assert "engine.copy_model()" in said_by(torch.save, engine.model, io.BytesIO())
    torch.save(engine.copy_model(), io.BytesIO())


def written_whole(plan: str) -> str:
    engine, batches = engine_of(Plain, plan)
    engine.step(batches[0])
    kept = copy.deepcopy(engine.model)
    torch.save(engine.copy_model(), io.BytesIO())
    said = said_by(torch.save, engine.model, io.BytesIO())
    assert said_by(torch.save, kept, io.BytesIO()) == said
    return said


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_a_model_of_which_ranks_have_parts_is_not_written_as_if_it_were_whole(pool: Pool, plan: str) -> None:
    assert all("with this rank's part of it" in said for said in pool.run(written_whole, plan, ranks=2))


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "soli", "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "soli" in done.stdout) == (0, True)


class Pictures(nn.Module):
    """Takes a list of pictures [3, H, W], as detectors do: their channels are no rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images: list[Tensor]) -> Tensor:
        x = torch.stack([image - image.new_tensor([0.4, 0.4, 0.5])[:, None, None] for image in images])
        return self.head(self.seen(x).relu().mean((2, 3)))


class Masked(nn.Module):
    """Its mask is as wide as the longest row (torchaudio's Conformer): rows of which none is the longest do not run alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pad = torch.arange(int(lengths.max())) >= lengths[:, None]
        assert pad.shape == x.shape[:2], "the mask is of another size"
        return self.layer(x).masked_fill(pad[..., None], 0.0)


def test_rows_of_which_some_do_not_run_alone_train_where_nothing_takes_them_apart() -> None:
    """The second half was not tried before it was relied on."""
    x, lengths = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([6, 4, 5, 3])
    model, loss = Masked().double(), lambda out, batch: (out.square().sum(), out.numel())
    expected = model(x, lengths).square().mean()
    engine = parallelize(model, loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    assert abs(float(engine.step({"x": x, "lengths": lengths})) - float(expected)) < BOUND
    assert any("does not run on a part of them: AssertionError: the mask is of another size" in note["text"] for note in noted()[-3:])


def test_pictures_in_a_list_train_where_nothing_takes_them_apart() -> None:
    batch = {"images": [torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)]}
    made = lambda: Pictures().double()
    model, loss = made(), lambda out, batch: (out.square().sum(), out.numel())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = parallelize(made(), loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    for _ in range(3):
        plain.zero_grad()
        expected = model(**batch).square().mean()
        expected.backward()
        plain.step()
        assert abs(float(engine.step(batch)) - float(expected.detach())) < BOUND
    assert any("does not run on a part of them" in note["text"] for note in noted()[-3:])


class OfNoRow(nn.Module):
    """A classifier that returns a weight of its own too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.layers[0].weight


def of_classes(output: Any, batch: Any) -> tuple[Tensor, int]:
    """Rows weighed by how often their class is in the batch."""
    each = F.cross_entropy(output[0], batch["y"], reduction="none")
    return (each * (batch["kind"][:, None] == batch["kind"]).sum(1)).sum(), len(each)


def once_if_any(output: Any, batch: Any) -> tuple[Tensor, int]:
    """A term that a batch has once, where one of its rows asks for it."""
    total = F.cross_entropy(output[0], batch["y"], reduction="sum")
    return (total + output[1].square().sum() if batch["asks"].any() else total), len(batch["y"])


def each_once(output: Any, batch: Any) -> tuple[Tensor, int]:
    """A mean over kinds: its sum adds up, and its count where a kind is in one half alone."""
    return F.cross_entropy(output[0], batch["y"], reduction="sum"), len(batch["kind"].unique())


def coupled_by_a_key(loss_fn: Any, plan: str) -> str:
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 6, generator=generator).double(), "y": torch.arange(8) % 4, "kind": torch.arange(8), "asks": torch.arange(8) % 4 == 0}
    engine = parallelize(OfNoRow(), loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    return said_by(engine.step, batch)


@pytest.mark.parametrize("loss_fn", [of_classes, once_if_any, each_once])
@pytest.mark.parametrize("plan", ["dp=1,accumulate=2", "dp=1,pp=1"])
def test_rows_that_halves_do_not_show_to_be_coupled(loss_fn: Any, plan: str) -> None:
    """Keys that are in the batch once couple the same rows given twice."""
    said = coupled_by_a_key(loss_fn, plan)
    assert ("rows that are there twice have not twice their loss" in said) == ("accumulate" in plan), said


@pytest.mark.parametrize("loss_fn", [of_classes, once_if_any])
def test_rows_that_no_rank_shows_to_be_coupled(pool: Pool, loss_fn: Any) -> None:
    assert any("rows that are there twice have not twice their loss" in said for said in pool.run(coupled_by_a_key, loss_fn, "dp=2", ranks=2))


class SizedByTheBatch(nn.Module):
    """Its first states are as many as a batch's rows: it does not run on more."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)
        self.register_buffer("first", torch.zeros(1, rows, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x, self.first[:, : len(x)].contiguous())[0][:, -1])


def sized_by_the_batch(plan: str, rows: int) -> float:
    batch = {"x": torch.randn(rows, 5, 4, generator=torch.Generator().manual_seed(1)).double(), "targets": torch.arange(rows) % 3}
    engine = parallelize(SizedByTheBatch(rows).double(), losses.cross_entropy("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    return [float(engine.step(batch)) for _ in range(2)][-1]


@pytest.mark.parametrize("rows", [7, 3, 2])
def test_no_check_runs_more_rows_than_the_batch_has(pool: Pool, rows: int) -> None:
    expected = sized_by_the_batch("dp=1", rows)
    for plan in ("dp=2", "dp=2,zero=3"):
        for found in pool.run(sized_by_the_batch, plan, rows, ranks=2):
            assert abs(found - expected) < BOUND


def test_tensors_that_train_beside_the_model_alone_are_told_of() -> None:
    assert with_a_leaf("dp=1") == ["it ran", "it ran"]
    assert sum("1 tensors that are not the model's parameters: their gradients are of its sum" in note["text"] for note in noted()[-4:]) == 1


def with_a_leaf(plan: str) -> list[str]:
    """SAC's log_alpha: a tensor that trains, and is no parameter; and one that is made in the loss, to take a gradient of."""
    log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    inner = losses.cross_entropy("targets")

    def own(output: Any, batch: Any) -> Any:
        total, count = inner(output, batch)
        return total + (log_alpha.exp() * output.detach().mean((1, 2)).sum()).sum(), count

    def made_there(output: Any, batch: Any) -> Any:
        total, count = inner(output, batch)
        return total + torch.zeros(1, dtype=torch.float64, requires_grad=True).sum(), count

    said = []
    for loss_fn in (own, made_there):
        engine, batches = engine_of(Plain, plan, loss_fn=loss_fn)
        said.append([said_by(engine.step, batches[i]) for i in range(3)][-1])
    return said


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "cp=2", "tp=2"])
def test_tensors_that_train_and_are_no_parameters(pool: Pool, plan: str) -> None:
    for own, made_there in pool.run(with_a_leaf, plan, ranks=2):
        assert "1 tensors that are not the model's parameters" in own
        assert made_there == "it ran"


class Prompted(Plain):
    """What it adds to its embeddings is a tensor beside it, that trains or not; or one made anew in each forward, to take a gradient of."""

    kind = "trains"

    def forward(self, tokens: Tensor) -> Tensor:
        if "beside" not in self.__dict__:
            self.__dict__["beside"] = [torch.zeros(DIM, dtype=torch.float64, requires_grad=self.kind == "trains")]
        beside = self.__dict__["beside"][0] if self.kind != "made" else torch.zeros(DIM, dtype=torch.float64, requires_grad=True)
        x = self.embed(tokens) + beside
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Frozen(Prompted):
    kind = "frozen"


class Made(Prompted):
    kind = "made"


def prompted(plan: str, kind: type[nn.Module]) -> str:
    engine, batches = engine_of(kind, plan)
    return [said_by(engine.step, batches[i]) for i in range(3)][-1]


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "pp=2,microbatches=2,chunks=2,schedule=interleaved", "pp=2,microbatches=4,schedule=zbv", "dp=2", "accumulate=2,dp=2"])
def test_tensors_that_train_beside_the_first_stages(pool: Pool, plan: str) -> None:
    assert any("1 tensors that are not the model's parameters" in text for text in pool.run(prompted, plan, Prompted, ranks=2))
    for kind in (Frozen, Made):
        assert pool.run(prompted, plan, kind, ranks=2) == ["it ran", "it ran"]


class AsArray(nn.Module):
    """Takes what tells active positions as arrays are taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 29)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        active = torch.as_tensor(x[..., 0] > 0, dtype=torch.float64) + torch.asarray(obj=x[..., 1] > 0, dtype=torch.float64, copy=True)
        active = active + torch.as_tensor(data=x[..., 2] > 0).double() + torch.as_tensor(x[..., 3], dtype=torch.float64)
        with warnings.catch_warnings(action="ignore"):
            active = active + torch.tensor(x[..., 4], dtype=torch.float64) + torch.tensor([1.0, 2.0]).sum()
        return self.head(x * (1 + active.mean(1)[:, None, None]))


def as_arrays(plan: str) -> list[float]:
    tokens = torch.randint(0, 29, (3, 8, 8), generator=torch.Generator().manual_seed(1))
    engine = parallelize(AsArray().double(), losses.cross_entropy("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    return [float(engine.step({"tokens": some, "targets": some})) for some in tokens]


def test_tensors_that_are_taken_for_arrays_are_whole(pool: Pool) -> None:
    expected = as_arrays("dp=1")
    for plan in ("cp=2", "tp=2,sp=on"):
        for found in pool.run(as_arrays, plan, ranks=2):
            assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < BOUND


class Correlated(nn.Module):
    """Keeps a conjugated tensor for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = torch.fft.rfft(self.q(x), dim=1), torch.fft.rfft(self.k(x), dim=1)
        return x + torch.fft.irfft(q * k.conj(), n=x.shape[1], dim=1) / 8


class Fixed(nn.Module):
    """A fixed point, whose gradient is implicit: autograd.grad in a hook, of a graph that was made for it (Bai et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 8)
        self.weight.weight.data.mul_(0.4)

    def forward(self, x: Tensor) -> Tensor:
        f = lambda z: torch.tanh(self.weight(z) + x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(60):
                z = f(z)
        z = f(z)
        if z.requires_grad:
            z0 = z.detach().requires_grad_()
            with torch.enable_grad():
                f0 = f(z0)

            def implicit(grad: Tensor) -> Tensor:
                y = grad
                for _ in range(60):
                    y = torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad
                return y

            z.register_hook(implicit)
        return z


@pytest.mark.parametrize(("block", "plan"), [(Correlated, "dp=1,recompute=full"), (Correlated, "dp=1,accumulate=2,recompute=full"), (Fixed, "dp=1"), (Fixed, "dp=1,accumulate=2")])
def test_conjugated_tensors_and_implicit_gradients(block: type[nn.Module], plan: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.ModuleList([block()])[0], nn.Linear(8, 2)).double()

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 6, 5, generator=generator).double(), torch.randn(4, 6, 2, generator=generator).double()) for _ in range(3)]
    plain, loss = made(), lambda out, batch: ((out - batch[1]).square().sum(), out.numel())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = parallelize(made(), loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    for x, y in data:
        total, count = loss(plain(x), (x, y))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        assert abs(float(engine.step((x, y))) - float(total.detach()) / count) < BOUND


def lazy(plan: str) -> str:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
    return said_by(lambda _: parallelize(model, losses.mse(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan), None)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2", "pp=2"])
def test_parameters_without_a_shape_are_refused_alike(pool: Pool, plan: str) -> None:
    assert all("parameters have no shape yet" in said for said in pool.run(lazy, plan, ranks=2))


class Handing(Plain):
    """Names its tokens, and hands on what else there is."""

    def forward(self, tokens: Tensor, **others: Tensor) -> Tensor:
        return super().forward(tokens) * others.get("scale", torch.ones(len(tokens)))[:, None, None]


class Naming(Plain):
    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(tokens) * scale[:, None, None]


@pytest.mark.parametrize("kind", [Handing, Naming])
def test_what_a_forward_with_kwargs_is_not_given_is_said(kind: type[nn.Module]) -> None:
    engine, batches = engine_of(kind, "dp=1")
    before = len(noted())
    for batch in batches[:2]:
        engine.step(batch | {"scale": torch.full((len(batch["tokens"]),), 2.0).double()})
    said = [note["text"] for note in noted()[before:] if "**kwargs" in note["text"]]
    assert [text.split(":")[0] for text in said] == (["of the batch the loss alone has targets, scale"] if kind is Handing else [])
