"""Products of 2D, 2.5D and 3D tensor parallelism on real ranks, against the whole product in float64.

A bound is machine epsilon times the terms and ranks of a sum times the sum of absolute terms, element by element.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from noted import bytes_by
from pool import Pool
from soli.mesh.collectives import Axis
from soli.mesh.record import recorder
from soli.parallel.keep import contexts
from soli.parallel.tensor import cube, summa
from soli.parallel.tensor.split import Split, taken
from sweep import swept


def axes(names: tuple[str, ...], shape: tuple[int, ...], gloo: bool = False) -> list[Axis]:
    """The axes of a grid of all ranks, row-major; every rank makes every group. Over gloo each axis has two."""
    ranks = torch.arange(prod(shape)).view(shape)
    me = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
        if size == 1:
            found.append(Axis(name, ranks=(me,)))
            continue
        for family in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            backend = "gloo" if gloo else dist.get_backend()
            group = dist.new_group(family, backend=backend)
            other = dist.new_group(family, backend=backend) if gloo else None
            if me in family:
                found.append(Axis(name, size, family.index(me), tuple(family), group, backend, other))
    return found


def cut(parts: tuple[int, ...], atoms: int) -> Split:
    return Split(0, parts, atoms)


def everyone() -> Axis:
    size = dist.get_world_size()
    return Axis("grid", size, dist.get_rank(), tuple(range(size)), dist.group.WORLD, dist.get_backend())


def bytes_now() -> dict[tuple[str, str], int]:
    """Of the collectives since the last call."""
    found = bytes_by(recorder)
    recorder.clear()
    return found


def nonzero(expected: dict[tuple[str, Axis], int]) -> dict[tuple[str, str], int]:
    """What axes of size above 1 are to have moved."""
    return {(operation, axis.name): n for (operation, axis), n in expected.items() if n and axis.size > 1}


def wrong(what: str, got: Tensor | None, want: Tensor, bound: Tensor) -> list[str]:
    if got is None or got.shape != want.shape:
        return [f"{what}: {None if got is None else list(got.shape)}, not {list(want.shape)}"]
    off = (got.double() - want).abs() - bound
    return [] if not off.numel() or off.max() <= 0 else [f"{what}: {float(off.max()):.1e} above its bound"]


def block(whole: Tensor, sizes: tuple[int, ...], index: int, dim: int) -> Tensor:
    """Part `index` of a dim cut in these sizes."""
    return whole.narrow(dim, sum(sizes[:index]), sizes[index])


def lasting(count: Callable[[], Any]) -> Any:
    """What `count` finds, unless it is soon gone: a backend's thread may hold what it moved a moment longer."""
    for _ in range(40):
        if not (found := count()):
            break
        time.sleep(0.025)
    return found


def kept(call: Any, x: Tensor, w: Tensor) -> list[str]:
    """What is saved for the backward, and what lives on after it, beside the local blocks: nothing."""
    found = []
    for for_x, for_w in ((True, True), (True, False), (False, True)):
        x.requires_grad_(for_x), w.requires_grad_(for_w)
        call()  # what is made once, such as a backend's views of its memory
        saved: list[int] = []
        keep = lambda t, saved=saved: (saved.append(t.data_ptr()), t)[1]
        wanted = sorted([x.data_ptr()] * for_w + [w.data_ptr()] * for_x)
        before = [t for t in gc.get_objects() if type(t) is Tensor]
        with saved_tensors_hooks(keep, lambda t: t):
            result = call()
        known = {id(t) for t in (*before, result)}
        new = lambda known=known: [list(t.shape) for t in gc.get_objects() if type(t) is Tensor and id(t) not in known]
        alive = lasting(new)
        noted = tree_leaves(vars(result.grad_fn))
        if sorted(saved) != wanted or alive or any(isinstance(t, Tensor) for t in noted):
            found.append(f"{for_x}, {for_w}: {len(saved)} saved, {len(wanted)} wanted; {alive} live on; {noted}")
    return found


