"""Whether an optimizer updates element by element, or each parameter by itself: found out by trying copies of it on small tensors, whole and in
pieces that optimizers of their own have, as ranks do, not by a list of names. Sharding needs the first, a pipeline the second.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from soli.core import copies

SMALL, LARGE, VECTOR = (4, 6), (136, 144), (24,)
OTHERS = {0: ((), ()), 1: (VECTOR, VECTOR), 2: (SMALL, SMALL, LARGE), 3: ((4, 2, 3),), 4: ((2, 3, 2, 2),), 5: ((2, 3, 2, 2, 1),)}
"""Shapes that are tried, by their dims: some optimizers treat large matrices otherwise (Adafactor of PaLM from 128 on), or convolutions."""
OWN, MOST_OWN = 20_000, 16
"""Elements of shapes of the model that are tried too (of a larger one its rows or columns), and how many of them."""
SCALES = tuple(1.25 ** (n - 41) for n in random.Random(0).sample(range(83), 83))
"""Of gradients by turns, from 1e-4 to 1e4: some look at a norm, or at an element, where it is beyond a limit, or beyond so many times the last one. What
a rank has is smaller by a fourth or more, so that a limit lies between the two on one of them."""
STEPS, LEAST, MOST, TRIED = len(SCALES) + 1, 10, 200, 12_000
"""Some begin with steps of another kind (ADOPT), use a norm of the step before (AvaGrad), or project where gradient and weight are at
right angles, which by chance they are not at once (AdamP). As many as an option says and two more, which may be a step that something
begins with; fewer of more than 60 tensors, so that no more of them are stepped. Then one with an element that is not finite, which one rank has: some
leave that step out. What raises there tells so itself."""
RAISED = "a trial on small tensors raised"
Said = bool | int | float | str
Cut = Callable[[int, Tensor, int], Tensor]
"""Of the tensor of a number what the first or second of two ranks has, flat; of no elements: not there."""


TOLD = dict[Any, str]()
"""What trials of torch's own optimizers showed, by all that they go by: a program may make many engines."""


