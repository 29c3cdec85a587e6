"""Ranks -> named axes, each with its process group. Axes of size 1 make no process group and cost nothing.

Groups are made here and not by torch's init_device_mesh, whose groups wait 30 minutes whatever the job's deadline is, and
which takes the job's own group for an axis of all ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, groupby
from typing import Any

import torch.distributed as dist

from soli.core.axes import AXES, CP, REPLICATE, ROW, SHARD, TP, coordinates, peers
from soli.core.plan import Plan
from soli.mesh.collectives import Axis, gather_json
from soli.mesh.local.identity import mine
from soli.mesh.world import World

Key = Callable[[int], tuple[int, ...]]
"""What a rank has in common with those on its axis."""


@dataclass(frozen=True)
class Mesh:
    """The axes of a plan, seen from one rank."""

    world: World
    axes: dict[str, Axis]
    all: Axis  # every rank of the job, named "world"
    dp: Axis  # the ranks that see different data
    sums: dict[frozenset[str], tuple[Axis, Axis]]  # replicate and shard of what is summed over these axes too
    seeds: bool  # of ranks with one loss whose gradients are parts of sums, the one that counts it
    leads: bool  # the first of the ranks with the same rows of the batch

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def every(self) -> list[Axis]:
        return [self.all, self.dp, *self.axes.values(), *chain(*self.sums.values())]

    def summed(self, cut: Iterable[str] = ()) -> frozenset[str]:
        """The axes beside data's over which the gradient of a parameter is summed that is cut over `cut`."""
        return max(self.sums, key=len) - frozenset(cut)

    def sharing(self, cut: Iterable[str] = ()) -> tuple[Axis, Axis]:
        """The replicate and the shard axis of such a parameter. Uncut: all that share any shard are on it."""
        return self.sums[self.summed(cut)]

    def another(self, axis: Axis) -> Axis:
        """The same ranks with a process group of their own: its collectives need no order with the first's.

        Collective over the whole world: every rank calls it, for the same axes in the same order.
        """
        return axis if axis.size == 1 else _made(axis, self._families(axis), axis.ranks, self.world)

    def subset(self, axis: Axis, members: tuple[int, ...]) -> Axis:
        """Those ranks of an axis whose numbers on it are `members`, as an axis; size 1 for the others.

        Collective over the whole world: every rank calls it, for the same members in the same order.
        """
        if len(members) == axis.size or axis.size == 1:
            return axis
        some = lambda ranks: tuple(ranks[member] for member in members)
        return _made(axis, [some(family) for family in self._families(axis)], some(axis.ranks), self.world)

    def _families(self, axis: Axis) -> list[tuple[int, ...]]:
        """The ranks of each rank's axis of this kind, in order. Collective over the whole world."""
        return sorted(set(map(tuple, gather_json(list(axis.ranks), self.all, label=f"ranks of {axis.name}"))))


