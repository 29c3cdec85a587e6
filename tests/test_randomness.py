"""Dropout as a function of position: rows, modules, calls, recomputation."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from soli import losses
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from soli.parallel.randomness import Randomness


class Shared(nn.Module):
    """One dropout called twice, a functional one, and one inside torch's own attention."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.recompute = recompute

    def block(self, x):
        x = self.drop(self.layer(x))
        x = F.dropout(self.drop(x), 0.2, self.training)
        return x + self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        for _ in range(2):  # the block runs twice: its calls must not share masks
            x = self.block(x) if self.recompute is None else checkpoint(self.block, x, use_reentrant=self.recompute)
        return x


def learnt(model: nn.Module, x: torch.Tensor, seed: int = 0) -> Randomness:
    randomness = Randomness(model, seed)
    with torch.no_grad():
        for rows in (len(x), len(x) // 2):
            with randomness.probe(rows):
                model(x[:rows])
    randomness.finish_probe()
    return randomness


def run(model: nn.Module, randomness: Randomness, x: torch.Tensor, first: int = 0, step: int = 3) -> torch.Tensor:
    with randomness.begin(step, first, len(x)), randomness.forward():
        return model(x)


X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_no_cut_of_the_rows_changes_the_masks() -> None:
    model = Shared().double()
    randomness = learnt(model, X)
    whole = run(model, randomness, X)
    for cuts in ([0, 3, 6], [0, 1, 6], [0, 2, 3, 6]):
        parts = [run(model, randomness, X[a:b], a) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(run(model, randomness, X, step=4), whole)
    assert not torch.allclose(run(model, learnt(model, X, seed=1), X), whole)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_masks(reentrant: bool) -> None:
    found = []
    for recompute in (None, reentrant):
        model = Shared(recompute).double()
        randomness, x = learnt(model, X), X.clone().requires_grad_()
        with randomness.begin(0, 0, len(x)):
            with randomness.forward():
                loss = model(x).square().sum()
            randomness.backward()
            with randomness.forward():
                loss.backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_recomputation_without_the_random_state_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    randomness, x = learnt(model, X.float()), X.float().requires_grad_()
    with randomness.begin(0, 0, len(x)):
        with randomness.forward():
            loss = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum()
        randomness.backward()
        with pytest.raises(SoliError, match="another random state"), randomness.forward():
            loss.backward()


def test_the_rate_is_right_and_calls_differ() -> None:
    model, n, p = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)), 200_000, 0.3
    ones = torch.ones(4, n // 4)
    randomness = learnt(model, ones)
    out = run(model, randomness, ones)
    kept = int((out != 0).sum())
    expected = (1 - p) ** 2
    assert abs(kept / n - expected) < 5 * math.sqrt(expected * (1 - expected) / n)
    torch.testing.assert_close(out[out != 0], torch.full((kept,), 1 / (1 - p) ** 2))


@pytest.mark.parametrize("layout", ["sequence first", "flattened", "no rows"])
def test_the_batch_dim_is_learnt(layout: str) -> None:
    class Laid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            if layout == "sequence first":
                return self.drop(x.transpose(0, 1)).transpose(0, 1)
            if layout == "flattened":
                return self.drop(x.flatten(0, 1)).view(x.shape)
            return x * self.drop(torch.ones(x.shape[1:], dtype=x.dtype))

    model = Laid()
    x = torch.ones(5, 5, 8)  # as many rows as positions: sizes alone do not tell
    randomness = learnt(model, x)
    whole = run(model, randomness, x)
    parts = [run(model, randomness, x[a:b], a) for a, b in ((0, 2), (2, 5))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole[0], whole[1]) is (layout == "no rows")


def test_the_users_generator_is_left_alone_and_other_draws_are_refused() -> None:
    model = nn.Dropout(0.5)
    randomness = learnt(model, X)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    run(model, randomness, X)
    assert torch.equal(torch.get_rng_state(), before)
    randomness.shared = True
    with pytest.raises(SoliError, match="randperm"), randomness.begin(0, 0, 1), randomness.forward():
        torch.randperm(4)


DRAWS = {
    "path": (lambda x: torch.rand((len(x), 1, 1), dtype=x.dtype), (0.0, 1.0, 0.5)),
    "numbers": (lambda x: torch.rand(len(x), 5, 8), (0.0, 1.0, 0.5)),
    "like": (lambda x: torch.rand_like(x, dtype=torch.float32), (0.0, 1.0, 0.5)),
    "jitter": (lambda x: torch.empty_like(x).uniform_(0.9, 1.1), (0.9, 1.1, 1.0)),
    "normal": (lambda x: torch.randn(size=x.shape), (-9.0, 9.0, 0.0)),
    "normal like": (lambda x: torch.randn_like(x), (-9.0, 9.0, 0.0)),
    "times": (lambda x: torch.empty_like(x).exponential_(2.0), (0.0, 9.0, 0.5)),
    "around": (lambda x: torch.normal(torch.full_like(x, 2.0), 0.1), (1.0, 3.0, 2.0)),
    "whole": (lambda x: torch.randint(2**20, (len(x), 1, 1)) / 2**20, (0.0, 1.0, 0.5)),
    "whole, by names": (lambda x: torch.randint(high=2**20, low=2**19, size=(len(x), 5, 8), dtype=torch.int32) / 2**20, (0.5, 1.0, 0.75)),
    "whole like": (lambda x: torch.randint_like(x, 2**19, 2**20) / 2**20, (0.5, 1.0, 0.75)),
    "whole in place": (lambda x: torch.empty_like(x).random_(2**20) / 2**20, (0.0, 1.0, 0.5)),
    "slopes": (lambda x: -F.rrelu(-torch.ones_like(x), 0.2, 0.4, True), (0.2, 0.4, 0.3)),
    "shifted": (lambda x: torch.empty_like(x).normal_(2.0, std=0.1), (1.0, 3.0, 2.0)),
    # the mean of a normal number between 1 and 1.5
    "within": (lambda x: nn.init.trunc_normal_(torch.empty_like(x), a=1.0, b=1.5), (1.0, 1.5, 1.224339)),
}
"""What draws, and the least, the most and the mean of it."""


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = torch.rand([])  # one number for all rows
        return torch.cat([self.draw(x).expand_as(x), layer.expand(len(x), 5, 1)], 2)


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_a_model_draws_itself(name: str) -> None:
    draw, (least, most, mean) = DRAWS[name]
    model, x = Drawing(draw), X.repeat(20, 1, 1)
    randomness = learnt(model, x)
    whole = run(model, randomness, x)
    parts = [run(model, randomness, x[a:b], a) for a, b in ((0, 7), (7, 8), (8, len(x)))]
    assert torch.equal(torch.cat(parts), whole)
    drawn, layer = whole[:, 0, 0].double(), whole[..., -1]
    assert layer.unique().numel() == 1
    assert drawn.unique().numel() == len(x)
    assert drawn.min() >= least
    assert drawn.max() <= most
    error = drawn.std() / math.sqrt(len(x))
    assert (drawn.mean() - mean).abs() < 5 * error
    assert not torch.equal(whole, run(model, randomness, x, step=4))


@pytest.mark.parametrize("channels", [True, False])
def test_alpha_dropout_makes_of_each_number_one_of_the_two_that_torchs_does(channels: bool) -> None:
    drop = nn.FeatureAlphaDropout(0.3) if channels else nn.AlphaDropout(0.3)
    x = torch.randn(400, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, ones = run(drop, learnt(drop, x), x), drop(x.new_ones(4000, 5, 8)).unique()
    low, high = ones.tolist()  # of torch's own
    scale = high - drop(x.new_zeros(4000, 5, 8)).max()
    kept = found != low
    torch.testing.assert_close(found[kept], (x * scale + high - scale)[kept])
    assert abs(float(kept.double().mean()) - 0.7) < 5 * math.sqrt(0.21 / (2000 if channels else 16_000))
    assert bool((kept.all(-1) | ~kept.any(-1)).all()) is channels


@pytest.mark.parametrize("replacement", [True, False])
def test_samples_are_taken_as_often_as_their_weights_say(replacement: bool) -> None:
    """The second of two that are not put back is of what is left: 0.5 of (0.5, 0.3, 0.2, 0) becomes 0.3 / 0.7 + 0.2 / 0.8 of what began otherwise."""
    odds, x = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64), X.new_zeros(4000, 5, 8)
    model = nn.Module()
    model.forward = lambda x: torch.multinomial((2 * odds).expand(len(x), 4), 2, replacement)  # type: ignore[method-assign]
    randomness = learnt(model, x)
    found = run(model, randomness, x)
    assert torch.equal(torch.cat([run(model, randomness, x[:1000]), run(model, randomness, x[1000:], 1000)]), found)
    left = odds * ((odds / (1 - odds)).sum() - odds / (1 - odds))  # of the second: another one first, and this one of the others
    for place, chance in ((0, odds), (1, odds if replacement else left)):
        often = F.one_hot(found[:, place], 4).double()
        assert ((often.mean(0) - chance).abs() <= 5 * often.std(0) / math.sqrt(len(often))).all()
    assert bool((found[:, 0] == found[:, 1]).any()) is replacement
    for weights, said in ((odds - 0.1, "< 0"), (odds[:1], "without replacement" if not replacement else "")):
        model.forward = lambda x, w=weights: torch.multinomial(w.expand(len(x), len(w)), 2, replacement)  # type: ignore[method-assign]
        if said:
            with pytest.raises(RuntimeError, match=said):
                learnt(model, x)


RECURRENT: list[tuple[type[nn.RNNBase], dict[str, object]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"bidirectional": True, "batch_first": False}),
    (nn.LSTM, {"proj_size": 3, "bias": False, "bidirectional": True}),
    (nn.GRU, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {"nonlinearity": "tanh", "bidirectional": True, "bias": False}),
]


