"""What cut computations have read of a tensor: kept on it, so that all read the same and gradients sum once.

What was read has a graph. Of a block that is recomputed the graph has the block's inputs, and an input has what was
read of it: a circle through autograd that Python's collector cannot see. A backward opens it; a microbatch without
counted targets has none, and would stay in memory for good. `forget` opens the circles of what is done with.
"""

from weakref import WeakValueDictionary

import torch
from torch import Tensor

_readers: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def version_of(x: Tensor) -> int:
    """How often it was written into; of one that inference_mode() made torch does not count."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if x.is_inference() else x._version


def was_read(x: Tensor) -> bool:
    """Whether cut computations have read it, as it is: what read it under torch.no_grad() has no graph for what comes later."""
    version, read, *_ = x.__dict__.get("_read", (None, x))
    with torch._C.DisableTorchFunctionSubclass():
        same_graph = not torch.is_grad_enabled() or read.requires_grad == x.requires_grad
        return hasattr(x, "_is_entered") or (same_graph and version == version_of(x))


def first_by(x: Tensor, weight: Tensor) -> bool:
    """Whether the product with this weight is the first to read x: now, or when it ran before a recomputation."""
    return not was_read(x) or x.__dict__.get("_read", (None, None, 0))[2] == id(weight)


def read_of(x: Tensor) -> Tensor:
    """What was read of a tensor that `was_read`."""
    return x._read[1]  # type: ignore[attr-defined]


def keep_read(x: Tensor, read: Tensor, *, is_cut: bool, by: int = 0) -> Tensor:
    """Remember what was read of x (which is cut, or whole), of which the gradient is a part of a sum."""
    if is_cut:
        read._is_entered = True  # type: ignore[attr-defined]
    x._read = (version_of(x), read, by)  # type: ignore[attr-defined]
    _readers[id(x)] = x
    return read


def forget() -> None:
    """Let go of what was read of tensors whose backward is over, or will not be."""
    for x in list(_readers.values()):
        x.__dict__.pop("_read", None)
    _readers.clear()
