"""Rules of products: linear, matmul, addmm, einsum and their kin, all as one contraction.

Dims are letters. With W [n, k] cut along n (a column) the output is cut along n; with x and W cut along k (a row)
every rank has a part of the sum, which is added up, or scattered along the sequence.

    Legend: b batch, s sequence, k summed, n new; any lower-case letter in an equation
"""

import string
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soli.core.axes import ROW
from soli.parallel.context import attention as context
from soli.parallel.tensor import cut as cutting
from soli.parallel.tensor import moves, overlap, summa
from soli.parallel.tensor.cut import Cut, CutParameter, Run, blamed, call, cut, shape_of, split_of
from soli.parallel.tensor.reads import first_by, keep_read, was_read
from soli.parallel.tensor.split import Misfit, Split, agreed, origins_of


def contraction(run: Run, inputs: list[Tensor], letters: list[str], out: str, compute: Callable[..., Tensor]) -> tuple[Tensor, Split | None, bool]:
    """The local result, how it is cut, and whether it is a part of a sum. `compute` takes the local inputs."""
    if run.finder is not None:
        run.finder.choose(inputs, letters, out)
    if run.hidden:
        cutting.refuse_grids(run, "a product", inputs)
    inputs = _one_letter(run, list(inputs), letters, out)
    cuts = [(word[s.dim], s) for x, word in zip(inputs, letters, strict=True) if (s := split_of(x))]
    if not cuts:
        return compute(*inputs), None, False
    letter, split = cuts[0][0], agreed([s for _, s in cuts], run.ranks)
    locals_ = []
    for x, word in zip(inputs, letters, strict=True):
        if split_of(x) is not None:
            locals_.append(x)
        elif letter in word:
            locals_.append(cutting.part_of(run, x, split.at(word.index(letter))))
        else:
            locals_.append(cutting.entered(run, x))
    result = compute(*locals_)
    if letter in out:
        return result, split.at(out.index(letter)), False
    return result, split, True


def _one_letter(run: Run, inputs: list[Tensor], letters: list[str], out: str) -> list[Tensor]:
    """Inputs cut along one letter at most: what is cut along the sequence gives way to a parameter's cut."""
    found = {word[s.dim] for x, word in zip(inputs, letters, strict=True) if (s := split_of(x))}
    if len(found) < 2:
        return inputs
    for i, x in reversed(list(enumerate(inputs))):  # of queries and keys, the keys
        split = split_of(x)
        if split is not None and not split.origins:
            if run.context:
                how = "attention written out, as with dropout"
                cutting.note(run, f"two parts of the sequence meet in a product ({how}): one is gathered")
            others = found - {letters[i][split.dim]}
            # Cut again along another dim, each rank's gradient is whole; read as it is, it is a part of a sum.
            inputs[i] = cutting.whole(run, x) if others & set(letters[i]) else cutting.shared(run, x)
            return _one_letter(run, inputs, letters, out)
    # A cut along the summed dim of one input alone gives way first: heads that are too few end there.
    cuts = [(word[s.dim], s) for x, word in zip(inputs, letters, strict=True) if (s := split_of(x))]
    blamed = [s for letter, s in cuts if letter not in out] or [s for _, s in cuts]
    raise Misfit(origins_of(blamed), "a product of tensors that are cut along different dims")


def finished(run: Run, result: Tensor, split: Split | None, partial: bool) -> Tensor:
    """A contraction's result as a cut or a whole tensor."""
    if not partial:
        return result if split is None else cut(result, split)
    if run.sequence and split is not None and (rows := _rows(run, result, split.lead)) is not None:
        return cut(cutting.across(moves.scatter, result, rows, run.axis), rows)
    return cutting.added(run, result, fresh=True)


