"""What `soli checkpoint` shows and checks. Plain functions on one process."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal

from soli.checkpoint.folder import MANIFEST, locate
from soli.checkpoint.load import damage
from soli.checkpoint.manifest import Manifest, key_of, read_manifest
from soli.checkpoint.tensorfile import dtype_name, form, headers
from soli.checkpoint.tiling import tiling_problems
from soli.core.errors import Problem, SoliError
from soli.core.progress import busy


def show(path: str | Path) -> str:
    """What a checkpoint holds, as text: where it comes from, totals, and a table of its tensors."""
    manifest = read_manifest(path)
    when = datetime.fromtimestamp(manifest.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    facts = [("checkpoint", str(path)), ("written", f"{when}, soli {manifest.soli}, torch {manifest.torch}")]
    facts += [(key, str(manifest.state[key])) for key in ("step", "plan", "imported_from") if key in manifest.state]
    facts.append(("files", f"{len(manifest.files)}, {decimal(sum(entry.size for entry in manifest.files.values()))}"))
    for prefix in dict.fromkeys(name.split(".", 1)[0] for name in manifest.tensors):
        held = [saved for name, saved in manifest.tensors.items() if name.split(".", 1)[0] == prefix]
        facts.append((prefix, f"{len(held)} tensors, {decimal(sum(saved.size for saved in held))}"))
    rows = [("tensor", "shape", "dtype", "size", "chunks")]
    for name, saved in manifest.tensors.items():
        shape = " x ".join(str(n) for n in saved.shape) or "scalar"
        rows.append((name, shape, dtype_name(saved.dtype), decimal(saved.size), str(len(saved.chunks))))
    return "\n".join([*_table(facts), "", *_table(rows)])


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def check(path: str | Path) -> list[Problem]:
    """Everything that is wrong with a checkpoint; an empty list if nothing is.

    Every file's size and checksum, what each file says it holds against the manifest, whether the chunks of
    each tensor tile it exactly, and files that do not belong there.
    """
    try:
        manifest, place = read_manifest(path), locate(Path(path))
    except SoliError as error:
        return list(error.problems)
    found = []
    for name, saved in manifest.tensors.items():
        found += tiling_problems(name, saved.shape, [chunk.box for chunk in saved.chunks])
    with busy(f"checking {path}", sum(entry.size for entry in manifest.files.values())) as done:
        for name, entry in manifest.files.items():
            found += damage(place / name, entry, done) or _content_problems(place / name, manifest)
    known, fix = {*manifest.files, MANIFEST}, "remove it, or find out who put it there"
    strange = (file for file in sorted(place.iterdir()) if file.name not in known)
    return found + [Problem(f"{file} does not belong to the checkpoint", fix=fix) for file in strange]


def _content_problems(file: Path, manifest: Manifest) -> list[Problem]:
    """A sound file that does not hold what the manifest says it holds."""
    expected = {
        key_of(name, chunk.box): form(chunk.box.sizes, saved.dtype)
        for name, saved in manifest.tensors.items()
        for chunk in saved.chunks
        if chunk.file == file.name
    }
    try:
        held = headers(file)
    except SoliError as error:
        return list(error.problems)
    pairs = {key: (held.get(key), expected.get(key)) for key in sorted(expected.keys() | held.keys())}
    told = lambda form: f"{form[0]} {dtype_name(form[1])}" if form else "nothing"
    what = "is not what the manifest says"
    return [Problem(f"{file}: {key} {what}", told(a), told(b)) for key, (a, b) in pairs.items() if a != b]