# --- panels, without ranks --------------------------------------------------------------------------------

CUTS = [Split(0, parts, atoms) for parts, atoms in [((12,), 12), ((12,), 4), ((6, 6), 3), ((4, 4, 4), 2), ((12,), 1)]]


def test_square_grids_have_a_panel_a_rank() -> None:
    for split in CUTS[:-1]:
        for size in (1, 2, 3):
            found = summa.panels(split, split, size, size)
            whole = [((0, split.local(size, r)),) for r in range(size) if split.local(size, r)]
            assert [(p.j, p.i, p.of_x, p.of_w) for p in found] == [
                (r, r, ranges, ranges) for r, ranges in enumerate(whole)
            ]


def test_panels_cover_everything_once() -> None:
    def elements(split: Split, ranks: int, rank: int, ranges: Any) -> list[int]:
        own = [at for start, stop in split.own(ranks, rank) for at in range(start, stop)]
        return [own[at] for start, stop in ranges for at in range(start, stop)]

    for of_x in CUTS:
        for of_w in CUTS:
            for rows, cols in [(1, 1), (2, 2), (2, 3), (3, 2), (1, 4), (4, 1), (5, 3)]:
                seen = []
                for p in summa.panels(of_x, of_w, rows, cols):
                    x, w = elements(of_x, cols, p.j, p.of_x), elements(of_w, rows, p.i, p.of_w)
                    assert x == w
                    assert len(x) == p.size > 0
                    seen += x
                assert sorted(seen) == list(range(12))


def test_ranges_in_any_order() -> None:
    """A rank may have its ranges in another order than the dim has them."""
    assert summa.matched([(4, 8), (0, 4)], [(0, 8)]) == (((0, 8),), ((4, 8), (0, 4)))
    assert summa.matched([(0, 3), (6, 9)], [(2, 7)]) == (((2, 4),), ((0, 1), (4, 5)))


def test_other_sizes_are_refused() -> None:
    x, w, one = torch.zeros(2, 4), torch.zeros(3, 4), Axis("row")
    with pytest.raises(ValueError, match="x is cut along"):
        summa.linear(x, w, cut((4,), 4), cut((5,), 5), one, one)
    with pytest.raises(ValueError, match="columns"):
        summa.linear(x, w, cut((5,), 5), cut((5,), 5), one, one)


TWELVE = cut((12,), 12)

# --- 2D ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    """A product on a grid of any shape: sizes of rows and columns are taken from the front of the lists."""

    of_x: Split = TWELVE
    of_w: Split = TWELVE
    tokens: tuple[int, ...] = (4, 4, 4, 4)
    new: tuple[int, ...] = (5, 5, 5, 5)
    lead: tuple[int, ...] = ()
    for_x: bool = True
    for_w: bool = True
    dtype: torch.dtype = torch.float64


FLAT = [
    Flat(),
    Flat(tokens=(1, 4, 2, 3), new=(3, 1, 2, 4), lead=(2,)),
    Flat(cut((15,), 5), cut((15,), 5), tokens=(3, 1, 2, 2), lead=(2, 3)),
    Flat(cut((6, 6, 6), 3), cut((6, 6, 6), 3)),
    Flat(cut((6, 6, 6), 6), cut((6, 6, 6), 2), lead=(2,)),
    Flat(cut((14,), 7), cut((7, 7), 7)),
    Flat(cut((4,), 1), cut((4,), 1)),
    Flat(cut((4,), 1), cut((4,), 4)),
    Flat(cut((0,), 1), cut((0,), 1)),
    Flat(tokens=(3, 0, 2, 0), new=(0, 4, 0, 3)),
    Flat(tokens=(0, 0, 0, 0), lead=(2,)),
    Flat(for_x=False, lead=(2,)),
    Flat(for_w=False, lead=(2,)),
    Flat(cut((24,), 8), cut((24,), 12), tokens=(16, 8, 16, 8), dtype=torch.bfloat16),
    Flat(cut((24,), 8), cut((24,), 12), dtype=torch.float32),
]


