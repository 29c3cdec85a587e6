"""What differs between torch 2.11 and 2.13, in one place.

2.13 renamed the collectives on one flat tensor and warns about the old names.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
