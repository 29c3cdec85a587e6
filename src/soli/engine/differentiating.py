"""Models that take gradients in their forward: forces of an energy, penalties of a gradient."""

import sys
from contextlib import AbstractContextManager, nullcontext
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from soli.core.errors import on_all_ranks
from soli.core.plan import SPLIT_BACKWARD, Plan


class Differentiating(TorchFunctionMode):
    """Around a forward. Raises SoliError where it differentiates and a plan has not all that backward needs on a rank."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = _caller(sys._getframe(1)) if func is torch.autograd.grad else "soli"
        if _transformed() or caller != "soli":
            self._check(own_graph=caller in ("soli", "torch.func"))
        if func is torch.Tensor.register_hook and self.plan.pp > 1 and self.plan.schedule in SPLIT_BACKWARD:
            what = "a hook on a tensor of the forward would run twice where a schedule takes the backward of inputs and of weights apart"
            raise on_all_ranks(what, got=str(self.plan), allowed="schedule=gpipe, 1f1b, interleaved")
        return func(*args, **(kwargs or {}))

    def _check(self, own_graph: bool) -> None:
        if self.plan.model_ranks > 1 or self.plan.zero == 3:
            what = "the forward or its loss takes gradients itself (torch.autograd.grad, torch.func), and each rank has a part of what they go through"
            raise on_all_ranks(what, got=str(self.plan), allowed="data parallelism with zero=0, 1 or 2")
        if not own_graph and not torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:  # a backward has a graph, and no mode
            what = "the forward takes gradients itself (torch.autograd.grad), and in evaluation and in the first step's checks there is no graph to take them of"
            raise on_all_ranks(what, fix="compute what is differentiated, and the gradients, under torch.enable_grad()")


def looking(plan: Plan, steps: int) -> AbstractContextManager[object]:
    """Around a forward after so many steps: the first one with gradients may show what the checks, without, did not see."""
    return Differentiating(plan) if steps == 0 and torch.is_grad_enabled() else nullcontext()


def _transformed() -> bool:
    """Whether torch.func differentiates what is computed now."""
    kinds = torch._C._functorch.TransformType
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in (kinds.Grad, kinds.Jvp) for level in levels)


def _caller(inner: FrameType) -> str:
    """The package whose code calls torch's; of torch.func's own calls torch.func."""
    for frame, _ in walk_stack(inner):
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("torch._functorch"):
            return "torch.func"
        if name.split(".")[0] != "torch" and frame.f_code.co_name != "__torch_function__":
            return name.split(".")[0]
    return ""
