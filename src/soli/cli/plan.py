"""`soli plan`: check a plan and fill it in."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from soli.cli.options import Ranks
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.planner.legality import default_plan, resolve

FORMS = ("text", "toml", "json")


def plan(
    text: Annotated[str, typer.Argument(help='Such as "dp=2,zero=3", or auto.')],
    ranks: Ranks = 1,
    form: Annotated[str, typer.Option("--format", help=", ".join(FORMS))] = "text",
) -> None:
    """Check a plan for N ranks and print it with every degree filled in."""
    if form not in FORMS:
        raise SoliError("a plan has no such format", got=form, allowed=", ".join(FORMS))
    if text == "auto":
        made, why = default_plan(ranks)
        print(why, file=sys.stderr)
    else:
        made = resolve(Plan.parse(text), ranks)
    print({"text": str(made), "toml": made.to_toml().rstrip(), "json": made.to_json()}[form])