class Recurrent(nn.Module):
    """All that a recurrent layer returns, by rows: its outputs, and its last state. It begins with another state of each row, layer and direction."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.inner = kind(8, 6, num_layers=3, **{"batch_first": True, **options}).double()  # type: ignore[arg-type]
        self.batch = 0 if self.inner.batch_first else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, count = x.movedim(self.batch, 0)[:, 0], 3 * (1 + self.inner.bidirectional)
        each = torch.arange(1, count + 1, dtype=x.dtype).view(-1, 1, 1)
        hidden, cell = (rows[:, :width] / each for width in (self.inner.proj_size or 6, 6))
        out, end = self.inner(x, (hidden, cell) if isinstance(self.inner, nn.LSTM) else hidden)
        return torch.cat([out.movedim(self.batch, 0).flatten(1), *(e.movedim(1, 0).flatten(1) for e in (end if isinstance(end, tuple) else (end,)))], 1)


@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_dropout_between_recurrent_layers_is_of_rows(kind: type[nn.RNNBase], options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, **options)
    x = X.movedim(0, model.batch)
    plain = model(x)
    model.inner.dropout = 1e-15  # as good as none: the layers one by one are torch's all at once
    torch.testing.assert_close(run_of(model, x, model.batch)[0], plain, rtol=1e-11, atol=1e-13)
    model.inner.dropout = 0.5
    whole, parts = run_of(model, x, model.batch)
    torch.testing.assert_close(whole, parts)
    assert not torch.allclose(whole, plain)
    model.inner.dropout = 1.0  # torch's own drops all, and nothing of it is random
    torch.testing.assert_close(run_of(model, x, model.batch)[0], model(x), rtol=1e-11, atol=1e-13)


def test_samples_row_by_row_of_whole_numbers_stand_by_their_rows() -> None:
    """Time first, and flat: rows change fastest, which whole numbers tell too."""
    model = nn.Module()
    model.forward = lambda x: torch.randint_like(x.T.flatten(), 1000).view(x.T.shape).T  # type: ignore[method-assign]
    x = torch.arange(60).view(6, 10)
    randomness = learnt(model, x)
    assert torch.equal(torch.cat([run(model, randomness, x[:2]), run(model, randomness, x[2:], 2)]), run(model, randomness, x))


def run_of(model: nn.Module, x: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all rows, and of two parts of them."""
    randomness = Randomness(model, 0)
    for rows in (6, 3):
        with randomness.probe(rows):
            model(x.narrow(batch, 0, rows))
    randomness.finish_probe()

    def of(first: int, rows: int) -> torch.Tensor:
        with randomness.begin(3, first, rows), randomness.forward():
            return model(x.narrow(batch, first, rows))

    return of(0, 6), torch.cat([of(0, 2), of(2, 4)])


