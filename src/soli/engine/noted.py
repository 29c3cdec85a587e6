"""What is said beside an error that is not soli's: under which plan the program's own code raised it, and where it would run as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from soli.core.errors import SoliError
from soli.mesh.collectives import end

if TYPE_CHECKING:
    from soli.engine.engine import Engine

P = ParamSpec("P")
T = TypeVar("T")


def noted(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """Around a method of the engine that runs the model."""

    @functools.wraps(method)
    def call(engine: Engine, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(engine, *args, **kwargs)
        except SoliError as error:
            if error.lost and engine._plan is not None:  # nor are others to wait for this rank
                end(engine.mesh.every, str(error))
            raise
        except Exception as error:
            text = _note(engine)
            if text and "TorchScript" in str(error):
                text += " Functions of TorchScript (@torch.jit.script) compute out of sight of a plan: take the decorator off."
            if text and not any(note.startswith("soli:") for note in getattr(error, "__notes__", ())):
                error.add_note(text)
            raise

    return call


def _note(engine: Engine) -> str:
    """Nothing where the plan runs a model's code as it is, on tensors as they are."""
    if (plan := engine._plan) is None or (plan.model_ranks == 1 and plan.zero < 3 and plan.recompute == "none"):
        return ""
    ran = "" if plan.model_ranks == 1 or engine.parallel is None else " The plain model ran on rows of this batch before."
    cut = f"under plan {plan}.{ran} Under dp alone (dp=2: tensors of a batch are cut along dim 0 as its rows are, so what is no row's belongs into the model), "
    then = "with zero below 3, a model's code runs as it is: if this does not come there, it is soli that cannot run that line under the plan (docs/symptoms.md)."
    return f"soli: rank {engine.rank}, step {engine.step_count + 1}, {cut}{then}"
