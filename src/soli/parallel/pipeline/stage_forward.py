"""One stage's part of a forward: the user's whole forward runs, and only this stage's units and glue compute.

What earlier stages computed is absent: a tensor on the meta device, which has the shape and no values, unless it
crossed the border; then it is what was received. The forward ends where the next stage's first unit is called.
Units of earlier stages are not entered; the shapes of what they returned were sent along once (see `Shapes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from soli.core.errors import SoliError
from soli.core.functions import in_place, name_of, tensors_in
from soli.parallel.pipeline import watch
from soli.parallel.pipeline.watch import Name, Watch, as_value, called_as, inside, results_of, unwrapped
from soli.parallel.tensor.cut import Cut, CutParameter, shape_of

if TYPE_CHECKING:
    from soli.parallel.pipeline.run import Pipeline

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor; of a cut one the logical shape."""
Shapes = list[list[Any]]
"""The results of the units of earlier stages, by call, for one shape of the microbatch.

Of each leaf a tensor's form, or the number or text that it is; nothing for an argument that came back.
"""


class Finished(BaseException):
    """Raised where the next stage begins. No Exception, so that a model's own handlers let it pass."""


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where it lies. Rules of cut tensors give a view of all of an argument where torch gives the argument itself."""
    with torch._C.DisableTorchFunction():
        return watch.storage_of(x), x.storage_offset(), x.stride(), tuple(x.shape), x.dtype


class StageForward(Watch):
    """`received`: the values that crossed the border before this stage. `wanted`: names to keep for the next.

    `present`: the units whose weights are all here.
    """

    def __init__(self, pipeline: Pipeline, stage: int, received: dict[Name, Tensor], shapes: Shapes) -> None:
        super().__init__()
        cutting, training = pipeline.cutting, pipeline.model.training
        self.trace, self.stages, self.stage = cutting.traces[training], cutting.stages, stage
        self.received, self.wanted = received, {name for name, _ in cutting.needs.get((training, stage + 1), [])}
        self.shapes, self.device, self.present = shapes, pipeline.device, pipeline.present
        self.skip = pipeline.randomness.skip
        self.made: dict[Name, Tensor] = {n: x for n, x in received.items() if n in self.wanted}
        self.forms: list[list[Any]] = []  # of the calls of this stage
        self.last = stage == self.stages.count - 1
        for name, x in received.items():
            x._live, x._run = name, self.run  # type: ignore[attr-defined]

    # --- glue -----------------------------------------------------------------------------------------

    def met(self, func: Any, args: tuple, kwargs: dict, live: list[Tensor]) -> Any:
        if self.stages.of_gap(self.gap) == self.stage:
            out = as_value(func, func(*args, **kwargs))
            made = results_of(func, args, out)
            if made:
                self._there(func, live)
            if made and not self.last:
                self._seen(func, made, live)
            return out
        # where it would lie; on CUDA, recomputation of others asks for the number too
        if name_of(func) in watch.PLACES:
            return func(torch.empty(0, device=self.device))
        try:
            with torch.no_grad():
                out = as_value(func, func(*tree_map(_absent, _by_places(func, args)), **tree_map(_absent, kwargs)))
        except (RuntimeError, TypeError) as error:
            what = f"{name_of(func)} between the blocks cannot be followed without its values: {error}".split("\n")[0]
            raise SoliError(what, got=f"stage {self.stage}, {self.trace.place(self.gap)}", fix="do it inside a block, or use pp=1") from error
        return self._replaced(func, args, out)

    def device_of(self, x: Tensor) -> torch.device:
        return self.device

    def _replaced(self, func: Any, args: tuple, out: Any) -> Any:
        """The result of an absent operation, in which what was received is there."""
        made = results_of(func, args, out)
        if not made:
            return out
        names = self._names(func, made)
        real = [self.received.get(name) for name in names]
        for name, x in zip(names, made, strict=True):
            x._live, x._run = name, self.run  # type: ignore[attr-defined]
        if in_place(func):
            return self._rewritten(args[0], made[0] if real[0] is None else real[0], names[0])
        if isinstance(out, Tensor):
            return out if real[0] is None else real[0]
        pairs = iter(real)
        return type(out)([x if not isinstance(x, Tensor) or (r := next(pairs)) is None else r for x in out])

    def _rewritten(self, target: Tensor, result: Tensor, name: Name) -> Tensor:
        """An operation in place: the object that the model's code holds becomes the result."""
        if target is not result:
            _become(target, result)
        target._live, target._run = name, self.run  # type: ignore[attr-defined]
        if name in self.received:
            self.received[name] = target
            if name in self.made:
                self.made[name] = target
        return target

    def _there(self, func: Any, live: list[Tensor]) -> None:
        """torch computes on without a word where one argument has no values (2.13: F.linear of a meta weight)."""
        for x in live:
            if x.is_meta or getattr(x, "_run", self.run) != self.run:
                what = f"{name_of(func)} reads a value that this stage does not have, {self.trace.place(self.gap)}"
                got = f"stage {self.stage}; a value of another stage, or one that an earlier forward left"
                raise SoliError(what, got=got, fix="hand values from block to block as arguments and results, or use pp=1")

    def _seen(self, func: Any, made: list[Tensor], live: list[Tensor]) -> None:
        for leaf, (name, x) in enumerate(zip(self._names(func, made), made, strict=True)):
            came_back = name != (self.gap, self.number - 1, leaf)  # in the trace: it was one of the arguments
            if came_back and not any(x is one or _place(x) == _place(one) for one in live):
                raise self._strayed(f"{name_of(func)} with a new result, where its argument came back")
            self._keep(name, x)

    def _keep(self, name: Name, x: Tensor) -> None:
        x._live, x._run = name, self.run  # type: ignore[attr-defined]
        if name in self.wanted:
            self.made[name] = x

    def _names(self, func: Any, made: list[Tensor]) -> list[Name]:
        """The names of an operation's results; it must be the one that the trace has there."""
        number, expected = self.number, self.trace.operations[self.gap]
        self.number += 1
        got = called_as(func, made)
        # a list may be longer or shorter (one entry a row), where all of it is of one gap: no other stage names its entries
        alone = not any(name[:2] == (self.gap, number) for name in (*self.wanted, *self.received))
        if number >= len(expected) or (expected[number] != got and not (alone and expected[number].split()[0] == name_of(func))):
            wanted = expected[number] if number < len(expected) else "the next block"
            raise self._strayed(f"{got} where there was {wanted}")
        return [self.trace.same.get(name, name) for name in [(self.gap, number, leaf) for leaf in range(len(made))]]

    def _strayed(self, what: str) -> SoliError:
        what = f"the forward took another path than on the first batch: {self.trace.place(self.gap)} came {what}"
        allowed = "the same calls between the blocks for every batch"
        return SoliError(what, got=f"stage {self.stage}", allowed=allowed, fix="put what depends on the batch inside a block, or use pp=1")

    # --- units ----------------------------------------------------------------------------------------

    def unit(self, name: str, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        call = self.gap
        if self.last and self.stages.of_gap(call) == self.stage and call:
            return self._run(name, forward, args, kwargs)  # nothing comes after: it may go where it likes
        expected = self.trace.calls[call].unit if call < len(self.trace.calls) else "the end"
        if name != expected:
            raise self._strayed(f"{name} where there was {expected}")
        stage, before = self.stages.of_call(call), self.trace.operations[call]
        if self.number != len(before):
            raise self._strayed(f"{name} where there was {before[self.number]}")
        if stage > self.stage:
            raise Finished
        self.gap, self.number = call + 1, 0
        if stage < self.stage:
            self.skip(self.trace.calls[call].draws)
            return self._result(call, args, kwargs)
        out = self._run(name, forward, args, kwargs)
        if not self.last:
            self._returned(call, out, tree_flatten((args, kwargs))[0])
        return out

    def _run(self, name: str, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if name not in self.present:
            what = f"{name} is called on a stage that does not have its weights"
            raise SoliError(what, got=f"stage {self.stage}", allowed="the order of the first batch", fix="call the same blocks in the same order for every batch, or use pp=1")
        self._there(forward, [x for x in tensors_in((args, kwargs)) if x.is_meta])  # what torch.func made between blocks was not seen
        with inside(self):
            return unwrapped(forward(*args, **kwargs))

    def _result(self, call: int, args: tuple, kwargs: dict) -> Any:
        """What an earlier stage's unit returned: absent, or received."""
        told, forms = self.trace.calls[call], iter(self.shapes[call])
        given = tree_flatten((args, kwargs))[0]
        leaves: list[Any] = []
        for number, leaf in enumerate(told.leaves):
            if leaf == watch.TENSOR:
                shape, dtype = next(forms)
                name = (self.gap, watch.OUTPUT, number)
                x = self.received.get(name)
                if x is None:
                    x = torch.empty(shape, dtype=dtype, device="meta")
                    x._live, x._run = name, self.run  # type: ignore[attr-defined]
                leaves.append(x)
            elif leaf == watch.CONSTANT:
                leaves.append(next(forms))
            else:
                leaves.append(given[leaf])
        for part, attribute, number in told.left:
            setattr(part, attribute, leaves[number])
        return tree_unflatten(leaves, told.spec)

    def _returned(self, call: int, out: Any, given: list[Any]) -> None:
        leaves, spec = tree_flatten(out)
        told = self.trace.calls[call]
        if spec != told.spec:
            raise self._strayed(f"{spec} where there was {told.spec}")
        forms: list[Form | Any] = []
        for number, (leaf, kind) in enumerate(zip(leaves, told.leaves, strict=True)):
            if kind == watch.TENSOR:
                forms.append((tuple(shape_of(leaf)), leaf.dtype))
                self._keep((self.gap, watch.OUTPUT, number), leaf)
            elif kind == watch.CONSTANT:
                forms.append(leaf)
            elif leaf is not given[kind]:
                raise self._strayed(f"a new result of {told.unit}, where its argument came back")
        self.forms.append(forms)


def _become(target: Tensor, result: Tensor) -> None:
    """torch.utils.swap_tensors, which asks that nobody else refers to what a tensor was: a call that is under way (x += y) does."""
    if target.requires_grad:
        torch.utils.swap_tensors(target, result)
        return
    target.__class__, result.__class__ = type(result), type(target)
    target.__dict__, result.__dict__ = result.__dict__, target.__dict__
    torch._C._swap_tensor_impl(target, result)


def _by_places(func: Any, args: tuple) -> tuple:
    """What is indexed by masks that are here, by the places in them: how many there are, a mask without values does not say."""
    if name_of(func) not in ("__getitem__", "__setitem__"):
        return args
    index = args[1] if type(args[1]) is tuple else (args[1],)
    here = lambda x: type(x) is Tensor and x.dtype == torch.bool and x.dim() > 0 and not x.is_meta
    return args[0], tuple(one for x in index for one in (x.nonzero(as_tuple=True) if here(x) else (x,))), *args[2:]


def _absent(x: Any) -> Any:
    """A tensor without its values; where it was to lie, too."""
    if isinstance(x, torch.device):
        return torch.device("meta")
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if type(x) in (Cut, CutParameter):
            return torch.empty(shape_of(x), dtype=x.dtype, device="meta")
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
