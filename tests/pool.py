"""A pool of ranks that are started once and run functions sent to them, each with a deadline.

Importing torch and what cases need costs seconds, so tests share the ranks, and most of them ranks that are forks of
one process that has the imports. Each call makes a fresh process group over the ranks it needs. A call that does not
end in time is a failure with the stacks of every rank, never a stuck suite: the ranks are killed and started anew.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from soli.core.errors import failure

DEADLINE_SECONDS = 60.0
KINDS = ("bert", "gpt2", "llama", "mistral", "opt", "qwen2", "t5", "vit")
IMPORTED = ["soli.engine.engine", "soli.verify.parity", *(f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS)]
"""By the process that ranks are forks of, or by each of them: it takes longer than a case may."""
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class Pool:
    """`run(function, *args, ranks=n)` -> the results of n ranks, in order. Functions are module-level ones."""

    def __init__(self, size: int, start: Literal["spawn", "forkserver"] = "spawn") -> None:
        """`start`: "spawn" for new interpreters, each with sets in an order of its own, as launched ranks are; "forkserver" for
        forks of one process, which start at once and have one order."""
        self.size = size
        self.start = start
        self._folder = Path(tempfile.mkdtemp(prefix="soli-pool-"))
        self._calls = 0
        self._ranks: list[tuple[Any, Connection]] = []
        self._environment: dict[str, str] = {}

    def _start(self, ranks: int) -> None:
        """Those that are missing of so many: a new interpreter takes seconds to import, and most calls ask for two."""
        context: Any = mp.get_context(self.start)
        context.set_forkserver_preload(IMPORTED)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        there = len(self._ranks)
        self._environment = self._environment if there else dict(os.environ)  # that of the first for all: tests change it
        for rank in range(there, ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, str(self._stacks(rank)), self._environment), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, pipe in self._ranks[there:]:
            if not pipe.poll(120):
                self.close()  # else what it says late is taken for the next call's answer
                raise failure("a rank of the pool did not start in 120 s")
            pipe.recv()

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks{rank}"

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int, deadline: float = DEADLINE_SECONDS
    ) -> list[Any]:
        """Call `function(*args)` on each of `ranks` ranks, which form a process group of their own."""
        if ranks > self.size:
            raise failure(f"a pool of {self.size} ranks was asked for {ranks}")
        self._start(ranks)
        self._calls += 1
        store = str(self._folder / f"store{self._calls}")
        for rank in range(ranks):
            self._ranks[rank][1].send((function, args, rank, ranks, store, deadline))
        results = self._collect(ranks, time.monotonic() + deadline + 5)
        Path(store).unlink(missing_ok=True)
        errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        if errors:
            raise failure(f"{len(errors)} of {ranks} ranks failed in {function.__name__}:\n" + "\n".join(errors))
        return [value for _, value in results]

    def _collect(self, ranks: int, until: float) -> list[tuple[bool, Any]]:
        results: list[tuple[bool, Any]] = []
        for rank in range(ranks):
            process, pipe = self._ranks[rank]
            while not pipe.poll(0.05):
                if not process.is_alive():
                    code = process.exitcode
                    self.close()
                    raise failure(f"rank {rank} of the pool died with exit code {code}")
                if time.monotonic() > until:
                    report = self._failed(results, ranks) + self._hang(ranks)
                    raise failure(f"rank {rank} did not finish before the deadline; where the ranks stood:\n{report}")
            try:
                results.append(pipe.recv())
            except EOFError:
                self.close()
                raise failure(f"rank {rank} of the pool died") from None
        return results

    def _failed(self, results: list[tuple[bool, Any]], ranks: int) -> str:
        """What ranks before and after the one that is waited for have reported: often why the others wait."""
        after = range(len(results) + 1, ranks)
        told = list(enumerate(results))
        told += [(r, self._ranks[r][1].recv()) for r in after if self._ranks[r][1].poll()]
        return "".join(f"rank {r} had failed:\n{text}\n" for r, (ok, text) in told if not ok)

    def _hang(self, ranks: int) -> str:
        for process, _ in self._ranks[:ranks]:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        report = "\n".join(f"rank {rank}:\n{self._stacks(rank).read_text()}" for rank in range(ranks))
        self.close()
        return report

    def close(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []


def _serve(pipe: Connection, stacks: str, environment: dict[str, str]) -> None:
    """One rank of the pool: runs what it is sent. `environment`: of now; the fork has that of when the first pool began."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    for name in IMPORTED:  # already there in a fork
        import_module(name)
    torch.set_num_threads(1)
    file = open(stacks, "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pipe.send("ready")
    while True:
        try:
            function, args, rank, ranks, store, deadline = pipe.recv()
        except EOFError:
            return
        pipe.send(_call(function, args, rank, ranks, store, deadline))


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, store: str, deadline: float
) -> tuple[bool, Any]:
    import torch.distributed as dist

    from soli.mesh.world import make_group

    try:
        if ranks > 1:
            make_group(_backend(rank, ranks), rank, ranks, deadline, store=dist.FileStore(store, ranks))
        result = (True, function(*args))
    except BaseException:  # whatever it is, the parent reports it with its traceback
        result = (False, traceback.format_exc())
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _backend(rank: int, ranks: int) -> str:
    """The one that launched ranks would have; SOLI_POOL_NCCL=1 is NCCL for ranks that share a GPU too."""
    from soli.mesh.world import placed

    device, backend = placed(rank, ranks)
    if device.type != "cuda" or not os.environ.get("SOLI_POOL_NCCL"):
        return backend
    # NCCL refuses two ranks on one GPU of one host: each is on a host of its own, which it reaches by sockets
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return "nccl"
