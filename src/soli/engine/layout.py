"""The layout of a model under tensor parallelism: found on a few rows of a batch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from soli.core.errors import Problem, SoliError, listing, on_all_ranks
from soli.core.events import events
from soli.core.plan import Plan
from soli.engine import between, effects
from soli.engine.batch import Caller, Part, few, part_of, take, to_device, unwritten
from soli.engine.differentiating import Differentiating
from soli.losses import LossFn
from soli.parallel.randomness import Randomness
from soli.parallel.statistics import alone
from soli.parallel.tensor import check, oned
from soli.parallel.tensor.finder import Finder, Role, hinted

if TYPE_CHECKING:
    from soli.engine.engine import Engine

KINDS = ("column", "row", "vocabulary", "replicated")
ROWS = 2  # one would hide which dim is the batch's


@listing
def problems(roles: dict[str, str] | None, model: nn.Module) -> Iterator[Problem]:
    """What is wrong with the roles that the user gave."""
    named = dict(model.named_parameters(remove_duplicate=False))
    names = list(named)
    for pattern, kind in (roles or {}).items():
        if kind not in KINDS:
            yield Problem(f"the role of '{pattern}' is not known", got=kind, allowed=", ".join(KINDS))
        of = [name for name in names if hinted(pattern, name)]
        if not of:
            near = difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3]
            yield Problem(f"the role of '{pattern}' is of no weight", allowed=f"names, * for anything: {', '.join(near)}, ...")
        elif kind != "replicated" and all(named[name].dim() < 2 for name in of):
            got, fix = f"{kind}, of vectors alone: {', '.join(of[:3])}", "say it of the weight that they are added to"
            yield Problem(f"the role of '{pattern}' is of no matrix", got, "replicated", fix)


def roles_of(engine: Engine, batch: Any) -> dict[str, Role]:
    """The role of every parameter, the same on every rank, each kind of block checked in float64. Collective."""
    part = part_of(batch, 1, 0)
    runner = Runner.of(engine, part)
    plan, mesh = engine.plan, engine.mesh
    rows = 0 if plan.tensor == "1d" else plan.grid[1]
    # A rank without rows has no roles of its own; rank 0 has rows, and its roles hold.
    roles, samples = runner.search(plan.grid[2], plan.sp, engine.hints, rows, plan.tensor == "3d") if part.rows else ({}, {})
    roles = oned.rank_0s(roles, mesh)
    if mesh.all.simulated:
        return roles
    if any(p.is_meta for p in engine.model.parameters()):
        text = "the tensor-parallel layout of a deferred model is not checked in float64: it has no values yet"
        events.note(text, shown=engine.rank == 0)
    else:
        for sample in check.one_of_each(samples, roles):
            with Randomness(engine.model, engine.seed).probe(runner.rows):
                check.compare(sample, roles, mesh, plan)
    return roles


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """Around a run of a model that may be deferred."""
    try:
        yield
    except RuntimeError as error:
        if not next(model.parameters()).is_meta or "meta" not in str(error):
            raise
        what = "a deferred model is laid out before it has values, and its forward looks at some, or makes tensors of its own on another device"
        raise on_all_ranks(what, got=f"{error}".split("\n")[0], fix="build it without soli.deferred(); make tensors on the batch's device (device=x.device)") from error


class Runner:
    """Runs a model and its loss on a few rows, and leaves what it changes and its modes as they were."""

    def __init__(self, model: nn.Module, call: Caller, loss_fn: LossFn, data: Any, rows: int, plan: Plan, seed: int = 0) -> None:
        self.model, self.call, self.loss_fn, self.data, self.rows = model, call, loss_fn, data, rows
        self.plan, self.seed = plan, seed

    @classmethod
    def of(cls, engine: Engine, part: Part) -> Runner:
        """On the first rows of a part of a batch: two, or as few more as it runs on (a loss of groups, `view(-1, 4)`)."""
        most, device, made = few(part, engine.plan), next(engine.model.parameters()).device, []
        for rows in (min(most, ROWS), *(n for n in range(ROWS + 1, most + 1) if most % n == 0)):
            data = to_device(take(part.data, 0, rows) if rows else None, device)
            made.append(cls(engine.model, engine._call, engine.loss_fn, data, rows, engine.plan, engine.seed))
            with suppress(RuntimeError, ValueError, IndexError, AssertionError, SoliError):
                if most > ROWS:
                    made[-1].run()
                return made[-1]
        return made[0]  # which says what is wrong

    def run(
        self, around: Callable[[Randomness], AbstractContextManager[Any]] | None = None, training: bool = True,
        leaving: bool = False, gradients: bool = False, then: Callable[[Any], Any] = lambda found: found,
        alike: effects.Unwritten | None = None,
    ) -> Any:  # fmt: skip
        """One forward and its loss, which is returned. `around`: a context for them. `leaving`: tensors that the forward
        leaves in attributes stay. `gradients`: the loss can be differentiated, by `then`: a backward may need buffers as the forward
        left them. `alike`: what there is to look at in passes that are."""
        randomness = Randomness(self.model, self.seed)
        with (
            _without_values(self.model),
            torch.set_grad_enabled(gradients), between.modes_kept(self.model),
            Differentiating(self.plan) if alike is None or alike.looking else nullcontext(),
            alike.undone(self.plan) if alike is not None else effects.undone(self.model, self.plan, tensors=not leaving), randomness.probe(self.rows),
            unwritten(self.data) as data, alone(), around(randomness) if around is not None else nullcontext(), unwrap(self.loss_fn).filling(self.model),
        ):  # fmt: skip
            if training:
                between.training(self.model)
            else:
                self.model.eval()
            return then(self.loss_fn(self.call(data), data))

    def search(self, ranks: int, sequence: bool, hints: dict[str, str], rows: int = 0, cube: bool = False) -> tuple[dict[str, Role], dict[str, check.Sample]]:
        """The roles, and what every block was called with."""
        with check.sampling(self.model) as samples:
            roles = Finder(self.model, ranks, hints, self.data, rows, cube).search(self.run, sequence)
        return roles, samples
