"""Options that several verbs share."""

from typing import Annotated

from typer import Option

Ranks = Annotated[int, Option("--ranks", "-n", min=1, max=4096, help="Ranks on this machine.")]

Backend = Annotated[str | None, Option(help="Of CPU ranks: local (shared memory) or gloo; soli env says which and why.")]

AsJson = Annotated[bool, Option("--json", help="For programs.")]
