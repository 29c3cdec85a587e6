"""Attention of a cut sequence against attention of the whole one, on real ranks; its schedule, its bytes, its balance."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from queue import Queue

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pool import Pool
from sequences import pairs
from soli.core.errors import SoliError
from soli.mesh.collectives import Axis, Pending
from soli.mesh.record import recorder
from soli.parallel.context import blocks, ring, scores
from soli.parallel.context.ring import Spans, attention, calls, length, positions
from sweep import swept

HALVES = (3, 7)
"""Roundings to 16 bits on the longest path, half an eps each. Of out: weights, a block's out, the result. Of gradients:
these three in the out that is saved, weights, gradients of scores, a block's gradient, the result."""
OF_EXP = 20
"""Units in the last place by which the CPU kernel's float32 exp may be off."""


def contiguous(*sizes: int) -> Spans:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(((end - size, end),) if size else () for size, end in zip(sizes, ends, strict=True))


def zigzag(ranks: int, chunk: int) -> Spans:
    pieces = [(i * chunk, (i + 1) * chunk) for i in range(2 * ranks)]
    return tuple((pieces[r], pieces[2 * ranks - 1 - r]) for r in range(ranks))


# --- the schedule -----------------------------------------------------------------------------------------


@st.composite
def owned(draw: st.DrawFn, ranks: int) -> Spans:
    """Random ranges of random ranks, which together are a sequence; some are empty, some follow one another."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=0, max_size=8))
    spans: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    at = 0
    for size in sizes:
        spans[draw(st.integers(0, ranks - 1))].append((at, at + size))
        at += size
    return tuple(tuple(draw(st.permutations(own))) for own in spans)


@given(of_q=owned(3), of_k=owned(3), causal=st.booleans())
def test_calls_are_what_may_be_seen_each_pair_once(of_q: Spans, of_k: Spans, causal: bool) -> None:
    seen = torch.zeros(sum(map(length, of_q)), sum(map(length, of_k)), dtype=torch.int64)
    numbers = lambda spans: torch.tensor([i for a, b in spans for i in range(a, b)], dtype=torch.int64)
    for queries, keys in product(of_q, of_k):
        for call in calls(queries, keys, causal):
            i, j = numbers(queries)[slice(*call.rows)], numbers(keys)[slice(*call.columns)]
            assert torch.equal(numbers(positions(keys, call.columns)), j)
            part = torch.ones(len(i), len(j), dtype=torch.int64)
            seen[i[:, None], j[None]] += part.tril() if call.diagonal else part
    wanted = torch.ones_like(seen)
    assert torch.equal(seen, wanted.tril() if causal else wanted)
    assert sum(pairs(of_q, of_k, causal)) == int(seen.sum())


def test_zigzag_is_balanced() -> None:
    for ranks in range(1, 9):
        spans = zigzag(ranks, 3)
        n = 6 * ranks
        assert pairs(spans, spans, True) == [n * (n + 1) // 2 // ranks] * ranks
        assert pairs(spans, spans, False) == [n * n // ranks] * ranks
    even = contiguous(4, 4, 4, 4)
    assert pairs(even, even, True) == [10, 26, 42, 58]


def test_few_calls() -> None:
    """Spans that follow one another are one call: of queries and of keys."""
    spans = zigzag(4, 2)
    counts = [[len(calls(queries, keys, True)) for keys in spans] for queries in spans]
    own_of_last = [[3 if r == j else 1 for j in range(4)] for r in range(3)] + [[1, 1, 1, 1]]
    assert counts == own_of_last
    assert calls(spans[1], spans[0], True) == (ring.Call((0, 4), (0, 2), False),)
    assert calls(spans[0], spans[1], True) == (ring.Call((2, 4), (0, 4), False),)


# --- whole attention, and how far from it rounding may lead ---------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    of_q: Spans
    of_k: Spans
    causal: bool = False
    mask: str = ""
    heads: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (4, 4)
    lead: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    inner: int = 0  # ranks of an inner ring; 0: a single ring

    def whole(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the result, in float64 but of values that the case's type has."""
        made = torch.Generator().manual_seed(len(self.name))
        (h, g), (e, f), rows, keys = self.heads, self.sizes, *self.lengths()
        shapes = [(h, rows, e), (g, keys, e), (g, keys, f), (h, rows, f)]
        found = [torch.randn(*self.lead, *s, generator=made, dtype=torch.float64) for s in shapes]
        return tuple(x.to(self.dtype).double() for x in found)  # type: ignore[return-value]

    def lengths(self) -> tuple[int, int]:
        return sum(map(length, self.of_q)), sum(map(length, self.of_k))

    def whole_mask(self) -> Tensor | None:
        """As a user gives it; leading dims as they come, rows [l or 1]."""
        rows, keys = self.lengths()
        made = torch.Generator().manual_seed(7)
        # Every third row opens what is later than itself alone: under causality it sees nothing.
        early = (torch.arange(rows)[:, None] >= torch.arange(keys)) & (torch.arange(rows)[:, None] % 3 == 2)
        kinds = {
            "": lambda: None,
            "padded": lambda: (torch.arange(keys) < keys - 3).expand(2, 1, 1, keys),
            "packed": lambda: torch.arange(rows)[:, None] // 5 == torch.arange(keys)[None] // 5,
            "blind": lambda: torch.rand(2, 1, rows, keys, generator=made) < torch.rand(rows, 1, generator=made) - 0.3,
            "of heads": lambda: torch.randn(2, rows, keys, generator=made, dtype=torch.float64),
            "float blind": lambda: kinds["of heads"]().masked_fill_(~kinds["blind"]()[0], -math.inf),
            "float row": lambda: torch.linspace(-2, 2, keys, dtype=torch.float64),
            "far": lambda: torch.zeros(rows, keys, dtype=torch.float64).masked_fill_(~kinds["blind"]()[0, 0] | early, -1e30),
        }  # fmt: skip
        mask = kinds[self.mask]()
        return mask.to(self.dtype) if mask is not None and mask.dtype == torch.float64 else mask

    def bias(self) -> Tensor:
        """Everything that hides or adds, [.., l, S]. A row that a large number hides wholly is as without it."""
        rows, keys = self.lengths()
        bias, mask = torch.zeros(rows, keys, dtype=torch.float64), self.whole_mask()
        if mask is not None and mask.dtype == torch.bool:
            bias = bias.masked_fill(~mask, -math.inf)
        elif mask is not None:
            bias = bias + mask.double()
        if self.causal:
            bias = bias.masked_fill(torch.ones(rows, keys).tril() == 0, -math.inf)
        top = bias.amax(-1, keepdim=True)
        return bias - top.masked_fill((top > -1e29) | (top == -math.inf), 0)


