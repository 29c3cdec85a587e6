"""What programs do beside computing a loss: on weights, on gradients, in attributes, in place. They equal the sequential
one, or are refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from operator import setitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.test_kept import DIM, Plain, case_of, error_of, refusal, tokens_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import soli
from pool import Pool
from soli import losses
from soli.core import copies
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.engine import parallelize
from soli.parallel import hooks, models
from soli.verify.parity import BOUND, Case, adamw, check
from sweep import swept


class Counting(Plain):
    """How often it was called is a plain number, and part of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens) * (1 + self.calls / 10)


class Adapter(nn.Module):
    """A frozen product, and a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 3, bias=False), nn.Linear(3, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(Plain):
    """What goes back through a block reads frozen weights after the last gradient of the trained ones is there."""

    def layer(self) -> nn.Module:
        return Adapter()


class Dense(Plain):
    """Each layer reads what all before it gave, from a list that the model goes on to fill."""

    class Sum(nn.Linear):
        def forward(self, seen: list[Tensor], into: list[int]) -> Tensor:
            into.append(len(seen))
            return super().forward(torch.stack(seen).sum(0) / len(seen))

    def layer(self) -> nn.Module:
        return self.Sum(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        seen, sizes = [self.embed(tokens)], []
        for layer in self.layers:
            seen.append(torch.tanh(layer(seen, sizes)))
        assert sizes == [1, 2, 3], "a list that a block fills is the model's own"
        return self.head(sum(seen))


class Detached(Plain):
    """A block whose first lines read its weights as constants: what goes back there comes after the last of their gradients."""

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(nn.functional.linear(x, self.weight.detach(), self.bias.detach()))
            return super().forward(x)

    def layer(self) -> nn.Module:
        return self.Twice(DIM, DIM)


class Comparing(Plain):
    """What a block keeps for its backward are comparisons of its input."""

    class Leak(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x, x / 2) + super().forward(x.masked_fill(x < -1, 0.0))

    def layer(self) -> nn.Module:
        return self.Leak(DIM, DIM)


class Normed(Plain):
    """A hook makes each layer's weight of two others before every call, as torch's older weight_norm does."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 24), nn.utils.weight_norm(nn.Linear(24, DIM)))


class Attending(Plain):
    """torch's own attention, without dropout, from latents to what was read and back."""

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(5, DIM))
            self.read = nn.MultiheadAttention(DIM, 2, batch_first=True)
            self.write = nn.MultiheadAttention(DIM, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            latents = self.latents.expand(len(x), -1, -1)
            latents = latents + self.read(latents, x, x, need_weights=False)[0]
            return self.write(x, latents, latents, need_weights=False)[0]

    def layer(self) -> nn.Module:
        return self.Latent()


class Sparing(Plain):
    """Drops nothing, and asks for that once more where there are many rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        for _ in range(1 + (len(tokens) > 3)):
            x = nn.functional.dropout(x, 0.0, self.training)
        return x


class Ensemble(Plain):
    """Products that torch.func makes one of."""

    class Members(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, DIM, DIM) / DIM)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda weight: torch.tanh(x @ weight))(self.weights).mean(0)

    def layer(self) -> nn.Module:
        return self.Members()


class Hooking(Plain):
    """Puts hooks on its layers in the first forward, once, as transformers' models do that return hidden states."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not getattr(self, "hooked", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, given, out: self.seen.append(out))
            self.hooked = True
        self.seen: list[Tensor] = []
        x = super().forward(tokens)
        assert len(self.seen) in (0, 3), len(self.seen)
        return x + sum((self.head(one) for one in self.seen), torch.zeros(()))


class Recording(Plain):
    """Hooks from its beginning keep what its layers gave, in a dict of its own that they reach through the model, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, last = {}, []
        self.last = last
        for k, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda module, given, out, k=k: self.kept.update({k: out}))
            layer.register_forward_hook(lambda module, given, out: last.append(out))

    def forward(self, tokens: Tensor) -> Tensor:
        self.last.clear()
        x = super().forward(tokens)
        return x + self.head(self.kept[0] + self.last[-1])


class Between(Plain):
    """Between its blocks: a weight asked for where it lies, and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.place = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(1, 1, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x * self.scale.to(x.device)))
            x += self.place
        return self.head(x * self.scale.to(x.dtype))


