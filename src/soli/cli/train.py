"""`soli train`: check everything that can be checked before a rank starts, then start them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from soli.core.errors import Problem, SoliError, raise_all
from soli.core.plan import Plan
from soli.mesh.launch.local import launch
from soli.planner.legality import resolve
from soli.train import rundir


def start(ranks: int, given: dict[str, Any]) -> int:
    """Launch `ranks` ranks of the training loop; the job's exit code."""
    found: list[Problem] = []
    wanted = given["plan"]
    try:
        places = {key: Path(given[key]) if given[key] else None for key in ("config_path", "resume")}
        named = {key: value for key, value in given.items() if key not in places}
        wanted = rundir.configuration(places["config_path"], places["resume"], named).run.plan
    except SoliError as error:
        found += error.problems
    try:
        if wanted not in (None, "auto"):
            resolve(Plan.parse(wanted), ranks)
    except SoliError as error:
        found += error.problems
    raise_all(found)
    return launch(ranks, [sys.executable, "-m", "soli.cli.train_rank", json.dumps(given)])
