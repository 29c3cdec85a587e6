"""Each kind of block, cut as it was found, against itself whole, in float64, before training.

One block of each kind is copied and run on the inputs that it has in the model: whole on every rank, and cut over
the real ranks. Outputs, gradients of the inputs and of every parameter must agree to rounding: epsilon for each
operation that a number passes, which is taken as the block's modules times its largest dim.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from soli.core import copies
from soli.core.axes import CP, DEPTH, ROW, TP
from soli.core.errors import SoliError, blaming, on_all_ranks
from soli.core.events import events
from soli.core.plan import Plan
from soli.mesh.collectives import all_reduce, extreme
from soli.mesh.mesh import Mesh
from soli.parallel import generators
from soli.parallel.lift import lifted, wide
from soli.parallel.tensor import oned
from soli.parallel.tensor.cut import Cut, Run, become_cut, cut, inside, part_of, running, whole_at
from soli.parallel.tensor.finder import Role
from soli.parallel.units import blocks

SAFETY = 8


@dataclass
class Sample:
    """A block and what it was called with."""

    name: str
    module: nn.Module
    args: tuple
    kwargs: dict


@contextmanager
def sampling(model: nn.Module) -> Iterator[dict[str, Sample]]:
    """Inside, the newest call of every block is kept, by the block's name."""
    found: dict[str, Sample] = {}
    with ExitStack() as hooks:
        for name, module in blocks(model) or [("", model)]:

            def keep(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
                with torch._C.DisableTorchFunctionSubclass():
                    found[name] = Sample(name, module, *copy.deepcopy(_mapped(_plain, (args, kwargs))))

            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        yield found


def one_of_each(samples: dict[str, Sample], roles: dict[str, Role]) -> list[Sample]:
    """The first block of each kind: same class, weights that are cut alike."""
    kinds: dict[Any, Sample] = {}
    for name, sample in samples.items():
        kind = (type(sample.module), tuple(_said(n, roles) for n, _ in _named(name, sample.module)))
        kinds.setdefault(kind, sample)
    return list(kinds.values())


def _plain(x: Any) -> Any:
    """A cut tensor as a plain one that remembers how it was cut."""
    split = x.cuts.get("tp") if type(x) is Cut else None
    if split is None:
        return x.detach() if isinstance(x, Tensor) else x
    x = x.view_as(x).detach()
    x._was_cut = split
    return x


def _named(name: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name}.{n}" if name else n, p) for n, p in module.named_parameters()]


def _said(name: str, roles: dict[str, Role]) -> Any:
    cuts = roles[name].cuts if name in roles else {}
    return tuple((axis, split.dim, split.parts, split.atoms) for axis, split in cuts.items())


def compare(sample: Sample, roles: dict[str, Role], mesh: Mesh, plan: Plan) -> None:
    """Raises SoliError, on every rank, where the cut block computes something else. Collective."""
    named = list(zip(_named(sample.name, sample.module), sample.module.named_parameters(), strict=True))
    cuts = {name: oned.cuts_of(roles[full], mesh) for (full, _), (name, _) in named if full in roles}
    if not any(cuts.values()):
        return
    try:
        expected = _traced(sample, lambda block: None, [], 1.0)
    except Exception as error:  # of somebody's block, which may look for what another one left
        text = f"{sample.name or 'the model'} does not run alone in float64, so how it is cut was not checked in it: {type(error).__name__}: {error}"
        events.note(text.split("\n")[0], shown=mesh.all.index == 0)
        return

    def divide(block: nn.Module) -> None:
        for name, param in block.named_parameters():
            if cuts.get(name):
                param.data = oned.own_part(param.data, cuts[name], mesh).clone()
                become_cut(param, cuts[name])

    seed = float(all(mesh[name].index == 0 for name in plan.summed if name not in plan.apart))
    levels = [replace(run, overlap=False) for run in oned.levels_of(plan, mesh)]
    with blaming(lambda error: _refused(sample, f"{type(error).__name__}: {error}"), RuntimeError, IndexError, TypeError, ValueError):
        got = _traced(sample, divide, levels, seed)
    worst, where = _furthest(sample, expected, got, cuts, mesh, plan)
    for name in (CP, DEPTH, ROW, TP):
        worst = extreme(worst, mesh[name], "max", label=LABEL)
    dims = max((d for p in sample.module.parameters() for d in p.shape), default=1)
    bound = SAFETY * torch.finfo(torch.float64).eps * len(list(sample.module.modules())) * dims
    if worst > bound:
        raise _refused(sample, f"relative error {worst:.1e} of {where or 'another rank'}, bound {bound:.1e}")


def _furthest(sample: Sample, expected: dict[str, Tensor], got: dict[str, Tensor], cuts: dict[str, Any], mesh: Mesh, plan: Plan) -> tuple[float, str]:
    """The largest relative error of what this rank has, and which tensor's it is. `cuts`: of parameters, by name. Collective."""
    worst, where = 0.0, ""
    # A small gradient carries the rounding of larger ones that it is made of: all are measured by the largest that is finite.
    largest = max((float(g.nan_to_num(0.0, 0.0, 0.0).abs().max()) for g in expected.values() if g.numel()), default=0.0)
    for name, value in expected.items():
        if name not in got:
            raise _refused(sample, f"{name} is not there")
        cut_over = cuts.get(name.removeprefix("gradient of "), {})
        if name.startswith("gradient"):
            _add_up(value, got[name], cut_over, plan, mesh)
        wanted = oned.own_part(value, cut_over, mesh)
        if wanted.shape != got[name].shape:
            raise _refused(sample, f"{name} has shape {tuple(got[name].shape)}, not {tuple(wanted.shape)}")
        if wanted.numel():
            alike = (got[name] == wanted) | (got[name].isnan() & wanted.isnan())  # infinities of a mask are
            off = float((got[name] - wanted).masked_fill(alike, 0.0).abs().max()) / (largest or 1.0)
            if not off <= worst:
                worst, where = off if off == off else float("inf"), name
    return worst, where


def _add_up(whole: Tensor, own: Tensor, cut_over: dict[str, Any], plan: Plan, mesh: Mesh) -> None:
    """Make sums, in place, of gradients that are parts of them. Ranks with other rows of the batch have other samples:
    where one weight is cut over them, its gradient is of all their samples, and the others' are of their own."""
    for name in plan.summed:
        if name in cut_over and name in plan.apart:
            all_reduce(whole, mesh[name], label=LABEL)
        elif name not in cut_over and name not in plan.apart:
            all_reduce(own, mesh[name], label=LABEL)


LABEL = "check of the tensor-parallel layout"


def _refused(sample: Sample, got: str) -> SoliError:
    name = sample.name or "the model"
    what = f"cut over the ranks of tp, {name} ({type(sample.module).__name__}) does not compute what it computes whole"
    return on_all_ranks(what, got=got, fix=f'leave its weights whole: soli.parallelize(..., roles={{"{name}.*": "replicated"}}), and tell us of it', seen="wrong-layout")


def _traced(sample: Sample, divide: Callable[[nn.Module], None], levels: list[Run], seed: float) -> dict[str, Tensor]:
    """Outputs and gradients of a float64 copy of the block. Outputs are whole, parameters' gradients local."""
    generators.seed(0)  # what it draws itself is drawn alike, whole and cut
    block = copies.deep(sample.module)._apply(wide)
    block.eval()
    inputs: list[Tensor] = []
    args, kwargs = _mapped(lambda x: _leaf(x, inputs), copy.deepcopy((sample.args, sample.kwargs)))
    if len(levels) == 1:
        args, kwargs = _mapped(lambda x: _as_it_was(levels[0], x), (args, kwargs))
    divide(block)
    with generators.apart(0), torch.enable_grad(), lifted(), running(levels):
        leaves = [x for x in tree_leaves(block(*args, **kwargs)) if isinstance(x, Tensor)]
        outputs = [_wholly(x, levels) for x in leaves]
        floats = [x for x in outputs if x.is_floating_point() and x.requires_grad]
        weights = [torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape) for x in floats]
        total = seed * sum(((x * w).sum() for x, w in zip(floats, weights, strict=True)), torch.zeros(()))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs) if x.is_floating_point()}
    found |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    found |= {f"gradient of {n}": p.grad for n, p in block.named_parameters() if p.grad is not None}
    # what was read of a tensor has a graph that has it: nobody else would free the two
    _mapped(lambda x: x.__dict__.pop("_read", None) if isinstance(x, Tensor) else x, (args, kwargs, inputs))
    return found


