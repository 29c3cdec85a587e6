"""Cut tensors against whole ones: arithmetic of cuts, and every rule's values and gradients on real ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pool import Pool
from soli.mesh.collectives import Axis
from soli.mesh.record import recorder
from soli.parallel.tensor import moves, parts
from soli.parallel.tensor.cut import Cut, Run, become_cut, inside, marked, running, whole
from soli.parallel.tensor.split import Misfit, Split, sliced, taken, together, viewed

EPSILON = torch.finfo(torch.float64).eps


@given(
    atoms=st.integers(1, 7),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    ranks=st.integers(1, 4),
    dim=st.integers(0, 2),
)
def test_parts_put_together_are_the_whole(atoms: int, sizes: list[int], ranks: int, dim: int) -> None:
    parts = tuple(atoms * size for size in sizes)
    shape = [2, 3, 2]
    shape[dim] = sum(parts)
    x = torch.arange(math.prod(shape)).view(shape)
    split = Split(dim, parts, atoms)
    assert torch.equal(together([taken(x, split, ranks, r) for r in range(ranks)], split), x)
    assert sum(split.local(ranks, r) for r in range(ranks)) == sum(parts)


@settings(max_examples=300)
@given(data=st.data())
def test_a_view_of_the_parts_is_the_part_of_the_view(data: st.DataObject) -> None:
    """Random factors, merged in two ways: where `viewed` says how the view is cut, it is cut so."""
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=5))
    shape = lambda: tuple(math.prod(run) for run in _runs(factors, data))
    old, new = shape(), shape()
    dim = data.draw(st.integers(0, len(old) - 1))
    count = data.draw(st.sampled_from([p for p in range(1, old[dim] + 1) if old[dim] % p == 0]))
    each = old[dim] // count
    atoms = data.draw(st.sampled_from([a for a in range(1, each + 1) if each % a == 0]))
    split, ranks = Split(dim, (each,) * count, atoms), data.draw(st.integers(1, 3))
    try:
        found = viewed(split, old, new, 1)
    except Misfit:
        return
    x = torch.arange(math.prod(factors)).view(old)
    for rank in range(ranks):
        local = list(new)
        local[found.dim] = found.local(ranks, rank)
        assert torch.equal(taken(x, split, ranks, rank).reshape(local), taken(x.view(new), found, ranks, rank))


def test_a_view_of_the_same_shape_is_cut_alike() -> None:
    """Of a dim of one element too, which only one rank has: it went on whole, and a pipeline's check saw other shapes than its step."""
    split = Split(0, (1,), 1)
    assert viewed(split, (1, 6, 4), (1, 6, 4), 2) == split


def _runs(factors: list[int], data: st.DataObject) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for factor in factors:
        if runs[-1] and data.draw(st.booleans()):
            runs.append([])
        runs[-1].append(factor)
    return runs


def test_slices_are_whole_parts() -> None:
    split = Split(0, (4, 4, 2), 2, frozenset({"w"}))
    assert sliced(split, 4, 10).parts == (4, 2)
    with pytest.raises(Misfit) as caught:
        sliced(split, 3, 10)
    assert caught.value.borders == ((3, 10),)


# --- rules, on real ranks -------------------------------------------------------------------------------

W = torch.linspace(-1, 1, 24, dtype=torch.float64)
COLUMN = W.view(4, 6)  # [n, k] of a plain weight
CUTS = {"last": Split(2, (6,), 3), "middle": Split(1, (5,), 5), "parts": Split(2, (3, 3), 3)}
"""Of x [2, 5, 6]: heads of two, rows of a sequence, two fused parts."""


def _assigned(y: Tensor, x: Tensor) -> Tensor:
    y[:, 1:3] = x[:, :2] * 3
    y[..., -1] = 0.25
    return y


