"""Parity: one model, one plan, against the oracle, in float64. This is the proof of law 1.

The relative error of a tensor is max |a - b| / max |b| over its elements. A gradient that is zero in exact
arithmetic (that of a key's bias under softmax) is rounding noise of the others, epsilon of the largest; so
the divisor is at least NOISE = epsilon / BOUND of the largest gradient of the step. Adam turns such noise
into updates of its own, so the elements whose gradients are all noise are compared absolutely. In float64
with a handful of steps rounding stays far below BOUND; what is wrong is far above it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from soli.engine.batch import to_device
from soli.engine.engine import parallelize
from soli.losses import LossFn
from soli.mesh.world import join
from soli.parallel.lift import lifted
from soli.verify.oracle import MakeOptimizer, Trace, sequential

BOUND = 1e-10
NOISE = torch.finfo(torch.float64).eps / BOUND


@dataclass(eq=False)
class Case:
    """A model with its loss and batches. `make()` builds all of it anew, the same on every rank."""

    name: str
    make: Callable[[], tuple[nn.Module, LossFn, list[Any]]]
    optimizer: MakeOptimizer
    clip: float | None = 0.5


@dataclass
class Row:
    """One line of the parity table."""

    model: str
    plan: str
    ranks: int
    worst: float
    tensor: str


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def under_plan(case: Case, plan: str) -> Trace:
    """The same training through the engine. Every rank returns the same whole tensors."""
    model, loss_fn, batches = case.make()
    engine = parallelize(model.double(), loss_fn, optimizer=lifted()(case.optimizer), clip=case.clip, plan=plan)
    trace = Trace()
    for batch in batches:
        with lifted():
            loss = engine.forward_backward(batch)
        trace.losses.append(float(loss))
        trace.gradients.append(on_cpu(engine.global_gradients()))
        engine.clip()
        with lifted():
            engine.update()
    names = {name for name, _ in model.named_parameters()}
    trace.parameters = on_cpu({name: value for name, value in engine.global_state_dict().items() if name in names})
    return trace


def check(case: Case, plan: str, ranks: int) -> Row:
    """Run on every rank of a pool: this rank's trace against the oracle's."""
    expected = expected_of(case)
    return Row(case.name, plan, ranks, *compare(under_plan(case, plan), expected))


@cache
def expected_of(case: Case) -> Trace:
    """The oracle's trace. A rank makes it once for all the plans that it is compared with."""
    model, loss_fn, batches = case.make()
    device = join().device  # random numbers are a device's own
    batches = [to_device(batch, device) for batch in batches]
    with lifted():
        trace = sequential(model.double().to(device), loss_fn, case.optimizer, batches, case.clip)
    return Trace(trace.losses, [on_cpu(step) for step in trace.gradients], on_cpu(trace.parameters))


def on_cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    """Where they are compared."""
    return {name: None if value is None else value.cpu() for name, value in tensors.items()}


def compare(got: Trace, expected: Trace) -> tuple[float, str]:
    """The worst relative error and where it is. A missing or an extra tensor is infinitely wrong."""
    losses = enumerate(zip(got.losses, expected.losses, strict=True), 1)
    rows = [(abs(a - b) / abs(b), f"loss of step {step}") for step, (a, b) in losses]
    noise = {name: mask for name in expected.parameters if (mask := _noise(name, expected)) is not None}
    for step, (mine, theirs) in enumerate(zip(got.gradients, expected.gradients, strict=True), 1):
        floor = _floor(theirs)
        for name in mine.keys() | theirs.keys():
            rows.append((_error(mine.get(name), theirs.get(name), floor), f"gradient of {name}, step {step}"))
    for name in got.parameters.keys() | expected.parameters.keys():
        ours, wanted = got.parameters.get(name), expected.parameters.get(name)
        if ours is not None and wanted is not None and name in noise and ours.shape == wanted.shape:
            still = noise[name]
            rows.append((_error(ours[still], wanted[still], 1.0), f"parameter {name}"))
            rows.append((_error(ours[~still], wanted[~still]), f"parameter {name}"))
        else:
            rows.append((_error(ours, wanted), f"parameter {name}"))
    return max(rows, key=lambda row: (row[0] != row[0], row))  # no number is less than NaN, nor more


def _floor(gradients: dict[str, Tensor | None]) -> float:
    """Below this a gradient of the step is rounding noise of the others."""
    return NOISE * max((float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()), default=0.0)


def _noise(name: str, trace: Trace) -> Tensor | None:
    """The elements of a parameter whose gradients were noise in every step; None if it had no gradient."""
    seen = [(g.abs() <= _floor(step)) for step in trace.gradients if (g := step.get(name)) is not None and g.numel()]
    return torch.stack(seen).all(0) if seen else None


def _error(got: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    if got is None and expected is None:
        return 0.0
    if got is None or expected is None or got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), floor)
    error = float((got.double() - expected.double()).abs().max())
    return error / scale if scale else error
