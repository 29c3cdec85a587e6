"""3D tensor parallelism in a model (arXiv 2105.14450): which of the cube's axes cut what, before and after a product.

    x[T_A, K_B]   tokens (dim 0) over one axis of the grid, hidden sizes over the other: row and tp, in turn
    W[N_AD, K_B]  n over the axis of the tokens, k over the other, and n once more over depth
    y[T_B, N_A]   the axes have changed places; the next product changes them back

`depth` is an axis of data: its ranks have other rows of the batch. Over row and tp every rank has the same rows, and
takes its part of them where a table is looked up or a product needs it.
"""

from typing import Any

import torch
from torch import Tensor

from soli.core.axes import DEPTH, ROW, TP
from soli.parallel.tensor import cube, moves
from soli.parallel.tensor.cut import Cut, CutParameter, Run, cut, inside, marked, part_of, plain, whole_at
from soli.parallel.tensor.products import OF_LOOKUPS, looked_up
from soli.parallel.tensor.split import Misfit, Split

PRODUCTS = {"linear", "addmm", "mm", "matmul", "__matmul__", "embedding"}


def product(levels: tuple[Run, ...], func: Any, name: str, args: tuple, kwargs: dict) -> Tensor | None:
    """A product with a weight that the cube has cut, or a lookup in one. None: it reads no such weight."""
    if not any(_is_cubes(x) for x in (*args, *kwargs.values())):
        return None
    if name == "embedding":
        return _lookup(levels, args, kwargs)
    if name == "linear":
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        x, weight, bias, dim = given["input"], given["weight"], given.get("bias"), 0
    elif name == "addmm":
        given = dict(zip(("input", "mat1", "mat2"), args, strict=False)) | kwargs
        x, weight, bias, dim = given["mat1"], given["mat2"], given["input"], 1
    else:
        (x, weight), bias, dim = (*args, *kwargs.values()), None, 1
    if not _is_cubes(weight) or _is_cubes(x) or weight.cuts[DEPTH].dim != dim:
        raise Misfit(frozenset(), f"{name} reads a weight of the cube otherwise than on the first batch")
    result = _multiplied(levels, x, weight, dim)
    if bias is None:
        return result
    with torch._C._EnableTorchFunction():
        return result + bias


def _is_cubes(x: Any) -> bool:
    return type(x) is CutParameter and DEPTH in x.cuts


def _multiplied(levels: tuple[Run, ...], x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """`dim`: the weight's that is n."""
    axes, cuts = levels[-1].cube, weight.cuts  # type: ignore[attr-defined]
    assert axes is not None, "a level of 3D has the cube's axes"
    of_n, of_k = (TP, ROW) if cuts[TP].dim == dim else (ROW, TP)
    last, tokens = x.dim() - 1, _tokens(x)
    x = _arranged(levels, x, {of_k: cuts[of_k].at(last), of_n: tokens})
    y = cube.linear(
        plain(x), weight.t() if dim else weight, tokens_in=tokens, tokens_out=tokens, gather=axes[of_n],
        scatter=axes[of_k], depth=axes[DEPTH], of_w=cuts[DEPTH].at(0),
    )  # fmt: skip
    others = {name: split for name, split in x.cuts.items() if name not in (ROW, TP)}  # type: ignore[attr-defined]
    return marked(y, {**others, of_k: tokens, of_n: cuts[of_n].at(last)})


def _tokens(x: Tensor) -> Split:
    """How dim 0 is cut, or may be."""
    for name in (ROW, TP):
        split = x.cuts.get(name) if type(x) is Cut else None
        if split is not None and split.dim == 0:
            return split
    size = x.shape[0]  # what cp, which is outside, has left
    return Split(0, (size,), size)


def _arranged(levels: tuple[Run, ...], x: Tensor, wanted: dict[str, Split]) -> Tensor:
    """x cut over row and tp as it is wanted, whatever cut it so far."""
    fits = lambda found, split: found.dim == split.dim and found.fits(split)
    for level in reversed(range(len(levels))):
        name = levels[level].axis.name
        if name in wanted and type(x) is Cut and name in x.cuts and not fits(x.cuts[name], wanted[name]):
            x = whole_at(x, level)
    for level, run in enumerate(levels):
        name = run.axis.name
        if name not in wanted or (type(x) is Cut and name in x.cuts):
            continue
        before = {run.axis.name for run in levels[:level]}
        outer = {n: s for n, s in (x.cuts.items() if type(x) is Cut else ()) if n in before}
        with inside(levels, level):
            x = cut(part_of(run, x, wanted[name]), wanted[name])
        x = marked(x, {**outer, **x.cuts})  # type: ignore[attr-defined]
    return x


def _lookup(levels: tuple[Run, ...], args: tuple, kwargs: dict) -> Tensor:
    """F.embedding: indices [T, ..], a table [V_TP+D, H_ROW] -> [T_TP, .., H_ROW]."""
    given = dict(zip(OF_LOOKUPS, args, strict=False)) | kwargs
    indices, weight, axes = given["input"], given["weight"], levels[-1].cube
    if axes is None or given.get("max_norm") or given.get("scale_grad_by_freq") or given.get("sparse"):
        raise Misfit(frozenset(), "an embedding with max_norm, scale_grad_by_freq or sparse")
    for level in reversed(range(len(levels))):
        if type(indices) is Cut and levels[level].axis.name in indices.cuts and levels[level].cube is not None:
            indices = whole_at(indices, level)
    words, hidden = weight.cuts[TP], weight.cuts[ROW]
    table = moves.share(weight, weight.cuts[DEPTH], axes[DEPTH])
    (own,) = words.own(axes[TP].size, axes[TP].index)
    rows = looked_up(plain(indices), table, own, words.size, given.get("padding_idx"))
    tokens = Split(0, (rows.shape[0],), rows.shape[0])
    others = indices.cuts if type(indices) is Cut else {}
    return marked(moves.scatter(rows, tokens, axes[TP]), {**others, TP: tokens, ROW: hidden.at(rows.dim() - 1)})