def rings(mesh: Mesh, axis: Axis) -> tuple[Axis, Axis] | None:
    """An axis that spans hosts as (the ranks of a host, the hosts); None where hosts are one or unequal.

    Collective over the whole world: rank r of the axis is number (r // ranks of a host, r % ranks of a host).
    """
    if axis.size < 4:
        return None
    hosts = gather_json(mine().host, mesh.all, label="hosts")
    places = gather_json(list(axis.ranks), mesh.all, label="ranks of an axis")
    each = {_of_a_host([hosts[rank] for rank in ranks]) for ranks in places}
    size = each.pop() or 0
    if each or not 1 < size < axis.size:
        return None
    inside = {rank: (family[0], i // size) for family in places for i, rank in enumerate(family)}
    between = {rank: (family[0], i % size) for family in places for i, rank in enumerate(family)}
    inner = axis_by_key("cp inside a host", {}, mesh.all, inside.__getitem__, mesh.world)
    return inner, axis_by_key("cp between hosts", {}, mesh.all, between.__getitem__, mesh.world)


def _of_a_host(hosts: list[str]) -> int | None:
    """How many ranks in a row are on each host, by the hosts of the ranks; None where they are not as many on each, or a host comes twice."""
    runs = [len(list(run)) for _, run in groupby(hosts)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(hosts)) else None


def all_ranks(world: World) -> Axis:
    """Every rank of the job as an axis."""
    backend = world.backend if world.backend != "single" else "gloo"
    group: Any = world.absent or world.group or dist.group.WORLD
    if world.size == 1:
        return Axis("world", ranks=(world.rank,))
    return Axis("world", world.size, world.rank, tuple(range(world.size)), group, backend)


def build_mesh(plan: Plan, world: World) -> Mesh:
    """The mesh of a resolved plan. Collective: every rank calls it."""
    sizes, everyone = plan.sizes, all_ranks(world)
    along = lambda name: lambda rank: tuple(peers(rank, name, sizes))
    axes: dict[str, Axis] = {}
    for name in AXES:
        axes[name] = axis_by_key(name, axes, everyone, along(name), world)

    def fixed(rank: int, *free: str) -> tuple[int, ...]:
        """What ranks have in common that differ along `free` alone; along cp or dp, which are one number of data."""
        place = coordinates(rank, sizes)
        data, part = divmod(place.pop(REPLICATE) * sizes[SHARD] + place.pop(SHARD), plan.cp)
        return tuple(n for name, n in {**place, "dp": data, CP: part}.items() if name not in free)

    axes[CP] = axis_by_key(CP, axes, everyone, lambda rank: fixed(rank, CP), world)
    data = axis_by_key("dp", axes, everyone, lambda rank: fixed(rank, "dp", *plan.apart), world)
    others = sorted({frozenset(plan.summed) - cut for cut in plan.cuts}, key=sorted)
    sums = {over: _sums(over, plan, axes, everyone, world) for over in others}
    seeds = all(axes[name].index == 0 for name in {CP, *plan.summed} - {*plan.apart})
    leads = all(axis.index == 0 for name, axis in axes.items() if name not in (REPLICATE, SHARD, *plan.apart))
    mesh = Mesh(world, axes, everyone, data, sums, seeds, leads)
    if plan.tensor in ("2d", "2.5d") and everyone.backend == "gloo":  # whose panels cross on their way: collectives.py
        for name in (ROW, TP):
            axes[name] = replace(axes[name], other=mesh.another(axes[name]).group)
    return mesh


def _sums(over: frozenset[str], plan: Plan, axes: dict[str, Axis], everyone: Axis, world: World) -> tuple[Axis, Axis]:
    """The replicate and the shard axis of parameters whose gradients are summed over these axes too. Collective."""
    name = SHARD if plan.zero else REPLICATE
    free = {name, *over}
    key = lambda rank: tuple(n for axis, n in coordinates(rank, plan.sizes).items() if axis not in free)
    wider = axis_by_key(name, axes, everyone, key, world)
    return (axes[REPLICATE], wider) if plan.zero else (wider, axes[SHARD])


def axis_by_key(name: str, axes: dict[str, Axis], everyone: Axis, key: Key, world: World) -> Axis:
    """The ranks with the same key as one axis, over the group of an axis that has these ranks. Collective."""
    families: dict[tuple[int, ...], list[int]] = {}
    for rank in range(everyone.size):
        families.setdefault(key(rank), []).append(rank)
    mine = tuple(families[key(everyone.ranks[everyone.index])])
    if len(mine) == 1:
        return Axis(name, ranks=mine)
    for known in (*axes.values(), everyone):
        if known.ranks == mine:
            return replace(known, name=name)
    return _made(replace(everyone, name=name), sorted(map(tuple, families.values())), mine, world)


def _made(of: Axis, families: list[tuple[int, ...]], mine: tuple[int, ...], world: World) -> Axis:
    """The ranks of `mine` as an axis, named as the one that they are of is; size 1 for others. Each family has a group. Collective."""
    deadline = timedelta(seconds=world.deadline)
    make = lambda ranks: of.group if of.simulated else dist.new_group(list(ranks), deadline, group_desc=of.name)
    groups = [make(ranks) for ranks in families]
    if world.rank not in mine:
        return Axis(of.name, ranks=(world.rank,))
    return Axis(of.name, len(mine), mine.index(world.rank), mine, groups[families.index(mine)], of.backend)
