"""World: which ranks there are, how they reach each other, on which device, and by when.

A rank learns its place from the environment: `soli run` and torchrun set RANK and WORLD_SIZE, Slurm sets
SLURM_PROCID and SLURM_NTASKS; without any of them the program runs on one device and no process group is
made. A process group that the user made already is used as it is.
"""

import atexit
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from soli.core.errors import Problem, SoliError, blaming, failure, on_all_ranks, raise_all
from soli.core.report import install_hook, stacks_on_request, waiting
from soli.core.versions import process_groups
from soli.mesh.backends import cpu_backend
from soli.mesh.collectives import Failures
from soli.mesh.local.group import LocalGroup
from soli.mesh.simulate import Absent

DEADLINE_SECONDS = 300.0
"""How long a rank waits in a collective before it says so. SOLI_DEADLINE or `deadline=` change it."""


@dataclass(frozen=True)
class World:
    """The ranks of this job, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    backend: str  # gloo, local, nccl, or single
    deadline: float
    absent: Absent | None = None  # the group of the other ranks, where they are simulated
    group: Any = None  # of all ranks; None: the job's

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join(deadline: float | None = None) -> World:
    """The world of this process; makes the process group if there is more than one rank and none yet."""
    install_hook(0)  # until it is known which
    rank, size, local_rank, local_size = _place()
    install_hook(rank)
    seconds = _deadline(os.environ.get("SOLI_DEADLINE", DEADLINE_SECONDS) if deadline is None else deadline)
    stacks_on_request()
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if not {"RANK", "SLURM_PROCID"} & os.environ.keys() and torch.cuda.is_available():
            local_rank = torch.cuda.current_device()  # as the program that made the group has set it
        return World(rank, size, placed(local_rank, local_size)[0], _made_backend(), seconds)
    device, backend = placed(local_rank, local_size)
    if size == 1:
        return World(0, 1, device, "single", seconds)
    with waiting(f"the meeting of all {size} ranks"):
        _start(rank, size, backend, seconds)
    install_hook(rank)  # again: torch puts a hook of its own around errors when it makes the group
    return World(rank, size, device, backend, seconds)


def _deadline(said: Any) -> float:
    with suppress(ValueError):
        if 0 < float(said) < 1e9:
            return float(said)
    raise on_all_ranks("the deadline is no number of seconds above 0", got=said, fix="mend SOLI_DEADLINE or deadline=")


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
OF_HOST = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
TEXTS = ("MASTER_ADDR", "SLURM_JOB_NODELIST")
"""Of these variables those that are no numbers."""


def _place() -> tuple[int, int, int, int]:
    """rank, world size, local rank, ranks on this host; from torchrun's or Slurm's variables."""
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        _need(TORCHRUN, "start the program with `soli run -n N script.py` or torchrun, or unset all of them")
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        if not 0 <= rank < size:
            raise on_all_ranks("RANK is none of WORLD_SIZE ranks", got=f"RANK={rank}, WORLD_SIZE={size}", allowed=f"0 to {size - 1}")
        return rank, size, int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", size))
    if env.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in env:
        _need(SLURM, "start the program with srun, which sets them, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
        env.setdefault("MASTER_ADDR", _first_host(env["SLURM_JOB_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 20_000))
        size = int(env["SLURM_NTASKS"])
        local_size = int(env.get("SLURM_NTASKS_PER_NODE", "0") or 0) or max(1, size // int(env["SLURM_NNODES"]))
        return int(env["SLURM_PROCID"]), size, int(env["SLURM_LOCALID"]), local_size
    return 0, 1, 0, 1


def _need(names: tuple[str, ...], fix: str) -> None:
    """SoliError where a launcher's variables are not all there, or one that is a number is none."""
    env, what = os.environ, "the environment names some of a rank's variables but not"
    got = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    raise_all((Problem(f"{what} {name}", got, fix=fix) for name in names if name not in env), everywhere=True)
    odd = [name for name in (*names, *OF_HOST) if name not in TEXTS and not env.get(name, "0").isdecimal()]
    odd += ["MASTER_PORT"] * ("MASTER_PORT" in names and not odd and int(env["MASTER_PORT"]) > 65535)
    raise_all((Problem(f"{name} is no number" + " of a port" * (name == "MASTER_PORT"), env[name], fix=fix) for name in odd), everywhere=True)


