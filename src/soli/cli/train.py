"""`soli train`: check everything that can be checked before a rank starts, then start them."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from soli.cli.options import Backend, Ranks
from soli.core.errors import Problem, SoliError, raise_all
from soli.core.plan import Plan
from soli.mesh.launch.local import launch
from soli.planner.legality import resolve

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def train(
    config: Annotated[Path | None, Argument(help="A TOML file; without one the main job runs.")] = None,
    plan: Annotated[str | None, Option(help='Such as "dp=2,zero=3", auto, or auto=probe.')] = None,
    steps: Annotated[int | None, Option(help="Optimizer steps.")] = None,
    minutes: Annotated[float | None, Option(help="Wall clock, where steps are not said.")] = None,
    data: Annotated[str | None, Option(help="Text, folder, .jsonl, dataset, token file.")] = None,
    name: Annotated[str | None, Option(help="Of the run directory.")] = None,
    resume: Annotated[Path | None, Option(help="A run directory to go on from.")] = None,
    seed: Annotated[int | None, Option(help="Of everything random.")] = None, ranks: Ranks = 2, backend: Backend = None,
) -> None:  # fmt: skip
    """Train a GPT on text: Python's own standard library unless told otherwise."""
    named = {"plan": plan, "steps": steps, "minutes": minutes, "data": data, "name": name, "seed": seed}
    check(ranks, config, resume, named)
    given = json.dumps({"config": config, "resume": resume, **named}, default=str)
    raise Exit(launch(ranks, [sys.executable, "-m", "soli.cli.rank", "train", given], backend=backend))


def of_rank(config: str | None, resume: str | None, **named: object) -> None:
    """Run the loop."""
    from soli.train import loop

    try:
        loop.main(Path(config) if config else None, resume=Path(resume) if resume else None, **named)
    except OSError as error:
        if error.errno not in FULL:
            raise
        what, got = "a file of the run cannot be written", f"{error.filename or 'its folder'}: {error.strerror}"
        raise SoliError(what, got=got, fix="make room, or run where there is some (run.folder, data.cache)") from error


def check(ranks: int, config: Path | None, resume: Path | None, named: dict[str, Any]) -> None:
    """Raise one SoliError with all that is wrong with the settings, and with the plan for these ranks."""
    from soli.train import rundir
    from soli.train.corpus import kind_of

    found: list[Problem] = []
    plan, batch = named["plan"], 0
    try:
        said = rundir.configuration(config, resume, named)
        plan, batch = said.run.plan, said.optim.batch
        kind_of(said.data)
        folder = Path(said.run.folder)
        if resume is None and not os.access(next(place for place in (folder, *folder.absolute().parents) if place.exists()), os.W_OK):
            found.append(Problem("run.folder cannot be written into", str(folder), "", "name another"))
    except SoliError as error:
        found += error.problems
    try:
        dp = 1 if plan in (None, "auto", "auto=probe") else resolve(Plan.parse(plan), ranks).dp or 1
        if 0 < batch < dp:
            what = "optim.batch is smaller than the number of data-parallel ranks"
            found.append(Problem(what, f"batch {batch}, dp={dp}", f"{dp} or more"))
    except SoliError as error:
        found += error.problems
    raise_all(dict.fromkeys(found))  # a plan that does not parse is a problem of both
