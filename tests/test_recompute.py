"""Recompute: the same result from less memory, with dropout, ZeRO and tensor parallelism; refusals."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases import CASES, Case
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from soli.parallel.keep import PRODUCTS, contexts
from soli.planner.hollow import Tracker
from soli.verify.parity import BOUND, adamw, check
from sweep import spread, swept


def one(name: str, plan: str, ranks: int):
    return check(CASES[name], plan, ranks)


NAMES = [(name,) for name in ("gpt-dropout", "llama", "t5", "vit", "hf-gpt2", "skipping")]
PLANS = [
    ("dp=1,recompute=full", 1),
    ("dp=1,recompute=selective", 1),
    ("dp=1,recompute=full,accumulate=2", 1),
    ("dp=2,zero=3,recompute=full", 2),
    ("dp=2,zero=2,recompute=full", 2),
    ("tp=2,recompute=full", 2),
    ("tp=2,sp=on,recompute=full", 2),
    ("tp=2,sp=on,recompute=selective", 2),
]
ON_FOUR = ("dp=2,tp=2,zero=3,sp=on,recompute=full", 4)
"""In the matrix (test_parity.py), and of these models in the sweep."""


@pytest.mark.parametrize(("name", "plan", "ranks"), [*spread(NAMES, PLANS), *(swept(*name, *ON_FOUR) for name in NAMES)])
def test_recomputed_plans_equal_sequential(pool: Pool, name: str, plan: str, ranks: int) -> None:
    for row in pool.run(one, name, plan, ranks, ranks=ranks, deadline=60):
        assert row.worst <= BOUND, row


def trained(plan: str) -> dict[str, torch.Tensor]:
    model, loss_fn, batches = CASES["gpt-dropout"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    for batch in batches:
        engine.step(batch)
    return engine.global_state_dict()


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("tp=2,sp=on", 2), ("dp=2,zero=3", 2)])
def test_recompute_changes_no_bit(pool: Pool, plan: str, ranks: int) -> None:
    """In float32 and with dropout: what is made again is what was made."""
    plain = pool.run(trained, plan, ranks=ranks)[0]
    for how in ("selective", "full"):
        again = pool.run(trained, f"{plan},recompute={how}", ranks=ranks)[0]
        assert plain.keys() == again.keys()
        assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def kept(plan: str) -> int:
    """Bytes of the activations that autograd keeps of one forward."""
    model, loss_fn, batches = CASES["gpt"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    seen: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in weights:
            seen[place] = x.untyped_storage().nbytes()
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        engine.computing(),
        engine.randomness.begin(1, 0, 8),
    ):
        output = engine.model(batches[1]["tokens"])
    del output
    return sum(seen.values())


def test_less_is_kept() -> None:
    none, selective, full = (kept(f"dp=1,recompute={how}") for how in ("none", "selective", "full"))
    stream, layers = 8 * 7 * 12 * 4, 3  # bytes of [b, s, h], and how many blocks
    assert none > layers * 10 * stream
    assert full < none / 3
    assert selective == full  # of what autograd holds: a block's inputs


class Products(TorchDispatchMode):
    """Counts the products that are computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


def test_products_are_kept_and_not_computed_again() -> None:
    """Of a block: q, k, v, attention (and a number a head and row), output, up and down; and nothing else."""
    b, s, h, heads, float32 = 8, 7, 12, 3, 4
    block = CASES["gpt"].make()[0].blocks[0]
    x = torch.randn(b, s, h)
    keeping, giving = contexts()
    with keeping:
        block(x)
    sizes = sorted(y.untyped_storage().nbytes() for y in tree_leaves([r.value for r in keeping.results]))
    stream = b * s * h * float32
    assert [n for n in sizes if n >= b * s * float32] == [b * s * heads * float32, *[stream] * 6, 4 * stream]
    for _ in range(2):  # a backward in two parts repeats a block twice
        with Products() as products, giving:
            block(x)
        assert products.count == 0


