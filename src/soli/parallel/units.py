"""Units: the flat buffers that data parallelism reduces, gathers and shards.

A unit is a run of parameters of one dtype that communicate together. Laid flat and padded to a multiple
of the shard axis, it is cut into equal ranges, one for each rank of that axis:

    flat     [padded]            p0 | p1      | p2 | pad       a slot is one parameter's place in it
    shard    [padded / size]     this rank's range: what its optimizer updates

Legend: P parameters of the unit, N the size of the shard axis. What a rank keeps for each ZeRO stage:

    zero   parameters   gradients    optimizer states
      0        P            P              P          (of two numbers a parameter for Adam)
      1        P            P             P/N
      2        P           P/N            P/N
      3       P/N          P/N            P/N

One mechanism serves all four stages and HSDP: ZeRO (arXiv 1910.02054) is which of the three is kept
whole. Flat shards balance to the element, so a size that nothing divides costs at most N - 1 elements of
padding a unit.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soli.core.functions import held
from soli.core.layout import Portion, Sharded, from_flat, from_whole
from soli.mesh.collectives import NOTHING, Axis, Pending, all_gather, allocate

Named = tuple[tuple[str, ...], nn.Parameter]
"""A parameter with all its names."""
BUCKET_BYTES = 25 * 2**20
"""Size of a unit that is not one module: large enough for bandwidth, small enough to overlap (DDP's choice)."""
CONTAINERS = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
"""Modules without a forward of their own."""
ALIGNED = 16
"""Bytes, as an allocation of its own is: pairs of a parameter may be read as complex numbers."""


@dataclass(eq=False)
class Slot:
    """One parameter's place in its unit. `names` are all its names in the model; the first is its own.

    `shape` is what this rank has. `portion` says of what, where tensor parallelism cut the parameter.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    shape: tuple[int, ...]
    start: int
    numel: int
    arrived: bool = False  # a gradient arrived in this step
    used: bool = False  # ... on any rank
    piece: nn.Parameter | None = None  # what the optimizer holds: the part of it in this rank's shard
    portion: Portion | None = None
    first: int = 0  # the element of the parameter that the piece starts with

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def within(self, flat: Tensor) -> Tensor:
        """What the unit's flat buffer has of it."""
        return flat[self.start : self.stop].view(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the model's parameter."""
        return self.shape if self.portion is None else self.portion.shape

    def of_whole(self, local: Sharded) -> Sharded:
        """Boxes of what this rank has, as boxes of the model's parameter."""
        return local if self.portion is None else self.portion.of_whole(local)


class Unit:
    """See the module's docstring. `gathered` says whether `full` holds the parameters now."""

    def __init__(self, name: str, slots: list[Slot], shard: Axis, replicate: Axis, zero: int, trainable: bool, gather: Axis) -> None:
        self.name, self.slots, self.zero, self.trainable = name, slots, zero, trainable
        self.shard_axis, self.replicate_axis = shard, replicate
        # the ranks of the shard axis, in a group for the gathers of ZeRO-3
        self.gather_axis, self.numel = gather, slots[-1].stop
        self.padded = math.ceil(self.numel / shard.size) * shard.size
        self.size = self.padded // shard.size
        starts = [*(slot.start for slot in slots[1:]), self.padded]
        self.gaps = [(slot.stop, start) for slot, start in zip(slots, starts, strict=True) if slot.stop < start]
        self.low, self.high = shard.index * self.size, (shard.index + 1) * self.size
        self.dtype = slots[0].param.dtype
        self.full: Tensor | None = None
        self.shard: Tensor | None = None
        self.grad: Tensor | None = None
        self.grad_shard: Tensor | None = None
        self.gathered = zero < 3
        self.copies = Axis("copies")  # the stages of a pipeline that have these parameters too

    # --- building -------------------------------------------------------------------------------------

    def fill(self, source: Callable[[Slot], Tensor], device: torch.device) -> None:
        """Take the parameters over: `source(slot)` gives a slot's whole values. Collective."""
        if self.zero == 0:
            for slot in self.slots:
                if slot.param.is_meta or slot.param.device != device:
                    become(slot.param, source(slot).to(device))
                slot.piece = slot.param
            return
        flat = allocate(self.padded if self.zero < 3 else self.size, self.dtype, device, self.gather_axis)
        flat.zero_()
        offset = 0 if self.zero < 3 else self.low
        for slot in self.slots:
            start, stop = max(slot.start, offset), min(slot.stop, offset + flat.numel())
            if start < stop:
                values = held(source(slot)).reshape(-1)
                flat[start - offset : stop - offset].copy_(values[start - slot.start : stop - slot.start])
            if self.zero == 3:
                become(slot.param, self._absent(slot, device))
        if self.zero < 3:
            self.full, self.shard = flat, flat[self.low : self.high]
            self.show()
        else:
            self.full = torch.empty(self.padded, dtype=self.dtype, device=device)
            self.full.untyped_storage().resize_(0)
            self.shard = flat
        for slot in self.slots:
            start, stop = self.owned(slot)
            if start < stop:
                piece = self.shard[start - self.low : stop - self.low]
                slot.piece = nn.Parameter(piece if slot.shape else piece.view(()), self.trainable)
                slot.piece.__dict__ = slot.param.__dict__  # what a program says of a parameter, now and later (p.lr_scale)
                slot.first = start - slot.start

    def owned(self, slot: Slot) -> tuple[int, int]:
        """The range of the unit's elements that are both this slot's and this rank's."""
        return max(slot.start, self.low), min(slot.stop, self.high)

    # --- parameters: gather and release ---------------------------------------------------------------

    def show(self) -> None:
        """Point the model's parameters at the gathered values."""
        assert self.full is not None, "a replicated unit has nothing to show"
        for slot in self.slots:
            become(slot.param, slot.within(self.full))
        self.gathered = True

    def spread(self) -> Pending:
        """Begin to give every rank the others' shards, where each keeps all parameters."""
        if self.zero == 3 or self.full is None or self.shard is None:
            return NOTHING
        return all_gather(self.full, self.shard, self.shard_axis, label=f"parameters of {self.name}", wait=False)

    def release(self) -> None:
        """Drop the gathered values. The storage object stays: views saved for backward find them again."""
        if self.full is None or self.zero < 3:
            return
        for slot in self.slots:
            become(slot.param, self._absent(slot, self.full.device))
        self.full.untyped_storage().resize_(0)
        self.gathered = False

    def make_room(self) -> Tensor:
        assert self.full is not None, "a replicated unit is never gathered"
        self.full.untyped_storage().resize_(self.padded * self.full.element_size())
        return self.full

    def _absent(self, slot: Slot, device: torch.device) -> Tensor:
        """What a parameter shows while it is not gathered: its shape, and NaN wherever someone looks.

        A use outside of its module's forward is refused by the check of the first step (engine/effects.py); one that begins later makes the
        loss NaN, which is reported.
        """
        fill = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((), fill, dtype=self.dtype, device=device).expand(slot.shape)

    # --- what the outside asks ------------------------------------------------------------------------

    def owned_tensor(self, slot: Slot, flat: Tensor | None, base: int) -> Sharded:
        """A slot's part of `flat`, a buffer that starts at element `base` of the unit, as boxes."""
        start, stop = self.owned(slot)
        if flat is None or start >= stop:
            return Sharded(slot.whole_shape, self.dtype)
        return slot.of_whole(from_flat(flat[start - base : stop - base], slot.shape, start - slot.start))

    def lost(self, slot: Slot) -> bool:
        """Whether someone else gave a parameter other memory, between steps."""
        if self.full is None:
            return False
        memory = slot.param.untyped_storage()
        return bool(memory._cdata != self.full.untyped_storage()._cdata) if self.gathered else memory.nbytes() > slot.param.element_size()

    def parameter(self, slot: Slot) -> Sharded:
        """This rank's part of a parameter: views of live memory."""
        return slot.of_whole(from_whole(held(slot.param))) if self.zero == 0 else self.owned_tensor(slot, self.shard, self.low)

    def norm_parts(self) -> list[tuple[frozenset[str], Tensor]]:
        """The reduced gradient in runs: (the axes over which tensor parallelism cut it, this rank's elements). Of copies one has it."""
        if self.grad_shard is None or self.copies.index:
            return []
        if all(slot.portion is None for slot in self.slots):
            return [(frozenset(), self.grad_shard)]
        owned = [(frozenset(cut_over(slot.param)), *self.owned(slot)) for slot in self.slots]
        return [(cut, self.grad_shard[a - self.low : b - self.low]) for cut, a, b in owned if a < b]

    def whole(self, flat_shard: Tensor, label: str) -> Tensor:
        """The whole flat buffer [padded] of which every rank holds `flat_shard` [padded / size]."""
        if self.shard_axis.size == 1:
            return flat_shard
        full = torch.empty(self.padded, dtype=flat_shard.dtype, device=flat_shard.device)
        all_gather(full, flat_shard, self.shard_axis, label=f"{label} of {self.name}")
        return full


def cut_over(param: nn.Parameter) -> tuple[str, ...]:
    """The axes over which tensor parallelism cut it."""
    return tuple(getattr(param, "cuts", ()))


def become(param: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, from the meta device too; the object stays the one the user knows."""
    if param.is_meta and not values.is_meta:
        torch.utils.swap_tensors(param, nn.Parameter(values.detach(), param.requires_grad))
    else:
        with torch._C.DisableTorchFunctionSubclass():  # what soli puts there is not the program's
            param.data = values.detach()


def slots_of(params: Iterable[Named], portions: dict[int, Portion], aligned: bool) -> list[Slot]:
    """Slots side by side, in the given order. `portions`: of the parameters that are cut, by id. `aligned`: each at a multiple of ALIGNED bytes."""
    slots, at = [], 0
    for names, param in params:
        slots.append(Slot(names, param, tuple(param.shape), at, param.numel(), portion=portions.get(id(param))))
        each = max(ALIGNED // param.element_size(), 1) if aligned else 1
        at += math.ceil(param.numel() / each) * each
    return slots


def named_once(model: nn.Module) -> list[Named]:
    """Each parameter of the model once, with all its names (more than one: it is tied)."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(name)
    return [(tuple(names), param) for param, names in found.items()]


def buckets(params: list[Named], size: Callable[[nn.Parameter], float], limit: int = BUCKET_BYTES) -> list[list[Named]]:
    """Cut parameters, of so many elements each, into runs of one dtype and at most `limit` bytes (one larger parameter is its own)."""
    runs: list[list[Named]] = []
    filled = 0.0
    for names, param in params:
        nbytes = size(param) * param.element_size()
        if not runs or runs[-1][0][1].dtype != param.dtype or filled + nbytes > limit:
            runs.append([])
            filled = 0.0
        runs[-1].append((names, param))
        filled += nbytes
    return runs


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated parts of a model: children of its outermost lists of modules, in registration order.

    These are what ZeRO-3 gathers one at a time. Containers that have no forward of their own are entered.
    """
    return [(path, module) for path, module, in_list in parts(model) if in_list]


def parts(module: nn.Module, path: str = "", in_list: bool | None = None) -> Iterator[tuple[str, nn.Module, bool]]:
    """What a module is made of: its blocks, and the outermost modules with parameters that hold none; whether each is a block.

    `in_list`: its children are blocks.
    """
    in_list = isinstance(module, nn.Sequential) if in_list is None else in_list
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, CONTAINERS):
            yield from parts(child, where, True)
        elif in_list or not any(isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(m) for m in child.modules()):
            yield where, child, in_list
        else:
            yield from parts(child, where)
