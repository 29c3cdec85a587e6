"""What a run says: one line a step (or a bar on a terminal), metrics.jsonl, TensorBoard. Rank 0 only."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from soli.train.rundir import METRICS

SMOOTH = 0.9  # of the speed that is shown: about the last ten steps


def memory_mb() -> float:
    """Largest GPU memory so far, or what this process holds on a machine without one; MB (10^6 bytes)."""
    used = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else psutil.Process().memory_info().rss
    return used / 1e6


def clock(seconds: float) -> str:
    """75 -> 1:15, 3700 -> 1:01:40."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Log:
    """Writes and prints on rank 0; on the other ranks every call returns at once."""

    def __init__(self, folder: Path, rank: int, ranks: int, steps: int, first: int) -> None:
        self.active, self.ranks, self.steps = rank == 0, ranks, steps
        self.start = self.last = time.perf_counter()
        self.speed = 0.0
        if not self.active:
            return
        # Imported here: it takes a second, which the other ranks need not spend.
        from torch.utils.tensorboard import SummaryWriter

        self.file = (folder / METRICS).open("a", encoding="utf-8")
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1 if first else None)
        console = Console()
        columns = TextColumn("{task.fields[place]}"), BarColumn(bar_width=16), TextColumn("{task.fields[words]}")
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bar.start()
        self.task = self.bar.add_task("", total=steps or None, completed=first, words="", place="")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.active:
            if self.bar.disable:
                print(text, flush=True)
            else:
                self.bar.console.print(text, highlight=False, markup=False)

    def plan_steps(self, steps: int) -> None:
        """The number of steps, once it is known."""
        self.steps = steps
        if self.active:
            self.bar.update(self.task, total=steps)

    def step(self, step: int, loss: float, tokens: int, lr: float, norm: float | None) -> None:
        """After an optimizer step over `tokens` counted targets. loss: nats per target."""
        now = time.perf_counter()
        speed, self.last = tokens / (now - self.last), now
        self.speed = SMOOTH * self.speed + (1 - SMOOTH) * speed if self.speed else speed
        if not self.active:
            return
        row = {
            "kind": "train", "step": step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": tokens,
            "tokens_per_second": speed, "memory_mb": memory_mb(), "seconds": now - self.start,
        }  # fmt: skip
        curves = {key: key for key in ("lr", "grad_norm", "tokens_per_second", "memory_mb")}
        self._record(row, {"loss/train": "loss", **curves})
        left = clock((self.steps - step) * tokens / self.speed) if self.steps else "?"
        pace = f"{self.speed:,.0f} tokens/s | {row['memory_mb']:,.0f} MB"
        of_norm = f" | norm {norm:.2f}" if norm is not None else ""
        words = f"loss {loss:.4f} | {pace} a rank | lr {lr:.2e}{of_norm} | {left} left"
        short = f"loss {loss:.3f} | {pace} | {left} left"
        self.bar.update(self.task, completed=step, words=short, place=f"{step}/{self.steps or '?'}")
        if self.bar.disable:
            print(f"step {step:>5} of {self.steps or '?'} | {words}", flush=True)

    def look(self, step: int, loss: float, windows: int, bits: float | None) -> None:
        """After a look at `windows` windows of validation. bits: per byte, where all of it was seen."""
        if not self.active:
            return
        row = {"kind": "validation", "step": step, "loss": loss, "windows": windows, "bits_per_byte": bits}
        self._record(row, {"loss/validation": "loss"})
        self.say(f"step {step:>5} | validation loss {loss:.4f} ({windows} windows)")

    def skip(self) -> None:
        """The time since the last step was no training: leave it out of the speed."""
        self.last = time.perf_counter()

    def _record(self, row: dict[str, Any], curves: dict[str, str]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        for curve, key in curves.items():
            if row[key] is not None:
                self.board.add_scalar(curve, row[key], row["step"])

    def close(self) -> None:
        if self.active:
            self.file.close()
            self.board.close()
            self.bar.stop()