def wanted(case: Case) -> tuple[Tensor, ...]:
    """torch's result, and its gradients of q, k and v."""
    *leaves, grad = case.whole()
    q, k, v = (x.requires_grad_() for x in leaves)
    plain = case.causal and not case.mask
    out = F.scaled_dot_product_attention(
        q, k, v, None if plain else case.bias(), is_causal=plain, scale=case.scale,
        enable_gqa=case.heads[0] != case.heads[1],
    )  # fmt: skip
    out.backward(grad)
    return out.detach(), *(x.grad for x in (q, k, v))  # type: ignore[misc]


def bounds(case: Case) -> list[Tensor]:
    """For each element of `wanted` how far rounding may lead: the sum of its terms' sizes, times all roundings' eps."""
    q, k, v, grad = (x.abs() for x in case.whole())
    h, g = case.heads
    k, v = (x.repeat_interleave(h // g, -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    bias = case.bias()
    signed_q, signed_k = case.whole()[:2]
    signed = signed_q @ signed_k.repeat_interleave(h // g, -3).mT * scale + bias
    weights = signed.softmax(-1).nan_to_num()
    # A rounding of a score is a relative one of its weight; those of the largest score count for all.
    largest = float((q @ k.mT * scale).max()) + float(bias.masked_fill(bias.isinf(), 0).abs().clamp(max=100).max())
    depth = (q.shape[-1] + 4) * largest + sum(case.lengths()) + grad.shape[-1] + OF_EXP
    exact = torch.finfo(blocks.sums(case.dtype)).eps * depth
    half = torch.finfo(case.dtype).eps / 2 if case.dtype.itemsize == 2 else 0.0
    out = weights @ v
    of_scores = weights * (grad @ v.mT + (grad * out).sum(-1, keepdim=True)) * scale
    summed = lambda x: x.unflatten(-3, (g, h // g)).sum(-3)
    parts = [out, of_scores @ k, summed(of_scores.mT @ q), summed(weights.mT @ grad)]
    return [x * (exact + half * HALVES[i > 0]) for i, x in enumerate(parts)]


# --- kernels of a block -----------------------------------------------------------------------------------


BLOCKS = [
    Case("plain", contiguous(9), contiguous(7)),
    Case("causal", contiguous(8), contiguous(8), causal=True),
    Case("long", contiguous(300), contiguous(600), sizes=(8, 8), mask="blind"),
    *(Case(f"mask {m}", contiguous(9), contiguous(7), mask=m) for m in ("blind", "of heads", "float blind")),
    Case("causal and mask", contiguous(8), contiguous(8), mask="blind", causal=True),
    Case("groups", contiguous(9), contiguous(7), heads=(6, 2)),
    Case("float32", contiguous(9), contiguous(7), dtype=torch.float32, mask="float blind"),
    Case("bfloat16", contiguous(9), contiguous(7), dtype=torch.bfloat16, mask="float blind"),
]


def one_block(case: Case, kernel: blocks.Kernel | None) -> list[Tensor]:
    """out, lse, dq, dk, dv; with a kernel, that one."""
    q, k, v, grad = (x.to(case.dtype) for x in case.whole())
    k = k.mT.contiguous().mT  # no stride of 1 in its last dim
    mask = case.whole_mask()
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    scale = q.shape[-1] ** -0.5
    with pytest.MonkeyPatch.context() as patch:
        if kernel is not None:
            patch.setattr(blocks, "chosen", lambda *_: kernel)
        out, lse = blocks.forward(q, k, v, mask, case.causal, scale)
        return [out, lse, *blocks.backward(grad, q, k, v, out, lse, mask, case.causal, scale)]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_kernels_of_a_block(case: Case) -> None:
    """torch's and the one written out: both as torch's attention, and the same lse."""
    want, bound = wanted(case), bounds(case)
    ours, written = one_block(case, None), one_block(case, blocks.WRITTEN)
    for found in (ours, written):
        out, lse, *grads = found
        for got, wished, limit in zip((out, *grads), want, bound, strict=True):
            assert bool(((got.double() - wished).abs() <= limit).all())
        assert torch.equal(lse == -math.inf, (case.bias() == -math.inf).all(-1).expand(lse.shape))
    seen = ours[1] != -math.inf
    sharp = torch.finfo(ours[1].dtype).eps * (sum(case.lengths()) + OF_EXP) * float(written[1][seen].abs().max())
    assert float((ours[1] - written[1])[seen].abs().max()) <= sharp


def test_what_the_kernels_take() -> None:
    x = torch.zeros(1, 1, 4, 8)
    assert blocks.chosen(x, x, x) is blocks.CPU
    assert blocks.chosen(x, x, x[..., :4]) is blocks.WRITTEN
    assert blocks.chosen(x[:, :, :0], x, x) is blocks.WRITTEN
    for rows, keys in ((0, 4), (4, 0)):
        out, lse = blocks.forward(x[:, :, :rows], x[:, :, :keys], x[:, :, :keys], None, False, 1.0)
        assert out.shape == (1, 1, rows, 8)
        assert not out.any()
        assert bool((lse == -math.inf).all())


# --- rings --------------------------------------------------------------------------------------------------


def cases(ranks: int) -> list[Case]:
    n = {1: (10,), 2: (5, 5), 3: (4, 4, 4), 4: (3, 3, 3, 3)}[ranks]
    odd = {1: (9,), 2: (7, 2), 3: (1, 6, 3), 4: (5, 1, 0, 4)}[ranks]
    none = {1: (4,), 2: (0, 6), 3: (5, 0, 0), 4: (0, 3, 0, 4)}[ranks]
    even, uneven, empty, zig = contiguous(*n), contiguous(*odd), contiguous(*none), zigzag(ranks, 2)
    turned = tuple(reversed(zig))
    made = []
    for causal in (False, True):
        word = "causal" if causal else "all"
        for name, spans in (("even", even), ("uneven", uneven), ("zigzag", zig), ("turned", turned)):
            made.append(Case(f"{word} {name}", spans, spans, causal))
        made.append(Case(f"{word} cross", uneven, zig, causal))
        made.append(Case(f"{word} cross, queries few", empty, uneven, causal, heads=(4, 2)))
        made.append(Case(f"{word} groups", zig, zig, causal, heads=(6, 2), scale=0.3))
        made.append(Case(f"{word} of other size", zig, zig, causal, sizes=(4, 6), mask="blind"))
        made.append(Case(f"{word} no batch", uneven, uneven, causal, lead=()))
        made.append(Case(f"{word} more batch", uneven, uneven, causal, lead=(2, 2), mask="of heads"))
        for mask in ("padded", "packed", "blind", "of heads", "float blind", "float row", "far"):
            made.append(Case(f"{word} mask {mask}", zig, zig, causal, mask))
            made.append(Case(f"{word} mask {mask} uneven", uneven, uneven, causal, mask, heads=(2, 1)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            made.append(Case(f"{word} {dtype}", zig, zig, causal, "blind", heads=(4, 2), dtype=dtype))
    if ranks > 1:
        made.append(Case("keys of one rank", even, empty))
        made += [Case(f"rings of one, {c}", zig, zig, c, "blind", inner=1) for c in (False, True)]
    if ranks == 4:
        made += [replace(case, inner=2) for case in made]
    return made


Ways = tuple[Axis, dict[int, tuple[Axis | None, Axis | None]]]


def axes() -> Ways:
    """The axis of all ranks; by their size the inner rings, and the rings between these."""
    if not dist.is_initialized():
        return Axis("cp"), {0: (None, None)}
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis("cp", size, rank, tuple(range(size)), dist.group.WORLD)
    ways: dict[int, tuple[Axis | None, Axis | None]] = {0: (None, None), 1: (Axis("alone"), axis)}
    if size != 4:
        return axis, ways
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    inner = next(Axis("inner", 2, rank % 2, r, g) for r, g in groups.items() if rank in r and r[1] - r[0] == 1)
    outer = next(Axis("outer", 2, rank // 2, r, g) for r, g in groups.items() if rank in r and r[1] - r[0] == 2)
    return axis, ways | {2: (inner, outer)}


def local(x: Tensor, spans: tuple[tuple[int, int], ...], dim: int = -2) -> Tensor:
    """This rank's rows."""
    numbers = torch.tensor([i for start, stop in spans for i in range(start, stop)], dtype=torch.int64)
    return x.index_select(dim, numbers)


def run_case(case: Case, where: Ways) -> list[Tensor]:
    """This rank's out, dq, dk and dv."""
    axis, (inner, outer) = where[0], where[1][case.inner]
    q, k, v, grad = (x.to(case.dtype) for x in case.whole())
    queries, keys = case.of_q[axis.index], case.of_k[axis.index]
    leaves = [local(q, queries), local(k, keys), local(v, keys)]
    leaves = [x.requires_grad_() for x in leaves]
    mask = case.whole_mask()
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = local(mask, queries)
    out = attention(
        *leaves, of_q=case.of_q, of_k=case.of_k, axis=axis, causal=case.causal, mask=mask, scale=case.scale,
        inner=inner, outer=outer,
    )  # fmt: skip
    out.backward(local(grad, queries))
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def attend(ranks: int):
    """Which elements of which cases are further from the whole than rounding leads, and what each case sent."""
    where = axes()
    problems, sent = [], {}
    for case in cases(ranks):
        recorder.clear()
        found = run_case(case, where)
        sent[case] = sorted((r.axis, r.label, r.bytes) for r in recorder.records if r.operation == "exchange")
        mine = [case.of_q[where[0].index]] + [case.of_q[where[0].index]] + [case.of_k[where[0].index]] * 2
        for name, got, want, limit, spans in zip(
            ("out", "dq", "dk", "dv"), found, wanted(case), bounds(case), mine, strict=True
        ):
            off = (got.double() - local(want, spans)).abs()
            if got.dtype != case.dtype or not bool((off <= local(limit, spans)).all()):
                worst = float((off / local(limit, spans)).nan_to_num(posinf=math.inf).max()) if off.numel() else 0
                problems.append((case.name, case.inner, name, worst, got.dtype))
    return problems, sent


def closed_form(case: Case, rank: int, ranks: int) -> list[tuple[str, str, int]]:
    """Every message of a forward and a backward: (axis, label, bytes)."""
    g, (e, f) = case.heads[1], case.sizes
    each = math.prod(case.lead) * g * (e + f)
    sizes = [each * length(spans) for spans in case.of_k]
    low, high = case.dtype.itemsize, blocks.sums(case.dtype).itemsize
    if case.inner < 2:
        blocks_sent = [("cp", j) for j in range(ranks) if j != (rank + 1) % ranks]
        sums_sent = [("cp", j) for j in range(ranks) if j != rank]
    else:  # two inner rings of two: from one's own ring both turns' first, from the other's too
        here, other = rank, (rank + 2) % 4
        blocks_sent = [("inner", here), ("inner", other), ("outer", here)]
        sums_sent = [("inner", here ^ 1), ("inner", other ^ 1), ("outer", other)]
    found = [(axis, ring.KEYS, sizes[j] * low) for axis, j in blocks_sent] * 2
    return sorted(found + [(axis, ring.GRADIENTS, sizes[j] * high) for axis, j in sums_sent])


@pytest.mark.parametrize("ranks", [1, 2, 3, swept(4)])
def test_ring_attention(pool: Pool, ranks: int) -> None:
    for rank, (problems, sent) in enumerate(pool.run(attend, ranks, ranks=ranks)):
        assert problems == []
        for case, messages in sent.items():
            assert messages == closed_form(case, rank, ranks), case


@pytest.mark.parametrize(("inner", "outer"), [(3, 2), (2, 3), (4, 2)])
def test_rings_of_more_ranks(inner: int, outer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on threads for ranks, with queues for what moves."""
    size = inner * outer
    # all of them before: of two threads that both make one, a message is lost
    posts: dict[tuple[str, int, int], Queue[Tensor]] = {
        (axis, a, b): Queue() for axis in ("inner", "outer") for a in range(size) for b in range(size)
    }

    def exchange(received: Tensor, sent: Tensor, axis: Axis, to: int, source: int, **_: object) -> Pending:
        here = axis.ranks[axis.index]
        posts[axis.name, here, axis.ranks[to]].put(sent.clone())
        arrived = lambda: received.copy_(posts[axis.name, axis.ranks[source], here].get(timeout=10))
        return Pending([], None, lambda: (arrived(), None)[1])

    def run(rank: int, case: Case) -> list[Tensor]:
        o, i = divmod(rank, inner)
        ring_of = Axis("inner", inner, i, tuple(range(o * inner, (o + 1) * inner)))
        between = Axis("outer", outer, o, tuple(range(i, size, inner)))
        return run_case(case, (Axis("cp", size, rank, tuple(range(size))), {inner: (ring_of, between)}))

    monkeypatch.setattr(ring, "exchange", exchange)
    for causal in (False, True):
        spans = zigzag(size, 1)
        case = Case("threads", spans, spans, causal, inner=inner)
        with ThreadPoolExecutor(size) as threads:
            found = list(threads.map(lambda rank, case=case: run(rank, case), range(size)))
        for rank, parts in enumerate(found):
            for got, want, limit in zip(parts, wanted(case), bounds(case), strict=True):
                off = (got - local(want, spans[rank])).abs()
                assert bool((off <= local(limit, spans[rank])).all()), (causal, rank)
        assert all(queue.empty() for queue in posts.values())


def test_bytes_of_even_rings() -> None:
    """What the closed form above comes to: p - 1 blocks, three times, the last in the type of sums."""
    for inner in (0, 2):
        case = Case("x", contiguous(3, 3, 3, 3), contiguous(3, 3, 3, 3), dtype=torch.bfloat16, inner=inner)
        block = 2 * 2 * 3 * (4 + 4)
        for rank in range(4):
            assert sum(n for _, _, n in closed_form(case, rank, 4)) == 3 * block * (2 + 2 + 4)


# --- order, and what is kept ----------------------------------------------------------------------------------


def told():
    """The order of sends, of waiting for them and of kernels; and how many elements forward keeps."""
    where = axes()
    log: list[str] = []
    exchange, forward, backward = ring.exchange, blocks.forward, blocks.backward

    def exchanged(*args, label, wait):
        letter = ("g" if label == ring.GRADIENTS else "k") + args[2].name[0]
        log.append(f"send {letter}")
        pending = exchange(*args, label=label, wait=wait)
        wait_for = pending.wait
        pending.wait = lambda: (log.append(f"wait {letter}"), wait_for())  # type: ignore[method-assign]
        return pending

    def computed(kernel):
        return lambda *args: (log.append("compute"), kernel(*args))[1]

    kept: list[int] = []
    pack = lambda x: (kept.append(x.numel()), x)[1]
    ring.exchange, blocks.forward, blocks.backward = exchanged, computed(forward), computed(backward)
    try:
        logs = []
        for inner in (0, 2):
            even = contiguous(3, 3, 3, 3)
            case = Case("order", even, even, inner=inner)
            log.clear()
            kept.clear()
            with saved_tensors_hooks(pack, lambda x: x):
                run_case(case, where)
            logs.append(list(log))
    finally:
        ring.exchange, blocks.forward, blocks.backward = exchange, forward, backward
    return logs, sum(kept)


def test_sends_are_under_way_while_kernels_compute(pool: Pool) -> None:
    for (single, double), kept in pool.run(told, ranks=4):
        turn = ["send kc", "compute", "wait kc"]
        there = [*turn * 3, "compute"]
        back = [
            *turn,
            "send kc",
            "compute",
            "send gc",
            "wait kc",
            "send kc",
            "compute",
            "wait gc",
            "send gc",
            "wait kc",
        ]
        assert single == [*there, *back, "compute", "wait gc", "send gc", "wait gc"]
        there = [
            "send ko",
            "send ki",
            "compute",
            "wait ki",
            "compute",
            "wait ko",
            "send ki",
            "compute",
            "wait ki",
            "compute",
        ]
        # The first round's end waits for the second's first kernel; then the last sum goes home.
        back = [
            "send ko",
            "send ki",
            "compute",
            "wait ki",
            "compute",
            "send gi",
            "wait ko",
            "send ki",
            "compute",
            "wait gi",
        ]
        assert double == [*there, *back, "wait ki", "compute", "send gi", "wait gi", "send go", "wait go"]
        q, lse = 2 * 2 * 3 * 4, 2 * 2 * 3
        assert kept == 4 * q + lse  # q, k, v, out


# --- scores ---------------------------------------------------------------------------------------------------


def with_scores():
    """softmax(q k^T) v with scores written out, against the whole; and what was sent."""
    axis, _ = axes()
    size, rank = axis.size, axis.index
    problems, sent = [], []
    uneven = contiguous(*{1: (5,), 2: (4, 1), 3: (2, 0, 3), 4: (1, 0, 4, 2)}[size])
    for spans, lead, dtype in product((uneven, zigzag(size, 2)), ((2, 3), ()), (torch.float64, torch.bfloat16)):
        made = torch.Generator().manual_seed(3)
        n, e, f = sum(map(length, spans)), 4, 6
        shapes = ((n, e), (n, e), (n, f), (n, f))
        whole = [torch.randn(*lead, *s, generator=made, dtype=torch.float64).to(dtype) for s in shapes]
        q, k, v = (x.double().clone().requires_grad_() for x in whole[:3])
        factor = 0.5
        (torch.tanh(q @ k.mT * factor) @ v).backward(whole[3].double())
        mine = [local(x, spans[rank]).requires_grad_() for x in whole[:3]]
        recorder.clear()
        rows = scores.ring_qk(mine[0], mine[1], spans, axis)
        out = scores.ring_av(torch.tanh(rows * factor), mine[2], spans, axis)
        out.backward(local(whole[3], spans[rank]))
        sent.append((spans, lead, dtype, sorted((r.label, r.bytes) for r in recorder.records)))
        # Sums of e, f and n terms, each of at most `largest` products; three roundings to the type between any two.
        eps, largest = torch.finfo(dtype).eps, max(float(x.abs().max()) for x in whole)
        depth = e + f + n + 3 * (dtype == torch.bfloat16)
        wants = (torch.tanh(q @ k.mT * factor) @ v, q.grad, k.grad, v.grad)
        for name, got, want in zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in mine)), wants, strict=True):
            limit = eps * depth * largest**3 * (e + n if dtype == torch.float64 else 1)
            if not bool(((got.double() - local(want, spans[rank])).abs() <= limit).all()):
                problems.append((name, spans, lead, dtype))
        whole_rows = local(whole[0].double() @ whole[1].double().mT, spans[rank])
        if not bool(((rows.double() - whole_rows).abs() <= eps * e * e * largest**2).all()):
            problems.append(("scores", spans, lead, dtype))
    return problems, sent


@pytest.mark.parametrize("ranks", [1, 2, 3, swept(4)])
def test_rings_of_scores(pool: Pool, ranks: int) -> None:
    for rank, (problems, sent) in enumerate(pool.run(with_scores, ranks=ranks)):
        assert problems == []
        for spans, lead, dtype, messages in sent:
            rows = [math.prod(lead) * length(own) for own in spans]
            others = [j for j in range(ranks) if j != (rank + 1) % ranks]
            blocks_sent = [rows[j] * n * dtype.itemsize for j in others for n in (4, 4, 6, 6)]
            sums = blocks.sums(dtype).itemsize
            sums_sent = [rows[j] * n * sums for j in range(ranks) if j != rank for n in (4, 6)]
            found: Counter[tuple[str, int]] = Counter(messages)
            assert found == Counter(
                [(scores.KEYS, n) for n in blocks_sent] + [(scores.GRADIENTS, n) for n in sums_sent]
            )


def small_terms():
    """Of four ranks' values 1 and three times 2^-9: added up in bfloat16 one by one, these are lost."""
    axis, spans = axes()[0], contiguous(1, 1, 1, 1)
    v = torch.tensor(1.0 if axis.index == 0 else 2.0**-9, dtype=torch.bfloat16).expand(1, 1, 1, 1).clone()
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    mean = attention(q, q, 4 * v, of_q=spans, of_k=spans, axis=axis)
    total = scores.ring_av(torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), v, spans, axis)
    return float(mean), float(total)


def test_blocks_are_added_up_in_32_bits(pool: Pool) -> None:
    exact = float(torch.tensor(1 + 3 * 2.0**-9).bfloat16())
    assert exact > 1
    assert pool.run(small_terms, ranks=4) == [(exact, exact)] * 4


# --- what is refused, and what autocast does --------------------------------------------------------------------


def test_what_is_refused() -> None:
    axis, spans = Axis("cp"), contiguous(4)
    x = torch.zeros(1, 2, 4, 8)
    go = lambda q=x, k=x, v=x, **more: attention(q, k, v, of_q=spans, of_k=spans, axis=axis, **more)
    for wrong in (
        lambda: go(q=x[:, :, :3]),
        lambda: go(k=x.double()),
        lambda: go(k=x.expand(2, 2, 4, 8)),
        lambda: go(k=torch.zeros(1, 3, 4, 8), v=torch.zeros(1, 3, 4, 8)),
        lambda: go(mask=torch.zeros(4, 4, requires_grad=True)),
        lambda: go(inner=Axis("inner", 2, 0, (0, 1))),
    ):
        with pytest.raises(SoliError):
            wrong()


def test_autocast() -> None:
    """As torch's: 32 bits are lowered, 64 stay, and what is written out is not lowered a second time."""
    axis, spans = Axis("cp"), contiguous(4)
    q, k, v = (torch.randn(1, 2, 4, n, generator=torch.Generator().manual_seed(n)) for n in (8, 8, 6))
    with torch.autocast("cpu", torch.bfloat16):
        low = attention(q, k, v, of_q=spans, of_k=spans, axis=axis)
        assert low.dtype == scores.ring_qk(q, k, spans, axis).dtype == torch.bfloat16
        high = attention(q.double(), k.double(), v.double(), of_q=spans, of_k=spans, axis=axis)
        assert high.dtype == torch.float64
    lowered = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(low, attention(*lowered, of_q=spans, of_k=spans, axis=axis))
