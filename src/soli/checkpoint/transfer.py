"""Model weights out of and into soli's checkpoints: a safetensors file, or a Hugging Face folder.

Only names that start with `model.` travel, under the names without it. `state["tied"]` maps an alias to the
parameter it shares its values with ({alias: canonical}, both as the model names them): such a pair is
stored once, under the canonical name.
"""

import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soli.checkpoint.folder import MANIFEST, PICKLES, flush, locate
from soli.checkpoint.load import check_files, narrow
from soli.checkpoint.manifest import Manifest, Saved, key_of, read_manifest
from soli.checkpoint.published import converted
from soli.checkpoint.save import save_with
from soli.checkpoint.team import ALONE, as_soli_error
from soli.checkpoint.tensorfile import Entry, headers, reading, room, write_file
from soli.core.errors import Problem, SoliError, blaming, raise_all
from soli.core.events import events
from soli.core.layout import Sharded, whole
from soli.core.progress import Add, busy

PREFIX = "model."
PICKLE_FIX = "load it where you trust it and save it as safetensors: safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"


def export(
    path: str | Path, out: str | Path, *, format: str = "safetensors", max_shard_bytes: int = 5_000_000_000, config: str | Path | None = None,
) -> list[Path]:  # fmt: skip
    """Write the model of a checkpoint as whole tensors; returns the files written.

    `format` "safetensors": `out` is one file. "hf": `out` is a folder with `model.safetensors`, or, above
    `max_shard_bytes`, shards and their index, and a copy of `config` as `config.json`; with one, weights
    that transformers converts when it loads them are written as they are published (published.py). The
    checkpoint is verified first; one tensor at a time, or what it is made of, is held in memory; `out` must not
    exist, and appears complete.
    """
    out = Path(out).absolute()
    manifest, place = read_manifest(path), locate(Path(path))
    raise_all(_export_problems(out, format, max_shard_bytes, config))
    tensors = _model_tensors(manifest)
    if config is not None and (odd := _not_there(Path(config), tensors)):
        text = f"{config} may be of another model, whose weights readers would draw at random: it says {', '.join(odd)}, and no weight has such a size"
        events.note(text, shown=True)
    files = sorted({chunk.file for saved in tensors.values() for chunk in saved.chunks})
    check_files(place, manifest, files)
    with blaming(functools.partial(as_soli_error, f"writing {out}"), OSError):
        out.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            aside = tempfile.TemporaryDirectory(prefix=f".{out.name}.partial-", dir=out.parent)
            partial = Path(stack.enter_context(aside)) / out.name
            handles = {file: stack.enter_context(reading(place / file)) for file in files}
            get = lambda name: functools.partial(_assemble, handles, PREFIX + name, tensors[name])
            entries = [Entry(name, saved.dtype, saved.shape, get(name)) for name, saved in tensors.items()]
            entries = _untied(entries, manifest.state.get("tied") or {})
            if config is not None:
                entries = converted(entries, Path(config), back=True)
            done = stack.enter_context(busy(f"writing {out}", sum(entry.size for entry in entries)))
            if format == "hf":
                partial.mkdir()
                written = _write_hf(partial, entries, max_shard_bytes, config, done)
            else:
                write_file(partial, entries, {"format": "pt"}, done)
                written = [""]  # the file itself
            os.rename(partial, out)
        flush(out.parent)
    return [out / name for name in written]


def _export_problems(out: Path, format: str, max_shard_bytes: int, config: str | Path | None) -> Iterator[Problem]:
    if format not in ("safetensors", "hf"):
        yield Problem("unknown export format", format, "safetensors, hf")
    if out.exists():
        yield Problem(f"{out} exists", fix="choose another path; nothing is overwritten")
    if max_shard_bytes <= 0:
        yield Problem("a shard must hold something", f"max_shard_bytes={max_shard_bytes}")
    if config is not None and format != "hf":
        yield Problem("config.json goes with a folder", f"format {format}", fix="use format hf")
    if config is not None and not Path(config).is_file():
        yield Problem("there is no such config file", str(config))


def _not_there(config: Path, tensors: dict[str, Saved]) -> list[str]:
    """Sizes that a config.json says and no weight has."""
    with blaming(lambda error: SoliError(f"{config} is no object of JSON", got=error), ValueError, TypeError):
        said = dict(json.loads(config.read_text(encoding="utf-8")))
    sizes = {size for saved in tensors.values() for size in saved.shape}
    places = {int(number) for name in tensors for number in re.findall(r"\.(\d+)\.", name)}
    widths, depths = ("hidden_size", "n_embd", "d_model", "vocab_size"), ("num_hidden_layers", "n_layer")
    there = lambda key: said[key] in sizes if key in widths else said[key] - 1 in places
    return [f"{key}={said[key]}" for key in (*widths, *depths) if isinstance(said.get(key), int) and not there(key)]


def _model_tensors(manifest: Manifest) -> dict[str, Saved]:
    """Those of the model, by its own names."""
    found = {name.removeprefix(PREFIX): saved for name, saved in manifest.tensors.items() if name.startswith(PREFIX)}
    if not found:
        raise SoliError("the checkpoint holds no model tensors", got=", ".join(list(manifest.tensors)[:5]))
    return found


