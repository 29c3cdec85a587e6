"""What a rank computes of one microbatch: products, attention, what only moves memory, and the logits.

Symbols: T tokens of a microbatch on a rank of cp, h hidden, a query heads of size e, g key heads, f the MLP's width,
s the sequence, V the vocabulary, t = tp, c = cp.
"""

import numpy as np

from soli.planner.cost import grids
from soli.planner.cost.constants import Constants
from soli.planner.cost.points import ACT, CUBE, FULL, LINE, NORM, SELECTIVE, UP, Array, Points

SCORE = 48.0
"""Flops by head size that the softmax of a score takes the time of: heads of 64 reach 5/6 of the rate of heads of 128
in the measurements of arXiv 2307.08691, figure 4."""
SLOW_SCORE, SLOW_WIDE = 28.0, 16.0
"""Bytes that torch's operations move for a score beside the one pass of a kernel: to fp32 (2 read, 4 written), scaled, masked (8 each), and back (4, 2).
And in programs of 32 bits, which have nothing to cast."""
UPDATE, FUSED = 32.0, 40.0
"""Bytes of an update that takes `optimizer_bytes`: gradients of 4 are read, 12 of moments and a copy read and written, parameters of 2 too.
And the most that it takes where one kernel does it, at 0.8 of the memory's rate: torch's usual AdamW is a dozen, each of which reads and writes some of them."""
TILE = 128.0
"""Scores that a kernel makes at once, in one direction; those of a tile that a mask cuts are all made (FlashAttention-2, arXiv 2307.08691, 3.1)."""
HOST_ADAM = 14.0
"""Bytes over a device's link to the host that take as long as a server's processors for a parameter's update: 72 billion on four servers of 8 A100,
with links of 25 GB/s, in some 10 s (deepspeedai/DeepSpeed#6834). The best that was published is 4 (ZeRO-Offload, arXiv 2101.06840, table 4), a Llama
of 1.2 billion on one device has 30 (#6695). Where links are quicker, so is the host's memory."""
ONE_LOSS = 8.0
"""Bytes of a loss for a logit of 16 bits where a compiler makes one kernel of each direction: its largest and its sum are read for (4), and
the backward reads it and writes its gradient (2 each)."""
WIDENED = 16.0
"""Bytes that take as long as a frozen weight of 4 bits is made one of 16: Qwen 7B on an A100 takes 7.0 s for 8 sequences of 2048 tokens with such weights and 5.2 s
without (QwenLM/Qwen, README). They are 2.5; kernels that look up each value are slow."""
ROUTED = 8.0
"""Bytes for each value of a token at an expert: there and back, in 16 bits, written and read."""
ODD, UNALIGNED, CAREFUL = 0.85, 1 / 8, 0.3
"""Rates of products whose rows are multiples of 8 and not of 64 elements, and of others: without tensor cores an A100 has
a sixteenth of its flops, and newer libraries use them for a part. BigScience's GPTs show both: 128 heads of 108 took 38% more than 96 of 144, though attention has
a fortieth of the flops, and a width of 14400 38% more than one of 13824, with 8% more flops. Products with weights whose rows are no
multiples of 8: eager ones reach about the third; a compiler pads them (Inductor, shape_padding). An MLP of 2730 instead of 2816 leaves a compiled
step on an A40 as it is, 0.62 s, and an eager one takes 0.95 s (giyushino/torchure, notes/CHANGES.md, notes/DDP.md, and 454ed90 between them)."""


def aligned(size: Array) -> Array:
    """Of a product's rate what is left where a matrix' rows are so long: rows are loaded 128 bytes at a time, and tensor
    cores read no less than 16 (NVIDIA, Matrix Multiplication Background User's Guide, 2.1)."""
    # Exact, as divisions by powers of two are, and seven times as quick as a remainder, which took a fifth of a search.
    whole = lambda unit: size / unit == np.floor(size / unit)
    return np.where(whole(64), 1.0, np.where(whole(8), ODD, UNALIGNED))


