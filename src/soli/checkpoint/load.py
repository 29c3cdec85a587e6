"""Load: DCP's planner intersects what was saved with what this rank holds; soli checks and copies."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from soli.checkpoint.adapter import Tensors, adapt, chunk_of, merge, offer_of
from soli.checkpoint.folder import locate
from soli.checkpoint.manifest import FileEntry, Manifest, key_of, read_manifest
from soli.checkpoint.team import Group, team_of
from soli.checkpoint.tensorfile import Forms, checksum, dtype_name, reading, room
from soli.core.errors import FAILURE, Problem, SoliError, failure, raise_all
from soli.core.events import events
from soli.core.layout import Box
from soli.core.progress import Add, busy

WIDE = {torch.float32, torch.float64}


def load(path: str | Path, tensors: Tensors, *, group: Group = None, ignore: Callable[[str], bool] | None = None) -> dict[str, Any]:
    """Fill the pieces of `tensors` in place from the checkpoint at `path`; returns its state.

    Called on every rank of `group`, all of which see the folder; the world and the layout may differ from
    those that saved. The names that all ranks ask for must be the names saved, but for saved names of which
    `ignore(name)` is true. Every name that is missing, unexpected, or has another shape or dtype is reported
    in one SoliError on every rank, and no piece is touched. So is a file that is truncated or damaged.
    """
    team, where = team_of(group), Path(path).resolve()
    place, manifest = team.first("reading the manifest", lambda: (str(locate(where)), read_manifest(where)))
    wanted = merge(team.each("looking at what to load", lambda: offer_of(tensors)))
    raise_all(differences(manifest, wanted, ignore), everywhere=True)
    if cast := [name for name, (_, dtype) in wanted.items() if manifest.tensors[name].dtype != dtype]:
        one, other = manifest.tensors[cast[0]].dtype, wanted[cast[0]][1]
        events.note(f"{len(cast)} of its {len(wanted)} tensors are cast, {cast[0]} from {one} to {other}", shown=team.rank == 0)
    files = sorted({chunk.file for name in wanted for chunk in manifest.tensors[name].chunks})
    shares = _shares({name: manifest.files[name] for name in files}, team.size)
    first = team.rank == 0
    team.each("checking the files", lambda: check_files(Path(place), manifest, shares[team.rank], shown=first))
    with busy(f"reading {path}", shown=first):
        team.each("reading the tensors", lambda: _fill(Path(place), manifest, tensors))
    return copy.deepcopy(manifest.state)


def differences(manifest: Manifest, wanted: Forms, ignore: Callable[[str], bool] | None) -> list[Problem]:
    """Everything that keeps the saved tensors from being the wanted ones."""
    found = []
    # of weights that were imported; and precision=fp64 computes with the float32 of other plans
    proof = "precision=fp64" in str(manifest.state.get("plan"))
    imported = "imported_from" in manifest.state
    cast = lambda a, b: (imported and a.is_floating_point and b.is_floating_point) or ({a, b} == WIDE and (proof or b == torch.float64))
    for name, (shape, dtype) in wanted.items():
        saved = manifest.tensors.get(name)
        if saved is None:
            found.append(Problem(f"{name} is missing in the checkpoint"))
        elif saved.shape != shape or (saved.dtype != dtype and not cast(saved.dtype, dtype)):
            got = f"saved {saved.shape} {dtype_name(saved.dtype)}"
            allowed = f"asked for {shape} {dtype_name(dtype)}"
            found.append(Problem(f"{name} has another shape or dtype in the checkpoint", got, allowed))
    unasked = (name for name in manifest.tensors if name not in wanted and not (ignore is not None and ignore(name)))
    found += [Problem(f"{name} is in the checkpoint, and nobody asks for it") for name in unasked]
    if found:
        fix = "load with the model and the optimizer that saved it; for some of its weights: soli checkpoint export"
        found[-1] = replace(found[-1], fix=fix)
    return found


def _shares(files: dict[str, FileEntry], parts: int) -> list[list[str]]:
    """The files in `parts` shares of about equal bytes, the same on every rank."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += files[name].size
    return shares


def check_files(place: Path, manifest: Manifest, names: list[str], *, shown: bool = True) -> None:
    """Read these files once; a SoliError names every one that is not what was written."""
    with busy(f"checking {place}", sum(manifest.files[name].size for name in names), shown=shown) as done:
        found = [problem for name in names for problem in damage(place / name, manifest.files[name], done)]
    if found:
        raise SoliError(found, exit_code=FAILURE)


def damage(file: Path, entry: FileEntry, done: Add) -> list[Problem]:
    """What is wrong with a file of a checkpoint: missing, another size, another content."""
    fix = "take another copy of this checkpoint, or an earlier one (soli train: move this one away, and the newest that is left is taken)"
    if not file.is_file():
        return [Problem(f"{file} is missing", fix=fix)]
    if (size := file.stat().st_size) != entry.size:
        what = "is truncated" if size < entry.size else "is longer than it was written"
        return [Problem(f"{file} {what}", f"{size} bytes", f"{entry.size} bytes", fix)]
    if (got := checksum(file, done)) != entry.checksum:
        return [Problem(f"{file} is damaged: its content is not what was written", got, entry.checksum, fix)]
    return []


def _fill(place: Path, manifest: Manifest, tensors: Tensors) -> None:
    """Copy into this rank's pieces what intersects them."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(adapt(tensors), _metadata(manifest), is_coordinator=False)
    plan = planner.create_local_plan()
    _check_read(plan.items, tensors)
    reads: dict[str, dict[str, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
    for item in plan.items:
        at = item.storage_index.index
        if at is None:
            raise failure(f"DCP planned a read of {item.storage_index.fqn} from no chunk")
        chunk = manifest.tensors[item.storage_index.fqn].chunks[at]
        reads[chunk.file][key_of(item.storage_index.fqn, chunk.box)].append(item)
    for file, keys in reads.items():
        with reading(place / file) as handle, torch.no_grad():
            for key, items in keys.items():
                source = handle.get_tensor(key)  # mapped, not read: only what is copied is read
                for item in items:
                    target = planner.resolve_tensor(item)
                    room(target).copy_(narrow(source, Box(tuple(item.storage_offsets), tuple(item.lengths))))


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """The part of a tensor that a box describes, as a view."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _metadata(manifest: Manifest) -> Metadata:
    """DCP's metadata, which it would have unpickled, rebuilt from the manifest."""
    chunks = lambda saved: [chunk_of(chunk.box) for chunk in saved.chunks]
    told = lambda one: TensorStorageMetadata(TensorProperties(dtype=one.dtype), torch.Size(one.shape), chunks(one))
    return Metadata({name: told(saved) for name, saved in manifest.tensors.items()})


def _check_read(items: list[ReadItem], tensors: Tensors) -> None:
    """The reads fill every piece: no element keeps what happened to be in memory."""
    planned: dict[str, int] = defaultdict(int)
    for item in items:
        planned[item.dest_index.fqn] += math.prod(item.lengths)
    for name, sharded in tensors.items():
        held = sum(box.numel for box, _ in sharded.pieces)
        if planned[name] != held:
            raise failure(f"{name}: the saved chunks do not cover it", got=f"{planned[name]} of {held} elements")
