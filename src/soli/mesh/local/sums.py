"""Reductions: p0 + p1 + ... + pN-1 element by element, in the order of the ranks.

So two runs agree bitwise, and so do all ranks, whatever the timing and the size of a message. bf16 and fp16
are summed in float32 and rounded once. An average is the sum, divided (integers: rounded down).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soli.core.errors import SoliError

COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
"""By names of c10d's reductions, in small letters."""
HALVES = (torch.float16, torch.bfloat16)


def name_of(op: Any) -> str:
    """The name of a c10d reduction; SoliError for one that is not built."""
    for name in COMBINE:
        if op == getattr(dist.ReduceOp, name.upper()):
            return name
    raise SoliError("the local backend does not have this reduction", got=str(op), allowed=", ".join(COMBINE), fix="take SOLI_BACKEND=gloo, or scale before the sum")


def widened(tensor: Tensor, op: str) -> Tensor:
    """The tensor in which a sum is kept until it is complete: float32 for bf16 and fp16."""
    return tensor.float() if tensor.dtype in HALVES and op in ("sum", "avg", "product") else tensor


def average(total: Tensor, ranks: int) -> None:
    """From a sum to a mean, in place."""
    if total.is_floating_point() or total.is_complex():
        total.div_(ranks)
    else:
        total.floor_divide_(ranks)


def combine(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """Reduce the parts in their order into `out`, which may be the last of them or none."""
    function = COMBINE[op]
    if len(parts) == 1:
        if out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    total = widened(parts[0], op)
    if total is not parts[0]:
        for part in parts[1:]:
            function(total, part, out=total)
    else:
        for part in parts[1:-1]:
            total = function(total, part, out=None if total is parts[0] else total)
        total = function(total, parts[-1], out=out)
    if op == "avg":
        average(total, len(parts))
    if total is not out:
        out.copy_(total)