class Overwriting(nn.Module):
    """Blocks that write into the results of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, :3]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, 12), nn.Linear(12, 6), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(self.act(self.up(x))).add_(x))


def overwriting() -> Any:
    torch.manual_seed(5)
    batch = {"x": torch.randn(9, 6).double(), "targets": torch.randn(9, 3).double()}
    return Overwriting(), losses.mse("targets"), [batch, batch]


def one_overwriting(plan: str, ranks: int) -> Any:
    return check(Case("overwriting", overwriting, adamw), plan, ranks)


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("tp=2", 2)])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_blocks_that_overwrite_their_products(pool: Pool, plan: str, ranks: int, how: str) -> None:
    for row in pool.run(one_overwriting, f"{plan},recompute={how}", ranks, ranks=ranks):
        assert row.worst <= BOUND, row


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("recompute=0.5", "not built yet"),
        ("recompute=selective", "no repeated blocks"),
        ("recompute=full", "no repeated blocks"),
    ],
)
def test_refusals(plan: str, said: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(SoliError, match=said):
        parallelize(model, losses.mse("t"), optimizer=adamw, plan=plan)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(0.5))


def test_a_copy_has_the_forwards_that_the_model_had() -> None:
    """A module's own forward too, bound to the copy and not to the original, whose weights go on being trained."""
    model, loss_fn, batches = CASES["gpt"].make()
    block = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
    calls: list[nn.Module] = []

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return type(self).forward(self, *args, **kwargs)

    block.forward = MethodType(forward, block)
    engine = parallelize(model, loss_fn, optimizer=adamw, plan="dp=1,recompute=full")
    engine.step(batches[0])  # whose checks run a copy in float64
    assert block in calls
    calls.clear()
    engine.step(batches[1])
    assert calls
    assert all(module is block for module in calls)
    plain = engine.copy_model()
    calls.clear()
    loss_fn(plain(batches[0]["tokens"]), batches[0])
    copied = next(m for m in plain.modules() if isinstance(m, nn.ModuleList))[0]
    assert calls == [copied]
    assert copied is not block
    assert [name for name, m in plain.named_modules() if "forward" in vars(m) and m is not copied] == []


def test_a_block_that_writes_into_its_input() -> None:
    """Recomputed it would write again, and compute something else."""
    model = nn.Sequential(nn.Linear(3, 3), Writing())
    x = torch.randn(4, 3)
    engine = parallelize(model, losses.mse(), optimizer=adamw, plan="recompute=full")
    with pytest.raises(SoliError, match="a block writes into its input"):
        engine.step((x, x))


