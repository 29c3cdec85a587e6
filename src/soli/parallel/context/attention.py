"""The rule of scaled dot product attention where the sequence is cut: by ring, by Ulysses, or by its scores.

    ring      keys and values travel; a rank's queries meet all of them (ring.py)
    ulysses   a rank gets all positions of some heads (ulysses.py)
    scores    a rank's rows of scores are written out; any bias, with its gradient (scores.py)

Legend: h heads, l queries, s keys, e size of a head
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soli.parallel.context import ring, scores, ulysses
from soli.parallel.randomness import weights_of
from soli.parallel.tensor.cut import Run, cut, deeper, marked, part_of, plain, shape_of, split_of, whole
from soli.parallel.tensor.split import Misfit, Spans, Split


def attention(run: Run, given: dict[str, Any]) -> Tensor | None:
    """q [.., h, l, e], k and v [.., g, s, e], mask [.., l, s]. None where the sequence is not what is cut."""
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    found = split_of(q)
    if found is None or found.dim != q.dim() - 2 or q.dim() < 3:
        return None
    if given.get("dropout_p", 0.0):
        raise Misfit(frozenset(), "attention with dropout in one kernel")
    causal, scale = given.get("is_causal", False), given.get("scale")
    along = [split_of(x) is not None and split_of(x).dim == x.dim() - 2 for x in (k, v)]  # type: ignore[union-attr]
    if not all(along) or not split_of(k).fits(split_of(v)):  # type: ignore[union-attr, arg-type]
        k, v = whole(run, k), whole(run, v)
    learned = mask is not None and mask.requires_grad  # alike on every rank, as that of its rows may not be without gradients
    mask = _own_rows(run, mask, found, shape_of(k)[-2])
    of_k = split_of(k)
    q, k, v = plain(q), plain(k), plain(v)
    if of_k is None:
        return cut(_alone(q, k, v, mask, found, run, causal, scale, given.get("enable_gqa", False)), found)
    queries, keys = _spans(run, found), _spans(run, of_k)
    if run.context == "scores" or learned:
        result = _written_out(run, q, k, v, mask, queries, keys, causal, scale)
    elif run.context == "ulysses":
        result = _by_heads(run, q, k, v, mask, queries, keys, causal, scale)
    else:
        inner, outer = run.rings or (None, None)
        result = ring.attention(q, k, v, of_q=queries, of_k=keys, axis=run.axis, causal=causal, mask=mask, scale=scale, inner=inner, outer=outer)  # fmt: skip
    return cut(result, found)


def product(run: Run, a: Tensor, b: Tensor) -> Tensor | None:
    """a @ b of attention that is written out: queries with keys, or rows of scores with values. None: it is neither."""
    rows, other, dims = split_of(a), split_of(b), len(shape_of(a))
    if rows is None or other is None or dims < 3 or len(shape_of(b)) != dims or rows.dim != dims - 2:
        return None
    if shape_of(a)[:-2] != shape_of(b)[:-2] or other.dim < dims - 2 or deeper(a) != deeper(b):
        return None
    below, spans = deeper(a), _spans(run, other)
    with torch._C.DisableTorchFunctionSubclass():
        if other.dim == dims - 1:
            result = scores.ring_qk(plain(a), plain(b).mT, spans, run.axis)
        else:
            result = scores.ring_av(plain(a), plain(b), spans, run.axis)
    return cut(marked(result, below), rows)


def _spans(run: Run, split: Split) -> Spans:
    return tuple(tuple(split.own(run.axis.size, rank)) for rank in range(run.axis.size))


def _own_rows(run: Run, mask: Tensor | None, of_q: Split, keys: int) -> Tensor | None:
    """The rows of a mask that are this rank's queries, all keys."""
    if mask is None:
        return None
    rows, known = mask.dim() - 2, split_of(mask)
    if known is not None and not (known.dim == rows and known.fits(of_q.at(rows))):
        mask = whole(run, mask)
    if split_of(mask) is None and mask.shape[-2] != 1:
        mask = part_of(run, mask, of_q.at(rows))
    return mask.expand(*mask.shape[:-2], of_q.local(run.axis.size, run.axis.index), keys)


def _hidden(of_q: Spans, keys: int, rank: int, device: torch.device) -> Tensor:
    """[l, S]: the keys that come after this rank's queries."""
    places = torch.cat([torch.arange(a, b, device=device) for a, b in of_q[rank]] or [torch.arange(0)])
    return torch.arange(keys, device=device) > places.unsqueeze(1)


def _alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, of_q: Split, run: Run, causal: bool, scale: float | None, grouped: bool) -> Tensor:  # fmt: skip
    """Of keys that every rank has."""
    if causal:
        seen = ~_hidden(_spans(run, of_q), k.shape[-2], run.axis.index, q.device)
        mask = seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, scale=scale, enable_gqa=grouped)


def _by_heads(run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, of_q: Spans, of_k: Spans, causal: bool, scale: float | None) -> Tensor:  # fmt: skip
    axis, h, g = run.axis, q.shape[-3], k.shape[-3]
    of_heads, of_groups = ulysses.shared_heads(h, g, axis.size)
    first, last = of_heads[axis.index]
    q = ulysses.to_heads(q, of_heads, of_q, axis)
    k, v = (ulysses.to_heads(x, of_groups, of_k, axis) for x in (k, v))
    if k.shape[-3] != last - first:
        reads = torch.arange(first, last, device=q.device) // (h // g) - of_groups[axis.index][0]
        k, v = k.index_select(k.dim() - 3, reads), v.index_select(v.dim() - 3, reads)
    if mask is not None:
        rows = mask.unsqueeze(-3) if mask.dim() == 2 else mask
        mask = ulysses.to_heads(rows, ([(0, rows.shape[-3])] * axis.size) if rows.shape[-3] == 1 else of_heads, of_q, axis)
    if 0 in q.shape:
        result = q.new_zeros((*q.shape[:-1], v.shape[-1])) + 0 * (q.sum() + k.sum() + v.sum())
    else:
        result = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)
    return ulysses.to_rows(result, of_heads, of_q, axis)


def _written_out(
    run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, of_q: Spans, of_k: Spans, causal: bool,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Ring self-attention (arXiv 2105.13120): whole rows of scores, so that whatever is added has its gradient."""
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    found = scores.ring_qk(q * (scale if scale is not None else 1 / math.sqrt(q.shape[-1])), k, of_k, run.axis)
    if causal:
        found = found.masked_fill(_hidden(of_q, found.shape[-1], run.axis.index, q.device), -math.inf)
    return scores.ring_av(weights_of(found, mask), v, of_k, run.axis)