def product(p: Points, k: Constants, m: Array, n: Array, summed: Array) -> Array:
    """Seconds of [m, summed] @ [summed, n]: 2 m n summed flops at a share of the peak that grows with each size.

    Each size x reaches x / (x + half) of the whole: a law between the launch-bound and the full device
    (arXiv 1811.02084 has it for the batch). Never faster than its matrices are read and written (roofline,
    Williams et al. 2009).
    """
    share, inner = k.product_share * np.where(p.low < 2, k.low_share, 1.0), k.product_half_inner * p.filling
    share = share * m / (m + k.product_half * p.filling) * (n / (n + inner))
    share = share * summed / (summed + inner) * np.maximum(np.minimum(aligned(n), aligned(summed)), np.where(p.launches < 1, ODD, CAREFUL))
    moved = p.low * (m * summed + summed * n) + p.number * m * n
    return np.maximum(2.0 * m * n * summed / (p.peak * share), moved / (p.bandwidth * k.stream_share))


def products_forward(p: Points, k: Constants) -> Array:
    """Seconds of a layer's products with weights: q, k, v; output; the MLP's two or three, or its experts'."""
    return opening(p, k, p.tokens, p.opening_width) + closing(p, k, p.tokens, p.attention_width) + of_mlp(p, k)


def of_mlp(p: Points, k: Constants) -> Array:
    """Seconds of the products of a layer's MLP, or of its experts."""
    # An expert has its tokens of all ranks of ep; a rank has experts / ep of them.
    T, moe = p.tokens, p.experts > 0
    local = np.where(moe, np.maximum(p.experts / p.ep, 1.0), 1.0)
    each = np.where(moe, T * (p.active - p.shared) / local, T)
    beside = np.where(p.shared > 0, mlp(p, k, T, p.ffn * np.maximum(p.shared, 1.0)), 0.0)
    return local * mlp(p, k, each, p.ffn) + beside


def mlp(p: Points, k: Constants, tokens: Array, width: Array) -> Array:
    """Seconds of the two or three products of an MLP, or of an expert, of which tp cuts the width."""
    return opening(p, k, tokens, width * (1 + p.gated)) + closing(p, k, tokens, width)


def opening(p: Points, k: Constants, tokens: Array, width: Array) -> Array:
    """Seconds of a product from h to a width that tp cuts; of a grid's part of it."""
    return _cut(p, k, tokens, width, p.hidden, product(p, k, tokens, width / p.tp, p.hidden))


def closing(p: Points, k: Constants, tokens: Array, width: Array) -> Array:
    """Seconds of a product from a width that tp cuts back to h; of a grid's part of it."""
    return _cut(p, k, tokens, p.hidden, width, product(p, k, tokens, p.hidden, width / p.tp))


def _cut(p: Points, k: Constants, tokens: Array, n: Array, summed: Array, line: Array) -> Array:
    """`line`, or where tp is a grid its panels one after another, and of a cube an edge's part of each size."""
    if not p.tensor.any():
        return line
    pieces = grids.panels(p)
    parts = np.where(p.tensor == CUBE, p.columns, pieces)
    return np.where(p.tensor == LINE, line, pieces * product(p, k, tokens / p.rows, n / p.columns, summed / parts))


def attention(p: Points, k: Constants) -> tuple[Array, Array]:
    """Seconds of softmax(q k^T) v, forward and backward: 4 T s a e / t flops; half where a kernel leaves out
    what a causal mask hides.

    Where scores are kept in memory, two products make and read them, four in the backward, and they are moved,
    k.score_bytes each. A kernel that keeps none (programs.py) makes them again in the backward; it takes exponentials, as
    long as SCORE more flops a score would, and fills heads up to multiples of 32 (FlashAttention-2, arXiv 2307.08691).
    """
    scores, filled = p.tokens * p.seq * p.heads / p.tp, np.ceil(p.head_size / 32) * 32
    reached = p.peak_wide * p.kernel * k.attention_share * (128 + SCORE) / 128
    kernel = 2.0 * scores * (filled + SCORE) / reached * within(p)
    inner = k.product_half_inner * p.filling
    summed = p.head_size / (p.head_size + inner)
    rate = p.peak_wide * k.product_share * aligned(p.head_size) * summed * p.seq / (p.seq + inner)
    products = 4.0 * scores * p.head_size / rate
    slow = np.where(p.number > 2, SLOW_WIDE, SLOW_SCORE)
    moved = scores * (k.score_bytes * p.number / 2 + slow * p.unfused) / (p.bandwidth * k.stream_share)
    flash = p.flash > 0
    return np.where(flash, kernel, products + moved), np.where(flash, 2.5 * kernel, 2.0 * products + 1.5 * moved)