class Reversing(Plain):
    """Calls its blocks inside an autograd function, which makes their gradients itself."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
            ctx.x, ctx.layers = x.detach(), layers
            for layer in layers:
                x = x + torch.tanh(layer(x))
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            with torch.enable_grad():
                x = given = ctx.x.requires_grad_()
                for layer in ctx.layers:
                    x = x + torch.tanh(layer(x))
                torch.autograd.backward(x, grad)
            return given.grad, None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.Through.apply(self.embed(tokens), self.layers))


class HandingOn(nn.Module):
    """Names none of its inputs, as a wrapper of another model does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, **batch: Tensor) -> Tensor:
        return self.inner(batch["tokens"])


class Leaning(Plain):
    """Rows read each other by less than float32's rounding may be."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x + 1e-6 * x.mean(0, keepdim=True)


class LeaningAgain(Leaning):
    """Its layers compute in float32 whatever they are given, and are made again in the backward by the program itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + checkpoint(lambda x, layer=layer: torch.tanh(layer(x).float()).to(x.dtype), x, use_reentrant=False)
        x = self.head(x)
        return x + 1e-6 * x.mean(0, keepdim=True)


class Later(Plain):
    """The number is there from the first call on."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(tokens) * (1 + self.calls / 10)


class Leaving(Plain):
    """Leaves results for others to look at; nothing comes of them."""

    size = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.size, self.seen = len(tokens), self.embed(tokens)
        self.logits = super().forward(tokens)
        return self.logits


class Remembering(Plain):
    """Adds what it saw in the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        last, self.last = self.last, x.detach().mean((0, 1))
        return x if last is None else x + last


class Elsewhere(Plain):
    """Counts where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(calls=0)

    def forward(self, tokens: Tensor) -> Tensor:
        self.state.calls += 1
        return super().forward(tokens) * (1 + self.state.calls / 10)


class Table(Plain):
    """Counts in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": [0]}

    def forward(self, tokens: Tensor) -> Tensor:
        self.state["calls"][0] += 1
        return super().forward(tokens) * (1 + self.state["calls"][0] / 10)


class Bounded(Plain):
    """Its embeddings are scaled down, in place, where they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, DIM, max_norm=1.0)


class Frequent(Plain):
    """Gradients of a token are divided by how often it is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, DIM, scale_grad_by_freq=True)


class Counted(Plain):
    """It counts, over all processes, what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        count = torch.tensor(float(tokens.numel()))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(count)
        self.seen += count
        return super().forward(tokens)


class Expert(Plain):
    """Each process computes its share of a layer, for the rows of all, as packages of experts do where processes are many."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.rows = len(x)
            parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, x.contiguous())
            return torch.cat(parts)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.split(ctx.rows)[torch.distributed.get_rank()]  # those of other ranks' losses are lost

    def forward(self, tokens: Tensor) -> Tensor:
        if not torch.distributed.is_initialized():
            return super().forward(tokens)
        rows, rank = len(tokens), torch.distributed.get_rank()
        return self.Gather.apply(super().forward(tokens))[rank * rows : (rank + 1) * rows]  # type: ignore[no-any-return, no-untyped-call]


class Teaching(Plain):
    """Every forward moves a second set of weights a little towards the first."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, quick in zip(self.teacher.parameters(), self.layers[0].parameters(), strict=True):
                slow.mul_(0.9).add_(quick, alpha=0.1)
        return super().forward(tokens) + self.head(self.teacher(self.embed(tokens)))


class Momentum(Plain):
    """Between its blocks the first ones' weights move those of the last ones, which begin as they are (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        quick = slow = self.embed(tokens)
        for layer in self.layers:
            quick = layer(quick)
        with torch.no_grad():
            for one, other in zip(self.slow.parameters(), self.layers.parameters(), strict=True):
                one.data.mul_(0.9).add_(other.data, alpha=0.1)
        for layer in self.slow:
            slow = layer(slow)
        return self.head(quick + slow)


