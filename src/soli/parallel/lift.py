"""Casts to float32 inside a model, lifted to float64, so that float64 can be the judge of any model.

Models from elsewhere compute their norms, softmaxes, rotary tables and losses in float32 whatever they are
given; that noise (1e-8 after a few steps) would hide an error. Both sides of a proof run lifted.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from soli.parallel.randomness import BACKWARD, backward_of

NARROW, WIDE = {torch.float32, torch.float16, torch.bfloat16, torch.complex64}, {torch.float64, torch.complex128}


class _Lift(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func in BACKWARD:
            with self:  # a mode is off inside its own handler, and blocks may be made again
                return backward_of(*args, **(kwargs or {}))
        # torch takes a type as an argument of its own, never inside another
        args, kwargs = [*map(_double, args)], {name: _double(value) for name, value in (kwargs or {}).items()}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if getattr(func, "__name__", "") == "_grouped_mm" and (made := _grouped(*args, **kwargs)) is not None:
                return made
            # of constants of the program's own (class weights), where torch takes no two types together
            given = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            if "out" in kwargs or func.__name__.endswith("_") or not given & NARROW or not given & WIDE:
                raise
            return func(*tree_map(wide, args), **tree_map(wide, kwargs))


def _grouped(input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None) -> Tensor | None:
    """torch._grouped_mm, which torch has in no float64: rows up to each end by a matrix of their own. None: it is of another form."""
    if input.dtype != torch.float64 or mat2.dim() != 3 or offs is None or bias is not None:
        return None
    rows = [input[a:b] @ weight for weight, a, b in zip(mat2, [0, *offs.tolist()], offs.tolist(), strict=False)]
    return torch.cat([*rows, input.new_zeros(len(input) - int(offs[-1]), mat2.shape[-1])])


def _double(argument: Any) -> Any:
    return torch.complex128 if argument is torch.complex64 else torch.float64 if argument is torch.float32 else argument


def wide(x: Any) -> Any:
    """A tensor in float64, or in pairs of it; of a module: `module._apply(wide)`."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@contextmanager
def lifted() -> Iterator[None]:
    """Where code asks torch for float32, or for no dtype, it gets float64."""
    with ExitStack() as afterwards, _Lift():
        afterwards.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        yield
