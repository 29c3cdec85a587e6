"""Questions the other way round: how many devices, how long a sequence, how large a model."""

from collections.abc import Callable
from dataclasses import replace

from soli.core.errors import SoliError
from soli.planner import explain
from soli.planner.models import Model
from soli.planner.search import MOST, SERVERS, holds
from soli.planner.task import Task

LENGTHS = sorted({n << k for n in range(8, 16) for k in range(6, 21)})
"""Sequences that are tried, tokens: eighths between powers of two; times what cp is fixed to, so that it divides them."""
FINER = 16  # between two of them
STEP = 2 ** (1 / 8)  # from one size of a model to the next, in its width
SIZES = range(-40, 81)


def longest(task: Task) -> tuple[int, explain.Choice]:
    """The longest sequence, of LENGTHS, that some plan holds; and the best plan for it."""
    cp = int((task.fixed or {}).get("cp", 1))
    odd = cp // (cp & -cp)  # the powers of two in it divide all but the shortest
    lengths = [odd * length for length in LENGTHS if odd * length % cp == 0]
    kept = _last(lambda n: holds(replace(task, seq=lengths[n - 1])), len(lengths))
    if not kept:
        raise _none(task, f"not even sequences of {lengths[0]} tokens fit")
    longest = lengths[kept - 1]
    step = (lengths[kept] - longest) // FINER // cp * cp if kept < len(lengths) else 0
    if step:
        longest += step * _last(lambda n: holds(replace(task, seq=longest + n * step)), FINER - 1)
    return longest, explain.answer(replace(task, seq=longest), 1).best[0]


def largest(task: Task) -> tuple[Model, float, explain.Choice]:
    """The largest model of this one's proportions that some plan holds, its parameters, and the best plan for it."""
    sizes = [scaled(task.model, STEP**k) for k in SIZES]
    kept = _last(lambda n: holds(replace(task, model=sizes[n - 1])), len(sizes))
    if not kept:
        raise _none(task, f"not even {sizes[0].layers} layers of {sizes[0].hidden} fit")
    found = replace(task, model=sizes[kept - 1])
    return found.model, found.model.parameters, explain.answer(found, 1).best[0]


def scaled(model: Model, times: float) -> Model:
    """A model of about times^3 the parameters: as much wider as eight key heads at a time allow, the rest in depth."""
    group = model.heads // model.kv_heads
    heads = max(round(model.heads * times / group / 8) * 8 * group, group)
    wide = heads / model.heads
    layers = max(round(model.layers * times**3 / wide**2), 1)
    return replace(
        model, name=f"{model.name} x {times:.3g}", layers=layers, plain=round(model.plain * layers / model.layers),
        plain_ffn=round(model.plain_ffn * wide / 64) * 64, hidden=round(model.hidden * wide / 64) * 64, heads=heads,
        kv_heads=heads // group, ffn=max(round(model.ffn * wide / 64), 1) * 64,
    )  # fmt: skip


def devices(task: Task, tokens: float, days: float) -> tuple[int, explain.Choice]:
    """The fewest servers on which so many tokens take no longer, and the quickest plan: 1, 2, 3, 4, 6, 8, 12, ... are tried, and those between the
    first that are enough and the last that are not, halving, as if more never took longer."""
    best, less = 0.0, 0

    def quickest(count: int) -> explain.Choice | None:
        larger = replace(task, cluster=replace(task.cluster, nodes=count))
        return explain.answer(larger, 1).best[0] if holds(larger) else None

    for count in SERVERS:
        found = quickest(count)
        if found is None or tokens / found.tokens_per_s > days * 86400:
            best, less = max(best, found.tokens_per_s if found else 0.0), count
            continue
        while count - less > 1:
            middle = (count + less) // 2
            other = quickest(middle)
            if other is None or tokens / other.tokens_per_s > days * 86400:
                less = middle
            else:
                count, found = middle, other
        return count, found
    raise SoliError(
        f"no cluster of up to {MOST} servers of {task.cluster.device.name} makes {tokens:.3g} tokens in {days:g} days",
        got=f"at best {tokens / best / 86400:.3g} days" if best else "none holds the model",
        fix="a larger global batch, which more devices can share, or more days",
    )


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The last of 1 .. most that fits; 0 if none. What is smaller need not fit where what is larger does (its layers may not divide into
    stages): of every eighth, from the last, the first that fits, and what is up to fifteen beyond it."""
    coarse = next((n for n in range(most, 0, -8) if fits(n)), 0)
    return next((n for n in range(min(coarse + 15, most), coarse, -1) if fits(n)), coarse)


def _none(task: Task, why: str) -> SoliError:
    allowed = f"{task.limit / explain.GB:.1f} GB a device"
    return SoliError(f"{task.cluster} holds nothing of {task.model.name}", got=why, allowed=allowed, fix="more devices, more memory a device, or less that is fixed")
