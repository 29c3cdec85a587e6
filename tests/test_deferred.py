"""Deferred initialisation: the values of the eager constructor, bitwise, and the shards of them under a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import soli
from pool import Pool
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from soli.models.gpt import GPT, GPTConfig
from soli.parallel.init import fingerprint, materialise


class Inits(nn.Module):
    """Many ways to initialise, some of which read values (trunc_normal_) or skip meta tensors (orthogonal_)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=1)
        self.norm = nn.LayerNorm(5)
        self.conv = nn.Conv1d(3, 4, 2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.truncated = nn.Parameter(torch.empty(5, 6))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.orthogonal = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.orthogonal)
        self.wide = nn.Parameter(torch.empty(3, 8))
        nn.init.orthogonal_(self.wide)  # transposes in place
        self.linear, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        nn.init.kaiming_normal_(self.linear.weight)
        self.tied.weight = self.linear.weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("steps", torch.arange(5) / 2.0)
        self.register_buffer("constant", torch.tensor([1.0, 2.0]))
        self.mixed = nn.Parameter(torch.randn(3, 3) * 0.1 + torch.eye(3))


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=31, dim=16, layers=2, heads=2, context=8))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2))


@pytest.mark.parametrize("make", [Inits, gpt, llama])
def test_values_and_generator_equal_the_eager_ones(make) -> None:
    torch.manual_seed(5)
    eager = make()
    after = torch.rand(3)
    torch.manual_seed(5)
    with soli.deferred():
        model = make()
    assert torch.equal(torch.rand(3), after)
    assert all(p.is_meta for p in model.parameters())
    wanted = dict(eager.named_parameters(remove_duplicate=False)) | dict(eager.named_buffers())
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    assert {name for name, _ in tensors} == set(wanted)
    for name, tensor in reversed(tensors):
        assert torch.equal(materialise(tensor, name) if tensor.is_meta else tensor, wanted[name]), name


def test_a_model_may_change_its_type_inside_the_block() -> None:
    torch.manual_seed(5)
    eager = Inits().double()
    torch.manual_seed(5)
    with soli.deferred():
        model = Inits().double()
    for (name, tensor), wanted in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(materialise(tensor, name), wanted), name


def test_a_constant_cannot_take_deferred_values() -> None:
    constant = torch.tensor([1.0, 2.0])
    with pytest.raises(SoliError, match="a constant is changed"), soli.deferred():
        constant.add_(torch.randn(2))


def test_another_seed_has_another_fingerprint() -> None:
    marks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with soli.deferred():
            marks.append(fingerprint(nn.Linear(3, 3).weight))
    assert marks[0] == marks[1] != marks[2]


def test_a_model_changed_outside_the_block_is_refused() -> None:
    with soli.deferred():
        model = nn.Linear(3, 3)
    model.double()
    with pytest.raises(SoliError, match="weight is on the meta device"):
        materialise(model.weight, "weight")


def sharded(plan: str):
    torch.manual_seed(5)
    with soli.deferred():
        model = gpt()
    engine = parallelize(
        model, soli.losses.cross_entropy("targets"), optimizer=lambda p: torch.optim.AdamW(p), plan=plan
    )
    before = engine.global_state_dict()
    tokens = torch.arange(32).view(4, 8) % 31
    return before, float(engine.step({"tokens": tokens, "targets": tokens}))


@pytest.mark.parametrize("plan", ["zero=0", "zero=1", "zero=2", "zero=3"])
def test_shards_of_a_deferred_model_are_the_eager_weights(pool: Pool, plan: str) -> None:
    torch.manual_seed(5)
    eager = gpt().state_dict()
    found = pool.run(sharded, plan, ranks=2)
    for state, _ in found:
        assert state.keys() == eager.keys()
        assert all(torch.equal(state[name], eager[name]) for name in eager)
    assert found[0][1] == found[1][1]


class Looks(nn.Module):
    """Reads values in the constructor, and draws as many numbers as they ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(5) + 0.5)
        self.total = sum(self.a.detach().tolist())
        self.b = nn.Parameter(torch.normal(self.a.detach(), 0.1 * self.a.detach()))
        self.c = nn.Parameter(torch.poisson(9 * self.a.detach()))
        self.d = nn.Parameter(torch.distributions.Gamma(self.a.detach(), torch.ones(5)).sample())
        self.e = nn.Parameter(torch.bernoulli(self.a.detach() / 2))
        self.rows = torch.multinomial(self.a.detach(), 3).tolist()
        self.scale = float(self.a.detach().numpy().max())
        self.last = nn.Linear(2, 2)


def test_values_read_in_the_constructor_are_the_eager_ones() -> None:
    torch.manual_seed(8)
    eager, after = Looks(), torch.rand(2)
    torch.manual_seed(8)
    with soli.deferred():
        model = Looks()
    assert torch.equal(torch.rand(2), after)
    assert (model.total, model.rows, model.scale) == (eager.total, eager.rows, eager.scale)
    for (name, tensor), wanted in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(materialise(tensor, name), wanted), name


def test_a_shape_that_depends_on_values_is_refused() -> None:
    with pytest.raises(SoliError, match="whose shape depends on values"), soli.deferred():
        torch.randn(9).nonzero()


def test_a_change_after_the_block_is_refused() -> None:
    with soli.deferred():
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(SoliError, match="was changed after"):
        materialise(model[0].weight, "0.weight")
    with torch.no_grad():
        model[1].weight.fill_(3.0)  # never touched since it was made a parameter
    with pytest.raises(SoliError, match="was changed after"):
        materialise(model[1].weight, "1.weight")
    materialise(model[0].bias, "0.bias")


def test_what_is_known_of_a_model_is_freed_with_it() -> None:
    import gc

    from soli.parallel import init

    def build() -> None:
        with soli.deferred():
            model = gpt()
        assert init._logs
        parallelize(
            model, soli.losses.cross_entropy("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1"
        )

    gc.collect()
    init.sweep()
    before = len(init._logs)
    build()
    assert len(init._logs) == before


class Turned(nn.Module):
    """With a buffer, which runs that find the layout put back as it was; `looks`: the forward looks at a value."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.embed, self.head, self.looks = nn.Embedding(8, 16), nn.Linear(16, 8), looks
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        if self.looks and (x == 0).all():
            return self.head(self.embed(x))
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def turned(plan: str, looks: bool) -> tuple[float, float]:
    made = []
    for deferred in (True, False):
        torch.manual_seed(3)
        with soli.deferred() if deferred else torch.enable_grad():
            model = Turned(looks)
        batch = {"x": torch.arange(24).view(4, 6) % 8, "y": torch.arange(24).view(4, 6) % 5}
        engine = parallelize(model, soli.losses.cross_entropy("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
        made.append([float(engine.step(batch)) for _ in range(2)][1])
    return made[0], made[1]


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_a_deferred_model_may_have_buffers_under_any_plan(pool: Pool, plan: str) -> None:
    for deferred, eager in pool.run(turned, plan, False, ranks=2):
        assert deferred == pytest.approx(eager, rel=1e-6)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_a_forward_that_looks_at_values_of_a_deferred_model_is_named(pool: Pool, plan: str) -> None:
    with pytest.raises(SoliError, match="a deferred model is laid out before it has values, and its forward looks at some"):
        pool.run(turned, plan, True, ranks=2)
