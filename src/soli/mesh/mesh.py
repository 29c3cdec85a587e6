"""Ranks -> one torch DeviceMesh with named axes. Axes of size 1 make no process group and cost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from soli.core.axes import AXES, REPLICATE, SHARD, coordinates, peers
from soli.core.plan import Plan
from soli.mesh.collectives import Axis
from soli.mesh.world import World


@dataclass(frozen=True)
class Mesh:
    """The axes of a plan, seen from one rank."""

    world: World
    axes: dict[str, Axis]
    all: Axis  # every rank of the job, named "world"
    dp: Axis  # the ranks that see different data: replicate x shard
    torch_mesh: DeviceMesh | None

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def coordinates(self) -> dict[str, int]:
        return {name: axis.index for name, axis in self.axes.items()}

    def another(self, axis: Axis) -> Axis:
        """The same ranks with a process group of their own: its collectives need no order with the first's.

        Collective over the whole world: every rank calls it, for the same axes in the same order.
        """
        if axis.size == 1:
            return axis
        sizes = {name: a.size for name, a in self.axes.items()}
        families = sorted({tuple(peers(rank, axis.name, sizes)) for rank in range(self.world.size)})
        mine = [dist.new_group(list(family)) for family in families][families.index(axis.ranks)]
        return Axis(axis.name, axis.size, axis.index, axis.ranks, mine, axis.backend)

    def subset(self, axis: Axis, members: tuple[int, ...]) -> Axis:
        """Those ranks of an axis whose numbers on it are `members`, as an axis; size 1 for the others.

        Collective over the whole world: every rank calls it, for the same members in the same order.
        """
        if len(members) == axis.size or axis.size == 1:
            return axis
        sizes = {name: a.size for name, a in self.axes.items()}
        families = sorted(
            {
                tuple(peers(rank, axis.name, sizes)[member] for member in members)
                for rank in range(self.world.size)
            }
        )
        groups = [dist.new_group(list(family)) for family in families]
        if axis.index not in members:
            return Axis(axis.name, ranks=(self.world.rank,))
        mine = tuple(axis.ranks[member] for member in members)
        index = members.index(axis.index)
        return Axis(axis.name, len(members), index, mine, groups[families.index(mine)], axis.backend)


def build_mesh(plan: Plan, world: World) -> Mesh:
    """The mesh of a resolved plan. Collective: every rank calls it."""
    sizes = plan.sizes
    used = [name for name in AXES if sizes[name] > 1]
    torch_mesh = None
    if used:
        shape = tuple(sizes[name] for name in used)
        torch_mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=tuple(used))
    where = coordinates(world.rank, sizes)
    backend = world.backend if world.backend != "single" else "gloo"

    def axis(name: str) -> Axis:
        if sizes[name] == 1:
            return Axis(name, ranks=(world.rank,))
        if torch_mesh is None:
            raise AssertionError("an axis above size 1 has a mesh")
        group: Any = torch_mesh.get_group(name)
        return Axis(name, sizes[name], where[name], tuple(peers(world.rank, name, sizes)), group, backend)

    axes = {name: axis(name) for name in AXES}
    everyone = (
        Axis("world", world.size, world.rank, tuple(range(world.size)), dist.group.WORLD, backend)
        if world.size > 1
        else Axis("world", ranks=(world.rank,))
    )
    return Mesh(world, axes, everyone, _data_axis(axes, everyone, sizes), torch_mesh)


def _data_axis(axes: dict[str, Axis], everyone: Axis, sizes: dict[str, int]) -> Axis:
    """replicate x shard as one axis. With data parallelism alone it is the whole world. Collective."""
    replicate, shard = axes[REPLICATE], axes[SHARD]
    if shard.size == 1:
        return Axis(
            "dp", replicate.size, replicate.index, replicate.ranks, replicate.group, replicate.backend
        )
    if replicate.size == 1:
        return Axis("dp", shard.size, shard.index, shard.ranks, shard.group, shard.backend)
    size = replicate.size * shard.size
    if size == everyone.size:
        return Axis("dp", size, everyone.index, everyone.ranks, everyone.group, everyone.backend)

    def family(rank: int) -> tuple[int, ...]:
        copies = peers(rank, REPLICATE, sizes)
        return tuple(sorted(r for copy in copies for r in peers(copy, SHARD, sizes)))

    rank = everyone.index
    families = sorted({family(r) for r in range(everyone.size)})
    groups = [dist.new_group(list(ranks)) for ranks in families]
    mine = family(rank)
    return Axis("dp", size, mine.index(rank), mine, groups[families.index(mine)], everyone.backend)
