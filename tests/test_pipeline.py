"""Pipelines: where models are cut, what crosses, schedules, checkpoints, evaluation, bytes, and what is refused."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import CASES
from noted import bytes_by
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.engine import parallelize
from soli.mesh.collectives import barrier
from soli.mesh.record import recorder
from soli.models.gpt import GPT, GPTConfig
from soli.parallel.init import deferred
from soli.parallel.pipeline import table
from soli.parallel.pipeline.split_backward import inputs_first, weights_later
from soli.parallel.pipeline.stages import balanced
from soli.parallel.pipeline.units import units
from soli.planner.legality import nearest, problems
from soli.verify.parity import BOUND, Case, adamw, compare, expected_of, under_plan
from sweep import spread, swept

# --- where a model is cut -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "parts", "starts"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([1, 1, 1, 1], 4, [0, 1, 2, 3]),
        ([4, 1, 1, 1, 1], 2, [0, 1]),
        ([0, 1, 1, 1, 5], 2, [0, 4]),
        ([1, 1, 1, 1, 1], 2, [0, 2]),  # 2 + 3 and 3 + 2 are equal: the earlier
        ([3, 1, 1, 1, 1, 1], 3, [0, 1, 3]),
    ],
)
def test_stages_are_balanced(costs: list[float], parts: int, starts: list[int]) -> None:
    assert balanced([float(c) for c in costs], parts) == starts


def test_the_best_cut_is_found() -> None:
    """Against all cuts of random costs."""
    from itertools import combinations

    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        count = int(torch.randint(3, 9, (), generator=generator))
        parts = int(torch.randint(1, count + 1, (), generator=generator))
        costs = torch.rand(count, generator=generator).tolist()

        def worst(starts: tuple[int, ...], costs: list[float] = costs) -> float:
            ends = [*starts[1:], len(costs)]
            return max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))

        best = min(worst((0, *rest)) for rest in combinations(range(1, count), parts - 1))
        assert worst(tuple(balanced(costs, parts))) == pytest.approx(best, rel=1e-12)


def test_units_of_models() -> None:
    model = GPT(GPTConfig(vocab=17, dim=8, layers=2, heads=2, context=4))
    names = [name for name, _ in units(model)]
    assert names == ["embedding", "positions", "blocks.0", "blocks.1", "norm", "head"]
    finer = [name for name, _ in units(model, 1)]
    assert finer[2:6] == ["blocks.0.attention_norm", "blocks.0.attention", "blocks.0.mlp_norm", "blocks.0.mlp"]


# --- the two halves of backward -------------------------------------------------------------------------


def test_two_halves_are_one_backward() -> None:
    """Shared weights, weights between inputs, an output that no input reaches, an input that needs no gradient."""
    torch.manual_seed(0)
    a, b, c, shared = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(4))
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=need) for need in (True, False))

    def outputs() -> list[Tensor]:
        hidden = torch.tanh(x @ (a * shared) + y @ b) @ shared
        deep = torch.tanh(hidden @ (a + 0)) @ shared
        return [deep, x @ shared.t(), (c @ shared).exp()]

    weights = [a, b, c, shared]
    gradients = [torch.randn_like(o) for o in outputs()]
    wanted = torch.autograd.grad(outputs(), [x, *weights], gradients)
    passed, rest = inputs_first(outputs(), gradients, [x, y], weights)
    assert all(w.grad is None for w in weights)
    weights_later(rest, lambda weight: None)
    assert passed[1] is None
    for got, want in zip([passed[0], *(w.grad for w in weights)], wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-13, atol=0)


# --- models with something between their blocks ---------------------------------------------------------


class Glue(nn.Module):
    """Work between the blocks: in place, a tuple, a parameter, a view that comes back, a value that crosses two."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.start(x)
        y = first
        for number, block in enumerate(self.blocks):
            halves = torch.tanh(block(y)).chunk(2, dim=-1)
            z = torch.cat(halves[::-1], -1)
            z += y * self.scale
            z[:, 0] = first[:, 1]
            z = z.contiguous()
            room = torch.zeros(z.shape, dtype=z.dtype, device=z.device)
            room[:, 1:] = z[:, 1:] * float(number + 1) / 4
            y = self.drop(room) + z.max(-1, keepdim=True).values
            if self.training and y.shape[0] > 10**6:  # shapes are known everywhere
                raise AssertionError
            if z.is_cpu != x.is_cpu or z.get_device() != x.get_device():  # where a value lies, too
                y = first
        return self.last(F.gelu(y) + first)


