"""What a search found, for people and for programs: the best plans, why the first, and why not another."""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from soli.core.errors import Problem, SoliError, raise_all
from soli.core.plan import commas
from soli.planner import space
from soli.planner.cost import arithmetic, memory
from soli.planner.cost.constants import chain, sets, spread_of
from soli.planner.cost.points import Points
from soli.planner.cost.step import Step
from soli.planner.models import Model
from soli.planner.offers import SOME, WORDS, spelt
from soli.planner.search import Found, chosen, constants_of, different, enough, plan_of, search, simplest
from soli.planner.task import FIXED, Task, problems

GB = 1e9
MORE = (1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Memories that are tried beyond what there is."""
PARTS = {
    "computing": "computing", "exposed": "communication inside layers that nothing hides", "waiting": "waiting in the pipeline",
    "gradients": "reducing gradients", "update": "the optimizer",
}  # fmt: skip
"""What a step's time goes to."""
IN_TEN = 2.44
"""What nine in ten normal errors are below, by their median."""


@dataclass(frozen=True)
class Choice:
    """One plan and what it costs. Seconds, bytes in GB, shares of 1."""

    plan: str
    microbatch: int
    step_time_s: float
    time_low_s: float
    time_high_s: float
    tokens_per_s: float
    mfu: float
    memory_gb: float
    memory_high_gb: float
    memory_parts_gb: dict[str, float]  # by memory.kinds; together memory_gb
    bubble: float
    exposed: float  # communication that nothing hides
    parts_s: dict[str, float]
    note: str  # what the plan's text does not say

    @property
    def cells(self) -> dict[str, str]:
        """Its numbers as tables show them, by their titles."""
        times = {"step s": self.step_time_s, "from": self.time_low_s, "to": self.time_high_s}
        return {title: f"{seconds:#.4g}".rstrip(".") for title, seconds in times.items()} | {
            "tokens/s": f"{self.tokens_per_s:,.0f}", "MFU": f"{self.mfu:.1%}", "GB": f"{self.memory_gb:.1f}",
            "up to": f"{self.memory_high_gb:.1f}", "bubble": f"{self.bubble:.1%}", "exposed": f"{self.exposed:.1%}",
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The best plans, why the first one, and on what this stands."""

    plans: int  # counted
    looked: int
    fit: int
    best: list[Choice]
    simplest: Choice  # of all that are no slower than the first by what the model is off
    why: str
    assumed: str

    @property
    def seen(self) -> str:
        """How many plans there are, and how many were looked at."""
        others = "the bounds of the others are slower, or larger than the memory"
        return f"{self.plans} plans: these are the best. {self.looked} were computed; {others}."


def answer(task: Task, count: int = 10) -> Answer:
    """The best plans of a task, which differ. SoliError where nothing fits, with what would."""
    near = spread_of(task.framework)["near"]
    found = search(task, max(count, 2), near)
    if not len(found.points):
        raise _nothing(found)
    best, words = [choice(task, found.points, found.cost, i) for i in different(found, max(count, 2))], ""
    plain = best[0]
    if place := simplest(found, near):
        plain, few = choice(task, found.points, found.cost, place), chosen(found.points)
        words = (
            f". {plain.plan} takes {plain.step_time_s / best[0].step_time_s - 1:.1%} longer, and two plans of one workload are {near:.1%} off beside each "
            f"other: of all that near it has the fewest choices beyond sharing the batch out, {few[place]:g} in place of {few[0]:g}"
        )
    return Answer(found.counted, found.looked, found.fit, best[:count], plain, why(best, near) + words, assumed(task))


def choice(task: Task, p: Points, cost: Step, i: int) -> Choice:
    """The plan at a place."""
    spread = spread_of(task.framework)
    time, size = float(cost.time[i]), float(cost.memory[i])
    tokens, kinds = task.batch * task.seq, memory.kinds(p.take([i]), constants_of(task))
    parts = {name: float(getattr(cost, name)[i]) for name in PARTS if name != "computing"}
    return Choice(
        plan=str(plan_of(p, i)), microbatch=int(p.microbatch[i]), step_time_s=time, tokens_per_s=tokens / time,
        time_low_s=time * spread["time_low"], time_high_s=time * spread["time_high"],
        mfu=flops(p, i) * tokens / (time * task.cluster.size * float(p.peak[i]) / task.cluster.device.unthrottled), memory_gb=size / GB,
        memory_high_gb=size * spread["memory_high"] / GB,
        memory_parts_gb={name: float(part[0]) / GB for name, part in kinds.items()}, bubble=parts["waiting"] / time,
        exposed=(parts["exposed"] + parts["gradients"]) / time, note=note(p, i),
        parts_s={"computing": time - sum(parts.values()), **parts},
    )  # fmt: skip


def sized(model: Model) -> str:
    """A model's name and how large it is."""
    used = f", {model.used / 1e9:.4g} of a token" if model.experts else ""
    return f"{model.name}, {model.parameters / 1e9:.4g} billion parameters{used}"


def note(p: Points, i: int) -> str:
    """What the plan's text does not say."""
    own, again, fewer = int(p.own_layers[i]), int(p.again[i]), int(p.fewer[i])
    each = own // int(p.chunks[i])
    said = [f"{again} of a rank's {own} layers computed again"] if again and not p.by_product[i] else []
    said += [f"stages of up to {each} layers, the last of {each - fewer}"] if fewer else []
    return "; ".join(said)


def flops(p: Points, i: int) -> float:
    """Of the model, a token: 6 a parameter that a product reads, and attention's (arXiv 2204.02311, appendix B).

    Of attention what a kernel computes: under a causal mask half of what the paper counts, and of windows what they leave.
    """
    one = p.take([i])
    table = one.vocab * one.hidden
    scores = one.layers * one.seq * one.attention_width * arithmetic.within(one)
    return float((6 * (memory.used(one) - (1 - one.tied) * table) + 6 * scores)[0])


def why(best: list[Choice], near: float) -> str:
    """What makes the first quicker than the second. `near`: by what part two plans are off beside each other, the median."""
    if len(best) < 2:
        return "No plan of another layout fits"
    first, second = best[0], best[1]
    less = second.step_time_s - first.step_time_s
    if less < 5e-4 * first.step_time_s:
        return f"As quick as the second, in {first.memory_gb:.1f} GB; that one takes {second.memory_gb:.1f}"
    text = f"{less:.3g} s ({less / first.step_time_s:.1%}) less than the second: " + compared(first, second)
    if less < IN_TEN * near * first.step_time_s:
        text += ". Less than the error: measure both"
    return text


def beyond(task: Task, best: Choice) -> str:
    """What the nearest plan lacks that would be quicker, and does not fit: the least of some amounts of more memory that brings one."""
    device = task.cluster.device

    @cache
    def quicker(more: float) -> Choice | None:
        wide = replace(device, memory_gib=device.memory_gib * more * task.limit / device.usable)
        free = search(replace(task, cluster=replace(task.cluster, device=wide), memory=0.0), 1)
        quick = choice(task, free.points, free.cost, 0)
        beyond_it = quick.memory_high_gb > task.limit / GB and quick.step_time_s < best.step_time_s * (1 - 5e-4)
        return quick if beyond_it else None

    least = bisect_left(MORE, True, key=lambda more: quicker(more) is not None)  # what more brings, yet more does
    quick = nearer = quicker(MORE[least]) if least < len(MORE) else None
    if quick is None:
        return ""
    while nearer is not None:  # of the plans with less than that one
        quick, nearer = nearer, quicker(nearer.memory_high_gb * GB / task.limit - 1e-4)
    less = 1 - quick.step_time_s / best.step_time_s
    takes = f"{quick.step_time_s:.4g} s ({less:.1%} less), up to {quick.memory_high_gb:.1f} GB a device"
    lacks = f"{quick.memory_high_gb - task.limit / GB:.3g} GB"
    return f"The nearest that is quicker and does not fit, {quick.plan}, would take {takes}, and lacks {lacks}"


def compared(a: Choice, b: Choice) -> str:
    """Where a step of a spends less than one of b, and where more."""
    gaps = {PARTS[name]: b.parts_s[name] - a.parts_s[name] for name in PARTS}
    told = sorted([gap for gap in gaps.items() if abs(gap[1]) >= 0.001 * a.step_time_s], key=lambda gap: -abs(gap[1]))
    words = [f"{abs(gap):.3g} s {'less' if gap > 0 else 'more'} {name}" for name, gap in told[:3]]
    return ", ".join(words) or "in no part by more than 0.1%"


def why_not(task: Task, wanted: Mapping[str, float]) -> str:
    """Why the best plan is none with what is wanted: what the best of these costs, or what it lacks."""
    first = answer(task, 1).best[0]
    said = spelt(wanted)
    if over := {name: value for name, value in (task.fixed or {}).items() if wanted.get(name, value) != value}:
        said += f" (and not the {spelt(over)} that is fixed)"
    asked = task.with_fixed(wanted)
    if wrong := problems(asked):
        return f"{said}: " + "; ".join(problem.what for problem in wrong)
    if not space.counted(asked):
        return f"{said}: no plan has it, with {task.model.heads} heads, {task.model.layers} layers and {task.batch} sequences"
    seen = search(asked, 1)
    if not len(seen.points):
        return f"{said}: does not fit. " + lacking(seen)
    other = choice(asked, seen.points, seen.cost, 0)
    if other.plan == first.plan:
        return f"{said}: the best plan has it"
    more = other.step_time_s - first.step_time_s
    share = f"{abs(more) / first.step_time_s:.1%} {'more' if more >= 0 else 'less'}"
    return f"{said}: at best {other.step_time_s:.4g} s with {other.plan}, {share}: {compared(other, first)}"


def lacking(found: Found) -> str:
    """What the plan that takes least lacks."""
    most, mean = found.least / GB, found.least / GB / spread_of(found.task.framework)["memory_high"]
    assert found.nearest is not None
    plan = plan_of(found.nearest, 0)
    return f"The nearest, {plan}, takes {mean:.1f} GB a device, and up to {most:.1f}, of which it lacks {most - found.task.limit / GB:.1f} GB"


def _nothing(found: Found) -> SoliError:
    task = found.task
    nodes, node = enough(task), task.cluster.device.node
    fix = f"{nodes} servers of {node} would hold it ({nodes * node} devices)" if nodes else "more memory a device, or a smaller model"
    holds = "cannot" if found.least * spread_of(task.framework)["memory_low"] > spread_of(task.framework)["memory_high"] * task.limit else "is not sure to"
    what = f"{task.cluster} {holds} hold {task.model.name} under any of {found.counted} plans"
    return SoliError(what, got=lacking(found), allowed=f"{task.limit / GB:.1f} GB a device", fix=fix)


def assumed(task: Task) -> str:
    """On what measurements the constants and the intervals stand."""
    generation = task.cluster.device.generation
    name = next(one for one in reversed(chain(task.framework, generation)) if sets().get(one, {}).get("rows"))
    rows, unlike = sets()[name]["rows"], ""
    if name != f"{task.framework} {generation}":
        unlike = f", in the place of {task.framework}'s on {generation}, of which none were fitted"
    own = ", of memory soli's own" if task.framework == "soli" else ""
    return f"constants are those of {rows:g} published {'run' if rows == 1 else 'runs'} ({name}){unlike}; intervals are those of all programs and devices{own}"


def fixed_of(text: str) -> dict[str, float]:
    """What the user fixes, such as "tp=8,recompute=full", or a plan as it is printed. SoliError with every word that cannot be."""
    found: dict[str, float] = {}
    wrong, parts = [], {}  # a batch's, which a plan may name twice: flushes of a pipeline, and microbatches of each
    for word in filter(None, ("=".join(map(str.strip, part.split("="))) for part in text.split(","))):
        name, _, said = word.partition("=")
        values = WORDS.get(name, {})
        value = values.get(said) if values else (float(said) if re.fullmatch(r"[1-9]\d{0,8}", said, re.A) else None)
        if name == "recompute" and re.fullmatch(r"0\.\d+", said, re.A):
            value = SOME  # as a plan says how much is kept
        if name in ("accumulate", "microbatches") and value is not None and name not in parts:
            parts[name] = value
        elif name not in FIXED:
            wrong.append(Problem(f"'{name}' cannot be fixed", allowed=", ".join(FIXED)))
        elif value is None:
            allowed = ", ".join(values) if values else "a whole number above 0, of up to nine digits"
            fix = SAME.get(word) or commas(word)
            wrong.append(Problem(f"'{word}' cannot be", got=said or "nothing", allowed=allowed, fix=fix))
        elif found.setdefault(name, value) != value:
            wrong.append(Problem(f"'{name}' is fixed twice", got=text))
    if parts:
        found["microbatches"] = math.prod(parts.values())
    if not text.strip(" ,"):
        wrong.append(Problem("nothing is said", got=repr(text), allowed="such as tp=8,recompute=full"))
    raise_all(wrong)
    return found


SAME = {"tensor=2.5d": "tensor=2d: each of its copies is one of dp's ranks, which the search has too"}
