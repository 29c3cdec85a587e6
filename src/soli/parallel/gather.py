"""ZeRO-3: a block's parameters exist on a rank only while the block computes.

Blocks are gathered in one fixed order on every rank: `order` forward, its reverse backward. A rank that
enters a block first joins the gathers of all blocks before it, whether it computes them or not, so ranks
whose data takes different paths through the model still issue the same collectives. In the backward the sums of
gradients have their places between the gathers: a block's before the gather of the second block after it,
also on a rank that has no gradient of it, since a rank waits for either with the other unissued. The order is the one
of registration, and from the first forward on the one in which rank 0 ran the blocks. What belongs to no
block (embeddings, heads, whatever is tied across blocks) is gathered once a step and kept.

Why not FSDP2: see parallel/data.py.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from soli.core.events import events
from soli.mesh.collectives import Axis, Pending, all_gather, all_reduce, broadcast
from soli.parallel.reduce import Reducer
from soli.parallel.tensor.cut import CutParameter, become_cut
from soli.parallel.units import Unit

BEGUN, OVER = sys.maxsize, -1
"""Numbers of nodes before and after all of a backward: autograd numbers them as the forward makes them, and runs the last made first."""


class Block:
    """A module that is gathered as a whole: its units, and where it stands in this pass."""

    def __init__(self, name: str, module: nn.Module | None, units: list[Unit]) -> None:
        self.name, self.module, self.units = name, module, units
        self.pending: list[Pending] | None = None
        self.runs = 0
        self.given = OVER  # the highest number of what made the inputs of the run that goes on
        self.first = OVER  # the lowest number of what its runs' backward begins with
        self.repeats = False  # runs more than once a forward: kept until the pass ends
        self.late = False  # its sum is sent at the end: it repeats, or ran nowhere when the order was fixed
        self.waiting_grads = 0

    @property
    def gathered(self) -> bool:
        return all(unit.gathered for unit in self.units)

    def release(self) -> None:
        for unit in self.units:
            unit.release()

    def is_past(self, node: int) -> bool:
        """Whether its backward is behind one that comes to this node, or there is none."""
        return not self.runs or node == OVER or self.first > node


class Gatherer:
    """The blocks of a model under ZeRO-3. The root comes first and has no module of its own to wait for."""

    def __init__(self, root: Block, blocks: list[Block], world: Axis, reducer: Reducer) -> None:
        self.root, self.order = root, list(blocks)
        self.world, self.reducer = world, reducer
        reducer.on_complete = self.grads_complete
        self.phase = "idle"
        self.keep_last, self._cursor = False, 0
        self._ran: list[Block] = []
        self._ordered = False
        for block in blocks:
            assert block.module is not None, "only the root has no module"
            block.module.register_forward_pre_hook(lambda m, a, k, b=block: self._enter(b, (a, k)), with_kwargs=True, prepend=True)
            block.module.register_forward_hook(lambda m, a, out, b=block: self._leave(b, out))
        self._guard(True)

    # --- one pass -------------------------------------------------------------------------------------

    def _guard(self, between: bool) -> None:
        """Between steps a parameter asks what it is computed with, and refuses that where its values are not here (tensor/parts.py)."""
        for slot in [slot for block in [self.root, *self.order] for unit in block.units if unit.zero == 3 for slot in unit.slots]:
            param: Any = slot.param
            param.of = slot.name
            if between and type(param) is nn.Parameter:
                become_cut(param, {})
            elif not between and type(param) is CutParameter and not param.cuts:
                del param.cuts
                param.__class__ = nn.Parameter  # type: ignore[assignment]

    def _begin_pass(self, phase: str) -> None:
        if self.phase != "idle":  # an error ended a pass, and what it left gathered may be of other weights by now
            self.end_pass()
        self._guard(False)
        self.phase = phase

    def begin_forward(self, training: bool) -> None:
        self._begin_pass("forward")
        self.keep_last, self._cursor, self._ran = training, 0, []
        for block in self.order:
            block.runs, block.first = 0, OVER
        self._issue(self.root)
        self._wait(self.root)

    def end_forward(self) -> None:
        """Join the gathers of blocks that this rank did not run; keep what backward starts with."""
        self._join(len(self.order))
        for block in self.order:
            self._wait(block)
            if not (self.keep_last and block is self.order[-1]):
                block.release()
        self._agree_on_order()

    def hold_all(self) -> None:
        """Gather everything and keep it until `end_pass`: a pipeline's microbatches come and go in between."""
        self._begin_pass("held")
        for block in [self.root, *self.order]:
            self._issue(block)
        for block in [self.root, *self.order]:
            self._wait(block)

    def begin_backward(self) -> None:
        self.phase, self._cursor = "backward", len(self.order)
        for block in self.order:
            block.waiting_grads = sum(unit.trainable for unit in block.units)

    def end_backward(self) -> None:
        """Join the gathers and sums of blocks that this rank's backward did not come to."""
        self._come_back(0, OVER)
        self.end_pass()

    def end_pass(self) -> None:
        """Release everything: after backward, or after a forward that has none."""
        for block in [*self.order, self.root]:
            self._wait(block)
            block.release()
        self.phase = "idle"
        self._guard(True)

    def grads_complete(self, unit: Unit) -> None:
        """All gradients of a unit are there. Once a block has all of its own, its parameters go when the backward comes to another block:
        the gradient of its input may still read what is frozen, or what was detached."""
        for block in self.order:
            if unit in block.units:
                block.waiting_grads -= 1

    # --- hooks of a block -----------------------------------------------------------------------------

    def _enter(self, block: Block, inputs: Any) -> None:
        if self.phase == "backward":  # recomputation of its forward
            self._enter_backward(block, BEGUN)
        elif self.phase == "forward":
            if block not in self.order[: self._cursor]:
                self._join(self.order.index(block) + 1)
            elif not block.gathered and block.pending is None:
                self._issue(block)  # a block that runs again; every rank runs it again
                block.repeats = True
                events.emit("note", text=f"{block.name} runs more than once a forward: kept gathered until the forward ends")
            self._join(min(self._cursor + 1, len(self.order)))  # one ahead, while this one computes
            self._wait(block)
            block.given = max((node._sequence_nr() for node in _made_by(inputs)), default=OVER)
            block.runs += 1
            if block.runs == 1:
                self._ran.append(block)

    def _leave(self, block: Block, output: Any) -> None:
        if self.phase != "forward":
            return
        for node in _made_by(output):
            number = node._sequence_nr()
            if number <= block.given:  # of an input that is handed through
                continue
            block.first = number if block.first == OVER else min(block.first, number)
            node.register_prehook(lambda gradients, b=block, n=number: self._enter_backward(b, n))
        if not block.repeats and not (self.keep_last and block is self.order[-1]):
            block.release()

    def _enter_backward(self, block: Block, node: int) -> None:
        """The backward comes to a block by a node of this number."""
        if self.phase != "backward":
            return
        place = self.order.index(block)
        # Not those that are still to be joined: what is kept from the forward is gathered on every rank until then.
        for later in self.order[max(place + 1, self._cursor) :]:
            if later.waiting_grads == 0 and later.gathered and later.is_past(node):
                later.release()
        self._come_back(place, node)
        for later in reversed(self.order[place + 1 :]):
            if later.is_past(node):
                self._close(later)
        self._wait(block)

    # --- gathers --------------------------------------------------------------------------------------

    def _join(self, stop: int) -> None:
        """Join the gathers of a forward that are left before number `stop` of the order."""
        for block in self.order[self._cursor : stop]:
            self._issue(block)
        self._cursor = max(self._cursor, stop)

    def _come_back(self, place: int, node: int) -> None:
        """Go back to a place of the order, by what every rank issues at each step, whichever blocks it has gradients of: the sum of the block
        before, this one's gather, and one ahead."""
        for at in range(self._cursor - 1, place - 1, -1):
            for before in self.order[at + 1 : at + 2]:
                if before.is_past(node):
                    self._close(before)
            for block in reversed(self.order[max(at - 1, 0) : at + 1]):
                self._issue(block)
        self._cursor = min(self._cursor, place)

    def _close(self, block: Block) -> None:
        """There is no more gradient of a block to come."""
        for unit in () if block.late else block.units:
            if unit.trainable:
                self.reducer.close(unit)

    def _issue(self, block: Block) -> None:
        if block.gathered or block.pending is not None:
            return
        block.pending = []
        for unit in (unit for unit in block.units if not unit.gathered):
            assert unit.shard is not None, "a sharded unit has a shard"
            full = unit.make_room()
            label = f"parameters of {unit.name}"
            block.pending.append(all_gather(full, unit.shard, unit.gather_axis, label=label, wait=False))

    def _wait(self, block: Block) -> None:
        if block.pending is None:
            return
        for pending in block.pending:
            pending.wait()
        block.pending = None
        for unit in block.units:
            unit.show()

    def _agree_on_order(self) -> None:
        """After the first forward in which rank 0 ran blocks: their order there, those it did not run last. Sums go in the backward's order, those
        of blocks that run more than once on any rank, or that ran on none, at the end; and all of them where ranks run blocks in other orders."""
        if self._ordered or not self.order:
            return
        place = {id(block): i for i, block in enumerate(self.order)}
        rest = [block for block in self.order if block not in self._ran]
        mine = torch.tensor([place[id(block)] for block in [*self._ran, *rest]])
        mine = mine if self._ran else torch.full_like(mine, -1)
        broadcast(mine, self.world, label="order of the blocks")
        if mine[0] < 0:
            return
        if self.keep_last and self.order[-1].gathered:
            self.order[-1].release()
        self.order = [self.order[i] for i in mine.tolist()]
        self._ordered = True
        places = [self.order.index(block) for block in self._ran]
        repeats, ran = ([block.repeats for block in self.order], [block in self._ran for block in self.order])
        told = torch.tensor([*repeats, *ran, places != sorted(places)]).long()
        all_reduce(told, self.world, "max", label="blocks that repeat, that ran, or that go in other orders")
        *each, crossed = told.tolist()
        for number, block in enumerate(self.order):
            block.repeats = bool(each[number])
            block.late = block.repeats or not each[len(self.order) + number]
        back = sorted(reversed(self.order), key=lambda block: block.late)
        self.reducer.reorder([unit for block in [*back, self.root] for unit in reversed(block.units)])
        self.reducer.early = not crossed


def _made_by(tree: Any) -> set[Node]:
    """What made the tensors of a tree: of a block's outputs what backward runs before anything else of the block, also where one of them is
    written into later: of a view the base's node is what stays in the graph then."""
    opened = [vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module) else leaf for leaf in tree_leaves(tree)]  # of a dataclass
    outputs = [leaf for leaf in tree_leaves(opened) if isinstance(leaf, Tensor) and leaf.requires_grad]
    with torch._C.DisableTorchFunctionSubclass():  # as they lie here, if they are cut
        bases = [x._base for x in outputs if x._base is not None]
        return {x.grad_fn for x in [*outputs, *bases] if x.grad_fn is not None}
