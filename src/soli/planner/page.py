"""The planner's answer as one HTML page: the plans, why, and four pictures, three where the first plan's schedule is neither 1F1B nor interleaved, which is said. Nothing is fetched, nothing runs in it."""

from dataclasses import replace
from typing import Any

import numpy as np

from soli.core.page import svg, template
from soli.core.pipelines import order, played
from soli.planner import explain
from soli.planner.cost.points import INTERLEAVED
from soli.planner.search import Found, holds, plan_of, search, thriftiest
from soli.planner.task import Task

LIMITS = 12
DRAWN = 24  # microbatches and stages of a timeline that can be read
COLORS = {"F": "#4c72b0", "B": "#dd8452", "gradients": "#55a868", "update": "#bbbbbb"}
KINDS = {
    "parameters": "#4c72b0", "gradients": "#8da9d6", "optimizer": "#c5d3ec", "activations": "#dd8452", "logits": "#f0c2a4", "gathered": "#55a868", "workspace": "#bbbbbb",
}  # fmt: skip
"""Colors of memory.kinds."""


def page(task: Task, answer: explain.Answer, reasons: list[str], inferred: tuple[str, ...] = ()) -> str:
    """The whole page. `reasons`: answers to why-not. `inferred`: what was read from a model."""
    found = search(task)
    head = f"{explain.sized(task.model)}, on {task.cluster}, {task.batch} sequences of {task.seq} tokens a step"
    drawn = found.points.schedule[0] <= INTERLEAVED
    figures = [
        ("Memory of a device", "Bars: what is predicted. Line: the upper bound, which must stay below the dashes.", _memory),
        *([("One step of the first plan", _said_of_timeline(found), _timeline)] if drawn else []),
        ("Time against devices", "The best plan's step on fewer and on more servers, with its interval.", _devices),
        ("Time against memory", "The quickest plan whose upper bound fits, for each amount of memory.", _front),
    ]  # fmt: skip
    pictures = [(title, svg(lambda axes, draw=draw: draw(axes, task, answer, found)), caption) for title, caption, draw in figures]  # type: ignore[misc]
    left_out = "" if drawn else f"{plan_of(found.points, 0)}, whose order of passes is neither 1f1b nor interleaved"
    said = {"answer": answer, "reasons": reasons, "inferred": inferred, "pictures": pictures, "left_out": left_out}
    return template(__package__, "page.html").render(head=head, **said) + "\n"


def _memory(axes: Any, task: Task, answer: explain.Answer, found: Found) -> None:
    places = np.arange(len(answer.best))
    bottom = np.zeros(len(places))
    for name, color in KINDS.items():
        size = np.array([one.memory_parts_gb[name] for one in answer.best])
        axes.barh(places, size, left=bottom, color=color, label=name, height=0.6)
        bottom = bottom + size
    for place, one in zip(places, answer.best, strict=True):
        axes.plot([one.memory_gb, one.memory_high_gb], [place, place], color="black", linewidth=1.2)
    axes.axvline(task.limit / explain.GB, color="black", linestyle="--")
    axes.set(yticks=places, yticklabels=[str(n + 1) for n in places], xlabel="GB", ylabel="plan")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.17), ncols=7, fontsize=8, columnspacing=1)


def _first(found: Found) -> tuple[int, int, int, int]:
    """Stages, chunks and microbatches of the first plan, and how many of these a timeline shows; with chunks as many as there are
    ranks, or twice, ..."""
    stages, chunks, times = (int(getattr(found.points, name)[0]) for name in ("pp", "chunks", "microbatches"))
    return stages, chunks, times, min(times, DRAWN if chunks == 1 else max(DRAWN // chunks // stages, 1) * stages)


def _said_of_timeline(found: Found) -> str:
    stages, chunks, times, shown = _first(found)
    text = f"{plan_of(found.points, 0)}: blue forward, orange backward; white is waiting. At the end the sums of gradients that no backward hides (green) and the update (gray). Not drawn: waiting for the slowest rank, and what a step costs the host."
    if chunks > 1:
        text += f" Each rank has {chunks} stages; paler ones are later in the model."
    if times > shown or stages > DRAWN:
        text += f" {shown} of {times} microbatches and {min(stages, DRAWN)} of {stages} ranks are drawn."
    return text


def _timeline(axes: Any, task: Task, answer: explain.Answer, found: Found) -> None:
    stages, chunks, times, shown = _first(found)
    spent = float((found.cost.layers[0] + found.cost.tables[0] / stages) / times)
    forward = spent / (4 if (float(found.points.recompute[0]) == 2.0) else 3) / chunks
    seconds = {"F": forward, "B": spent / chunks - forward}
    steps = played([order(n, stages, chunks, shown) for n in range(stages)], seconds)
    for rank, (kind, stage, _), start, end in steps:
        if rank < DRAWN:
            shade = 1.0 - 0.5 * (stage // stages / max(chunks - 1, 1)) if chunks > 1 else 0.9
            axes.barh(rank, end - start, left=start, color=COLORS[kind], alpha=shade, height=0.9, edgecolor="white", linewidth=0.3)  # fmt: skip
    done = max(end for *_, end in steps)
    for name in ("gradients", "update"):
        took = float(getattr(found.cost, name)[0])
        axes.barh(range(min(stages, DRAWN)), took, left=done, color=COLORS[name], height=0.9)
        done += took
    axes.set(xlabel="s", ylabel="rank of the pipeline", yticks=range(min(stages, DRAWN)))
    axes.invert_yaxis()


def _devices(axes: Any, task: Task, answer: explain.Answer, found: Found) -> None:
    nodes = sorted({max(int(task.cluster.nodes * 2**k), 1) for k in range(-3, 4)})
    tasks = [replace(task, cluster=replace(task.cluster, nodes=count)) for count in nodes]
    best = {other.cluster.size: explain.answer(other, 1).best[0] for other in tasks if holds(other)}
    sizes, times = list(best), [one.step_time_s for one in best.values()]
    around = [(one.step_time_s - one.time_low_s, one.time_high_s - one.step_time_s) for one in best.values()]
    axes.errorbar(sizes, times, yerr=np.transpose(around), marker="o", capsize=3)
    ideal = [answer.best[0].step_time_s * task.cluster.size / size for size in sizes]
    axes.plot(sizes, ideal, linestyle=":", color="gray", label="as if nothing were lost on the way")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="s a step", xticks=sizes, xticklabels=map(str, sizes))
    axes.xaxis.minorticks_off()
    _readable(axes.yaxis, [*times, *ideal])
    axes.legend(frameon=False)


def _front(axes: Any, task: Task, answer: explain.Answer, found: Found) -> None:
    """The best time of each of some limits: it changes where the plan does."""
    least = thriftiest(task)[1]
    limits = np.geomspace(least, task.limit, LIMITS) if least < task.limit else np.array([task.limit])
    best = [float(search(replace(task, memory=float(limit)), 1).cost.time[0]) for limit in limits]
    axes.step(limits / explain.GB, best, where="post", marker="o", color="#c44e52")
    axes.set(xlabel="GB of a device, upper bound", ylabel="s a step", yscale="log")
    _readable(axes.yaxis, best)


def _readable(axis: Any, values: list[float]) -> None:
    """Numbers beside a logarithmic axis that stand apart: of its decades, or between these where it has fewer than one."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if max(values) > 4 * min(values) else MaxNLocator(5))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()