class Together(Momentum):
    """The same by functions of several tensors at once (lightly's update_momentum), some of which write into what they are given second."""

    def forward(self, tokens: Tensor) -> Tensor:
        quick = slow = torch.tanh(self.layers[0](self.embed(tokens)))
        with torch.no_grad():
            weights = list(self.slow.parameters())
            torch._foreach_mul_(weights, 0.9)
            torch._foreach_add_(weights, list(self.layers.parameters()), alpha=0.1)
        parts = [quick * 1.0, quick * 2.0]
        torch._foreach_clamp_min_(parts, 0.1)
        for layer in self.slow:
            slow = layer(slow)
        return self.head(parts[0] + parts[1] + slow)


class Banked(Plain):
    """What it keeps moves where gradients are taken alone (lightly's memory bank)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        found = self.head(x + self.bank)
        if x.requires_grad:
            self.bank.mul_(0.5).add_(x.detach().mean((0, 1)))
        return found


class Looked(Plain):
    """Keeps for others to look at what its last forward chose, and a flag of gradients."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        self.chosen, self.mask, self.warned = x.argmax(-1), x > 0, torch.is_grad_enabled()
        if x.requires_grad:
            self.last = x.detach()
        return self.head(x)


class Keys(Momentum):
    """The same before any block, so that one stage writes and reads them, at each size of a batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            for one, other in zip(self.slow.parameters(), self.layers.parameters(), strict=True):
                one.data.mul_(0.9).add_(other.data, alpha=0.1)
        quick = slow = self.embed(tokens)
        for layer in self.slow:
            slow = layer(slow)
        for layer in self.layers:
            quick = layer(quick)
        return self.head(quick + slow)


class Near(nn.Module):
    """A table of distances, which asks its own weight where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, DIM)

    def forward(self, length: int) -> Tensor:
        places = torch.arange(length, device=next(self.parameters()).device)
        return self.table((places[None] - places[:, None]).clamp(0, 7)).mean(1)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, near: nn.Module) -> Tensor:
        return x + self.down(torch.tanh(self.up(x + near(x.shape[1]))))


class Handing(Plain):
    """Its blocks are given a module among their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.near = Near()

    def layer(self) -> nn.Module:
        return Biased()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.near)
        return self.head(x)


class Fading(Plain):
    """It makes weights smaller between its blocks, several at once: those of blocks to come, or of the first one."""

    def fade(self) -> None:
        torch._foreach_mul_([one.data for one in self.head.parameters()], 0.9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        self.fade()
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class FadingLate(Fading):
    """After what the last stage begins with."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.fade()
        return self.head(x)


class Beginning(Plain):
    """Its first forward sets a weight by what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.begun = nn.Parameter(torch.zeros(DIM)), False

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.begun:
            self.shift.data.copy_(self.embed(tokens).detach().mean((0, 1)))
            self.begun = True
        return super().forward(tokens) + self.head(self.shift)


class Drawing(Plain):
    """Draws an order of the rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1 + torch.randperm(len(tokens)).view(-1, 1, 1) / 10)


class InPlace(Plain):
    """Writes into what its blocks returned."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            y = layer(x)
            y += x
            x = torch.relu_(y)
        return self.head(x)


class Hooked(Plain):
    """Halves a gradient on its way through a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda m, given, taken: tuple(g * 0.5 for g in given))


class Lending(Plain):
    """Calls its layers with weights that are made of theirs."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.func.functional_call(layer, {"weight": layer.weight * 0.5, "bias": layer.bias}, (x,))
        return self.head(x)


GAINS = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64)


class Tabled(Plain):
    """A table outside the model, put where the values lie; it lies there already."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * GAINS.to(x) * GAINS.type_as(x) * GAINS.to(x, copy=True)
        return self.head(x)


