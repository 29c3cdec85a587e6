"""Token files on disk, and the data set of fixed windows that is read from them.

The format. `NAME.bin` is nothing but token ids, little-endian uint16 or uint32, one document after the
other; `NAME.json` beside it is an object with
    dtype      "uint16" or "uint32"
    vocab      ids are below this number
    tokens     how many ids the file holds (optional; checked)
    documents  how many documents (optional; for people)
    bytes      UTF-8 bytes of the text behind all ids but the first (optional; without it no bits per byte)
What soli writes itself starts with the end-of-document token 0 and has one after each document, so that
every token of a document, the first included, has something before it to be predicted from.

Shape letters: T positions of a window.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Subset

from soli.core.errors import Problem, SoliError, blaming, raise_all

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
IGNORED = -100  # a target that is not counted, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a file; `bytes` of text are behind all but the first of them, if known."""

    path: Path
    dtype: str
    vocab: int
    start: int
    stop: int
    bytes: int | None = None

    def ids(self) -> np.ndarray[Any, Any]:
        """The ids, memory-mapped, read-only, [stop - start]."""
        return np.memmap(self.path, dtype=DTYPES[self.dtype], mode="r")[self.start : self.stop]

    def __len__(self) -> int:
        return self.stop - self.start


def width_for(vocab: int) -> str:
    """The narrower of the two widths that holds ids below `vocab`."""
    return "uint16" if vocab <= 2**16 else "uint32"


def write_header(path: Path, *, dtype: str, vocab: int, tokens: int, documents: int, bytes_: int) -> None:
    """Write the JSON beside the token file at `path`."""
    header = {"dtype": dtype, "vocab": vocab, "tokens": tokens, "documents": documents, "bytes": bytes_}
    path.with_suffix(".json").write_text(json.dumps(header, indent=2), encoding="utf-8")


def open_tokens(path: Path) -> Span:
    """The whole token file at `path` (a .bin). Raises SoliError when it and its JSON do not fit together."""
    beside = path.with_suffix(".json")
    for file in (path, beside):
        if not file.is_file():
            raise SoliError("there is no such file", got=file, allowed="NAME.bin with NAME.json beside it")
    wrong = lambda error: SoliError(f"{beside} is not JSON", got=error, allowed='{"dtype": "uint16", "vocab": 4096}')
    with blaming(wrong, json.JSONDecodeError, UnicodeDecodeError):
        header = json.loads(beside.read_text(encoding="utf-8"))
    header = header if isinstance(header, dict) else {}
    dtype, vocab, size = header.get("dtype", ""), header.get("vocab", 0), path.stat().st_size
    problems = []
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problems.append(Problem(f"{beside}: dtype", repr(dtype), "uint16, uint32"))
    if not isinstance(vocab, int) or vocab < 1:
        problems.append(Problem(f"{beside}: vocab", repr(vocab), "how many ids there are, 1 or more"))
    odd = [key for key in ("tokens", "bytes") if not isinstance(header.get(key, 0), int) or header.get(key, 0) < 0]
    problems += [Problem(f"{beside}: {key}", repr(header[key]), "a whole number, 0 or more") for key in odd]
    raise_all(problems)
    count, rest = divmod(size, DTYPES[dtype].itemsize)
    if rest or count != header.get("tokens", count) or count < 2:
        allowed = f"{header['tokens']} ids of {dtype}" if "tokens" in header else f"two ids of {dtype} or more"
        raise SoliError(f"{path} is not what {beside.name} says", got=f"{size} bytes", allowed=allowed, fix="write both again")
    span = Span(path, dtype, vocab, 0, count, header.get("bytes") or None)
    if (largest := int(span.ids().max())) >= vocab:
        raise SoliError(f"{path} holds an id outside its vocabulary", got=largest, allowed=f"below {vocab}")
    return span


def sum_of(path: Path) -> str:
    """The CRC-32 of a file."""
    return f"{zlib.crc32(np.memmap(path, dtype=np.uint8, mode='r').data):08x}"


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of T tokens and the T tokens that follow each: {"tokens": [T], "targets": [T]}, int64.

    Every token of the span but the first is a target exactly once. The last window is filled up with
    token 0 and targets -100, which the loss does not count: the ragged end trains too.
    """

    def __init__(self, span: Span, context: int) -> None:
        self.span, self.context = span, context
        self.ids = span.ids()

    def __len__(self) -> int:
        return -(-self.targets // self.context)

    @property
    def targets(self) -> int:
        """How many targets all windows count together."""
        return max(0, len(self.span) - 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        ids = torch.from_numpy(self.ids[start : start + self.context + 1].astype(np.int64))
        missing = (0, self.context + 1 - len(ids))
        return {"tokens": F.pad(ids[:-1], missing), "targets": F.pad(ids[1:], missing, value=IGNORED)}


class Spread(Subset[dict[str, Tensor]]):
    """At most `count` windows of another set, evenly spread over it: for a quick look."""

    def __init__(self, whole: Windows, count: int) -> None:
        count = min(count, len(whole))
        super().__init__(whole, [i * len(whole) // count for i in range(count)])
