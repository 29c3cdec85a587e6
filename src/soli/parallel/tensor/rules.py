"""Which rule answers which function of torch: by its name, which `torch`, `Tensor` and `F` share."""

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from soli.core.functions import name_of
from soli.parallel.tensor import attention, losses, pointwise, products, shapes
from soli.parallel.tensor.cut import Rule, Run, blamed, body, shape_of
from soli.parallel.tensor.pointwise import NAMES
from soli.parallel.tensor.split import Misfit


def _as_torch(rule: Callable[..., Any]) -> Rule:
    """Of a rule whose arguments are those of torch's function, by place or by name."""

    def answer(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs.get("out") is not None:
            raise Misfit(blamed(args), "a tensor to write to")
        return rule(run, *args, **{NAMES["of_numpy"].get(name, name): value for name, value in kwargs.items() if name != "out"})

    return answer


ALWAYS: dict[str, Rule] = {
    "linear": products.linear, "matmul": products.matmul, "__matmul__": products.matmul,
    "__rmatmul__": products.matmul, "mm": products.matmul, "bmm": products.matmul, "addmm": _as_torch(products.conv1d),
    "baddbmm": _as_torch(products.baddbmm), "einsum": products.einsum, "embedding": products.embedding,
}  # fmt: skip
"""Rules that also see parameters whose layout is still to be chosen."""

GRID_READS = frozenset(NAMES["grid"])
"""Functions that may read a weight that a grid has cut both ways."""


def _size(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    shape = shape_of(args[0])
    return torch.Size(shape) if dim is None else shape[dim]


def local(run: Run, func: Any, args: tuple, kwargs: dict) -> Any:
    return func(*args, **kwargs)


def _lines(func: types.FunctionType) -> types.FunctionType:
    """A copy that does not ask again who answers it. Nor do helpers of it, and what it chooses among: they ask in its name."""
    names = {n: (lambda *_: False) if n.startswith("has_torch_function") else x for n, x in func.__globals__.items()}
    for name, value in func.__globals__.items():
        if name.startswith("_") and getattr(value, "__globals__", None) is func.__globals__:
            names[name] = _with(value, names, value.__closure__)
    renewed = lambda cell: types.CellType(_lines(cell.cell_contents)) if written_in_python(cell.cell_contents) else cell
    return _with(func, names, tuple(map(renewed, func.__closure__ or ())))


def _with(func: Any, names: dict[str, Any], cells: tuple[Any, ...] | None) -> types.FunctionType:
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, cells or None)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


AS_TORCH: dict[str, Callable[..., Any]] = {
    "flatten": shapes.flatten, "unflatten": shapes.unflatten, "squeeze": shapes.squeeze, "unsqueeze": shapes.unsqueeze,
    "movedim": shapes.movedim, "moveaxis": shapes.movedim, "repeat_interleave": shapes.repeat_interleave,
    "narrow": shapes.narrow, "unbind": shapes.unbind, "select": shapes.select, "logsumexp": losses.logsumexp,
}  # fmt: skip
CUT: dict[str, Rule] = {
    **{n: _as_torch(rule) for n, rule in AS_TORCH.items()},
    **{n: shapes.view for n in ("view", "reshape", "_unsafe_view")},
    **{n: shapes.view_as for n in ("view_as", "reshape_as")},
    "permute": shapes.permute, **{n: shapes.transpose for n in ("transpose", "swapaxes", "swapdims", "t")},
    **{n: shapes.expand for n in ("expand", "expand_as")}, "repeat": shapes.repeat,
    **{n: shapes.pieces for n in ("split", "split_with_sizes", "chunk")}, "__getitem__": shapes.getitem, "cat": shapes.cat,
    "concat": shapes.cat, "concatenate": shapes.cat, "stack": shapes.stack,
    "__iter__": lambda run, func, args, kwargs: iter(shapes.unbind(run, *args)),
    **dict.fromkeys(NAMES["reductions"], pointwise.reduction), **dict.fromkeys(NAMES["along"], pointwise.along),
    **dict.fromkeys(NAMES["losses"], losses.elementwise_loss), **dict.fromkeys(NAMES["whole"], shapes.gathered),
    **dict.fromkeys(NAMES["local"], local), "softmax": losses.softmax, "log_softmax": losses.softmax,
    "cross_entropy": losses.cross_entropy, "nll_loss": losses.nll_loss,
    "where": pointwise.where, "gather": losses.gather, "take_along_dim": losses.gather,
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), losses.scatter), "layer_norm": attention.layer_norm,
    "rms_norm": attention.layer_norm, "scaled_dot_product_attention": attention.attention, "size": _size,
    **dict.fromkeys(("to", "type_as"), pointwise.cast), "__len__": lambda run, func, args, kwargs: shape_of(args[0])[0],
    **dict.fromkeys(("numel", "nelement"), lambda run, func, args, kwargs: torch.Size(shape_of(args[0])).numel()),
    # shapes that are asked for are logical, the result is whole
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"), local),
}  # fmt: skip

GETTERS: dict[str, Rule] = {
    "shape": _size, **dict.fromkeys(("T", "mT"), shapes.transpose), "data": pointwise.cast,
    **dict.fromkeys(NAMES["attributes"], local),
}  # fmt: skip


def placed(name: str, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of which a program names all, as torch.sum(input=x): rules have the first by its place, but that of torch.where."""
    first = kwargs.keys() & {"input", "tensors", "tensor"} if name in CUT and name != "where" else ()
    return tuple(kwargs[n] for n in first), {n: x for n, x in kwargs.items() if n not in first}


def is_of_one_way(func: Any, name: str) -> bool:
    """Whether a function may not read a weight that a grid has cut both ways."""
    shown = name == "__get__" and name_of(func) in ("data", "T", "mT")
    return shown or (name not in GRID_READS and not written_in_python(func))


def written_in_python(func: Any) -> bool:
    """Whether torch wrote it in Python, of functions that have no rule of their own."""
    return isinstance(func, types.FunctionType) and func.__module__.startswith("torch") and func.__name__ not in CUT


@cache
def rule_of(func: Any, name: str) -> Rule | None:
    """The rule for a function that was called with a cut tensor; None: there is none."""
    if name == "__get__":
        return GETTERS.get(name_of(func))
    if name in ("__set__", "__delete__"):
        return local
    if name in CUT:
        return CUT[name]
    if pointwise.is_pointwise(name):
        return pointwise.pointwise
    # of a function that torch writes in Python its own lines, on cut tensors
    return (lambda _, func, args, kwargs: body(_lines(func), args, kwargs)) if written_in_python(func) else None
