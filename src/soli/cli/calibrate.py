"""`soli calibrate`: what this machine does with N ranks, measured, and kept for plan="auto"."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from typer import Exit, Option

from soli.cli.options import AsJson, Backend, Ranks
from soli.mesh.launch.local import launch


def calibrate(
    ranks: Ranks = 2,
    fresh: Annotated[bool, Option("--fresh", help="Measure anew what was measured before.")] = False,
    as_json: AsJson = False,
    backend: Backend = None,
) -> None:
    """Measure this machine with N ranks: products, memory, every collective by group and size, overlap, disk.

    It takes less than 20 seconds, and is kept by a fingerprint of the hardware in SOLI_CACHE, or ~/.cache/soli.
    """
    argv = [sys.executable, "-m", "soli.cli.calibrate_rank", json.dumps({"fresh": fresh, "as_json": as_json})]
    raise Exit(launch(ranks, argv, backend=backend))
