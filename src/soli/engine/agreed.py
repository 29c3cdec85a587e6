"""What ranks must have alike in a step: numbers that tell it apart travel with its loss, and words are asked for after a difference."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from soli.core.axes import DEPTH, PP, ROW, SHARD, TP
from soli.core.errors import failure, listed, on_all_ranks
from soli.core.report import named
from soli.engine import between, norm, pipelined, same
from soli.engine.batch import Part
from soli.engine.data import trained
from soli.engine.optimizer import OF_RANK
from soli.engine.plain import plain
from soli.mesh.collectives import Axis, all_reduce, extreme, gather_json
from soli.mesh.mesh import all_ranks
from soli.parallel.data import checksum
from soli.parallel.generators import hashed
from soli.parallel.tensor import parts
from soli.parallel.units import cut_over

if TYPE_CHECKING:
    from soli.engine.engine import Engine

ALIKE = "let every rank do the same: the same model, loss, optimizer, options, batches and changes of them, and nothing that is a rank's own (a clock in a module is set after soli.parallelize)"
Facts = dict[str, Any]
"""What a rank has, by what it is called."""


class Agreement:
    """What this rank takes its steps with."""

    def __init__(self) -> None:
        self.rows, self.common = 0.0, 0.0  # marks of a step's batch: see `marks`
        self.place = self.step_place = Facts()  # of that batch in its stream
        self.limit: float | None = None  # of the newest clip()
        self.states: int | None = None  # of the optimizer, when it had stepped
        self.left_out = 0  # steps, by discard()
        self.wrote = False  # whether the program wrote into parameters since the step before
        self.versions: list[tuple[int, int]] = []
        self._options: Facts = {}
        self._number = 0.0

    def begin(self, engine: Engine, batch: Any) -> None:
        """A step has this batch."""
        self.rows, self.common = marks(engine, batch).tolist()
        self.step_place = self.place  # an evaluation may come before the step is over
        self.wrote = self.writes(engine)

    def end(self, engine: Engine) -> None:
        """And is over: the weights are the engine's, and a checkpoint goes on with the batch after it."""
        self.versions = versions(engine)
        trained(engine.positions, self.step_place)

    def writes(self, engine: Engine) -> bool:
        """Whether the program wrote into parameters since the newest step."""
        return bool(self.versions) and self.versions != versions(engine)

    def seal(self, engine: Engine) -> float:
        """A number of all that is the same on every rank but the rows."""
        if engine.world == 1 or engine.mesh.all.simulated:
            return 0.0
        found = options(engine)
        if found != self._options:
            self._options, self._number = found, _number(found)
        return _number(self._number, engine.step_count, self.wrote)

    def sums(self, engine: Engine, total: float, count: float) -> tuple[Tensor, float]:
        """One small reduction: every rank's total and count in slots of their own, what must be alike, and which parameters were used."""
        size, reducer = engine.dp.size, engine.laid.reducer
        flags, seal = [slot.arrived and id(slot.param) not in reducer.blanks for unit in reducer.units for slot in unit.slots], self.seal(engine)
        facts = torch.tensor([0.0] * 6 * size + flags, dtype=torch.float64)
        mine = facts[: 6 * size].view(6, size)
        mine[:3, engine.dp.index] = torch.tensor([total, count, reducer.differentiated], dtype=torch.float64)
        # that of the same rows, up to rounding; a total may be a difference of large terms
        whole = engine.step_count == 0 and engine.plan.tensor == "1d" and 1e-4 * engine._first.size < abs(total) < 1e300
        loss = float(f"{total:.1e}") if whole else 0.0
        on_tp = _number(loss, *parts.BESIDE)
        apart = same.apart_along(engine, [self.rows, self.common, seal], facts[: 3 * size], on_tp)
        mine[3:, engine.dp.index] = torch.tensor([self.common, seal, apart], dtype=torch.float64)
        all_reduce(facts, engine.dp, label="loss, count and used parameters")
        if not engine.mesh.all.simulated and (mine[5].any() or (mine[3:5] != mine[3:5, :1]).any()):
            self._explain(engine, loss)
        if parts.BESIDE:
            need_own(engine)
        if engine.step_count & (engine.step_count + 1) == 0:
            need_same_parameters(engine)
        reducer.set_used([bool(flag) for flag in facts[6 * size :].tolist()])
        if engine.pipeline is not None:
            pipelined.agree_on_use(engine)
        totals, counts = mine[:2]
        shift = 0 if engine.pipeline is None else engine.pipeline.last_rank - engine.rank  # losses are its
        if bad := [f"rank {r + shift}" for r, t in zip(engine.dp.ranks, totals.tolist(), strict=True) if t - t != 0]:
            norm.refuse_loss(engine, bad, totals)
        counted = float(counts.sum()) or float(engine.mesh.all.simulated)
        if not counted:
            raise on_all_ranks("no target of the global batch was counted", got="count = 0 on every rank")
        if not mine[2].any() and not engine.mesh.all.simulated:
            fix = "do not detach what the loss is made of; leave something to train; call the step outside of torch.no_grad()"
            raise on_all_ranks("the loss has no gradient: a step would train nothing", got=f"a loss of {float(totals.sum()) / counted:.6g}", fix=fix)
        return totals, counted

    def _explain(self, engine: Engine, loss: float) -> None:
        """SoliError that says which rank differs, and in what. Collective."""
        at, world = f"at step {engine.step_count + 1}", engine.mesh.all
        what = f"would take another step than the others {at}, and nothing was updated"
        need_alike(self.place | options(engine) | {"steps before": engine.step_count}, world, what, ALIKE)
        need_same_rows(engine, self.rows, at)
        facts = {"loss of the same rows": loss, "wrote into parameters": self.wrote, "computed with parts of weights": sorted(parts.BESIDE)}
        apart = [x.index for name, x in engine.mesh.axes.items() if name != TP]
        need_alike(facts, world, f"has not what ranks of tp have alike {at}, and nothing was updated", ALIKE, apart)
        need_same_parameters(engine)


