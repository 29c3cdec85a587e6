"""Plans of models on devices as arrays: place i of every array is one plan. Units: seconds, bytes, flops, tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soli.planner.hardware.devices import Device

Array = NDArray[np.float64]
Amount = Array | float
"""One for each point, or one for all."""

NONE, SELECTIVE, FULL = 0.0, 1.0, 2.0
"""What is recomputed in the backward: nothing; what attention makes between its products; whole layers."""

NORM, ACT, MLP, EXPERTS, UP = 1.0, 2.0, 4.0, 8.0, 16.0
"""Parts of a layer that are made again by themselves, `Points.parts` is their sum: norms; what an MLP's last product reads (of experts, where there are any); an
MLP; the experts, with what they exchange; what is made of MLA's smaller vectors (NVIDIA/Megatron-LM, core/transformer/transformer_config.py, recompute_modules)."""

RING, ULYSSES = 0.0, 1.0
LINE, GRID, CUBE = 0.0, 1.0, 2.0
ONE, INTERLEAVED, GPIPE, ZBH1, ZBH2, ZBV, DUALPIPEV = 0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0


@dataclass(frozen=True)
class Points:
    """Each field is an array [N], or [1]: what all plans have alike, and is computed once. `tp` is [N]. A flag is 0 or 1."""

    # the model
    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    head_size: Array
    ffn: Array  # of a dense layer's MLP; of one expert where there are experts
    gated: Array  # flag: the MLP has three matrices (SwiGLU), not two
    seq: Array
    vocab: Array
    experts: Array  # in each layer; 0: dense
    active: Array  # experts that a token goes to, those that it always goes to among them
    tied: Array  # flag: the embedding is the last product's matrix
    flash: Array  # flag: attention's scores are not kept in memory
    frozen: Array  # flag: weights have no gradient but for a few (LoRA)
    # the plan
    global_batch: Array  # sequences a step
    microbatch: Array  # sequences of one forward of one replica
    tp: Array
    sp: Array  # flag
    cp: Array
    pp: Array
    chunks: Array  # stages of a rank
    dp: Array
    zero: Array  # 0..3
    ep: Array
    recompute: Array  # NONE, SELECTIVE, FULL
    offload: Array  # 1: the optimizer's state lies in the host's memory; 2: parameters and gradients too
    precision: Array  # of linear products: the place in PRECISIONS
    low: Array  # bytes of an element that they read: 2, 1 (fp8), 0.5 (fp4)
    # how the program keeps its states
    weight: Array  # bytes of a parameter, and of what is gathered of it
    gradient: Array  # bytes of a gradient that is kept until the update
    summed: Array  # bytes of a gradient as it is summed over ranks
    copied: Array  # bytes of a gradient's copy that only the update has
    moments: Array  # bytes of the optimizer's a parameter, a copy in fp32 among them where there is one
    # flag: gradients are whole until the step's last microbatch, gathered parameters until a pipeline's; 2: and without a pipeline neither
    whole: Array
    logged: Array  # flag: the memory that is asked for is the last stage's, whose rank writes Megatron's log
    casts: Array  # flag: each microbatch keeps the parameters that it reads in 16 bits (torch.autocast)
    # the device and its network
    peak: Array  # flops/s of linear products
    peak_wide: Array  # flops/s of attention's products
    capacity: Array  # bytes
    bandwidth: Array  # bytes/s
    node: Array  # devices of a server
    link: Array  # bytes/s in one direction, inside a server
    link_latency: Array
    net: Array  # bytes/s in one direction and device, between servers
    net_latency: Array
    host: Array  # bytes/s to the host's memory
    # what tables of runs do not say, and what is meant then (UNSAID)
    shared: Array = field(metadata={"unsaid": 0.0})  # experts that each token goes to; of `active`
    replicate: Array = field(metadata={"unsaid": 1.0})  # copies of each sharded state among the ranks of dp (HSDP)
    context: Array = field(metadata={"unsaid": 0.0})  # how attention crosses the ranks of cp: RING, ULYSSES
    # ONE (with chunks: INTERLEAVED, which is the same), GPIPE, ZBH1, ZBV, DUALPIPEV
    schedule: Array = field(metadata={"unsaid": 0.0})
    # flag: what sp gathers, a gate's and a rotation's results are made again in the backward, not kept
    frugal: Array = field(metadata={"unsaid": 1.0})
    # layers of a rank that has the most of them, where stages are not as equal as can be; 0: they are
    longest: Array = field(metadata={"unsaid": 0.0})
    tensor: Array = field(metadata={"unsaid": LINE})  # how tp's ranks share a product: LINE (1d), GRID (2d), CUBE (3d)
    rows: Array = field(metadata={"unsaid": 1.0})  # of the grid, or the cube's edge; 1 of a line
    fewer: Array = field(metadata={"unsaid": 0.0})  # layers that the last stage has less than the longest (borders.py)
    # of the peak what attention that keeps no scores reaches alone (programs.py)
    kernel: Array = field(metadata={"unsaid": 0.5})
    # parameters of a layer's attention whose keys and values are made of one smaller vector (MLA); 0: they are not
    compressed: Array = field(metadata={"unsaid": 0.0})
    # bytes that move between products, by those of a program that runs operation by operation
    eager: Array = field(metadata={"unsaid": 1.0})
    # flag: norms, gates and the loss are torch's operations, each of which keeps what its backward reads
    composed: Array = field(metadata={"unsaid": 0.0})
    # flag: attention has no causal mask, and its kernel leaves nothing out
    both_ways: Array = field(metadata={"unsaid": 0.0})
    # kernels of a layer that are launched, by those of torch's operations: fewer where a compiler fuses them, more where autocast casts
    launches: Array = field(metadata={"unsaid": 1.0})
    # of what tp sends in a layer the share that runs behind products, where it is told so
    behind: Array = field(metadata={"unsaid": 0.0})
    # flag: nothing is launched before what was launched before it is done
    blocking: Array = field(metadata={"unsaid": 0.0})
    # flag: attention's softmax is Megatron's kernel, of four matrices of scores at a time
    fours: Array = field(metadata={"unsaid": 0.0})
    late: Array = field(metadata={"unsaid": 0.0})  # flag: gradients take no memory before the backward makes them
    # in which a microbatch's logits are made; 0: each as large as what the last product reads
    pieces: Array = field(metadata={"unsaid": 1.0})
    # of the tokens those that have logits: all, or an encoder's masked ones
    scored: Array = field(metadata={"unsaid": 1.0})
    # bytes that are kept of a logit where the loss is one kernel, which has a batch's logits read twice and their gradient written
    one_loss: Array = field(metadata={"unsaid": 0.0})
    moved: Array = field(metadata={"unsaid": 0.0})  # flag: what layers keep for the backward lies in the host's memory
    # flag: ZeRO's ranks send what they updated in turns, each to all of them, where others gather it at once
    turns: Array = field(metadata={"unsaid": 0.0})
    # flag: RMSNorm is written out in torch's operations, as on a CPU; elsewhere it is one kernel
    written: Array = field(metadata={"unsaid": 0.0})
    # flag: a token crosses to a server once, however many of its experts are there
    once: Array = field(metadata={"unsaid": 0.0})
    # of a mixture's layers those that have one MLP of `plain_ffn` in the place of experts
    plain: Array = field(metadata={"unsaid": 0.0})
    plain_ffn: Array = field(metadata={"unsaid": 0.0})
    # bytes a hidden unit that are kept of a token at each of its experts
    routed: Array = field(metadata={"unsaid": 4.0})
    # ranks that share one expert's products; 0: as many of tp's as ep leaves
    etp: Array = field(metadata={"unsaid": 0.0})
    # layers of a rank that are computed again whole, where `recompute` says less of the others
    again: Array = field(metadata={"unsaid": 0.0})
    by_product: Array = field(metadata={"unsaid": 0.0})  # flag: `again` is of every second product, and of all that is none
    parts: Array = field(metadata={"unsaid": 0.0})  # of a layer that are made again: NORM, ACT, MLP, EXPERTS, UP, added up
    cached: Array = field(metadata={"unsaid": 0.0})  # flag: a peak is read as what the device holds or its allocator, not as what tensors take
    adapters: Array = field(metadata={"unsaid": 0.0})  # parameters of a layer's that are trained beside frozen ones
    spared: Array = field(metadata={"unsaid": 0.0})  # flag: an MLP's matrices are frozen and have no adapters
    # of what experts exchange the share that runs behind another microbatch's computing, where it is told so
    paired: Array = field(metadata={"unsaid": 0.0})
    widened: Array = field(metadata={"unsaid": 0.0})  # bytes of a copy that each adapter keeps of what it reads
    graphs: Array = field(metadata={"unsaid": 0.0})  # flag: CUDA graphs launch a layer's kernels
    unwaited: Array = field(metadata={"unsaid": 0.0})  # flag: the host does not wait for where tokens go
    fused: Array = field(metadata={"unsaid": 0.0})  # flag: one kernel updates a parameter
    residual: Array = field(metadata={"unsaid": 2.0})  # bytes of a value between layers
    eighth: Array = field(metadata={"unsaid": 0.0})  # bytes of a copy of a layer's parameter in 8 bits, beside that in 16
    # a rank's experts compute at once; 1: one after another; 2: and ZeRO-3 gathers each matrix of theirs by itself
    looped: Array = field(metadata={"unsaid": 0.0})
    # sizes at which a product reaches half of its rate, by those of a product of 16 bits
    filling: Array = field(metadata={"unsaid": 1.0})
    # of the layers those whose attention reads so many tokens before each, where a kernel leaves out the others
    windowed: Array = field(metadata={"unsaid": 0.0})
    window: Array = field(metadata={"unsaid": 0.0})

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, index: Any) -> Points:
        """The plans at these places."""
        columns = ((f.name, getattr(self, f.name)) for f in fields(self))
        return Points(**{name: column[index] if len(column) == len(self) else column for name, column in columns})

    def spread(self) -> Points:
        """The same with every field [N]."""
        return Points(**{f.name: np.broadcast_to(getattr(self, f.name), (len(self),)) for f in fields(self)})

    def recomputing(self, level: float) -> Points:
        """The same with so much of each layer made again."""
        name = f"recomputing {level}"
        if name not in self.__dict__:
            self.__dict__[name] = replace(self, recompute=np.full(1, level))
        return self.__dict__[name]

    def makes(self, part: float) -> Array:
        """Whether a part of a layer is made again by itself: 0 or 1."""
        return np.floor(self.parts / part) % 2

    @cached_property
    def makes_mlp(self) -> Array:
        """The same of the MLP, or of the experts in its place."""
        return np.where(self.experts > 0, self.makes(EXPERTS), self.makes(MLP))

    @cached_property
    def kinds(self) -> tuple[Points, Points]:
        """The same of layers with experts alone, and of those without."""
        none = np.zeros(1)
        alike = replace(self, plain=none)
        return alike, replace(alike, experts=none, active=none + 1, shared=none, ffn=self.plain_ffn)

    @cached_property
    def unfused(self) -> NDArray[np.bool_]:
        """Where torch's operations make the softmax of scores that are kept, one by one: in programs that run what a model is written in, and
        where Megatron's kernel does not, which takes four matrices of them at a time (NVIDIA/Megatron-LM, megatron/core/fusions/fused_softmax.py, is_kernel_available). Heads that are guessed say nothing of it."""
        if (self.flash > 0).all():
            return self.flash == 0
        odd = (self.fours > 0) & (self.heads % self.tp == 0) & (self.microbatch * self.heads / self.tp % 4 != 0)
        return (self.flash == 0) & (odd | (self.eager > 1))

    @cached_property
    def microbatches(self) -> Array:
        """Of a replica in a step; the last may be smaller, and takes as long."""
        return np.maximum(np.ceil(self.global_batch / (self.dp * self.microbatch) - 1e-9), 1.0)

    @cached_property
    def own_layers(self) -> Array:
        """Of the rank that has the most, where each of its stages has whole ones."""
        return np.maximum(self.chunks * np.ceil(self.layers / (self.pp * self.chunks) - 1e-9), self.longest)

    @cached_property
    def columns(self) -> Array:
        """Ranks of tp over which heads and a product's widths are cut: of a cube its edge."""
        return np.where(self.tensor == CUBE, self.rows, self.tp / self.rows)

    @cached_property
    def around(self) -> Array:
        """Ranks of tp that share what lies around a layer's products: one but under sp, or on a grid."""
        return np.where((self.sp > 0) | (self.tensor > 0), self.tp, 1.0)

    @cached_property
    def tokens(self) -> Array:
        """Of one microbatch, on one rank of cp."""
        return self.microbatch * self.seq / self.cp

    @cached_property
    def number(self) -> Array:
        """Bytes of a number that products give and layers move: 2, or 4 of programs of 32 bits."""
        return np.maximum(self.low, 2.0)

    @cached_property
    def kv_share(self) -> Array:
        """Width of keys (or values) by width of queries."""
        return self.kv_heads / self.heads

    @cached_property
    def attention_width(self) -> Array:
        """All heads' queries."""
        return self.heads * self.head_size

    @cached_property
    def attention_matrices(self) -> Array:
        """Parameters of a layer's attention: those that make queries, keys and values, and the one that reads its result."""
        usual = self.attention_width * self.hidden * (2 + 2 * self.kv_share)
        return np.where(self.compressed > 0, self.compressed, usual)

    @cached_property
    def opening_width(self) -> Array:
        """Columns of the product that makes queries, keys and values; of several smaller ones as of one."""
        apart = np.ceil((self.compressed / self.hidden - self.attention_width) / 64) * 64
        return np.where(self.compressed > 0, apart, self.attention_width + 2 * self.kv_heads * self.head_size)

    @cached_property
    def expert_tp(self) -> Array:
        """Ranks that share one expert's products: those of tp, or what is left of them where ep takes some."""
        return np.where(self.etp > 0, self.etp, np.clip(self.tp * self.dp * self.cp / self.ep, 1.0, self.tp))

    @cached_property
    def expert_stride(self) -> Array:
        """Ranks between two that have the same experts."""
        return np.where(self.etp > 0, self.etp, self.tp) * self.ep

    @cached_property
    def expert_replicas(self) -> Array:
        """Ranks that have the same experts."""
        return np.maximum(self.tp * self.dp * self.cp / (self.ep * self.expert_tp), 1.0)

    @cached_property
    def shards(self) -> Array:
        """Ranks over which ZeRO cuts a state, neighbours; HSDP has `replicate` such groups (arXiv 2304.11277, 3.2.2)."""
        return self.dp * self.cp / self.replicate

    @cached_property
    def expert_shards(self) -> Array:
        """The same of experts."""
        return np.maximum(self.expert_replicas / self.replicate, 1.0)

    @cached_property
    def matrices(self) -> Array:
        """Of an MLP."""
        return 2.0 + self.gated

    @cached_property
    def late_sums(self) -> NDArray[np.bool_]:
        """Where gradients are whole until a step's last microbatch."""
        return (self.whole == 1) | ((self.whole > 1) & (self.pp > 1))

    @cached_property
    def devices(self) -> Array:
        return self.tp * self.cp * self.pp * self.dp