class Drawing(nn.Module):
    """Keeps a count of its calls, on which its result depends, in an object, where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(3, 3), SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.calls += torch.is_grad_enabled()
        return self.linear(x) if self.kept.calls and not self.kept.calls % 2 else torch.tanh(self.linear(x))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_a_block_that_does_not_repeat_itself(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Drawing(), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    engine = parallelize(model, losses.mse(), optimizer=adamw, plan=f"recompute={how}", example=(x, x))
    with pytest.raises(SoliError, match="did not compute the same when it was recomputed"):
        engine.step((x, x))


class Numbered(nn.Module):
    """One block, called again and again with its number as an attribute; all that comes of it is zeros at first. In torch's own words
    nothing is another one: shapes are the same."""

    class Scaled(nn.Linear):
        at = 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.tanh(x * (1 + self.at)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Scaled(3, 3)])
        nn.init.zeros_(self.blocks[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        for self.blocks[0].at in range(3):
            x = x + self.blocks[0](x)
        return x


class Padded(nn.Linear):
    """Computes on rows that are never written, and cuts them off. Memory has there what the last one left who had it."""

    def forward(self, x: Tensor) -> Tensor:
        for like in (torch.empty(64, 3), x.new_empty(64, 3), torch.empty_like(x).repeat(16, 1)):
            left = torch.full((64, 3), float(torch.randn((), generator=NOISE)))
            del left
            rows = torch.empty_like(like)
            rows[: len(x)] = x
            x = torch.tanh(super().forward(rows))[: len(x)]
        return x


NOISE = torch.Generator()


@pytest.mark.parametrize("how", ["selective", "full"])
def test_rows_that_are_never_written_are_not_compared(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Padded(3, 3), nn.Linear(3, 3))
    engine = parallelize(copy.deepcopy(model), losses.mse(), optimizer=adamw, plan=f"recompute={how}")
    x = torch.randn(4, 3)
    assert float(engine.step((x, x))) == pytest.approx(losses.mse()(model(x), (x, x))[0].item() / x.numel())


@pytest.mark.parametrize("how", ["selective", "full"])
def test_a_block_that_reads_what_the_model_sets_between_calls(how: str) -> None:
    batch = (torch.randn(4, 3), torch.randn(4, 3))
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)
    engine = parallelize(Numbered(), losses.mse(), optimizer=sgd, plan=f"recompute={how}")
    with pytest.raises(SoliError, match="did not compute the same when it was recomputed") as error:
        engine.step(batch)
    assert "'values': " in str(error.value)
    assert "hand a block as an argument what the model sets" in str(error.value)
    assert float(parallelize(Numbered(), losses.mse(), optimizer=sgd, plan="dp=1").step(batch)) > 0


def test_a_block_that_repeats_with_other_products() -> None:
    x = torch.randn(3, 3)
    for again in (lambda: torch.addmm(x, x, x), lambda: (x @ x) @ x):
        keeping, giving = contexts()
        with keeping:
            kept = x @ x
        with giving, pytest.raises(SoliError, match="did not compute the same when it was recomputed"):
            again()
        with giving:
            assert torch.equal(x @ (x + 1), kept)


def bytes_after_steps(name: str, plan: str) -> list[int]:
    case = CASES[name]
    model, loss_fn, batches = case.make()
    tracker, kept = Tracker(), []
    with tracker:
        engine = parallelize(model, loss_fn, optimizer=case.optimizer, plan=plan)
        for _ in range(3):
            engine.step(batches[0])
            gc.collect()
            kept.append(tracker.bytes)
    return kept


CACHING = [("hf-gpt2", "dp=1"), ("hf-bert", "tp=2"), ("hf-t5", "tp=2,sp=on")]


@pytest.mark.parametrize(("name", "plan", "recompute"), spread(CACHING, [("selective",), ("full",)]))
def test_a_microbatch_without_targets_leaves_nothing_behind(pool: Pool, name: str, plan: str, recompute: str) -> None:
    """Some rows count no target, and so have no backward. Blocks of GPT-2 write into a key-value cache; on tensors that
    several products read is what they read."""
    plan = f"{plan},accumulate=4,recompute={recompute}"
    for kept in pool.run(bytes_after_steps, name, plan, ranks=1 if "dp=1" in plan else 2):
        assert kept[0] == kept[1] == kept[2]


def packed(plan: str, use_cache: bool) -> float:
    """The first loss of two documents a row, of one of Hugging Face's models."""
    import transformers

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=37, use_cache=use_cache, **sizes))
    tokens = torch.randint(3, 37, (4, 6), generator=torch.Generator().manual_seed(1))
    places = torch.tensor([0, 1, 2, 0, 1, 2]).expand(4, 6)
    engine = parallelize(model, losses.from_model(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    return float(engine.step({"input_ids": tokens, "labels": tokens.clone(), "position_ids": places.clone()}))


def test_documents_in_a_row_attend_as_they_do_alone() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SoliError, match=r"set model\.config\.use_cache = False before soli\.parallelize"):
        packed("dp=1,recompute=full", True)
    apart = packed("dp=1", False)
    assert packed("dp=1,recompute=full", False) == pytest.approx(apart, rel=1e-6)
    assert abs(packed("dp=1", True) - apart) > 1e-4  # with a cache a row is one document to transformers


def cached_error(kind: str, plan: str) -> tuple[float, bool]:
    """Of a family that keeps keys and values by default, and whether it still does."""

    def make() -> Any:
        import transformers

        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
        build = getattr(transformers, f"{kind}ForCausalLM")
        model = build(build.config_class(vocab_size=37, **sizes, resid_pdrop=0.0))
        assert model.config.use_cache
        tokens = [torch.randint(3, 37, (8, 6), generator=torch.Generator().manual_seed(i)) for i in range(3)]
        made.append(model)
        return model, losses.from_model(), [{"input_ids": x, "labels": x.clone()} for x in tokens]

    made: list[Any] = []
    return check(Case(kind, make, adamw), plan, 0).worst, made[-1].config.use_cache


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Phi", "dp=2,zero=3,accumulate=2,recompute=full"),
        ("Llama", "dp=2,recompute=selective"),
        ("Gemma", "pp=2,microbatches=2"),
        ("Llama", "dp=2"),
    ],
)
def test_key_value_caches_are_off_where_they_cannot_be(pool: Pool, kind: str, plan: str) -> None:
    for worst, kept in pool.run(cached_error, kind, plan, ranks=2, deadline=60):
        assert worst < BOUND
        assert kept == (plan == "dp=2")


