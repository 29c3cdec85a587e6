"""The oracle: the sequential program, in plain PyTorch, on one device. It shares no step code with the engine.

Only dropout is soli's own (law 4 makes it a function of position, which torch's is not).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from soli.engine.batch import Caller, rows_of, take
from soli.engine.remembered import Remembering
from soli.losses import LossFn
from soli.parallel import kept
from soli.parallel.randomness import Randomness

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Trace:
    """What a program computed: the loss and every gradient of each step, and every parameter at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def sequential(model: nn.Module, loss_fn: LossFn, optimizer: MakeOptimizer, batches: list[Any], clip: float | None) -> Trace:
    """Train the plain model on whole batches."""
    trace, made, call = Trace(), optimizer(list(model.parameters())), Caller(model)
    randomness = Randomness(model, 0)
    _learn_shapes(randomness, call, Remembering(loss_fn), batches[0])
    for step, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)  # not the optimizer's: it may leave parameters out
        with randomness.begin(step, 0, rows_of(batch)), randomness.forward():
            total, count = loss_fn(call(batch), batch)
            loss = total / count
            randomness.backward()
            loss.backward()
        trace.losses.append(float(loss.detach()))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        trace.gradients.append({name: None if g is None else g.clone() for name, g in gradients.items()})
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
    trace.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace


def _learn_shapes(randomness: Randomness, call: Caller, loss_fn: LossFn, batch: Any) -> None:
    rows, model = rows_of(batch), call.model
    if not model.training:
        model.train()
    before = kept.values(model, [name for name, _ in model.named_parameters()])
    with torch.no_grad():
        for part in (rows, rows // 2):
            with randomness.probe(part):
                piece = take(batch, 0, part)
                loss_fn(call(piece), piece)
    kept.restore(model, before)
    randomness.finish_probe()
