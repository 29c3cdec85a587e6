"""What a model keeps in buffers, and whether a forward changes it: once a step, or by the rows that it sees.

Batch statistics, moving averages, the vectors of a spectral norm: one forward over the whole batch changes them once. A
plan runs several, over parts of the batch, on ranks that would each keep something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from soli.core.errors import SoliError
from soli.core.plan import Plan


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def restore(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Give buffers the values that they had; those that are new, or of another shape, stay."""
    for name, buffer in model.named_buffers():
        if name in before and before[name].shape == buffer.shape:
            buffer.copy_(before[name])


def changed(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that have other values now, with these."""
    return {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if name not in before or not _same(before[name], buffer)
    }


@dataclass
class Changes:
    """What forwards over two parts of the same rows changed, each beginning with the same values."""

    found: list[dict[str, Tensor]] = field(default_factory=list)

    def explain(self, plan: Plan) -> None:
        """Raises SoliError where a plan would change buffers otherwise than one forward over the batch does."""
        first, second = self.found
        by_rows = [n for n in {**first, **second} if not _same(first.get(n), second.get(n))]
        if by_rows and plan.pieces > 1:
            raise SoliError(
                "the forward changes what the model keeps by the rows that it sees: no part of a batch changes it as the "
                "whole does",
                got=_list(by_rows),
                allowed="buffers that stay as they are, or change alike whatever the rows",
                fix="put the module in eval(), change the buffer between steps (of the loss's batch, alike on every rank), "
                "or run with dp=1, tensor=1d and no microbatches",
            )
        runs = plan.accumulate * plan.microbatches * (1 if plan.recompute == "none" else 2)
        if first and runs > 1:
            raise SoliError(
                f"the forward changes what the model keeps, and {plan} runs it {runs} times a step",
                got=_list(list(first)),
                allowed="buffers that stay as they are where a step has microbatches or computes again",
                fix="put the module in eval(), change the buffer between steps, or run without accumulate, microbatches "
                "and recompute",
            )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(_number(a), _number(b))


def _number(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.detach()) if x.is_floating_point() else x.detach()


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
