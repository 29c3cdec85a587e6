"""The picture of layouts over slow links: `main()` -> docs/pictures/network.svg, from results/network-headline.json."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
RESULT = HERE.parent / "benchmarks" / "results" / "network-headline.json"
COLOURS = {"2d": "#e08a2e", "2.5d": "#4f9d5d", "3d": "#3b6fb6", "dp": "#9aa5b1"}
NAMES = {"2d": "2D", "2.5d": "2.5D", "3d": "3D", "dp": "data parallel"}
INK = "#5b6770"
TICKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50)
plt.rcParams |= {"font.size": 9, "svg.hashsalt": "soli", "svg.fonttype": "none"}


def main() -> None:
    """On the left what was measured beside the forms, on the right the forms alone, for more ranks."""
    result = json.loads(RESULT.read_text())
    labs = [lab for lab in result["labs"] if lab["mbit"] is not None]
    ratios = sorted({row["tokens_to_width"] for row in result["beyond"]}, reverse=True)
    figure = plt.figure(figsize=(8.8, max(5.2, 1.2 + 0.42 * len(labs))))
    grid = figure.add_gridspec(len(ratios), 2, width_ratios=(1.5, 1))
    measured(figure.add_subplot(grid[:, 0]), labs)
    for number, ratio in enumerate(ratios):
        here = [row for row in result["beyond"] if row["tokens_to_width"] == ratio]
        predicted(figure.add_subplot(grid[number, 1]), here, f"predicted only: {ratio} tokens to a unit of width")
    handles = [plt.Line2D([], [], color=c, marker="o", linestyle="") for c in COLOURS.values()]
    handles.append(plt.Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor="white"))
    figure.legend(
        handles, [*NAMES.values(), "by the closed forms"], frameon=False, fontsize=8, ncols=5, loc="upper center"
    )
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    out = HERE / "pictures" / "network.svg"
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    print(f"docs/pictures/{out.name}")


def measured(axes: Axes, labs: list[dict]) -> None:
    """A line for each lab; full where it was measured, hollow by the forms."""
    labels = []
    for y, lab in enumerate(sorted(labs, key=lambda lab: (-lab["ranks"], -lab["tokens"], lab["mbit"]))):
        labels.append(f"{lab['ranks']} ranks, {lab['tokens']} tokens, {lab['mbit']:g} Mbit/s")
        axes.axhline(y, color="#eceff1", linewidth=0.8, zorder=0)
        for plan, row in lab["plans"].items():
            if kind_of(plan) == "1d" or "over_1d" not in row:
                continue
            colour = COLOURS[kind_of(plan)]
            if "predicted_over_1d" in row:
                axes.plot(row["predicted_over_1d"], y, "o", color=colour, markersize=6, markerfacecolor="white")
            axes.plot(row["over_1d"], y, "o", color=colour, markersize=5)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    low, high = axes.get_xlim()
    ticks = [t for t in TICKS if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_title("measured: times faster than 1D", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def predicted(axes: Axes, rows: list[dict], title: str) -> None:
    """Over the ranks, each kind in its fastest shape."""
    for kind, colour in COLOURS.items():
        there = [row for row in rows if kind in row["kinds"]]
        speed = [row["kinds"]["1d"]["step_ms"] / row["kinds"][kind]["step_ms"] for row in there]
        axes.plot([row["ranks"] for row in there], speed, "o--", color=colour, markersize=4, markerfacecolor="white")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([row["ranks"] for row in rows], [str(row["ranks"]) for row in rows], fontsize=8)
    low, high = axes.get_ylim()
    ticks = [t for t in TICKS if low <= t <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_title(title, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def kind_of(plan: str) -> str:
    """1d, 2d, 2.5d, 3d or dp."""
    if plan.startswith("dp"):
        return "dp"
    return next((word.removeprefix("tensor=") for word in plan.split(",") if word.startswith("tensor=")), "1d")


if __name__ == "__main__":
    main()