class Scaled(Plain):
    """Its gradients are scaled, masked, centred, or written into."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(DIM * DIM).view(DIM, DIM) % 3 > 0
        self.layers[0].weight.register_hook(lambda gradient: gradient * 0.5)
        self.layers[1].weight.register_hook(lambda gradient: gradient * mask)
        self.layers[2].weight.register_hook(lambda gradient: None)
        self.embed.weight.register_hook(lambda gradient: torch.cat([gradient[:3] * 0, gradient[3:] - gradient[3:].mean(0)]))
        self.head.weight.register_hook(lambda gradient: setitem(gradient, slice(2), 0))
        self.layers[0].bias.register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        swept(Adapted, "dp=2,zero=3"),
        (Adapted, "dp=2,zero=3,accumulate=2,recompute=full"),
        (Adapted, "tp=2,sp=on"),
        (Dense, "dp=2,recompute=full"),
        swept(Detached, "dp=2,zero=3"),
        (Detached, "dp=2,zero=3,accumulate=2,recompute=full"),
        (Comparing, "tp=2,sp=on,recompute=full"),
        (Comparing, "cp=2,recompute=selective"),
        (Plain, "tp=2,recompute=full"),
        (Plain, "tp=2,sp=on,recompute=selective"),
        swept(Normed, "tp=2"),
        (Normed, "tp=2,sp=on,recompute=full"),
        swept(Attending, "tp=2"),
        (Attending, "tp=2,sp=on"),
        (Attending, "cp=2"),
        (Attending, "cp=2,context=ulysses"),
        (Sparing, "dp=2"),
        (Recording, "dp=2"),
        (Hooking, "dp=1"),
        (Hooking, "dp=2,zero=3"),
        (Hooking, "tp=2,sp=on"),
        swept(Between, "pp=2,microbatches=2"),
        (Between, "pp=3,microbatches=4"),
        (Reversing, "dp=2"),
        (Ensemble, "tp=2"),
        (HandingOn, "dp=2"),
        (HandingOn, "pp=2,microbatches=2"),
        (Leaning, "tp=2"),
        (Dense, "dp=2,accumulate=2,recompute=selective"),
        (Counting, "dp=2,zero=3"),
        swept(Counting, "tp=2"),
        swept(Counting, "cp=2"),
        (Counting, "pp=2,microbatches=1"),
        (Later, "dp=2"),
        swept(Later, "tp=2"),
        (Later, "pp=2,microbatches=1"),
        (Leaving, "dp=2,zero=3,accumulate=2,recompute=full"),
        (Leaving, "tp=2,sp=on"),
        (Leaving, "pp=2,microbatches=2"),
        (Remembering, "tp=2"),
        swept(Remembering, "cp=2"),
        (Bounded, "tp=2"),
        (Frequent, "tp=2"),
        swept(Teaching, "dp=2"),
        (Momentum, "dp=2"),
        (Momentum, "tp=2"),
        (Together, "tp=2"),
        (Looked, "dp=2"),
        (Looked, "dp=1,accumulate=2,recompute=full"),
        (Keys, "pp=2"),
        (FadingLate, "pp=2"),
        (Handing, "tp=2"),
        (Teaching, "dp=2,zero=2"),
        (Teaching, "tp=2"),
        (Beginning, "tp=2"),
        swept(InPlace, "dp=2,zero=3"),
        (InPlace, "dp=2,zero=3,accumulate=2,recompute=full"),
        (InPlace, "tp=2"),
        (Scaled, "dp=2,zero=3,accumulate=2"),
        (Scaled, "pp=2,microbatches=2"),
        (Scaled, "tp=2,sp=on"),
        (Tabled, "pp=2,microbatches=2"),
        (Tabled, "tp=2,sp=on"),
        (Hooked, "dp=2,zero=3,accumulate=2"),
        (Lending, "dp=2,accumulate=2"),
        (Table, "dp=2"),
        (Table, "tp=2"),
    ],
)
def test_it_equals_the_sequential_program(pool: Pool, kind: type[nn.Module], plan: str) -> None:
    ranks = {"dp=1": 1, "pp=3": 3}.get(plan[:4], 2)
    assert all(error < BOUND for error in pool.run(error_of, kind, plan, ranks=ranks))


class Grouped(Plain):
    """Each four rows are one group, of which the others' mean is taken away: it runs on no two."""

    def forward(self, tokens: Tensor) -> Tensor:
        groups = super().forward(tokens).unflatten(0, (-1, 4))
        return (groups - groups.mean(1, keepdim=True)).flatten(0, 1)


