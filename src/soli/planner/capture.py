"""A trace of a user's program: one forward and its loss, for the shapes only, with what each product multiplies.

Nothing is computed and no memory is taken (planner/hollow.py), so that a model of any size on the meta device is traced
in seconds. Each tensor is followed back to the products with weights that it comes from next: what an attention reads
are then its queries, keys and values, and what reads its result is its output, whatever their names are.
"""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from soli.core.errors import SoliError, blaming
from soli.core.frames import here, place
from soli.core.functions import tensors_in
from soli.planner.hollow import READS, Call, Hollow, ValuesError, hollowed, untouched

aten = torch.ops.aten
Shape = tuple[int, ...]
Mark = tuple[str, int]
"""Of a tensor: it comes from the product ("product", number), with no other product between, from scores, and so on."""
GROUPED = aten._grouped_mm.default
PLAIN = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1, GROUPED: 0}
"""Products, and which argument is the first factor."""
SOFTMAX = {aten._softmax.default, aten._safe_softmax.default}
MEASURED = 'plan="auto" lays out any program on the machine at hand'


@dataclass(frozen=True)
class Product:
    """A product with a weight, or of two activations (`weight` is ''): where, the sizes that it goes from and to (of one expert, where
    a weight has many), and how many rows do, of all experts."""

    where: tuple[str, ...]  # the modules that run, by name
    weight: str
    shape: Shape  # of the whole weight, or of the result
    goes: tuple[int, int]
    rows: float
    reads: frozenset[Mark]

    @property
    def flops(self) -> float:
        """Of the forward."""
        return 2.0 * self.rows * math.prod(self.goes)


@dataclass(frozen=True)
class Attention:
    """Sizes of queries and keys, the products that made queries, keys and values, and whether scores are not kept."""

    where: tuple[str, ...]
    queries: int  # numbers in all
    tokens: int  # of a sequence
    width: int  # of a head
    reads: frozenset[Mark]
    flash: bool
    both_ways: bool = False
    products: frozenset[int] = frozenset()  # its own two, where it is written out


@dataclass
class Trace:
    """What one forward did, in order."""

    products: list[Product]
    attentions: list[Attention]
    tables: dict[str, Shape]  # weights that rows are looked up in
    inputs: dict[str, list[Shape]]  # of modules, the first of each call
    calls: list[Call]
    sorts: list[tuple[tuple[str, ...], int]]  # where the k largest are chosen, and k


class Follower(Hollow):
    """Runs hollow and notes products, attentions and tables. Tensors of the meta device are hollow ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace([], [], {}, {}, [], [])
        self.calls = self.trace.calls
        self.where: list[str] = []
        self.inside = False  # a kernel of attention: what it is made of is its own
        self._weights: dict[int, str] = {}
        self._shapes: dict[str, Shape] = {}
        self._marks: dict[int, frozenset[Mark]] = {}
        self._kept: list[Any] = []  # storages, so that none is taken for another

    def is_hollow(self, x: Tensor) -> bool:
        return x.is_meta or super().is_hollow(x)

    def own(self, model: nn.Module) -> None:
        """The weights of the model that runs, and hooks that say where it is."""
        for name, param in model.named_parameters():
            self._weights[_key(param)], self._shapes[name] = name, tuple(param.shape)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        shape = next((tuple(x.shape) for x in given if x.is_floating_point()), ())
        self.trace.inputs.setdefault(name, []).append(shape)
        self.where.append(name)

    def _leave(self, *_: Any) -> None:
        self.where.pop()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in READS and self.where and self.is_hollow(args[0]):
            raise ValuesError("the model's path depends on a value that only a real run has", got=here())
        if func is GROUPED and args[1].dim() == 3:  # for its shapes torch wants bfloat16
            return self.mark(args[0].new_empty(len(args[0]), args[1].shape[-1], device="cpu"))
        return super().run(func, args, kwargs)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, made: list[Tensor]) -> None:
        super()._note(func, args, kwargs, result, made)
        if self.inside or not made:
            return
        given = tensors_in((args, kwargs))
        names = {_key(x): self._weights[_key(x)] for x in given if _key(x) in self._weights}
        marks = self.marks(given)
        if func is aten.embedding.default and names:
            self.trace.tables[names[_key(args[0])]] = tuple(args[0].shape)
        elif func is aten.topk.default:
            self.trace.sorts.append((tuple(self.where), int(args[1])))
        elif func in PLAIN:
            first, second = args[PLAIN[func] : PLAIN[func] + 2]
            marks = self._product(first, second, made[0])
        elif func in SOFTMAX:
            marks = frozenset(("softmax" if kind == "scores" else kind, n) for kind, n in marks)
        elif len(names) == len(given) == len(made) == 1:  # a weight in another precision
            self._weights[_key(made[0])] = next(iter(names.values()))
        self.give(made, marks)

    def marks(self, given: list[Tensor]) -> frozenset[Mark]:
        return frozenset().union(*(self._marks.get(_key(x), frozenset()) for x in given))

    def give(self, made: list[Tensor], marks: frozenset[Mark]) -> None:
        """What the new tensors come from."""
        for x in made:
            if self.is_hollow(x):
                self._kept.append(x.untyped_storage())
                self._marks[_key(x)] = marks

    def _product(self, first: Tensor, second: Tensor, made: Tensor) -> frozenset[Mark]:
        number = len(self.trace.products)
        for weight, other in ((second, first), (first, second)):
            name = self._weights.get(_key(weight))
            if name is not None:
                inner, outer = weight.shape[-2:] if weight is second else weight.shape[-2:][::-1]
                shape, where = self._shapes[name], tuple(self.where)
                goes = _of_one(shape, int(inner), int(outer))
                rows = made.numel() * inner / math.prod(goes)
                self.trace.products.append(Product(where, name, shape, goes, rows, self.marks([other])))
                return frozenset({("product", number)})
        return self._of_activations(first, second, made)

    def _of_activations(self, first: Tensor, second: Tensor, made: Tensor) -> frozenset[Mark]:
        """Scores, or what they weigh: then this is an attention that was written out."""
        number, where, marks = len(self.trace.products), tuple(self.where), self.marks([first, second])
        goes = (int(second.shape[-2]), int(second.shape[-1]))
        weighed = [n for kind, n in marks if kind == "softmax"]
        self.trace.products.append(Product(where, "", tuple(made.shape), goes, made.numel() / goes[1], marks))
        if not weighed:
            return marks | {("scores", number)}
        scores = self.trace.products[max(weighed)]
        own, queries = frozenset({max(weighed), number}), made.numel()
        reads = marks | scores.reads
        return self._noted(Attention(where, queries, goes[0], scores.goes[0], reads, flash=False, products=own))

    def _noted(self, one: Attention) -> frozenset[Mark]:
        self.trace.attentions.append(one)
        return frozenset({("attention", len(self.trace.attentions) - 1)})

    def attend(self, kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In the place of scaled_dot_product_attention."""
        if self.inside:
            return kernel(query, key, value, *args, **kwargs)
        with patch.object(self, "inside", True):
            result = kernel(query, key, value, *args, **kwargs)
        where, reads = tuple(self.where), self.marks([query, key, value])
        tokens, width = int(key.shape[-2]), int(query.shape[-1])
        both_ways = not (args[2] if len(args) > 2 else kwargs.get("is_causal", False))
        self.give([result], self._noted(Attention(where, query.numel(), tokens, width, reads, True, both_ways)))
        return result


