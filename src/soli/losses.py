"""Loss functions by soli's contract: `loss_fn(output, batch) -> (total, count)`.

`total` is the *sum* over the counted targets and `count` how many were counted, so that the loss of a step
is one division, of two sums over the global batch, whatever the plan. Shapes: B batch, T sequence,
V vocabulary, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soli.core.errors import on_all_ranks

LossFn = Callable[[Any, Any], tuple[Tensor, Tensor | int]]
IGNORE = -100


def _entry(batch: Any, key: str | int) -> Tensor:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError):
        has = ", ".join(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        fix = "name one that it has, of what the loss is a mean of: soli.losses.from_model('start_positions', shifted=False), cross_entropy('targets')"
        raise on_all_ranks(f"the loss reads '{key}' and the batch has no such entry", got=has, fix=fix) from None


def _part(output: Any, name: str) -> Any:
    """What a model's output has under this name."""
    found = getattr(output, name, None)
    return output.get(name) if found is None and isinstance(output, dict) else found


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else _part(output, "logits")
    if not isinstance(logits, Tensor):
        raise on_all_ranks("the model's output is no tensor and has no `logits`", got=type(output).__name__)
    return logits


def _cross_entropy(logits: Tensor, wanted: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The sum and the count, never in 16 bits: torch.autocast on CUDA hands F.cross_entropy's softmax through as it is given (measured with torch 2.11)."""
    flat = logits.flatten(0, -2)
    full = flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat
    return F.cross_entropy(full, wanted.flatten(), ignore_index=ignore, reduction="sum"), (wanted != ignore).sum()


def cross_entropy(targets: str | int = "targets", ignore: int = IGNORE) -> LossFn:
    """Cross entropy of logits [..., C] against batch[targets] [...]; targets equal to `ignore` do not count."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return _cross_entropy(_logits(output), _entry(batch, targets), ignore)

    return loss


def causal_lm(labels: str = "labels", ignore: int = IGNORE) -> LossFn:
    """Next-token cross entropy of logits [B, T, V] against batch[labels] [B, T], shifted here by one."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return _cross_entropy(_logits(output)[:, :-1], _entry(batch, labels)[:, 1:], ignore)

    return loss


def mse(targets: str | int = -1) -> LossFn:
    """Squared error against batch[targets], of the output's shape; every element counts."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        wanted = _entry(batch, targets)
        if not isinstance(output, Tensor):
            raise on_all_ranks("the model's output is no tensor", got=type(output).__name__, fix="a loss of your own: (output, batch) -> (sum, count)")
        if output.shape != wanted.shape:
            raise on_all_ranks("output and target differ in shape", got=f"{tuple(output.shape)} and {tuple(wanted.shape)}")
        return F.mse_loss(output, wanted, reduction="sum"), wanted.numel()

    return loss


def from_model(labels: str = "labels", *, shifted: bool = True, ignore: int = IGNORE) -> LossFn:
    """The mean loss that the model computed itself (`output.loss`), turned back into a sum and a count.

    `shifted`: the model predicts the next token, so the first label of each row does not count (Hugging
    Face's causal models); False for masked, sequence-to-sequence and classification models. A wrong choice
    is found on the first step, when other first labels are tried.
    """
    return FromModel(labels, shifted, ignore)


@dataclass(frozen=True)
class FromModel:
    """See `from_model`."""

    labels: str
    shifted: bool
    ignore: int

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        mean = _part(output, "loss")
        if not isinstance(mean, Tensor):
            fix = f"pass '{self.labels}' in the batch, or give soli.parallelize a loss_fn"
            raise on_all_ranks("the model's output has no `loss`", got=type(output).__name__, fix=fix)
        wanted = _entry(batch, self.labels)
        if self.shifted and wanted.dim() < 2:
            what = f"'{self.labels}' has one label for each row, and the next token's loss was asked for"
            fix = "soli.parallelize(model, soli.losses.from_model(shifted=False), ...) for classification"
            raise on_all_ranks(what, got=f"shape {tuple(wanted.shape)}", fix=fix)
        count = ((wanted[:, 1:] if self.shifted else wanted) != self.ignore).sum()
        # A mean over nothing is NaN; a microbatch without targets contributes zero.
        return torch.where(count > 0, mean * count, mean.new_zeros(())), count

    def with_others(self, batch: Any, end: int | None, counted: bool) -> Any:
        """The batch with another label, one that is in it, at the first `end` places of each row that count, or not `counted`: at those that do
        not. None where there is none."""
        wanted = _entry(batch, self.labels)
        there = wanted[wanted != self.ignore].unique()
        if wanted.dim() < 2 or not len(there):
            return None
        part, others = wanted[:, :end], wanted.clone()
        others[:, :end] = part.where((part == self.ignore) == counted, there[0].where(part != there[0], there[-1]))
        return None if others.equal(wanted) else {**batch, self.labels: others}