def error_of_groups(plan: str) -> float:
    make = lambda: (case_of(Grouped).make()[0], losses.cross_entropy("targets"), [tokens_of(8, i) for i in range(3)])
    return check(Case("groups", make, adamw), plan, 0).worst


@pytest.mark.parametrize("plan", ["tp=2,sp=on", "cp=2", "pp=2,microbatches=1"])
def test_groups_of_rows_equal_the_sequential_program(pool: Pool, plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of_groups, plan, ranks=2))


def test_hooks_of_a_copy_write_into_the_copy() -> None:
    made = Recording()
    copied = copies.deep(made)
    copied(torch.zeros(2, 6, dtype=torch.long))
    assert (made.kept, made.last) == ({}, [])
    assert (len(copied.kept), len(copied.last)) == (3, 3)


def test_the_first_step_calls_a_model_once() -> None:
    model, loss_fn, batches = case_of(Counting).make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan="dp=1")
    for number, batch in enumerate(batches, 1):
        engine.step(batch)
        assert model.calls == number


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        (Counting, "dp=2,accumulate=2", "got     calls"),
        (Table, "dp=2,accumulate=2", "got     state"),
        (Later, "dp=2,recompute=full", "dp=2,recompute=full runs it 2 times a step"),
        swept(Leaning, "dp=2", "parts, in float64"),
        (Leaning, "dp=2,accumulate=2,recompute=full", "parts, in float64"),
        (LeaningAgain, "dp=2", "parts, in float64"),
        (Leaning, "pp=2,microbatches=2", "parts, in float64"),
        (Leaning, "tp=2,accumulate=2", "parts, in float64"),
        swept(Leaning, "dp=2,zero=3", "parts, in float64"),
        swept(Remembering, "dp=2", "by the rows that it sees"),
        (Remembering, "tp=2,accumulate=2", "by the rows that it sees"),
        (Elsewhere, "dp=2", "another loss when it is called again on the same rows"),
        (Bounded, "dp=2", "by the rows that it sees"),
        swept(Bounded, "dp=2", "got     embed.weight\n"),
        (Bounded, "dp=2,zero=1", "under zero=1 they are copies"),
        (Bounded, "dp=2,zero=3", "got     embed.weight\n"),
        swept(Bounded, "cp=2", "by the rows that it sees"),
        (Bounded, "pp=2,microbatches=2", "by the rows that it sees"),
        (Beginning, "dp=2", "got     shift\n"),
        (Teaching, "dp=2,accumulate=2", "dp=2,accumulate=2 runs it 2 times a step"),
        (Teaching, "dp=2,zero=3", "got     teacher.weight, teacher.bias\n"),
        (Fading, "pp=2", "between its blocks"),
        (Momentum, "pp=2", "writes into parameters that several stages of the pipeline have"),
        (Banked, "dp=2", "where gradients are taken, and not without them"),
        (Banked, "dp=2,accumulate=2", "where gradients are taken, and not without them"),
        (Banked, "tp=2,recompute=full", "where gradients are taken, and not without them"),
        (Frequent, "dp=2", "scale_grad_by_freq"),
        swept(Frequent, "cp=2", "scale_grad_by_freq"),
        (Drawing, "dp=2", "torch.randperm"),
        (Reversing, "pp=2,microbatches=2", "layers.0 is called inside a custom autograd function"),
        swept(Ensemble, "cp=2", "tensors cut over ranks"),
        (Ensemble, "tp=2,sp=on", "tensors cut over ranks"),
        (Hooked, "pp=2,microbatches=2", "are not put into a pipeline's stages"),
        (Hooked, "tp=2,sp=on", "see a rank's part of what tp and cp cut"),
        (Lending, "dp=2,recompute=full", "has other weights when it is recomputed"),
    ],
)
def test_it_is_refused(pool: Pool, kind: type[nn.Module], plan: str, said: str) -> None:
    for text in pool.run(refusal, kind, plan, ranks=2):
        assert said in text


