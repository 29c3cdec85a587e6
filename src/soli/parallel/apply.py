"""THE function: a plan applied to a model, one pass a line, each with the reason for its place."""

from __future__ import annotations

from torch import nn

from soli.core.plan import Plan
from soli.mesh.mesh import Mesh
from soli.parallel import data, precision
from soli.parallel.data import DataParallel


def apply(model: nn.Module, plan: Plan, mesh: Mesh) -> DataParallel:
    """Lay `model` over `mesh` by `plan`, in place. Collective: every rank calls it."""
    precision.cast(model, plan)  # first: the flat units below have one dtype, and it is this one
    return data.distribute(model, plan, mesh)  # last: shards whatever the passes before it left whole
