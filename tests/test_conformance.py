"""Cases that other frameworks test, with soli's bound in place of theirs; docs/conformance.md says which is which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cases import CASES
from pool import Pool
from soli import losses
from soli.core.axes import AXES, coordinates, peers
from soli.core.plan import Plan
from soli.engine.engine import parallelize
from soli.mesh.collectives import all_reduce
from soli.mesh.mesh import build_mesh
from soli.mesh.world import join
from soli.verify.oracle import sequential
from soli.verify.parity import BOUND, Case, compare, expected_of, under_plan
from sweep import spread, swept

# --- pipelines of plain layers --------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers of one width, one after another."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def stack(layers: int, rows: int) -> Case:
    def make() -> Any:
        torch.manual_seed(2)
        model = Stack(layers)
        generator = torch.Generator().manual_seed(3)
        batches = [
            {name: torch.randn(rows, 8, generator=generator).double() for name in ("x", "targets")} for _ in range(3)
        ]
        return model, losses.mse("targets"), batches

    return Case("stack", make, momentum, clip=None)


def stacked(layers: int, rows: int, plan: str) -> tuple[float, str]:
    """Loss, gradients and weights, and the optimizer's momentum, of a stack."""
    case = stack(layers, rows)
    worst = compare(under_plan(case, plan), expected_of(case))
    model, loss_fn, batches = case.make()
    engine = parallelize(model.double(), loss_fn, optimizer=momentum, plan=plan)
    for batch in batches:
        engine.step(batch)
    got = engine.global_state_dict(optimizer=True)
    plain, _, _ = case.make()
    made: list[torch.optim.Optimizer] = []

    def factory(params: Any) -> torch.optim.Optimizer:
        made.append(momentum(params))
        return made[0]

    sequential(plain.double(), loss_fn, factory, batches, None)
    rows_of = [worst]
    for name, param in plain.named_parameters():
        want = made[0].state[param]["momentum_buffer"]
        have = got[f"optimizer.{name}.momentum_buffer"]
        rows_of.append((float((have - want).abs().max() / want.abs().max()), f"momentum of {name}"))
    return max(rows_of)


@pytest.mark.parametrize(("ranks", "microbatches"), spread([(2,), (4,)], [(4,), (6,)]))
def test_1f1b(pool: Pool, ranks: int, microbatches: int) -> None:
    for worst, what in pool.run(stacked, 8, 12, f"pp={ranks},microbatches={microbatches}", ranks=ranks):
        assert worst <= 1e-12, what


@pytest.mark.parametrize(("chunks", "microbatches"), spread([(2,), (4,)], [(12,), (4,)]))
def test_interleaved(pool: Pool, chunks: int, microbatches: int) -> None:
    plan = f"pp=4,microbatches={microbatches},schedule=interleaved,chunks={chunks}"
    for worst, what in pool.run(stacked, 16, 12, plan, ranks=4, deadline=60):
        assert worst <= 1e-12, what


@pytest.mark.parametrize(("schedule", "microbatches"), spread([("zbv",), ("zbh1",)], [(8,), (4,)]))
def test_zero_bubble(pool: Pool, schedule: str, microbatches: int) -> None:
    plan = f"pp=4,microbatches={microbatches},schedule={schedule}"
    for worst, what in pool.run(stacked, 8, 8, plan, ranks=4):
        assert worst <= 1e-12, what


def forward_alone(plan: str) -> bool:
    model, loss_fn, batches = stack(8, 12).make()
    engine = parallelize(model.double(), loss_fn, optimizer=momentum, plan=plan)
    engine.evaluate(batches)
    return all(p.grad is None for p in model.parameters())


def test_evaluation_leaves_no_gradient(pool: Pool) -> None:
    assert all(pool.run(forward_alone, "pp=2,microbatches=4", ranks=2))


