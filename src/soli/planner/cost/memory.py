"""What a rank keeps: states, activations, logits, gathered parameters and workspace; of the fullest stage.

states          2 (bf16) + gradient + 12 (fp32 copy, two moments) bytes a parameter, or 4 + 4 + 8; ZeRO cuts the
                last, then the gradient, then the first (arXiv 1910.02054, 3.1 and 5)
activations     bytes a token and layer, by what is recomputed (arXiv 2205.05198, 4: equations 1 to 6), summed
                here tensor by tensor so that grouped heads, gates and experts are counted as they are
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from soli.planner.cost import grids
from soli.planner.cost.constants import Constants
from soli.planner.cost.points import ACT, FULL, LINE, NONE, NORM, RING, SELECTIVE, UP, Array, Points, in_the_mean, once
from soli.planner.cost.ranks import Rank, ranks
from soli.planner.cost.schedules import in_a_v

GRADIENTS, LOGIT, LEFT = 12.0, 12.0, 4.0
"""Of soli: bytes a token and hidden unit of the gradients that a layer's backward has at once, three in fp32 (rehearsals have 6 to 18);
and a logit's, in 16 bits, in fp32, and what the loss makes of it; and what of it the loss keeps for its backward."""
WRITTEN_LOSS = 12.0
"""Bytes of a logit at a loss that is torch's operations: its logarithm of the softmax, that one's gradient, and its own, in fp32."""
NORMS = 4.0
"""Vectors of a layer's width: two norms' weights and biases, or what others have in their place."""


@once
@in_the_mean
def of_layer(p: Points) -> tuple[Array, Array]:
    """A layer's parameters on a rank: those that dp replicates, and those of experts, which dp / ep ranks have."""
    mlp = p.matrices * p.hidden * p.ffn
    dense = (p.attention_matrices + np.where(p.experts > 0, p.hidden * p.experts * p.tp + p.shared * mlp, mlp)) / p.tp
    return dense + vectors(p), np.where(p.experts > 0, mlp * p.experts / p.ep / p.expert_tp, 0.0)


def vectors(p: Points) -> Array:
    """Parameters of a layer that are no matrices on a rank: whole, but on a grid cut over its columns."""
    return NORMS * p.hidden / np.where(p.tensor == LINE, 1.0, p.columns)


def of_tables(p: Points) -> Array:
    """Parameters of the embedding and of the last product on a rank that has one of them, or both."""
    return np.where(((p.pp == 1) | in_a_v(p)) & (p.tied == 0), 2.0, 1.0) * p.vocab * p.hidden / p.tp


def of_stage(p: Points) -> tuple[Array, Array]:
    """The most parameters that a stage's rank has, as `of_layer`: the first or last with its table."""
    dense, experts = of_layer(p)
    return p.own_layers * dense + of_tables(p), p.own_layers * experts


def trained(p: Points) -> tuple[Array, Array]:
    """Those of `of_stage` that have gradients. Of frozen ones a few in a hundred do, which take no time here."""
    dense, experts = of_stage(p)
    return dense * (1 - p.frozen), experts * (1 - p.frozen)


def parameters(p: Points) -> Array:
    """Of the whole model."""
    dense, experts = of_layer(p)
    routers = p.hidden * p.experts * (1 - p.plain / p.layers)
    again = p.tp * vectors(p) - NORMS * p.hidden + (p.tp - 1) * routers  # which several ranks of tp have
    return p.layers * (p.tp * dense + experts * p.ep * p.expert_tp - again) + (2 - p.tied) * p.vocab * p.hidden


def used(p: Points) -> Array:
    """Those that a token is multiplied with, and the tables: not experts that it does not go to."""
    away = np.where(p.experts > 0, p.experts + p.shared - p.active, 0.0)
    return parameters(p) - (p.layers - p.plain) * p.matrices * p.hidden * p.ffn * away


def of_rank(p: Points, rank: Rank) -> tuple[Array, Array]:
    """Parameters of a rank, as `of_layer`."""
    dense, experts = of_layer(p)
    tables = np.where(p.tied > 0, np.minimum(rank.tables, 1.0), rank.tables)
    return rank.layers * dense + tables * p.vocab * p.hidden / p.tp, rank.layers * experts