def versions(engine: Engine) -> list[tuple[int, int]]:
    """What changes where parameters are written into, or exchanged for other memory."""
    if engine.world == 1 or engine.mesh.all.simulated:
        return []
    return [(p._version, 0 if engine.plan.zero else p.data_ptr()) for p in engine._given.named.values()]


def need_same_parameters(engine: Engine) -> None:
    """SoliError where parameters, or shards, that ranks have alike have other values on some. Collective."""
    if engine.world == 1 or engine.mesh.all.simulated:
        return
    values: Facts = {names[0]: param for names, param in engine.laid.plain}
    for unit in engine.laid.units:
        values |= {unit.name: unit.shard} if unit.zero == 3 else {slot.name: slot.param for slot in unit.slots}
    facts = {f"checksum of {name}": checksum(value, name) for name, value in values.items()}
    apart = (PP, DEPTH, ROW, TP, *[SHARD] * (engine.plan.zero == 3))
    place = [axis.index for name, axis in engine.mesh.axes.items() if name in apart]
    what = f"has other values than the others in the same parameters after {engine.step_count} steps"
    need_alike(facts, engine.mesh.all, what, ALIKE, place)
    if engine.plan.tp > 1 and engine.plan.tensor == "1d" and engine.plan.zero < 3:
        # ranks of tp each compute what is whole, and where a kernel adds in any order not to the last bit
        whole = [(name, value) for name, value in values.items() if not cut_over(value)]
        found = same.apart(engine, whole, engine.mesh["tp"], least=torch.finfo(torch.float32).eps)
        if extreme(len(found), engine.mesh.all, "max", label="whether ranks of tp have the same whole weights"):
            what = f"ranks of tp have other values than each other in weights that each has whole, after {engine.step_count} steps"
            raise failure(what, got=listed(found) or "those of other ranks", fix=ALIKE, everywhere=True)


