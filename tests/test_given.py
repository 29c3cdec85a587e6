"""Batches, models and optimizers that are given in a way of their own, against the sequential program."""

from __future__ import annotations

import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pool import Pool
from soli import losses, parallelize
from soli.core.errors import SoliError
from soli.mesh import world
from soli.verify.parity import BOUND, Case, adamw, check
from test_engine import DATA, Named
from test_launch import Job, clean_environment


class Norms(nn.Module):
    """Convolutions whose weights lie channels last, and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Conv2d(3, 5, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def picture_loss(output, batch):
    """Over pixels that have a class."""
    counted = batch["targets"] != losses.IGNORE
    total = nn.functional.cross_entropy(output["logits"], batch["targets"], reduction="sum", ignore_index=losses.IGNORE)
    return total, counted.sum()


def pictures() -> tuple[nn.Module, Any, list[Any]]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        x = torch.randn(4, 3, 6, 6, generator=generator).double()
        targets = torch.randint(5, (4, 6, 6), generator=generator)
        targets[2:] = losses.IGNORE  # of the second rank no pixel counts
        batches.append({"x": x, "targets": targets})
    return Norms(), picture_loss, batches


def pictures_in_eval() -> tuple[nn.Module, Any, list[Any]]:
    """The model was looked at before: its mode is the engine's to set."""
    model, loss_fn, batches = pictures()
    return model.eval(), loss_fn, batches


NORMS = {"counted on one rank": pictures, "given in eval": pictures_in_eval}


def one(name: str, plan: str, ranks: int):
    return check(Case(name, NORMS[name], adamw), plan, ranks)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_the_batch_wait_for_ranks_without_targets(pool: Pool, name: str, plan: str) -> None:
    for row in pool.run(one, name, plan, 2, ranks=2):
        assert row.worst <= BOUND, row


class Lying(nn.Module):
    """Weights that lie in memory as nobody's shape says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh()) for _ in range(4))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def channels_last() -> tuple[nn.Module, Any, list[Any]]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(4, 6, 5, 5, generator=generator).double()
    return Lying(), losses.mse("targets"), [{"x": draw(), "targets": draw()} for _ in range(2)]


def stages(plan: str):
    return check(Case("channels last", channels_last, adamw), plan, 2)


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "dp=2", "dp=2,zero=3"])
def test_weights_that_lie_channels_last_are_whole_on_every_stage(pool: Pool, plan: str) -> None:
    for row in pool.run(stages, plan, ranks=2):
        assert row.worst <= BOUND, row


OVER_SOCKETS = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_given import stages

print(stages("pp=2,microbatches=2").worst)
"""


def test_weights_that_lie_channels_last_are_whole_over_gloo(tmp_path: Path) -> None:
    """Which sends memory as it lies; `local` sends it in the order of the shape."""
    job = Job(tmp_path, OVER_SOCKETS, 2, "--backend", "gloo")
    assert job.code == 0, job.err
    assert float(job.out.splitlines()[-1]) <= BOUND


class Masked(nn.Module):
    """No token is ever the first class, nor one of the padded ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens):
        out = torch.zeros(12, dtype=torch.bool)
        out[[0, 6, 11]] = True
        return self.head(self.embed(tokens)).masked_fill(out, -torch.inf)


def masked() -> tuple[nn.Module, Any, list[Any]]:
    tokens = torch.arange(16).reshape(4, 4) * 5 % 12
    targets = torch.tensor([1, 5, 7, 10]).expand(4, 4).clone()
    return Masked(), losses.cross_entropy("targets"), [{"tokens": tokens, "targets": targets}] * 2


def classes(plan: str):
    return check(Case("masked classes", masked, adamw), plan, 2)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2"])
def test_classes_that_are_masked_are_masked_on_every_rank(pool: Pool, plan: str) -> None:
    for row in pool.run(classes, plan, ranks=2):
        assert row.worst <= BOUND, row


class Encoded(UserDict):
    """As transformers' tokenizers give their batches."""


def encoded(samples: list[Any]) -> Encoded:
    return Encoded(torch.utils.data.default_collate(samples))