class Sharing(nn.Module):
    """One block three times, and one weight in a block and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(6, 8, bias=False)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.blocks = nn.ModuleList([self.block, nn.Linear(8, 8), self.block, self.block])

    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        for block in self.blocks:
            y = y + block(y)
        return F.linear(y, self.start.weight.t()[:3])


class Returning(nn.Module):
    """What blocks return: numbers, an argument, a parameter; a parameter as argument; complex values; in place."""

    class Block(nn.Module):
        def __init__(self, kind: int) -> None:
            super().__init__()
            self.linear, self.kind = nn.Linear(8, 8), kind

        def forward(self, x: Tensor, table: Tensor, position: Tensor) -> Any:
            if self.kind == 1:
                x.mul_(0.5)
            return torch.relu_(self.linear(x) + position), table, x.shape[-1], {"scale": 0.5}

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 8))

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(6, 8)
        self.position = nn.Parameter(torch.linspace(0, 1, 8))
        self.prompt = self.Prompt()
        self.blocks = nn.ModuleList(self.Block(kind) for kind in range(4))
        self.last = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        prompt, table, waves = self.prompt(), x[:, :1] * 2, torch.fft.fft(y)
        for block in self.blocks:
            z, table, width, said = block(y + 0, table, self.position)
            y = y + self.drop(z) * width / 8 * said["scale"]
            y += table
            y = y + self.drop(y) * prompt
        return self.last(y + torch.fft.ifft(waves).real)


class Frozen(nn.Module):
    """A first stage that trains nothing, and a buffer in every block that the block changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Counting() for _ in range(3)).requires_grad_(False)
        self.second = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.first, *self.second]:
            x = torch.tanh(layer(x))
        return x[:, :3]


class Rescaled(torch.autograd.Function):
    """Its gradients are none of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 0.5, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] - grads[1]


rescaled = Rescaled.apply


class Functions(nn.Module):
    """Custom autograd functions between the blocks, whose results are what crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x, same = (rescaled if number % 2 else Rescaled.apply)(torch.tanh(block(x)))
        return (x + same)[:, :3]


class InMode(Functions):
    """All of it in a mode of the model's own, under which blocks are blocks too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return super().forward(x)


class Largest(torch.autograd.Function):
    """By its largest number, as Python has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = 1 / float(x.abs().max())
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.scale


class Reading(Functions):
    """Reads numbers inside a function after its second block: what comes then is the last stage's."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            x = x if number != 1 else Largest.apply(x / x.detach().abs().amax(1, keepdim=True))
        return x[:, :3]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.copy_(self.linear.weight.detach().sum())  # the same in each microbatch
        return self.linear(x)


def rows_of(counts: tuple[int, ...]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "x": torch.randn(n, 6, generator=generator).double(),
            "targets": torch.randn(n, 3, generator=generator).double(),
        }
        for n in counts
    ]


def case_of(kind: type[nn.Module], counts: tuple[int, ...] = (9, 8, 11)) -> Case:
    def make() -> Any:
        torch.manual_seed(3)
        return kind(), losses.mse("targets"), rows_of(counts)

    return Case(kind.__name__, make, adamw)


def worst_of(kind: type[nn.Module], plan: str, counts: tuple[int, ...] = (9, 8, 11)) -> tuple[float, str]:
    case = case_of(kind, counts)
    return compare(under_plan(case, plan), expected_of(case))


PLANS = [
    (2, "pp=2,microbatches=4"),
    (2, "pp=2,microbatches=4,schedule=zbv"),
    (4, "pp=4,microbatches=4,schedule=zbh1"),
    (4, "dp=2,pp=2,zero=2,microbatches=3,schedule=interleaved,chunks=2"),
    (4, "dp=2,pp=2,zero=3,microbatches=2,recompute=full"),
]


@pytest.mark.parametrize(("kind", "ranks", "plan"), spread([(Glue,), (Sharing,), (Frozen,), (Returning,), (Functions,), (InMode,)], PLANS))
def test_what_stands_between_blocks(pool: Pool, kind: type[nn.Module], ranks: int, plan: str) -> None:
    if kind is Returning and "recompute" in plan:
        plan = plan.replace(",recompute=full", "")  # it writes into a block's input (tests/test_recompute.py)
    for worst, tensor in pool.run(worst_of, kind, plan, ranks=ranks):
        assert worst <= BOUND, tensor


def test_what_a_function_reads_is_read_on_the_last_stage(pool: Pool) -> None:
    for worst, tensor in pool.run(worst_of, Reading, "pp=2,microbatches=2", ranks=2):
        assert worst <= BOUND, tensor


@pytest.mark.parametrize("schedule", [swept("gpipe"), "1f1b", "zbv", swept("dualpipev")])
def test_more_microbatches_than_rows(pool: Pool, schedule: str) -> None:
    """Rows that no number divides, and fewer of them than microbatches: some are empty, on some ranks more."""
    plan = f"dp=2,pp=2,microbatches=4,schedule={schedule}"
    for worst, tensor in pool.run(worst_of, Glue, plan, (5, 4, 7), ranks=4):
        assert worst <= BOUND, tensor


def all_schedules() -> list[tuple[float, str]]:
    """Every schedule against 1f1b: the same sums in the same order of microbatches, up to rounding."""
    case = CASES["gpt-dropout"]
    base = under_plan(case, "pp=2,microbatches=4")
    plans = [f"pp=2,microbatches=4,schedule={s}" for s in ("gpipe", "zbh1", "zbv", "dualpipev")]
    return [compare(under_plan(case, plan), base) for plan in plans]


def test_schedules_agree(pool: Pool) -> None:
    for found in pool.run(all_schedules, ranks=2, deadline=60):
        for worst, tensor in found:
            assert worst <= 1e-12, tensor


# --- memory, bytes, state -------------------------------------------------------------------------------


def held(plan: str) -> tuple[int, int]:
    """Elements of parameters on this rank, and of the optimizer's."""
    model, loss_fn, batches = CASES["gpt"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan, example=batches[0])
    engine.step(batches[0])
    mine = sum(p.numel() for p in engine.model.parameters() if not p.is_meta)
    kept = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    return mine, kept


