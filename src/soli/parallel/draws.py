"""Numbers that a model draws itself (layer drop, stochastic depth, jitter): torch's own calls, answered by rows (randomness.py)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from soli.parallel.randomness import Randomness

COINS = (torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_)
WRITE = {getattr(Tensor, name): name for name in ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_")}
INITS = {nn.init.uniform_: "uniform_", nn.init.normal_: "normal_"}
SLOPES = (F.rrelu, torch.rrelu, torch.rrelu_)
CHOICES = (torch.multinomial, Tensor.multinomial)
SELUS = (F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)
LOWEST = -1.7580993408473766
"""Of SELU (Klambauer et al. 2017, arXiv 1706.02515)."""
FILLS = {
    **dict.fromkeys((torch.rand, torch.rand_like, *COINS, *SLOPES), "uniform_"),
    **dict.fromkeys((torch.randn, torch.randn_like, torch.normal), "normal_"),
    **{**WRITE, **INITS, **dict.fromkeys((F.gumbel_softmax, *CHOICES), "exponential_")},
    **dict.fromkeys((torch.randint, torch.randint_like), "random_"),
    **dict.fromkeys(SELUS, "bernoulli_"),
}
"""Calls that draw, and how a tensor is filled with what they draw; a coin is a number below p."""


def answered(randomness: Randomness, func: Any, args: Any, options: dict[str, Any]) -> Tensor:
    """torch.rand(2, 3, dtype=...), torch.rand_like(x), x.uniform_(-1, 1), the same of normal numbers, and what is made of either."""
    options.pop("generator", None)
    how = FILLS[func]
    if begins := func in INITS:  # torch records nothing of it; torch names all that it is given, in the order of the method's
        args, options, func = (*args, *options.values()), {}, getattr(Tensor, how)
    if func in WRITE:
        x: Tensor = args[0]
        with torch.no_grad() if begins else nullcontext():
            drawn = randomness.drawn(x, tuple(x.shape), how, *args[1:], **options)
            return randomness.followed(x.copy_(drawn), drawn)
    if func in MADE:
        return MADE[func](randomness, func, *args, **options)
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
    heads = randomness.drawn(torch.empty((), dtype=wide, device=x.device), tuple(x.shape), "uniform_", beside=x) < p
    return x.copy_(heads) if func is Tensor.bernoulli_ else heads.to(x.dtype)


def _shifted(randomness: Randomness, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    """torch.normal. Its tensors get no gradients but zeros."""
    both = mean + std if size is None else torch.zeros(size, **options)
    drawn = (mean + std * randomness.drawn(both, tuple(both.shape), "normal_", beside=both)).detach()
    return torch.where(torch.ones_like(drawn, dtype=torch.bool), drawn, both) if both.requires_grad else drawn


def _relaxed(randomness: Randomness, func: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """F.gumbel_softmax, whose eps torch does not use either (Jang et al. 2017, arXiv 1611.01144)."""
    noise = randomness.drawn(logits, tuple(logits.shape), "exponential_", beside=logits).log()
    soft = ((logits - noise) / tau).softmax(dim)
    chosen = soft.argmax(dim, keepdim=True)
    return torch.zeros_like(logits).scatter(dim, chosen, 1.0) - soft.detach() + soft if hard else soft


def _whole(randomness: Randomness, func: Any, *args: Any, **options: Any) -> Tensor:
    """torch.randint(low=0, high, size), torch.randint_like(x, low=0, high)."""
    given = [*args, *(options.pop(name) for name in ("input", "low", "high", "size") if name in options)]
    beside = given.pop(0) if func is torch.randint_like else None
    x = beside if beside is not None else torch.empty(given.pop(), dtype=torch.int64, device=options.get("device"))
    like = torch.empty((), dtype=options.get("dtype") or x.dtype, device=options.get("device") or x.device)
    ends = (0, *map(int, given))[-2:]
    return randomness.drawn(like, tuple(x.shape), "random_", *ends, beside=beside).requires_grad_(options.get("requires_grad", False))


def _chosen(randomness: Randomness, func: Any, input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """torch.multinomial. With replacement by where uniform numbers lie in the sums of weights; without, those that are the largest over
    exponential numbers (as torch has it)."""
    if type(input) in (Tensor, nn.Parameter) and not input.is_meta:
        func(input, num_samples, replacement, generator=torch.Generator(input.device))  # its errors: weights below 0, too few of them
    if input.dim() == 1 and num_samples == len(input) and not replacement:
        randomness.refuse("torch.multinomial, of all there are, which is an order of them")
    weights = input.detach()
    if replacement:
        sums, like = weights.double().cumsum(-1), torch.empty((), dtype=torch.float64, device=input.device)
        numbers = randomness.drawn(like, (*input.shape[:-1], num_samples), "uniform_", beside=weights)
        return torch.searchsorted(sums, numbers * sums[..., -1:], right=True).clamp(max=input.shape[-1] - 1)
    return (weights / randomness.drawn(input, tuple(input.shape), "exponential_", beside=weights)).topk(num_samples).indices


def _sloped(randomness: Randomness, func: Any, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Tensor:
    """F.rrelu: each number below 0 by a slope of its own."""
    slopes = randomness.drawn(input, tuple(input.shape), "uniform_", lower, upper, beside=input) if training else (lower + upper) / 2
    result = torch.where(input > 0, input, input * slopes)
    return input.copy_(result) if inplace or func is torch.rrelu_ else result


def _lowered(randomness: Randomness, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False, **more: bool) -> Tensor:
    """F.alpha_dropout, and that of channels: what is dropped has SELU's lowest value, and mean and variance are as before."""
    if not more.get("train", training) or p == 0:
        return input
    alike = input.dim() - 2 if "feature" in func.__name__ else 0
    shape = (*input.shape[: input.dim() - alike], *(1,) * alike)
    kept = randomness.drawn(input, shape, "bernoulli_", 1 - p, beside=input)
    result = (input * kept + LOWEST * (1 - p - kept)) * (((1 - p) * (1 + p * LOWEST**2)) ** -0.5 if p < 1 else 0.0)
    return input.copy_(result) if inplace else result


MADE: dict[Any, Any] = {
    **dict.fromkeys(SLOPES, _sloped), **dict.fromkeys(SELUS, _lowered), **dict.fromkeys(CHOICES, _chosen),
    **dict.fromkeys((torch.randint, torch.randint_like), _whole), F.gumbel_softmax: _relaxed, torch.normal: _shifted,
}  # fmt: skip
"""What is made of numbers that are drawn."""


def _truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None) -> Tensor:
    """What nn.init.trunc_normal_ draws, in one draw. torch's draws until all numbers fit, and how often that is follows the numbers."""
    ends = (math.erf((end - mean) / std / math.sqrt(2)) for end in (a, b))
    with torch.no_grad():
        return tensor.uniform_(*ends, generator=generator).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


def truncating() -> Any:
    """A context around what draws by rows."""
    return patch.object(nn.init, "_no_grad_trunc_normal_", _truncated)