def need_own(engine: Engine) -> None:
    """SoliError where what the program put beside this rank's parts of weights is alike on other ranks: it was made by the sizes of parts. Collective."""
    if engine.plan.tp == 1 or engine.mesh.all.simulated:
        return
    found = [{name: set(marks) for name, marks in one.items()} for one in gather_json(parts.BESIDE, engine.mesh[TP], label="what is beside parts")]
    parts.BESIDE.clear()
    if alike := [name for name, marks in found[0].items() if marks.intersection(*(one.get(name, ()) for one in found))]:
        what = "weights of which each rank has a part were computed with numbers of the part's size, between steps, that are the same on every rank"
        allowed = "what is made of parts (torch.zeros_like(p), p.clone()), numbers for all, or what is alike along the dim that is cut"
        fix = 'p.shape and p.numel() are the part\'s: draw and cut vectors for weights that are whole, roles={"that weight": "replicated"}'
        raise failure(what, got=listed(alike), allowed=allowed, fix=fix, everywhere=True)


def need_same_path(engine: Engine, path: Path) -> None:
    """SoliError where ranks name different checkpoints. Collective."""
    facts = {"path": str(path.resolve())}
    need_alike(facts, all_ranks(engine.world_info), "names another checkpoint than the others", ALIKE)


def marks(engine: Engine, batch: Any) -> Tensor:
    """Numbers that tell a batch apart: of this rank's rows, and of what all ranks of dp have alike of it."""
    mark = common = same.mark(engine, batch)
    engine._agreed.place = {"kind": type(batch).__name__}
    if isinstance(batch, Part):
        engine._agreed.place |= batch.place or {}
        common = _number(batch.place) if batch.place else 0.0
    return torch.tensor([mark, common], dtype=torch.float64)


def _number(*facts: Any) -> float:
    return float(hashed(*facts) >> 11)  # which a float64 has exactly


def evaluated(engine: Engine, found: Tensor, seen: Tensor) -> Tensor:
    """An evaluation's total and count, summed over all ranks, which have seen the same batches. Collective."""
    rows, common = seen.tolist()
    alike = _number(common, engine._agreed.left_out)
    told = found.new_zeros(2, engine.dp.size)
    apart = same.apart_along(engine, [rows, alike], found)
    told[:, engine.dp.index] = torch.tensor([alike, apart], dtype=torch.float64)
    need_own(engine)
    sums = torch.cat([found, told.flatten()])
    all_reduce(sums, engine.dp, label="evaluation loss and count")
    told = sums[2:].view_as(told)
    if not engine.mesh.all.simulated and (told[1].any() or (told[0] != told[0, 0]).any()):
        facts = engine._agreed.place | ({"marks of all": common} if rows != common else {}) | {"steps left out by discard()": engine._agreed.left_out}
        need_alike(facts, engine.mesh.all, f"evaluates other batches after {engine.step_count} steps", ALIKE)
        need_same_rows(engine, rows, f"in an evaluation after {engine.step_count} steps")
    return sums[:2]


def options(engine: Engine) -> Facts:
    """What the optimizer's step goes by, besides gradients and parameters."""
    made, agreed = engine.optimizer, engine._agreed
    found: Facts = {
        "optimizer": type(made).__name__,
        "scheduler": type(engine.scheduler).__name__,
        "clip": engine.max_norm,
        "the limit of the newest clip()": agreed.limit,
        "seed": engine.seed,
        "steps left out by discard()": agreed.left_out,
        # under pp a rank's parameters are its own, and may be all frozen
        "states as the newest step left them": engine.plan.pp > 1 or agreed.states in (None, kept_states(made)),
    }
    return found | _groups(made)


