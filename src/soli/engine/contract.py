"""What a loss function returns, and how exactly two ways to compute one loss can agree."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from soli import losses
from soli.core.errors import Problem, SoliError, on_all_ranks
from soli.parallel import precision

if TYPE_CHECKING:
    from soli.engine.engine import Engine


def problems(loss_fn: Any) -> list[Problem]:
    """What is known of a loss before it is called: a function that makes one, or a module that averages, is none."""
    if loss_fn is None:
        return []
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    if getattr(losses, name, None) is loss_fn:
        return [Problem(f"soli.losses.{name} makes a loss function and is none", fix=f"call it: soli.losses.{name}()")]
    if isinstance(loss_fn, torch.nn.modules.loss._Loss) or not callable(loss_fn):
        fix = "soli.losses has the usual ones; or a function that sums (reduction='sum') and returns the count too"
        return [Problem(f"{name} is no loss function", allowed="loss_fn(output, batch) -> (total, count)", fix=fix)]
    return []


def total_and_count(result: Any) -> tuple[Tensor, float]:
    """What a loss function returned, if it kept to its contract."""
    if not (isinstance(result, tuple) and len(result) == 2):
        what = "the loss function returned no (total, count)"
        allowed = "the sum over the counted targets, and how many were counted"
        fix = "sum instead of averaging (reduction='sum') and return the count too; soli.losses has the usual ones"
        raise on_all_ranks(what, got=f"{type(result).__name__}", allowed=allowed, fix=fix)
    total, count = result
    total = torch.tensor(float(total)) if isinstance(total, int | float) else total  # of rows without any
    if not isinstance(total, Tensor) or total.dim() != 0 or total.is_complex():
        shape = f"{tuple(total.shape)}, {total.dtype}" if isinstance(total, Tensor) else type(total).__name__
        raise on_all_ranks("the loss's total is no 0-d tensor of a real number", got=shape, fix="return total.sum(), of a complex one its abs()")
    if isinstance(count, Tensor) and count.requires_grad:
        what = "the loss's count depends on what is trained, and no gradient goes through it"
        allowed = "the number of targets that were counted, or a weight of theirs"
        fix = "return count.detach() if it is meant as a number, or let each row's loss be divided by what is of that row"
        raise on_all_ranks(what, got="a count that requires gradients", allowed=allowed, fix=fix)
    odd = isinstance(count, str) or (isinstance(count, Tensor) and (count.numel() != 1 or count.is_complex()))
    with suppress(TypeError, ValueError):
        if not odd and 0 <= (number := float(count)) < torch.inf:
            return total, number
    raise SoliError("the loss's count is no number of targets", got=repr(count)[:80], allowed="0 or more")


def rounding(engine: Engine, count: float) -> float:
    """By how much two ways to add the terms of a loss may differ, relatively: epsilon a term and layer they pass.

    Of float32 at the least: models from elsewhere compute norms and losses in it whatever they are given (parallel/lift.py).
    """
    dtype = next((p.dtype for p in engine.model.parameters() if p.is_floating_point()), torch.float64)  # all may be complex
    epsilon = max(torch.finfo(one).eps for one in (precision.AUTOCAST.get(engine.plan.precision, dtype), torch.float32))
    return float(min(0.1, epsilon * depth(engine.model) * max(count, 1) ** 0.5 * 8))


def depth(model: torch.nn.Module) -> int:
    """Operations that a number passes, as far as modules tell: each without modules of its own, and the loss."""
    return 1 + sum(1 for m in model.modules() if next(m.children(), None) is None)
