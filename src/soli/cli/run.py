"""`soli run`: a script as N ranks on this machine."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from soli.cli.options import Backend, Ranks
from soli.core.errors import SoliError
from soli.mesh.launch.local import launch


def run(
    script: Annotated[Path, Argument(help="A Python program that calls soli.parallelize.")],
    arguments: Annotated[list[str] | None, Argument(help="Its arguments.")] = None, ranks: Ranks = 1,
    all_ranks: Annotated[bool, Option("--all-ranks", help="Show the output of every rank.")] = False, backend: Backend = None,
    logs: Annotated[Path | None, Option(help="Folder for the output of ranks 1, 2, ...")] = None,
) -> None:  # fmt: skip
    """Run a script as N ranks on this machine."""
    if not script.is_file() and str(script).startswith("-"):
        raise SoliError("soli run has no such option", got=script, fix="soli run --help names them; a plan stands in the script, what comes after the script is the script's")
    if not script.is_file():
        raise SoliError("there is no such script", got=script, fix="give the path of a Python file")
    argv = [sys.executable, "-m", "soli.mesh.launch.rank", str(script), *(arguments or [])]
    raise Exit(launch(ranks, argv, log_dir=logs, all_ranks=all_ranks, backend=backend))
