"""The engine's state as global tensors: gathered for the user, or as boxes for a checkpoint."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from soli import checkpoint
from soli.core import copies
from soli.core.axes import TP
from soli.core.errors import Problem, listed, on_all_ranks, raise_all
from soli.core.events import events
from soli.core.functions import held, tensors_in
from soli.core.layout import Sharded, from_flat, from_whole
from soli.engine import between, rng
from soli.engine.data import Position, resumed
from soli.engine.optimizer import OF_RANK, need_own_states, stepped
from soli.engine.plain import counted, like, numbered, plain
from soli.mesh.collectives import all_reduce, broadcast, gather_json
from soli.parallel import kept
from soli.parallel.tensor.moves import collected
from soli.parallel.units import Slot, Unit, cut_over, named_once
from soli.parallel.wrapping import unwrap

if TYPE_CHECKING:
    from soli.engine.engine import Engine

RNG = "rng."
EXTRA = "._extra_state"  # as torch names what get_extra_state gives


def global_state(engine: Engine, optimizer: bool) -> dict[str, Tensor]:
    """Parameters and buffers under every name that state_dict() gives them; optimizer.<param>.<key> beside."""
    found: dict[str, Tensor] = {}
    for unit in engine.laid.units:
        flat = unit.whole(unit.shard, "parameters") if unit.zero and unit.shard is not None else None
        for slot in unit.slots:
            value = _whole(slot.param if flat is None else slot.within(flat))
            found |= dict.fromkeys(slot.names, uncut(engine, slot.param, value))
    for names, param in engine.laid.plain:
        found |= dict.fromkeys(names, uncut(engine, param, _whole(param)))
    found |= {name: _whole(buffer) for name, buffer in _buffers(engine)} | _of_modules(engine)
    if engine.pipeline is not None:
        found = _from_stages(engine, found)
    order = {name: found.get(name, value) for name, value in engine.model.state_dict(keep_vars=True).items()}
    return order | (_global_optimizer(engine) if optimizer else {})


def _from_stages(engine: Engine, found: dict[str, Tensor], only: set[str] | None = None) -> dict[str, Tensor]:
    """Every stage's tensors on all of them: one whole tensor after another, from the first stage that has it.

    `only`: the parameters that some stage has one for.
    """
    cutting, axis = engine.pipeline.cutting, engine.mesh["pp"]  # type: ignore[union-attr]
    whole = dict(found)
    for names, param in named_once(engine.model):
        if only is not None and names[0] not in only:
            continue
        source = cutting.first_owner(names[0])
        value = found.get(names[0])
        if value is None:
            value = torch.empty(param.shape, dtype=param.dtype, device=engine.device)
        broadcast(value, axis, source, label=names[0])
        whole |= {name: value for name in names}
    for name, source in cutting.buffers.items():
        if name in whole:
            broadcast(whole[name], axis, source, label=name)
    return whole


def _whole(value: Tensor) -> Tensor:
    """A copy row by row, as stages send it and receive it, however it lies in memory (channels_last)."""
    return held(value).clone(memory_format=torch.contiguous_format)


def _buffers(engine: Engine) -> list[tuple[str, Tensor]]:
    """The persistent buffers: those that a state_dict of the model has."""
    parameters = {name for name, _ in engine.model.named_parameters(remove_duplicate=False)}
    rest = engine.model.state_dict(keep_vars=True)
    return [(n, value) for n, value in rest.items() if n not in parameters and isinstance(value, Tensor) and not f".{n}".endswith(EXTRA)]


def _of_modules(engine: Engine) -> dict[str, Any]:
    """What modules save by get_extra_state."""
    found = {n: value for n, value in engine.model.state_dict(keep_vars=True).items() if f".{n}".endswith(EXTRA)}
    if found and engine.pipeline is not None:
        what = "modules save something by get_extra_state, and under pp each stage has its own"
        raise on_all_ranks(what, got=listed(list(found)), fix="keep it in a buffer (register_buffer), or use a plan without pp")
    return found


def copy_model(engine: Engine) -> nn.Module:
    """A plain copy of the model with whole weights, on every rank. Collective."""
    weights, plain = engine.global_state_dict(), plain_copy(engine.model)
    fresh: dict[int, nn.Parameter] = {}  # a tied one stays tied
    for name, param in list(plain.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        value = fresh.setdefault(id(param), nn.Parameter(weights[name], param.requires_grad))
        plain.get_submodule(owner)._parameters[leaf] = value
    plain.load_state_dict(weights)
    return plain


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy, with this rank's parameters, that computes without soli."""
    plain = copies.deep(model)
    for module in plain.modules():
        while unwrap(module):
            pass
        of_state = module._state_dict_pre_hooks, module._load_state_dict_pre_hooks
        for hooks in (module._forward_hooks, module._forward_pre_hooks, *of_state):
            of = lambda hook: str(getattr(hook, "hook", hook).__module__)  # torch wraps some of them
            for key in [key for key, hook in hooks.items() if of(hook).startswith("soli.")]:
                del hooks[key]
    return plain