def test_a_rank_has_its_stages_alone(pool: Pool) -> None:
    whole = sum(p.numel() for p in CASES["gpt"].make()[0].parameters())
    tied = 29 * 12
    found = pool.run(held, "pp=2,microbatches=2", ranks=2)
    assert sum(mine for mine, _ in found) == whole + tied  # the embedding is on both
    assert all(mine == kept for mine, kept in found)
    assert max(mine for mine, _ in found) < 0.75 * whole


def bytes_of(plan: str) -> dict[tuple[str, str], int]:
    model, loss_fn, batches = CASES["gpt"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    barrier(engine.mesh.all)
    recorder.clear()
    engine.step(batches[1])
    return {key: n for key, n in bytes_by(recorder).items() if key[0] in ("send", "recv")}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbh1"])
def test_bytes_of_a_step(pool: Pool, schedule: str) -> None:
    """b s h of activations over each border, and as much back; b = 8 rows, s = 7, h = 12, float32."""
    stream = 8 * 7 * 12 * 4
    both = {("send", "pp"): stream, ("recv", "pp"): stream}
    assert pool.run(bytes_of, f"pp=2,microbatches=4,schedule={schedule}", ranks=2) == [both, both]


def test_bytes_of_stages_in_a_v(pool: Pool) -> None:
    """Four stages on two ranks: two borders between the ranks, one inside the second."""
    stream = 2 * 8 * 7 * 12 * 4
    both = {("send", "pp"): stream, ("recv", "pp"): stream}
    assert pool.run(bytes_of, "pp=2,microbatches=4,schedule=zbv", ranks=2) == [both, both]


def train(plan: str, steps: int, path: str, load: str = "") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state as it was loaded, or saved half way, and after so many steps."""
    model, loss_fn, batches = CASES["gpt-dropout"].make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, clip=0.5, plan=plan, example=batches[0])
    there = {}
    if load:
        engine.load(load)
        there = {name: value.clone() for name, value in engine.global_state_dict(optimizer=True).items()}
    while engine.step_count < steps:
        engine.step(batches[engine.step_count % len(batches)])
        if path and engine.step_count == steps // 2:
            engine.save(path)
            there = {name: value.clone() for name, value in engine.global_state_dict(optimizer=True).items()}
    return there, engine.global_state_dict(optimizer=True)


@pytest.mark.parametrize(
    ("first", "second", "exact"),
    [
        ("pp=2,microbatches=2", "pp=2,microbatches=2", True),
        ("pp=2,microbatches=2", "dp=2,zero=3", False),
        swept("dp=2,zero=1", "pp=2,microbatches=4,schedule=zbv", False),
        ("tp=2", "pp=2,microbatches=4,schedule=interleaved,chunks=2", False),
    ],
)
def test_checkpoints_across_plans(pool: Pool, tmp_path: Path, first: str, second: str, exact: bool) -> None:
    saved, straight = pool.run(train, first, 6, str(tmp_path / "c"), ranks=2)[0]
    found = pool.run(train, second, 6, "", str(tmp_path / "c"), ranks=2)
    _, resumed = found[0]
    for one, _ in found:
        assert one.keys() == saved.keys()
        assert all(torch.equal(one[name], saved[name]) for name in saved)
    largest = max(float(v.abs().max()) for name, v in straight.items() if not name.startswith("optimizer"))
    for name, value in straight.items():  # a key's bias is noise of the others, so all have one scale
        bound = 0.0 if exact else 1e-11 * largest
        assert (value - resumed[name]).abs().max() <= bound, name


def stepped(plan: str) -> tuple[Any, list[dict[str, Tensor]]]:
    model, loss_fn, batches = case_of(Frozen).make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan)
    for batch in batches:
        engine.step(batch)
    return engine, batches


def sums_of(engine: Any) -> Tensor:
    """Of each block's weights as they were in the last step."""
    state = engine.global_state_dict()
    return torch.stack([state[f"{half}.{n}.steps"] for half in ("first", "second") for n in range(3)])


def sums_of_blocks() -> tuple[Tensor, bool]:
    """The buffers that blocks changed, whole, on every rank; and that a copy of the model is the plain one."""
    engine, batches = stepped("pp=2,microbatches=2")
    state, plain = engine.global_state_dict(), engine.copy_model()
    x = batches[0]["x"]
    again = Frozen().double()
    again.load_state_dict(state)
    return sums_of(engine), torch.equal(plain.eval()(x), again.eval()(x))


def counted_and_saved(path: str) -> None:
    stepped("pp=2,microbatches=2")[0].save(path)


def test_buffers_are_saved_from_their_stage(pool: Pool, tmp_path: Path) -> None:
    pool.run(counted_and_saved, str(tmp_path / "c"), ranks=2)
    model, loss_fn, _ = case_of(Frozen).make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan="dp=1")
    engine.load(tmp_path / "c")
    torch.testing.assert_close(sums_of(engine), sums_of(stepped("dp=1")[0]), rtol=0, atol=BOUND)


