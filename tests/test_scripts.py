"""What published training scripts do around a step: adapters, several optimizers, validation, sampling, their own checkpoints."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.test_kept import DIM, Plain, case_of, error_of, tokens_of
from torch import Tensor, nn

from pool import Pool
from soli import losses
from soli.checkpoint import save
from soli.core.errors import SoliError
from soli.core.layout import from_whole
from soli.engine.engine import Engine, parallelize
from soli.verify.parity import BOUND
from sweep import swept


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def engine_of(kind: type[nn.Module], plan: str, **options: Any) -> tuple[Engine, list[Any]]:
    model, loss_fn, batches = case_of(kind).make()
    options = {"loss_fn": loss_fn, "optimizer": sgd, "plan": plan} | options
    return parallelize(model.double(), **options), batches


def said_by(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except SoliError as error:
        return str(error)
    return "it ran"


# --- adapters that merge in eval() -------------------------------------------------------------------------


class Adapted(nn.Linear):
    """LoRA as its authors' library has it: eval() merges the adapter into the weight, train() takes it out again."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (self.up.weight @ self.down.weight) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0 if self.merged else self.up(self.down(x)))


class WithAdapters(Plain):
    def layer(self) -> nn.Module:
        return Adapted()


def trained_between_evaluations(plan: str) -> list[float]:
    engine, batches = engine_of(WithAdapters, plan)
    found = []
    for batch in batches:
        found += [engine.evaluate([batch]), float(engine.step(batch))]
    assert not any(module.merged for module in engine.model.modules() if isinstance(module, Adapted))
    return found