def of_states(p: Points, rank: Rank) -> tuple[Array, Array, Array]:
    """Bytes of parameters, gradients, and what the optimizer has of them; adapters have at least 16 bits."""
    weights = gradients = moments = np.zeros_like(p.dp)
    here, width = np.where(p.offload > 1, 0.0, 1.0), np.maximum(p.weight, 2.0)
    kept = np.where(p.late_sums & (p.whole > 1) & (p.gradient > 0), np.maximum(p.gradient, p.summed), p.gradient)
    apart = (p.zero >= 2) & (~p.late_sums | (p.microbatches == 1))
    adapters = (rank.layers * p.adapters / p.tp, np.zeros(1))
    kinds = list(zip(of_rank(p, rank), adapters, (p.shards, p.expert_shards), strict=True))
    for count, few, over in kinds if p.experts.any() else kinds[:1]:
        learnt = count * (1 - p.frozen) + few
        weights = weights + here * (count * p.weight + few * width) / np.where(p.zero >= 3, over, 1.0)
        gradients = gradients + here * learnt * (kept / np.where(apart, over, 1.0))
        moments = moments + learnt * np.where(p.offload > 0, 0.0, p.moments / np.where(p.zero >= 1, over, 1.0))
    return weights, gradients, moments


def copies(p: Points, rank: Rank) -> Array:
    """Bytes that only the update has: a copy of the gradients of which the rank has the optimizer's state."""
    own = zip(of_rank(p, rank), (p.shards, p.expert_shards), strict=True)
    share = np.where(p.offload > 0, 0.0, p.copied * (1 - p.frozen))
    return sum((count * share / np.where(p.zero >= 1, over, 1.0) for count, over in own), np.zeros(()))


def states(p: Points, k: Constants) -> Array:
    """Bytes of parameters, gradients, optimizer, and what else stays between steps, of the rank with the most."""
    return np.maximum.reduce([sum(of_states(p, rank), np.zeros(())) for rank in ranks(p)]) + k.resident


def gathered(p: Points, rank: Rank) -> Array:
    """Bytes of the parameters that ZeRO-3 has gathered: a layer and the next; of a pipeline, perhaps the stage's."""
    layer, stage = sum(of_layer(p), np.zeros(())), sum(of_rank(p, rank), np.zeros(()))
    return np.where(p.zero >= 3, p.weight * np.where(p.late_sums & (p.pp > 1), stage, 2 * layer + of_tables(p)), 0.0)


def casts(p: Points, rank: Rank) -> Array:
    """Bytes of the parameters in 16 bits that microbatches under way keep; what is recomputed is cast again for one layer,
    and of a forward torch.autocast keeps them until its end. And of those in 8 bits that a program keeps all step long."""
    layer = sum(of_layer(p), np.zeros(()))
    least = np.where(p.recompute == FULL, 1.0 / np.maximum(rank.layers, 1.0), 1.0)
    times = np.where(p.recompute == NONE, rank.under_way, np.minimum(np.maximum(rank.undone, least), rank.under_way))
    cast = np.where(p.casts > 0, 2.0 * (rank.layers * layer * times + p.vocab * p.hidden / p.tp * rank.losses), 0.0)
    return cast + p.eighth * rank.layers * layer