def _first_host(nodes: str) -> str:
    """The first host of a Slurm list: `node[003-010,12]` -> `node003`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    if found is None:
        raise on_all_ranks("SLURM_JOB_NODELIST cannot be read", got=nodes, fix="set MASTER_ADDR")
    return found.group(1) + (found.group(2) or "")


def placed(local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """One GPU a rank over NCCL where there are enough; ranks that share GPUs over gloo; CPUs: see backends.py."""
    backend, _ = cpu_backend()
    if not torch.cuda.is_available():
        return torch.device("cpu"), backend
    count = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device, "nccl" if local_size <= count else "gloo"


def _made_backend() -> str:
    """The backend of a process group that the user made."""
    made, config = dist.get_backend(), str(dist.get_backend_config())
    if "nccl" in made or "nccl" in config:
        if "cpu:" not in config:
            what = "ranks agree on numbers in the host's memory, and this process group has a backend for devices alone"
            raise on_all_ranks(what, got=f"a process group on {config}", fix='leave it to soli, or make it with torch.distributed.init_process_group("cpu:gloo,cuda:nccl")')
        return "nccl"
    if made not in ("gloo", "local") and "gloo" not in made:
        raise on_all_ranks("soli knows gloo, local and nccl", got=f"a process group on {made}")
    return "local" if made == "local" else "gloo"


def _start(rank: int, size: int, backend: str, seconds: float) -> None:
    address, where = os.environ["MASTER_ADDR"], dict[str, Any]()
    with blaming(lambda error: _not_started(rank, size, address, error), dist.DistError, OSError):
        if address in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's own name often resolves to nothing
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # torchrun has one
                where["store"] = _store(rank, size, seconds)
        make_group(backend, rank, size, seconds, **where)
    atexit.register(_leave)


def _store(rank: int, size: int, seconds: float) -> dist.TCPStore:
    """Where ranks of one machine meet: torch's own listens to everybody."""
    port = int(os.environ["MASTER_PORT"])
    listen = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
    return dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=seconds), master_listen_fd=listen)


def make_group(backend: str, rank: int, size: int, seconds: float, **where: Any) -> None:
    """torch's process group of all ranks over a backend of soli's; `where`: a store, if not the environment's."""
    if backend == "local":
        import soli.mesh.local.register  # noqa: F401 (only who uses it pays for it)
    name, Failures.trials = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend, 0
    dist.init_process_group(name, rank=rank, world_size=size, timeout=timedelta(seconds=seconds), **where)


def _not_started(rank: int, size: int, address: str, error: Exception) -> SoliError:
    port, text = os.environ["MASTER_PORT"], str(error).strip().split("\n")[0]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        what = f"port {port} on {address} is in use, so the ranks cannot meet there"
        return SoliError(what, got=f"MASTER_PORT={port}", allowed="a free port", fix="set MASTER_PORT to another, or start with `soli run`, which finds a free one")
    what = f"rank {rank} could not meet the other {size - 1} at {address}:{port}"
    return failure(what, got=text, fix="are all ranks started, and is that address reachable from each host?")


@contextmanager
def passing_groups() -> Iterator[None]:
    """Process groups that are made inside end with it: each has threads, sockets and memory that nobody else frees.

    An error ends them for the other ranks too, who may wait in them for this one.
    """
    before = set(process_groups())
    passing = lambda: [group for group in process_groups() if group not in before]
    try:
        yield
    except Exception as error:
        for group in passing():
            if isinstance(group, LocalGroup):  # of gloo and NCCL the connections close
                group.abandon(f"a rank ended with an error\n{error}")
        raise
    finally:
        Failures.trials += 1
        for group in passing():
            dist.destroy_process_group(group)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@atexit.register
def _at_rest() -> None:
    """Waits, for two seconds at most, until the other threads of this process sleep and go on sleeping.

    One of gloo's that gives back the last tensor while Python ends aborts the process (pytorch/pytorch#179291), and
    nobody joins it before that where anything still refers to its group.
    """
    before, until = None, time.monotonic() + 2
    while ((now := _others()) != before or "R" in now) and time.monotonic() < until:
        before = now
        time.sleep(0.01)  # who waits for Python's lock has it now


def _others() -> str:
    """Of each other thread its state, R as it runs or could, and how often it has stopped: proc(5)."""
    found = ""
    for task in sorted(Path("/proc/self/task").glob("*")):
        with suppress(OSError):  # it has just ended
            if int(task.name) != os.getpid():
                found += " ".join(re.findall(r"^(?:State|\w*ctxt_switches):\s*(\w+)", (task / "status").read_text(errors="replace"), re.M)) + "\n"
    return found
