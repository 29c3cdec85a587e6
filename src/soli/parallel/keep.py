"""What a block keeps under `recompute=selective`: results of products and what was summed over ranks (arXiv 2205.05198).

These cost the most to make again. What is made again (norms, activations, dropout, masks, scores of attention that is
not one kernel) is cheap and the larger part. Two modes below autograd share one list: `_Keeping` writes results down
in the order of their making, `_Giving` returns them in that order when the block runs again.

torch has such contexts (create_selective_checkpoint_contexts). They count every operation and refuse a block that runs
one view more the second time, as tensor parallelism's do, which enters a tensor once; they refuse results that a later
operation overwrites; and a sum over ranks runs again. Here products alone are counted, a result is copied before it is
overwritten, and what `carried` is given is not sent twice (under sp, what a column reads is gathered again).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from soli.core.errors import SoliError
from soli.core.functions import written_by
from soli.core.tables import table

_aten = torch.ops.aten
PRODUCTS = {getattr(_aten, name) for name in table(__package__, "functions.toml")["kept"]}
"""Products with weights, and attention as one kernel. Batched products are those of attention written out: made again."""


@dataclass
class _Result:
    what: str
    value: Any  # a tensor, or the several of an attention kernel
    written: bool = False  # the block writes into it
    summed: bool = False  # a product that only went into a sum over ranks: its shape is all that is needed


SUM = "a sum over ranks"


def differs(got: str, fix: str) -> SoliError:
    """A block whose repetition is another computation than its forward was."""
    what = "a block did not compute the same when it was recomputed in backward"
    return SoliError(what, got=got, allowed="a block whose forward depends on its inputs and weights alone", fix=fix)


class _Now:
    mode: _Keeping | _Giving | None = None


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For torch.utils.checkpoint: around a block's forward, and around its repetition."""
    results: list[_Result] = []
    return _Keeping(results), _Giving(results)


def carried(x: Tensor, there: Callable[[Tensor], Tensor], *, alone: bool) -> Tensor:
    """`there(x)`, which communicates: its result is kept. `alone`: nobody else has x, which need not be kept then."""
    return alias(there(x) if _Now.mode is None else _Now.mode.carried(x, there, alone))


def alias(x: Tensor) -> Tensor:
    """The same memory, but no view: a view holds its base, and may not be written in place behind a function."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x)  # type: ignore[call-overload]


class _Mode(TorchDispatchMode):
    def __init__(self, results: list[_Result]) -> None:
        super().__init__()
        self.results = results

    def __enter__(self) -> Any:
        self.before, _Now.mode = _Now.mode, self  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _Now.mode = self.before
        super().__exit__(*error)


class _Keeping(_Mode):
    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self._before_writing(written_by(func, args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self._keep(str(func.overloadpacket), out)
        return out

    def _keep(self, what: str, out: Any) -> None:
        self.results.append(_Result(what, tree_map_only(Tensor, Tensor.detach, out)))

    def _before_writing(self, written: list[Tensor]) -> None:
        places = _places(written)
        for result in self.results:
            if not result.written and _places(result.value) & places:
                result.value, result.written = tree_map_only(Tensor, Tensor.clone, result.value), True

    def carried(self, x: Tensor, there: Callable[[Tensor], Tensor], alone: bool) -> Tensor:
        for result in self.results:
            if alone and _places(result.value) & _places(x):
                result.value, result.summed = result.value.new_empty(()).expand(result.value.shape), True
        with patch.object(self, "paused", True):
            out = there(x)
        self._keep(SUM, out)
        return out


class _Giving(_Mode):
    def __enter__(self) -> Any:
        self.left = iter(self.results)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._next(str(func.overloadpacket)) if func.overloadpacket in PRODUCTS else func(*args, **(kwargs or {}))

    def carried(self, x: Tensor, there: Callable[[Tensor], Tensor], alone: bool) -> Any:
        return self._next(SUM)

    def _next(self, what: str) -> Any:
        result = next(self.left, None)
        if result is None or result.what != what:
            raise differs(f"{what}, where its forward had {'no product' if result is None else result.what}", "recompute=full, or recompute=none")
        if result.summed:
            return torch.empty_like(result.value, memory_format=torch.contiguous_format)
        return tree_map_only(Tensor, Tensor.clone if result.written else Tensor.detach, result.value)


def _places(value: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(value) if isinstance(x, Tensor)}
