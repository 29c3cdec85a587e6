"""A model of which a rank has parts, asked for its whole state, written to a file, or called by itself: state_dict() would be those parts,
or NaN, without a word, and a call between steps would compute with them."""

from __future__ import annotations

from typing import Any, Never

from torch import nn

from soli.core.errors import SoliError
from soli.core.plan import Plan


def guard(model: nn.Module, plan: Plan) -> None:
    """Let state_dict() and load_state_dict() of a model that lies on the ranks, and of its modules, say so where weights are not whole.

    With keep_vars=True, which asks for the parameters themselves, nothing is said.
    """
    if plan.tp > 1 or plan.pp > 1 or plan.zero == 3:
        model.register_forward_pre_hook(OfParts())
        for module in model.modules():
            module.register_state_dict_pre_hook(_asked)
            module.register_load_state_dict_pre_hook(_given)


WHOLE = "engine.global_state_dict() has it whole, engine.copy_model() is a plain model (every rank calls them, one writes the file); engine.save(path) writes a checkpoint"


class OfParts:
    """Asked before each call of the model, and where it is written or copied with all that it has."""

    by_engine = False  # around a call of the model that the engine makes: True

    def __call__(self, module: nn.Module, _: Any) -> None:
        if not self.by_engine:
            what = "the model is called by itself, and each rank has a part of it"
            loss = "in a loss: let the forward of a module around it call it as often as the loss needs, and return all results"
            other = "engine.copy_model() is a plain model to sample, act or validate with (every rank calls it); engine.evaluate(batches) is a mean loss"
            raise SoliError(what, got=type(module).__name__, fix=f"{loss}; elsewhere {other}")

    def __reduce__(self) -> Never:
        raise SoliError("a model that lies on several ranks is written to a file, with this rank's part of it", fix=WHOLE)

    def __deepcopy__(self, memo: dict[int, Any]) -> OfParts:
        return self


def _asked(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        raise SoliError("state_dict() of a model that lies on several ranks is of this rank's part of it", got=type(module).__name__, fix=WHOLE)


def _given(module: nn.Module, *_: Any) -> None:
    what = "load_state_dict() of a model that lies on several ranks would have to be given this rank's part of it"
    raise SoliError(what, got=type(module).__name__, fix="load it before soli.parallelize, or a checkpoint by engine.load(path)")