def _rows(run: Run, x: Tensor, lead: tuple[int, ...]) -> Split | None:
    """The cut along the sequence of an output [.., s, n], or [b * s, n] of which `lead` = (b, s) is known.

    Rows that were chosen out of b * s are any number, none among them: they are cut as they come.
    """
    if x.dim() < 2:
        return None
    dim = x.dim() - 2
    size = x.shape[dim]
    parts = (lead[-1],) * (size // lead[-1]) if dim == 0 and lead and prod(lead) == size else (size,)
    return Split(dim, parts, parts[0]) if parts[0] >= run.ranks else None


def linear(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """F.linear: x [.., k], W [n, k], bias [n]. A column's bias is cut with it, a row's is added to the sum."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    return _with_bias(run, x, weight, bias, [string.ascii_lowercase[: len(shape_of(x)) - 1] + "k", "nk"], F.linear)


def _with_bias(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None, words: list[str], compute: Callable[..., Tensor]) -> Tensor:
    """x [.., k] with a weight whose dims are n and k in the order of its word. `compute` takes a bias too, or none."""
    out, of_weight = words[0].replace("k", "n"), words[1].index("n")
    if run.finder is not None:
        run.finder.choose([x, weight], words, out)
    if run.row is not None and ROW in getattr(weight, "cuts", {}):
        return _on_grid(run, x, weight, bias, of_weight)
    if (done := _overlapped(run, x, weight, bias, of_weight)) is not None:
        return done
    if bias is None or bias.dim() != 1 or _is_row(x, weight, 1 - of_weight):
        result = finished(run, *contraction(run, [x, weight], words, out, compute))
        if bias is not None and run.finder is not None:
            run.finder.choose_bias(bias, None)
        return result if bias is None else call(torch.add, result, bias)
    if run.finder is not None:
        column = split_of(weight)
        run.finder.choose_bias(bias, column.at(0) if column is not None else None)
    return finished(run, *contraction(run, [x, weight, bias], [*words, "n"], out, compute))


def _overlapped(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None, of_weight: int) -> Tensor | None:
    """The first column that reads x, where its backward can send and compute at once; None elsewhere."""
    split, rows = split_of(weight), split_of(x)
    if not (run.overlap and run.axis.size > 1 and torch.is_grad_enabled()):
        return None
    if split is None or split.dim != of_weight or (bias is not None and split_of(bias) is None):
        return None
    if type(weight) is not CutParameter or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return None  # a view made for this call has no identity by which a repeated forward knows it
    first = x.requires_grad and weight.requires_grad and type(x) in (Tensor, Cut) and first_by(x, weight)
    if not first or (rows is not None and (rows.origins or rows.dim == x.dim() - 1)):
        return None
    local = weight.t() if of_weight else weight
    read, result = overlap.entered(x, local, bias, run.axis) if rows is None else overlap.shared(x, local, bias, rows, run.axis)
    if not was_read(x):
        keep_read(x, read, is_cut=rows is not None, by=id(weight))
    return cut(result, split.at(result.dim() - 1))


def _on_grid(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None, of_weight: int) -> Tensor:
    """x [.., k] with a weight that a grid cuts along k over its rows, and along n over this level's axis.

    `of_weight`: which of the weight's dims is n.
    """
    split, rows = weight.cuts["tp"], weight.cuts[ROW]  # type: ignore[attr-defined]
    last, found = len(shape_of(x)) - 1, split_of(x)
    if split.dim != of_weight or (found is not None and found.dim != last):
        raise Misfit(origins_of(s for s in (split, found) if s), "a weight or its input is not cut along the summed dim", flat=True)
    local = weight.t() if of_weight else weight
    if run.finder is not None:
        run.finder.choose_bias(bias, split.at(0)) if bias is not None else None
        result = cut(F.linear(x, local), split.at(last))
    else:
        of_x = rows.at(last) if found is None else found
        x = cutting.part_of(run, x, of_x) if found is None else x
        assert run.row is not None, "the weight is cut over the rows of a grid"
        result = cut(summa.linear(cutting.plain(x), local, of_x, rows, run.row, run.axis), split.at(last))
    return result if bias is None else call(torch.add, result, bias)


def _is_row(x: Tensor, weight: Tensor, dim: int) -> bool:
    """Whether the sum is over a cut dim: of x its last, of the weight `dim`."""
    a, b = split_of(x), split_of(weight)
    return (a is not None and a.dim == x.dim() - 1) or (b is not None and b.dim == dim)


def conv1d(run: Run, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """torch.addmm: bias + x [m, k] @ W [k, n], as GPT-2's Conv1D has it."""
    if beta != 1 or alpha != 1:
        raise Misfit(blamed((input, mat1, mat2)), "addmm with factors")
    compute = lambda x, w, b=None: torch.mm(x, w) if b is None else torch.addmm(b, x, w)
    return _with_bias(run, mat1, mat2, input, ["mk", "kn"], compute)


def matmul(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """torch.matmul, mm, bmm and @ on [.., m, k] and [.., k, n]; leading dims broadcast."""
    if len(args) + len(kwargs) > 2:
        raise Misfit(blamed((*args, *kwargs.values())), "a tensor to write to, or a type of the result")
    a, b = (*args, *(kwargs[name] for name in ("input", "other", "mat2") if name in kwargs))
    if getattr(func, "__name__", "") == "__rmatmul__":
        a, b = b, a
    x, y = len(shape_of(a)), len(shape_of(b))
    lead = string.ascii_lowercase[: max(x, y, 2) - 2]
    words = [lead[len(lead) - (n - 2) :] + word if n > 1 else "k" for n, word in ((x, "mk"), (y, "kn"))]
    out = lead + "m" * (x > 1) + "n" * (y > 1)
    if run.row is not None:
        if run.finder is not None:
            run.finder.choose([a, b], words, out)
        if ROW in getattr(b, "cuts", {}):
            return _on_grid(run, a, b, None, of_weight=1)
    if run.context == "scores" and (done := context.product(run, a, b)) is not None:
        return done
    return finished(run, *contraction(run, [a, b], words, out, torch.matmul))


def baddbmm(run: Run, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """torch.baddbmm: beta * c + alpha * (a @ b) on [b, m, k] and [b, k, n]."""
    product = finished(run, *contraction(run, [batch1, batch2], ["bmk", "bkn"], "bmn", torch.bmm))
    product = call(torch.mul, product, alpha)
    return product if beta == 0 else call(torch.add, product, call(torch.mul, input, beta))


def einsum(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """torch.einsum with an equation; an ellipsis stands for the dims that are left."""
    equation, *inputs = args
    if len(inputs) == 1 and isinstance(inputs[0], list | tuple):
        inputs = list(inputs[0])
    words, out = _spelt(equation.replace(" ", ""), [len(shape_of(x)) for x in inputs])
    if any(len(set(word)) < len(word) for word in words):
        raise Misfit(blamed(inputs), "an einsum with a diagonal")
    text = ",".join(words) + "->" + out
    return finished(run, *contraction(run, inputs, words, out, lambda *xs: torch.einsum(text, *xs)))


def _spelt(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """The letters of each input and of the output, with the ellipsis and the output written out."""
    left, arrow, out = equation.partition("->")
    words = left.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    left_out = [d - len(w.replace("...", "")) if "..." in w else 0 for w, d in zip(words, dims, strict=True)]
    more = max(left_out)
    dots = "".join(free[:more])
    full = [w.replace("...", dots[more - n :]) for w, n in zip(words, left_out, strict=True)]
    if arrow:
        return full, out.replace("...", dots)
    once = sorted(c for c in set("".join(full)) if "".join(full).count(c) == 1 and c not in dots)
    return full, dots + "".join(once)


OF_LOOKUPS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""The arguments of F.embedding, in torch's order."""


def looked_up(indices: Tensor, weight: Tensor, own: tuple[int, int], size: int, pad: int | None) -> Tensor:
    """A rank's part of a lookup: of a vocabulary of `size` it has the words `own`; the others' rows are zero."""
    start, stop = own
    if indices.device.type == "cpu" and bool(((indices < 0) | (indices >= size)).any()):
        raise IndexError("index out of range in self")  # as torch says it; a device checks only its own rows
    mine = (indices >= start) & (indices < stop)
    if pad is not None:
        pad = pad + size if pad < 0 else pad
        pad = pad - start if start <= pad < stop else None
    if start == stop:
        return weight.new_zeros((*indices.shape, weight.shape[1])) + 0 * weight.sum()
    rows = F.embedding((indices - start).masked_fill(~mine, 0), weight, pad)
    return rows if stop - start == size else rows * mine.unsqueeze(-1).to(rows.dtype)


def embedding(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """F.embedding: indices [..], W [v, n] cut along the vocabulary: a rank looks up what it has, the rest is zero."""
    given = dict(zip(OF_LOOKUPS, args, strict=False)) | kwargs
    indices, weight = given["input"], given["weight"]
    if run.finder is not None:
        run.finder.choose_embedding(indices, weight)
    split, places = split_of(weight), split_of(indices)
    if places is not None:
        if split is not None:
            raise Misfit(places.origins, "indices that are cut")
        return cut(F.embedding(**{**given, "weight": cutting.entered(run, weight)}), places)
    if split is None:
        return func(*args, **kwargs)
    if given.get("max_norm") or given.get("scale_grad_by_freq") or given.get("sparse"):
        raise Misfit(split.origins, "an embedding with max_norm, scale_grad_by_freq or sparse")
    if split.dim == 1:
        result = F.embedding(indices, weight, given.get("padding_idx"))
        return cut(result, split.at(result.dim() - 1))
    (start, stop), *more = split.own(run.axis.size, run.axis.index)
    if more:
        raise Misfit(split.origins, "a vocabulary in parts")
    rows_of_grid = getattr(weight, "cuts", {}).get(ROW)
    if rows_of_grid is not None and run.row is not None:
        weight = moves.share(weight, rows_of_grid, run.row)
    rows = looked_up(indices, weight, (start, stop), split.size, given.get("padding_idx"))
    if rows_of_grid is not None:
        over = rows_of_grid.axis if run.finder is not None and run.finder.cube else ""
        hidden = replace(rows_of_grid.at(rows.dim() - 1), origins=split.origins, axis=over)
        return cut(moves.scatter(rows, hidden, run.axis), hidden)
    return finished(run, rows, replace(split, lead=()), True)