def test_adapters_train_after_an_evaluation(pool: Pool) -> None:
    model, loss_fn, batches = case_of(WithAdapters).make()
    model.double()
    optimizer, expected = sgd(model.parameters()), []
    for batch in batches:
        model.eval()
        total, count = loss_fn(model(batch["tokens"]), batch)
        expected.append(float(total.detach() / count))
        model.train()
        total, count = loss_fn(model(batch["tokens"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        expected.append(float(total.detach() / count))
    for found in (trained_between_evaluations("dp=1"), *pool.run(trained_between_evaluations, "dp=2", ranks=2)):
        assert found == pytest.approx(expected, rel=BOUND)


# --- losses ------------------------------------------------------------------------------------------------


def ratio_of_policies(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """PPO's: advantages normalised over the rows at hand. At the first weights the ratio is 1, and they sum to nothing."""
    chosen = output.log_softmax(-1).gather(-1, batch["targets"].unsqueeze(-1)).squeeze(-1).sum(1)
    advantages = torch.linspace(-1, 2, 8, dtype=output.dtype)[batch["rows"]].square()
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    return ((chosen - batch["old"]).exp() * advantages).sum(), len(advantages)


def above_the_reference(output: Tensor, batch: Any, sign: float) -> tuple[Tensor, int]:
    """As KTO's: rewards beside their mean over the rows, which is clamped at 0; at the first weights, and on one side of them, it is 0."""
    rewards = sign * (output.mean((1, 2)) - batch["mean"])
    return torch.sigmoid(rewards.mean().clamp(min=0).detach() - rewards).sum(), len(rewards)


def above(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return above_the_reference(output, batch, 1.0)


def below(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return above_the_reference(output, batch, -1.0)


def policy(plan: str, loss_fn: Any) -> str:
    model, _, batches = case_of(Plain).make()
    batch = batches[0] | {"rows": torch.arange(8)}
    with torch.no_grad():
        model.double()
        chosen = model(batch["tokens"]).log_softmax(-1).gather(-1, batch["targets"].unsqueeze(-1))
        batch["mean"] = model(batch["tokens"]).mean((1, 2))
    batch["old"] = chosen.squeeze(-1).sum(1)
    engine = parallelize(model, loss_fn, optimizer=sgd, plan=plan)
    return said_by(engine.step, batch)


@pytest.mark.parametrize(
    ("plan", "loss_fn"),
    [("dp=2", ratio_of_policies), ("pp=2,microbatches=2", ratio_of_policies), ("dp=2", above), ("dp=2,zero=3", below)],
)
def test_losses_that_add_up_at_the_first_weights_alone_are_refused(pool: Pool, plan: str, loss_fn: Any) -> None:
    assert policy("dp=1", loss_fn) == "it ran"
    for text in pool.run(policy, plan, loss_fn, ranks=2):
        assert "something couples the rows" in text


def with_a_criterion(plan: str) -> str:
    centres = nn.Parameter(torch.zeros(29, dtype=torch.float64))
    inner = losses.cross_entropy("targets")
    engine, batches = engine_of(Plain, plan, loss_fn=lambda output, batch: inner(output + centres, batch))
    return said_by(engine.step, batches[0])


def test_parameters_that_the_loss_alone_has_are_refused_where_nobody_sums_their_gradients(pool: Pool) -> None:
    assert with_a_criterion("dp=1") == "it ran"
    for plan in ("dp=2", "zero=3", "pp=2,microbatches=2", "tp=2", "cp=2"):
        assert any("1 tensors that are not the model's parameters" in t for t in pool.run(with_a_criterion, plan, ranks=2))


def weighted(plan: str) -> tuple[str, float]:
    """Class weights: what is counted is no whole number."""
    weights = torch.linspace(0.1, 1.7, 29, dtype=torch.float64)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        found = nn.functional.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), weights, reduction="sum")
        return found, weights[batch["targets"]].sum()

    engine, batches = engine_of(Plain, plan, loss_fn=loss)
    return said_by(lambda: [engine.step(batch) for batch in batches]), engine.last.loss


def test_counts_may_be_weights(pool: Pool) -> None:
    (_, expected), found = weighted("dp=1"), pool.run(weighted, "dp=2,accumulate=2", ranks=2)
    assert found == [("it ran", pytest.approx(expected, rel=BOUND))] * 2


# --- the optimizer ------------------------------------------------------------------------------------------


def edited(how: str, plan: str) -> str:
    engine, batches = engine_of(Plain, plan)
    engine.step(batches[0])
    if how == "group":
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    elif how == "other":
        engine.optimizer = sgd(engine.model.parameters())
    elif how == "hook":
        engine.optimizer.register_step_pre_hook(lambda *_: None)
    elif how == "asked":
        return said_by(engine.optimizer.state_dict)
    return said_by(engine.step, batches[1])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("group", "parameters, "),
        ("other", "another optimizer"),
        ("hook", "hooks on its step"),
        ("asked", "this rank's part of its states"),
    ],
)
def test_an_optimizer_that_is_changed_where_it_has_parts_is_refused(pool: Pool, how: str, said: str) -> None:
    for plan in ("dp=2,zero=1", "tp=2"):
        assert all(said in text for text in pool.run(edited, how, plan, ranks=2))
    assert pool.run(edited, how, "dp=2", ranks=2) == ["it ran"] * 2


def rewound(plan: str, folder: str) -> tuple[list[float], int]:
    make = lambda p: torch.optim.Adam(p, lr=0.1)
    engine, batches = engine_of(Plain, plan, optimizer=make)
    engine.save(f"{folder}/0")
    first = [float(engine.step(batch)) for batch in batches]
    engine.load(f"{folder}/0")
    kept = len(engine.optimizer.state)
    return [a - float(engine.step(batch)) for a, batch in zip(first, batches, strict=True)], kept


def test_a_checkpoint_from_before_the_first_step_has_no_moments(pool: Pool, tmp_path: Path) -> None:
    for differences, kept in pool.run(rewound, "dp=2,zero=1", str(tmp_path), ranks=2):
        assert differences == [0.0] * 3
        assert kept == 0


def alone(call: str, folder: str) -> str:
    engine, batches = engine_of(Plain, "dp=2")
    engine.step(batches[0])
    if engine.rank == 0:
        return said_by(engine.save, f"{folder}/0")
    return said_by(engine.step, batches[1])


def test_a_call_that_rank_0_makes_alone_is_named(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(alone, "save", str(tmp_path), ranks=2, deadline=30)
    assert all("save(), which every rank calls" in text or "different collectives" in text for text in found), found


# --- evaluation, sampling -----------------------------------------------------------------------------------


class Sampling(Plain):
    """It draws in evaluation too, as a variational autoencoder does."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(torch.tanh(self.layers[0](x + 0.1 * torch.randn_like(x))))


class SamplingThen(Plain):
    """It draws other numbers in evaluation than in training: first those of every position, then those of every row."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if not self.training:
            x = x + 0.1 * torch.randn_like(x[:1])
        return self.head(torch.tanh(self.layers[0](x + 0.1 * torch.randn_like(x))))


class SamplingOnly(Plain):
    """It draws in evaluation alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(torch.tanh(self.layers[0](x if self.training else x + 0.1 * torch.randn_like(x))))


def evaluated(kind: type, plan: str, first: bool = False) -> tuple[list[float], float]:
    torch.manual_seed(5)
    engine, batches = engine_of(kind, plan)
    if not first:
        engine.step(batches[0])
    torch.manual_seed(7)
    found = [engine.evaluate(some) for some in (batches, batches[1:], batches[:1] * 2, batches[:1])]
    return found, float(torch.rand(()))


THESE, THOSE = ("dp=2", "tp=2"), ("dp=2,zero=3", "pp=2,microbatches=2")


@pytest.mark.parametrize(
    ("kind", "first", "plans"),
    [
        (Sampling, False, THESE), (Sampling, True, THOSE), swept(Sampling, False, THOSE), swept(Sampling, True, THESE),
        (SamplingThen, False, THOSE), (SamplingThen, True, THESE), swept(SamplingThen, False, THESE), swept(SamplingThen, True, THOSE),
        (SamplingOnly, False, THESE), (SamplingOnly, True, THOSE), swept(SamplingOnly, False, THOSE), swept(SamplingOnly, True, THESE),
    ],
)  # fmt: skip
def test_what_an_evaluation_draws_belongs_to_its_rows(
    pool: Pool, kind: type, first: bool, plans: tuple[str, str]
) -> None:
    expected, after = evaluated(kind, "dp=1", first)
    torch.manual_seed(7)
    assert after == float(torch.rand(()))  # the program's own numbers go on
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    assert expected[2] != pytest.approx(expected[3], rel=1e-6)  # the same rows once more draw anew
    for plan in plans:
        for found, drawn in pool.run(evaluated, kind, plan, first, ranks=2):
            assert found == pytest.approx(expected, rel=BOUND)
            assert drawn == after


def sampled(plan: str) -> str:
    engine, batches = engine_of(Plain, plan)
    engine.step(batches[0])
    said = said_by(engine.model, batches[0]["tokens"])
    assert said_by(engine.copy_model(), batches[0]["tokens"]) == "it ran"
    assert said_by(engine.step, batches[1]) == "it ran"
    return said


def test_a_model_of_which_a_rank_has_parts_is_not_called_by_itself(pool: Pool) -> None:
    for plan in ("dp=2,zero=3", "tp=2", "pp=2,microbatches=2"):
        assert all("engine.copy_model()" in text for text in pool.run(sampled, plan, ranks=2))
    assert pool.run(sampled, "dp=2,zero=2", ranks=2) == ["it ran"] * 2


class Closing(nn.Module):
    """A block of minGPT: its forward calls a function that closes over modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"up": nn.Linear(DIM, 4 * DIM), "down": nn.Linear(4 * DIM, DIM)})
        m = self.parts
        self.function = lambda x: m["down"](torch.tanh(m["up"](x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class WithClosures(Plain):
    def layer(self) -> nn.Module:
        return Closing()


def copied(plan: str) -> float:
    engine, batches = engine_of(WithClosures, plan)
    made = engine.copy_model()
    before = made(batches[0]["tokens"])
    engine.step(batches[0])
    return float((made(batches[0]["tokens"]) - before).abs().max())


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_functions_that_close_over_modules_are_the_copys_own(pool: Pool, plan: str) -> None:
    assert all(error < BOUND for error in pool.run(error_of, WithClosures, plan, ranks=2))
    if plan.startswith("dp"):  # else it is laid over the ranks on the first batch
        assert pool.run(copied, plan, ranks=2) == [0.0, 0.0]


def before_the_first_step(plan: str) -> tuple[float, float]:
    engine, batches = engine_of(Plain, plan)
    return engine.evaluate(batches), float(engine.step(batches[0]))


def test_an_evaluation_may_come_before_the_first_step(pool: Pool) -> None:
    expected = before_the_first_step("dp=1")
    for found in pool.run(before_the_first_step, "tp=2,sp=on", ranks=2):
        assert found == pytest.approx(expected, rel=BOUND)


# --- what the first step's checks leave ---------------------------------------------------------------------


class Teaching(Plain):
    """Scheduled sampling: half of its steps go by Python's random."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.drawn = (random.random(), float(np.random.rand()))
        return super().forward(tokens) * (1 + (self.drawn[0] > 0.5))


def test_what_a_forward_draws_from_python_and_numpy_is_the_steps() -> None:
    """Whatever the program draws, and wherever its generators stand; and neither the forward nor a check moves them."""
    drawn = set()
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed)
        expected = (random.random(), float(np.random.rand()))
        random.seed(seed), np.random.seed(seed)
        engine, batches = engine_of(Teaching, "dp=1")
        for _ in range(2):
            engine.step(batches[0])
            drawn.add(engine.model.drawn)
        assert (random.random(), float(np.random.rand())) == expected
    assert len(drawn) == 2, "one of each step"


class Carrying(Plain):
    """A state that is a pair, of the batch before, as truncated backpropagation keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x, state = self.lstm(self.embed(tokens), self.state)
        self.state = tuple(one.detach() for one in state)
        return self.head(torch.tanh(self.layers[0](x)))


def carried(plan: str) -> list[float]:
    engine, _ = engine_of(Carrying, plan)
    return [float(engine.step(tokens_of(8, seed))) for seed in range(3)]


def test_a_state_that_a_batch_leaves_to_the_next(pool: Pool) -> None:
    model, loss_fn, _ = case_of(Carrying).make()
    model.double()
    optimizer, expected = sgd(model.parameters()), []
    for seed in range(3):
        batch = tokens_of(8, seed)
        total, count = loss_fn(model(batch["tokens"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        expected.append(float(total.detach() / count))
    assert carried("dp=1") == pytest.approx(expected, rel=BOUND)
    for found in pool.run(carried, "tp=2", ranks=2):
        assert found == pytest.approx(expected, rel=BOUND)
    for text in pool.run(refused_to_carry, "dp=2", ranks=2):
        assert "does not run on a part of the batch's rows" in text


def refused_to_carry(plan: str) -> str:
    return said_by(carried, plan)


class Graph(nn.Module):
    """Nodes are rows, and every node sees its neighbours: no row stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("edges", torch.eye(6).roll(1, 0) + torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.edges @ self.head(x)


def graph(plan: str, sparse: bool = False) -> str:
    engine = parallelize(Graph().double(), losses.mse("targets"), optimizer=sgd, plan=plan)
    x = torch.arange(30, dtype=torch.float64).reshape(6, 5)
    batch = {"x": x.to_sparse() if sparse else x, "targets": torch.zeros(6, 3, dtype=torch.float64)}
    try:
        return said_by(engine.step, batch)
    except RuntimeError as error:
        return " ".join(error.__notes__)


def test_rows_that_do_not_stand_alone(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert graph("dp=1") == "it ran"
    assert "the loss was not checked to be a sum over rows" in capsys.readouterr().out
    assert all("on 3 of the batch's 6 rows" in text for text in pool.run(graph, "dp=2", ranks=2))
    assert "on 3 of the batch's 6 rows" in graph("dp=1,accumulate=2")
    assert "sparse tensors" in graph("dp=1", True)


# --- two networks ---------------------------------------------------------------------------------------------


def mlp(first: int, last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, 16), nn.Tanh(), nn.Linear(16, last))


class Critic(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.D = inner

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.D(real), self.D(fake)


def networks() -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(2)
    data = [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(4)]
    return mlp(3, 5).double(), mlp(5, 1).double(), [(a.double(), b.double()) for a, b in data]


def critic_loss(output: Any, batch: Any = None) -> tuple[Tensor, int]:
    real, fake = output
    return nn.functional.softplus(-real).sum() + nn.functional.softplus(fake).sum(), len(real)


def generator_loss(judged: Tensor) -> tuple[Tensor, int]:
    return nn.functional.softplus(-judged).sum(), len(judged)


def adversarial(plan: str) -> list[float]:
    """The loop of docs/porting.md."""
    G, D, data = networks()
    judge = copy.deepcopy(D).requires_grad_(False)
    critic = parallelize(Critic(D), critic_loss, optimizer=sgd, plan=plan)
    generator = parallelize(G, lambda fake, noise: generator_loss(judge(fake)), optimizer=sgd, plan=plan)
    found = []
    for real, noise in data:
        with torch.no_grad():
            fake = generator.copy_model()(noise)
        found.append(float(critic.step({"real": real, "fake": fake})))
        for name, value in critic.global_state_dict().items():
            judge.state_dict()[name.removeprefix("D.")].copy_(value)
        found.append(float(generator.step(noise)))
    return found


def test_two_engines_train_against_each_other(pool: Pool) -> None:
    G, D, data = networks()
    of_critic, of_generator, expected = sgd(D.parameters()), sgd(G.parameters()), []
    for real, noise in data:
        for optimizer, loss in (
            (of_critic, lambda real=real, noise=noise: critic_loss((D(real), D(G(noise).detach())))),
            (of_generator, lambda noise=noise: generator_loss(D(G(noise)))),
        ):
            total, count = loss()
            of_critic.zero_grad(), of_generator.zero_grad()
            (total / count).backward()
            optimizer.step()
            expected.append(float(total.detach() / count))
    for plan in ("dp=2", "dp=2,zero=3"):
        for found in pool.run(adversarial, plan, ranks=2):
            assert found == pytest.approx(expected, rel=BOUND)


# --- weights alone ----------------------------------------------------------------------------------------------


def loaded_alone(kind: str, steps: int, folder: Path) -> str:
    """The first values of the weights, and nothing else, into an engine that has stepped so often; and a step from there."""
    engine, batches = engine_of(Plain, "dp=1", optimizer=lambda p: getattr(torch.optim, kind)(p, lr=0.1))
    path = folder / f"{kind}{steps}"
    save(path, {f"model.{name}": from_whole(value) for name, value in engine.global_state_dict().items()}, {})
    first = None
    for batch in batches[:steps]:
        loss = engine.step(batch)
        first = loss if first is None else first
    before = engine.global_state_dict()
    said = said_by(engine.load, path)
    if said != "it ran":
        assert all(torch.equal(value, before[name]) for name, value in engine.global_state_dict().items())
    if said == "it ran":
        loss = engine.step(batches[0])
        assert engine.step_count == 1
        assert first is None or float(loss) == float(first)
        assert all(float(state["step"]) == 1 for state in engine.optimizer.state.values())
    return said


def test_weights_alone_let_the_optimizer_start_anew(tmp_path: Path) -> None:
    """Adagrad makes its states when it is built: after a step there is no way to make them anew."""
    for kind, steps in (("Adam", 0), ("Adam", 2), ("Adagrad", 0)):
        assert loaded_alone(kind, steps, tmp_path) == "it ran"
    assert "had some when soli.parallelize was given it" in loaded_alone("Adagrad", 2, tmp_path)


# --- a run that begins without soli ------------------------------------------------------------------------


def begun(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The plain model and its optimizer, loaded as they were after so many steps of a loop by hand."""
    make = lambda model: getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    model, loss_fn, batches = case_of(Plain).make()
    model.double()
    optimizer = make(model)
    for batch in batches[:steps]:
        total, count = loss_fn(model(batch["tokens"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = case_of(Plain).make()[0].double()
    optimizer = make(model)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return model, optimizer


def gone_on(plan: str, kind: str, apart: bool) -> tuple[float, float]:
    """The largest difference of weights, and of a state, after a third step by soli, from one by hand. `apart`: rank 1 has other states."""
    model, optimizer = begun(kind, 2)
    if apart and dist.get_rank() == 1:
        for state in optimizer.state.values():
            state["exp_avg"].add_(1.0)
    _, loss_fn, batches = case_of(Plain).make()
    engine = parallelize(model, loss_fn, optimizer=optimizer, plan=plan)
    engine.step(batches[2])
    found = engine.global_state_dict(optimizer=True)
    by_hand, with_states = begun(kind, 3)
    wanted = dict(by_hand.named_parameters())
    key = {"AdamW": "exp_avg_sq", "Adagrad": "sum"}[kind]
    states = {name: with_states.state[param][key] for name, param in wanted.items()}
    worst = lambda prefix, suffix, values: max(
        float((found[f"{prefix}{name}{suffix}"] - value).abs().max()) for name, value in values.items()
    )
    return worst("", "", wanted), worst("optimizer.", f".{key}", states)


@pytest.mark.parametrize(
    ("plan", "kind", "apart"),
    [
        ("dp=2", "AdamW", False),
        ("dp=2,zero=1", "Adagrad", False),
        ("dp=2,zero=2", "AdamW", True),
        ("dp=2,zero=3", "AdamW", False),
        ("tp=2", "AdamW", False),
        ("pp=2,microbatches=2", "AdamW", False),
        ("auto", "AdamW", False),
    ],
)
def test_a_run_that_began_without_soli_goes_on(pool: Pool, plan: str, kind: str, apart: bool) -> None:
    for weights, states in pool.run(gone_on, plan, kind, apart, ranks=2):
        assert weights <= BOUND
        assert states <= BOUND


def loaded_on_one() -> str:
    model, optimizer = begun("AdamW", 2 * (dist.get_rank() == 0))
    return said_by(parallelize, model, losses.cross_entropy("targets"), optimizer=optimizer, plan="dp=2")


def test_states_that_one_rank_alone_has_are_refused(pool: Pool) -> None:
    for said in pool.run(loaded_on_one, ranks=2):
        assert "the ranks' optimizers have not the same states" in said


class SAM(torch.optim.SGD):
    """Asks for a closure when it is stepped, and not by its signature."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise TypeError("'NoneType' object is not callable")
        return super().step(closure)


def test_an_optimizer_that_wants_a_closure_is_explained() -> None:
    engine, batches = engine_of(Plain, "dp=1", optimizer=lambda p: SAM(p, lr=0.1))
    with pytest.raises(TypeError) as caught:
        engine.step(batches[0])
    assert any("SAM.step() once a step and without a closure" in note for note in caught.value.__notes__)


# --- what blocks leave for the loss, and operators that are given functions --------------------------------


class Leaving(nn.Module):
    """A loss of its own that each block leaves in an attribute, one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        self.auxiliary = y.square().mean((1, 2))
        return x + y


class WithLeft(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaving() for _ in range(2))


def left(plan: str) -> list[float]:
    model, loss_fn, batches = case_of(WithLeft).make()

    def both(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        total, count = loss_fn(output, batch)
        return total + sum(layer.auxiliary.sum() for layer in model.layers), count

    engine = parallelize(model.double(), both, optimizer=sgd, plan=plan)
    return [float(engine.step(batch)) for batch in batches]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,accumulate=2", "tp=2"])
def test_a_loss_may_read_what_blocks_left_in_attributes(pool: Pool, plan: str) -> None:
    """The look in float64 ran a copy, and the loss read what the original had left: no sum of its rows'."""
    expected = left("dp=1")
    for found in pool.run(left, plan, ranks=2):
        assert found == pytest.approx(expected, rel=BOUND)


class Choosing(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.cond(x.sum() > 0, torch.tanh, torch.sin, (layer(x),))
        return self.head(x)


def chosen(plan: str) -> str:
    engine, batches = engine_of(Choosing, plan)
    return said_by(engine.step, batches[0])


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,microbatches=2"])
def test_operators_that_are_given_functions_are_refused(pool: Pool, plan: str) -> None:
    for said in pool.run(chosen, plan, ranks=2):
        assert "an operator of torch that is given functions is not followed" in said
        assert "cond" in said
