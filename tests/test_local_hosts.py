"""Several hosts: shared memory inside each, gloo between them. Here hosts are named by SOLI_HOST, or are namespaces."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist

import soli.backend  # noqa: F401
import test_local
from pool import Pool
from soli.mesh.local import identity
from sweep import swept

LAYOUTS = (swept("aabb"), swept("abab"), "abb", swept("abc"), "ab")
"""The host of each rank: one of two ranks beside one of one, and no host of more than one, are all that there is."""


def on_hosts(layout: str, function, *args):
    os.environ["SOLI_HOST"] = layout[dist.get_rank()]
    try:
        return function(*args)
    finally:
        del os.environ["SOLI_HOST"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_movement_equals_gloo_bitwise(pool: Pool, layout: str) -> None:
    found = pool.run(on_hosts, layout, test_local.movement, ranks=len(layout), deadline=60)
    assert found == [[]] * len(layout)


def sums(layout: str):
    """Every reduction: first over each host in the order of its ranks, then over the hosts; the same twice."""
    group = dist.new_group(backend="local")
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [[r for r in range(size) if layout[r] == host] for host in dict.fromkeys(layout)]
    bad = []
    for dtype, n in itertools.product(test_local.DTYPES, (0, 1, 7, 5000)):
        if dtype == torch.bool:
            continue
        parts = [test_local.values(n * size, dtype, r) for r in range(size)]
        for op, name in test_local.OPS.items():
            wide = dtype in (torch.bfloat16, torch.float16) and name in ("sum", "product")
            widened = [part.float() if wide else part for part in parts]
            of_hosts = [test_local.ordered([widened[r] for r in ranks], name) for ranks in members]
            want = test_local.ordered(of_hosts, name).to(dtype)
            for turn in range(2):
                mine, root = parts[rank].clone(), parts[rank].clone()
                dist.all_reduce(mine, op, group=group)
                part = torch.empty(n, dtype=dtype)
                dist.reduce_scatter_tensor(part, parts[rank].clone(), op, group=group)
                dist.reduce(root, 1, op, group=group)
                for call, got, expected in (
                    ("all_reduce", mine, want),
                    ("reduce_scatter", part, want.view(size, n)[rank]),
                    ("reduce", root, want if rank == 1 else parts[rank]),
                ):
                    if not torch.equal(got, expected):
                        bad.append((call, name, dtype, n, turn))
    return bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_have_one_order(pool: Pool, layout: str) -> None:
    found = pool.run(on_hosts, layout, sums, layout, ranks=len(layout), deadline=60)
    assert found == [[]] * len(layout)


def wrong(kind: str):
    """A call that does not fit, on a group of two hosts. Who is slow may hear of it while still in the barrier before."""
    from test_local_faults import caught

    group = dist.new_group(backend="local")
    rank = dist.get_rank()
    caught(dist.barrier, group)
    if kind == "operation" and rank >= 2:
        found = caught(dist.broadcast, torch.zeros(4), 0, group=group)
    elif kind == "splits":
        sent = torch.zeros(5 if rank == 3 else 4)
        sizes = [2, 1, 1, 1] if rank == 3 else [1, 1, 1, 1]
        found = caught(dist.all_to_all_single, torch.zeros(4), sent, [1, 1, 1, 1], sizes, group=group)
    elif kind == "message":
        found = (
            caught(dist.send, torch.zeros(4), 3, group=group)
            if rank == 0
            else caught(dist.recv, torch.zeros(5), 0, group=group)
            if rank == 3
            else caught(dist.barrier, group)
        )
    else:
        found = caught(dist.all_reduce, torch.zeros(4 + (kind == "size" and rank == 3)), group=group)
    after = caught(dist.barrier, group)
    return found[0] or after[0], found[1]


WORDS = {
    "operation": ("the hosts of group", "ranks [2, 3]: broadcast(root 0)", "ranks [0, 1]: all_reduce(sum)"),
    "size": ("called different collectives", "rank 3: all_reduce(sum) of float32[5] at "),
    "splits": ("the splits of all_to_all", "which sends 8"),
    "message": ("sent 16 bytes, received as 20 bytes",),
}


@pytest.mark.parametrize("kind", WORDS)
def test_what_does_not_fit_is_named_on_every_host(pool: Pool, kind: str) -> None:
    for rank, (text, seconds) in enumerate(pool.run(on_hosts, "aabb", wrong, kind, ranks=4)):
        assert all(word in text for word in WORDS[kind]), (rank, text)
        assert seconds < 2


def pretending():
    """Two kernels, one name."""
    from test_local_faults import caught

    real = identity.mine
    if dist.get_rank() == 1:
        identity.mine = lambda: identity.Identity(**{**vars(real()), "kernel": "another"})
    try:
        return caught(dist.new_group, backend="local")[0]
    finally:
        identity.mine = real


def test_hosts_that_claim_to_be_one(pool: Pool) -> None:
    for text in pool.run(on_hosts, "aaa", pretending, ranks=3):
        assert "rank 0 and rank 1 say that they are on one host, a, and are not" in text
        assert "SOLI_HOST" in text