def test_buffers_come_from_their_stage(pool: Pool) -> None:
    expected = sums_of(stepped("dp=1")[0])
    assert len(set(expected.tolist())) == 6
    for sums, same in pool.run(sums_of_blocks, ranks=2):
        torch.testing.assert_close(sums, expected, rtol=0, atol=BOUND)
        assert same


def evaluations(plan: str) -> list[float]:
    """Before the first step, between steps, with batches of other shapes."""
    model, loss_fn, batches = CASES["gpt-dropout"].make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan)
    found = [engine.evaluate(batches)]
    for batch in batches:
        found.append(float(engine.step(batch)))
        found.append(engine.evaluate([batches[0], {k: v[:3, :5] for k, v in batches[1].items()}]))
    return found


def test_evaluation_in_the_middle_of_training(pool: Pool) -> None:
    wanted = pool.run(evaluations, "dp=1", ranks=1)[0]
    for plan in ("pp=2,microbatches=2", "pp=2,microbatches=4,schedule=zbv"):
        for found in pool.run(evaluations, plan, ranks=2):
            assert found == pytest.approx(wanted, rel=1e-12)


def from_deferred(plan: str) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(11)
    with deferred():
        model = GPT(GPTConfig(vocab=29, context=7, dim=12, layers=3, heads=3))
    _, loss_fn, batches = CASES["gpt"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan, example=batches[0])
    return engine.global_state_dict(), sum(p.numel() for p in model.parameters() if not p.is_meta)


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "dp=2,pp=2,zero=3", swept("pp=2,tp=2")])
def test_deferred_models(pool: Pool, plan: str) -> None:
    eager = CASES["gpt"].make()[0].state_dict()
    for state, mine in pool.run(from_deferred, plan, ranks=4 if plan != "pp=2,microbatches=2" else 2):
        assert all(torch.equal(state[name], value) for name, value in eager.items())
        assert mine < 0.75 * sum(v.numel() for v in eager.values())


STEPS = 6


def sixteen_bits(plan: str, precision: str) -> tuple[float, float]:
    """The loss after some steps, in 16 bits and in 32."""
    found = []
    for format in (precision, "fp32"):
        model, loss_fn, batches = CASES["gpt"].make()
        engine = parallelize(model, loss_fn, optimizer=adamw, plan=f"{plan},precision={format}")
        for step in range(STEPS):
            engine.step(batches[step % 3])
        found.append(engine.last.loss)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("pp=2,microbatches=2", "bf16"),
        ("pp=2,microbatches=2", "fp16"),
        swept("tp=2", "bf16"),
        ("tp=2", "fp16"),
        ("tp=2,sp=on,recompute=selective", "bf16"),
        swept("tp=2,sp=on,recompute=selective", "fp16"),
    ],
)
def test_sixteen_bits_follow_float32(pool: Pool, plan: str, precision: str) -> None:
    epsilon = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float16).eps
    depth = 3 * 8  # products one after another
    for loss, wanted in pool.run(sixteen_bits, plan, precision, ranks=2):
        assert loss == pytest.approx(wanted, rel=epsilon * depth**0.5 * STEPS)  # each step adds its own
        assert loss != wanted


