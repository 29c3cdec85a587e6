"""Recompute: the same result from less memory, with dropout, ZeRO and tensor parallelism; refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from soli import losses
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from soli.verify.cases import CASES
from soli.verify.parity import BOUND, adamw, check
from soli.verify.pool import Pool


def one(name: str, plan: str, ranks: int):
    return check(CASES[name], plan, ranks)


@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "t5", "vit", "hf-gpt2", "skipping"])
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("dp=1,recompute=full", 1),
        ("dp=1,recompute=full,accumulate=2", 1),
        ("dp=2,zero=3,recompute=full", 2),
        ("dp=2,zero=2,recompute=full", 2),
        ("tp=2,recompute=full", 2),
        ("tp=2,sp=on,recompute=full", 2),
        ("dp=2,tp=2,zero=3,sp=on,recompute=full", 4),
    ],
)
def test_recomputed_plans_equal_sequential(pool: Pool, name: str, plan: str, ranks: int) -> None:
    for row in pool.run(one, name, plan, ranks, ranks=ranks, deadline=60):
        assert row.worst <= BOUND, row


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
    none, full = (kept(f"dp=1,recompute={how}") for how in ("none", "full"))
    stream, layers = 8 * 7 * 12 * 4, 3  # bytes of [b, s, h], and how many blocks
    assert none > layers * 10 * stream
    assert full < none / 3


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("recompute=0.5", "not built yet"),
        ("recompute=selective", "not built yet"),
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


def test_a_block_that_writes_into_its_input() -> None:
    """Recomputed it would write again, and compute something else."""
    model = nn.Sequential(nn.Linear(3, 3), Writing())
    x = torch.randn(4, 3)
    engine = parallelize(model, losses.mse(), optimizer=adamw, plan="recompute=full")
    with pytest.raises(SoliError, match="a block writes into its input"):
        engine.step((x, x))


class Drawing(nn.Module):
    """Keeps a count of its calls, on which its result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        return self.linear(x) if self.calls and not self.calls % 2 else torch.tanh(self.linear(x))


def test_a_block_that_does_not_repeat_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Drawing(), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    engine = parallelize(model, losses.mse(), optimizer=adamw, plan="recompute=full", example=(x, x))
    with pytest.raises(SoliError, match="did not compute the same when it was recomputed"):
        engine.step((x, x))