def of_flat(case: Flat, row: Axis, col: Axis) -> list[str]:
    tokens, new, k = case.tokens[: row.size], case.new[: col.size], case.of_x.size
    torch.manual_seed(0)
    x, w, dy = (
        torch.randn(shape, dtype=torch.float64).to(case.dtype)
        for shape in ((sum(tokens), *case.lead, k), (sum(new), k), (sum(tokens), *case.lead, sum(new)))
    )
    mine = lambda t: block(t, tokens, row.index, 0)
    at = case.of_x.at(x.dim() - 1)
    local_x = taken(mine(x), at, col.size, col.index).clone().requires_grad_(case.for_x)
    local_w = taken(block(w, new, col.index, 0), case.of_w.at(1), row.size, row.index).clone()
    local_w.requires_grad_(case.for_w)
    moved_x = mine(x).numel() * x.element_size()
    moved_w = new[col.index] * k * x.element_size()

    recorder.clear()
    y, found = summa.linear(local_x, local_w, case.of_x, case.of_w, row, col), []
    want = nonzero({("broadcast", col): moved_x, ("broadcast", row): moved_w})
    if (got := bytes_now()) != want:
        found.append(f"forward moved {got}, not {want}")
    y.backward(block(mine(dy), new, col.index, -1).clone())
    want = nonzero(
        {
            ("broadcast", row): moved_w * case.for_x,
            ("reduce", col): moved_x * case.for_x,
            ("broadcast", col): moved_x * case.for_w,
            ("reduce", row): moved_w * case.for_w,
        }
    )
    if (got := bytes_now()) != want:
        found.append(f"backward moved {got}, not {want}")

    # In 16 bits y is rounded once, a gradient once on every rank; the rest is float32's.
    eps = torch.finfo(case.dtype).eps
    half = case.dtype == torch.bfloat16
    ranks, inner = row.size + col.size, torch.finfo(torch.float32).eps if half else eps
    x, w, dy = x.double(), w.double(), dy.double()
    flat, of_y = x.flatten(0, -2), dy.flatten(0, -2)
    whole, size = x @ w.T, x.abs() @ w.abs().T
    rounding = (k + ranks) * inner * size * 1.01 + (whole.abs() * eps / 2 if half else 0)
    own = lambda t: block(mine(t), new, col.index, -1)
    found += wrong("y", y, own(whole), own(rounding))
    own = lambda t: taken(mine(t), at, col.size, col.index)
    if case.for_x:
        bound = (sum(new) + ranks) * eps * (dy.abs() @ w.abs())
        found += wrong("dx", local_x.grad, own(dy @ w), own(bound))
    if case.for_w:
        bound = (flat.shape[0] + ranks) * eps * (of_y.abs().T @ flat.abs())
        own = lambda t: taken(block(t, new, col.index, 0), case.of_w.at(1), row.size, row.index)
        found += wrong("dw", local_w.grad, own(of_y.T @ flat), own(bound))
    none = [
        name
        for name, t, need in (("x", local_x, case.for_x), ("w", local_w, case.for_w))
        if not need and t.grad is not None
    ]
    return [f"{case}: {line}" for line in (*found, *none)]


def of_grid(shape: tuple[int, int], gloo: bool) -> list[str]:
    row, col = axes(("row", "col"), shape, gloo)
    return [line for case in FLAT for line in of_flat(case, row, col)]


SHAPES = [(2, 2), (3, 3), (2, 3), (3, 2), (1, 4), (4, 1), (2, 1), (1, 1)]
MORE = [(3, 3), (3, 2)]
"""Of nine ranks, and what runs over gloo."""


@pytest.mark.parametrize(("shape", "gloo"), [*(swept(s, False) if s in MORE else (s, False) for s in SHAPES), ((2, 2), True), ((3, 2), True)])
def test_linear_2d(many: Pool, shape: tuple[int, int], gloo: bool) -> None:
    ranks = prod(shape)
    assert many.run(of_grid, shape, gloo, ranks=ranks) == [[]] * ranks


