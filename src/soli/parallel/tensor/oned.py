"""One-dimensional tensor parallelism (Megatron-LM, arXiv 1909.08053), with sequence parallelism (arXiv 2205.05198).

    column   A[B, D] W[D, H_T] -> A[B, H_T]        input entered: its gradient is summed
    row      A[B, H_T] W[H_T, D] -> {A[B, D]_T}    summed, or scattered to A[B_T, D] under sp

`finder.py` says which parameter is which; `cut.py` makes the model's own code run on the parts.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from soli.core.axes import ROW
from soli.core.layout import Portion
from soli.core.plan import SPLIT_BACKWARD, Plan
from soli.mesh.collectives import gather_json
from soli.mesh.mesh import Mesh
from soli.parallel.init import materialise
from soli.parallel.tensor.cut import Run, become_cut
from soli.parallel.tensor.finder import Role
from soli.parallel.tensor.split import Split, taken
from soli.parallel.units import become


@dataclass
class TensorParallel:
    """A model whose parameters are cut: the roles, and what the forward runs under."""

    roles: dict[str, Role]
    run: Run
    portions: dict[int, Portion]  # by the parameter's id
    splits: dict[int, dict[str, Split]]  # by the parameter's id: how each axis cuts it


def divide(
    model: nn.Module, roles: dict[str, Role], plan: Plan, mesh: Mesh, absent: Container[int] = ()
) -> TensorParallel:
    """Keep this rank's part of every parameter that a role cuts, in place; not of those with ids in `absent`."""
    axis = mesh["tp"]
    portions: dict[int, Portion] = {}
    splits: dict[int, dict[str, Split]] = {}
    for name, param in model.named_parameters():
        cuts = roles[name].cuts
        if not cuts or id(param) in absent:
            continue
        values = materialise(param, name=name) if param.is_meta else param.detach()
        places = [(split, mesh[over].size, mesh[over].index) for over, split in cuts.items()]
        with torch.no_grad():
            own = values
            for place in places:
                own = taken(own, *place)
            become(param, own.clone())
        become_cut(param, cuts)
        ranges = tuple((split.dim, tuple(split.own(size, index))) for split, size, index in places)
        portions[id(param)] = Portion(tuple(values.shape), ranges)
        splits[id(param)] = cuts
    # A backward in two halves would run such a node twice, and send twice.
    overlap = plan.pp == 1 or plan.schedule not in SPLIT_BACKWARD
    run = Run(axis, axis.size, plan.sp, overlap, row=mesh[ROW] if plan.tensor != "1d" else None)
    return TensorParallel(roles, run, portions, splits)


def rank_0s(roles: dict[str, Role], mesh: Mesh) -> dict[str, Role]:
    """Rank 0's roles: all ranks cut alike, whatever paths their rows took through the model. Collective."""
    said = {
        name: [r.kind, *(None if s is None else [s.dim, s.parts, s.atoms] for s in (r.split, r.rows)), r.why]
        for name, r in roles.items()
    }
    first = gather_json(said, mesh.all, label="roles")[0]

    def read(name: str, said: Any) -> Split | None:
        return None if said is None else Split(said[0], tuple(said[1]), said[2], frozenset({name}))

    return {
        name: Role(name, kind, read(name, split), why, read(name, rows))
        for name, (kind, split, rows, why) in first.items()
    }
