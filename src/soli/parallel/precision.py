"""Precision: what is computed in which format.

fp32 computes as the model is written. bf16 and fp16 are torch's autocast: parameters, gradients, their
sums and the optimizer stay in float32, matrix products run in 16 bits. fp64 is for proofs: the whole
model in float64. fp16 needs a loss scale (`LossScale`).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soli.core.errors import on_all_ranks
from soli.core.plan import Plan
from soli.parallel.lift import wide

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cast(model: nn.Module, plan: Plan) -> None:
    if plan.precision != "fp64":
        return
    if any(p.is_meta for p in model.parameters()):
        raise on_all_ranks("precision=fp64 cannot cast a model that was built under soli.deferred()", fix="call model.double() inside the `with soli.deferred():` block")
    model._apply(wide)


def computing(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward and loss."""
    dtype = AUTOCAST.get(plan.precision)
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()


def lowered(x: Tensor) -> Tensor:
    """What autocast makes of a product's operand, which may be sent: then it is as small as what is computed with."""
    device = x.device.type
    return x if x.dtype == torch.float64 or not torch.is_autocast_enabled(device) else x.to(torch.get_autocast_dtype(device))


@dataclass
class LossScale:
    """Dynamic loss scaling (arXiv 1710.03740): halved when a gradient overflows, doubled after a quiet while."""

    scale: float = 2.0**16
    quiet_steps: int = 2000
    since: int = 0

    def after(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.since = max(self.scale / 2, 1.0), 0
        else:
            self.since += 1
            if self.since >= self.quiet_steps:
                self.scale, self.since = self.scale * 2, 0
