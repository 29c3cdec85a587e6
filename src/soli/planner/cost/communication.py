"""What collectives cost, and which of them a plan issues.

Ranks are numbered with tp innermost, then cp, dp and pp (Megatron-LM, arXiv 2104.04473, 3): an axis with `inner`
ranks inside it has some of its ranks in one server and goes over the network with the others.

    all_reduce       inside a server what was measured (rings.py); 2 (n-1)/n S / B + latency between (Patarasuk and Yuan 2009)
    over servers     reduce_scatter inside, all_reduce of S/k between, all_gather inside, with k ranks a server
    reduce_scatter, all_gather: half of it.   all_to_all: (n-1)/n S / B + latency
"""

from dataclasses import dataclass

import numpy as np

from soli.planner.cost import overlap, rings, schedules
from soli.planner.cost.constants import Constants
from soli.planner.cost.points import FULL, LINE, Amount, Array, Points


def inside(p: Points, n: Array, inner: Array) -> Array:
    """How many of an axis' n ranks are in one server, where `inner` ranks lie between two neighbours."""
    return np.clip(np.floor(p.node / inner), 1.0, n)


def all_reduce(p: Points, k: Constants, size: Array, n: Array, inner: Array) -> Array:
    """Seconds for `size` bytes over n ranks."""
    local = inside(p, n, inner)
    between = n / local
    link, net = p.link * k.link_share, p.net * k.net_share
    near = np.zeros(np.broadcast(size, local).shape)
    # Of most axes no two ranks are in one server, and the table's lookup takes longest.
    if len(at := np.flatnonzero(local > 1)):
        each = (size, local, link, p.link_latency * k.latency_scale)
        near[at] = rings.all_reduce(*(np.broadcast_to(one, near.shape)[at] for one in each))
    far = 2 * (between - 1) / between * size / local / net
    return np.where(n > 1, near + (far + 2 * np.log2(between) * p.net_latency * k.latency_scale), 0.0)


def gather(p: Points, k: Constants, size: Array, n: Array, inner: Array) -> Array:
    """Seconds of an all_gather that ends in, or a reduce_scatter that starts from, `size` bytes."""
    return all_reduce(p, k, size, n, inner) / 2


def all_to_all(p: Points, k: Constants, size: Array, n: Array, inner: Array, crossing: Amount = 1.0, apart: Amount = 1.0) -> Array:
    """Seconds in which every rank sends a part of `size` bytes to each of n; of what is for others, and for other servers, a share."""
    local = inside(p, n, inner)
    near = apart * size * (local - 1) / n / (p.link * k.link_share)
    far = crossing * size * (n - local) / n / (p.net * k.net_share)
    return np.where(n > 1, near + far + np.where(local < n, p.net_latency, p.link_latency) * k.latency_scale, 0.0)


def of_layer(p: Points, k: Constants, crossing: tuple[Array, Array], grid: tuple[Array, Array]) -> tuple[Array, Array]:
    """Seconds of a layer's collectives in a forward and in a backward, and none of ZeRO.

    tp: two sums each way of T h values, some behind the products; under sp as many bytes are gathered and scattered (arXiv 2205.05198, 4.2.2);
    or what a grid's products send (grids.py). Full recomputation sends again. cp: what crosses it each way (context.py). ep: tokens to their
    experts and back (GShard, arXiv 2006.16668), each rank of tp with its part of them under sp.
    """
    one, hidden = np.ones_like(p.tp), p.tokens * p.hidden * p.number
    sums = np.where(p.tensor == LINE, overlap.sums(p, k, 2 * all_reduce(p, k, hidden, p.tp, one)), 0.0)
    routed = hidden * (p.active - p.shared) / np.where(p.sp > 0, p.tp, 1.0)
    inner = np.where(p.ep <= p.dp * p.cp, p.tp, 1.0)  # else ep takes ranks of tp too
    inner = np.where(p.etp > 0, p.etp, inner)
    exchanged = 2 * all_to_all(p, k, routed, p.ep, inner, *_crossing(p, inner)) * (1 - p.paired)
    experts = np.where(p.experts > 0, exchanged, 0.0)
    forward = sums + grid[0] + crossing[0] + experts
    backward = sums + grid[1] + crossing[1] + experts
    kept = np.where((p.by_product > 0) & (p.once > 0), experts, 0.0)  # memory.py, `_of_products`
    parts = p.makes_mlp * (experts + sums / 2) if p.parts.any() else 0.0
    return forward, backward + np.where(p.recompute == FULL, forward - kept, parts)