@once
@in_the_mean
def activations_of_layer(p: Points) -> Array:
    """Bytes that one layer keeps of one microbatch for its backward."""
    around = p.around
    width, active = p.attention_width, np.where(p.experts > 0, p.active, 1.0)
    # Two norms' inputs and outputs, two residuals with their dropout's bytes: 10 h of the paper's 34.
    outside = 10.0 * p.hidden
    # q, k, v and what the output's product reads; what the MLP's products give and read.
    inside = 2.0 * width * (2 + 2 * p.kv_share) + 2.0 * p.ffn * active * (2 + p.gated)
    # Of a token at its experts what they read and give, and what the router reads, in fp32.
    inside = inside + np.where(p.experts > 0, p.routed * p.hidden * active + 4.0 * p.hidden, 0.0)
    # Of torch's operations each keeps what it reads: a norm without a mean its input in fp32, that normalised in 16 bits, and its result, where no
    # dropout is; a gate its own result. Llama 3 8B keeps 50 bytes for each hidden unit (pytorch/ao@36027d82d1ad, torchao/prototype/float8nocompile/README.md).
    outside = outside + 6.0 * p.hidden * p.composed * p.gated
    inside = inside + 2.0 * p.ffn * active * p.composed * p.gated
    # What products of 8 bits read is kept so, attention's result beside what attention keeps of it.
    if (p.low < 2).any():
        less, read = 2.0 - p.low, np.where(p.experts > 0, p.hidden * active, 0.0)
        outside = outside - less * 2.0 * p.hidden
        inside = inside - less * (p.ffn * active + read) + np.where(p.low < 2, p.low, 0.0) * width
    # Of frozen products without adapters nobody needs what they read.
    spared = p.spared * np.minimum(p.low, 2.0)
    outside, inside = outside - spared * p.hidden, inside - spared * p.ffn * active
    if p.widened.any():  # q, k, v, what opens an MLP, its last product and attention's, each by itself; of attention alone q and v, as is usual
        each = np.where(p.spared > 0, 2.0 * p.hidden, (4.0 + p.gated) * p.hidden + width + p.ffn * active)
        inside = inside + np.where(p.adapters > 0, p.widened * each, 0.0)
    if p.parts.any():
        norms, rest = _of_parts(p)
        outside, inside = outside - norms, inside - rest
    # Scores, softmax and its dropout's bytes, of torch's operations in 32 bits the softmax, its mask and what is left of it; of a kernel that keeps none one fp32 number a query.
    scores = np.where(p.recompute == NONE, (5.0 + np.where(p.number > 2, -0.5, 2.0) * p.unfused) * p.heads * p.seq, 0.0)
    scores = np.where(p.flash > 0, 4.0 * p.heads, scores)
    # Of a program that makes none of it again: the gate's other result, rotated q and k, and, whole on each rank, what both
    # of the layer's first products read (arXiv 2205.05198, 4.2.2, where it is gathered again).
    more = 2.0 * p.gated * p.ffn * active + 2.0 * width * (1 + p.kv_share)
    whole = np.where(p.sp > 0, 4.0 * p.hidden * (1 - 1 / p.tp), 0.0) + more / p.tp
    kept = p.tokens * (outside / around + (inside + scores) / p.tp + np.where(p.frugal > 0, 0.0, whole))
    found = np.where(p.recompute == FULL, p.residual * p.tokens * p.hidden / around, kept)
    found = found * np.maximum(p.low, 2.0) / 2.0  # programs of 32 bits keep all of it so
    return np.where(p.casts > 0, _of_autocast(p, scores), found) if p.casts.any() else found


def _of_parts(p: Points) -> tuple[Array, Array]:
    """Bytes of a token in what parts that are made again give: around tp's products, and between them."""
    moe, low = p.experts > 0, np.minimum(p.low, 2.0)
    routed = np.where(moe, p.active - p.shared, 1.0)
    exchanged = np.where(moe, (p.routed - 2.0 + low) * p.hidden * p.active + 4.0 * p.hidden, 0.0)
    mlp = (2.0 * (1 + p.gated) + low) * p.ffn * np.where(moe, p.active, 1.0) + exchanged
    up = np.where(p.compressed > 0, p.makes(UP) * 2.0 * p.attention_width * (1 + 2 * p.kv_share), 0.0)
    return p.makes(NORM) * 2.0 * low * p.hidden, np.where(p.makes_mlp > 0, mlp, p.makes(ACT) * low * p.ffn * routed) + up


def _of_products(p: Points) -> Array:
    """The same where every second product's result is kept, attention's, and the layer's input: torchtitan's recomputation by operations
    (pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py). Products of all experts at once are none of these
    (`_grouped_mm`), what DeepEP's kernels send to experts and back is."""
    width, at_once = p.attention_width, np.where(p.experts > 0, p.shared, 1.0)
    results = (width * (1 + 2 * p.kv_share) + (1 + p.gated) * p.ffn * at_once) / p.tp + p.hidden * (1 + at_once) / p.around
    sent = np.where((p.experts > 0) & (p.ep > 1) & (p.once > 0), 4.0 * p.hidden * (p.active - p.shared) / p.around, 0.0)
    return p.tokens * (results + sent + 2.0 * p.hidden / p.around + 2.0 * width / p.tp) * p.number / 2


def _of_autocast(p: Points, scores: Array) -> Array:
    """The same under torch.autocast, tensor by tensor: residuals and norms are in fp32, of an RMSNorm that is written out what is
    scaled too, and each product keeps its own cast of what it reads, whole on each rank of tp (benchmarks/formulas.py compares it with rehearsals)."""
    width, active = p.attention_width, np.where(p.experts > 0, p.active, 1.0)
    ffn = 2.0 * p.ffn * active * (1 + p.gated)
    opened = 2.0 * width * (1 + 2 * p.kv_share) + ffn
    norms, read = 8.0 * p.hidden * (1 + p.gated * p.written), 2.0 * p.hidden * (3 + (1 + p.gated) * active)
    # attention's result, and the activation's (and the gate's product)
    whole = (norms / p.around + read / np.where(p.tensor == LINE, 1.0, p.tp) + (opened + 2.0 * width + ffn + scores) / p.tp)
    # a block's input, and what its products give
    # of a ring's steps each attention's result
    steps = np.where((p.cp > 1) & (p.context == RING), p.cp / 2 + 1, 0.0)
    some = 8.0 * p.hidden / p.around + (opened + 2.0 * width * steps) / p.tp
    least = 4.0 * p.hidden / p.around
    return p.tokens * np.where(p.recompute == FULL, least, np.where(p.recompute == SELECTIVE, some, whole))