def stepped(batch: Any, compiled: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Named()
    given = torch.compile(model, backend="eager") if compiled else model
    engine = parallelize(given, losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    engine.step(batch)
    return {name.removeprefix("_orig_mod."): value for name, value in engine.global_state_dict().items()}


def of(kind: type) -> Any:
    return kind({"x": torch.stack([d["x"] for d in DATA]), "targets": torch.stack([d["targets"] for d in DATA])})


def test_a_mapping_is_a_batch_and_a_compiled_model_has_its_own_arguments() -> None:
    expected = stepped(of(dict))
    for found in (stepped(of(Encoded)), stepped(of(dict), compiled=True)):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for plan in ("dp=1", "auto"):
        engine = parallelize(Named(), losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
        assert type(next(engine.batches(DATA, 6, collate=encoded)).data) is dict
    parallelize(
        Named(), losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="auto", example=of(Encoded)
    )


@dataclass
class Closed:
    """A batch that is no pytree."""

    x: torch.Tensor
    targets: torch.Tensor


def told(plan: str, batch: Any, named: bool = True) -> str:
    model = Named() if named else nn.Linear(5, 3)
    engine = parallelize(
        model, losses.mse("targets" if named else -1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan
    )
    try:
        engine.step(batch(engine) if callable(batch) else batch)
    except SoliError as error:
        return str(error)
    return "it ran"


def collated(engine: Any) -> Any:
    pair = lambda samples: Closed(*(torch.stack([d[name] for d in samples]) for name in ("x", "targets")))
    return next(engine.batches(DATA, 6, collate=pair))


def test_objects_that_hide_their_tensors_are_refused_by_name(pool: Pool) -> None:
    whole = of(dict)
    for plan, ranks in (("dp=1", 1), ("dp=2", 2)):
        for said in pool.run(told, plan, (of(Encoded), whole["targets"]), False, ranks=ranks):
            assert "whose tensors nobody finds" in said
            assert "[0]: Encoded" in said
        assert all("batch: Closed" in said for said in pool.run(told, plan, collated, ranks=ranks))
    held = {"seen": Closed(torch.ones(2), torch.ones(3))}  # the same for all rows
    assert told("dp=1", whole | held) == "it ran"


def test_lists_of_words_or_lists_one_a_row_are_refused_where_rows_are_taken_apart(pool: Pool) -> None:
    whole = of(dict)
    for more in ({"ids": [f"id {i}" for i in range(len(DATA))]}, {"ids": [[0] * i for i in range(len(DATA))]}):
        assert all("lists with one entry a row" in said for said in pool.run(told, "dp=2", whole | more, ranks=2))
        assert told("dp=1", whole | more) == "it ran"


ANEW = """
import soli, torch

def pairs(samples):
    return torch.utils.data.default_collate(samples)

if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    data = [(torch.tensor([float(i)]), torch.tensor([0.0])) for i in range(6)]
    engine = soli.parallelize(torch.nn.Linear(1, 1), soli.losses.mse(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for part in engine.batches(data, 3, shuffle=False, workers=1, collate=pairs):
        print(part.data[0].flatten().tolist())
"""


def test_workers_that_are_started_anew_collate(tmp_path: Path) -> None:
    """Where they are no forks (macOS, Python 3.14) what they are given is pickled."""
    (tmp_path / "script.py").write_text(ANEW)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.stdout.splitlines() == ["[0.0, 1.0, 2.0]", "[3.0, 4.0, 5.0]"], done.stderr


def test_an_optimizer_that_waits_for_its_warmup_is_tried_at_a_rate() -> None:
    """At a rate of 0 nothing moves, and everything is elementwise."""

    def factored(params):
        made = torch.optim.Adafactor(params, lr=1e-2)
        torch.optim.lr_scheduler.LambdaLR(made, lambda step: step / 10)
        return made

    with pytest.raises(SoliError, match="element by element"):
        parallelize(Named(), losses.mse("targets"), optimizer=factored, plan="zero=1")


@pytest.mark.parametrize("plan", ["dp=1", "accumulate=2", "recompute=full"])
@pytest.mark.parametrize("before", [True, False])
def test_a_backward_of_the_programs_own_is_none_of_a_step(plan: str, before: bool) -> None:
    """FGSM, saliency: gradients of inputs, for which the parameters' would be in the way."""
    model = Named()
    engine = parallelize(model, losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    batch = of(dict)
    if not before:
        engine.step(batch)
    x = batch["x"].clone().requires_grad_()
    with pytest.raises(SoliError, match="a backward that is none of a step"):
        model(x).sum().backward()
    expected = engine.global_state_dict()
    assert torch.autograd.grad(model(x).sum(), x)[0].shape == x.shape
    assert all(torch.equal(value, expected[name]) for name, value in engine.global_state_dict().items())
    assert float(engine.step(batch)) > 0


@pytest.mark.parametrize(
    ("odd", "said"),
    [({"roles": ["x"]}, "roles has a kind for each pattern"), ({"roles": {0: "column"}}, "roles has a kind"), ({"rows": -3}, "rows of a global batch are a whole number"), ({"rows": "16"}, "rows of a global batch"), ({"clip": torch.tensor([1.0, 2.0])}, "clip is the largest norm")],
)  # fmt: skip
def test_what_parallelize_is_given_is_looked_at(odd: dict[str, Any], said: str) -> None:
    with pytest.raises(SoliError, match=said):
        parallelize(Named(), losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1", **odd)


@pytest.mark.parametrize(("made", "got"), [(lambda o: torch.optim.lr_scheduler.StepLR(o, 3), "StepLR"), (lambda o: lambda _: None, "NoneType")])
def test_a_scheduler_is_a_function_of_the_optimizer(made: Any, got: str) -> None:
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SoliError, match=f"scheduler is no function.*\n.*{got}"):
        parallelize(model, losses.mse("targets"), optimizer=optimizer, scheduler=made(optimizer), plan="dp=1")


@pytest.mark.parametrize(("config", "right"), [("cuda:nccl", False), ("cpu:gloo,cuda:nccl", True)])
def test_a_group_without_a_backend_for_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: str, right: bool
) -> None:
    """NCCL is not here: what torch says of such a group stands for it."""
    monkeypatch.setattr(world.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(world.dist, "get_backend_config", lambda: config)
    if right:
        assert world._made_backend() == "nccl"
    else:
        with pytest.raises(SoliError, match="cpu:gloo,cuda:nccl"):
            world._made_backend()