def _wholly(x: Tensor, levels: list[Run]) -> Tensor:
    """Whole at every level."""
    for level in reversed(range(len(levels))):
        if type(x) is Cut and levels[level].axis.name in x.cuts:
            with inside(levels, level), torch._C.DisableTorchFunctionSubclass():
                x = whole_at(x, level)
    with torch._C.DisableTorchFunctionSubclass():
        return x.view_as(x) if type(x) is Cut else x


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """tree_map, in the attributes too of objects that hold tensors (a mapping of a class of its own)."""

    def changed(x: Any) -> Any:
        held = {} if isinstance(x, Tensor | nn.Module) or callable(x) else getattr(x, "__dict__", {})
        if not any(isinstance(value, Tensor) for value in tree_leaves(held)):
            return change(x)
        made = copy.copy(x)
        made.__dict__.update(tree_map(change, held))
        return made

    return tree_map(changed, values)


def _leaf(x: Any, inputs: list[Tensor]) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    leaf = x.detach().double().clone().requires_grad_()
    leaf._was_cut = getattr(x, "_was_cut", None)  # type: ignore[attr-defined]
    inputs.append(leaf)
    return leaf


def _as_it_was(run: Run, x: Any) -> Any:
    """Cut as in the model, where the block's input was."""
    split = getattr(x, "_was_cut", None) if isinstance(x, Tensor) else None
    if split is None:
        return x
    with inside([run], 0):
        return cut(part_of(run, x, split), split)