class Kernels(TorchFunctionMode):
    """Sees calls of the attention kernel by those who hold it under a name of their own, and of one_hot, which looks at its values only
    to refuse those beyond."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is KERNEL:
            return self.follower.attend(func, *args, **(kwargs or {}))
        if func is F.one_hot and (shape := _one_hot(*args, **(kwargs or {}))) is not None:
            return shape
        return func(*args, **(kwargs or {}))


KERNEL = F.scaled_dot_product_attention


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor | None:
    """Its result, where the values do not say how wide it is."""
    return None if num_classes < 0 else tensor.new_zeros(*tensor.shape, num_classes).scatter_(-1, tensor.unsqueeze(-1), 1)


def _of_one(shape: Shape, inner: int, outer: int) -> tuple[int, int]:
    """What a product goes from and to, of one of many experts where all are multiplied as one matrix (by einsum)."""
    if len(shape) != 3 or inner * outer != math.prod(shape):
        return inner, outer
    if inner in shape[1:]:
        return inner, math.prod(shape[1:]) // inner
    return math.prod(shape[1:]) // outer, outer


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def capture(model: nn.Module, batch: Any, run: Callable[[nn.Module, Any], Any]) -> Trace:
    """What `run(a copy of the model, batch)` does. SoliError with the module and the line that keep it from being seen."""
    follower = Follower()
    (copy,) = hollowed(follower, model)
    _stand(follower, copy)
    batch = tree_map(lambda x: _real(follower, x) if isinstance(x, Tensor) else x, batch)
    follower.own(copy)
    # nn.MultiheadAttention, which is a function itself, calls the kernel where no mode sees it.
    attend = partial(follower.attend, KERNEL)
    try:
        hidden = patch.object(F, "scaled_dot_product_attention", attend)
        with blaming(_failed), hidden, Kernels(follower), follower:
            run(copy, batch)
    except ValuesError as error:
        raise SoliError([type(p)(p.what, p.got, "a forward whose shapes say all that it does", MEASURED) for p in error.problems]) from error
    return follower.trace


def _failed(error: Exception) -> SoliError:
    got = f"{_place(error)}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"
    if "allocate memory" in str(error):
        what = "the program makes a tensor that this machine has no addresses for"
        allowed = "tensors that have room in the address space together; nothing is written into them"
        fix = "a batch of shorter sequences, and --seq for the length that is planned"
        return SoliError(what, got=got, allowed=allowed, fix=fix)
    allowed = "a model that computes its batch"
    fix = "run the model on its batch by itself"
    return SoliError("the program cannot be traced: its forward or its loss fails", got=got, allowed=allowed, fix=fix)


def _stand(follower: Follower, model: nn.Module) -> None:
    """Buffers of the meta device as hollow ones: what the program asks of their device has an answer."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _real(follower, buffer)


def _real(follower: Follower, x: Tensor) -> Tensor:
    """A tensor of the meta device on the CPU: zeros where it is of whole numbers, which are looked at, else hollow."""
    if not x.is_meta:
        return x
    return torch.zeros(x.shape, dtype=x.dtype) if not x.is_floating_point() else follower.mark(untouched(x.shape, x.contiguous().stride(), x.dtype))


def _place(error: Exception) -> str:
    """The innermost module whose forward failed, and the last line that is neither torch's nor the planner's."""
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    module, own = place(frames, str(Path(__file__).parent))
    return " at ".join(x for x in (module, own or f"{frames[0][0].f_code.co_filename}:{frames[0][1]}") if x)