def two_at_a_time(shape: tuple[int, int]) -> list[str]:
    """What is begun before what, over which groups, and how many panels live, where there are four."""
    row, col = axes(("row", "col"), shape, gloo=True)
    turns: dict[tuple[str, str], list[bool]] = {}
    split, lines, alive, log = cut((12,), 12), [], {}, []
    plain = {"broadcast": summa.broadcast, "reduce": summa.reduce, "_add": summa._add}

    def watched(name: str) -> Any:
        def call(tensor: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Any:
            refs = alive.setdefault((name, axis.name), [])
            if name == "broadcast" or args[0] != axis.index:  # where a sum arrives, it may be in the gradient itself
                refs.append(weakref.ref(tensor))
            if lasting(lambda: sum(ref() is not None for ref in refs) > 2):
                lines.append(f"three panels of {name} over {axis.name}")
            tensor.mul_(1)  # as collectives do that stage what they send: what is saved must not look changed
            log.append(f"{name} {axis.name}")
            turns.setdefault((name, axis.name), []).append(axis.group is axis.other)
            pending = plain[name](tensor, axis, *args, **kwargs)
            if name == "reduce":
                wait = pending.wait
                pending.wait = lambda: (log.append(f"wait {axis.name}"), wait())
            return pending

        return call

    def add(*args: Any) -> None:
        log.append("compute")
        plain["_add"](*args)

    # exp keeps its result, and refuses to go back once that has been written.
    x = torch.randn(3, split.local(col.size, col.index), requires_grad=True).exp()
    w = torch.randn(5, split.local(row.size, row.index), requires_grad=True).exp()
    summa.broadcast, summa.reduce, summa._add = watched("broadcast"), watched("reduce"), add
    try:
        y = summa.linear(x, w, split, split, row, col)
        pair = ["broadcast col", "broadcast row"]
        if log != [*pair, *pair, "compute", *pair, "compute", *pair, "compute", "compute"]:
            lines.append(f"forward in the order {log}")
        log.clear()
        y.sum().backward()
        pair, sums, waits = pair[::-1], ["reduce col", "reduce row"], ["wait col", "wait row"]
        if log != [*pair, *pair, *sums, *([*pair, *sums, *waits] * 2), *sums, *waits, *waits]:
            lines.append(f"backward in the order {log}")
        if any(found[:4] != [False, True, False, True] for found in turns.values()):
            lines.append(f"neighbours share a group: {turns}")
    finally:
        summa.broadcast, summa.reduce, summa._add = plain["broadcast"], plain["reduce"], plain["_add"]
    return lines


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_two_panels_at_a_time(many: Pool, shape: tuple[int, int]) -> None:
    assert many.run(two_at_a_time, shape, ranks=6) == [[]] * 6


# --- 3D ---------------------------------------------------------------------------------------------------


EIGHT = cut((8,), 8)


@dataclass(frozen=True)
class Cube:
    """A product on a cube; the tokens of each number of depth, K and N by their cuts."""

    tokens: tuple[int, ...] = (4, 4)
    atoms_in: int = 0  # of the tokens; 0: each of them
    atoms_out: int = 0
    of_k: Split = EIGHT
    of_n: Split = EIGHT
    atoms_w: int = 0
    lead: tuple[int, ...] = (2,)
    for_x: bool = True
    for_w: bool = True
    dtype: torch.dtype = torch.float64


CUBES = [
    Cube(),
    Cube(tokens=(5, 3), of_k=cut((7,), 7), of_n=cut((10,), 5), lead=()),
    Cube(tokens=(6, 6), atoms_in=3, atoms_out=1, of_n=cut((3, 3), 3)),
    Cube(tokens=(4, 0), of_k=cut((4,), 1)),
    Cube(tokens=(0, 0), of_n=cut((2,), 2)),
    Cube(tokens=(1, 2), of_n=cut((1,), 1), lead=(2, 3)),
    Cube(for_x=False, tokens=(3, 5)),
    Cube(for_w=False, tokens=(3, 5)),
    Cube(dtype=torch.bfloat16, tokens=(3, 8)),
]


def of_case(case: Cube, gather: Axis, scatter: Axis, depth: Axis) -> list[str]:
    torch.manual_seed(0)
    k, n = case.of_k.size, case.of_n.size
    make = lambda *shape: torch.randn(shape, dtype=torch.float64).to(case.dtype)
    w, xs, dys = make(n, k), [], []
    for t in case.tokens[: depth.size]:
        xs.append(make(t, *case.lead, k))
        dys.append(make(t, *case.lead, n))
    t = case.tokens[depth.index]
    tokens_in, tokens_out = (Split(0, (t,), atoms or max(t, 1)) for atoms in (case.atoms_in, case.atoms_out))
    of_n = lambda m, dim: taken(m, case.of_n.at(dim), gather.size, gather.index)
    of_k = lambda m: taken(m, case.of_k.at(m.dim() - 1), scatter.size, scatter.index)
    n_own = case.of_n.local(gather.size, gather.index)
    k_own = case.of_k.local(scatter.size, scatter.index)
    of_w = Split(0, (n_own,), case.atoms_w or max(n_own, 1))
    of_block = lambda m: taken(of_k(of_n(m, 0)), of_w, depth.size, depth.index)
    of_x = lambda m: of_k(taken(m, tokens_in, gather.size, gather.index))
    of_y = lambda m: of_n(taken(m, tokens_out, scatter.size, scatter.index), m.dim() - 1)
    local_x = of_x(xs[depth.index]).clone().requires_grad_(case.for_x)
    local_w = of_block(w).clone().requires_grad_(case.for_w)

    padded = lambda split, axis: axis.size * max(split.local(axis.size, r) for r in range(axis.size))
    m = prod(case.lead) * w.element_size()
    moved_x, moved_y = padded(tokens_in, gather) * m * k_own, padded(tokens_out, scatter) * m * n_own
    moved_w = padded(of_w, depth) * k_own * w.element_size()
    recorder.clear()
    y = cube.linear(
        local_x, local_w, tokens_in=tokens_in, tokens_out=tokens_out,
        gather=gather, scatter=scatter, depth=depth, of_w=of_w,
    )  # fmt: skip
    found = []
    want = nonzero(
        {("all_gather", gather): moved_x, ("all_gather", depth): moved_w, ("reduce_scatter", scatter): moved_y}
    )
    if (got := bytes_now()) != want:
        found.append(f"forward moved {got}, not {want}")
    y.backward(of_y(dys[depth.index]).clone())
    want = nonzero(
        {
            ("all_gather", scatter): moved_y,
            ("all_gather", depth): moved_w * case.for_x,
            ("reduce_scatter", gather): moved_x * case.for_x,
            ("all_gather", gather): moved_x * case.for_w,
            ("reduce_scatter", depth): moved_w * case.for_w,
        }
    )
    if (got := bytes_now()) != want:
        found.append(f"backward moved {got}, not {want}")

    # In 16 bits every rank's part of a sum is rounded, and the sum, in whatever order.
    eps, ranks = torch.finfo(case.dtype).eps, gather.size + scatter.size + depth.size
    x, dy, w = xs[depth.index].double(), dys[depth.index].double(), w.double()
    found += wrong("y", y, of_y(x @ w.T), of_y((k + ranks) * eps * (x.abs() @ w.abs().T)))
    if case.for_x:
        found += wrong("dx", local_x.grad, of_x(dy @ w), of_x((n + ranks) * eps * (dy.abs() @ w.abs())))
    if case.for_w:
        x, dy = (torch.cat([part.double().flatten(0, -2) for part in parts]) for parts in (xs, dys))
        bound = (x.shape[0] + ranks) * eps * (dy.abs().T @ x.abs())
        found += wrong("dw", local_w.grad, of_block(dy.T @ x), of_block(bound))
    return [f"{case}: {line}" for line in found]


def of_cube(shape: tuple[int, int, int]) -> list[str]:
    three = axes(("gather", "scatter", "depth"), shape)
    return [line for case in CUBES for line in of_case(case, *three)]


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 2), (1, 3, 2), (3, 2, 1), (1, 1, 2)])
def test_linear_3d(many: Pool, shape: tuple[int, int, int]) -> None:
    ranks = prod(shape)
    assert many.run(of_cube, shape, ranks=ranks) == [[]] * ranks


