"""A step: what is computed, sent and waited for, put together."""

from dataclasses import dataclass, replace

import numpy as np

from soli.planner.cost import arithmetic, communication, context, grids, memory, overlap, pipeline, schedules
from soli.planner.cost.constants import Constants
from soli.planner.cost.points import FULL, INTERLEAVED, LINE, Amount, Array, Points, in_the_mean
from soli.planner.hardware.devices import USABLE

WRITTEN_OUT = 1.15
"""Launches of a layer that makes attention's scores, by those of one with a kernel: what Megatron-LM's test of tp=4 took on one
image without and with it (0.312 to 0.329 s and 0.278 to 0.280 s a step)."""
UNFUSED = 1.2
"""And of one whose softmax no kernel makes: four operations more where such a layer's forward has some twenty."""
ADAPTED = 1.0
"""Launches of adapters beside all of a layer's matrices, by its own: each of which drops out, multiplies twice, scales and adds: Qwen 7B takes 1.2 s for 8 sequences of 256
tokens, which are 1.2 ms for each of a layer's four passes, and 1.8B 1.4 ms, where layers without adapters take some 0.7 (QwenLM/Qwen, README, "Profiling of
Memory and Speed")."""
LOOPED = 0.0005
"""Seconds in which one expert's pass is launched, where a program has them compute one after another: ten operations, with those that pick its tokens, for
which the host waits, and add its results (huggingface/transformers, models/mixtral/modeling_mixtral.py)."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step of each point and what they go to; bytes at its peak and between steps. Arrays [N]."""

    time: Array
    layers: Array  # of all microbatches, with the collectives inside them
    tables: Array  # the embedding's, the last product's and the loss', of all microbatches
    exposed: Array  # collectives of layers that nothing hides, in `layers`
    waiting: Array  # of the pipeline
    gradients: Array  # reduction that nothing hides
    update: Array
    memory: Array
    states: Array
    read: Array  # the peak as the program's log or the device has it (Points.cached)


@in_the_mean
def layer(p: Points, k: Constants) -> tuple[Array, Array]:
    """Seconds of one layer and microbatch, forward and backward; and of the collectives in it that nothing hides.

    A layer takes as long as it computes and waits, or as it is launched: kernels are started one after another, and
    small ones end before the next is there; or as both, where the host waits for each. The backward has two products
    for each of the forward's, one of frozen weights.
    """
    products, elements = arithmetic.products_forward(p, k), arithmetic.elements_forward(p, k)
    attention, attention_backward = arithmetic.attention(p, k)
    widened = arithmetic.widened(p, k, memory.of_layer(p)[0]) if p.frozen.any() else 0.0
    whole = products + attention + elements + widened
    again = arithmetic.recomputed(p, whole, attention) + (arithmetic.parts(p, k) if p.parts.any() else 0.0)
    forward, backward = whole, (2 - p.frozen) * products + attention_backward + 1.5 * elements + widened + again
    sent_forward, sent_backward = _sent(p, k)
    exposed = sent_forward + sent_backward + _gathering(p, k, forward, backward)
    passes = 3.0 + arithmetic.recomputed(p, np.ones_like(whole), np.zeros_like(whole))
    calls = 2.0 * ((p.tp > 1) & (p.tensor == LINE)) + 2.0 * ((p.experts > 0) & (p.ep > 1))
    calls = calls + context.calls(p) + grids.calls(p)
    written = WRITTEN_OUT * np.where(p.unfused, UNFUSED, 1.0)
    launched = k.layer_floor * p.launches * np.where(p.flash > 0, 1.0, written)
    if p.frozen.any():
        launched = launched * (1 + ADAPTED * ((p.adapters > 0) & (p.eager > 1)) * np.where(p.spared > 0, 0.5, 1.0))
    if p.looped.any():
        one_by_one = LOOPED + np.where((p.zero >= 3) & (p.looped > 1), p.matrices * k.gather_floor, 0.0)
        launched = launched + np.where(p.looped > 0, one_by_one * p.experts / p.ep, 0.0)
    launched = launched + np.where(p.zero >= 3, k.gather_floor, 0.0)
    launched = launched + np.where(p.experts > 0, k.routing_floor * (1 - p.unwaited), 0.0) + calls * k.collective_floor
    busy, launching = forward + backward + exposed, passes * launched * (1 - p.graphs)
    if p.moved.any():  # to the host and back, beside what is computed
        busy = np.where(p.moved > 0, np.maximum(busy, 2 * memory.activations_of_layer(p) / p.host), busy)
    return np.where(p.blocking > 0, busy + launching, np.maximum(busy, launching)), exposed


