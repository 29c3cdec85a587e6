"""The shared memory of one group of ranks on one host: made by the first, mapped by all.

It is a memfd, which has no name in any folder: nothing is left behind whatever dies when, and the size of
/dev/shm (64 MB in a container) does not matter. The others open it through /proc/PID/fd of the rank that made
it. `SOLI_LOCAL_FOLDER` names a folder for it instead, where /proc or memfd are not to be had; that file is
unlinked as soon as all ranks have mapped it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soli.core.errors import SoliError, failure

PROTOCOL = 1
PAGE = mmap.PAGESIZE


class Segment:
    """`size` bytes that all ranks of a group see, zero at the start."""

    def __init__(self, store: Any, rank: int, ranks: int, size: int, timeout: timedelta) -> None:
        self.size = -(-size // PAGE) * PAGE
        self.pids: list[int] = []
        if rank == 0:
            file, path = _create(self.size)
            store.set("segment", json.dumps({**_about(), "path": path, "size": self.size}))
        else:
            store.wait(["segment"], timeout)
            file, path = _open(json.loads(store.get("segment")), self.size, rank)
        self.map = mmap.mmap(file, self.size)
        store.set(f"pid{rank}", str(os.getpid()))
        for other in range(ranks):  # said after mapping: then nobody needs the file any more
            store.wait([f"pid{other}"], timeout)
            self.pids.append(int(store.get(f"pid{other}")))
        os.close(file)
        if rank == 0 and not path.startswith("/proc/"):
            os.unlink(path)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.words = memoryview(self.map).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def tensor(self, start: int, count: int) -> Tensor:
        """Bytes [start, start + count) as a uint8 tensor."""
        return self.bytes[start : start + count]


def _about() -> dict[str, Any]:
    """What must be the same on all ranks."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": boot.read_text().strip() if boot.exists() else os.uname().nodename,
        "processes": os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else "",
        "protocol": PROTOCOL,
        "torch": torch.__version__.split("+")[0],
    }


def _create(size: int) -> tuple[int, str]:
    folder = os.environ.get("SOLI_LOCAL_FOLDER")
    if folder:
        path = os.path.join(folder, f"soli-{uuid.uuid4().hex}")
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
            except OSError:
                os.unlink(path)
                raise
        except OSError as error:
            raise SoliError(
                "SOLI_LOCAL_FOLDER has no room for the ranks' shared memory",
                got=f"{folder}: {error.strerror}",
                allowed=f"{size:,} bytes free",
                fix="make room there, name another folder, or take SOLI_BACKEND=gloo",
            ) from error
        return file, path
    if not hasattr(os, "memfd_create"):
        raise SoliError(
            "this system has no memfd for the local backend",
            got=os.uname().sysname,
            fix="name a folder in memory with SOLI_LOCAL_FOLDER, or take SOLI_BACKEND=gloo",
            everywhere=True,
        )
    file = os.memfd_create("soli", os.MFD_CLOEXEC)
    os.truncate(file, size)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _open(made: dict[str, Any], size: int, rank: int) -> tuple[int, str]:
    mine = _about() | {"size": size}
    differ = [key for key, value in mine.items() if made[key] != value]
    if differ:
        fix = {
            "host": "the local backend joins ranks of one host: use SOLI_BACKEND=gloo across hosts",
            "processes": "the ranks are in different containers: share the PID namespace, or take SOLI_BACKEND=gloo",
        }.get(differ[0], "start all ranks with the same versions of soli and torch")
        raise SoliError(
            f"rank {rank} and rank 0 do not fit together in the local backend",
            got="; ".join(f"{key}: {mine[key]}, rank 0's {made[key]}" for key in differ),
            fix=fix,
        )
    try:
        return os.open(made["path"], os.O_RDWR), made["path"]
    except OSError as error:
        raise failure(
            f"rank {rank} cannot open the shared memory of rank 0",
            got=f"{made['path']}: {error.strerror}",
            fix="run all ranks as one user in one container, or take SOLI_BACKEND=gloo",
        ) from error
