"""Shared memory of the ranks of one host: made by the first, mapped by all.

It is a memfd, which has no name in any folder: nothing is left behind whatever dies when, and the size of
/dev/shm (64 MB in a container) does not matter. The others open it through /proc/PID/fd of the rank that made
it. `SOLI_LOCAL_FOLDER` names a folder for it instead, where /proc or memfd are not to be had; that file is
unlinked as soon as all ranks have mapped it.
"""

import json
import mmap
import os
import tempfile
from datetime import timedelta
from typing import Any

import psutil

from soli.core.errors import SoliError, blaming, failure, on_all_ranks
from soli.mesh.local.identity import awaited

PAGE = mmap.PAGESIZE


def rounded(size: int) -> int:
    """Bytes in whole pages."""
    return -(-size // PAGE) * PAGE


def shared_map(store: Any, rank: int, ranks: int, size: int, timeout: timedelta) -> mmap.mmap:
    """`size` bytes that `ranks` ranks of one host see, zero at the start. Collective.

    It is unmapped when the last object that refers to it is gone. SoliError if there is no room, if a rank
    does not come in time, or if rank 0's memory cannot be opened from here.
    """
    size = rounded(size)
    key = f"mapped{rank}" if rank else "segment"
    try:
        file, path = _create(size) if rank == 0 else _join(store, rank, size, timeout)
    except SoliError as error:
        store.set(key, json.dumps({"error": str(error)}))  # or the others would wait for this rank
        raise
    try:
        if rank == 0:
            store.set(key, json.dumps({"path": path, "size": size}))
        mapped = mmap.mmap(file, size)
        store.set(f"mapped{rank}", "{}")
        _await(store, {other: f"mapped{other}" for other in range(ranks)}, timeout)
    finally:  # all have mapped it, or never will: nobody needs the file any more
        os.close(file)
        if rank == 0 and not path.startswith("/proc/"):
            os.unlink(path)
    return mapped


def _await(store: Any, keys: dict[int, str], timeout: timedelta) -> list[dict[str, Any]]:
    """What the ranks have set for their keys, once all have; SoliError if one of them set an error."""
    found = [json.loads(said) for said in awaited(store, keys, timeout, "this host")]
    for rank, said in zip(keys, found, strict=True):
        if "error" in said:
            raise failure(f"rank {rank} of this host cannot share memory with the others", got=said["error"])
    return found


def _join(store: Any, rank: int, size: int, timeout: timedelta) -> tuple[int, str]:
    """Open what rank 0 has made."""
    made = _await(store, {0: "segment"}, timeout)[0]
    if made["size"] != size:
        got = f"{size:,} bytes; rank 0 {made['size']:,}"
        fix = "allocate the same on every rank, in the same order"
        raise failure(f"rank {rank} and rank 0 of one host want shared memory of different sizes", got=got, fix=fix)
    what = f"rank {rank} cannot open the memory that rank 0 shares"
    fix = "run all ranks of a host as one user in one container, give containers names of their own with SOLI_HOST, or take SOLI_BACKEND=gloo"
    with blaming(lambda error: failure(what, got=f"{made['path']}: {error.strerror}", fix=fix), OSError):
        return os.open(made["path"], os.O_RDWR), made["path"]


def _create(size: int) -> tuple[int, str]:
    if folder := os.environ.get("SOLI_LOCAL_FOLDER"):
        return _create_file(folder, size)
    if not hasattr(os, "memfd_create"):
        fix = "name a folder in memory with SOLI_LOCAL_FOLDER, or take SOLI_BACKEND=gloo"
        raise on_all_ranks("this system has no memfd for the local backend", got=os.uname().sysname, fix=fix)
    if size > (free := psutil.virtual_memory().available):
        what = "this machine has no room for the memory that the ranks share"
        allowed = f"{size:,} bytes and what the training needs"
        fix = "take fewer ranks, or name a folder on a disk with SOLI_LOCAL_FOLDER (slow)"
        raise SoliError(what, got=f"{free:,} bytes free", allowed=allowed, fix=fix)
    file = os.memfd_create("soli", os.MFD_CLOEXEC)
    os.truncate(file, size)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _create_file(folder: str, size: int) -> tuple[int, str]:
    try:
        file, path = tempfile.mkstemp(prefix="soli-", dir=folder)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError:
            os.unlink(path)
            raise
    except OSError as error:
        what = "SOLI_LOCAL_FOLDER has no room for the memory that the ranks share"
        raise SoliError(what, got=f"{folder}: {error.strerror}", allowed=f"{size:,} bytes free", fix="make room there, name another folder, or take SOLI_BACKEND=gloo") from error
    return file, path
