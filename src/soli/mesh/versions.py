"""What differs between torch 2.11 and 2.13, or is not public in them, in one place.

2.13 renamed the collectives on one flat tensor and warns about the old names. `run_backward` is what
torch.autograd.backward calls once it has looked at torch function modes; `mode_popped` takes the innermost of
these modes away for a block. 2.11 does not know the shape of gamma draws on the meta device, which deferred
initialisation asks for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.overrides import _pop_mode_temporarily as mode_popped

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_standard_gamma", "Meta"):
    _kernels = torch.library.Library("aten", "IMPL")
    _kernels.impl("_standard_gamma", lambda alpha, generator=None: torch.empty_like(alpha), "Meta")


def process_groups() -> list[Any]:
    """Those that this process knows now, in the order in which they were made. torch has no public list of them."""
    return list(dist.distributed_c10d._world.pg_map)


__all__ = [
    "all_gather_flat",
    "mode_popped",
    "process_groups",
    "reduce_scatter_flat",
    "run_backward",
]