def _crossing(p: Points, inner: Array) -> tuple[Array, Array]:
    """Of a token's copies for experts in other servers, and of other ranks, those that are sent there: all; or one a server, and one
    a rank, which have them as likely as not (n places of which k balls hit n (1 - (1 - 1/n)^k))."""
    copies = np.maximum(p.active - p.shared, 1.0)
    hit = lambda n: np.where(p.once > 0, n * (1 - (1 - 1 / n) ** copies) / copies, 1.0)
    return hit(p.ep / inside(p, p.ep, inner)), hit(p.ep)


def gathers_of_layer(p: Points, k: Constants, dense: Array, experts: Array) -> tuple[Array, Array, Array, Array]:
    """Seconds in which ZeRO-3 gathers a layer's parameters for the first forward and for another's; and for another backward and the last,
    with its gradients.

    Of each microbatch (arXiv 1910.02054, 7.2.2); recomputation uses what the backward gathered. Where gradients are
    whole until the step's end, they are scattered once a step, and a pipeline gathers once.
    """
    if not (p.zero >= 3).any():
        return (np.zeros_like(p.tp),) * 4
    one = np.where(p.zero >= 3, _gather(p, k, dense * p.weight, experts * p.weight) + _ring(p, k), 0.0)
    again = np.where(p.late_sums & (p.pp > 1), 0.0, one)
    summed = np.where(p.zero >= 3, _gather(p, k, dense * p.summed, experts * p.summed) + _ring(p, k), 0.0) * (1 - p.frozen)
    return one, again, again + np.where(p.late_sums, 0.0, summed), again + summed


def _gather(p: Points, k: Constants, dense: Array, experts: Array) -> Array:
    """Seconds of a gather, or scatter, of bytes of which dp and cp have copies, and of experts', which fewer have."""
    own = gather(p, k, dense, p.shards, p.tp)
    return own + np.where(p.experts > 0, gather(p, k, experts, p.expert_shards, p.expert_stride), 0.0)


NEAR, FAR = 3.4 / 6, 14 / 5
"""A ring's step to a neighbour in the server, and in another one, by the latencies of the two: for large messages 3.4 and 14 us (NVIDIA/nccl@v2.18,
src/graph/tuning.cc, hwLat), where devices.toml has 6 and 5 of most."""


def _ring(p: Points, k: Constants) -> Array:
    """Seconds that a layer's gather takes more than half of an all_reduce, which may go over a tree: NCCL has but rings for it, and a step for each
    rank. MPT-7B takes 1.17, 1.21 and 1.27 s on 128, 256 and 512 H100 (mosaicml/llm-foundry, scripts/train/benchmarking/README.md)."""
    servers = p.shards / inside(p, p.shards, p.tp)
    ring = (servers - 1) * FAR * p.net_latency + (p.shards - servers) * NEAR * p.link_latency
    return np.where(servers > 1, np.maximum(ring - np.log2(servers) * p.net_latency * k.latency_scale, 0.0), 0.0)


TENSORS = 9.0
"""Parameters of a layer: its products' matrices, apart, and two norms. What a rank of ZeRO sends in its turn are whole ones."""