def by_elements(number: int, x: Tensor, rank: int) -> Tensor:
    """A part of its elements each, not by its rows."""
    return x.flatten().tensor_split([max(1, min(11, (x.numel() - 1) // 2))])[rank]


def by_parameters(number: int, x: Tensor, rank: int) -> Tensor:
    """Every other one each."""
    return x if number % 2 == rank else x.flatten()[:0]


def wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """It, and those that it steps: what a wrapper (Lookahead) has as attributes."""
    found = [optimizer]
    for one in found:
        held = tree_leaves([value for name, value in vars(one).items() if name not in ("state", "param_groups")])
        found += [x for x in held if isinstance(x, torch.optim.Optimizer) and not any(x is y for y in found)]
    return found


def coupling(optimizer: torch.optim.Optimizer, cut: Cut) -> str:
    """What shows that steps of a copy of this very optimizer are not those of two that have a cut each; "" if they are. In float64, up
    to the rounding of a vector kernel's tail: some dozens of operations an element."""
    shapes, groups = _shapes(optimizer), [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    key = (type(optimizer), cut, str(shapes), str(groups), str(sorted(vars(optimizer)))) if type(optimizer).__module__.startswith("torch.optim.") else None
    if key in TOLD:
        return TOLD[key]
    # matrices of a large tensor's elements times as many (Shampoo's, of pieces) take gigabytes, and small tensors tell
    small = [shape for shape in shapes if math.prod(shape[2]) <= math.prod(SMALL)]
    told = (_coupling(optimizer, small, cut) if small else "") or _coupling(optimizer, shapes, cut)
    return told if key is None else TOLD.setdefault(key, told)


def _coupling(optimizer: torch.optim.Optimizer, shapes: list[Shape], cut: Cut) -> str:
    held = [*optimizer.param_groups, *map(vars, wrapped(optimizer))]
    said = [x for one in held for value in one.values() for x in (value.values() if isinstance(value, dict) else (value,))]
    most = max(LEAST, min(MOST, TRIED // max(len(shapes), 1)))
    steps = min(max([STEPS, *(x + 2 for x in said if type(x) is int)]), most)
    try:
        whole, numbers = _stepped(optimizer, shapes, steps, lambda _, x, rank: x, 0)
        ranks = [_stepped(optimizer, shapes, steps, cut, rank) for rank in range(2)]
    except Exception as error:  # the program's own code: it wants matrices (Muon), or what no copy has
        return f"{RAISED} {type(error).__name__}: {error}"
    # what it knows of the gradients, such as a distance to go (D-Adaptation), is of all parameters
    if any(other != numbers for _, other in ranks):
        return "a number in its groups is another in a trial"
    rounding = 32 * steps * torch.finfo(torch.float64).eps * max([4.0, *(float(x.nan_to_num(0.0).abs().max()) for x in whole)])
    for i, x in enumerate(whole):
        for rank, (parts, _) in enumerate(ranks):
            if i >= len(parts) or not torch.allclose(cut(i % len(shapes), x, rank), parts[i], rtol=0.0, atol=rounding, equal_nan=True):
                beside = ", where a gradient is not finite" * (i >= len(shapes))
                return f"a tensor of {tuple(x.shape)} becomes another in a trial{beside}"
    return ""


Shape = tuple[int, int, tuple[int, ...]]
"""That is tried: the number of a group, the place in it of a parameter whose attributes and name it has, and the shape."""


def _shapes(optimizer: torch.optim.Optimizer) -> list[Shape]:
    """Those that are tried: of each group's parameters by their dims and by what a program says of them, and each by its name."""
    found, own = list[Shape](), dict[tuple[int, ...], tuple[int, int]]()
    for number, group in enumerate(optimizer.param_groups):
        kinds = dict[Any, int]()
        for place, p in enumerate(group["params"]):
            kinds.setdefault((p.dim(), repr(sorted((name, x) for name, x in vars(p).items() if isinstance(x, Said)))), place)
            for kept in (0, -1):
                tried = tuple(min(n, 2) if (p.numel() > OWN) and i != kept % p.dim() else n for i, n in enumerate(p.shape))
                if 0 < math.prod(tried) <= OWN:
                    own.setdefault(tried, (number, place))
        found += [(number, place, shape) for (dim, _), place in kinds.items() for shape in OTHERS.get(dim, ())]
        if group.get("param_names"):
            found += [(number, place, OTHERS.get(p.dim(), [SMALL])[0]) for place, p in enumerate(group["params"])]
    return found + [(*where, shape) for shape, where in list(own.items())[:MOST_OWN]]


def _stepped(like: torch.optim.Optimizer, shapes: list[Shape], steps: int, cut: Cut, rank: int) -> tuple[list[Tensor], list[float]]:
    """Parameters after steps of a copy that has what a rank has of each tensor, and the numbers that its groups have then; and after one step
    more, where it does not raise, with an element that is not finite."""
    pool = torch.randn(2 * OWN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def drawn(i: int, step: int) -> Tensor:
        first, shape = (997 * step + 89 * i) % OWN, shapes[i][2]
        found = pool[first : first + math.prod(shape)].clone()
        found[0] = math.nan if (i, step) == (0, steps + 1) else found[0]
        return cut(i, found.view(shape), rank).clone()

    params = [nn.Parameter(drawn(i, 0)) for i in range(len(shapes))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        there = [(number, place, param) for (number, place, _), param in zip(shapes, params, strict=True) if param.numel()]
        for number, place, param in there:
            vars(param).update(vars(like.param_groups[number]["params"][place]))
        made = _tried(like, [[(place, param) for number, place, param in there if number == g] for g in range(len(like.param_groups))])

        def move(step: int) -> None:
            for i, param in enumerate(params):
                param.grad = drawn(i, step + 1).mul_(SCALES[step % len(SCALES)])
            made.step()

        for step in range(steps):
            move(step)
        found = [param.detach().clone() for param in params]
        numbers = [x for group in made.param_groups for _, x in sorted(group.items()) if isinstance(x, int | float) or _is_number(x)]
        with suppress(Exception):  # it raises on whoever has that gradient, and its words are the program's
            move(steps)
            found += [param.detach() for param in params]
    return found, [round(float(x), 12) for x in numbers]


def _tried(like: torch.optim.Optimizer, lists: list[list[tuple[int, nn.Parameter]]]) -> torch.optim.Optimizer:
    """A copy with all that it is, before its first step, on these parameters, each with a place in its group, and without what is of another device."""
    given, state, accepted = like.param_groups, like.state, inspect.signature(type(like).__init__).parameters
    memo: dict[int, Any] = {id(given): (groups := []), id(state): (states := defaultdict[Any, Any](dict))}
    for group, own in zip(given, lists, strict=True):
        params = [param for _, param in own]
        plain: dict[str, Any] = {"fused": None, "foreach": None, "capturable": False}
        if group.get("param_names"):
            plain["param_names"] = [group["param_names"][place] for place, _ in own]
        if group.get("lr") == 0:  # until a warmup begins
            plain["lr"] = group.get("initial_lr") or 1e-3
        options = {k: plain.get(k, v.cpu() if _is_number(v) else v) for k, v in group.items() if k != "params"}
        memo[id(group)] = copy.deepcopy(options, memo) | {"params": params}
        groups.append(memo[id(group)])
        # some (Adagrad) make states when they are built; where that takes more than options, a step without them raises, and is told
        with suppress(Exception):
            if state and params:
                taken = {k: v for k, v in groups[-1].items() if k in like.defaults and k in accepted}
                states.update(type(like)(params, **taken).state)
    made = copies.optimizer(like, memo)
    sizes = {p.shape for group in given for p in group["params"] if p.numel() > 1}
    if kept := [tuple(x.shape) for x in memo.values() if isinstance(x, Tensor) and x.shape in sizes]:
        raise TypeError(f"it keeps a tensor of {kept[0]}, as a parameter is, and soli cuts only those in self.state[p]")
    return made


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta
