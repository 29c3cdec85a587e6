"""A stage as torch.distributed.pipelining's schedules drive it.

torch's schedules decide what is computed and sent when; its own PipelineStage wants a module that maps tensors to
tensors, equal shapes for every microbatch, and keeps a receive buffer for each. This one runs the user's model
(`stage_forward.py`), knows the shapes of each microbatch, keeps nothing longer than needed, and leaves a microbatch
without rows out altogether.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from soli.mesh.collectives import Axis, receive_later, send_later, wire
from soli.mesh.simulate import answering
from soli.parallel.pipeline.split_backward import inputs_first, weights_later
from soli.parallel.pipeline.stage_forward import Form, Shapes
from soli.parallel.pipeline.watch import Name
from soli.parallel.tensor.cut import marked
from soli.parallel.tensor.moves import no_view
from soli.parallel.tensor.split import Split

if TYPE_CHECKING:
    from soli.parallel.pipeline.run import Pipeline


NONE = 253
"""All bytes of a gradient that there is none of: in 32 and 16 bits a number near -4e37, or a NaN whose bits no kernel makes (theirs has all set)."""


@dataclass
class Crossing:
    """A value as it crosses a border: what this rank has of it (`cuts` says of what), and whether it has a gradient."""

    name: Name
    form: Form
    cuts: dict[str, Split]
    requires: bool

    def empty(self, axis: Axis, device: torch.device) -> Tensor:
        """Room for what arrives: on the device, or where the backend can write."""
        return torch.empty(self.form[0], dtype=self.form[1], device=wire(axis, device))


@dataclass
class Known:
    """What a stage knows of a microbatch of one shape."""

    shapes: Shapes
    incoming: list[Crossing]
    outgoing: list[Crossing]
    own: list[list[Any]] | None = None  # of this stage's units


@dataclass
class Flight:
    """One microbatch on one stage, from its forward to the end of its backward."""

    leaves: list[Tensor] = field(default_factory=list)  # what was received
    outputs: list[Tensor] = field(default_factory=list)  # what is sent; of the last stage, its loss
    gradients: list[Tensor | None] = field(default_factory=list)  # of the outputs
    passed: list[Tensor | None] = field(default_factory=list)  # of the leaves
    randomness: Any = None
    rest: Any = None  # what is left to do for the weights


class Stage(PipelineStage):
    """Stage number `index` of a pipeline."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        axis = pipeline.axis
        with answering(axis.group, axis.index, axis.size):
            super().__init__(nn.Module(), index, pipeline.stages.count, pipeline.device, group=axis.group)
        self.pipeline, self.axis = pipeline, axis
        self.known: dict[Any, Known] = {}
        self.flights: dict[int, Flight] = {}

    def peer(self, stage: int) -> int:
        return self.pipeline.stages.rank_of[stage]

    def _empty(self, number: int) -> bool:
        return not self.pipeline.pieces[number].rows

    def _known(self, number: int) -> Known:
        return self.known[self.pipeline.keys[number]]

    # --- activations ----------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._empty(fwd_chunk_id):
            return []
        leaves = [value.empty(self.axis, self.pipeline.device) for value in self._known(fwd_chunk_id).incoming]
        self.flights[fwd_chunk_id] = Flight(leaves)
        return [receive_later(x, self.axis, self.peer(self.stage_index - 1), "activation") for x in leaves]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if not self._empty(mb_index):
            self.flights[mb_index] = Flight(leaves=[x.detach() for x in prev_stage_outputs])

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self._empty(fwd_chunk_id):
            return ()
        flight = self.flights.setdefault(fwd_chunk_id, Flight())
        known = self._known(fwd_chunk_id)
        flight.leaves = [leaf.to(self.pipeline.device) for leaf in flight.leaves]
        for leaf, value in zip(flight.leaves, known.incoming, strict=True):
            leaf.requires_grad_(value.requires)
        with self.pipeline.timed("F", self.stage_index, fwd_chunk_id):
            self.pipeline.compute(self, fwd_chunk_id, flight, known)
        return tuple(flight.outputs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._empty(fwd_chunk_id):
            return []
        outputs, to = self.flights[fwd_chunk_id].outputs, self.peer(self.stage_index + 1)
        return [send_later(x.detach().contiguous(), self.axis, to, "activation") for x in outputs]

    # --- gradients ------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._empty(bwd_chunk_id):
            return []
        outgoing = self._known(bwd_chunk_id).outgoing
        found = [value.empty(self.axis, self.pipeline.device) if value.requires else None for value in outgoing]
        self.flights[bwd_chunk_id].gradients = list(found)
        source = self.peer(self.stage_index + 1)
        return [receive_later(x, self.axis, source, "gradient") for x in found if x is not None]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self._empty(mb_index):
            self.flights[mb_index].gradients = list(next_stage_bwd_outputs)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        if self._empty(bwd_chunk_id):
            return
        flight = self.flights[bwd_chunk_id]
        flight.gradients = [g if g is None else g.to(self.pipeline.device) for g in flight.gradients]
        kind = "B" if full_backward else "I"
        with self.pipeline.timed(kind, self.stage_index, bwd_chunk_id), self.pipeline.backward(flight):
            outputs, gradients = _differentiable(flight)
            if full_backward:
                if outputs:
                    torch.autograd.backward(outputs, gradients)
                flight.passed = [leaf.grad for leaf in flight.leaves]
            else:
                seeds = [torch.ones_like(x) if g is None else g for x, g in zip(outputs, gradients, strict=True)]
                flight.passed, flight.rest = inputs_first(outputs, seeds, flight.leaves, self.pipeline.weights)
        self._pass(flight, bwd_chunk_id)
        if full_backward and self.is_first:
            self._land(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self._empty(bwd_chunk_id):
            return
        flight = self.flights[bwd_chunk_id]
        with self.pipeline.timed("W", self.stage_index, bwd_chunk_id), self.pipeline.backward(flight):
            weights_later(flight.rest, self.pipeline.reducer.arrive)
        flight.rest = None
        self._land(bwd_chunk_id)

    def _pass(self, flight: Flight, number: int) -> None:
        """The gradients of what was received, for the stage before; where nothing used it what no gradient is, in the place of none: zeros would make weights decay."""
        values = self._known(number).incoming
        none = lambda x: torch.full((x.numel() * x.element_size(),), NONE, dtype=torch.uint8, device=x.device).view(x.dtype).view(x.shape)
        found = [leaf.grad if grad is None else grad for leaf, grad in zip(flight.leaves, flight.passed or [None] * len(values), strict=True)]
        flight.passed = [None if not v.requires else none(leaf) if grad is None else grad for v, leaf, grad in zip(values, flight.leaves, found, strict=True)]
        for leaf in flight.leaves:
            leaf.grad = None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._empty(bwd_chunk_id):
            return []
        to, passed = self.peer(self.stage_index - 1), self.flights[bwd_chunk_id].passed
        self._land(bwd_chunk_id)
        return [send_later(x.contiguous(), self.axis, to, "gradient") for x in passed if x is not None]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if self._empty(mb_index):
            return ()
        passed = self.flights[mb_index].passed
        self._land(mb_index)
        return tuple(passed)

    def _land(self, number: int) -> None:
        """Forget a microbatch once its gradients are on their way and its weights have theirs."""
        if self.flights[number].rest is None:
            del self.flights[number]

    # --- what torch's schedules ask besides -----------------------------------------------------------

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The engine reduces gradients, after the last microbatch."""

    def clear_runtime_states(self) -> None:
        self.flights.clear()


def _differentiable(flight: Flight) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs that have a gradient function, and the gradients that came for them (None: 1, of a loss)."""
    pairs = zip(flight.outputs, flight.gradients or [None] * len(flight.outputs), strict=True)
    there = lambda x, g: x.dim() == 0 if g is None else not g.numel() or not bool((g.reshape(-1)[:1].view(torch.uint8) == NONE).all())
    found = [(x, g) for x, g in pairs if x.requires_grad and there(x, g)]
    return [x for x, _ in found], [g for _, g in found]


def handed(leaf: Tensor, value: Crossing) -> Tensor:
    """A received tensor as the model's code is to see it: no leaf, so that it may be written in place."""
    return marked(no_view(leaf) if leaf.requires_grad and torch.is_grad_enabled() else leaf.detach(), dict(value.cuts))
