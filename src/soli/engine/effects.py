"""What a forward does beside computing a loss: it writes into parameters, or asks for a gradient that is no sum over rows.

Neither shows in the losses of parts of a batch. Every operation of one forward is looked at, wherever it is called.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn, ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soli.core.errors import SoliError, listed
from soli.core.plan import Plan
from soli.parallel import gather

_BY_FREQUENCY = {ops.aten.embedding.default: 3, ops.aten._embedding_bag.default: 3}
"""Where these take scale_grad_by_freq."""


class Effects(TorchDispatchMode):
    """Around a forward of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.written: list[str] = []
        self.by_frequency = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _BY_FREQUENCY.get(func)
        if place is not None:
            self.by_frequency |= len(args) > place and bool(args[place])
        if func._schema.is_mutable and (written := _written(func, args, kwargs or {})):
            named = list(self.model.named_parameters())
            names = [name for name, param in named if any(_overlap(param, x) for x in written)]
            if names and not _is_ours(sys._getframe(1)):
                self.written += [name for name in names if name not in self.written]
        return func(*args, **(kwargs or {}))

    def explain(self, plan: Plan) -> None:
        """Raises SoliError where ranks or microbatches with other rows or tokens would do something else."""
        if plan.pieces * plan.cp == 1 and (plan.zero < 3 or not self.written):
            return
        fix = "or run with dp=1, cp=1, tensor=1d and no microbatches"
        if self.written:
            raise SoliError(
                "the forward writes into parameters, and each rank or microbatch would by its own rows",
                got=listed(self.written),
                allowed="parameters that only the optimizer changes",
                fix=f"leave out max_norm= of embeddings, change weights between steps, {fix}",
            )
        if self.by_frequency:
            raise SoliError(
                "gradients are divided by how often a token is in the batch, which no part of it knows",
                got="an embedding with scale_grad_by_freq=True",
                fix=f"leave it out, {fix}",
            )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What an operation writes into."""
    given = zip(func._schema.arguments, args, strict=False)
    named = ((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)
    changed = [x for a, x in (*given, *named) if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_leaves(changed) if isinstance(x, Tensor)]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    (begin, end), (other, until) = _extent(a), _extent(b)
    return begin < until and other < end


def _extent(x: Tensor) -> tuple[int, int]:
    """The first byte in the storage, and the one after the last."""
    begin = int(x.storage_offset()) * x.element_size()
    last = sum((size - 1) * int(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size() if x.numel() else begin


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a gather of parameters writes, and not the model."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == gather.__name__:
            return True
        if module.split(".")[0] not in ("torch", "soli"):
            return False
        frame = frame.f_back
    return False