def _turns(p: Points, k: Constants) -> Array:
    """Seconds that a gather takes more where each rank sends what it has to all, one after another: a ring passes every rank, and of more
    ranks than there are parameters some have none."""
    n = p.shards
    over = np.where(n > inside(p, n, p.tp), n / inside(p, n, p.tp), 0.0)  # servers
    ring = (over * p.net_latency + (n - over) * p.link_latency) * k.latency_scale
    return np.where(p.turns > 0, np.minimum(n, TENSORS * p.layers / p.pp) * ring, 0.0)


def _across(p: Points, k: Constants, dense: Array, experts: Array) -> Array:
    """Seconds in which HSDP's copies sum what each of their ranks has: once a step, of a shard (docs/communication.md, 2)."""
    own = all_reduce(p, k, dense / p.shards, p.replicate, p.tp * p.shards)
    copies = p.expert_replicas / p.expert_shards
    theirs = all_reduce(p, k, experts / p.expert_shards, copies, p.expert_stride * p.expert_shards)
    return np.where(p.replicate > 1, own + np.where(p.experts > 0, theirs, 0.0), 0.0)


@dataclass(frozen=True)
class Sums:
    """Seconds of what a step's gradients are summed by, whatever ZeRO's stage. Arrays [N]."""

    scattered: Array  # gradients, over the ranks that share a state out
    gathered: Array  # parameters, over the same
    tables: Array  # both of the tables alone
    across: Array  # shards, over HSDP's copies


def sums(p: Points, k: Constants, dense: Array, experts: Array, tables: Array) -> Sums:
    """Half of an all_reduce is a reduce_scatter, and the other half what ZeRO gathers."""
    size = p.summed
    return Sums(
        scattered=_gather(p, k, dense * size, experts * size), gathered=_gather(p, k, dense * p.weight, experts * p.weight) + _turns(p, k),
        tables=gather(p, k, tables * (p.weight + size), p.shards, p.tp), across=_across(p, k, dense * size, experts * size),
    )  # fmt: skip


def of_gradients(p: Points, summed: Sums) -> Array:
    """Seconds in which a step's gradients are summed over dp and cp, and ZeRO's parameters gathered.

    ZeRO-2 that keeps no whole gradient scatters each microbatch's. ZeRO-3 has gathered and scattered its layers
    (`gathers_of_layer`); here are its tables, as often.
    """
    times = np.where((p.zero >= 2) & ~p.late_sums, p.microbatches, 1.0)
    usual = np.where(p.zero >= 1, summed.scattered * times + summed.gathered, 2 * summed.scattered)
    return summed.across + np.where(p.zero >= 3, summed.tables * times, usual)


def send(p: Points, k: Constants) -> Array:
    """Seconds in which a microbatch goes to the next stage, in the mean of the borders between stages, some of which lie between servers.
    Ranks of tp each send their part under sp, and on a grid."""
    over = lambda rate, latency: _sent_part(p) / (rate * k.send_share) + latency
    near, far = over(p.link, p.link_latency), over(p.net, p.net_latency)
    return near + (far - near) * _borders(p) / np.maximum(p.pp - 1, 1.0)


def sending(p: Points, k: Constants) -> Array:
    """Seconds of the network that a microbatch takes of the rank that sends the most to other servers, forward and backward, whatever is
    computed meanwhile: to both of its neighbours, unless one is beside it or it has but one; and as often as the rank has stages."""
    once = (2 * p.tp * p.cp * p.dp <= p.node) | (p.pp == 2)
    times = np.where(schedules.in_a_v(p), 2.0, p.chunks) * np.where(once, 1.0, 2.0)
    return np.where(_borders(p) > 0, times * _sent_part(p) / (p.net * k.net_share), 0.0)


def _sent_part(p: Points) -> Array:
    """Bytes of a microbatch that each rank sends to the next stage."""
    return p.tokens * p.hidden * p.number / p.around


def _borders(p: Points) -> Array:
    """Of the borders between stages those that lie between servers."""
    return np.clip(np.ceil(p.tp * p.cp * p.dp * p.pp / p.node) - 1, 0.0, p.pp - 1)