def uncut(engine: Engine, param: nn.Parameter, local: Tensor) -> Tensor:
    """The whole tensor of which every rank of tp has the part that it has of a parameter. Collective."""
    tensor = engine.parallel.tensor if engine.parallel is not None else None
    for axis, split in reversed(tensor.splits.get(id(param), {}).items()) if tensor is not None else ():
        local = collected(local, split, engine.mesh[axis], "a cut tensor, whole")
    return local


def global_gradients(engine: Engine, factor: float) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for unit in engine.laid.reducer.units:
        assert unit.grad_shard is not None, "every unit was reduced"
        flat = unit.whole(unit.grad_shard, "gradients")
        for slot in unit.slots:
            found[slot.name] = uncut(engine, slot.param, slot.within(flat)) * factor if slot.used else None
    if engine.pipeline is None:
        return found
    mine = {name: value for name, value in found.items() if value is not None}
    used = {name for one in gather_json(list(mine), engine.mesh["pp"], label="used parameters") for name in one}
    whole = _from_stages(engine, mine, used)
    trained = [names[0] for names, param in named_once(engine.model) if param.requires_grad]
    return {name: whole[name] if name in used else None for name in trained}


def _global_optimizer(engine: Engine) -> dict[str, Tensor]:
    """Each optimizer tensor, whole, on every rank: sums of parts that do not overlap."""
    local = optimizer_tensors(engine)
    shapes = _agreed_shapes(engine, local)
    slots, found = {s.name: (s, u) for u in engine.laid.units for s in u.slots}, {}
    for name, (shape, dtype) in shapes.items():
        least = -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min
        whole = torch.full(shape, 0 if shape else least, dtype=dtype, device=engine.device)
        for box, piece in local[name].pieces if name in local else []:
            whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = piece
        param = name.removeprefix("optimizer.").rpartition(".")[0]
        slot, unit = slots.get(param, (None, None))
        # A scalar is the same for all who hold it, and the others have less than any number.
        all_reduce(whole, unit.shard_axis if unit else engine.mesh.sharing()[1], "sum" if shape else "max", label=name)
        if shape and slot is not None and slot.portion is not None and slot.whole_shape == shape:
            for axis in cut_over(slot.param):
                all_reduce(whole, engine.mesh[axis], label=name)
        if engine.pipeline is not None:
            broadcast(whole, engine.mesh["pp"], engine.pipeline.cutting.first_owner(param), label=name)
        found[name] = whole
    return found


