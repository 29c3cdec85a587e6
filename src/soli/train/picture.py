"""The loss curve as a PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMOOTH = 0.9


def draw(rows: Sequence[dict[str, Any]], unigram: float, title: str, path: Path) -> None:
    """Draw train and validation loss over steps, with the loss of the unigram model as a line.

    rows: those of metrics.jsonl. unigram: nats per token. The faint curve is each step's own loss, the
    strong one its running mean, corrected for its start as Adam's are.
    """
    # Imported here: only rank 0 draws, at the very end, and the import takes a second.
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows if row["kind"] == "train"]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    looks = [(row["step"], row["loss"]) for row in rows if row["kind"] == "validation"]
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(losses), color="tab:blue", linewidth=1.8, label="training, running mean")
    if looks:
        axes.plot(*zip(*looks, strict=True), "o-", color="tab:orange", markersize=4, label="validation")
    axes.axhline(unigram, color="0.35", linestyle="--", linewidth=1.2, label=f"unigram entropy, {unigram:.2f}")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential running mean; the first values are not pulled towards zero."""
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = SMOOTH * mean + (1 - SMOOTH) * value, SMOOTH * weight + (1 - SMOOTH)
        out.append(mean / weight)
    return out
