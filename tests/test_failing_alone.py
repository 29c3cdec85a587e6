"""A stage that fails alone, in a process that lives on: the others raise its words in seconds, and not a time-out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pool import Pool
from soli import losses
from soli.core.errors import SoliError, on_all_ranks
from soli.engine.engine import parallelize
from soli.mesh.world import make_group
from soli.verify.parity import BOUND
from sweep import spread

WORDS = "what went wrong here"


class Block(nn.Module):
    """`fails`: where it does, once it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 4), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward" or (self.fails == "evaluation" and not self.training):
            raise ValueError(WORDS)
        if self.fails == "backward" and x.requires_grad:
            x.register_hook(self.raises)
        return self.linear(x)

    def raises(self, grad: Tensor) -> None:
        raise ValueError(WORDS)


class Sgd(torch.optim.SGD):
    """`fails`: whether it does, once it is told. `tells`: whether it looks at its states, which soli refuses where a rank has a part."""

    fails = tells = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError(WORDS)
        if self.tells:
            self.state_dict()
        return super().step(closure)


def failing(backend: str, plan: str, where: str, steps: int, path: str) -> tuple[bool, str, str]:
    """What this rank has raised where the last one fails after so many steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if backend == "gloo":
        dist.destroy_process_group()
        make_group("gloo", rank, ranks, 15, store=dist.FileStore(path, ranks))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    refusing = False

    def loss(output: Any, batch: Any) -> Any:
        if refusing:
            raise on_all_ranks(WORDS)
        return losses.mse("targets")(output, batch)

    batch = {"input": torch.randn(8, 4), "targets": torch.randn(8, 4)}
    sgd = lambda p: Sgd(p, lr=0.1)
    engine = parallelize(model, loss, optimizer=sgd, plan=plan, deadline=15, example=batch)
    for _ in range(steps):
        engine.step(batch)
    if rank == ranks - 1:
        model[3].fails, refusing = where, where == "loss"
        engine.optimizer.fails = where == "update"
    try:
        if where == "update":  # after which others need not wait
            engine.step(batch)
        engine.evaluate([batch]) if where == "evaluation" else engine.step(batch)
    except (ValueError, SoliError, RuntimeError) as error:
        return getattr(error, "told", False), type(error).__name__, str(error)
    return False, "", ""


@pytest.mark.parametrize(
    ("backend", "plan", "where", "steps"),
    [
        ("local", "pp=2,dp=2", "forward", 0),
        ("gloo", "pp=2,dp=2", "forward", 2),
        ("gloo", "pp=2,tp=2", "forward", 0),
        ("local", "pp=2", "backward", 1),
        ("gloo", "pp=2", "backward", 1),
        ("gloo", "pp=2", "evaluation", 1),
        ("local", "pp=2,microbatches=2,schedule=1f1b", "loss", 1),
        ("local", "pp=2", "update", 1),
        ("gloo", "pp=2", "update", 1),
        ("local", "dp=2,zero=1", "update", 1),
    ],
)
def test_others_raise_its_words(pool: Pool, tmp_path: Path, backend: str, plan: str, where: str, steps: int) -> None:
    ranks = 4 if "," in plan and "p=2" in plan.split(",")[1] else 2
    stage = " (stage 1)" * ("pp=2" in plan)
    *others, alone = pool.run(failing, backend, plan, where, steps, str(tmp_path / "store"), ranks=ranks, deadline=30)
    assert alone == (False, "SoliError" if where == "loss" else "ValueError", WORDS)
    at, kind = ("", "") if where == "loss" else (f", at {__file__}:", "ValueError: ")
    for told, _, text in others:
        assert told, text
        assert text.startswith(f"rank {ranks - 1}{stage} failed after {steps} steps, at "), text
        assert at in text
        assert text.endswith(f": {kind}{WORDS}"), text


def refused(backend: str, plan: str, path: str) -> list[Any]:
    """Of engines in one process, in two of which the optimizer's step is refused, what each says or trains."""
    if backend == "gloo":
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        make_group("gloo", rank, ranks, 15, store=dist.FileStore(path, ranks))
    batch, found = {"input": torch.ones(8, 4).double(), "targets": torch.zeros(8, 4).double()}, list[Any]()
    for tells in (True, True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4))).double()
        sgd = lambda p: Sgd(p, lr=0.1)
        engine = parallelize(model, losses.mse("targets"), optimizer=sgd, plan=plan, deadline=15, example=batch)
        engine.optimizer.tells = tells
        try:
            found.append([float(engine.step(batch)) for _ in range(3)])
        except SoliError as error:
            found.append(str(error).split("\n")[0])
    return found


@pytest.mark.parametrize(("plan", "backend"), spread([("dp=2,zero=1",), ("tp=2",), ("pp=2",)], [("local",), ("gloo",)]))
def test_a_step_that_is_refused_on_all_ranks_ends_no_other_engine(
    pool: Pool, tmp_path: Path, backend: str, plan: str
) -> None:
    ((*_, expected),) = pool.run(refused, "", "dp=1", "", ranks=1)
    assert expected[2] < expected[0]
    for found in pool.run(refused, backend, plan, str(tmp_path / "store"), ranks=2, deadline=30):
        assert found[:2] == ["the optimizer has this rank's part of its states"] * 2
        assert found[2] == pytest.approx(expected, rel=BOUND)


@pytest.mark.parametrize("rank", [0, 1])
def test_words_of_another_are_printed_once(rank: int) -> None:
    """By the rank that failed, and by the first; the exit code is on all."""
    text = f"""if True:
        from soli.core.report import install_hook
        from soli.core.errors import failure
        install_hook({rank})
        error = failure("{WORDS}")
        error.told = True
        raise error
        """
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert (WORDS in done.stderr) == (rank == 0)
