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
    """`fails`: whether it does, once it is told."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError(WORDS)
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
def test_others_raise_its_words(
    pool: Pool, tmp_path: Path, backend: str, plan: str, where: str, steps: int
) -> None:
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