def once(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What is said of one frozen thing alone, computed once of each: a pipeline's ranks ask alike, which took a third of a search."""
    name = f"{of.__module__}.{of.__name__}"

    @wraps(of)
    def kept(thing: Any) -> Any:
        if name not in thing.__dict__:  # a field's name has no dots; what `replace` makes has none of these
            thing.__dict__[name] = of(thing)
        return thing.__dict__[name]

    return kept


def in_the_mean(of: Callable[..., Any]) -> Callable[..., Any]:
    """What is said of one layer, in the mean of a mixture's and of those that have no experts."""

    @wraps(of)
    def mean(p: Points, *more: Any) -> Any:
        if not p.plain.any():
            return of(p, *more)
        one, other = (np.asarray(of(points, *more)) for points in p.kinds)
        return one + p.plain / p.layers * (other - one)

    return mean


UNSAID = {f.name: f.metadata["unsaid"] for f in fields(Points) if f.metadata}
"""What is meant where a row has no such field."""
SIZES = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0, "fp64": 8.0}
"""Bytes of a number."""
PRECISIONS = tuple(SIZES)


def of_device(device: Device, precision: str) -> dict[str, float]:
    """A device's part of a point, whose linear products are in `precision` and attention in 16 bits at the least."""
    rates = {name: rate * device.unthrottled for name, rate in device.tflops.items()}
    peak = rates[precision]
    wide = rates.get("bf16", rates.get("fp16", peak))
    # What a product waits for until it is at its rate are bytes, in which a slower one computes less.
    filling = min(peak * SIZES[precision] / (wide * SIZES["bf16"]), 1.0)
    return {
        "precision": PRECISIONS.index(precision), "peak": peak * 1e12, "peak_wide": min(peak, wide) * 1e12, "low": SIZES[precision],
        "filling": filling,
        "capacity": device.usable, "bandwidth": device.memory_gbs * 1e9, "node": device.node,
        "link": device.link_gbs * 1e9, "link_latency": device.link_us * 1e-6, "net": device.net_gbits * 1e9 / 8,
        "net_latency": device.net_us * 1e-6, "host": device.host_gbs * 1e9,
    }  # fmt: skip


def points(rows: Sequence[Mapping[str, float]]) -> Points:
    """One point a row; every row has every field but perhaps those of UNSAID."""
    whole = [{**UNSAID, **row} for row in rows]
    return Points(**{f.name: np.array([row[f.name] for row in whole], dtype=np.float64) for f in fields(Points)})
