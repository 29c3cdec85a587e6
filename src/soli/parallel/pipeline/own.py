"""What a rank keeps of a model that is cut into stages: the parameters that its stages use."""

import torch
from torch import nn

from soli.core.errors import failure, listed
from soli.mesh.collectives import Axis
from soli.mesh.mesh import Mesh
from soli.parallel.pipeline.elsewhere import elsewhere
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
            of = f"{names[0]}, of {listed([f'rank {axis.ranks[index]}' for index in ranks])}"
            try:
                torch.utils.swap_tensors(param, elsewhere(param, of))
            except RuntimeError as error:
                if "use_count" not in str(error):
                    raise
                what = "what was computed of a weight before soli.parallelize is still held"
                raise failure(what, got=names[0], fix="compute it under torch.no_grad(), or del it before soli.parallelize") from error
        elif len(ranks) > 1:
            copies[id(param)] = axes[ranks]
    return absent, copies
