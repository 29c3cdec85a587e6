"""THE function: a plan applied to a model, one pass a line, each with the reason for its place."""

from dataclasses import dataclass

import torch
from torch import nn

from soli.core.plan import Plan
from soli.mesh.mesh import Mesh
from soli.parallel import data, partial, recompute
from soli.parallel.context import sequence
from soli.parallel.data import DataParallel
from soli.parallel.pipeline.own import keep_own
from soli.parallel.pipeline.run import Cutting
from soli.parallel.recurrent import swappable
from soli.parallel.tensor import oned
from soli.parallel.tensor.cut import Run
from soli.parallel.tensor.finder import Role
from soli.parallel.tensor.oned import TensorParallel


@dataclass
class Parallel:
    """A model laid over the mesh."""

    data: DataParallel
    tensor: TensorParallel | None
    context: list[Run]  # the level that cuts the sequence, if there is one

    @property
    def levels(self) -> list[Run]:
        """The axes along which tensors are cut, outermost first."""
        return [*self.context, *(self.tensor.runs if self.tensor is not None else [])]


def apply(model: nn.Module, plan: Plan, mesh: Mesh, roles: dict[str, Role] | None = None, cutting: Cutting | None = None) -> Parallel:
    """Lay `model` over `mesh` by `plan`, in place. Collective: every rank calls it.

    tp > 1 needs `roles`, pp > 1 `cutting`.
    """
    torch.clear_autocast_cache()  # a program's own autocast around a step refers to the weights
    with swappable(model):
        # before what works on weights: it need not on those of other stages
        absent, copies = keep_own(model, cutting, mesh) if cutting is not None else ({}, {})
        # what is left of each weight
        tensor = oned.divide(model, roles, plan, mesh, absent) if roles is not None else None
        # before what repeats a block's call: the cut is part of it
        context = sequence.begin(model, plan, mesh)
        recompute.wrap(model, plan)  # after what changes how a block computes, before what hooks its call
        portions = tensor.portions if tensor is not None else {}
        laid = data.distribute(model, plan, mesh, portions, absent, copies)  # last: shards what is left
    partial.guard(model, plan)
    if tensor is not None:
        for run in tensor.runs:
            run.reducer = laid.reducer
    return Parallel(laid, tensor, context)