def kept_states(optimizer: torch.optim.Optimizer) -> int:
    """Of how many parameters; to look one up makes an empty one."""
    return sum(bool(state) for state in optimizer.state.values() if isinstance(state, dict))


def _groups(optimizer: torch.optim.Optimizer) -> Facts:
    found: Facts = {}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{key} of group {number}": _plain(value) for key, value in group.items() if key not in OF_RANK}
    return found


def need_same_program(model: nn.Module, optimizer: torch.optim.Optimizer, given: Facts, world: Axis) -> None:
    """SoliError where `soli.parallelize` was not given the same on every rank, as far as it can be told without running it. Collective."""
    facts = {name: _code(value) if callable(value) else value for name, value in given.items()}
    for name, module in model.named_modules():
        # what others write there may be a rank's own
        shown = module.extra_repr() if str(type(module).extra_repr.__module__).startswith("torch.nn.") else ""
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        found = f"{type(module).__qualname__}({shown}), in {'training' if module.training else 'evaluation'}"
        facts[f"module {name or 'of all'}"] = f"{found}, {sum(map(len, kinds))} hooks"
        # whole numbers and flags may be a rank's own too
        facts |= {f"{name or 'the model'}.{key}": value for key, value in vars(module).items() if isinstance(value, float)}
    for name, param in model.named_parameters():
        facts[name] = f"requires_grad={param.requires_grad}, {len(between.hooks(param))} hooks"
    names = {id(param): name for name, param in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"parameters of group {number}"] = [names.get(id(param), "another's") for param in group["params"]]
    facts |= {"optimizer": type(optimizer).__name__} | _groups(optimizer)
    need_alike(facts, world, "gave soli.parallelize other things than the others", ALIKE)


def _code(function: Any) -> tuple[str, int]:
    """A function by its name and what it does, without what it looks up."""
    code = getattr(function, "__code__", None)
    told = code and (code.co_code, code.co_names, [x for x in code.co_consts if isinstance(x, int | float | str)])
    return getattr(function, "__qualname__", type(function).__name__), hashed(told)


def _plain(value: Any) -> Any:
    """A value that is written alike on every rank that has it."""
    value = plain(value)
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def need_same_rows(engine: Engine, rows: float, when: str) -> None:
    """SoliError where ranks that take their rows of one batch, or the same ones, were given different ones. Collective."""
    place = engine.dp.index if engine._agreed.place.get("kind") == Part.__name__ else 0
    what = "had other rows than the others: ranks that compute one batch together were given different rows; nothing was updated"
    seeds = "engine.batches does; a DataLoader that shuffles, or random data, needs the same seed everywhere: torch.manual_seed at the top of the program"
    fix = f"give the same batch on every rank ({seeds}); seed a dataset's own random numbers with the sample and not with the rank"
    need_alike({f"mark of the rows {when}": rows}, engine.mesh.all, what, fix, place)


def need_alike(facts: Facts, axis: Axis, what: str, fix: str, group: object = 0) -> None:
    """SoliError where ranks of a group have not the same; it names those that differ from most, or from the first where as many do. Collective."""
    mine = [repr(group), {name: repr(value) for name, value in facts.items()}]
    if len(set(gather_json(hashed(mine), axis, label="whether ranks have the same"))) == 1:
        return
    told = gather_json(mine, axis, label="what ranks have alike")
    odd, words = set[int](), []
    for name, place in product(dict.fromkeys(name for _, one in told for name in one), sorted({at for at, _ in told})):
        values = {rank: one.get(name, "not there") for rank, (at, one) in enumerate(told) if at == place}
        usual = max(values.values(), key=list(values.values()).count)
        others = [rank for rank, value in values.items() if value != usual]
        words += [f"{name}: {values[rank][:300]}, and {usual[:300]} on the others" for rank in others[:1]]
        odd |= set(others)
    if odd:
        raise failure(f"{named(sorted(odd))} {what}", got=listed(words), fix=fix, everywhere=True)
