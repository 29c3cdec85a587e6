"""Backward in two halves, for zero-bubble schedules: gradients of what was received first, those of weights later.

torch.distributed.pipelining has this (stage_backward_input, stage_backward_weight). Run beside it here, it lost the
gradients of weights whose output goes on without meeting a received value (T5's decoder embedding and biases), freed
what two groups of weights share, before 2.13 counted such paths twice, and calls torch.autograd.grad, which turns off
the function modes that recomputed dropout needs. The idea is the same (arXiv 2401.10241): a node of the graph that
leads to what was received, and beside that to weights, is a border; the first half records the gradients that reach
borders, the second goes on from there. Nodes are run once in each half, for the edges that half needs.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import setitem
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup

from soli.core.versions import run_backward


@dataclass
class Group:
    """Borders that lead to the same weights, and the gradients that reached them."""

    borders: list[Node] = field(default_factory=list)
    weights: set[Node] = field(default_factory=set)
    gradients: list[tuple[Tensor | None, ...]] = field(default_factory=list)


@dataclass
class Rest:
    """What the second half has to do. `apart`: outputs that no received value reaches, and their gradients.

    `once`: around every backward of both halves, which together make a block again once (parallel/recompute.py).
    """

    groups: list[Group]
    apart: list[tuple[Tensor, Tensor]]
    once: GraphExecGroup = field(default_factory=GraphExecGroup)


def inputs_first(outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor], weights: list[nn.Parameter]) -> tuple[list[Tensor | None], Rest]:
    """The gradients of `inputs`, leaves of which some may need none, and what is left for `weights_later`."""
    ends = {get_gradient_edge(x).node for x in inputs if x.requires_grad}
    roots = [get_gradient_edge(x).node for x in outputs]
    order, mine = children_first(roots), {id(w) for w in weights}
    leaves = {node for node in order if id(getattr(node, "variable", None)) in mine}
    leads = {node: node in ends for node in order}
    for node in order:
        leads[node] = leads[node] or any(leads[child] for child in _children(node))
    pairs = list(zip(outputs, gradients, strict=True))
    near = [pair for pair, root in zip(pairs, roots, strict=True) if leads[root]]
    apart = [pair for pair, root in zip(pairs, roots, strict=True) if not leads[root]]
    if not near:
        return [None] * len(inputs), Rest([], apart)
    groups = _groups(order, leads, leaves)
    wanted, rest = tuple(x for x in inputs if x.requires_grad), Rest(groups, apart)
    with ExitStack() as hooks, rest.once:
        for group in groups:
            for place in range(len(group.borders)):
                hooks.enter_context(group.borders[place].register_prehook(partial(setitem, group.gradients, place)))
        found = iter(_gradients(near, wanted))
    return [next(found) if x.requires_grad else None for x in inputs], rest


def weights_later(rest: Rest, arrive: Callable[[nn.Parameter], None]) -> None:
    """Add the gradients of the weights to their `.grad`; `arrive` takes each before the next is computed, as autograd's hooks do."""
    with rest.once:
        while rest.groups:
            _weights_of(rest.groups.pop(), arrive)
        if rest.apart:
            outputs, gradients = zip(*rest.apart, strict=True)
            run_backward(outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _weights_of(group: Group, arrive: Callable[[nn.Parameter], None]) -> None:
    starts, targets = [], list(group.weights)
    with ExitStack() as hooks:
        for border, recorded in zip(group.borders, group.gradients, strict=True):
            starts += [(GradientEdge(border, place), g) for place, g in enumerate(recorded) if g is not None]
            # A border may lie below another of its group: what comes from there is in its recorded gradient already.
            if len(group.borders) > 1:
                hooks.enter_context(border.register_prehook(lambda _, recorded=recorded: recorded))
        found = _gradients(starts, tuple(GradientEdge(node, 0) for node in targets)) if starts else []
    for node, gradient in zip(targets, found, strict=False):
        if gradient is not None:
            weight = node.variable  # type: ignore[attr-defined]
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
            arrive(weight)


def _gradients(pairs: list[tuple[Any, Tensor]], inputs: tuple[Any, ...]) -> Any:
    """Of `inputs`, from pairs of an output and its gradient. The graph stays: groups may share nodes below their borders."""
    outputs, gradients = zip(*pairs, strict=True)
    return run_backward(outputs, gradients, True, False, inputs, allow_unreachable=True, accumulate_grad=False)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def children_first(roots: list[Any]) -> list[Node]:
    """Every node below the roots, after all its children; without recursion, for graphs are deep."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, ready = waiting.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(child, False) for child in _children(node) if child not in seen]
    return order


def _groups(order: list[Node], leads: dict[Node, bool], weights: set[Node]) -> list[Group]:
    """Borders with the weights they lead to; those that share a weight are one group."""
    below: dict[Node, set[Node]] = {}  # of nodes that lead to no input: the weights below
    group_of: dict[Node, Group] = {}  # by weight
    for node in order:
        reached: set[Node] = set()
        for child in _children(node):
            if not leads[child]:
                reached |= below[child]
        if not leads[node]:
            below[node] = reached | ({node} if node in weights else set())
        elif reached:
            met = {id(group_of[w]): group_of[w] for w in reached if w in group_of}
            group = Group([node], set(reached))
            for other in met.values():
                group.borders += other.borders
                group.weights |= other.weights
            for weight in group.weights:
                group_of[weight] = group
    found = list({id(group): group for group in group_of.values()}.values())
    for group in found:
        group.gradients = [()] * len(group.borders)
    return found
