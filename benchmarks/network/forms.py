"""The closed forms of docs/communication.md, of the GPT that the lab trains: what a rank sends in a step, and how long.

    step = computing + bytes / rate + rounds * latency

Nothing overlaps in it, so it is the most that a step takes on links of that rate whose two directions are free.

    Legend: T tokens of the global batch, S of a row, H width, V vocabulary, L layers, p ranks; R x C ranks of a grid,
    D copies of it, q the edge of a cube; M elements of the buffer that a collective is about
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2

from soli.core.plan import Plan


@dataclass(frozen=True)
class Size:
    """workload.Size's numbers, as the forms need them."""

    layers: int
    width: int
    vocabulary: int
    tokens: int  # of a row
    batch: int

    @property
    def products(self) -> list[tuple[int, int]]:
        """(what it sums, what it makes) of every matrix that is multiplied."""
        h = self.width
        return [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * self.layers + [(h, self.vocabulary)]

    @property
    def vectors(self) -> int:
        """Elements of biases, norms and positions."""
        return self.width * (9 * self.layers + 2 * (2 * self.layers + 1) + self.tokens)

    @property
    def parameters(self) -> int:
        return sum(k * n for k, n in self.products) + self.vocabulary * self.width + self.vectors

    @property
    def flops(self) -> float:
        """Of a step: forward and backward of all products and of attention."""
        tokens, h = self.tokens * self.batch, self.width
        attention = 2 * 2 * tokens * self.tokens * h * self.layers
        return 3 * (2 * tokens * sum(k * n for k, n in self.products) + attention)


@dataclass(frozen=True)
class Call:
    """Collectives of one kind on one axis, `times` in a step, of `elements` each."""

    kind: str
    elements: float
    ranks: int
    times: float = 1

    @property
    def sent(self) -> float:
        """Elements that a rank sends, in the mean over the ranks."""
        whole = 2 if self.kind == "all_reduce" else 1
        return whole * (self.ranks - 1) / self.ranks * self.elements * self.times

    @property
    def rounds(self) -> float:
        """Messages one after the other: those of trees, which is kind to collectives of many ranks."""
        return self.times * (2 if self.kind == "all_reduce" else 1) * ceil(log2(self.ranks))


def calls(plan: Plan, size: Size) -> list[Call]:
    """What a rank of this plan calls in a step. Plans of tp (1D with and without sp, grids, cubes) or of dp alone."""
    if plan.tensor == "3d":
        return [*_cube(plan.grid[0], size)]
    if plan.tensor != "1d":
        return [*_grid(plan, size)]
    return [*_line(plan, size)]


def sent(plan: Plan, size: Size) -> float:
    """Elements that a rank sends in a step."""
    return sum(call.sent for call in calls(plan, size))


def rounds(plan: Plan, size: Size) -> float:
    """Messages of a step that wait for each other."""
    return sum(call.rounds for call in calls(plan, size))


def _line(plan: Plan, size: Size) -> Iterator[Call]:
    p, hidden = plan.tp, size.tokens * size.batch * size.width
    if p > 1:
        sums = 4 * size.layers + 2  # of the embedding and of the head one each
        if plan.sp:
            yield Call("all_gather", hidden, p, sums)
            yield Call("reduce_scatter", hidden, p, sums)
            yield Call(
                "all_gather", size.tokens * size.width, p
            )  # the gradient of positions, cut as what they are added to
            yield Call("all_reduce", size.width * (2 * (2 * size.layers + 1) + 2 * size.layers), p)
        else:
            yield Call("all_reduce", hidden, p, sums)
        yield from _loss(size.tokens * size.batch, p)
    yield from _data(plan, size.parameters / p)


def _data(plan: Plan, parameters: float) -> Iterator[Call]:
    ranks = plan.dp or 1
    if plan.zero == 0:
        yield Call("all_reduce", parameters, ranks)
    else:
        yield Call("reduce_scatter", parameters, ranks)
        yield Call("all_gather", parameters, ranks, 2 if plan.zero == 3 else 1)


def _loss(tokens: float, ranks: int) -> Iterator[Call]:
    yield Call("all_reduce", tokens, ranks)
    yield Call("all_reduce", 3 * tokens, ranks)


def _norms(size: Size, tokens: float, ranks: int) -> Iterator[Call]:
    norms = 2 * size.layers + 1
    yield Call("all_reduce", tokens, ranks, 2 * norms)
    yield Call("all_reduce", 2 * tokens, ranks, norms)


def _grid(plan: Plan, size: Size) -> Iterator[Call]:
    _, r, c = plan.grid
    d = plan.depth if plan.tensor == "2.5d" else 1
    tokens = size.tokens * size.batch / d
    panels = c if r == c else r + c - 1
    for k, n in size.products:
        yield Call("panel", tokens / r * k / panels, c, 3 * panels)
        yield Call("panel", n / c * k / panels, r, 3 * panels)
    table, rows = size.vocabulary / c * size.width, tokens / r
    for kind in ("all_gather", "reduce_scatter"):
        yield Call(kind, table, r)
        yield Call(kind, rows * size.width, c)
    yield from _norms(size, rows, c)
    yield from _loss(rows, c)
    yield Call("all_reduce", size.vectors / c, r * d)
    yield Call("all_reduce", (size.parameters - size.vectors) / (r * c), d)


def _cube(q: int, size: Size) -> Iterator[Call]:
    tokens = size.tokens * size.batch
    for k, n in size.products:
        for elements in (tokens * k / q**2, n * k / q**2):
            yield Call("all_gather", elements, q, 2)
            yield Call("reduce_scatter", elements, q)
        yield Call("reduce_scatter", tokens * n / q**2, q)
        yield Call("all_gather", tokens * n / q**2, q)
    for elements in (size.vocabulary * size.width / q**2, tokens * size.width / q**2):
        yield Call("all_gather", elements, q)
        yield Call("reduce_scatter", elements, q)
    yield from _norms(size, tokens / q**2, q)
    yield from _loss(tokens / q**2, q)
    yield Call("all_reduce", tokens / q**2, q)
    yield Call("all_reduce", size.vectors / q, q * q)
