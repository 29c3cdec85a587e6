"""One rank of one measurement: build the entry, warm up, time the steps, write a record (for run.py)."""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import probe
import torch
import workload
from entries import ENTRIES


class Meeting:
    """A barrier that no system under test takes part in: its own key-value store on its own port."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.turn = rank, world, 0
        port = int(os.environ["BENCH_STORE_PORT"])
        self.store = torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0) if world > 1 else None

    def wait(self) -> None:
        """Return when every rank is here."""
        if self.store is None:
            return
        self.turn += 1
        if self.store.add(f"arrived{self.turn}", 1) == self.world:
            self.store.set(f"go{self.turn}", "1")
        self.store.wait([f"go{self.turn}"])

    def leave(self) -> None:
        """Rank 0, which holds the store (and often the system's own), goes last."""
        if self.store is None:
            return
        if self.rank == 0:
            self.store.wait([f"left{r}" for r in range(1, self.world)])
        else:
            self.store.set(f"left{self.rank}", "1")


def measure(meeting: Meeting, name: str, size: str, warmup: int, steps: int) -> dict:
    """Everything that this rank knows about the run."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(workload.SEED)
    entry = ENTRIES[name]
    module = importlib.import_module(f"entries.{entry.module}")  # imports the peer too
    batches = workload.build_batches(size)
    probe.trim()
    imported = probe.memory()["rss"]
    step = module.build(entry.mode, size)
    built = probe.memory()["rss"]
    probe.reset_peak()
    losses, wall, cpu = [], [], []
    for i in range(warmup + steps):
        batch = batches[i % len(batches)]
        meeting.wait()
        started, ticks = time.perf_counter(), time.process_time()
        loss = step(batch)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - ticks)
        losses.append(float(loss))
    after = probe.memory()
    return {
        "rank": rank, "losses": losses, "step_s": wall[warmup:], "cpu_s": cpu[warmup:],
        "median_s": statistics.median(wall[warmup:]), "rss_imported": imported, "rss_built": built,
        "rss_peak": after["peak"], "rss_end": after["rss"],
    }  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entry", required=True, choices=sorted(ENTRIES))
    parser.add_argument("--size", required=True, choices=sorted(workload.SIZES))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    finish(args.out, lambda meeting: measure(meeting, args.entry, args.size, args.warmup, args.steps))


def finish(out: Path, measured: Callable[[Meeting], dict]) -> NoReturn:
    """Write what was measured, or what went wrong, so that the launcher can quote it; and end the process."""
    meeting = Meeting(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    try:
        record, code = measured(meeting), 0
        meeting.leave()
    except Exception as error:
        traceback.print_exc()
        record, code = {"error": last_line(error)}, 1
    out.write_text(json.dumps(record))
    sys.stdout.flush()
    sys.stderr.flush()
    # no interpreter teardown: some systems leave threads and groups whose end is not what is measured here
    os._exit(code)


def last_line(error: Exception) -> str:
    """The exception's last line, under the exception's name."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else '(no message)'}"[:400]


if __name__ == "__main__":
    main()
