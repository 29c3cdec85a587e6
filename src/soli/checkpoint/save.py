"""Save: DCP's planner decides which rank writes which box once; soli writes, agrees and commits."""

import atexit
import json
import os
import shutil
import sys
import time
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from soli.checkpoint.adapter import Tensors, adapt, merge, offer_of
from soli.checkpoint.folder import commit, open_partial, refuse_existing
from soli.checkpoint.manifest import VERSION, Chunk, FileEntry, Manifest, Saved, State, dump_state, key_of, to_text
from soli.checkpoint.team import Group, Team, as_soli_error, team_of
from soli.checkpoint.tensorfile import Entry, Forms, write_file
from soli.checkpoint.tiling import tiling_problems
from soli.core.errors import blaming, on_all_ranks, raise_all
from soli.core.layout import Box
from soli.core.package import SOLI
from soli.core.progress import Add, busy
from soli.core.report import FINISH

_Offer = tuple[SavePlan, Forms]
"""What one rank brings: DCP's local plan, and every tensor it knows of."""


@dataclass(frozen=True)
class _Job:
    """A planned save: what this rank writes; and of the manifest, which the first rank writes, what is known before the files are."""

    path: Path
    overwrite: bool
    team: Team
    entries: list[Entry]
    saved: dict[str, Saved]
    state: State


def save(path: str | Path, tensors: Tensors, state: State, *, group: Group = None, overwrite: bool = False) -> None:
    """Write a checkpoint to the folder `path`; called on every rank of `group`, returns when it is complete.

    `tensors`: global tensors by name, each with the boxes this rank holds. A box that several ranks hold is
    written once. `state`: JSON-able values; the first rank's are written. Every rank raises the same
    SoliError if any rank fails, and nothing half-written stays.
    """
    save_with(team_of(group), path, tensors, state, overwrite)


def save_with(team: Team, path: str | Path, tensors: Tensors, state: State, overwrite: bool = False, gets: Any = None) -> None:
    """`save` for a team; ALONE saves in this process, whatever process group there is. `gets`: functions that read what is written, by its key."""
    job = _plan(team, path, tensors, state, overwrite)
    job.entries[:] = [replace(entry, get=(gets or {}).get(entry.key, entry.get)) for entry in job.entries]
    with busy(f"writing {path}", sum(entry.size for entry in job.entries), shown=team.rank == 0) as done:
        _write(job, done)


class PendingSave:
    """A save that goes on in a background thread."""

    def __init__(self, job: _Job) -> None:
        self._seen = False  # its error
        with_one = futures.ThreadPoolExecutor(1, f"soli-save-{job.path.name}")
        self.end = with_one.submit(_write, job)
        with_one.shutdown(wait=False)

    def done(self) -> bool:
        """True once the save has ended, well or not."""
        return self.end.done()

    def wait(self) -> None:
        """Return when the checkpoint is complete; raise its error if it failed."""
        self._seen = self.end.exception() is not None
        self.end.result()

    def report_unseen(self) -> None:
        """Raise the error of a save that nobody waited for; return once it has ended otherwise."""
        if not self._seen:
            self.wait()


_last: dict[str, PendingSave] = {}  # by group: the collectives of two saves must not mix


def save_async(path: str | Path, tensors: Tensors, state: State, *, group: Group = None, overwrite: bool = False) -> PendingSave:
    """As `save`, but returns once the tensors are copied; the rest happens in a background thread.

    `group` must be a gloo process group used for nothing else. Planning happens here, in a few small
    collectives on `group`, so that only what this rank will write is copied; what is wrong with the arguments
    is raised here, what goes wrong while writing by `wait()`. A save that is still under way on the same
    group is waited for first, and its error raised here if nobody waited for it.
    """
    team = team_of(group)
    if team.size > 1 and (group is None or group is dist.group.WORLD or dist.get_backend(group) != "gloo"):
        got = "the default group" if group in (None, dist.group.WORLD) else dist.get_backend(group)
        raise on_all_ranks("asynchronous saving needs a gloo process group of its own", got=got, fix='pass group=torch.distributed.new_group(backend="gloo"), made once')
    key = group.group_name if group is not None and team.size > 1 else ""
    if (before := _last.pop(key, None)) is not None:
        before.report_unseen()
    job = _plan(team, path, tensors, state, overwrite)
    team.each("copying the tensors to save", lambda: _stage(job))
    _last[key] = PendingSave(job)
    return _last[key]