# --- what is kept; autocast and recomputation -------------------------------------------------------------


def both_products() -> list[tuple[Any, Any, Any, Any]]:
    """On 2 x 2 and 2 x 2 x 1, of x [4, 8] and W [6, 8]: the product, and this rank's part of x, of W and of y."""
    row, col = axes(("row", "col"), (2, 2))
    gather, scatter, depth = axes(("gather", "scatter", "depth"), (2, 2, 1))
    tokens, k, n = cut((4,), 4), cut((8,), 8), cut((3,), 3)
    half = lambda t, dim, axis: t.chunk(2, dim)[axis.index]
    flat = lambda x, w: summa.linear(x, w, k, k, row, col)
    deep = lambda x, w: cube.linear(
        x, w, tokens_in=tokens, tokens_out=tokens, gather=gather, scatter=scatter, depth=depth, of_w=n
    )
    part = lambda first, second: lambda t: half(half(t, 0, first), 1, second).clone()
    return [
        (flat, part(row, col), part(col, row), part(row, col)),
        (deep, part(gather, scatter), part(gather, scatter), part(scatter, gather)),
    ]


def only_blocks() -> list[str]:
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    found = []
    for product, of_x, of_w, _ in both_products():
        x_own, w_own = of_x(x), of_w(w)
        found += kept(lambda: product(x_own, w_own), x_own, w_own)  # noqa: B023
    return found