RULES = {
    "gelu": (lambda x: F.gelu(x), CUTS),
    "plus whole": (lambda x: x + torch.linspace(0, 1, 30, dtype=torch.float64).view(5, 6), CUTS),
    "times a row": (lambda x: torch.linspace(0, 1, 6, dtype=torch.float64) * x * 2 - 1, CUTS),
    "in place": (lambda x: (x * 1).add_(x).mul_(3), CUTS),
    "where": (lambda x: torch.where(x > 0, x, -x).masked_fill(x > 0.5, 0.0), CUTS),
    "to and back": (lambda x: x.float().to(torch.float64).contiguous().clone(), ["last"]),
    "transpose": (lambda x: x.transpose(1, 2).mT.permute(2, 0, 1).movedim(0, 1), CUTS),
    "by names": (
        lambda x: torch.tanh(x.movedim(1, destination=2)).transpose(0, dim1=1).transpose(dim1=0, dim0=1).movedim(source=2, destination=1)
        .view(size=(2, 5, 6)).view_as(other=x).reshape(shape=(2, 5, 6)).repeat(repeats=(1, 1, 1)).flatten(start_dim=0, end_dim=1).unflatten(0, sizes=(2, 5))
        + x.select(0, index=1) + torch.sum(input=x, dim=1, keepdim=True) + torch.cat(tensors=[x], dim=0), CUTS,
    ),
    "by numpy's names": (lambda x: x.unsqueeze(axis=1).squeeze(axis=1) + torch.logsumexp(x, axis=0, keepdims=True), CUTS),
    "heads": (lambda x: x.view(2, 5, 3, 2).transpose(1, 2).unflatten(3, (2, 1)).flatten(2), ["last", "middle"]),
    "merge heads": (lambda x: x.view(2, 5, 3, 2).reshape(2, 5, -1).unsqueeze(0).squeeze(0), ["last", "middle"]),
    "batch and heads": (lambda x: x.view(10, 6).view(2, 5, 6).transpose(0, 1).reshape(5, 2, 3, 2), ["last"]),
    "chunk": (lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1], ["parts", "middle"]),
    "split": (lambda x: x.split([2, 3], 1)[1], ["last", "parts"]),
    "slices": (lambda x: x[:, 1:3], ["last", "parts"]),
    "numbers": (lambda x: x[..., None, :, 0] + x[1, :, 0:1].sum(), ["middle"]),
    "last token": (lambda x: x[:, -1], ["last", "parts"]),
    "steps": (lambda x: x[..., ::2] - x[..., 1::2], ["last", "middle"]),
    "indexed": (lambda x: x[:, torch.tensor([0, 0, 4])], ["last", "parts"]),
    "indexed by numbers in a row": (
        lambda x: x[:, [[0, 1], [1, 2]]].sum(1) * x[..., range(2), :] + x[:, np.arange(2)] + x[[0, 1]][:, (1, 3)] + x[:, [True] * 2 + [False] * 3], CUTS,
    ),
    "a mask of no dim": (lambda x: x[True] + x[:, np.int64(1)][:, None] * x[:, np.array(2)][:, None] + x[[]].sum() + x[[[0, 1], [1, 0]]].sum(), CUTS),
    "repeat": (lambda x: x.view(2, 5, 3, 2).transpose(1, 2).repeat_interleave(2, 1), ["last"]),
    "expand": (lambda x: x.view(2, 5, 3, 1, 2).expand(2, 5, 3, 4, 2).reshape(2, 5, 12, 2), ["last", "middle"]),
    "rows added": (
        lambda x: (x * 1).index_add_(1, torch.tensor([0, 4, 4]), x[:, :3] * 2).index_fill(1, torch.tensor([2]), 0.5), CUTS,
    ),
    "elements set": (lambda x: _assigned(x * 1, x), CUTS),
    "gathered, then changed": (lambda x: (y := x * 1).flip(1) + y.triu().sum() + y.mul_(2) + y.triu().sum(), CUTS),
    "in place by another": (lambda x: (x * 1).sub_(W.repeat(5)[:60].view(2, 5, 6)).add_(x.mean(1, keepdim=True)), CUTS),
    "expand as": (lambda x: x + torch.linspace(0, 1, 5, dtype=torch.float64).view(5, 1).expand_as(x), CUTS),
    "chosen": (lambda x: x + torch.linspace(0, 1, 9, dtype=torch.float64)[(x > 0.5).long()], CUTS),
    "cat": (lambda x: torch.cat([x, x * 2], 1), ["last", "parts"]),
    "cat parts": (lambda x: torch.cat([x, x * 2], -1), ["last", "parts"]),
    "stack": (lambda x: torch.stack([x, -x], 1), CUTS),
    "unbind": (lambda x: x.unbind(0)[1] + x.unbind(0)[0], CUTS),
    "sum all": (lambda x: x.sum(), CUTS),
    "sum over it": (lambda x: x.sum((0, -1)), CUTS),
    "mean of others": (lambda x: x.pow(2).mean(0, keepdim=True), CUTS),
    "mean all": (lambda x: x.mean(), CUTS),
    "softmax": (lambda x: x.softmax(-1) * x, CUTS),
    "log softmax": (lambda x: x.log_softmax(-1), CUTS),
    "softmax of rows": (lambda x: x.softmax(1), CUTS),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), CUTS),
    "cumsum": (lambda x: x.cumsum(0), CUTS),
    "topk": (lambda x: x.topk(1)[0] + x.topk(2, 0)[0].sum(), CUTS),
    "two of each": (lambda x: torch.frexp(x.detach())[0] * x + torch.frexp(x)[1], CUTS),
    "flip": (lambda x: x.flip(0, 2), CUTS),
    "norm": (lambda x: x.norm(2, 1), CUTS),
    "variance": (lambda x: x.var(0, False, True) + x.std(0, True), CUTS),
    "variance of all": (lambda x: x.var() + x.std(False) * x.flatten().var(unbiased=False) + x.sum((0, 1)).var(correction=0), CUTS),
    "larger of two": (lambda x: torch.max(x, -x), CUTS),
    "data": (lambda x: x * x.data, CUTS),
    "as another": (lambda x: x + torch.eye(6)[:5].type_as(x)[None], CUTS),
    "softmax in a type": (lambda x: torch.softmax(x.float(), 1, torch.float64), CUTS),
    "short index": (lambda x: x.gather(0, torch.zeros(1, 5, 1, dtype=torch.int64)), ["last"]),
    "gather": (lambda x: x.gather(-1, torch.tensor([0, 5, 2, 3, 1] * 2).view(2, 5, 1)), ["last", "middle"]),
    "linear": (lambda x: F.linear(x, COLUMN, COLUMN[:, 0]), CUTS),
    "matmul": (lambda x: x @ COLUMN.t(), CUTS),
    "self product": (lambda x: x @ x.transpose(1, 2), CUTS),
    "product of heads": (lambda x: (h := x.view(2, 5, 3, 2).transpose(1, 2)) @ h.mT @ h, ["last"]),
    "addmm": (lambda x: torch.addmm(COLUMN[:, 0], x.view(-1, 6), COLUMN.t()), ["last", "parts"]),
    "einsum": (lambda x: torch.einsum("bsk,nk->bns", x, COLUMN), CUTS),
    "einsum dots": (lambda x: torch.einsum("...k,nk->...n", x, COLUMN), CUTS),
    "baddbmm": (lambda x: torch.baddbmm(x @ x.mT, x, x.mT, beta=0.5, alpha=2.0), CUTS),
    "layer norm": (lambda x: F.layer_norm(x, (6,), W[:6], W[6:12]), ["middle"]),
    "rms norm": (lambda x: F.rms_norm(x, (6,), W[:6]), ["middle"]),
    "mse": (lambda x: F.mse_loss(x, W.repeat(5)[:60].view(2, 5, 6), reduction="sum"), CUTS),
    "pools": (lambda x: F.max_pool1d(x, 3, 1, 1) + F.adaptive_max_pool2d(x[:, None], (5, 6), return_indices=True)[0][:, 0], CUTS),
    "pools of parts": (
        lambda x: x + F.fractional_max_pool2d(x[:, None], 2, (2, 2), _random_samples=torch.full((2, 1, 2), 0.5, dtype=x.dtype)).sum(), CUTS,
    ),
    "in its own name": (lambda x: x * torch.unique_consecutive(x.round(), return_counts=True)[1].sum() + torch.meshgrid(x[:, 0, 0], x[1, :, 1], indexing="ij")[0].sum(), CUTS),
    "no rule": (lambda x: torch.fft.rfft(x, dim=1).abs(), CUTS),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*[x.view(2, 5, 3, 2).transpose(1, 2) * i for i in (1, 2, 3)], is_causal=True),
        ["last"],
    ),
    "one key head": (
        lambda x: F.scaled_dot_product_attention(
            x.view(2, 5, 3, 2).transpose(1, 2), W[:20].view(2, 1, 5, 2), W[4:24].view(2, 1, 5, 2), enable_gqa=True
        ),
        ["last"],
    ),
    "grouped keys": (
        lambda x: F.scaled_dot_product_attention(
            W.repeat(5).view(2, 6, 5, 2), x.view(2, 5, 3, 2).transpose(1, 2), W.repeat(3)[:60].view(2, 3, 5, 2), enable_gqa=True
        ),
        ["last"],
    ),
    "grouped values": (
        lambda x: F.scaled_dot_product_attention(
            W.repeat(5).view(2, 6, 5, 2), W.repeat(3)[:60].view(2, 3, 5, 2), x.view(2, 5, 3, 2).transpose(1, 2), enable_gqa=True
        ),
        ["last"],
    ),
    "masked attention": (
        lambda x: F.scaled_dot_product_attention(
            *[x.view(2, 5, 3, 2).transpose(1, 2)] * 3, attn_mask=torch.linspace(0, 1, 75, dtype=torch.float64).view(3, 5, 5)
        ),
        ["last"],
    ),
    "cross-entropy": (lambda x: F.cross_entropy(x.view(-1, 6), TARGETS, reduction="sum"), ["last", "middle"]),
    "cross-entropy of a mean": (lambda x: F.cross_entropy(x.view(-1, 6), TARGETS, label_smoothing=0.1), ["last"]),
    "cross-entropy, classes second": (
        lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS.view(2, 5), reduction="none"), ["last"],
    ),
    "weighted cross-entropy": (lambda x: F.cross_entropy(x.view(-1, 6), TARGETS, weight=W[12:18]), ["last"]),
    "nll": (lambda x: F.nll_loss(x.view(-1, 6).log_softmax(-1), TARGETS), ["last"]),
}  # fmt: skip
TARGETS = torch.tensor([0, 5, 2, -100, 3, 3, 1, -100, 4, 5])


