"""One-dimensional tensor parallelism (Megatron-LM, arXiv 1909.08053), with sequence parallelism (arXiv 2205.05198).

    column   A[B, D] W[D, H_T] -> A[B, H_T]        input entered: its gradient is summed
    row      A[B, H_T] W[H_T, D] -> {A[B, D]_T}    summed, or scattered to A[B_T, D] under sp

`finder.py` says which parameter is which; `cut.py` makes the model's own code run on the parts.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.axes import DEPTH, ROW, TP
from soli.core.layout import Portion
from soli.core.plan import SPLIT_BACKWARD, Plan
from soli.mesh.collectives import gather_json
from soli.mesh.mesh import Mesh
from soli.parallel import hooks
from soli.parallel.init import materialise
from soli.parallel.tensor import parts
from soli.parallel.tensor.cut import Run, become_cut
from soli.parallel.tensor.finder import Role
from soli.parallel.tensor.moves import collected
from soli.parallel.tensor.split import Split, taken
from soli.parallel.units import become


@dataclass
class TensorParallel:
    """A model whose parameters are cut: the roles, and what the forward runs under."""

    roles: dict[str, Role]
    runs: list[Run]
    portions: dict[int, Portion]  # by the parameter's id
    splits: dict[int, dict[str, Split]]  # by the parameter's id: how each axis cuts it


def divide(model: nn.Module, roles: dict[str, Role], plan: Plan, mesh: Mesh, absent: Container[int] = ()) -> TensorParallel:
    """Keep this rank's part of every parameter that a role cuts, in place; not of those with ids in `absent`."""
    portions: dict[int, Portion] = {}
    splits: dict[int, dict[str, Split]] = {}
    parts.BESIDE.clear()
    for name, param in model.named_parameters():
        cuts = cuts_of(roles[name], mesh)
        if not cuts or id(param) in absent:
            continue
        values = materialise(param, name=name) if param.is_meta else param.detach()
        ranges = tuple((s.dim, tuple(s.own(mesh[over].size, mesh[over].index))) for over, s in cuts.items())
        portions[id(param)] = Portion(tuple(values.shape), ranges)
        with torch.no_grad():
            become(param, own_part(values, cuts, mesh).clone())
        become_cut(param, cuts)
        hooks.see_whole(param, partial(_whole, cuts=cuts, mesh=mesh), partial(own_part, cuts=cuts, mesh=mesh))
        splits[id(param)] = cuts
    return TensorParallel(roles, levels_of(plan, mesh), portions, splits)


def levels_of(plan: Plan, mesh: Mesh) -> list[Run]:
    """The levels of cut tensors that tensor parallelism has."""
    axis = mesh[TP]
    if plan.tensor == "3d":
        cube = {name: mesh[name] for name in (DEPTH, ROW, TP)}
        return [Run(over, over.size, hidden=True, partial=True, cube=cube) for over in (mesh[ROW], axis)]
    if plan.tensor != "1d":
        return [Run(axis, axis.size, hidden=True, row=mesh[ROW])]
    # A backward in two halves would run such a node twice, and send twice.
    return [Run(axis, axis.size, plan.sp, plan.pp == 1 or plan.schedule not in SPLIT_BACKWARD)]


def cuts_of(role: Role, mesh: Mesh) -> dict[str, Split]:
    """By axis, the outer cut first: how a parameter is cut. In 3D what a grid has left is cut again, over the grids."""
    cuts = role.cuts
    if role.rows is not None and role.split is not None and mesh[DEPTH].size > 1:
        over = mesh[role.split.axis or TP]
        left = role.split.local(over.size, over.index)
        cuts[DEPTH] = Split(role.split.dim, (left,), left)
    return cuts


def own_part(values: Tensor, cuts: dict[str, Split], mesh: Mesh) -> Tensor:
    """This rank's part of a whole parameter."""
    for over, split in cuts.items():
        values = taken(values, split, mesh[over].size, mesh[over].index)
    return values


def _whole(part: Tensor, cuts: dict[str, Split], mesh: Mesh) -> Tensor:
    """What every rank has its part of. Collective."""
    for over, split in reversed(cuts.items()):
        part = collected(part, split, mesh[over], "a gradient that a hook sees")
    return part


def rank_0s(roles: dict[str, Role], mesh: Mesh) -> dict[str, Role]:
    """Rank 0's roles: all ranks cut alike, whatever paths their rows took through the model. Collective."""
    told = lambda split: None if split is None else [split.dim, split.parts, split.atoms, split.axis]
    said = {name: [role.kind, told(role.split), told(role.rows), role.why] for name, role in roles.items()}
    first = gather_json(said, mesh.all, label="roles")[0]

    def read(name: str, said: Any) -> Split | None:
        if said is None:
            return None
        dim, parts, atoms, axis = said
        return Split(dim, tuple(parts), atoms, frozenset({name}), axis=axis)

    return {name: Role(name, kind, read(name, split), why, read(name, rows)) for name, (kind, split, rows, why) in first.items()}