def test_what_the_checks_move_outside_of_modules_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """On one device nothing is refused for it; what is kept in a buffer, or a number of a module, is put back."""
    loss_fn, batches = case_of(Plain).make()[1:]
    for kind, said in ((Elsewhere, True), (Counting, False), (Plain, False)):
        torch.manual_seed(3)
        parallelize(kind().double(), loss_fn, optimizer=adamw, plan="dp=1").step(batches[0])
        assert ("training begins from there" in capsys.readouterr().out) == said


class Fixed(torch.autograd.Function):
    """It knows how much memory numbers take, as what calls kernels does."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.bytes = x.shape.numel() * x.element_size()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if gradient.untyped_storage().nbytes() != ctx.bytes:
            raise ValueError(f"{gradient.untyped_storage().nbytes()} of {ctx.bytes} bytes")
        return gradient


class Knowing(Plain):
    """Its own code raises an error on a part of a sequence, and always when it is told to."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, tokens: Tensor) -> Tensor:
        if self.broken:
            raise ValueError("broken")
        return self.head(Fixed.apply(self.layers[0](self.embed(tokens))))


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


class Scripted(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers[1](scripted(self.layers[0](self.embed(tokens)))))


def knowing(plan: str, broken: bool, kind: type[nn.Module] = Knowing) -> list[str]:
    torch.manual_seed(3)
    loss_fn, batches = case_of(Plain).make()[1:]
    try:
        parallelize((Knowing(broken) if kind is Knowing else kind()).double(), loss_fn, optimizer=adamw, plan=plan).step(batches[0])
    except (ValueError, RuntimeError) as error:
        return getattr(error, "__notes__", [])
    return ["it ran"]


def test_what_a_model_raises_under_a_plan_is_said_with_the_plan(pool: Pool) -> None:
    for rank, notes in enumerate(pool.run(knowing, "cp=2", False, ranks=2)):
        assert len(notes) == 1
        for said in (f"rank {rank}, step 1, under plan dp=1,cp=2", "are cut along dim 0", "The plain model ran on rows of this batch before."):
            assert said in notes[0]
    for notes in pool.run(knowing, "cp=2", True, ranks=2):
        assert len(notes) == 1
        assert "The plain model ran" not in notes[0]


def test_functions_that_torchscript_compiled_are_named(pool: Pool) -> None:
    for notes in pool.run(knowing, "tp=2", False, Scripted, ranks=2):
        assert len(notes) == 1
        assert "Functions of TorchScript (@torch.jit.script) compute out of sight of a plan: take the decorator off." in notes[0]


def test_what_a_model_raises_anyway_is_left_alone(pool: Pool) -> None:
    assert pool.run(knowing, "dp=2,zero=1", True, ranks=2) == [[], []]
    assert pool.run(knowing, "dp=2,zero=1", False, ranks=2) == [["it ran"]] * 2


def first_step(kind: type[nn.Module], plan: str, deferred: bool = False) -> str:
    """What its refusal says."""
    torch.manual_seed(3)
    with soli.deferred() if deferred else nullcontext():
        model = kind().double()
    loss_fn, batches = case_of(Plain).make()[1:]
    try:
        parallelize(model, loss_fn, optimizer=adamw, plan=plan).step(batches[0])
    except SoliError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize("plan", ["tp=2", "cp=2", "pp=2,microbatches=2"])
def test_models_do_not_send_where_ranks_have_the_same_rows(pool: Pool, plan: str) -> None:
    for text in pool.run(first_step, Counted, plan, ranks=2):
        assert "the model sends by itself" in text