@pytest.mark.parametrize("hard", [True, False])
def test_classes_are_chosen_as_often_as_their_logits_say(hard: bool) -> None:
    """By Gumbel noise: noise of the other sign chooses others (0.3 of eight becomes 0.45)."""
    odds = torch.tensor([0.3] + [0.1] * 7, dtype=torch.float64)
    model, x = nn.Module(), X.new_zeros(400, 5, 8)
    model.forward = lambda x: F.gumbel_softmax(odds.log() + x, 0.5, hard=hard)  # type: ignore[method-assign]
    found = run(model, learnt(model, x), x)
    assert torch.allclose(found.sum(-1), x.new_ones(400, 5))
    assert bool((found.max(-1).values == 1).all()) is hard
    often = F.one_hot(found.argmax(-1), 8).double().flatten(0, 1)
    assert ((often.mean(0) - odds).abs() < 5 * often.std(0) / math.sqrt(len(often))).all()


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_of_others_are_refused_where_ranks_would_differ(draw: Callable[[], float]) -> None:
    randomness = Randomness(nn.Linear(2, 2), seed=1)
    with randomness.probe(2):
        draw()
    randomness.shared = True
    with pytest.raises(SoliError, match="Python's random or from numpy"), randomness.probe(2):
        draw()


ORDERS: dict[str, tuple[Callable[[int], torch.Tensor], bool]] = {
    "rows": (lambda rows: torch.rand(rows).argsort(), False),
    "rows, by dim": (lambda rows: torch.sort(torch.randn(rows, 3), dim=0).indices[:, 0], False),
    "rows, of some": (lambda rows: torch.rand(3, rows).topk(1, -1).indices[:, 0].expand(3)[:rows], False),
    "the largest": (lambda rows: torch.rand(rows, 1).argmax(0).expand(rows), False),
    "rows, filled": (lambda rows: torch.empty(rows).uniform_().argsort(), False),
    "the largest of all": (lambda rows: torch.rand(rows, 1).argmax().expand(rows), False),
    "rows, by their largest": (lambda rows: torch.randn(rows, 1).max(0).indices.expand(rows), False),
    "the largest within rows": (lambda rows: torch.rand(rows, 3).max(1).indices, True),
    "within rows": (lambda rows: torch.rand(rows, 3).argsort(-1)[:, 0], True),
    "within rows, by name": (lambda rows: torch.argsort(input=torch.rand(3, rows), dim=0)[0], True),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("apart", [True, False])
def test_an_order_of_rows_that_is_drawn_is_refused_where_rows_are_apart(name: str, apart: bool) -> None:
    order, allowed = ORDERS[name]
    model = nn.Linear(8, 8).double()
    model.forward = lambda x: x[order(len(x)) % len(x)]
    randomness = Randomness(model, 0)
    randomness.apart = apart
    for rows in (6, 3):
        with randomness.probe(rows):
            model(X[:rows])
    if allowed or not apart:
        randomness.finish_probe()
        return
    with pytest.raises(SoliError, match=r"rows depend on each other: the random numbers .* put in order"):
        randomness.finish_probe()


def test_a_module_made_later_takes_no_name_of_one_that_is_gone() -> None:
    """BigBird replaces its attention in its first forward. Addresses are used again, so nothing of the old may stay."""
    model = nn.Sequential(nn.Sequential(nn.Dropout(0.5)), nn.Identity())
    randomness = Randomness(model, seed=1)
    gone = weakref.ref(model[0][0])
    model[0] = nn.Dropout(0.5)
    assert gone() is None
    assert sorted(randomness._names.values()) == ["", "1"]
    with randomness.probe(4):
        model(X)
        assert set(randomness._probing or {}) == {("", 0)}


@pytest.mark.parametrize(
    ("drawing", "quiet"),
    [
        (nn.Dropout(0.0), True),
        (nn.Dropout(0.3).eval(), True),
        (nn.Dropout(0.3), False),
        (Drawing(DRAWS["path"][0]), False),
        (Drawing(lambda x: torch.randint(9, (len(x), 1, 1))), False),
        (Drawing(lambda x: torch.empty_like(x).cauchy_()), False),  # no function that is known to draw
    ],
)
def test_calls_are_looked_at_only_where_a_model_draws(drawing: nn.Module, quiet: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8).double(), drawing)
    randomness = learnt(model, X)
    assert randomness.quiet == quiet
    with randomness.begin(0, 0, len(X)), randomness.forward():
        modes = torch._C._len_torch_function_stack()
    assert (modes == 0) == quiet


def test_dropout_that_begins_later_is_refused() -> None:
    drop = nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(8, 8).double(), drop)
    randomness = learnt(model, X)
    assert torch.equal(run(model, randomness, X), model[0](X))
    drop.p = 0.1
    with pytest.raises(SoliError, match="on the first step it drew none"):
        run(model, randomness, X)
    drop.p = 1e-9
    randomness = learnt(model, X)
    drop.p = 0.5
    parts = [run(model, randomness, X[a:b], a) for a, b in ((0, 2), (2, 6))]
    assert torch.equal(torch.cat(parts), run(model, randomness, X))
    assert (torch.cat(parts) == 0).double().mean() > 0.3


class Looking(nn.Module):
    """Attention with dropout, of which a row may look at nothing: padding that a window leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        seen[2] = False
        q, k, v = self.made(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=0.3 if self.training else 0.0)


def test_a_row_that_looks_at_nothing_is_nothing() -> None:
    engine = parallelize(Looking(), losses.mse(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    first = engine.step((x, torch.zeros(4, 5, 8)))
    assert math.isfinite(first)
    assert first > 0
    assert all(param.isfinite().all() for param in engine.global_state_dict().values())
