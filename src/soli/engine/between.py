"""What a program does to its model between steps: modes that it sets hold, and what a laid model cannot follow is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from soli.core.errors import Problem, listed, listing, on_all_ranks
from soli.core.events import events
from soli.engine import optimizer as optimizers

if TYPE_CHECKING:
    from soli.engine.engine import Engine


def training(model: nn.Module) -> bool:
    """Put a model that is in evaluation mode into training mode; whether it was.

    In one that is in training mode, modules that the program has put in eval() stay so: frozen statistics, no dropout.
    """
    if model.training:
        return False
    model.train()
    return True


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Every module has the mode afterwards that it had before, and was told so: train() of some does more than to keep a flag
    (LoRA's merge their weights for evaluation)."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:  # from the outside in, as each tells those inside it
            if module.training != mode:
                module.train(mode)


class Given:
    """A model as `soli.parallelize` was given it, and what it must still be when a step begins."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.named = dict(model.named_parameters())
        self.groups = self._groups(optimizer)
        self.frozen = [param.requires_grad for param in self.named.values()]
        self.hooks = {name: hooks(param) for name, param in self.named.items()}
        self._said = False
        self.optimizer: tuple[Any, list[int]] | None = None
        self.begun = False  # whether its class makes states when it is built (Adagrad)

    def _groups(self, optimizer: Any) -> list[list[str]]:
        names = {id(param): name for name, param in self.named.items()}
        return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]

    def members(self, optimizer: Any) -> list[list[str]]:
        """The parameters of each group, by name: as they were given, and where this rank has them whole as they are."""
        now = self._groups(optimizer)
        return now if sum(map(len, now)) >= sum(map(len, self.groups)) else self.groups

    @listing
    def problems(self, engine: Engine) -> Iterator[Problem]:
        """What was changed since, and training could not follow. The program is the same on every rank, and so is this."""
        now = dict(engine.model.named_parameters())
        strange = sorted(name for name in self.named.keys() | now.keys() if self.named.get(name) is not now.get(name))
        if strange:
            what = "parameters were put in, taken out or exchanged for others after soli.parallelize, and no optimizer has them"
            fix = "change the model before soli.parallelize, or write into the parameters that are there"
            yield Problem(what, got=listed(strange), fix=fix)
            return
        if other := [name for (name, p), was in zip(now.items(), self.frozen, strict=True) if p.requires_grad != was]:
            fix = "set requires_grad before soli.parallelize; or save, build the model again, change and parallelize that, and load"
            yield Problem("a parameter was frozen or unfrozen after soli.parallelize", got=listed(other), fix=fix)
        if hooked := [name for name, param in now.items() if hooks(param) != self.hooks[name]]:
            what = "hooks on gradients were put on or taken off after soli.parallelize, and were not looked at"
            yield Problem(what, got=listed(hooked), fix="register them before soli.parallelize")
        yield from _replaced(engine)
        yield from self._optimizer(engine)

    def _optimizer(self, engine: Engine) -> Iterator[Problem]:
        """What was changed of the optimizer since the model was laid over the ranks."""
        if self.optimizer is None or (engine.plan.zero == 0 and engine.plan.tp * engine.plan.pp == 1):
            return
        made, params = self.optimizer
        if engine.optimizer is not made or params != _ids(made):
            what = "the optimizer, or which parameters it has, was changed after soli.parallelize"
            got = "another optimizer" if engine.optimizer is not made else f"{len(_ids(made))} parameters, {len(params)} before"
            fix = "give soli.parallelize all parameters that are to train at any time: a group's lr may be 0 until then"
            yield Problem(what, got=got, fix=fix)
        yield from optimizers.hooked(engine.optimizer, engine.plan)

    def laid(self, optimizer: Any) -> None:
        """The model lies on the ranks, and the optimizer has their parts."""
        self.optimizer = (optimizer, _ids(optimizer))
        self.begun = bool(optimizer.state)

    def begin(self, engine: Engine) -> None:
        """Training mode; said once where the program had put the whole model into evaluation mode."""
        if training(engine.model) and not self._said:
            self._said = True
            events.note(
                "the model was in evaluation mode; a step trains in training mode. To train without dropout or with "
                "frozen statistics, put the modules inside it in eval(), and not the model",
                shown=engine.rank == 0,
            )


def _ids(optimizer: Any) -> list[int]:
    return [id(param) for group in optimizer.param_groups for param in group["params"]]


def hooks(param: nn.Parameter) -> list[Any]:
    """The program's own hooks on a parameter's gradient."""
    kinds = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
    return [hook for kind in kinds for hook in (kind or {}).values() if not str(hook.__module__).startswith("soli.")]


def _replaced(engine: Engine) -> Iterator[Problem]:
    """Parameters whose memory is not the one that the optimizer writes into."""
    if engine.parallel is None or not engine.plan.zero:
        return
    zero = engine.plan.zero
    if names := [slot.names[0] for unit in engine.laid.units for slot in unit.slots if unit.lost(slot)]:
        what = f"the data of parameters was replaced after soli.parallelize, and under zero={zero} their values lie in a buffer that ranks share"
        fix = f"do it before soli.parallelize, use zero=0, or write in place{' under zero=2' * (zero == 3)}"
        yield Problem(what, got=listed(names), fix=fix)


def written(engine: Engine) -> list[int]:
    """What a write into parameters or buffers changes."""
    return [x._version for x in (*engine.model.parameters(), *engine.model.buffers())]


def need_unwritten(engine: Engine) -> None:
    """SoliError where the program wrote into what a checkpoint, which waits for the first batch, would write over."""
    if engine.to_load is not None and engine.to_load[1] != written(engine):
        what = "the program wrote into parameters or buffers after load(), and the checkpoint is read when the first batch comes"
        raise on_all_ranks(what, got=str(engine.to_load[0]), fix="give soli.parallelize a batch as example=, so that load() reads at once; or write after the first step")
