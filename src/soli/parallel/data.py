"""Data parallelism: replicate, ZeRO-1, 2, 3 and HSDP, over flat units of our own.

PyTorch has DDP and FSDP2 for this. On CPU over gloo FSDP2's step took 1.64 times DDP's (2 ranks, GPT of 12
layers x 256: 1,099 and 670 ms), gloo's own reduce-scatter and all-gather being most of it (see
mesh/collectives.py), and it waits forever where ranks use different blocks. Flat units serve all stages with
one mechanism, and lie in shared memory where the backend has it. Measured over the local backend (2 ranks,
benchmarks/results), against PyTorch's engines over gloo: 8 x 768, zero=0 and 1 0.89 of DDP's step, zero=2 0.72 of
FSDP2's without resharding, zero=3 0.66 of FSDP2's (step-time-big, three rounds); 12 x 256, zero=0 1.01 and zero=1
0.99 of DDP's, zero=2 0.78, zero=3 0.76 of FSDP2's (step-time-small, four rounds).
On CUDA neither was measured yet.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.errors import on_all_ranks
from soli.core.events import events
from soli.core.functions import held, tensors_in
from soli.core.layout import Portion
from soli.core.plan import Plan
from soli.mesh.collectives import Axis, all_reduce, broadcast, gather_json
from soli.mesh.mesh import Mesh
from soli.parallel.gather import Block, Gatherer
from soli.parallel.init import fingerprint, materialise, sweep
from soli.parallel.reduce import Reducer
from soli.parallel.units import Named, Slot, Unit, become, blocks, buckets, cut_over, named_once, slots_of


@dataclass
class DataParallel:
    """A model laid over the dp axis: its units, what reduces them, and what gathers them, which below ZeRO-3 is nothing."""

    units: list[Unit]
    reducer: Reducer
    gatherer: Gatherer
    plain: list[Named]  # frozen parameters below ZeRO-3: whole on every rank of dp
    portions: dict[int, Portion]  # of the parameters that tensor parallelism has cut, by id
    absent: dict[int, Named]  # what other stages of a pipeline have

    @property
    def slots(self) -> dict[int, Slot]:
        return {id(slot.param): slot for unit in self.units for slot in unit.slots}


@dataclass(frozen=True)
class _Laying:
    """What units are made with. `gather`: groups for the gathers of ZeRO-3, by the ranks of the shard axis."""

    zero: int
    mesh: Mesh
    portions: dict[int, Portion]
    copies: dict[int, Axis]
    gather: dict[tuple[int, ...], Axis]

    def unit(self, name: str, params: list[Named]) -> Unit:
        first, slots = params[0][1], slots_of(params, self.portions, aligned=self.zero > 0)
        replicate, shard = self.mesh.sharing(cut_over(first))
        own = self.gather.get(shard.ranks, shard)
        # A write between steps into one number that is absent (CLIP's logit_scale.clamp_) would be lost: it stays whole.
        zero = 2 if self.apart(params[0][1]) else self.zero
        return Unit(name, slots, shard, replicate, zero, first.requires_grad, own)

    def size(self, param: nn.Parameter) -> float:
        """Elements of a rank's part, in the mean: ranks of tp, whose parts may be of other sizes, lay their units alike."""
        portion = self.portions.get(id(param))
        parts = math.prod(self.mesh[axis].size for axis in cut_over(param))
        return param.numel() if portion is None else math.prod(portion.shape) / parts

    def apart(self, param: nn.Parameter) -> bool:
        """Whether it has a unit that stays whole: where some rank of tp may have one number."""
        return self.zero == 3 and 0 < self.size(param) < 2

    def summed(self, param: nn.Parameter) -> tuple[str, ...]:
        """Of parameters with the same axes gradients are summed over the same ranks."""
        return tuple(sorted(self.mesh.summed(cut_over(param))))


def distribute(
    model: nn.Module, plan: Plan, mesh: Mesh, portions: dict[int, Portion], absent: dict[int, Named],
    copies: dict[int, Axis],
) -> DataParallel:  # fmt: skip
    """Lay the model's parameters over the mesh. The modules stay; the parameters are the same objects.

    `portions`: of the parameters that tensor parallelism has cut, by id. `absent`: what other stages of a pipeline
    have. `copies`: the stages that share a parameter with this one.
    """
    device = mesh.world.device
    params = [named for named in named_once(model) if id(named[1]) not in absent]
    laying = _Laying(plan.zero, mesh, portions, copies, _apart(mesh) if plan.zero == 3 else {})
    root, found = Block("root", None, []), list[Block]()
    if plan.zero == 3:
        root, found = _blocks(model, params, laying)
        units = [unit for block in [*found, root] for unit in block.units]
        ordered = [unit for block in [root, *found] for unit in block.units][::-1]
    else:
        trainable = [named for named in reversed(params) if named[1].requires_grad]
        alone = [named for named in trainable if id(named[1]) not in copies]
        runs = [run for some in _grouped(alone, laying.summed).values() for run in buckets(some, laying.size)]
        units = [laying.unit(f"bucket {i}", run) for i, run in enumerate(runs)] + _copied(trainable, laying)
        ordered = units
    for unit in units:
        unit.fill(lambda slot: _values(slot.param, slot.name), device)
    covered = {id(slot.param) for unit in units for slot in unit.slots}
    plain = [(names, param) for names, param in params if id(param) not in covered]
    for names, param in plain:
        if param.is_meta or param.device != device:
            become(param, _values(param, names[0]).to(device))
    _place_buffers(model, device)
    sweep()
    reducer = Reducer(ordered, mesh["tp"])
    return DataParallel(units, reducer, Gatherer(root, found, mesh.all, reducer), plain, portions, absent)