# --- plans and what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "world", "said"),
    [
        ("microbatches=4", 1, "'microbatches' fills a pipeline, and pp=1 has none"),
        ("schedule=zbv", 1, "'schedule' orders the stages of a pipeline"),
        ("pp=2,schedule=interleaved", 2, "'interleaved' needs several stages a rank"),
        ("pp=2,chunks=2", 2, "'1f1b' has one stage a rank"),
        ("pp=2,schedule=zbv,chunks=3", 2, "'zbv' has two stages a rank"),
        ("pp=3", 4, "4 ranks are no multiple of pp x cp x tp = 3"),
    ],
)
def test_plans_that_make_no_sense(plan: str, world: int, said: str) -> None:
    parsed = Plan.parse(plan)
    assert [p.what for p in problems(parsed, world)] == [said] or said in problems(parsed, world)[0].what
    assert not problems(nearest(parsed, world), world)


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        ("pp=4,microbatches=8", 3 / 11),
        ("pp=4,microbatches=8,schedule=interleaved,chunks=2", 3 / 19),
        ("pp=4,microbatches=8,schedule=zbh1", 3 / 27),
        ("pp=4,microbatches=1,schedule=gpipe", 3 / 4),
        ("pp=4,microbatches=8,schedule=gpipe", 3 / 11),
        ("pp=8,microbatches=32", 7 / 39),
        ("pp=8,microbatches=32,schedule=interleaved,chunks=4", 7 / 135),
        ("pp=8,microbatches=32,schedule=zbh1", 7 / 103),
    ],
)
def test_bubbles(plan: str, share: float) -> None:
    """The schedule's own table against (P-1)/(M+P-1), (P-1)/(VM+P-1) and, zero bubble, (P-1)/(3M+P-1)."""
    assert table.bubble(Plan.parse(plan)) == pytest.approx(share)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_stages_in_a_v_wait_the_least(schedule: str) -> None:
    found = table.bubble(Plan.parse(f"pp=4,microbatches=16,schedule={schedule}"))
    assert 0 <= found < table.bubble(Plan.parse("pp=4,microbatches=16,schedule=zbh1"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Four(nn.Module):
    """Four blocks; what its own code does between them is each class's."""

    Block: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))


class Leaving(Four):
    """The first block leaves a value in an object for all others."""

    class Block(Layer):
        def forward(self, x: Tensor, box: Any) -> Tensor:
            if box.value is None:
                box.value = self.linear(x)
            return x + self.linear(box.value)

    def forward(self, x: Tensor) -> Tensor:
        box = Hidden.Box()
        for block in self.blocks:
            x = block(x, box)
        return x[:, :3]


class Hidden(Four):
    """Each block leaves its result in an object, where the next finds what it was also given."""

    class Box:
        def __init__(self) -> None:
            self.value: Tensor | None = None

    class Block(Layer):
        def forward(self, x: Tensor, box: Any) -> Tensor:
            y = self.linear(x) if box.value is None else self.linear(x + box.value)
            box.value = y
            return y

    def forward(self, x: Tensor) -> Tensor:
        box = self.Box()
        for block in self.blocks:
            x = block(x, box)
        return x[:, :3]


class Branching(Four):
    """Looks at an activation after its first block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = -x
        return x[:, :3]


class Averaging(nn.Module):
    """Keeps a mean of what passes between its blocks, or of what leaves the last of them."""

    early = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == (0 if self.early else 3) and self.training:
                with torch.no_grad():
                    self.mean.mul_(0.5).add_(x.mean(0))
        return x[:, :3]


class Normalising(Averaging):
    """Whose mean is kept by a function of torch, as a running statistic."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.blocks[0](x), self.mean, self.mean + 1, training=self.training)
        for block in self.blocks[1:]:
            x = block(x)
        return x[:, :3]


class AveragingLate(Averaging):
    early = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.training:
            self.steps += 1
        return x


class Later(Four):
    """Reads in front of its blocks the number that it changes after them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + self.steps)
        for block in self.blocks:
            x = block(x)
        self.steps = self.steps + 1
        return x[:, :3]


class LaterBuffer(Later):
    def __init__(self) -> None:
        super().__init__()
        del self.steps
        self.register_buffer("steps", torch.zeros(()))


class Restarting(Four):
    """Counts and collects anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, tuple[int, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.number, self.found, self.mean = 0, [], 0.0
        for block in self.blocks:
            x = block(x) * (1 + self.number)
            self.number, self.mean = self.number + 1, self.mean + x
            self.shapes[self.number] = tuple(x.shape)
            self.found.append(x)
        return x[:, :3] + sum(self.found)[:, 3:] + self.mean[:, :3]


class Passing(Four):
    """Has numbers and flags that blocks and what is between them read, and that a forward leaves as they were."""

    running = False

    class Block(Layer):
        def forward(self, x: Tensor) -> Tensor:
            (model,) = self.models
            return torch.tanh(self.linear(x)) * (1 + model.running) * model.depth

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.before = 0, None
        for block in self.blocks:
            block.models = [self]

    def forward(self, x: Tensor) -> Tensor:
        x = x * (2 + self.depth)
        if self.running:
            raise ValueError("it runs already")
        self.running = True
        try:
            for block in self.blocks:
                self.depth += 1
                x = block(x if self.before is None else x + self.before)
                self.before = x
        finally:
            self.running, self.before = False, None
        self.depth -= 4  # where no stage but the last comes
        return x[:, :3]


class Staying(Passing):
    """Leaves its flag as it was where it has a few rows."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.running = len(x) > 6
        return out


class Marking(Four):
    """One block changes its number and another puts it back: between them no later stage has it."""

    class Block(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.models[0].number += self.adds
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        for block, block.adds in zip(self.blocks, (1, 0, 0, -1), strict=True):
            block.models = [self]

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * self.number
        for block in self.blocks:
            x = block(x)
        return x[:, :3]


class Repeating(nn.Module):
    """Calls a block that counts on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Always(), nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 2, 0):
            x = self.blocks[number](x)
        return x[:, :3]


