"""`manifest.json`: what a checkpoint holds, and where. Written last, so that its presence means complete.

```
{"format": "soli-checkpoint", "version": 1, "created": seconds since 1970, "soli": "...", "torch": "...",
 "state": {...},
 "files": {"rank-00000.safetensors": {"size": bytes, "checksum": "sha256:..."}},
 "tensors": {name: {"shape": [...], "dtype": "float32",
                    "chunks": [{"offsets": [...], "sizes": [...], "file": "rank-00000.safetensors"}]}},
 "seal": checksum of all the above}
```
A chunk lies in its file under the key `name@offset,offset` (`key_of`).
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from soli.checkpoint.folder import FILE, HIDDEN, MANIFEST, locate
from soli.checkpoint.tensorfile import NAMES, dtype_name
from soli.core.errors import Problem, SoliError, blaming, failure, raise_all
from soli.core.layout import Box

State = dict[str, Any]
"""What a checkpoint holds beside its tensors, in values that JSON has."""
FORMAT, VERSION = "soli-checkpoint", 1


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: bytes, and `sha256:hex` of its content."""

    size: int
    checksum: str


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the file it lies in."""

    box: Box
    file: str


@dataclass(frozen=True)
class Saved:
    """One global tensor as saved; no chunks if it has no elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. `created` is in seconds since 1970."""

    tensors: dict[str, Saved]
    files: dict[str, FileEntry]
    state: State
    version: int
    soli: str
    torch: str
    created: float


def key_of(name: str, box: Box) -> str:
    """The key of a chunk in its safetensors file: `weight@0,128`; `step@` for a 0-d tensor."""
    return f"{name}@{','.join(str(offset) for offset in box.offsets)}"


def dump_state(state: State) -> str:
    """The state as JSON text. SoliError names the path of every value that JSON cannot hold exactly.

    Tuples become lists. NaN and infinity are no JSON and are refused, as are keys that are not strings.
    """
    if not isinstance(state, dict):
        raise SoliError("the state of a checkpoint must be a dict", got=type(state).__name__)
    raise_all(_not_json("state", state))
    return json.dumps(state, allow_nan=False)


def _not_json(path: str, value: Any) -> Iterator[Problem]:
    allowed = "dict with str keys, list, str, int, finite float, bool, None"
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield Problem(f"{path}: a key is not a string", repr(key), allowed)
            yield from _not_json(f"{path}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _not_json(f"{path}[{place}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(f"{path} is not JSON", repr(value), allowed, "store it as a string or as None")
    elif value is not None and not isinstance(value, (str, int, float)):
        fix = "tensors go among the tensors (of engine.save: into a buffer of the model), the rest as plain values"
        yield Problem(f"{path} is not JSON", f"{type(value).__name__}", allowed, fix)


def to_text(manifest: Manifest) -> str:
    """The content of `manifest.json`."""
    body = {
        "format": FORMAT,
        **{name: getattr(manifest, name) for name in ("version", "created", "soli", "torch", "state")},
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "tensors": {name: _saved_to_json(saved) for name, saved in manifest.tensors.items()},
    }
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in (body | {"seal": _seal(body)}).items()]
    return "{" + ",\n ".join(lines) + "}\n"


def _lines(value: Any) -> str:
    """JSON with one line for each entry of a dict: a person may read it, and diff it."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n  " + ",\n  ".join(f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "}"


def _saved_to_json(saved: Saved) -> dict[str, Any]:
    chunks = [{**asdict(chunk.box), "file": chunk.file} for chunk in saved.chunks]
    return {"shape": saved.shape, "dtype": dtype_name(saved.dtype), "chunks": chunks}


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def read_manifest(path: str | Path) -> Manifest:
    """What the checkpoint at `path` holds, from `manifest.json` alone.

    SoliError if there is no checkpoint, if it is something else (said what), or if the manifest is damaged.
    """
    file = locate(Path(path)) / MANIFEST
    copy = "take another copy of this checkpoint, or an earlier one (soli train: move this one away, and the newest that is left is taken)"
    damaged = lambda error: failure(f"{file} is damaged or no manifest of soli", got=f"{type(error).__name__}: {error}", fix=copy)
    with blaming(damaged, ValueError, KeyError, TypeError, AttributeError):
        body = json.loads(file.read_text(encoding="utf-8"))
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r}")
        if body["version"] != VERSION:
            got = f"format {body['version']} (soli {body.get('soli')})"
            raise SoliError(f"{path} was written by another version of soli", got=got, allowed=f"format {VERSION}", fix="read it with that version of soli and export it")
        if body.pop("seal") != _seal(body):
            raise ValueError("its seal does not match its content")
        return _from_json(body)


def _from_json(body: dict[str, Any]) -> Manifest:
    files = {name: FileEntry(int(f["size"]), str(f["checksum"])) for name, f in body["files"].items()}
    for name in files:
        if not FILE.fullmatch(name):  # a manifest from elsewhere must not lead out of its folder
            raise ValueError(f"file name {name!r}")
    chunk = lambda c: Chunk(Box(tuple(c["offsets"]), tuple(c["sizes"])), c["file"])
    read = lambda s: Saved(tuple(s["shape"]), NAMES[s["dtype"]], tuple(map(chunk, s["chunks"])))
    tensors = {name: read(saved) for name, saved in body["tensors"].items()}
    for name in {chunk.file for saved in tensors.values() for chunk in saved.chunks} - files.keys():
        raise KeyError(name)
    created = float(body["created"])
    return Manifest(tensors, files, body["state"], int(body["version"]), body["soli"], body["torch"], created)


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints; None if it has none.

    Newest is the highest `step` of its state; those without a step come before all others, by the time they
    were made. A damaged manifest is a SoliError: an older checkpoint is not taken in silence.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return None
    paths = set()
    for entry in folder.iterdir():
        match = HIDDEN.fullmatch(entry.name)
        if (entry / MANIFEST).is_file() and not (match and match["kind"] == "partial"):
            paths.add(folder / match["name"] if match else entry)

    def age(path: Path) -> tuple[int, float, Path]:
        manifest = read_manifest(path)
        step = manifest.state.get("step")
        return step if isinstance(step, int) else -1, manifest.created, path

    return max(paths, key=age, default=None)