def against_whole() -> list[str]:
    """Every rule under every cut it is for: what differs from the same on whole tensors."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD)
    wrong = []
    for name, (function, cuts) in RULES.items():
        for cut_name in cuts:
            split = CUTS[cut_name]
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected = function(a)
            weights = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view(expected.shape)
            (expected * weights).sum().backward()
            run = Run(axis, size)
            with running([run]):
                got = function(marked(moves.pick(b, split, axis) * 1, {"tp": split}))
                shape = tuple(got.shape)
                with torch._C.DisableTorchFunctionSubclass(), inside([run], 0):
                    got = whole(run, got)
                    (got * weights).sum().backward()
            wrong += _differences(f"{name}, {cut_name}", shape, got, expected, a, b)
    return wrong


def _differences(what: str, shape: tuple, got: Tensor, expected: Tensor, a: Tensor, b: Tensor) -> list[str]:
    if shape != tuple(expected.shape) or got.shape != expected.shape:
        return [f"{what}: logical shape {shape}, local {tuple(got.shape)}, not {tuple(expected.shape)}"]
    bound = 64 * EPSILON * 60  # sixty elements, and some roundings for each
    if what.startswith(("to and back", "softmax in a type")):
        bound = 64 * torch.finfo(torch.float32).eps
    pairs = (("value", got, expected), ("gradient", b.grad, a.grad))
    return [
        f"{what}: {kind} off by {float((g - e).abs().max()):.1e}"
        for kind, g, e in pairs
        if not float((g - e).abs().max()) <= bound * max(1.0, float(e.abs().max()))
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rules_equal_whole_tensors(pool: Pool, ranks: int) -> None:
    for wrong in pool.run(against_whole, ranks=ranks, deadline=60):
        assert not wrong, "\n".join(wrong)


def under_autocast() -> tuple[torch.dtype, torch.dtype]:
    """The type of a loss of whole logits of 16 bits, and of cut ones."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis, split = Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD), CUTS["last"]
    logits = torch.randn(2, 5, 6, dtype=torch.bfloat16)
    loss = lambda x: F.cross_entropy(x.view(-1, 6), TARGETS, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = loss(logits)
        with running([Run(axis, size)]):
            return expected.dtype, loss(marked(moves.pick(logits, split, axis) * 1, {"tp": split})).dtype


def test_a_loss_of_cut_logits_is_no_rougher(pool: Pool) -> None:
    assert pool.run(under_autocast, ranks=2) == [(torch.float32, torch.float32)] * 2


TOKENS = torch.tensor([[0, 2, 6, 3, 5], [1, 1, 4, 2, 0]])


def small() -> nn.ModuleDict:
    torch.manual_seed(3)
    embedding, norm = nn.Embedding(7, 6, padding_idx=2), nn.LayerNorm(6)
    return nn.ModuleDict({"e": embedding, "c": nn.Linear(6, 10), "r": nn.Linear(10, 6), "n": norm}).double()


def loss_of(model: nn.ModuleDict) -> Tensor:
    x = model["e"](TOKENS)
    x = x + model["r"](torch.tanh(model["c"](model["n"](x))))
    return F.cross_entropy(F.linear(x, model["e"].weight).view(-1, 7), TOKENS.view(-1), reduction="sum")


class _WhileSending(TorchDispatchMode):
    """Whether a product is computed while a collective is under way."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.found |= any(not record.done for record in recorder.records)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def weights_cut() -> list[str]:
    """Columns, rows and a vocabulary, cut, with and without a cut sequence: output and every gradient."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD)
    heads = Split(0, (10,), 5, frozenset("c"))
    splits = {
        "e.weight": Split(0, (7,), 7, frozenset("e")),
        "c.weight": heads,
        "c.bias": heads,
        "r.weight": heads.at(1),
    }
    wrong = []
    for sequence, overlap in itertools.product((False, True), repeat=2):
        plain, model = small(), small()
        expected = loss_of(plain)
        expected.backward()
        for n, p in model.named_parameters():
            if n in splits:
                p.data = taken(p.data, splits[n], size, rank).clone()
                become_cut(p, {"tp": splits[n]})
        products = _WhileSending()
        recorder.clear()  # of other tests: some ended in an error, with a collective under way
        with running([Run(axis, size, sequence, overlap)]):
            loss = loss_of(model)
            with products:
                loss.backward()
        if products.found is not overlap:
            wrong.append(f"products while a sum is under way: {products.found}, overlap={overlap}")
        if type(loss) is Cut or not abs(float(loss - expected)) <= 1e-12:
            wrong.append(f"loss {float(loss)}, not {float(expected)}")
        grads = {n: p.grad for n, p in plain.named_parameters()}
        for n, p in model.named_parameters():
            want = taken(grads[n], splits[n], size, rank) if n in splits else grads[n]
            if p.grad is None or p.grad.shape != want.shape or not float((p.grad - want).abs().max()) <= 1e-12:
                wrong.append(f"gradient of {n}, sequence={sequence}, overlap={overlap}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_that_are_cut(pool: Pool, ranks: int) -> None:
    for wrong in pool.run(weights_cut, ranks=ranks):
        assert not wrong, "\n".join(wrong)


def one_gradient_sum() -> tuple[int, int]:
    """All-reduces of the backward where three columns read one tensor; and of the forward of a row."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD)
    x = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(4 // size, 4, dtype=torch.float64)
    p = nn.Parameter(weight)
    become_cut(p, {"tp": Split(0, (4,), 4, frozenset("w"))})
    recorder.clear()
    with running([Run(axis, size)]):
        y = F.linear(x, p) * F.linear(x, p) + F.linear(x, p)
        total = y.sum()
    forward = len(recorder.records)
    total.backward()
    return forward, len(recorder.records) - forward


def test_columns_of_one_input_sum_its_gradient_once(pool: Pool) -> None:
    assert pool.run(one_gradient_sum, ranks=2) == [(1, 1), (1, 1)]


def test_targets_outside_the_vocabulary_are_an_error() -> None:
    x = marked(torch.zeros(2, 4), {"tp": Split(1, (4,), 4)})
    with running([Run(Axis("tp"), 2)]), pytest.raises(IndexError, match="Target 9 is out of bounds"):
        F.cross_entropy(x, torch.tensor([0, 9]))


def test_indices_outside_the_vocabulary_are_an_error() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    become_cut(weight, {"tp": Split(0, (4,), 4)})
    with running([Run(Axis("tp"), 2)]), pytest.raises(IndexError, match="out of range"):
        F.embedding(torch.tensor([0, 4]), weight)


def gathered_twice() -> int:
    """All-gathers of a tensor and of its contiguous self; on a rank with one of three columns they are one object."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD)
    split, run = Split(2, (3,), 3, frozenset("w")), Run(axis, size)
    whole_one = torch.arange(12.0, dtype=torch.float64).view(1, 3, 4).transpose(1, 2)
    x = marked(taken(whole_one, split, size, rank), {"tp": split})
    recorder.clear()
    with running([run]):
        y = x.contiguous()
        with torch._C.DisableTorchFunctionSubclass(), inside([run], 0):
            for one in (x, y):
                assert torch.equal(whole(run, one), whole_one)
    return len(recorder.records)


def test_what_is_remembered_of_a_tensor_does_not_depend_on_a_ranks_strides(pool: Pool) -> None:
    assert pool.run(gathered_twice, ranks=2) == [2, 2]


def parameter_gathered() -> tuple[bool, float]:
    """A weight that a function without a rule reads: in an evaluation first, then in two microbatches."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD)
    p = nn.Parameter(torch.ones(4 // size, dtype=torch.float64))
    become_cut(p, {"tp": Split(0, (4,), 4, frozenset("w"))})
    with running([Run(axis, size)]):
        with torch.no_grad():
            torch.trace(torch.diag(p))
        for _ in range(2):
            total = torch.trace(torch.diag(p))
            total.backward()
    assert p.grad is not None
    return total.requires_grad, float(p.grad.sum())


def test_a_gathered_weight_is_gathered_again(pool: Pool) -> None:
    assert pool.run(parameter_gathered, ranks=2) == [(True, 4.0)] * 2


@pytest.mark.parametrize(("over", "marked"), [("tp", True), ("row", False), (0, True)])
def test_what_is_beside_a_part_is_marked_where_ranks_of_tp_have_others(over: Any, marked: bool) -> None:
    """Between steps: over a grid's rows alone parts are cut alike on each of its columns. Of a view, perhaps along any dim."""
    weight = nn.Parameter(torch.randn(4, 6))
    become_cut(weight, {over: Split(0, (8,), 8, frozenset({"weight"}))})
    with torch.no_grad(), patch.dict(parts.BESIDE, clear=True):
        weight.add_(torch.randn(4, 6))
        assert any(parts.BESIDE.values()) == marked