def within(p: Points) -> Array:
    """Scores that are computed, of those under a causal mask: the share that windows leave, of a token (w - w^2 / 2 s) of s / 2 in the mean;
    without the mask twice as many."""
    return (1 - p.windowed * (1 - np.minimum((p.window + TILE) / p.seq, 1.0)) ** 2) * (1 + p.both_ways)


def elements_forward(p: Points, k: Constants) -> Array:
    """Seconds of norms, residuals, dropout and activations: so many bytes of memory a token.

    Between the products of a layer they are cut over tp; around them (norms, residuals) only under sp and on a grid. Tokens are
    copied to each of their experts and back, written and read. What a product of fewer than 16 bits reads is cast:
    read in 16 bits, written as it is and transposed (Transformer Engine).
    """
    around, moe = p.tokens * p.hidden / p.around, p.experts > 0
    between = p.tokens * p.ffn * np.where(moe, p.active, 1.0) / p.tp
    routed = np.where(moe, around * p.active, 0.0)
    read = p.tokens * (p.hidden * np.where(moe, 1 + p.active, 2.0) + p.attention_width / p.tp) + between
    cast = np.where(p.low < 2, (2.0 + 2.0 * p.low) * read, 0.0)
    written = np.where(p.gated > 0, p.eager, 1.0)  # models with gates have norms and rotations of several operations
    usual = (around + between * (1 + p.gated) / 4.0) * k.element_bytes * written
    return ((usual + ROUTED * routed) * p.number / 2 + cast) / (p.bandwidth * k.stream_share)


def widened(p: Points, k: Constants, parameters: Array) -> Array:
    """Seconds in which a layer's frozen weights of fewer than 16 bits are made such of 16, before each pass of products that read those."""
    return np.where((p.frozen > 0) & (p.weight < 2) & (p.low >= 2), WIDENED * parameters / (p.bandwidth * k.stream_share), 0.0)


def recomputed(p: Points, whole: Array, attention: Array) -> Array:
    """What of a forward runs again in the backward."""
    return np.where(p.recompute == FULL, whole, np.where(p.recompute == SELECTIVE, attention, 0.0))


def parts(p: Points, k: Constants) -> Array:
    """Seconds of the parts of a layer that run again by themselves: products, and what norms and activations read and write."""
    up = np.where(p.compressed > 0, p.makes(UP) * opening(p, k, p.tokens, p.opening_width), 0.0)
    between = p.ffn * np.where(p.experts > 0, p.active - p.shared, 1.0) / p.tp
    moved = p.makes(NORM) * 4.0 * p.hidden / p.around + np.maximum(p.makes(ACT), p.makes_mlp) * (2 + p.gated) * between
    return p.makes_mlp * of_mlp(p, k) + up + p.tokens * moved * p.number / (p.bandwidth * k.stream_share)


def logits(p: Points, k: Constants) -> Array:
    """Seconds of the last product, its two gradients, and the loss of one microbatch, on the last stage."""
    T, V = p.tokens * p.scored, p.vocab / p.tp
    share = k.product_share / (1 + k.product_half * p.filling / np.maximum(T, 1.0))
    share = share * p.hidden / (p.hidden + k.product_half_inner * p.filling)
    flops = (6.0 - 2 * p.frozen) * T * V * p.hidden / (p.peak_wide * share)
    moved = np.where(p.one_loss > 0, ONE_LOSS * p.number / 2, k.logit_bytes)  # others are in fp32 anyway
    return flops + T * V * (moved + p.number) / (p.bandwidth * k.stream_share)


def embedding(p: Points, k: Constants) -> Array:
    """Seconds of the lookup and its gradient, on the first stage: memory alone."""
    return p.tokens * p.hidden * 6.0 * p.number / (p.bandwidth * k.stream_share)


def optimizer(p: Points, k: Constants, parameters: Array) -> Array:
    """Seconds of the update of so many parameters: memory alone, by how wide they are kept; or the way to the host and back, and a server's
    processors, which have the parameters of all its devices to update: of a rack that is one domain of NVLink those of a tray's four."""
    there = parameters * (4.0 + np.minimum(np.where(p.node > 16, 4.0, p.node), p.devices) * HOST_ADAM) / p.host
    bytes_of_usual = np.where(p.fused > 0, np.minimum(k.optimizer_bytes, FUSED), k.optimizer_bytes)
    moved = bytes_of_usual * (p.gradient + 2 * p.moments + 2 * p.weight) / UPDATE
    return np.where(p.offload > 0, there, parameters * moved / (p.bandwidth * k.stream_share))