def _grouped(params: Iterable[Named], key: Callable[[nn.Parameter], Any]) -> dict[Any, list[Named]]:
    """Parameters by a key of theirs, in the order in which they come."""
    kinds: dict[Any, list[Named]] = {}
    for named in params:
        kinds.setdefault(key(named[1]), []).append(named)
    return kinds


def _apart(mesh: Mesh) -> dict[tuple[int, ...], Axis]:
    """Groups of their own for the gathers of ZeRO-3, by the ranks of the shard axis. Collective."""
    found: dict[tuple[int, ...], Axis] = {}
    for over in sorted(mesh.sums, key=sorted):
        axis = mesh.another(mesh.sums[over][1])
        found.setdefault(axis.ranks, axis)
    return found


def _blocks(model: nn.Module, params: list[Named], laying: _Laying) -> tuple[Block, list[Block]]:
    """The root and the repeated blocks. A parameter that two blocks share belongs to the root."""
    owners: dict[int, set[str]] = {}
    modules = blocks(model)
    for name, module in modules:
        for param in module.parameters():
            owners.setdefault(id(param), set()).add(name)
    outside = {id(p) for p in _outside(model, {id(module) for _, module in modules})}
    shared = {key for key, names in owners.items() if len(names) > 1} | outside | laying.copies.keys()

    def units(name: str, members: list[Named]) -> list[Unit]:
        groups = _grouped(members, lambda p: (p.dtype, p.requires_grad, laying.summed(p), laying.apart(p)))
        return [laying.unit(f"{name} {i}" if i else name, group) for i, group in enumerate(groups.values())]

    def members(name: str) -> list[Named]:
        return [(n, p) for n, p in params if name in owners.get(id(p), ()) and id(p) not in shared]

    found = [Block(name, module, units(name, members(name))) for name, module in modules if members(name)]
    rest = [(n, p) for n, p in params if id(p) in shared or id(p) not in owners]
    alone = units("root", [(n, p) for n, p in rest if id(p) not in laying.copies])
    return Block("root", None, alone + _copied(rest, laying)), found


def _copied(params: list[Named], laying: _Laying) -> list[Unit]:
    """Units of what several stages have, laid alike on all of them: their sums then round alike."""
    copies = laying.copies
    members = sorted((n for n in params if id(n[1]) in copies), key=lambda named: named[0])
    groups = _grouped(members, lambda p: (copies[id(p)].ranks, p.requires_grad, laying.summed(p), laying.apart(p)))
    found = []
    for key in sorted(groups):
        for run in buckets(groups[key], laying.size):
            unit = laying.unit(f"shared by stages of ranks {key[0]}", run)
            unit.copies = copies[id(run[0][1])]
            found.append(unit)
    return found


def _outside(module: nn.Module, inside: set[int]) -> Iterator[nn.Parameter]:
    """Parameters that are reachable without entering any block."""
    if id(module) not in inside:
        yield from (param for param in module._parameters.values() if param is not None)
        for child in module.children():
            yield from _outside(child, inside)


def _values(tensor: Tensor, name: str) -> Tensor:
    return materialise(tensor, name=name) if tensor.is_meta else tensor


def _place_buffers(model: nn.Module, device: torch.device) -> None:
    done: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and (buffer.is_meta or buffer.device != device):
                name = f"{path}.{key}" if path else key
                if id(buffer) not in done:
                    done[id(buffer)] = _values(buffer, name).to(device)
                module._buffers[key] = done[id(buffer)]


def agree_on_weights(model: nn.Module, optimizer: torch.optim.Optimizer, world: Axis) -> None:
    """All ranks must start from the same weights, and states of an optimizer that has some. Those that do not get rank 0's, and it is said."""
    if world.size == 1 or world.simulated:
        return
    tensors = [*((names[0], p) for names, p in named_once(model)), *model.named_buffers()]
    states = tensors_in(optimizer.state.values())
    counts = gather_json(len(states), world, label="states of the optimizer")
    if len(set(counts)) > 1:
        got = f"tensors by rank: {', '.join(map(str, counts))}"
        fix = "load the optimizer's states on every rank, or on none"
        raise on_all_ranks("the ranks' optimizers have not the same states", got=got, fix=fix)
    tensors += [(f"state {number} of the optimizer", value) for number, value in enumerate(states)]
    marks = torch.tensor([checksum(tensor, name) for name, tensor in tensors], dtype=torch.int64)
    ends = torch.stack([marks, -marks])
    all_reduce(ends, world, "max", label="checksums of the weights")
    differ = [pair for pair, spread in zip(tensors, ends.sum(0).tolist(), strict=True) if spread]
    if not differ:
        return
    if any(tensor.is_meta for _, tensor in differ):
        what = "the ranks recorded different initial weights under soli.deferred()"
        fix = "call torch.manual_seed with the same number on every rank before building the model"
        raise on_all_ranks(what, got=", ".join(name for name, _ in differ[:4]), fix=fix)
    for name, tensor in differ:
        broadcast(held(tensor), world, label=f"first values of {name}")
    text = f"the ranks built {len(differ)} different tensors (no torch.manual_seed?); all use rank 0's"
    events.note(text, shown=world.index == 0, first=differ[0][0])


def checksum(tensor: Tensor, name: str) -> int:
    """Of its bytes."""
    if tensor.is_meta:
        return fingerprint(tensor, name) & (2**62 - 1)
    return zlib.crc32(held(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