def activations(p: Points, k: Constants, rank: Rank) -> tuple[Array, Array]:
    """Bytes of a rank's microbatches that are under way; and of a recomputed layer beside them in its backward, where the loss is over."""
    one = activations_of_layer(p)
    kept = rank.layers * rank.under_way * one
    whole = activations_of_layer(p.recomputing(NONE))
    least = one
    if p.again.any():
        least = np.where(p.by_product > 0, _of_products(p), activations_of_layer(p.recomputing(FULL)))
        less = np.where(p.by_product > 0, rank.layers, np.minimum(p.again, rank.layers))
        kept = kept - less * rank.under_way * (one - least)
    if p.moved.any():  # one comes or goes while the next is computed
        kept = np.where(p.moved > 0, np.minimum(kept, 2 * one), kept)
    # Its input is among what is kept.
    beside = np.where(((p.recompute == FULL) | (p.again > 0)) & (rank.layers > 0), whole - least, 0.0)
    if p.parts.any():
        beside = beside + np.where(rank.layers > 0, activations_of_layer(replace(p, parts=np.zeros(1))) - one, 0.0)
    exact = (p.casts > 0) | (p.composed > 0) | (p.one_loss > 0)  # autocast's, and torch's operations with or without a compiler, are counted one by one
    scale = np.where(exact, 1.0, k.activation_scale)
    between = np.where(p.casts > 0, _between(p, rank, whole - one), 0.0) if p.casts.any() else 0.0
    return scale * kept + between, np.where(p.casts > 0, 0.0, scale * beside)


def _between(p: Points, rank: Rank, again: Array) -> Array:
    """Bytes of soli's microbatches beside what their layers keep: what a stage sends; the last norm's; until the second half of a backward what
    was made again for the first, and gradients of norms' and products' results, as `backward` has of one layer."""
    width, active = p.attention_width, np.where(p.experts > 0, p.active, 1.0)
    opened = 2.0 * width * (1 + 2 * p.kv_share) + 2.0 * p.ffn * active * (1 + p.gated)
    wait = again + p.tokens * (opened / p.tp + 4.0 * p.hidden / np.where(p.tensor == LINE, 1.0, p.tp) + GRADIENTS * p.hidden / p.around)
    vector = p.tokens * p.hidden / p.around
    sent = np.where((p.pp > 1) & (rank.ends == 0), 4.0 * vector * rank.under_way, 0.0)
    return rank.undone * rank.layers * wait + sent + 10.0 * vector * rank.losses


def average(p: Points, k: Constants) -> Array:
    """Bytes of states and of what layers keep of one microbatch, in the mean of a pipeline's ranks: one has as much, whatever its borders."""
    zero = np.zeros(len(p))
    mean = Rank(p.layers / p.pp, (2.0 - p.tied) / p.pp, zero, zero + 1, zero, zero)
    kept = np.where(p.casts > 0, 1.0, k.activation_scale) * mean.layers * activations_of_layer(p)
    return sum(of_states(p, mean), kept) + k.resident + k.workspace


def backward(p: Points) -> Array:
    """Bytes that soli's backward of one layer has beside what is kept: what it makes again, and gradients."""
    again = activations_of_layer(p.recomputing(NONE)) - activations_of_layer(p)
    return again + p.tokens * p.hidden * GRADIENTS / p.around


def logits(p: Points, k: Constants) -> Array:
    """Bytes of a microbatch's logits at the loss, in 16 and in 32 bits, and of what the loss makes of them."""
    pieces = np.where(p.pieces > 0, p.pieces, np.maximum(p.vocab / p.hidden, 1.0))
    kept = np.where(p.one_loss > 0, p.one_loss, np.where(p.composed > 0, WRITTEN_LOSS, k.logit_kept))
    return p.tokens * p.scored * p.vocab / p.tp * np.where(p.casts > 0, LOGIT, kept) / pieces


