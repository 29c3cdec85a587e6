"""The folders of checkpoints: written aside, renamed into place, found again after any death.

`100` is complete by construction: it is written as `.100.partial-<token>`, flushed, and renamed. When it
replaces an older `100`, that one is first renamed to `.100.replaced-<token>`; a process that dies between the
two renames leaves only the latter, which `locate` then finds under its old name.
"""

import os
import re
import shutil
import uuid
from pathlib import Path

from soli.core.errors import SoliError
from soli.core.files import write_whole

MANIFEST = "manifest.json"
FILE = re.compile(r"rank-\d{5,}\.safetensors")
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|replaced)-[0-9a-f]{12}")
PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl"}


def hidden(path: Path, kind: str) -> list[Path]:
    """The folders that saves of `path` left, of one kind (`partial`, `replaced`), oldest first."""
    if not path.parent.is_dir():
        return []
    left = lambda entry: (found := HIDDEN.fullmatch(entry.name)) and found.groups() == (path.name, kind)
    return sorted(filter(left, path.parent.iterdir()), key=lambda entry: entry.stat().st_mtime_ns)


def locate(path: Path) -> Path:
    """The folder that holds checkpoint `path`. SoliError says what is there instead."""
    path = path.resolve()  # beside what a link leads to is what was put aside
    if (path / MANIFEST).is_file():
        return path
    if not path.exists():
        for aside in reversed(hidden(path, "replaced")):
            if (aside / MANIFEST).is_file():
                return aside
    raise _foreign(path)


def _foreign(path: Path) -> SoliError:
    """What is at `path` instead of a checkpoint, and what to do with it."""
    from_pickle = "a pickle runs code when it is opened: save it as safetensors in the program that wrote it"
    then = "soli checkpoint import SOURCE OUT"
    if not path.exists():
        near = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        got = f"the folder above has {', '.join(near[:8])}" if near else "the folder above has nothing"
        return SoliError(f"there is no checkpoint at {path}", got=got, fix="check the path")
    if path.is_file():
        if path.suffix == ".safetensors":
            return SoliError(f"{path} is a safetensors file, not a soli checkpoint", fix=then)
        kind = "a pickle" if path.suffix in PICKLES else "a file"
        fix = f"{from_pickle}, then {then}" if path.suffix in PICKLES else "give the folder of a checkpoint"
        return SoliError(f"{path} is {kind}, not a soli checkpoint", fix=fix)
    names = {entry.name for entry in path.iterdir()}
    if ".metadata" in names:
        fix = f"its metadata is a pickle, and {from_pickle}, then {then}"
        return SoliError(f"{path} was written by torch.distributed.checkpoint, not by soli", fix=fix)
    if any(map(FILE.fullmatch, names)):
        fix = f"copy the whole folder again from where it was saved, {MANIFEST} with it, or load another checkpoint"
        return SoliError(f"{path} is a soli checkpoint that is not whole: it has no {MANIFEST}", fix=fix)
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return SoliError(f"{path} is a Hugging Face (safetensors) folder, not a soli checkpoint", fix=then)
    if pickles := sorted(name for name in names if Path(name).suffix in PICKLES):
        fix = f"{from_pickle}, then {then}"
        return SoliError(f"{path} holds pickles, not a soli checkpoint", got=", ".join(pickles[:5]), fix=fix)
    if inner := sorted(p.name for p in path.iterdir() if (p / MANIFEST).is_file()):
        return SoliError(f"{path} is a folder of checkpoints, not one checkpoint", got=", ".join(inner[-8:]), fix="name one of them")
    got = ", ".join(sorted(names)[:8]) or "an empty folder"
    return SoliError(f"{path} is not a soli checkpoint: it has no {MANIFEST}", got=got, fix="check the path")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """SoliError if `path` may not be written: something is there that must not be replaced."""
    if not path.exists() and (overwrite or not hidden(path, "replaced")):
        return
    if not overwrite:
        raise SoliError(f"{path} exists", fix="choose another path; a save with overwrite=True replaces a checkpoint")
    if not (path / MANIFEST).is_file():
        raise SoliError(f"{path} is not a checkpoint, so it is not replaced", fix="choose another path")


def open_partial(path: Path, overwrite: bool) -> Path:
    """Make the folder that a save of `path` writes to, and clear what dead saves of `path` left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for dead in hidden(path, "partial"):
        shutil.rmtree(dead)
    for aside in hidden(path, "replaced"):
        if path.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, path)
    refuse_existing(path, overwrite)
    partial = path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:12]}"
    partial.mkdir()
    return partial


def commit(partial: Path, path: Path, text: str, overwrite: bool) -> None:
    """Write the manifest, flush everything, and rename the folder into place."""
    write_whole(partial / MANIFEST, text)
    flush(partial)
    refuse_existing(path, overwrite)
    aside = None
    if path.exists():
        aside = path.parent / f".{path.name}.replaced-{uuid.uuid4().hex[:12]}"
        os.rename(path, aside)
    try:
        os.rename(partial, path)
    except OSError:
        if aside is not None:
            os.rename(aside, path)
        raise
    flush(path.parent)
    if aside is not None:
        shutil.rmtree(aside)


def flush(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
