"""A model of which a rank has parts, asked for its whole state: state_dict() would be those parts, or NaN, without a word."""

from __future__ import annotations

from typing import Any

from torch import nn

from soli.core.errors import SoliError
from soli.core.plan import Plan


def guard(model: nn.Module, plan: Plan) -> None:
    """Let state_dict() and load_state_dict() of a model that lies on the ranks, and of its modules, say so where weights are not whole.

    With keep_vars=True, which asks for the parameters themselves, nothing is said.
    """
    for module in model.modules() if plan.tp > 1 or plan.pp > 1 or plan.zero == 3 else ():
        module.register_state_dict_pre_hook(_asked)
        module.register_load_state_dict_pre_hook(_given)


def _asked(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        raise SoliError(
            "state_dict() of a model that lies on several ranks is of this rank's part of it",
            got=type(module).__name__,
            fix="engine.global_state_dict() has it whole, engine.copy_model() is a plain model (every rank calls them, one writes the file); "
            "engine.save(path) writes a checkpoint",
        )


def _given(module: nn.Module, *_: Any) -> None:
    raise SoliError(
        "load_state_dict() of a model that lies on several ranks would have to be given this rank's part of it",
        got=type(module).__name__,
        fix="load it before soli.parallelize, or a checkpoint by engine.load(path)",
    )
