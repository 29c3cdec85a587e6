"""Context parallelism: the sequence is cut over cp, from where the model first sees it to its loss.

    tokens[B, S] -> tokens[B, S_C] -> E[B, S_C, H] -> blocks -> loss {L_C} -> L

No weight is cut, so a gradient of one is each rank's part of a sum, which data parallelism adds up with its own: the
axes that reduce gradients have dp x cp ranks. Every operation but attention works on what a rank has.

Under causal attention the first tokens are cheap and the last dear, so under `context=ring` a rank has one piece from
each end (zigzag; Llama 3, arXiv 2407.21783, 3.3.2): of 2C pieces the ones numbered r and 2C - 1 - r.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from soli.core.errors import on_all_ranks
from soli.core.layout import even_parts
from soli.core.plan import Plan
from soli.mesh.collectives import Axis, all_reduce
from soli.mesh.mesh import Mesh, rings
from soli.parallel.pipeline.watch import standing_for
from soli.parallel.tensor.cut import Run, cut, inside, levels, part_of, split_of
from soli.parallel.tensor.split import Spans, Split
from soli.parallel.units import blocks
from soli.parallel.wrapping import wrap


def begin(model: nn.Module, plan: Plan, mesh: Mesh) -> list[Run]:
    """Let lookups of tokens and, where no lookup did, the first block cut the sequence, in place. The level, if cp > 1."""
    if plan.cp == 1:
        return []
    run = Run(mesh["cp"], plan.cp, partial=True, context=plan.context)
    if plan.context == "ring":
        run.rings = rings(mesh, mesh["cp"])
    repeated = {id(module) for _, module in blocks(model)}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            wrap(module, _cutting(module.forward, run, _tokens))
        elif id(module) in repeated:
            wrap(module, _cutting(module.forward, run, _hidden))
    return [run]


def spans_of(size: int, ranks: int, zigzag: bool) -> Spans:
    """The ranges of a sequence that each rank has."""
    if not zigzag:
        return tuple((whole,) if whole[0] < whole[1] else () for whole in even_parts(size, ranks))
    pieces, found = even_parts(size, 2 * ranks), []
    for rank in range(ranks):
        first, last = pieces[rank], pieces[2 * ranks - 1 - rank]
        found.append(tuple((a, b) for a, b in ([(first[0], last[1])] if first[1] == last[0] else [first, last]) if a < b))
    return tuple(found)


def check_begun(levels: list[Run], rows: int, stages: Axis) -> None:
    """Raises SoliError where a forward went by and no sequence was cut.

    `stages`: the ranks of pp, of which one is enough: what it cut the later ones get cut. Collective over them.
    """
    for run in levels:
        found = torch.tensor([int(run.begun), run.longest])
        all_reduce(found, stages, "max", label="the sequence that is cut")
        begun, longest = found.tolist()
        if rows and not begun:
            what = f"cp={run.ranks} cuts the sequence, and the model has none that is long enough"
            none = "no lookup of tokens [B, S] and no block with an input [B, S, H]"
            got = f"the longest dim that could be one has {longest}" if longest else none
            fix = f"cp={longest} or less" if longest > 1 else "leave cp out"
            raise on_all_ranks(what, got=got, allowed=f"sequences of at least {run.ranks}", fix=fix)


def _cutting(forward: Callable[..., Any], run: Run, is_sequence: Callable[[Tensor], bool]) -> Callable[..., Any]:
    """The first input of a module cut along its second dim, where it is a sequence and whole."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if run in levels() and isinstance(first, Tensor) and is_sequence(first):
            first = standing_for(first, lambda x: _begun(run, x))
            if args:
                args = (first, *args[1:])
            else:
                kwargs = {**kwargs, next(iter(kwargs)): first}
        return forward(*args, **kwargs)

    return wrapped


def _tokens(x: Tensor) -> bool:
    """Of a lookup: indices [B, S]. What has as many rows as columns may be of pairs, and is left to the blocks."""
    return x.dim() == 2 and x.shape[0] != x.shape[1]


def _hidden(x: Tensor) -> bool:
    """Of a block: [B, S, H]."""
    return x.dim() == 3 and x.is_floating_point() and not x.is_nested


def _begun(run: Run, x: Tensor) -> Tensor:
    with inside(levels(), levels().index(run)):
        if split_of(x) is not None:
            run.begun = True
            return x
        size = x.shape[1]
        if size < run.ranks:
            run.longest = max(run.longest, size)
            return x
        run.begun = True
        split = Split(1, (size,), size, spans=spans_of(size, run.ranks, run.context == "ring"))
        return cut(part_of(run, x, split), split)
