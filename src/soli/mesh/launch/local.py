"""Start N ranks of a program on this machine, and end them together.

Why not torchrun: its agent imports torch (seconds), an error is printed once a rank, and exit codes are
lost. Here the launcher imports no torch, a failure ends the job within seconds, and one report says which
rank was first, with what, and where the others stood. On many hosts torchrun and Slurm work as they are.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from soli.mesh.launch.blame import Ended, report

GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves after one has failed."""
_PR_SET_PDEATHSIG = 1


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[str]
    error_file: Path
    stacks_file: Path
    log: Path | None
    ended: float | None = None
    killed: bool = False


def launch(n: int, argv: list[str], *, log_dir: Path | None = None, all_ranks: bool = False) -> int:
    """Run `argv` as n ranks; the exit code of the job. Rank 0's output is shown, the others' is logged."""
    folder = Path(tempfile.mkdtemp(prefix="soli-run-")) if log_dir is None else log_dir
    folder.mkdir(parents=True, exist_ok=True)
    if n > 1 and not all_ranks:
        print(f"soli: {n} ranks; shown is rank 0, the others write to {folder}/rank*.log", file=sys.stderr)
    port = int(os.environ.get("MASTER_PORT", 0)) or _free_port()
    ranks = [_start(rank, n, argv, port, folder, all_ranks) for rank in range(n)]
    try:
        failed = _watch(ranks)
    except KeyboardInterrupt:
        _stop(ranks, signal.SIGINT)
        return 130
    if not failed:
        return 0
    text, code = report([_ended(rank) for rank in ranks])
    print(text, file=sys.stderr, flush=True)
    return code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(rank: int, n: int, argv: list[str], port: int, folder: Path, all_ranks: bool) -> _Rank:
    error_file, stacks_file = folder / f"error{rank}.json", folder / f"stacks{rank}.txt"
    for old in (error_file, stacks_file):
        old.unlink(missing_ok=True)
    env = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SOLI_ERROR_FILE": str(error_file),
        "SOLI_STACKS_FILE": str(stacks_file),
        "PYTHONUNBUFFERED": "1",
    }
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n)))
    log = None if rank == 0 or all_ranks else folder / f"rank{rank}.log"
    output: Any = log.open("w", encoding="utf-8") if log is not None else (subprocess.PIPE if all_ranks else None)
    process = subprocess.Popen(argv, env=env, stdout=output, stderr=_stderr(output), text=True, preexec_fn=_die_with_me)
    if all_ranks and process.stdout is not None:
        threading.Thread(target=_relay, args=(rank, process.stdout), daemon=True).start()
    return _Rank(rank, process, error_file, stacks_file, log)


def _stderr(output: Any) -> Any:
    return subprocess.STDOUT if output is not None else None


_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_me() -> None:
    """In the child: end when the launcher ends, however it does (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _relay(rank: int, stream: IO[str]) -> None:
    for line in stream:
        print(f"[{rank}] {line}", end="", flush=True)


def _watch(ranks: list[_Rank]) -> bool:
    """Wait for all ranks; once one has failed, end the others. True if one failed."""
    failed_at = None
    while any(rank.ended is None for rank in ranks):
        for rank in ranks:
            if rank.ended is None and rank.process.poll() is not None:
                rank.ended = time.time()
                if rank.process.returncode != 0 and failed_at is None:
                    failed_at = time.time()
        if failed_at is not None and time.time() - failed_at > GRACE_SECONDS:
            _stop(ranks, signal.SIGTERM)
        time.sleep(0.05)
    return failed_at is not None


def _stop(ranks: list[_Rank], first: signal.Signals) -> None:
    """Ask for stacks, then end what still runs, gently and then not."""
    for signals, patience in (((signal.SIGUSR1,), 0.5), ((first,), 2.0), ((signal.SIGKILL,), 5.0)):
        left = [rank for rank in ranks if rank.process.poll() is None]
        for rank in left:
            if signals[0] is signal.SIGUSR1 and not rank.stacks_file.exists():
                continue  # it has no handler yet, and the signal would end it
            rank.killed = True
            rank.process.send_signal(signals[0])
        until = time.time() + patience
        while time.time() < until and any(rank.process.poll() is None for rank in left):
            time.sleep(0.05)
    for rank in ranks:
        if rank.ended is None and rank.process.poll() is not None:
            rank.ended = time.time()


def _ended(rank: _Rank) -> Ended:
    error = json.loads(rank.error_file.read_text(encoding="utf-8")) if rank.error_file.exists() else None
    stacks = rank.stacks_file.read_text(encoding="utf-8") if rank.stacks_file.exists() else ""
    tail = rank.log.read_text(encoding="utf-8", errors="replace")[-2000:] if rank.log is not None else ""
    return Ended(rank.number, rank.process.returncode or 0, rank.ended or 0.0, rank.killed, error, stacks, tail)
