"""Gradients: from each rank's backward to the sum over all ranks, unit by unit, while backward goes on.

A gradient is copied into its unit's flat buffer when autograd has it (and the parameter's own is freed).
When a unit is complete it is reduced in the background: summed over the shard axis into this rank's range,
then over the replicate axis. Units are launched in one fixed order on every rank, whatever arrived first,
so ranks that use different parameters never wait for each other in different places. With several
microbatches nothing is sent before the last.

Under sequence parallelism a norm's gradient on one rank of tp is a part of a sum. These parts are kept beside the
buffer; when the unit is complete they are summed over tp, all at once. Under tp a unit is sent when the next is complete.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from soli.core.errors import SoliError, on_all_ranks
from soli.mesh.collectives import Axis, Pending, all_reduce, allocate, reduce_scatter
from soli.parallel.pipeline.split_backward import children_first
from soli.parallel.units import Slot, Unit

IN_FLIGHT = 2
"""Reduce-scatters under way at once: each holds what it receives, and the gradients that ZeRO-2 means to free."""


class Reducer:
    """The gradients of one model. `units` stand in the order in which backward completes them."""

    def __init__(self, units: list[Unit], tensor_axis: Axis) -> None:
        self.tensor_axis = tensor_axis
        self.early = True  # units are sent while the backward goes on
        self._next, self._last = 0, False
        self._open = False  # in a backward of a step
        self._flying: deque[tuple[Unit, Pending]] = deque()
        self._parts: dict[int, Tensor | None] = {}  # of sums over tp, by the parameter's id
        self._summing: tuple[Unit, list[Slot], Tensor, Pending | None] | None = None
        self.on_complete = lambda unit: None  # called with a unit once its own gradients are all there
        self.zeros: set[int] = set()  # ids of leaves that rows without targets alone lead to
        self._places: dict[int, Tensor] = {}  # of gradients in buffers that are kept, by the parameter's id
        arrive = _weakly(self.arrive)
        self.reorder(units)
        for unit in self.units:
            if unit.zero < 2:  # kept from step to step
                axis = unit.shard_axis if unit.shard_axis.size > 1 else unit.replicate_axis
                unit.grad = allocate(unit.padded, unit.dtype, unit.slots[0].param.device, axis)
                _clear(unit, unit.grad)
                self._places |= {id(s.param): s.within(unit.grad) for s in unit.slots}
            for slot in unit.slots:
                slot.param.grad = None  # of a backward before there were ranks
                slot.param.register_post_accumulate_grad_hook(arrive)
                slot.param._laid = True  # type: ignore[attr-defined]
        self._seen: set[int] = set()
        self.blank = self.differentiated = False  # whether this backward is of a loss that none of its rows is in; whether a loss of the step has a gradient
        self.blanks: set[int] = set()  # ids of parameters that only such backwards reached: they are not used

    def reorder(self, units: list[Unit]) -> None:
        """Before a backward has begun: the order in which backward completes them is another one."""
        self.units = [unit for unit in units if unit.trainable]
        self._unit_of = {id(s.param): (number, s) for number, unit in enumerate(self.units) for s in unit.slots}
        self._missing = [len(unit.slots) for unit in self.units]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the backwards of a step, of which an error may leave one open."""
        self._parts.clear()
        self.zeros.clear()
        self._summing, self.differentiated = None, False
        self.blanks.clear()
        while self._flying:  # of a step that an error ended
            unit, pending = self._flying.popleft()
            pending.wait()
            unit.grad = None if unit.zero >= 2 else unit.grad
        for unit in self.units:
            for slot in unit.slots:
                slot.arrived = slot.used = False
        try:
            yield
        finally:
            self._open = False

    def begin_backward(self, last: bool) -> None:
        """Before the backward of a microbatch; `last` says that the step's sum is complete after it.

        Until then ZeRO-2 has whole gradients, and not the last step's part of them beside.
        """
        for unit in [] if last else self.units:
            if unit.zero >= 2:
                unit.grad_shard = None
        self._last, self._next, self._open, self.blank = last, 0, True, False
        self._missing = [len(unit.slots) for unit in self.units]
        self._seen.clear()

    def arrive(self, param: nn.Parameter) -> None:
        """Take the gradient of a parameter: autograd's hook, or whoever computed it without autograd's hooks."""
        number, slot = self._unit_of[id(param)]
        if not self._open:
            param.grad = None
            what = "a backward that is none of a step reached the parameters of a model that soli trains"
            fix = "differentiate engine.copy_model(), or take gradients of inputs alone: torch.autograd.grad(loss, x)"
            raise SoliError(what, got=f"a gradient of {slot.name}", fix=fix)
        unit = self.units[number]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.is_sparse:
            raise on_all_ranks(f"the gradient of {slot.name} is sparse", fix="build its module with sparse=False")
        if self._last and number < self._next:
            fix = "reentrant checkpointing does this: use torch.utils.checkpoint(..., use_reentrant=False)"
            raise SoliError(f"a second gradient of {slot.name} came after its sum was sent", fix=fix)
        place = self._places.get(id(param))
        if place is None:
            place = slot.within(self._buffer(unit))
        if slot.arrived:
            place.add_(grad)
        else:
            place.copy_(grad)
            slot.arrived = True
            self.blanks |= {id(param)} if self.blank else set()
        self.blanks -= set() if self.blank else {id(param)}
        if id(param) not in self._seen:
            self._seen.add(id(param))
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._complete(unit)

    def uncounted(self, total: Tensor) -> None:
        """In the place of a backward from rows of which no target is counted, whose total may be 0/0: what it would come to has a gradient of zeros."""
        for node in children_first([total.grad_fn] if total.grad_fn is not None else []):
            if (leaf := getattr(node, "variable", None)) is not None:
                self.zeros.add(id(leaf))
                if id(leaf) not in self._unit_of:  # a stage's input
                    leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def close(self, unit: Unit) -> None:
        """No more gradient of a unit will come in this backward."""
        number = self._unit_of[id(unit.slots[0].param)][0]
        if self._missing[number] > 0:
            self._missing[number] = 0
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        if self._last and self.early:
            self._launch_ready()
        self.on_complete(unit)

    def expect_parts(self, param: nn.Parameter) -> None:
        """In the forward: the gradient of a parameter, or some of it, will come as parts of a sum over tp."""
        self._parts.setdefault(id(param), None)

    def add_part(self, param: nn.Parameter, part: Tensor) -> None:
        """In the backward, before the parameter itself arrives."""
        so_far = self._parts[id(param)]
        self._parts[id(param)] = part.clone() if so_far is None else so_far.add_(part)

    def _buffer(self, unit: Unit) -> Tensor:
        if unit.grad is None:
            unit.grad = torch.empty(unit.padded, dtype=unit.dtype, device=unit.slots[0].param.device)
            _clear(unit, unit.grad)
        return unit.grad

    def _launch_ready(self) -> None:
        while self._next < len(self.units) and self._missing[self._next] == 0:
            self._launch(self.units[self._next])
            self._next += 1

    def _launch(self, unit: Unit) -> None:
        self._send_summed()
        grad = self._buffer(unit)
        for slot in unit.slots:
            if not slot.arrived:
                grad[slot.start : slot.stop].zero_()
                slot.arrived = id(slot.param) in self.zeros
        slots = [slot for slot in unit.slots if id(slot.param) in self._parts]
        if not slots:
            if self.tensor_axis.size > 1:  # as others do, whose rows may have taken other paths
                self._summing = unit, [], grad[:0], None
            else:
                self._send(unit)
            return
        parts = [self._parts.pop(id(slot.param)) for slot in slots]
        zeros = grad.new_zeros
        flat = torch.cat([zeros(s.numel) if p is None else p.reshape(-1) for s, p in zip(slots, parts, strict=True)])
        pending = all_reduce(flat, self.tensor_axis, label=f"parts of gradients of {unit.name}", wait=False)
        self._summing = unit, slots, flat, pending

    def _send_summed(self) -> None:
        """Send the unit whose parts are being summed over tp."""
        if self._summing is None:
            return
        (unit, slots, flat, pending), self._summing = self._summing, None
        if pending is not None:
            pending.wait()
        for slot, total in zip(slots, flat.split([slot.numel for slot in slots]), strict=True):
            self._buffer(unit)[slot.start : slot.stop].add_(total)
        self._send(unit)

    def _send(self, unit: Unit) -> None:
        while unit.shard_axis.size > 1 and len(self._flying) >= IN_FLIGHT:
            self._land()
        grad = self._buffer(unit)
        if unit.shard_axis.size == 1:
            unit.grad_shard = grad
            pending = all_reduce(grad, unit.replicate_axis, label=f"gradients of {unit.name}", wait=False)
        else:
            if unit.zero == 1:
                unit.grad_shard = grad[unit.low : unit.high]
            elif unit.grad_shard is None:
                unit.grad_shard = torch.empty(unit.size, dtype=unit.dtype, device=grad.device)
            assert unit.grad_shard is not None
            label = f"gradients of {unit.name}"
            pending = reduce_scatter(unit.grad_shard, grad, unit.shard_axis, label=label, wait=False)
        self._flying.append((unit, pending))

    def _land(self) -> None:
        unit, pending = self._flying.popleft()
        pending.wait()
        if unit.zero >= 2:
            unit.grad = None
        if unit.shard_axis.size > 1 and unit.grad_shard is not None:
            all_reduce(unit.grad_shard, unit.replicate_axis, label=f"gradients of {unit.name}")

    def finish_backward(self) -> None:
        """After the backward of a microbatch (or in its place, on a rank that had no row for it)."""
        self._open = False
        if not self._last:
            return
        self._missing = [0] * len(self.units)  # nothing more will come
        self._launch_ready()
        self._send_summed()
        while self._flying:
            self._land()

    def drop(self) -> None:
        """Forget the gradients of this step, and free those that a stage does not keep."""
        self._parts.clear()
        for unit in self.units:
            if unit.zero >= 2:
                unit.grad = None

    def set_used(self, flags: list[bool]) -> None:
        slots = [slot for unit in self.units for slot in unit.slots]
        for slot, used in zip(slots, flags, strict=True):
            slot.used = used


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that keeps nobody alive: parameters have hooks where Python's collector does not see them."""
    there = WeakMethod(method)

    def hook(param: nn.Parameter) -> None:
        found = there()
        if found is not None:
            found(param)

    return hook


def _clear(unit: Unit, flat: Tensor) -> None:
    """What is no parameter's is summed too."""
    for start, stop in unit.gaps:
        flat[start:stop].zero_()