def _agreed_shapes(engine: Engine, local: dict[str, Sharded]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    mine = {name: [list(s.shape), str(s.dtype).removeprefix("torch.")] for name, s in local.items()}
    merged: dict[str, Any] = {}
    for axis in (engine.mesh.sharing()[1], engine.mesh["pp"]):
        merged = dict(ChainMap(*gather_json(merged or mine, axis, label="optimizer state names")))
    return {n: (tuple(shape), getattr(torch, dtype)) for n, (shape, dtype) in sorted(merged.items())}


def optimizer_tensors(engine: Engine, saving: bool = False) -> dict[str, Sharded]:
    """optimizer.<param>.<key> -> this rank's part. What has its parameter's shape is cut like it."""
    need_own_states(engine.optimizer)
    found: dict[str, Sharded] = {}
    for unit, slot, param, key, value in _states(engine):
        if isinstance(value, Tensor) and (not saving or _saves(engine, unit, slot)):  # of others see _numbers
            like_param = value.shape == param.shape and value.dim()
            found[f"optimizer.{slot.name}.{key}"] = _like_parameter(unit, slot, value.detach()) if like_param else from_whole(value.detach())
    return found


def _numbers(engine: Engine) -> dict[str, str]:
    """<param>.<key> -> a state of the optimizer that is no tensor but a number or None, as text, of all ranks. Collective."""
    mine: dict[str, Any] = {}
    for _, slot, _, key, value in _states(engine):
        if not isinstance(value, Tensor):
            mine[f"{slot.name}.{key}"] = json.dumps(value) if isinstance(value, int | float | None) else [type(value).__name__]
    found = dict(ChainMap(*gather_json(mine, engine.mesh.all, label="save(), which every rank calls")))
    if strange := [f"{name}: {value[0]}" for name, value in found.items() if isinstance(value, list)]:
        raise on_all_ranks("states of the optimizer are neither tensors nor numbers, and could not be brought back", got=listed(strange), allowed="tensors, int, float, bool, None")
    return found


def _like_parameter(unit: Unit, slot: Slot, value: Tensor) -> Sharded:
    """What has the shape of the optimizer's piece of a parameter, as boxes of the parameter."""
    if not unit.zero:
        return slot.of_whole(from_whole(value))
    start, _ = unit.owned(slot)
    return slot.of_whole(from_flat(value, slot.shape, start - slot.start))


def _held(engine: Engine) -> list[tuple[Unit, Slot, Tensor]]:
    return [(u, s, s.piece) for u in engine.laid.units if u.trainable for s in u.slots if s.piece is not None]


def _states(engine: Engine) -> Iterator[tuple[Unit, Slot, Tensor, str, Any]]:
    """What the optimizer has of each parameter that this rank holds: by its key."""
    return ((u, s, param, key, x) for u, s, param in _held(engine) for key, x in engine.optimizer.state.get(param, {}).items())


def _saves(engine: Engine, unit: Unit, slot: Slot) -> bool:
    """Whether a checkpoint takes this rank's part. Beside weights that tp cuts unevenly the shards of one that it does not cut begin elsewhere
    on each of its ranks, and overlap: the first one's are taken."""
    cut = cut_over(slot.param)
    return not unit.zero or engine.mesh[TP].index == 0 or TP in {*cut, *engine.mesh.summed(cut)}


def model_tensors(engine: Engine, filling: bool = False) -> dict[str, Sharded]:
    """model.<name> -> this rank's part of every parameter (once, under its first name) and buffer.

    A buffer is saved from the stage whose unit it is in, and filled on every rank.
    """
    slots = [(u, s) for u in engine.laid.units for s in u.slots if filling or _saves(engine, u, s)]
    found = {f"model.{s.name}": u.parameter(s) for u, s in slots}
    for names, param in engine.laid.plain:
        portion, local = engine.laid.portions.get(id(param)), from_whole(held(param))
        found[f"model.{names[0]}"] = local if portion is None else portion.of_whole(local)
    for names, param in engine.laid.absent.values():
        found[f"model.{names[0]}"] = Sharded(tuple(param.shape), param.dtype)
    whose = engine.pipeline.cutting.buffers if engine.pipeline is not None else {}
    for name, buffer in _buffers(engine):
        mine = whose.get(name, engine.mesh["pp"].index) == engine.mesh["pp"].index
        elsewhere = Sharded(tuple(buffer.shape), buffer.dtype)
        found[f"model.{name}"] = from_whole(buffer.detach()) if mine or filling else elsewhere
    own = {} if filling else _of_modules(engine)
    return found | {f"model.{n}": from_whole(x.detach()) for n, x in own.items() if isinstance(x, Tensor)}


def _finish_saving(engine: Engine) -> None:
    """Wait for a save in the background; its error is raised once."""
    pending, engine.saving = engine.saving, None
    if pending is not None:
        pending.wait()


def save(engine: Engine, path: Path, extra: dict[str, Any], overwrite: bool, wait: bool) -> None:
    if engine._count:
        raise on_all_ranks("save() between forward_backward() and update()", fix="save after the step")
    _finish_saving(engine)
    numbers = _numbers(engine)
    beside = [str(key) for key, x in engine.optimizer.state.items() if not isinstance(key, Tensor) and tensors_in([x])]
    if beside:
        what = "the optimizer keeps tensors that are no parameter's, and could not be brought back"
        raise on_all_ranks(what, got=listed(beside), allowed="numbers, text and None there", fix="keep them as states of a parameter")
    if described := [n for n, x in engine.model.state_dict(keep_vars=True).items() if not isinstance(x, Tensor) and not f".{n}".endswith(EXTRA)]:
        events.note(f"what the model's state_dict has that is no tensor is not saved: {listed(described)}", shown=engine.rank == 0)
    tensors = model_tensors(engine) | optimizer_tensors(engine, saving=True)
    if engine.mesh.leads:  # one for each place on dp
        tensors[f"{RNG}{engine.dp.index}"] = from_whole(rng.state())
    state = _state(engine, extra) | {"numbers": numbers}
    if engine._save_group is None and engine.world > 1:
        # Its own group: on the default one a background save has crashed while training communicates.
        engine._save_group = dist.new_group(backend="gloo")
    if wait:
        checkpoint.save(path, tensors, state, group=engine._save_group, overwrite=overwrite)
    else:
        engine.saving = checkpoint.save_async(path, tensors, state, group=engine._save_group, overwrite=overwrite)
    events.emit("save", path=str(path), step=engine.step_count, waited=wait)


def _state(engine: Engine, extra: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in g.items() if k not in OF_RANK} for g in engine.optimizer.param_groups]
    return {
        "step": engine.step_count, "plan": str(engine.plan), "seed": engine.seed, "tied": engine.tied,
        "groups": [{k: plain(v) for k, v in g.items()} for g in groups], "members": engine._given.members(engine.optimizer),
        "classes": _classes(engine), "scheduler": numbered(engine.scheduler.state_dict()) if engine.scheduler is not None else None,
        "positions": {name: asdict(position) for name, position in resumed(engine.positions, engine.step_count > 0).items()},
        "loss_scale": asdict(engine.loss_scale) if engine.loss_scale is not None else None,
        "modules": {name: value for name, value in _of_modules(engine).items() if not isinstance(value, Tensor)},
        "globals": numbered({key: x for key, x in engine.optimizer.state.items() if not isinstance(key, Tensor)}), "extra": numbered(extra),
    }  # fmt: skip


