"""The plans that `plan="auto"` chooses among, and what each becomes where memory is short."""

from collections.abc import Iterator
from itertools import product
from math import isqrt
from typing import Any

from soli.core.plan import Plan
from soli.planner.legality import divisors, problems

FILLINGS = (2, 4, 1)
"""Microbatches of a pipeline, in its stages."""


def bases(ranks: int, rows: int, *, grids: bool = True) -> list[Plan]:
    """One plan of every layout of so many ranks; `rows` of a global batch bound what shares it.

    `grids`: those too (2d, 2.5d, 3d) whose ranks with other rows compute each product together, and so need as many
    rows in every batch, the last and those of an evaluation too.
    """
    found = [
        Plan(dp=ranks // (tp * cp * pp), tp=tp, cp=cp, pp=pp, **tensor, **_pipelines(pp, rows)[0])
        for tp, cp, pp in product(divisors(ranks), repeat=3)
        if ranks % (tp * cp * pp) == 0
        for tensor in _tensor(tp)
    ]
    fits = [plan for plan in found if not problems(plan, ranks) and plan.pieces <= rows]
    return [plan for plan in fits if grids or not plan.together]


def variants(plan: Plan, ranks: int, rows: int) -> list[Plan]:
    """What else the same layout can be: ZeRO-1, in copies too, the other way for attention to cross cp, other pipelines."""
    shards = (plan.dp or 1) * plan.cp > 1
    sharded = [{"zero": 1, "replicate": copies} for copies in divisors(plan.dp or 1)[: -1 if plan.cp == 1 else None]]
    found = [
        plan.with_(**{**zero, "context": context, **pipe})
        for zero in ({"zero": 0, "replicate": 1}, *(sharded if shards else ()))
        for context in (("ring", "ulysses") if plan.cp > 1 else ("ring",))
        for pipe in _pipelines(plan.pp, rows)
    ]
    return [one for one in found if one != plan and not problems(one, ranks) and one.pieces <= rows]


CHOICES = (("zero", "replicate"), ("schedule", "chunks"), ("microbatches",), ("context",))
"""What variants of a layout differ in; keys of a plan that go together."""


def differences(one: Plan, other: Plan) -> float:
    """In how many choices two plans of a layout differ; infinite where they are of two layouts, or differ in what variants do not."""
    if one.with_(**{key: getattr(other, key) for keys in CHOICES for key in keys}) != other:
        return float("inf")
    return sum(any(getattr(one, key) != getattr(other, key) for key in keys) for keys in CHOICES)


def _tensor(tp: int) -> list[dict[str, Any]]:
    if tp == 1:
        return [{}]
    found: list[dict[str, Any]] = [{"sp": sp} for sp in (False, True)]
    if isqrt(tp) ** 2 == tp:
        found.append({"tensor": "2d"})
    found += [{"tensor": "2.5d", "depth": d} for d in divisors(tp)[1:-1] if isqrt(tp // d) ** 2 == tp // d]
    if round(tp ** (1 / 3)) ** 3 == tp:
        found.append({"tensor": "3d"})
    return found


def _pipelines(pp: int, rows: int) -> list[dict[str, Any]]:
    """The likest to be quick first."""
    if pp == 1:
        return [{}]
    counts = [pp * filling for filling in FILLINGS if pp * filling <= rows] or [max(rows, 1)]
    forms: list[dict[str, Any]] = [
        {"schedule": "1f1b", "chunks": 1}, {"schedule": "zbh1", "chunks": 1}, {"schedule": "interleaved", "chunks": 2},
        {"schedule": "zbv", "chunks": 2}, {"schedule": "dualpipev", "chunks": 2},
    ]  # fmt: skip
    return [{**form, "microbatches": count} for form in forms for count in counts]


def lighter(plan: Plan, ranks: int, rows: int) -> Iterator[Plan]:
    """The plan in ever less memory, each step at the least cost in time: what ZeRO shards, smaller pieces, recomputation."""
    zeros = [zero for zero in (1, 2, 3) if zero > plan.zero] if plan.dp is not None and plan.dp * plan.cp > 1 else []
    steps: list[dict[str, Any]] = [{"zero": zero} for zero in zeros if zero < 3]
    accumulate, apart = plan.accumulate, plan.pieces // plan.accumulate
    while plan.pp == 1 and apart * accumulate * 2 <= rows:
        accumulate *= 2
        steps.append({"accumulate": accumulate})
    steps += [{"recompute": "selective"}, {"recompute": "full"}]
    steps += [{"zero": 3}] if 3 in zeros else []
    for step in steps:
        plan = plan.with_(**step)
        if not problems(plan, ranks):
            yield plan
