"""soli: your sequential PyTorch program, unchanged, on N devices, by a plan; and the proof that it computes
the same.

    engine = soli.parallelize(model, loss_fn, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4), plan="auto")
    for batch in engine.batches(dataset, global_batch=64):
        loss = engine.step(batch)

Names are loaded on first use: `soli --help` and the launcher need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from soli.core.package import SOLI

__version__ = SOLI
__all__ = ["Engine", "Plan", "SoliError", "checkpoint", "deferred", "losses", "parallelize"]

if TYPE_CHECKING:
    from soli import checkpoint, losses
    from soli.core.errors import SoliError
    from soli.core.plan import Plan
    from soli.engine.engine import Engine, parallelize
    from soli.parallel.init import deferred

_HOME = {
    "Engine": "soli.engine.engine", "parallelize": "soli.engine.engine", "Plan": "soli.core.plan", "SoliError": "soli.core.errors",
    "deferred": "soli.parallel.init",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("checkpoint", "losses"):
        return importlib.import_module(f"soli.{name}")
    raise AttributeError(f"module 'soli' has no attribute '{name}'")