def _classes(engine: Engine) -> dict[str, str]:
    pair = {"optimizer": engine.optimizer, "scheduler": engine.scheduler}
    return {what: type(one).__name__ for what, one in pair.items() if one is not None}


def load(engine: Engine, path: Path) -> dict[str, Any]:
    """See Engine.load. Where the model still waits to be laid over the ranks, its tensors are read then."""
    if engine._count:
        raise on_all_ranks("load() between forward_backward() and update()", fix="load after the step, or leave it out: engine.discard()")
    _finish_saving(engine)  # it may be this checkpoint that is written
    checkpoint.finish(None)  # or another engine's of this process
    manifest = checkpoint.read_manifest(path)
    only_weights = not any(name.startswith(("optimizer.", RNG)) for name in manifest.tensors)
    if not only_weights:
        raise_all(_group_problems(engine, manifest), everywhere=True)
    drawn = _room(manifest, [name for name in manifest.tensors if name.startswith(RNG)])
    state = manifest.state
    if engine.parallel is not None:
        state = fill(engine, path, drawn)
    else:
        engine.to_load = path, between.written(engine)
        if drawn:
            state = _read(engine, path, drawn)
    if only_weights:
        rest = "; learning rate, scheduler and loss scale stay as they are" * bool(engine.step_count)
        text = f"{path} holds weights alone: the optimizer's states, data positions and step start anew{rest}"
        events.note(text, shown=engine.rank == 0)
        engine.step_count = 0
        _go_on(engine, {})
        return {}
    # By place on dp: ranks that share rows draw alike. More places than were saved go on from the first's: random
    # numbers of one's own (in a dataset) then differ.
    rng.restore(drawn.get(f"{RNG}{engine.dp.index}", drawn[f"{RNG}0"]))
    _restore(engine, state)
    events.emit("load", path=str(path), step=engine.step_count, plan_written=state["plan"])
    extra: dict[str, Any] = counted(state["extra"], dict)
    return extra


