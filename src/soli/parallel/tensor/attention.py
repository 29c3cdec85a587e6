"""Rules of norms and of scaled dot product attention."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from soli.parallel.context import attention as context
from soli.parallel.tensor import norms
from soli.parallel.tensor.cut import Run, cut, entered, part_of, shape_of, split_of, whole
from soli.parallel.tensor.split import Misfit, agreed, origins_of


def layer_norm(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """layer_norm, rms_norm: over the last dims, which are whole."""
    x, shape, *rest = args if len(args) > 1 else (args[0], kwargs.pop("normalized_shape"))
    split = split_of(x)
    if split is None:
        of_weight = next((s for p in (*rest, *kwargs.values()) if (s := split_of(p)) is not None), None)
        if of_weight is None:
            return func(*args, **kwargs)
        split = of_weight.at(x.dim() - 1)
        x = cut(part_of(run, x, split), split)
    if split.dim >= x.dim() - len(shape):
        if not run.hidden or len(shape) > 1:
            raise Misfit(split.origins, "a norm over the cut dim")
        return cut(norms.norm(run, getattr(func, "__name__", ""), x, split, rest, kwargs), split)
    enter = lambda p: entered(run, p) if isinstance(p, Tensor) else p
    return cut(func(x, shape, *(enter(p) for p in rest), **{k: enter(v) for k, v in kwargs.items()}), split)


def attention(run: Run, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """q [.., h, l, e], k and v [.., g, s, e], mask [.., l, s]: cut by heads h (and their groups g) or by rows of the batch."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    if run.context and (crossed := context.attention(run, given)) is not None:
        return crossed
    q, k, v = given["query"], given["key"], given["value"]
    mask, gqa = given.get("attn_mask"), given.get("enable_gqa", False)
    dims = q.dim()
    along_rows = lambda x: (s := split_of(x)) is not None and not s.origins and s.dim >= dims - 2
    q, k, v = (whole(run, x) if along_rows(x) else x for x in (q, k, v))
    splits = [s for x in (q, k, v) if (s := split_of(x))]
    if not splits:
        return func(*(whole(run, x) for x in args), **{n: whole(run, x) for n, x in kwargs.items()})
    inner = [s for s in splits if s.dim >= dims - 2]
    if inner or len({s.dim for s in splits}) > 1:
        raise Misfit(origins_of(inner or splits), "it cannot be cut inside a head: too few heads for the ranks")
    heads = splits[0].dim == dims - 3
    if gqa and heads and split_of(k) is None and split_of(v) is None:
        k, v = (x.repeat_interleave(shape_of(q)[-3] // x.shape[-3], -3) for x in (k, v))
        gqa = False
    split = agreed(splits, run.ranks)
    local = [x if split_of(x) is not None else part_of(run, x, _sized(split, x)) for x in (q, k, v)]
    known = split_of(mask)
    if mask is not None and known and not (known.dim + dims - mask.dim() == split.dim and known.fits(split)):
        mask, known = whole(run, mask), None
    if mask is not None and known is None:
        dim = split.dim + mask.dim() - dims
        mask = entered(run, mask) if dim < 0 else part_of(run, mask, split.at(dim))
    if 0 in local[0].shape:
        result = local[0].new_zeros((*local[0].shape[:-1], local[2].shape[-1])) + 0 * sum(x.sum() for x in local)
    else:
        more = {"dropout_p": given.get("dropout_p", 0.0), "is_causal": given.get("is_causal", False)}
        more |= {"attn_mask": mask, "scale": given.get("scale"), "enable_gqa": gqa}
        a, b, c = local
        result = F.scaled_dot_product_attention(a, b, c, **more)
    return cut(result, split if split_of(q) is not None else _sized(split, q))


def _sized(split: Any, x: Tensor) -> Any:
    """The cut at the same fractions of a tensor whose dim has another size (key heads and query heads)."""
    size = x.shape[split.dim]
    return split if size in (1, split.size) else split.sized(tuple(p * size // split.size for p in split.parts))
