"""Hooks that a program has put on its parameters' gradients.

Under soli they see parts: of one rank's rows, of one microbatch, of the loss's sum and not its mean. What a linear hook
(a factor, a mask) does to the parts, it does to their sum. Any other would train something else, so it is refused. The gradient
of a weight that is cut is brought together for it: a mask, or the first rows, are of the whole one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.errors import Problem, listed, listing

SCALES = [2.0**-40, 2.0**-20, 1.0, 2.0**20, 2.0**40]
"""Of the gradients that hooks are tried with: limits and thresholds lie between two of them."""


@listing
def problems(model: nn.Module) -> Iterator[Problem]:
    """Parameters with hooks of the program's own that are not linear. They are called, with random gradients."""
    curved, after = [], []
    for name, param in model.named_parameters():
        if not all(_is_linear(hook, param) for hook in (param._backward_hooks or {}).values()):
            curved.append(name)
        later = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        if any(not str(hook.__module__).startswith("soli.") for hook in later.values()):
            after.append(name)
    if curved:
        what = "a hook on a gradient is not linear, and it would see the gradients of parts of a batch"
        allowed = "hooks that multiply by a constant, and that change nothing"
        fix = "limit gradients with clip=, or give these parameters a learning rate of their own"
        yield Problem(what, got=f"register_hook of {listed(curved)}", allowed=allowed, fix=fix)
    if after:
        got = f"register_post_accumulate_grad_hook of {listed(after)}"
        fix = "leave it out: soli reduces, clips and updates by itself (optimizer=, clip=)"
        yield Problem("a hook waits for a parameter's whole gradient, which no part of a batch has", got=got, fix=fix)


class _OfWhole:
    """A hook on a whole gradient, as one on this rank's part. It is the same one to whoever looks whether hooks have changed."""

    def __init__(self, hook: Callable[[Tensor], Any], whole: Callable[[Tensor], Tensor], part: Callable[[Tensor], Tensor]) -> None:
        self.hook, self.whole, self.part, self.__module__ = hook, whole, part, str(hook.__module__)

    def __call__(self, gradient: Tensor) -> Tensor:
        return self.part(_answer(self.hook, self.whole(gradient))).clone()

    def __eq__(self, other: object) -> bool:
        return bool(self.hook == getattr(other, "hook", other))


def see_whole(param: nn.Parameter, whole: Callable[[Tensor], Tensor], part: Callable[[Tensor], Tensor]) -> None:
    """Hand the hooks of a weight that is cut gradients that are whole. `whole`, `part`: of a gradient, from its part and back."""
    hooks: dict[int, Any] = param._backward_hooks or {}
    hooks |= {key: _OfWhole(hook, whole, part) for key, hook in hooks.items()}


def _answer(hook: Callable[[Tensor], Any], gradient: Tensor) -> Any:
    """What a hook makes of a gradient. One that returns nothing may have written into it."""
    result = hook(gradient)
    return gradient if result is None else result


def _is_linear(hook: Callable[[Tensor], Any], param: nn.Parameter) -> bool:
    """Whether hook(a + b) = hook(a) + hook(b), and the same of multiples, up to rounding."""
    generator, device = torch.Generator().manual_seed(0), "cpu" if param.is_meta else param.device
    drawn = lambda: torch.randn(param.shape, generator=generator, dtype=torch.float64).to(device, param.dtype)
    a, b = drawn(), drawn()
    rounding = torch.finfo(param.dtype).eps * max(8, param.numel())  # a hook may add all elements
    try:
        with torch.no_grad():
            results = [[_answer(hook, x * scale) for x in (a, b, a + b)] for scale in SCALES]
    except Exception:  # it asks for more than a gradient has: nothing is known of it
        return False
    if not all(isinstance(x, Tensor) and x.shape == param.shape for found in results for x in found):
        return False
    unscaled = [[x / scale for x in found] for scale, found in zip(SCALES, results, strict=True)]
    first, second, _ = unscaled[0]
    wanted = [first, second, first + second]
    largest = max(float(x.abs().max()) for found in [[a, b], *unscaled] for x in found)
    pairs = ((x, y) for found in unscaled for x, y in zip(found, wanted, strict=True))
    return all(float((x - y).abs().max()) <= rounding * largest for x, y in pairs)