def fill(engine: Engine, path: Path, drawn: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Read parameters and optimizer states into their places, and the random states into `drawn`, if given."""
    manifest = checkpoint.read_manifest(path)
    fresh: dict[Any, dict[str, Any]] = {}
    wanted = model_tensors(engine, filling=True) | _optimizer_to_fill(engine, manifest, fresh)
    saved = _room(manifest, [f"model.{name}" for name in _of_modules(engine) if f"model.{name}" in manifest.tensors])
    wanted |= {name: from_whole(value) for name, value in ((drawn or {}) | saved).items()}
    if not fresh and engine._given.begun and stepped(engine.optimizer):
        what = f"{path} has no states of the optimizer, and {type(engine.optimizer).__name__} had some when soli.parallelize was given it, which are gone"
        raise on_all_ranks(what, fix="load it into a new engine, before its first step and with an optimizer that has not stepped")
    second = _second_names(engine, path, manifest, wanted)
    ignore = lambda name: name in second or (drawn is None and name.startswith(RNG))
    with torch.no_grad():
        state = checkpoint.load(path, wanted, group=_everyone(engine), ignore=ignore)
        for unit in engine.laid.units:
            unit.spread().wait()
    if fresh or not engine._given.begun:  # also where the checkpoint is of before the first step, or of weights alone
        engine.optimizer.state.clear()
        engine.optimizer.state.update(fresh)
        engine._agreed.states = None
    engine.optimizer.state.update(counted(state.get("globals", {}), dict))
    for name, value in (saved | {f"model.{n}": x for n, x in state.get("modules", {}).items()}).items():
        engine.model.get_submodule(name.removeprefix("model.").rpartition(".")[0]).set_extra_state(value)
    return state


def _second_names(engine: Engine, path: Path, manifest: checkpoint.Manifest, wanted: dict[str, Sharded]) -> set[str]:
    """Names of tied weights that a checkpoint has beside or in place of the model's first, which is asked for by one. Collective."""
    found = {f"model.{n}": f"model.{first}" for n, first in engine.tied.items() if f"model.{n}" in manifest.tensors}
    by = {first: first if first in manifest.tensors else name for name, first in found.items()}
    read = _room(manifest, {*found, *by.values()})
    if found:
        _read(engine, path, read)
    if unlike := [name for name, first in found.items() if not torch.equal(read[name], read[by[first]])]:
        raise on_all_ranks("a weight that the model has once has two values in the checkpoint", got=listed(unlike))
    wanted |= {name: wanted.pop(first) for first, name in by.items()}
    return set(found)


def _room(manifest: checkpoint.Manifest, names: Iterable[str]) -> dict[str, Tensor]:
    """For tensors of a checkpoint, whole."""
    return {name: torch.empty(manifest.tensors[name].shape, dtype=manifest.tensors[name].dtype) for name in names}


def _read(engine: Engine, path: Path, into: dict[str, Tensor]) -> dict[str, Any]:
    """Read these tensors of a checkpoint alone; returns its state. Collective."""
    wanted = {name: from_whole(value) for name, value in into.items()}
    return checkpoint.load(path, wanted, group=_everyone(engine), ignore=lambda name: name not in into)


def _everyone(engine: Engine) -> Any:
    return None if engine.world == 1 else dist.group.WORLD


def _optimizer_to_fill(engine: Engine, manifest: Any, fresh: dict[Any, dict[str, Any]]) -> dict[str, Sharded]:
    """Make the optimizer's tensors, as the checkpoint lists them, for the parts this rank holds: `fresh`.

    The optimizer's own are left alone until everything is read.
    """
    by_name = {slot.name: (unit, slot, param) for unit, slot, param in _held(engine)}
    trains = {names[0]: param.requires_grad for names, param in named_once(engine.model)}
    dropped, found = set[str](), dict[str, Sharded]()
    for name, saved in manifest.tensors.items():
        param_name, _, key = name.removeprefix("optimizer.").rpartition(".")
        if not name.startswith("optimizer.") or param_name not in trains:
            continue  # checkpoint.load reports it as unexpected, with all others
        if not trains[param_name]:
            dropped.add(param_name)
        dtype = _type_to_fill(engine, manifest, key, saved)
        if param_name not in by_name:
            found[name] = Sharded(tuple(saved.shape), dtype)
            continue
        unit, slot, param = by_name[param_name]
        if tuple(saved.shape) == slot.whole_shape and slot.shape:
            value = torch.empty(param.shape, dtype=dtype, device=param.device)
            found[name] = _like_parameter(unit, slot, value)
        else:
            value = torch.empty(saved.shape, dtype=dtype, device=_place(engine, param, key, saved.shape))
            found[name] = from_whole(value)
        fresh.setdefault(param, {})[key] = value
    for name, number in manifest.state.get("numbers", {}).items():
        param_name, _, key = name.rpartition(".")
        if param_name in by_name:
            fresh.setdefault(by_name[param_name][2], {})[key] = json.loads(number)
    if dropped:
        text = f"the optimizer's states of parameters that are frozen now are not read: {listed(sorted(dropped))}"
        events.note(text, shown=engine.rank == 0)
    return found


def _type_to_fill(engine: Engine, manifest: Any, key: str, saved: Any) -> torch.dtype:
    """The saved one's; float64 where this plan is of precision=fp64 and the checkpoint's was not, float32 the other way round."""
    proof = engine.plan.precision == "fp64"
    counts = key == "step" and not saved.shape  # which torch has in float32 always
    if ("precision=fp64" in str(manifest.state.get("plan"))) == proof or counts or saved.dtype not in checkpoint.WIDE:
        return saved.dtype
    return torch.float64 if proof else torch.float32


def _place(engine: Engine, param: Tensor, key: str, shape: tuple[int, ...]) -> torch.device:
    """Where an optimizer's state lies: torch keeps step numbers on the CPU, but for kernels that read them."""
    group = next(g for g in engine.optimizer.param_groups if any(p is param for p in g["params"]))
    on_host = not shape and key == "step" and not group.get("fused") and not group.get("capturable")
    return torch.device("cpu") if on_host else param.device


def _group_problems(engine: Engine, manifest: checkpoint.Manifest) -> Iterator[Problem]:
    """What does not fit besides the tensors, looked at before any of them is touched."""
    state = manifest.state
    there = {n.removeprefix("model.") for n in manifest.tensors if n.endswith(EXTRA)} | set(state.get("modules", {}))
    other = there ^ set(_of_modules(engine))
    if other and "modules" in state:
        yield Problem("modules of the program or of the checkpoint, but not both, have something to save by get_extra_state", got=listed(sorted(other)))
    groups, members = len(engine.optimizer.param_groups), engine._given.members(engine.optimizer)
    if groups != len(state["groups"]):
        got = f"{groups}, saved {len(state['groups'])}"
        yield Problem("the optimizer has another number of parameter groups than the checkpoint's", got=got, seen="forgotten-on-resume")
    then, now = ({n: i for i, names in enumerate(m) for n in names} for m in (state.get("members", []), members))
    if moved := [name for name, group in now.items() if then.get(name, group) != group]:
        what = "parameters are in another group of the optimizer than in the checkpoint's, and would have its options"
        got = listed([f"{name}: group {now[name]}, saved in {then[name]}" for name in moved])
        yield Problem(what, got=got, fix="make the groups in the order that the checkpoint was trained with", seen="forgotten-on-resume")
    if (engine.scheduler is None) != (state["scheduler"] is None):
        fix = "give soli.parallelize the scheduler that the checkpoint was trained with"
        yield Problem("a scheduler is in the checkpoint or in the program, but not in both", fix=fix, seen="forgotten-on-resume")
    for what, name in _classes(engine).items():
        saved = state.get("classes", {}).get(what, name)
        if saved != name:
            yield Problem(f"the checkpoint is of another {what}", got=name, allowed=saved, seen="forgotten-on-resume")


def _go_on(engine: Engine, positions: dict[str, Any]) -> None:
    """Streams stand there; those that the checkpoint has not, at their beginning. In place: an iterator that the user already holds goes on
    from there too."""
    for name in {*engine.positions, *positions}:
        place = positions.get(name, asdict(Position()))
        vars(engine.positions.setdefault(name, Position())).update(place, mover=None, ahead=(), trained=False)


def _restore(engine: Engine, state: dict[str, Any]) -> None:
    pairs = list(zip(engine.optimizer.param_groups, state["groups"], strict=True))
    unlike = {k for group, saved in pairs for k, v in saved.items() if not kept.same(plain(group.get(k, v)), v)}
    scheduled = {"lr", "initial_lr"} if engine.scheduler is not None else set()
    others = sorted(unlike - scheduled)
    if others and not engine.step_count:
        text = f"options of the optimizer are the checkpoint's, and not the program's: {listed(others)}"
        events.note(text, shown=engine.rank == 0)
    for group, saved in pairs:
        group.update({k: like(group.get(k), v) for k, v in saved.items()})
    if engine.scheduler is not None:
        engine.scheduler.load_state_dict(counted(state["scheduler"]))
    if engine.loss_scale is not None and state["loss_scale"] is not None:
        vars(engine.loss_scale).update(state["loss_scale"])
    _go_on(engine, state["positions"])
    if engine.seed != state["seed"]:
        text = f"the checkpoint's seed {state['seed']} goes on, of dropout and of the order of the data, and not the program's {engine.seed}"
        events.note(text, shown=engine.rank == 0)
    engine.step_count, engine.seed = state["step"], state["seed"]
    engine.randomness.seed = state["seed"]
