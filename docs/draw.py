"""The pictures of the documents: `make pictures` -> docs/pictures/*.svg, from the measured results and closed forms."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
OUT = HERE / "pictures"
RANKS = ("#3b6fb6", "#e08a2e", "#4f9d5d", "#b5507c")
PARTS = {"parameters": "#3b6fb6", "gradients": "#e08a2e", "optimizer": "#9aa5b1"}
plt.rcParams |= {"font.size": 9, "svg.hashsalt": "soli", "svg.fonttype": "none"}


def main() -> None:
    """Draw all of them."""
    OUT.mkdir(exist_ok=True)
    for picture in (batch, units, memory, steps, backend, pipeline):
        figure = picture()
        figure.savefig(OUT / f"{picture.__name__}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
        print(f"docs/pictures/{picture.__name__}.svg")


def box(axes: Axes, x: float, y: float, width: float, colour: str, text: str = "", shade: float = 1.0) -> None:
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=colour, edgecolor="white", linewidth=1.5, alpha=shade))
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", color="white")


def canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> Axes:
    _, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return axes


def batch() -> plt.Figure:
    """Eleven rows of a global batch over two ranks with two microbatches each."""
    axes = canvas(7, 2.2, (-3.2, 11.2), (-2.6, 2.6))
    axes.text(-0.3, 1.5, "global batch", ha="right", va="center")
    axes.text(-0.3, 0.2, "each rank's rows,\ntwo microbatches", ha="right", va="center")
    for row in range(11):
        box(axes, row, 1, 1, "#5b6770", str(row))
    sizes = ((0, 3, "rank 0"), (3, 3, "rank 0"), (6, 3, "rank 1"), (9, 2, "rank 1"))
    for i, (start, count, name) in enumerate(sizes):
        box(axes, start, -0.3, count, RANKS[i // 2], f"{name}\n{start}-{start + count - 1}", 1 - 0.3 * (i % 2))
        axes.text(start + count / 2, -0.75, f"total, count {i + 1}", ha="center", va="center", fontsize=8)
    axes.text(5.5, -1.6, "loss = (sum of the totals) / (sum of the counts)", ha="center", va="center")
    axes.text(5.5, -2.2, "one division a step, whatever the cut", ha="center", va="center", color="#5b6770")
    return axes.figure


def units() -> plt.Figure:
    """Three parameters in one flat unit on two ranks."""
    axes = canvas(7, 2.3, (-2.6, 12.2), (-3.3, 2.3))
    for y, text in ((1.5, "parameters"), (0, "flat unit"), (-1.5, "shards"), (-2.8, "")):
        axes.text(-0.3, y, text, ha="right", va="center")
    for x, size, name in ((0, 3, "weight"), (3.5, 1.5, "bias"), (5.5, 6, "weight")):
        box(axes, x, 1, size, "#5b6770", name)
    for x, size, name in ((0, 3, "0-2"), (3, 1.5, "3"), (4.5, 6, "4-9")):
        box(axes, x, -0.5, size, "#5b6770", name)
    box(axes, 10.5, -0.5, 0.5, "#c3c9cf", "")
    axes.text(11.1, 0, "padding", va="center", fontsize=8)
    for i in range(2):
        box(axes, 5.5 * i, -2, 5.5, RANKS[i], f"rank {i}'s optimizer updates")
    axes.text(5.5, -2.6, "reduce-scatter brings a rank its range of the gradients,", ha="center", fontsize=8)
    axes.text(5.5, -3.1, "all-gather gives everyone the updated parameters", ha="center", fontsize=8)
    return axes.figure


def memory() -> plt.Figure:
    """Bytes a parameter that a rank keeps: the closed form as bars, what was measured as a line on them."""
    measured = json.loads((RESULTS / "zero-memory.json").read_text())
    peak = {
        (r["stage"], r["ranks"]): r["growth_mib"] * 2**20 / measured["parameters"]
        for r in measured["rows"]
        if r["row"].startswith("soli") and "growth_mib" in r
    }
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    places, names = [], []
    for group, ranks in enumerate((2, 4)):
        for stage in range(4):
            x = group * 5 + stage
            kept = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}
            for part, first in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
                kept[part] /= ranks if stage >= first else 1
            bottom = 0.0
            for part, size in kept.items():
                label = part if x == 0 else None
                axes.bar(x, size, bottom=bottom, color=PARTS[part], width=0.75, label=label)
                bottom += size
            if (found := peak.get((f"z{stage}", ranks))) is not None:
                said = "measured peak" if x == 0 else None
                axes.plot([x - 0.45, x + 0.45], [found, found], color="black", label=said)
            places.append(x)
            names.append(f"zero={stage}" + (f"\n{ranks} ranks" if stage == 1 else ""))
    axes.set_xticks(places, names, fontsize=8)
    axes.set_ylabel("bytes a parameter")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def steps() -> plt.Figure:
    """Median step of every system, as a multiple of the best hand-written layout of its stage."""
    figure, panels = plt.subplots(1, 2, figsize=(8.8, 3.6))
    for axes, size in zip(panels, ("small", "big"), strict=True):
        result = json.loads((RESULTS / f"step-time-{size}.json").read_text())
        rows = {n: r for n, r in result["sizes"][size].items() if r.get("step_ms") and r.get("ratio")}
        order = sorted(rows, key=lambda n: rows[n]["ratio"]["median"], reverse=True)
        colours = [RANKS[1] if name.startswith("soli") else "#9aa5b1" for name in order]
        axes.barh(order, [rows[n]["ratio"]["median"] for n in order], color=colours, height=0.7)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(f"{size}: step time, 1 = best by hand on PyTorch", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def pipeline() -> plt.Figure:
    """What two ranks did in one step under each schedule, as measured."""
    rows = json.loads((RESULTS / "pipeline.json").read_text())["rows"]
    colours = {"F": RANKS[0], "B": RANKS[1], "I": RANKS[1], "W": RANKS[2]}
    names = {"F": "forward", "B": "backward", "I": "", "W": "backward of weights"}
    figure, panels = plt.subplots(len(rows), 1, figsize=(8.8, 5.2), sharex=True)
    for axes, row in zip(panels, rows, strict=True):
        for rank, actions in enumerate(row["timeline"]):
            for kind, stage, _, start, stop in actions:
                shade = 1.0 if stage < 2 else 0.6  # a rank's second stage is paler
                axes.barh(
                    -rank, 1e3 * (stop - start), left=1e3 * start, color=colours[kind], height=0.8, alpha=shade,
                    edgecolor="white", linewidth=0.6,
                )  # fmt: skip
        axes.set_yticks([0, -1], ["rank 0", "rank 1"], fontsize=7)
        said = f"{row['schedule']}: ranks wait {row['measured']:.0%} of the step, {row['table']:.0%} by its table"
        axes.set_title(said, fontsize=8, loc="left", pad=2)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=7)
    panels[-1].set_xlabel("ms", fontsize=8)
    used = [kind for kind in names if names[kind]]
    figure.legend([Rectangle((0, 0), 1, 1, color=colours[k]) for k in used], [names[k] for k in used],
                  frameon=False, fontsize=8, ncols=3, loc="upper right")  # fmt: skip
    figure.tight_layout()
    return figure


def backend() -> plt.Figure:
    """Time of an all-reduce over its size, at each number of ranks: gloo, local, and local on shared tensors."""
    rows = json.loads((RESULTS / "backend.json").read_text())["rows"]
    systems = {"gloo": "#9aa5b1", "local": RANKS[1], "local-shared": RANKS[0], "deepspeed-shm": RANKS[3]}
    named = {"local-shared": "local, shared tensors", "deepspeed-shm": "DeepSpeed's operator"}
    figure, panels = plt.subplots(1, 3, figsize=(8.8, 3), sharey=True)
    for axes, ranks in zip(panels, (2, 4, 8), strict=True):
        found = [row for row in rows if row["operation"] == "all_reduce" and row["ranks"] == ranks]
        for system, colour in systems.items():
            points = [(row["bytes"], row[system]) for row in found if system in row]
            axes.loglog(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=named.get(system, system))
        axes.set_title(f"{ranks} ranks", fontsize=9)
        axes.set_xticks([2**10, 2**20, 2**28], ["1 KB", "1 MB", "256 MB"], fontsize=8)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("all-reduce, ms")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