def test_only_local_blocks_are_kept(many: Pool) -> None:
    assert many.run(only_blocks, ranks=4) == [[]] * 4


def in_modes() -> list[str]:
    """Under autocast as F.linear is; under selective recomputation a product is not sent for again."""
    torch.manual_seed(0)
    x, w, found = torch.randn(4, 8), torch.randn(6, 8), []
    for product, of_x, of_w, of_y in both_products():
        x_own, w_own = of_x(x).requires_grad_(), of_w(w).requires_grad_()
        recorder.clear()
        y = product(x_own, w_own)
        y.sum().backward()
        plain, grads = bytes_now(), (x_own.grad, w_own.grad)
        x_own.grad = w_own.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            low, want = product(x_own, w_own), F.linear(x, w)
        low.float().sum().backward()
        if (got := bytes_now()) != {key: n // 2 for key, n in plain.items()}:
            found.append(f"under autocast {got}, without {plain}")
        bound = 4 * torch.finfo(torch.bfloat16).eps * of_y(x.abs() @ w.abs().T)
        found += wrong("y", low, of_y(want.double()), bound)
        types = low.dtype, x_own.grad.dtype, w_own.grad.dtype
        if types != (torch.bfloat16, torch.float32, torch.float32):
            found.append(f"types {types}")
        x_own.grad = w_own.grad = None
        first, again = contexts()
        with first:
            y = product(x_own, w_own)
        forward = bytes_now()
        with again:
            z = product(x_own, w_own)
        if (got := bytes_now()) or not torch.equal(y, z):
            found.append(f"sent again, or another y: {got}")
        with torch.autocast("cpu", torch.bfloat16):  # of a product that was made without
            z.sum().backward()
        both = forward | {key: forward.get(key, 0) + n for key, n in bytes_now().items()}
        if both != plain:
            found.append(f"recomputed {both}, else {plain}")
        for name, got, want in zip(("dx", "dw"), (x_own.grad, w_own.grad), grads, strict=True):
            found += wrong(name, got, want.double(), 1e-5 * (1 + want.abs()))
    return found


def test_autocast_and_recomputation(many: Pool) -> None:
    assert many.run(in_modes, ranks=4) == [[]] * 4