class Metered(Plain):
    """A meter of all ranks, a number that one draws for all, and what each has to say."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        if torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            torch.distributed.broadcast(torch.rand(1), 0)
            torch.distributed.all_gather([torch.empty(1) for _ in range(ranks)], torch.ones(1))
            torch.distributed.all_gather_object([None] * ranks, {"seen": len(x)})
        return x


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_models_may_send_what_is_of_no_rows(pool: Pool, plan: str) -> None:
    assert pool.run(first_step, Metered, plan, ranks=2) == ["it ran"] * 2


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_models_do_not_gather_rows_of_other_ranks(pool: Pool, plan: str) -> None:
    for text in pool.run(first_step, Expert, plan, ranks=2):
        assert "sends by itself, and under dp=2" in text
        assert "got     all_gather" in text


def test_models_that_sum_over_all_ranks_are_not_refused_for_sending(pool: Pool) -> None:
    for text in pool.run(first_step, Counted, "dp=2", ranks=2):
        assert "got     seen\n" in text  # a buffer that rows change


@pytest.mark.parametrize("plan", ["dp=2", "tp=2,accumulate=2", "pp=2,microbatches=2"])
def test_rows_of_a_deferred_model_that_lean_on_each_other_are_found(pool: Pool, plan: str) -> None:
    for text in pool.run(first_step, Leaning, plan, True, ranks=2):
        assert "parts, in float64" in text


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e4, 1e4)


@pytest.mark.parametrize(
    ("hook", "linear"),
    [
        (lambda g: 3 * g, True),
        (lambda g: -g + g.mean(), True),
        (lambda g: None, True),
        (clamped, False),
        (lambda g: setitem(g, slice(None), g.clamp(-1e4, 1e4)), False),
        (lambda g: g.sign(), False),
        (lambda g: g / g.norm(), False),
        (lambda g: g + 1e-6, False),
        (lambda g: g.nan_to_num() if g.abs().max() < 1e-3 else 2 * g, False),
        (lambda g: g[0], False),
    ],
)
def test_hooks_on_gradients_are_tried(hook: Any, linear: bool) -> None:
    model = nn.Linear(5, 3)
    model.weight.register_hook(hook)
    found = [problem.got for problem in hooks.problems(model)]
    assert found == ([] if linear else ["register_hook of weight"])


def with_a_graph(plan: str) -> str:
    model, loss_fn, batches = case_of(Plain).make()
    held = model(batches[0]["tokens"]).sum()
    try:
        parallelize(model, loss_fn, optimizer=adamw, plan=plan).step(batches[0])
    except SoliError as error:
        return str(error)
    return f"it ran beside {held}"


@pytest.mark.parametrize("plan", ["pp=2", "tp=2"])
def test_what_was_computed_before_is_told_to_be_held(pool: Pool, plan: str) -> None:
    for said in pool.run(with_a_graph, plan, ranks=2):
        assert "before soli.parallelize" in said
        assert "is still held" in said


def test_what_no_plan_runs_is_said_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[0].weight.register_hook(clamped)
    model[2].bias.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(SoliError) as error:
        parallelize(model, lambda o, b: (o.sum(), 1), optimizer=adamw, plan="dp=1")
    assert [problem.got for problem in error.value.problems] == [
        "1",
        "register_hook of 0.weight",
        "register_post_accumulate_grad_hook of 2.bias",
    ]


def test_what_some_plans_cannot_run_is_said_at_once() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].compile()
    model[2].register_full_backward_hook(lambda module, given, taken: None)
    model.append(nn.Embedding(3, 4, sparse=True))
    assert models.problems(model, Plan(dp=2)) == []
    assert [p.got for p in models.problems(model, Plan(tp=2))] == ["3", "0, 1", "2"]
    assert [p.got for p in models.problems(model, Plan(cp=2, pp=2))] == ["3", "0, 1", "2"]
    (problem,) = models.problems(nn.Sequential(nn.DataParallel(nn.Linear(4, 4))), Plan(dp=2))
    assert "laid over ranks by something else" in problem.what
    assert problem.got == "0"


def test_parameters_without_a_shape_are_refused() -> None:
    found = models.problems(nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3)), Plan(dp=1))
    assert [problem.got for problem in found] == ["0.weight, 0.bias, 1.weight, 1.bias"]


class Forces(Plain):
    """Adds the gradient of an energy."""

    graph = True

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.graph or torch.is_grad_enabled()):
            x = self.embed(tokens)
            x = x if x.requires_grad or not self.graph else x.requires_grad_()
            energy = torch.tanh(self.layers[0](x)).square().sum()
            return self.head(x + torch.autograd.grad(energy, x, create_graph=True)[0])


class Graphless(Forces):
    """Does so without a graph to go back through."""

    graph = False


@pytest.mark.parametrize("plan", ["dp=2,accumulate=2", "dp=2,zero=2,recompute=full"])
def test_a_forward_may_take_gradients(pool: Pool, plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, Forces, plan, ranks=2))


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "tp=2,sp=on", "cp=2", "pp=2,microbatches=2"])
def test_a_forward_that_takes_gradients_is_refused(pool: Pool, plan: str) -> None:
    for text in pool.run(refusal, Forces, plan, ranks=2):
        assert "the forward or its loss takes gradients itself" in text
        assert "zero=0, 1 or 2" in text


class Penalised(Plain):
    """Returns its embeddings too, for a loss that asks how it changes with them."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = given = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x), given