FINISH_SECONDS = 60.0
"""How long a process that an error ends waits for a checkpoint that its ranks were writing."""


def finish(seconds: float | None = FINISH_SECONDS) -> None:
    """Wait for what this process saves in the background, so long at most; errors of it are raised elsewhere."""
    futures.wait([pending.end for pending in _last.values()], seconds)


FINISH.append(finish)


@atexit.register
def _fail_at_exit() -> None:
    """A checkpoint that nobody waited for, and that failed, is a failure of the process."""
    for pending in _last.values():
        try:
            pending.report_unseen()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)  # where soli's hook has not ended it: an exit code cannot be raised here


def _stage(job: _Job) -> None:
    """Replace the live tensors of a job by copies on the host."""
    for place, entry in enumerate(job.entries):
        copy = entry.get().detach().to("cpu", copy=True).contiguous()
        job.entries[place] = replace(entry, get=lambda copy=copy: copy)  # type: ignore[misc]


def _plan(team: Team, path: str | Path, tensors: Tensors, state: State, overwrite: bool) -> _Job:
    """Agree on which rank writes what. The live tensors are looked up when they are written."""
    target = Path(path).resolve()  # what a link leads to is replaced, and not the link
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    saved: dict[str, Saved] = {}
    copied: State = {}

    def local() -> _Offer:
        offer = offer_of(tensors)
        planner.set_up_planner(adapt(tensors), is_coordinator=team.rank == 0)
        copied.update(json.loads(dump_state(state)))
        return planner.create_local_plan(), offer

    def decide(offers: list[_Offer]) -> list[SavePlan]:
        refuse_existing(target, overwrite)
        local_plans = [plan for plan, _ in offers]
        merged = merge([known for _, known in offers])
        _check_cover(merged, local_plans)
        plans, _ = planner.create_global_plan(local_plans)
        chunks: dict[str, list[Chunk]] = {name: [] for name in merged}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                chunks[item.index.fqn].append(Chunk(_box(item), _file_name(rank)))
        saved.update({name: Saved(shape, dtype, tuple(chunks[name])) for name, (shape, dtype) in merged.items()})
        return plans

    mine = planner.finish_plan(team.plan("planning the checkpoint", local, decide))

    def entry(item: Any) -> Entry:
        box, name = _box(item), item.index.fqn
        return Entry(key_of(name, box), tensors[name].dtype, box.sizes, lambda: planner.lookup_object(item.index))

    return _Job(target, overwrite, team, list(map(entry, mine.items)), saved, copied)


def _box(item: Any) -> Box:
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _check_cover(tensors: Forms, plans: list[SavePlan]) -> None:
    """Before DCP drops copies: it takes boxes with equal offsets for the same box, whatever their sizes."""
    boxes: dict[str, set[Box]] = {name: set() for name in tensors}
    for plan in plans:
        for item in plan.items:
            boxes[item.index.fqn].add(_box(item))
    in_order = lambda name: sorted(boxes[name], key=lambda box: (box.offsets, box.sizes))
    raise_all(found for name, (shape, _) in tensors.items() for found in tiling_problems(name, shape, in_order(name)))


def _write(job: _Job, done: Add = lambda _: None) -> None:
    """Write this rank's file, agree, and let the first rank commit."""
    team = job.team
    partial = Path(team.first("making the checkpoint's folder", lambda: str(open_partial(job.path, job.overwrite))))
    try:
        written = team.each("writing the checkpoint", lambda: _write_mine(partial, job, done))
        files = {_file_name(rank): entry for rank, entry in enumerate(written) if entry is not None}
        made = Manifest(job.saved, files, job.state, VERSION, SOLI, str(torch.__version__), time.time())
        team.first("completing the checkpoint", lambda: commit(partial, job.path, to_text(made), job.overwrite))
    except BaseException:
        # After an agreed error no rank writes any more. If this fails too, the next save clears it.
        if team.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_mine(partial: Path, job: _Job, done: Add) -> FileEntry | None:
    if not job.entries:
        return None
    need = sum(entry.size for entry in job.entries)
    with blaming(lambda error: as_soli_error(f"writing {need:,} bytes for {job.path}", error), OSError):
        return FileEntry(*write_file(partial / _file_name(job.team.rank), job.entries, done=done))