class Always(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Helped(Four):
    """All blocks call one module, which counts: no stage has all calls."""

    class Block(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.helper(x))

    def __init__(self) -> None:
        super().__init__()
        helper = Always()
        for block in self.blocks:
            block.helper = helper

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, :3]


class Viewing(Four):
    """Writes through a view in one stage what another reads whole."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        half = first[:, :3]
        x = self.blocks[1](first)
        x = self.blocks[2](x)
        half.mul_(3)
        return self.blocks[3](x + first)[:, :3]


class Padded(Four):
    """Writes into what a linear layer gave for rows of vectors, which is a view of what it computed: padding, as speech models have it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :3] > 0
        x = self.blocks[0](x[:, None].expand(-1, 3, -1))
        x[mask] = 0
        for block in self.blocks[1:]:
            x = block(x)
        return x[:, 0, :3]


class Totals(Four):
    """Sums, and fills a tensor of its own, in place at each block (the determinants of a flow, the halves of its vectors)."""

    def forward(self, x: Tensor) -> Tensor:
        total, path = x.new_zeros(len(x), 1), torch.empty(len(self.blocks) + 1, *x.shape)
        path[0] = x
        for i, block in enumerate(self.blocks):
            made, halves = block(x), torch.empty_like(x)
            halves[:, ::2], halves[:, 1::2] = x[:, ::2], made[:, 1::2]
            total += made.mean(-1, keepdim=True)
            path[i + 1] = x = halves
        return (path[1:].sum(0) + x + total)[:, :3]


class Trained(Four):
    """Runs in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x if self.training else None).contiguous()  # type: ignore[union-attr]
        for block in self.blocks:
            x = block(x)
        return x[:, :3]


class Room(Four):
    """Fills a tensor of its own through a view."""

    def forward(self, x: Tensor) -> Tensor:
        room = torch.zeros_like(x)
        room[:, 1:].copy_(self.blocks[0](x)[:, 1:])
        for block in self.blocks[1:]:
            x = block(x + room)
        return x[:, :3]


class Gathering(Four):
    """Adds up what its blocks keep in an attribute beside their result."""

    class Block(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.aux = y.square().mean(-1, keepdim=True)
            return y

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, :3] + 0.001 * torch.stack([block.aux for block in self.blocks]).sum(0)


class Keeping(Four):
    """Its blocks keep their result itself, which is fine."""

    class Block(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.result = torch.tanh(self.linear(x))
            return self.result

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, :3] + torch.stack([block.result for block in self.blocks]).sum(0)[:, 3:]


class Packing(Four):
    """Selects rows by their values between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        keep = (x[:, 0] > 0).nonzero().squeeze(-1)
        z = y.index_select(0, keep)
        for block in self.blocks[1:]:
            z = block(z)
        return torch.zeros_like(y).index_add(0, keep, z)[:, :3]


class Sometimes(Four):
    """A block that returns its argument for some batches."""

    class Block(Layer):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y + self.linear(y) if bool(x.shape[0] > 4) else y

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(x, y)
        return y[:, :3]


class Rows(Four):
    """A list of the rows between two blocks, as Llava has of its images."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.stack([*torch.tanh(block(x))])
        return x[:, :3]


class Entries(Rows):
    """Such a list that is read after the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [*self.blocks[0](x)]
        return super().forward(x) + torch.stack(rows)[:, :3]


class Turning(Four):
    """Another path for other batches, by their values alone."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            x = y.tanh() if x.shape[0] > 4 else y.sin()
        return x[:, :3]


class Modes(Four):
    """A tuple in training, a dict in evaluation: the loss knows both."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) if self.training else torch.tanh(block(x))
        return (x[:, :3], x) if self.training else {"out": x[:, :3]}


class Ensemble(Four):
    """Copies of a block that run at once."""

    def forward(self, x: Tensor) -> Tensor:
        for pair in (self.blocks[:2], self.blocks[2:]):
            params, buffers = torch.func.stack_module_state(list(pair))
            call = lambda p, b, x, block=pair[0]: torch.func.functional_call(block, (p, b), (x,))
            x = torch.func.vmap(call, (0, 0, None))(params, buffers, x).mean(0)
        return x[:, :3]


class Numbering(nn.Module):
    """Blocks that are handed what each of them changes, and whose gates begin closed: no first loss shows which number a block had."""

    class Gated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor, given: Any) -> Tensor:
            return x + self.gate * torch.tanh(super().forward(x)) * self.number(given)

        def number(self, given: dict[str, Any]) -> int:
            given["number"] += 1
            return given["number"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Gated() for _ in range(4))

    def given(self) -> Any:
        return {"number": 0}

    def forward(self, x: Tensor) -> Tensor:
        given = self.given()
        for block in self.blocks:
            x = block(x, given)
        return x[:, :3]