def penalised(plan: str) -> float | str:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, float]:
        total, count = losses.cross_entropy("targets")(output[0], batch)
        if torch.is_grad_enabled():
            slope = torch.autograd.grad(total, output[1], create_graph=True)[0]
            total = total + slope.square().sum()
        return total, float(count)

    def make() -> Any:
        torch.manual_seed(3)
        return Penalised(), loss, [tokens_of(n, n) for n in (8, 9, 7)]

    try:
        return check(Case("penalised", make, adamw), plan, 0).worst
    except SoliError as error:
        return str(error)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "tp=2,sp=on,recompute=full", "cp=2"])
def test_a_loss_that_takes_gradients(pool: Pool, plan: str) -> None:
    for found in pool.run(penalised, plan, ranks=2):
        if plan == "dp=2":
            assert isinstance(found, float), found
            assert found < BOUND
        else:
            assert "the forward or its loss takes gradients itself" in str(found)


def test_gradients_without_a_graph_are_explained() -> None:
    model, loss_fn, batches = case_of(Graphless).make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan="dp=1")
    with pytest.raises(SoliError, match=r"under torch.enable_grad\(\)"):
        engine.step(batches[0])


class Idioms(Plain):
    """An activation that writes into a column's result of three dims, and an old way to ask for a type."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(inplace=True), nn.Linear(2 * DIM, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x.type(x.type()))
        return self.head(x)  # type: ignore[no-any-return]


class LookingBeside(Plain):
    """Each block looks for what was left beside it before it was called, and says so in an assertion."""

    class Block(nn.Module):
        left: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            assert self.left is not None
            self.left = None
            return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

    def layer(self) -> nn.Module:
        return self.Block()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            layer.left = x.detach()
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class DeeplyNormed(Plain):
    """So many batch norms after each other that those of two rows alone make rounding large."""

    def layer(self) -> nn.Module:
        return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU())))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, None].expand(*tokens.shape, -1)  # type: ignore[no-any-return]


class Worded(Plain):
    """A library that says in its own words what was raised under it."""

    def layer(self) -> nn.Module:
        class Block(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                try:
                    return torch.tanh(super().forward(x)).sin()
                except Exception:
                    raise LookupError("the operation failed")  # noqa: B904 (as most programs do)

        return Block(DIM, DIM)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sp=on", "cp=2"])
def test_activations_write_into_columns_and_types_are_texts(pool: Pool, plan: str) -> None:
    assert pool.run(first_step, Idioms, plan, ranks=2) == ["it ran"] * 2


def test_blocks_that_do_not_run_alone_are_not_compared_alone(pool: Pool) -> None:
    assert pool.run(first_step, LookingBeside, "tp=2", ranks=2) == ["it ran"] * 2


def test_rows_of_deep_batch_norms_are_not_taken_for_coupled(pool: Pool) -> None:
    assert pool.run(first_step, DeeplyNormed, "dp=2", ranks=2) == ["it ran"] * 2


def test_a_recomputed_forward_ends_early_under_a_librarys_own_words() -> None:
    assert first_step(Worded, "dp=1,recompute=full") == "it ran"
