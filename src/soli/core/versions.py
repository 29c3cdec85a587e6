"""What differs between torch 2.11 and 2.13, or is not public in them, in one place.

2.13 renamed the collectives on one flat tensor and warns about the old names. `run_backward` is what
torch.autograd.backward calls once it has looked at torch function modes, which `function_modes` lists; `mode_popped` takes the innermost
of them away for a block, as `pop_mode` and `push_mode` do without one; `functions.unwrap_dead_wrappers` is given the arguments of every autograd function, whose `apply` calls `PlainFunction`'s. 2.11 does not
know the shape of gamma draws on the meta device, which deferred initialisation asks for. `FLOPS` counts attention whose queries share keys; the counts of 2.11 refuse it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch import utils as functions
from torch.autograd.function import _SingleLevelFunction as PlainFunction
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_mode
from torch.overrides import _pop_mode_temporarily as mode_popped
from torch.overrides import _push_mode as push_mode
from torch.utils.flop_counter import flop_registry

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_standard_gamma", "Meta"):
    _kernels = torch.library.Library("aten", "IMPL")
    _kernels.impl("_standard_gamma", lambda alpha, generator=None: torch.empty_like(alpha), "Meta")


def _grouped(count: Callable[..., int], query: int) -> Callable[..., int]:
    """A count of attention's flops; keys and values, after `query` in its arguments, count as if each query had its own."""

    def counted(*args: Any, **kwargs: Any) -> int:
        batch, heads = args[query].shape[:2]
        wide = (torch.Size((batch, heads, *x.shape[2:])) for x in args[query + 1 : query + 3])
        return count(*args[: query + 1], *wide, *args[query + 3 :], **kwargs)

    return counted


FLOPS: dict[Any, Callable[..., int]] = dict(flop_registry)
"""Of products, by operation: torch's own table."""
for _kernel in ("efficient", "flash", "cudnn"):
    for _name, _query in (("", 0), ("_backward", 1)):
        _op = getattr(torch.ops.aten, f"_scaled_dot_product_{_kernel}_attention{_name}")
        FLOPS[_op] = _grouped(FLOPS[_op], _query)


def process_groups() -> list[Any]:
    """Those that this process knows now, in the order in which they were made. torch has no public list of them."""
    return list(dist.distributed_c10d._world.pg_map)


def job_store() -> Any:
    """Where the ranks of the job have met."""
    return dist.distributed_c10d._get_default_store()


__all__ = ["FLOPS", "PlainFunction", "all_gather_flat", "function_modes", "functions", "job_store", "mode_popped", "pop_mode", "process_groups", "push_mode", "reduce_scatter_flat", "run_backward"]