def _gathering(p: Points, k: Constants, forward: Array, backward: Array) -> Array:
    """Seconds of ZeRO-3's gathers that a layer's computing does not hide, in the mean of microbatches: of the first and the last more may
    be sent, and each hides what is sent beside it alone."""
    first, forth, back, last = communication.gathers_of_layer(p, k, *memory.of_layer(p))
    usual = overlap.gathers(k, forth, forward) + overlap.gathers(k, back, backward)
    return usual + (overlap.gathers(k, first, forward) + overlap.gathers(k, last, backward) - usual) / p.microbatches


def layers(p: Points, k: Constants) -> tuple[Array, Array]:
    """Seconds of all layers of a rank and one microbatch, and of what is exposed in them; some computed again whole."""
    one, exposed = layer(p, k)
    if not p.again.any():
        return one * p.own_layers, exposed * p.own_layers
    again = layer(p.recomputing(FULL), k)
    mixed = lambda less, more: less * (p.own_layers - p.again) + more * p.again
    return mixed(one, again[0]), mixed(exposed, again[1])


def _sent(p: Points, k: Constants) -> tuple[Array, Array]:
    none = np.zeros_like(p.tp)
    grid = grids.of_layer(p, k) if p.tensor.any() else (none, none)
    return communication.of_layer(p, k, context.crossing(p, k), grid)


@dataclass(frozen=True)
class Running:
    """Seconds of a microbatch in a rank's layers and the tables; of all of them busy and waiting on the longest stage."""

    layers: Array
    exposed: Array
    tables: Array
    busy: Array
    waiting: Array


def running(p: Points, k: Constants, of_layers: Amount = 1.0, of_tables: Amount = 1.0) -> Running:
    """All of a step but what follows its microbatches."""
    own, exposed = layers(p, k)
    own = own * of_layers
    inner, send = own + k.microbatch_overhead, np.where(p.pp > 1, communication.send(p, k), 0.0)
    first, last = arithmetic.embedding(p, k), arithmetic.logits(p, k) * of_tables
    one, sending = own / p.own_layers, communication.sending(p, k)
    busy, waiting = pipeline.spent(p, inner, first, last, send, one, sending)
    if (p.schedule > INTERLEAVED).any():
        plain = own if not p.again.any() else layers(replace(p, again=np.zeros(len(p))), k)[0] * of_layers
        parts = schedules.shares(p, k, _sent(p, k))
        waits = schedules.waits(p, plain + k.microbatch_overhead, inner, *parts)
        other = pipeline.spent_otherwise(p, inner, waits, first, last, send, one, sending)
        busy, waiting = (np.where(p.schedule > INTERLEAVED, a, b) for a, b in zip(other, (busy, waiting), strict=True))
    return Running(own, exposed, last, busy, waiting)


def seconds(p: Points, k: Constants, of_layers: Amount = 1.0, of_tables: Amount = 1.0) -> tuple[Array, Running, Array, Array]:
    """A step's time: its microbatches, the gradients' reduction that nothing hides, and the update."""
    run = running(p, k, of_layers, of_tables)
    reduced, spent = late(p, k, sums(p, k), run.layers / 2), updating(p, k, *memory.trained(p))
    return whole(p, k, run.busy + run.waiting + reduced + spent), run, reduced, spent


def whole(p: Points, k: Constants, spent: Array) -> Array:
    """Seconds of a step that takes a usual rank so long: all wait for the slowest, which is slower the more there are."""
    return spent * (1 + k.straggling * np.log2(p.devices)) + k.step_overhead


def sums(p: Points, k: Constants) -> communication.Sums:
    """What a step's gradients are summed by; `zero` and `offload` say nothing of it."""
    return communication.sums(p, k, *memory.trained(p), memory.of_tables(p))


def late(p: Points, k: Constants, summed: communication.Sums, backward: Amount) -> Array:
    """Seconds of the gradients' reduction that so long a backward does not hide."""
    return overlap.gradients(k, communication.of_gradients(p, summed), backward)


def updating(p: Points, k: Constants, dense: Array, experts: Array) -> Array:
    """Seconds of the optimizer, of so many parameters. Of `zero` it matters whether states are shared out at all."""
    sharded = p.zero >= 1
    own = dense / np.where(sharded, p.shards, 1.0) + experts / np.where(sharded, p.expert_shards, 1.0)
    return arithmetic.optimizer(p, k, own)


def step(p: Points, k: Constants, of_layers: Amount = 1.0, of_tables: Amount = 1.0) -> Step:
    """The cost of each point. Factors of a layer's time and of the tables', where they were measured."""
    time, run, reduced, spent = seconds(p, k, of_layers, of_tables)
    m, peak = p.microbatches, memory.peak(p, k)
    return Step(
        time=time, layers=m * run.layers, tables=m * run.tables, exposed=m * run.exposed, waiting=run.waiting,
        gradients=reduced, update=spent, memory=peak, states=memory.states(p, k),
        read=np.minimum(peak + memory.cache(p, k), np.maximum(peak, p.capacity / USABLE)),  # what is kept is given back before there is none left
    )  # fmt: skip