def _assemble(handles: dict[str, Any], name: str, saved: Saved) -> Tensor:
    """The whole tensor."""
    result = torch.empty(saved.shape, dtype=saved.dtype)
    for chunk in saved.chunks:
        narrow(room(result), chunk.box).copy_(handles[chunk.file].get_tensor(key_of(name, chunk.box)))
    return result


def _write_hf(folder: Path, entries: list[Entry], limit: int, config: str | Path | None, done: Add) -> list[str]:
    """`model.safetensors`, or shards of at most `limit` bytes (or one tensor) each, and their index."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, {"format": "pt"}, done)
    if len(shards) > 1:
        where = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(e.size for e in entries)}, "weight_map": where}
        names.append("model.safetensors.index.json")
        (folder / names[-1]).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if config is not None:
        names.append("config.json")
        shutil.copyfile(config, folder / names[-1])
    flush(folder)
    return names


def import_(source: str | Path, out: str | Path, tied: dict[str, str] | None = None) -> None:
    """Make a checkpoint of a .safetensors file or a Hugging Face folder: its tensors, as `model.<name>`.

    Those of a folder whose config.json names a model of transformers' are as its modules have them (published.py).
    `tied` ({alias: canonical}) is kept in the state; an alias that is in the source must equal its canonical
    tensor bit for bit, and is not stored again. Pickles are refused.
    """
    source = Path(source)
    if (source / MANIFEST).is_file():
        raise SoliError(f"{source} is a checkpoint of soli, and no folder of weights", fix="engine.load reads it as it is; soli checkpoint export writes its weights as others read them")
    files = _sources(source)
    with ExitStack() as stack:
        handles = {file: stack.enter_context(reading(file)) for file in dict.fromkeys(files.values())}
        forms = {name: form for file in handles for name, form in headers(file).items()}
        entries = [Entry(name, *forms[name][::-1], functools.partial(handles[file].get_tensor, name)) for name, file in files.items()]
        if (source / "config.json").is_file():
            entries = converted(entries, source / "config.json", back=False)
        entries = _untied(entries, tied or {})
        # one element stands for what is read when it is written
        shown = {PREFIX + e.key: Sharded(e.shape, e.dtype, [(whole(e.shape), torch.zeros((), dtype=e.dtype).expand(e.shape))]) for e in entries}
        state: dict[str, Any] = {"step": 0, "imported_from": source.resolve().name}
        gets = {key_of(PREFIX + e.key, whole(e.shape)): e.get for e in entries}
        save_with(ALONE, out, shown, state | ({"tied": tied} if tied else {}), gets=gets)


def _sources(source: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if source.is_file() and source.suffix == ".safetensors":
        return dict.fromkeys(headers(source), source)
    if source.is_file():
        raise _refused(source, [source.name] if source.suffix in PICKLES else [])
    if not source.is_dir():
        raise SoliError(f"there is nothing at {source}", fix="check the path")
    if (index := source / "model.safetensors.index.json").is_file():
        return _indexed(index)
    found = sorted(source.glob("*.safetensors"))
    if (source / "model.safetensors") in found:
        found = [source / "model.safetensors"]
    if len(found) > 1:
        got = ", ".join(file.name for file in found[:5])
        raise SoliError(f"{source} has several safetensors files and no index", got=got, fix="name one of them")
    if not found:
        raise _refused(source, sorted(p.name for p in source.iterdir() if p.suffix in PICKLES))
    return dict.fromkeys(headers(found[0]), found[0])


def _refused(source: Path, pickles: list[str]) -> SoliError:
    allowed = "a .safetensors file, or a folder with model.safetensors or its index"
    if pickles:
        return SoliError(f"{source} is a pickle, which runs code when it is opened: soli does not open it", got=", ".join(pickles[:5]), allowed=allowed, fix=PICKLE_FIX)
    return SoliError(f"{source} is nothing that soli imports", allowed=allowed)


def _indexed(index: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index says, checked against the files."""
    no_index = lambda error: SoliError(f"{index} is no index", got=f"{type(error).__name__}: {error}")
    with blaming(no_index, ValueError, KeyError, TypeError, AttributeError):
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    problems = []
    held: dict[str, str] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file or not (index.parent / file).is_file():
            problems.append(Problem(f"{index} names a file that is not beside it", file))
            continue
        held |= dict.fromkeys(headers(index.parent / file), file)
    if not problems:
        for name in sorted(names.keys() | held.keys()):
            if names.get(name) != held.get(name):
                got = f"the index says {names.get(name)}, the files {held.get(name)}"
                problems.append(Problem(f"{index}: {name} is not where it should be", got))
    raise_all(problems)
    return {name: index.parent / file for name, file in names.items()}


def _untied(entries: list[Entry], tied: dict[str, str]) -> list[Entry]:
    """Without aliases. SoliError where a canonical tensor is not there, or does not equal its alias that is stored too."""
    gets, problems = {entry.key: entry.get for entry in entries}, []
    for alias, canonical in tied.items():
        if canonical not in gets:
            problems.append(Problem(f"{alias} is tied to {canonical}, which is not there"))
        elif alias in gets and not _same_bits(gets[alias](), gets[canonical]()):
            fix = "leave it out of tied: they are two parameters"
            problems.append(Problem(f"{alias} and {canonical} are not equal, so not tied", fix=fix))
    raise_all(problems)
    return [entry for entry in entries if entry.key not in tied]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaN equals itself, 0.0 does not equal -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
