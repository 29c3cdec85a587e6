"""What a forward does beside computing a loss: it writes into parameters and buffers, reads those of other blocks, sends, or asks for a
gradient that is no sum over rows.

None of it shows in the losses of parts of a batch. Every operation of one forward is looked at, wherever it is called.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soli.core.errors import SoliError, listed, on_all_ranks
from soli.core.functions import held, need_operator, written_by
from soli.core.plan import Plan
from soli.core.tables import table
from soli.mesh.record import telling
from soli.parallel import gather, kept
from soli.parallel.pipeline.run import Pipeline

_BY_FREQUENCY = {ops.aten.embedding.default: 3, ops.aten._embedding_bag.default: 3}
"""Where these take scale_grad_by_freq."""

_SHAPES = {getattr(ops.aten, name) for name in table("soli.parallel", "functions.toml")["shapes"]}
"""What asks of a tensor its shape or type alone."""


class Effects(TorchDispatchMode):
    """Around a forward of `model`. `before`: the values of the parameters that are written into, from before that; `written`: of buffers and
    tensors in attributes the names; `absent`: names of parameters that are read where ZeRO-3 has them nowhere."""

    supports_higher_order_operators = True  # they come here, and are refused

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model, self.plan = model, plan
        self._kept = list(kept.tensors(model))
        self._params = list(model.named_parameters())
        self._had = {name: held(param) for name, param in self._params}
        self.before: dict[str, Tensor] = {}
        self.written: set[str] = set()
        self.absent: set[str] = set()
        self.by_frequency = False

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        # `param.data = x` is no operation. Under zero=3 gathers do it
        for name, param in self.model.named_parameters() if self.plan.zero < 3 else ():
            if name in self._had and held(param).untyped_storage()._cdata != self._had[name].untyped_storage()._cdata:
                self.before.setdefault(name, self._had[name])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _BY_FREQUENCY.get(func)
        if place is not None:
            self.by_frequency |= len(args) > place and bool(args[place])
        need_operator(func)
        if func._schema.is_mutable and not _is_gather(sys._getframe(1)):
            # parameters that are cut are looked at as they lie in memory
            with torch._C.DisableTorchFunction():
                self._keep(written_by(func, args, kwargs or {}))
        if self.plan.zero == 3 and not func.is_view and func.overloadpacket not in _SHAPES:
            self._look_for_absent(args, kwargs)
        return func(*args, **(kwargs or {}))

    def _keep(self, written: list[Tensor]) -> None:
        for name, param in self._params if written else ():
            if name not in self.before and any(_overlap(param, x) for x in written):
                self.before[name] = param.detach().clone()

        for name, tensor in self._kept if written else ():
            if name not in self.written and any(_overlap(tensor, x) for x in written):
                self.written.add(name)

    def _look_for_absent(self, args: Any, kwargs: Any) -> None:
        """A parameter that is not gathered is one number in the shape of all (units.py)."""
        with torch._C.DisableTorchFunction():
            single = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and _one(x)}
            if single and not _is_gather(sys._getframe(2)):
                for name, param in self._params:
                    # a weight of one element is one number where it is gathered too
                    if param.untyped_storage()._cdata in single and (param.numel() > 1 or param.isnan().all()):
                        self.absent.add(name)

    def explain(self, plan: Plan, pipeline: Pipeline | None) -> None:
        """Raises SoliError where a plan has nowhere to write to, or no part of a batch can tell a gradient."""
        owners = pipeline.cutting.owners if pipeline is not None else {}
        if several := [name for name in self.before if len(owners.get(name, ())) > 1]:
            what = "the forward writes into parameters that several stages of the pipeline have, and the copy of one of them alone is written"
            fix = "write and read them in the blocks of one stage, change weights between steps, or use pp=1"
            raise SoliError(what, got=listed(several), allowed="parameters that only the optimizer changes, or of one stage alone", fix=fix)
        own = [n for n, p in self.model.named_parameters() if n in self.before and p.requires_grad]
        lost = list(self.before) if plan.zero == 3 else own if plan.zero else []
        if lost:
            what = f"the forward writes into parameters, and under zero={plan.zero} they are copies of what ranks have parts of"
            fix = "leave out max_norm= of embeddings, change weights between steps, or use zero=0"
            raise SoliError(what, got=listed(lost), allowed="parameters that only the optimizer changes", fix=fix)
        if self.absent and plan.zero == 3:
            what = "parameters are read where their block does not run, and under zero=3 no rank has their values there"
            allowed = "a block's parameters inside of its own forward, and what belongs to no block anywhere"
            fix = "read them inside of their block, between steps from engine.global_state_dict(), or use zero=2"
            raise SoliError(what, got=listed(sorted(self.absent)), allowed=allowed, fix=fix)
        if self.by_frequency and plan.pieces * plan.cp > 1:
            what = "gradients are divided by how often a token is in the batch, which no part of it knows"
            fix = "leave it out, or run with dp=1, cp=1, tensor=1d and no microbatches"
            raise SoliError(what, got="an embedding with scale_grad_by_freq=True", fix=fix)


@contextmanager
def looked_at(model: nn.Module, plan: Plan) -> Iterator[Effects]:
    """Around a forward of `model`. SoliError if it sends where several ranks have the same rows, or anything but sums, before they wait for each other."""

    def refuse(operation: str, of_rows: bool) -> None:
        if plan.model_ranks > 1 or ((plan.dp or 1) > 1 and of_rows and operation not in ("all_reduce", "barrier")):
            wrong = "several ranks have the same rows, which it would count twice" if plan.model_ranks > 1 else "gradients of other ranks' losses may be lost"
            allowed = "models that leave sending to the engine; under dp and zero alone, sums over all ranks, objects, and a number a rank"
            fix = "turn its own synchronisation off (an option such as sync_codebook=False, is_distributed=False), or run on one rank"
            raise on_all_ranks(f"the model sends by itself, and under {plan} {wrong}", got=operation, allowed=allowed, fix=fix)

    with Effects(model, plan) as effects, telling(refuse):
        yield effects


@contextmanager
def undone(model: nn.Module, plan: Plan, tensors: bool = True) -> Iterator[None]:
    """Whatever a forward changes is as before afterwards. `tensors=False`: but for tensors in attributes."""
    with kept.unchanged(model, tensors):
        try:
            with looked_at(model, plan) as effects:
                yield
        finally:
            # as they lie in memory: on one that is being cut, a copy would ask for another layout, and end here
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for name, param in model.named_parameters():
                    if name in effects.before:
                        param.copy_(effects.before[name])


class Unwritten:
    """Around passes of one kind through a copy of a model: the first one is looked at, and where it writes into no parameter, of either, the others
    are not, since looking takes longer than they do (18 passes of a small GPT: 0.77 s of CPU, and 0.30 without). That they do not either, versions tell.
    `moved`: what a pass changed of the copy's buffers, while it is `noting` that."""

    def __init__(self, model: nn.Module, original: nn.Module) -> None:
        self.model, self.original, self.both = model, original, nn.ModuleList([model, original])
        self.first = self.looking = True
        self.noting, self.moved = False, frozenset[str]()

    @contextmanager
    def undone(self, plan: Plan) -> Iterator[None]:
        """Whatever a pass changes is as before afterwards. An error if it writes into parameters, and the first one did not: of the original's
        what they were is not known any more."""
        before, kept_before = _versions(self.original), _versions(self.model)
        with undone(self.both, plan) if self.looking else kept.unchanged(self.model):
            start = kept.values(self.model) if self.noting else None
            yield
            self.moved = frozenset({} if start is None else kept.in_state(self.model, kept.changed(self.model, start)))
        moved, wrote = _versions(self.original) != before, _versions(self.model) != kept_before  # to undo is to write, too
        what = "the forward writes into parameters at some calls, and at the first one it did not"
        if moved and not self.looking:
            raise on_all_ranks(what, allowed="parameters that only the optimizer changes", fix="change weights between steps")
        if wrote and not self.looking:
            raise RuntimeError(what)
        self.first, self.looking = False, moved or wrote if self.first else self.looking


def _versions(model: nn.Module) -> list[tuple[int, int, int]]:
    with torch._C.DisableTorchFunction():
        return [(id(param), param._version, param.data_ptr()) for param in model.parameters()]


def _one(x: Tensor) -> bool:
    """Whether all that a tensor has is one number."""
    return x.layout == torch.strided and not x.is_meta and x.untyped_storage().nbytes() == x.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same memory. Sparse ones have none of their own."""
    if not a.layout == b.layout == torch.strided or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    (begin, end), (other, until) = kept.extent(a), kept.extent(b)
    return begin < until and other < end


def _is_gather(inner: FrameType) -> bool:
    """Whether a gather of parameters writes, and not the model."""
    for frame, _ in walk_stack(inner):
        module = frame.f_globals.get("__name__", "")
        if module == gather.__name__:
            return True
        if module.split(".")[0] not in ("torch", "soli"):
            return False
    return False