class Filling(nn.Module):
    """Blocks that write down, in an object that they are handed, where they are."""

    class Block(nn.Linear):
        def forward(self, x: Tensor, seen: Any) -> Tensor:
            seen.calls += 1
            return super().forward(x) * torch.eye(3)[seen.calls - 1].sum()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(37, 37), nn.ModuleList(self.Block(37, 37) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.embed(tokens), SimpleNamespace(calls=0)
        for block in self.blocks:
            x = torch.tanh(block(x, seen))
        return x


def test_an_error_inside_of_a_recomputation_is_explained() -> None:
    """The fourth call of three blocks is one that is made again."""
    tokens = torch.arange(12).view(2, 6)
    engine = parallelize(Filling(), losses.cross_entropy("targets"), optimizer=adamw, plan="dp=1,recompute=full")
    with pytest.raises(SoliError, match="did not compute the same when it was recomputed") as error:
        engine.step({"tokens": tokens, "targets": tokens})
    assert "IndexError: index 3 is out of bounds" in str(error.value)


class Slopes(nn.Module):
    """Gradients by its input, along it, or of each row, which torch.func takes through blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = lambda x: self.layers[1](self.layers[0](x).tanh())
        if self.how == "grad":
            return x + torch.func.grad(lambda x: run(x).sum())(x)
        if self.how == "jvp":
            return torch.func.jvp(run, (x,), (torch.ones_like(x),))[1]
        if self.how == "vmap":
            return torch.func.vmap(run)(x)
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("how", ["grad", "jvp", "vmap", "dual"])
def test_gradients_through_a_block_that_is_recomputed_are_refused(how: str) -> None:
    """torch keeps nothing for a recomputation inside torch.func's transforms, and says so in words of its own."""
    batch = {"x": torch.randn(4, 5), "targets": torch.randn(4, 5)}
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)
    for plan, refused in (("dp=1", False), ("dp=1,recompute=full", True), ("dp=1,recompute=selective", True)):
        engine = parallelize(Slopes(how), losses.mse("targets"), optimizer=sgd, plan=plan)
        with pytest.raises(SoliError, match="through a block that is recomputed") if refused else nullcontext():
            engine.step(batch)


class Reentrant(nn.Module):
    """Blocks that the program itself makes again, as torch first did it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=True)


def test_what_soli_looks_at_without_gradients_is_no_warning_of_checkpoints(recwarn: pytest.WarningsRecorder) -> None:
    batch = {"x": torch.randn(4, 5), "targets": torch.randn(4, 5)}
    engine = parallelize(Reentrant(), losses.mse("targets"), optimizer=adamw, plan="dp=1")
    engine.step(batch)
    assert "requires_grad" not in str([one.message for one in recwarn])
    engine.evaluate([batch])  # where the program asks for it, torch says what it says
    assert "None of the inputs have requires_grad" in str([one.message for one in recwarn])
