"""What a rank keeps of a model that is cut into stages: the parameters that its stages use."""

from __future__ import annotations

import torch
from torch import nn

from soli.mesh.collectives import Axis
from soli.mesh.mesh import Mesh
from soli.parallel.pipeline.run import Cutting
from soli.parallel.units import Named, named_once


def keep_own(model: nn.Module, cutting: Cutting, mesh: Mesh) -> tuple[dict[int, Named], dict[int, Axis]]:
    """Free the parameters of other stages, in place: they become shapes on the meta device. Collective.

    Returns those, and for each parameter that several ranks have the axis of these ranks; both by id.
    """
    axis = mesh["pp"]
    shared = {tuple(ranks) for ranks in cutting.owners.values() if len(ranks) > 1}
    axes = {ranks: mesh.subset(axis, ranks) for ranks in sorted(shared)}
    absent, copies = {}, {}
    for names, param in named_once(model):
        ranks = tuple(cutting.owners[names[0]])
        if axis.index not in ranks:
            absent[id(param)] = (names, param)
            if not param.is_meta:
                nothing = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                torch.utils.swap_tensors(param, nothing)
        elif len(ranks) > 1:
            copies[id(param)] = axes[ranks]
    return absent, copies