class Drawing(Numbering):
    """From an iterator."""

    class Gated(Numbering.Gated):
        def number(self, given: Any) -> int:
            return next(given)

    def given(self) -> Any:
        return iter(range(4))


class Noting(Numbering):
    """In an attribute of an object."""

    class Gated(Numbering.Gated):
        def number(self, given: Any) -> int:
            given.number += 1
            return given.number

    def given(self) -> Any:
        return SimpleNamespace(number=0)


class Nesting(Numbering):
    """In a dict that lies in what they are handed, beside a name that none of them changes."""

    class Gated(Numbering.Gated):
        def number(self, given: Any) -> int:
            given[0]["number"] += 1
            return given[0]["number"]

    def given(self) -> Any:
        return ({"number": 0}, "name")


class Rotating(Numbering):
    """In a deque."""

    class Gated(Numbering.Gated):
        def number(self, given: Any) -> int:
            given.append(given.popleft() + 1)
            return given[-1]

    def given(self) -> Any:
        return deque([0])


class Consulting(Numbering):
    """Which nobody changes."""

    class Gated(Numbering.Gated):
        def number(self, given: Any) -> int:
            return given["numbers"]["first"] + given["numbers"]["others"][1]

    def given(self) -> Any:
        return {"numbers": {"first": 1, "others": [2, 3]}}


class Popping(Numbering):
    """A tensor, in a dict."""

    class Gated(Numbering.Gated):
        def number(self, given: dict[str, Any]) -> Any:
            before, given["number"] = given["number"], given["number"] + torch.tanh(self.bias).sum()
            return before


class Two(nn.Module):
    """Two layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def refusal(kind: type[nn.Module], plan: str) -> str:
    _, loss_fn, batches = case_of(kind).make()
    torch.manual_seed(0)
    try:
        engine = parallelize(kind().double(), loss_fn, optimizer=adamw, plan=plan)
        engine.step(batches[0])
    except (SoliError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        (Branching, "pp=2", "looks at a value (__bool__) after blocks.0"),
        (Ensemble, "pp=2", "one of torch.func.vmap's, of copies that run at once"),
        (Two, "pp=4", "fewer parts to cut between than the pipeline has stages: 2 < 4"),
        (Leaving, "pp=2", "blocks.2 can read a value that was made in blocks.0 and is not among its arguments"),
        *((kind, "pp=2", "is not among its arguments") for kind in (Numbering, Drawing, Noting, Nesting, Rotating, Popping)),
        (Hidden, "pp=2,microbatches=2", "computes another loss under"),
        (Entries, "pp=2,microbatches=2", "another path than on the first batch: after blocks.0 came unbind of"),
        (Turning, "pp=2,microbatches=2", "another path than on the first batch"),
        (Viewing, "pp=2", "writes into memory that several tensors share, after blocks.2"),
        (Room, "pp=2", "writes into memory that several tensors share, after blocks.0"),
        (Gathering, "pp=2", "can read a value that was made in blocks.0 and is not among its arguments"),
        (Packing, "pp=2,microbatches=3", "depend on the values of the batch"),
        (Sometimes, "pp=2", "took another path"),
        (Averaging, "pp=2", "mean is changed in the forward, and several stages have it"),
        (Normalising, "pp=2", "mean is changed in the forward, and several stages have it"),
        (Later, "pp=2", "steps is read by a stage whose forward ends before it is changed"),
        (LaterBuffer, "pp=2", "steps is read by a stage whose forward ends before it is changed"),
        (Marking, "pp=2", "number is read by a stage whose forward ends before it is changed"),
        (Staying, "pp=2", "running of Staying ends a forward otherwise than it began"),
        (Helped, "pp=2", "blocks.0.helper.calls is changed in the forward, and several stages have it"),
        (Repeating, "pp=2", "blocks.0.calls is changed in the forward, and several stages have it"),
    ],
)
def test_models_that_are_refused(pool: Pool, kind: type[nn.Module], plan: str, said: str) -> None:
    found = pool.run(refusal, kind, plan, ranks=int(plan[3]), deadline=4)
    assert all(said in text for text in found), found


def not_a_number() -> str:
    model, loss_fn, batches = case_of(Glue).make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan="dp=2,pp=2,microbatches=2")
    engine.step(batches[0])
    batches[1]["x"][-1] = float("nan")
    before = engine.global_state_dict()
    try:
        engine.step(batches[1])
    except SoliError as error:
        after = engine.global_state_dict()
        same = all(torch.equal(before[name], after[name]) for name in before)
        return f"{str(error).splitlines()[0]} {same}"
    return ""


def test_nan_names_the_rank_that_has_the_loss(pool: Pool) -> None:
    """Once and alike on every rank; nothing is updated."""
    found = pool.run(not_a_number, ranks=4)
    assert len(set(found)) == 1
    assert "the loss of step 2 is not finite on rank 3; nothing was updated" in found[0]
    assert found[0].endswith("True")


@pytest.mark.parametrize(
    ("kind", "plan"),
    spread(
        [(Keeping,), (Padded,), (Totals,), (Trained,), (Rows,), (Restarting,), (Passing,), (Consulting,)],
        [("pp=2,microbatches=2",), ("pp=2,microbatches=4,schedule=zbv",)],
    ),
)
def test_results_that_blocks_keep_or_that_are_written_into(pool: Pool, kind: type[nn.Module], plan: str) -> None:
    for worst, tensor in pool.run(worst_of, kind, plan, ranks=2):
        assert worst <= BOUND, tensor


def other_rows() -> str:
    _, loss_fn, batches = case_of(Two).make()
    torch.manual_seed(0)
    engine = parallelize(Two().double(), loss_fn, optimizer=adamw, plan="pp=2", example=batches[0])
    if torch.distributed.get_rank() == 1:
        batches[0]["targets"] = batches[0]["targets"] + 1
    try:
        engine.step(batches[0])
    except SoliError as error:
        return str(error)
    return ""


def test_stages_that_are_given_other_rows(pool: Pool) -> None:
    for text in pool.run(other_rows, ranks=2):
        assert "were given different rows; nothing was updated" in text
        assert text.count("nothing was updated") == 1


def first_rows(plan: str) -> str:
    """Each rank shuffles its data by itself."""
    _, loss_fn, batches = case_of(Two).make()
    torch.manual_seed(torch.distributed.get_rank())
    engine = parallelize(Two().double(), loss_fn, optimizer=adamw, plan=plan)
    order = torch.randperm(len(batches[0]["targets"]))
    batch = {name: x[order] for name, x in batches[0].items()}
    try:
        if plan == "dp=2,zero=1":
            engine.evaluate([batch])
        engine.step(batch)
    except SoliError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_ranks_that_are_given_other_batches(pool: Pool, plan: str) -> None:
    """Weights that differ are rank 0's; data that differs is an error, whatever the layout."""
    for text in pool.run(first_rows, plan, ranks=2):
        assert "were given different rows; nothing was updated" in text
        assert text.count("nothing was updated") == 1
        assert "the same seed" in text


