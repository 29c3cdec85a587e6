"""Start ranks, wait for them, and kill all they started when the time is up. Used by run.py and memory.py."""

import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ranks import kill, wait

GRACE_S = 10.0  # what the other ranks get after the first one has failed, to say why themselves


@dataclass
class Outcome:
    """What came of one launch: every rank's record, or the reason that there is none."""

    records: list[dict] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def free_port() -> int:
    """A port of the loopback that nobody holds now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def rank_environment(rank: int, world: int, ports: tuple[int, int], extra: dict[str, str]) -> dict[str, str]:
    """The variables of one rank, those that torchrun sets among them (Fabric and accelerate read them)."""
    return {
        **os.environ,
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),  # DeepSpeed's shared-memory operator segfaults without it
        "GROUP_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]),
        "BENCH_STORE_PORT": str(ports[1]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
        **extra,
    }  # fmt: skip


def launch(command: list[str], world: int, deadline: float, extra: dict[str, str] | None = None) -> Outcome:
    """Run `command --out FILE` as `world` ranks. Never raises for what the ranks do; the Outcome says it."""
    ports = free_port(), free_port()
    start, children = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="soli-bench-") as scratch:
        folder, ranks = Path(scratch), []
        try:
            for rank in range(world):
                # a session of its own a rank, so that its helpers (compilers, loaders) die with it
                with (folder / f"{rank}.log").open("wb") as log:
                    ranks.append(
                        subprocess.Popen(
                            [*command, "--out", str(folder / f"{rank}.json")],
                            env=rank_environment(rank, world, ports, extra or {}),
                            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                            start_new_session=True,
                        )
                    )  # fmt: skip
            first, late = wait(ranks, start + deadline, GRACE_S)
        finally:
            kill(ranks)
        outcome = Outcome(seconds=time.monotonic() - start)
        if first is not None:
            outcome.error = f"rank {first}: {reason(folder, first, ranks[first].returncode)}"
        elif late:
            outcome.error = f"killed after the deadline of {deadline:.0f} s; rank 0 was at: {tail(folder, 0)}"
        else:
            outcome.records = [json.loads((folder / f"{r}.json").read_text()) for r in range(world)]
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome.cpu_seconds = now.ru_utime + now.ru_stime - children.ru_utime - children.ru_stime
    return outcome


def reason(folder: Path, rank: int, code: int) -> str:
    """Why a rank failed: the exception that it wrote down, else its signal and its last printed line."""
    file = folder / f"{rank}.json"
    if file.exists():
        return str(json.loads(file.read_text()).get("error", "no error written"))
    died = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"{died}; last line: {tail(folder, rank)}"


def tail(folder: Path, rank: int) -> str:
    """The last line that a rank printed."""
    printed = (folder / f"{rank}.log").read_text(errors="replace").splitlines()
    lines = [x.strip() for x in printed if x.strip()]
    return lines[-1][:300] if lines else "(nothing printed)"
