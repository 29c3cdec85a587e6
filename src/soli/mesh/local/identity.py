"""Who the ranks of a group are: on which host, in which process, with which versions. Compared before all else.

Ranks share memory if they run under one kernel and see each other's processes; others are on another host,
as far as this backend goes. `SOLI_HOST` gives a rank's host a name of its own instead.
"""

import json
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from soli.core.errors import failure

PROTOCOL = 3
"""Of what lies in the shared memory: goes up with every change of it."""


@dataclass(frozen=True)
class Identity:
    """One rank of a group. `kernel` and `processes` tell whether two ranks can share memory."""

    host: str
    kernel: str
    processes: str
    pid: int
    protocol: int
    torch: str


def mine() -> Identity:
    """This process."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    kernel = boot.read_text().strip() if boot.exists() else os.uname().nodename
    processes = os.readlink(space) if os.path.exists(space) else ""
    host = os.environ.get("SOLI_HOST") or f"{kernel} {processes}"
    return Identity(host, kernel, processes, os.getpid(), PROTOCOL, torch.__version__.split("+")[0])


def awaited(store: Any, keys: dict[int, str], timeout: timedelta, where: str) -> list[str]:
    """The values of all keys, in their order, once every rank has set its own. SoliError names the late ones.

    `keys`: a rank's number and its key; `where` says of what they are the ranks, for the error.
    """
    try:
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:  # a DistStoreError, or what a FileStore raises
        missing = [str(rank) for rank, key in keys.items() if not store.check([key])]
        what = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)} of {where} did not come in {timeout.total_seconds():g} s"
        raise failure(what, fix="are they started, and do they make the same groups in the same order?") from error
    return [store.get(key).decode() for key in keys.values()]


def exchange(store: Any, rank: int, ranks: int, timeout: timedelta) -> list[Identity]:
    """The identities of all ranks, on every rank; SoliError if they do not fit together, on every rank too."""
    store.set(f"identity{rank}", json.dumps(asdict(mine())))
    keys = {other: f"identity{other}" for other in range(ranks)}
    found = [Identity(**json.loads(said)) for said in awaited(store, keys, timeout, "the group")]
    _check(found)
    return found


def leave_last(store: Any, rank: int, ranks: int, timeout: timedelta) -> None:
    """Rank 0, in whose process the store often is, goes on when the others need it no more to make the group."""
    if rank:
        store.set(f"made{rank}", "1")
    elif ranks > 1:
        awaited(store, {other: f"made{other}" for other in range(1, ranks)}, timeout, "the group")


def _check(ranks: list[Identity]) -> None:
    for name, what in (("torch", "versions of torch"), ("protocol", "versions of soli's local backend")):
        if len({getattr(rank, name) for rank in ranks}) > 1:
            got = "; ".join(f"rank {i}: {getattr(rank, name)}" for i, rank in enumerate(ranks))
            raise failure(f"the ranks have different {what}", got=got, fix="install the same versions of soli and torch for every rank")
    for i, rank in enumerate(ranks):
        first, one = next((j, other) for j, other in enumerate(ranks) if other.host == rank.host)
        if (rank.kernel, rank.processes) != (one.kernel, one.processes):
            what = f"rank {first} and rank {i} say that they are on one host, {rank.host}, and are not"
            got = f"kernel {one.kernel} and {rank.kernel}, processes {one.processes} and {rank.processes}"
            raise failure(what, got=got, fix="unset SOLI_HOST, or give every host a name of its own with it")
