"""What `p.grad` is between forward_backward() and update(): soli has the gradients in buffers of its own, and a program that clips,
scales or reads them there would do nothing, without a word, where it found None."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from soli.core.errors import SoliError, listed, on_all_ranks
from soli.core.functions import name_of


class _Withheld(Tensor):
    """In a gradient's place. No memory, whatever its shape, and no answers."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What autograd asks: a backward adds to the gradient that is there."""
        what = "a backward that is none of a step reached the parameters between forward_backward() and update()"
        fix = "let the loss function have all of the loss; differentiate engine.copy_model(), or take gradients of inputs alone: torch.autograd.grad(loss, x)"
        raise SoliError(what, got=str(func), fix=fix)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = "p.grad is not where soli keeps the gradients between forward_backward() and update()"
        allowed = "clip=, engine.gradient_norm(), engine.global_gradients() on all ranks, linear hooks of parameters"
        raise SoliError(what, got=name_of(func), allowed=allowed, fix="give clip= in place of clip_grad_norm_ (docs/porting.md)")


_FILLED = WeakSet[nn.Module]()


def fill(model: nn.Module, withheld: bool, left_out: bool = False) -> None:
    """Until update() or discard(); then gradients are what the next backward makes. `left_out`: the step is not taken, whatever a program put there."""
    with torch._C.DisableTorchFunctionSubclass():
        other = [name for name, param in model.named_parameters() if type(param.grad) is not _Withheld] if model in _FILLED else []
        if other and not withheld and not left_out:
            what = "p.grad was set between forward_backward() and update(), and is not where soli keeps the gradients"
            fix = "engine.discard() leaves a step out; a layer that rests for some steps has a group of its own, whose lr and weight_decay are 0 then"
            raise on_all_ranks(what, got=listed(other), fix=fix)
        (_FILLED.add if withheld else _FILLED.discard)(model)
        for param in model.parameters():
            param.grad = None
            if withheld:
                param.grad = Tensor._make_wrapper_subclass(_Withheld, param.shape, dtype=param.dtype, device=param.device)
