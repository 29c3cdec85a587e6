"""One safetensors file, written tensor by tensor with its checksum, and checked again.

The library's own `save_file` wants every tensor in memory at once, does not flush to disk, and would need a
second pass for the checksum; the format is an 8-byte length, a JSON header and the bytes. Reading is the
library's.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from soli.core.errors import SoliError, blaming, failure
from soli.core.progress import Add
from soli.core.tables import table

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in table(__package__, "dtypes.toml").items()}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
Forms = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and types of tensors, by name."""
STEP = 16 << 20  # bytes hashed and written at a time
READ = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its key, dtype and shape, and how to get it when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def form(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """What a file says of a tensor."""
    return ((*shape, 2), torch.float64) if dtype == torch.complex128 else (shape, dtype)


def room(tensor: Tensor) -> Tensor:
    """Of a tensor that is read, what a file's tensor is copied into. The file's memory is not aligned to pairs of numbers."""
    return torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor


def write_file(path: Path, entries: list[Entry], metadata: dict[str, str] | None = None, done: Add = lambda _: None) -> tuple[int, str]:
    """Write a safetensors file and flush it to the disk. Returns its size in bytes and its checksum.

    One tensor at a time is held beside the caller's own memory. The file must not exist yet.
    """
    if sys.byteorder != "little":
        raise SoliError("safetensors are little-endian; this machine is not", got=sys.byteorder)
    # Wide dtypes first: every tensor then starts at a multiple of its item size, as readers expect.
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for entry in entries:
        span = [at, at + entry.size]
        header[entry.key] = {"dtype": DTYPES[entry.dtype], "shape": form(entry.shape, entry.dtype)[0], "data_offsets": span}
        at += entry.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        _put(file, digest, memoryview(len(text).to_bytes(8, "little") + text))
        for entry in entries:
            _put(file, digest, _bytes(entry), done)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + at, f"sha256:{digest.hexdigest()}"


def _bytes(entry: Entry) -> memoryview:
    tensor = entry.get().detach()
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise failure(f"{entry.key} changed while it was saved", got=f"{tuple(tensor.shape)} {tensor.dtype}")
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def _put(file: IO[bytes], digest: Any, data: memoryview, done: Add = lambda _: None) -> None:
    for start in range(0, len(data), STEP):
        part = data[start : start + STEP]
        digest.update(part)
        file.write(part)
        done(len(part))


def checksum(path: Path, done: Add = lambda _: None) -> str:
    """The checksum of a file, streamed."""
    digest, room = hashlib.sha256(), memoryview(bytearray(READ))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(room):
            digest.update(room[:count])
            done(count)
    return f"sha256:{digest.hexdigest()}"


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """An open safetensors file (`get_tensor`, `keys`); what is no such file is a SoliError that names it."""
    unread = lambda error: failure(f"{path} is not a readable safetensors file", got=error)
    with blaming(unread, SafetensorError), safe_open(path, framework="pt") as handle:
        yield handle


def headers(path: Path) -> Forms:
    """key -> (shape, dtype) of a safetensors file, tensors not read. SoliError for an unknown dtype."""
    by_code, found = {code: dtype for dtype, code in DTYPES.items()}, {}
    with reading(path) as handle:
        for key in handle.keys():  # noqa: SIM118 (a handle, not a dict)
            part = handle.get_slice(key)
            if part.get_dtype() not in by_code:
                raise SoliError(f"{path}: {key} has a dtype soli does not store", got=part.get_dtype())
            found[key] = (tuple(part.get_shape()), by_code[part.get_dtype()])
    return found