def seedless(plan: str) -> list[float]:
    _, loss_fn, batches = case_of(Two).make()
    torch.manual_seed(0 if plan == "dp=1" else torch.distributed.get_rank())
    engine = parallelize(Two().double(), loss_fn, optimizer=adamw, plan=plan)
    return [float(engine.step(batch)) for batch in batches]


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_weights_that_ranks_drew_apart_are_rank_0s_under_every_plan(pool: Pool, plan: str) -> None:
    (expected,) = pool.run(seedless, "dp=1", ranks=1)  # with rank 0's seed
    for found in pool.run(seedless, plan, ranks=2):
        assert found == pytest.approx(expected, rel=1e-10)


def late_buffer() -> list[float]:
    _, loss_fn, batches = case_of(Frozen).make()
    torch.manual_seed(0)
    engine = parallelize(AveragingLate().double(), loss_fn, optimizer=adamw, plan="pp=2")
    engine.step(batches[0])
    state = engine.global_state_dict()
    return [*state["mean"].tolist(), float(state["steps"])]


def test_a_buffer_of_the_last_stage_is_everywhere(pool: Pool) -> None:
    first, second = pool.run(late_buffer, ranks=2)
    assert first == second
    assert any(first[:-1])
    assert first[-1] == 1


def modes() -> list[float]:
    _, _, batches = case_of(Modes).make()
    torch.manual_seed(0)

    def loss(output: Any, batch: Any) -> Any:
        y = output[0] if isinstance(output, tuple) else output["out"]
        return F.mse_loss(y, batch["targets"], reduction="sum"), y.numel()

    plan = "pp=2,microbatches=2" if torch.distributed.is_initialized() else "dp=1"
    engine = parallelize(Modes().double(), loss, optimizer=adamw, plan=plan)
    return [float(engine.step(batches[0])), engine.evaluate(batches), float(engine.step(batches[1]))]


def test_another_forward_in_evaluation(pool: Pool) -> None:
    wanted = modes()
    for found in pool.run(modes, ranks=2):
        assert found == pytest.approx(wanted, rel=1e-12)


def opaque() -> str:
    return refusal(Opaque, "pp=2")


class Opaque(nn.Module):
    """A block that returns an object."""

    class Result:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return Opaque.Result(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).value
        return x[:, :3]


def test_blocks_that_return_objects(pool: Pool) -> None:
    for text in pool.run(opaque, ranks=2):
        assert "blocks.0 returns an object that a pipeline cannot hand on" in text
