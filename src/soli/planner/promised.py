"""A machine that is not here: what a rehearsed step takes on a cluster's devices, by their data and the fitted constants.

    a product       by its sizes, as the planner's own (cost/arithmetic.py); a convolution as the product that it is (im2col)
    all else        the bytes that it moves, at the memory's rate
    a collective    by its bytes, ranks and where these are (cost/communication.py)
    the host        launches one operation after another, and the device waits for it where that takes longer
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from soli.core.errors import SoliError
from soli.planner.cost import arithmetic, communication
from soli.planner.cost.constants import known, repeated
from soli.planner.cost.points import Array, of_device
from soli.planner.cost.programs import attends
from soli.planner.cost.step import whole
from soli.planner.hardware.clusters import Cluster
from soli.planner.hollow import Call
from soli.planner.machine import FREE, Machine, estimate
from soli.planner.rehearsal import Rehearsal

HOST = 2.8e-5
"""Seconds in which Python launches an operation, its part of autograd and of soli among it: 9,435 operations of a GPT's step take 0.277 s on an H100 that
would compute them in 0.16, a T5's 9,616 0.265 s (benchmarks/results/gpu.md, accumulate=4)."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def promised(cluster: Cluster, rehearsal: Rehearsal) -> dict[str, float]:
    """What a rehearsed step goes to, in seconds (machine.PARTS)."""
    runs = rehearsal.ranks
    calls = {call.key: call for run in runs for call in run.calls if call.flops}
    groups = {(one.operation, len(one.ranks), one.stride) for run in runs for one in run.sent if one.operation not in FREE}
    p, k = _on(cluster, "bf16"), repeated(known("soli", cluster.device.generation), 1)
    sizes: Array = 2.0 ** np.arange(8, 42, dtype=np.float64)  # bytes of collectives, between which they are interpolated
    machine = Machine(
        str(cluster), cluster.size, launch=0.0, stream=float(p.bandwidth * k.stream_share[0]), crowd=1.0, hidden=float(k.hidden_gradients[0]),
        flops=float(p.peak * k.product_share[0]), optimizer=math.inf, host=p.host, disk=math.inf, issued=HOST,
        products={key: _seconds(call, cluster, k) for key, call in calls.items()},
        collectives={f"{name} {n}x{stride}": np.stack([sizes, _sent(name, p, k, sizes, n, stride)], axis=1).tolist() for name, n, stride in groups if n > 1},
    )  # fmt: skip
    return estimate(rehearsal, machine).parts


def step_seconds(cluster: Cluster, parts: Mapping[str, float]) -> float:
    """Of a step of these parts: with what is beside them, and what the slowest of so many devices adds (cost/step.py, whole)."""
    return float(whole(_on(cluster, "bf16"), repeated(known("soli", cluster.device.generation), 1), np.array([sum(parts.values())]))[0])


def _on(cluster: Cluster, precision: str) -> Any:
    """A device and its network as the cost formulas read them of a point."""
    if precision not in cluster.device.tflops:
        fix = f"say it in the cluster's file: [tflops] {precision} = ..."
        raise SoliError(f"what {cluster.device.name} multiplies of {precision} is not known", allowed=", ".join(cluster.device.tflops), fix=fix)
    said = of_device(cluster.device, precision)
    return SimpleNamespace(**said, number=max(said["low"], 2.0), devices=float(cluster.size), launches=1.0)


def _seconds(call: Call, cluster: Cluster, k: Any) -> float:
    """Of a product, or of attention's kernel."""
    p = _on(cluster, NAMES.get(call.dtype, "bf16"))
    if "attention" in call.name:
        return call.flops / float(p.peak_wide * attends("soli", cluster.device.generation, "") * k.attention_share[0])
    times, m, n, summed = _sizes(call)
    return times * float(arithmetic.product(p, k, *(np.array([size]) for size in (m, n, summed)))[0])


def _sizes(call: Call) -> tuple[float, float, float, float]:
    """How many products [m, summed] @ [summed, n] an operation has, and their sizes: by its second factor, and its flops."""
    if "convolution" in call.name:  # a backward reads its gradient first, and is two
        times, weight = (2.0, call.shapes[2]) if "backward" in call.name else (1.0, call.shapes[1])
        n, summed = float(weight[0]), float(math.prod(weight[1:]))
    elif "rnn" in call.name:  # one step after another
        (steps, *_), (n, width), (_, inner) = call.shapes[:3]
        times, n, summed = steps * (2.0 if "backward" in call.name else 1.0), float(n), float(width + inner)
    else:
        second = call.shapes[-1]
        n, summed, times = float(second[-1]), float(second[-2]), float(math.prod(second[:-2]))
    return times, call.flops / (2 * n * summed * times), n, summed


def _sent(operation: str, p: Any, k: Any, sizes: Array, n: int, stride: int) -> Array:
    """Seconds of a collective of so many bytes. What goes to one rank alone goes over the link that joins the two."""
    ranks, inner = np.full(len(sizes), float(n)), np.full(len(sizes), float(stride))
    if operation == "all_reduce":
        return communication.all_reduce(p, k, sizes, ranks, inner)
    if operation == "all_to_all":
        return communication.all_to_all(p, k, sizes, ranks, inner)
    if operation in ("send", "exchange"):
        rate, latency = (p.link, p.link_latency) if stride * n <= p.node else (p.net, p.net_latency)
        return sizes / (rate * k.send_share) + latency
    return communication.gather(p, k, sizes, ranks, inner)