def kinds(p: Points, k: Constants) -> dict[str, Array]:
    """Bytes of each kind at the fullest moment of the fullest rank (or of the last stage's, see Points.logged)."""
    each = [_kinds(p, k, rank, bare=False) for rank in ranks(p)]
    fullest = _place_of_fullest(p, np.stack([sum(found.values(), np.zeros(len(p))) for found in each]))
    return {kind: np.choose(fullest, [np.broadcast_to(found[kind], len(p)) for found in each]) for kind in each[0]}


def _place_of_fullest(p: Points, total: Array) -> NDArray[np.intp]:
    """Of totals [ranks, N]."""
    return np.where(p.logged > 0, np.where((p.pp == 1) | in_a_v(p), 0, 2), total.argmax(axis=0))


def _kinds(p: Points, k: Constants, rank: Rank, bare: bool) -> dict[str, Array]:
    """Of one rank. `bare`: as if copies of parameters, whole ones and those in 16 bits, took no place."""
    weights, gradients, moments = of_states(p, rank)
    panels = grids.beside(p) if p.tensor.any() else np.zeros(len(p))
    (passing, beside), loss = activations(p, k, rank), rank.ends * logits(p, k)
    passing, loss = passing + np.where(beside > loss, beside, 0.0), np.where(beside > loss, 0.0, loss)
    if p.casts.any():
        passing, loss = _fuller(p, k, rank, passing, loss)
    found = {
        "parameters": weights, "gradients": gradients, "optimizer": moments, "activations": passing, "logits": loss,
        "gathered": panels if bare else gathered(p, rank) + casts(p, rank) + panels, "workspace": k.resident + k.workspace,
    }  # fmt: skip
    return _fullest(p, rank, found) if p.copied.any() or p.late.any() else found


def _fuller(p: Points, k: Constants, rank: Rank, passing: Array, loss: Array) -> tuple[Array, Array]:
    """Activations and logits at soli's loss, or in the backward of a layer, by when its logits are gone: whichever is more.

    Of another microbatch under way there are what the loss keeps of its logits and, until the backward's second half, their gradients.
    """
    one, cast = logits(p, k) / LOGIT, p.casts > 0
    kept = one * np.where(rank.undone > 0, LEFT + 2.0, LEFT)
    others = np.maximum(rank.losses - 1, 0.0) * kept
    beside = np.where(rank.layers > 0, backward(p), 0.0)
    own = np.where(rank.undone > 0, kept, 0.0)
    at_loss = rank.ends * LOGIT * one > beside + own
    found = np.where(at_loss, rank.ends * LOGIT * one, rank.ends * own) + others
    return passing + np.where(cast & ~at_loss, beside, 0.0), np.where(cast, found, loss)


def _fullest(p: Points, rank: Rank, found: dict[str, Array]) -> dict[str, Array]:
    """The kinds of `kinds` at the fullest moment: in the passes, where programs that make gradients anew have none yet at the loss
    and no activations any more where they have them all; or at the update, with its copies and nothing that the passes keep."""
    passing, copied, gradients = ("activations", "logits", "gathered"), copies(p, rank), found["gradients"]
    at_loss = found["activations"] + found["logits"]
    last = np.where(rank.layers > 0, activations_of_layer(p.recomputing(NONE)), 0.0)  # the layer whose backward is the last one
    there = np.where((p.late > 0) & (p.microbatches == 1), np.clip(gradients + last - at_loss, 0.0, gradients + last), gradients)
    fuller = copied + gradients > there + sum((found[kind] for kind in passing), np.zeros(()))
    less = {kind: np.where(fuller, 0.0, found[kind]) for kind in passing}
    update = {"optimizer": found["optimizer"] + np.where(fuller, copied, 0.0)}
    return found | less | update | {"gradients": np.where(fuller, gradients, there)}


def cache(p: Points, k: Constants) -> Array:
    """Bytes that an allocator holds beside its tensors at the peak, where they are read as well: of what comes and goes, blocks that nothing fits into."""
    if not p.cached.any():
        return np.zeros(len(p))
    found = kinds(p, k)
    return p.cached * k.cache_share * (found["gradients"] + found["activations"] + found["logits"])


def peak(p: Points, k: Constants, bare: bool = False) -> Array:
    """Bytes at the fullest moment; `bare` as in `_kinds`."""
    total = np.stack([sum(_kinds(p, k, rank, bare).values(), np.zeros(len(p))) for rank in ranks(p)])
    return np.choose(_place_of_fullest(p, total), total)