class Uneven(nn.Module):
    """Layers of very different sizes, one of them tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 64, 8, 8, 8, 8]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.layers.append(nn.Linear(8, 8))
        self.layers[-1].weight = self.layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def uneven(plan: str) -> tuple[float, str]:
    def make() -> Any:
        _, loss_fn, batches = stack(1, 9).make()
        torch.manual_seed(5)
        return Uneven(), loss_fn, batches

    case = Case("uneven", make, momentum)
    return compare(under_plan(case, plan), expected_of(case))


@pytest.mark.parametrize("plan", ["pp=2,microbatches=4", "pp=2,microbatches=4,schedule=interleaved,chunks=3", "dp=2"])
def test_uneven_stages_and_tied_layers(pool: Pool, plan: str) -> None:
    for worst, what in pool.run(uneven, plan, ranks=2):
        assert worst <= BOUND, what


# --- ZeRO, clipping, the user's own loop ----------------------------------------------------------------


def trained(plan: str, accumulate: int = 1) -> dict[str, Tensor]:
    """fp32, as users train."""
    model, loss_fn, batches = CASES["gpt"].make()
    made = CASES["gpt"].optimizer
    engine = parallelize(model, loss_fn, optimizer=made, plan=f"{plan},accumulate={accumulate}")
    for batch in batches:
        engine.step(batch)
    return engine.global_state_dict()


@pytest.mark.parametrize("accumulate", [swept(1), 2])
def test_zero_stages_are_one_another_bitwise(pool: Pool, accumulate: int) -> None:
    """Sums run in the order of the ranks, of which three are the least that have one, whatever is sharded."""
    found = [pool.run(trained, f"dp=3,zero={z}", accumulate, ranks=3)[0] for z in range(4)]
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def norms(plan: str) -> list[float]:
    model, loss_fn, batches = CASES["gpt-masked"].make()
    engine = parallelize(model.double(), loss_fn, optimizer=CASES["gpt"].optimizer, clip=0.1, plan=plan)
    found = []
    for batch in batches:
        engine.step(batch)
        found.append(float(engine.last.grad_norm or 0))
    return found


@pytest.mark.parametrize(
    "plan",
    [
        "dp=4,replicate=2,zero=3",
        "pp=2,tp=2,sp=on,microbatches=2",
        # each axis of these is in one of those
        *map(swept, ("dp=4,zero=2", "dp=2,tp=2,zero=1", "pp=4,microbatches=4", "dp=2,pp=2,zero=3,microbatches=2,schedule=zbv")),
    ],
)
def test_the_gradient_norm_is_one_number(pool: Pool, plan: str) -> None:
    wanted = pool.run(norms, "dp=1", ranks=1)[0]
    for found in pool.run(norms, plan, ranks=4):
        assert found == pytest.approx(wanted, rel=BOUND)


def own_loop(plan: str, own: bool) -> list[float]:
    model, loss_fn, batches = CASES["gpt-dropout"].make()
    engine = parallelize(model.double(), loss_fn, optimizer=CASES["gpt"].optimizer, clip=0.5, plan=plan)
    found = []
    for batch in batches:
        if own:
            loss = engine.forward_backward(batch)
            engine.clip()
            engine.update()
        else:
            loss = engine.step(batch)
        found.append(float(loss))
    return found


@pytest.mark.parametrize("plan", ["dp=2,zero=2", "pp=2,microbatches=2", "tp=2"])
def test_the_loop_in_ones_own_hands_is_step(pool: Pool, plan: str) -> None:
    assert pool.run(own_loop, plan, True, ranks=2) == pool.run(own_loop, plan, False, ranks=2)


# --- the mesh -------------------------------------------------------------------------------------------


def test_coordinates_and_peers_partition_the_ranks() -> None:
    sizes = dict(zip(AXES, (2, 2, 1, 1, 1, 2), strict=True))
    everyone = [tuple(coordinates(rank, sizes).values()) for rank in range(8)]
    assert len(set(everyone)) == 8
    for rank in range(8):
        for axis in AXES:
            group = peers(rank, axis, sizes)
            assert len(group) == sizes[axis]
            assert rank in group
            for other in group:
                assert peers(other, axis, sizes) == group
                same = {a: v for a, v in coordinates(other, sizes).items() if a != axis}
                assert same == {a: v for a, v in coordinates(rank, sizes).items() if a != axis}


def sums_over_axes() -> dict[str, list[float]]:
    """Every axis's group sums the ranks that `peers` names."""
    mesh = build_mesh(Plan.parse("dp=2,pp=2,zero=1"), join())
    found = {}
    for axis in (mesh["pp"], mesh["shard"], mesh.dp, mesh.all):
        x = torch.tensor([float(dist.get_rank())])
        all_reduce(x, axis)
        found[axis.name] = [float(x), float(sum(axis.ranks))]
    return found


def test_groups_are_their_ranks(pool: Pool) -> None:
    for found in pool.run(sums_over_axes, ranks=4):
        assert all(got == want for got, want in found.values()), found
