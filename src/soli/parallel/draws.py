"""Numbers that a model draws itself (layer drop, stochastic depth, jitter): torch's own calls, answered by rows (randomness.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from soli.parallel.randomness import Randomness

COINS = (torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_)
FILLS = {
    **dict.fromkeys((torch.rand, torch.rand_like, Tensor.uniform_, *COINS), "uniform_"),
    **dict.fromkeys((torch.randn, torch.randn_like, Tensor.normal_), "normal_"),
}
"""Calls that draw, and how a tensor is filled with what they draw; a coin is a number below p."""


def answered(randomness: Randomness, func: Any, args: Any, options: dict[str, Any]) -> Tensor:
    """torch.rand(2, 3, dtype=...), torch.rand_like(x), x.uniform_(-1, 1), the same of normal numbers, and x.bernoulli_(p)."""
    options.pop("generator", None)
    how = FILLS[func]
    if func in (Tensor.uniform_, Tensor.normal_):
        names = ("from", "to") if how == "uniform_" else ("mean", "std")
        given = dict(zip(names, args[1:], strict=False)) | options
        parameters = [given.get(name, default) for name, default in zip(names, (0.0, 1.0), strict=True)]
        x: Tensor = args[0]
        return x.copy_(randomness.drawn(x, tuple(x.shape), how, *parameters))
    gradient = options.pop("requires_grad", False)
    if func in (torch.rand_like, torch.randn_like, *COINS):
        x = args[0] if args else options.pop("input")
        like = torch.empty((), dtype=options.get("dtype") or x.dtype, device=options.get("device") or x.device)
        if func in COINS:
            return _tossed(randomness, func, x, args[1] if len(args) > 1 else options.get("p"))
        return randomness.drawn(like, tuple(x.shape), how, beside=x).requires_grad_(gradient)
    size = options.pop("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
    like = torch.empty((), **{k: v for k, v in options.items() if k in ("dtype", "device")})
    return randomness.drawn(like, tuple(size), how).requires_grad_(gradient)


def _tossed(randomness: Randomness, func: Any, x: Tensor, p: Any) -> Tensor:
    """Ones with probability p, which x has where nobody says it, and zeros."""
    if p is None:
        p = 0.5 if func is Tensor.bernoulli_ else x
    wide = x.dtype if x.dtype == torch.float64 else torch.float32  # 16 bits have too few numbers below 1
    like = torch.empty((), dtype=wide, device=x.device)
    heads = randomness.drawn(like, tuple(x.shape), "uniform_", beside=x) < p
    return x.copy_(heads) if func is Tensor.bernoulli_ else heads.to(x.dtype)
