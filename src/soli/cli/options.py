"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Ranks = Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks on this machine.")]

Backend = Annotated[
    str | None, typer.Option(help="Of CPU ranks: local (shared memory) or gloo; soli env says which and why.")
]

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
