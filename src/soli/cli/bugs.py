"""`soli bugs`: what goes wrong in distributed training, from the fixes of real frameworks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from soli.core.errors import SoliError

if TYPE_CHECKING:
    from soli.bugs.mine import Mined

app = typer.Typer(
    help="Bugs of distributed training, from the fixes of real frameworks.", no_args_is_help=True
)


@app.callback()
def bugs() -> None:
    """Bugs of distributed training, from the fixes of real frameworks."""


@app.command("mine")
def mine(
    repos: Annotated[
        list[Path],
        typer.Argument(help="Whole clones, bare or not; nothing in them is run.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The SQLite file; what is in it stays.")] = Path("bugs.db"),
    rules: Annotated[
        Path | None, typer.Option(help="Rules of selection, as soli/bugs/selection.toml has them.")
    ] = None,
    issues: Annotated[list[Path] | None, typer.Option(help="What soli bugs export wrote.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Read git histories: every commit, whether it fixes a bug, why or why not, and how large it is."""
    from soli.bugs.mine import mine as read
    from soli.bugs.mine import take_in

    found = read(repos, out, rules)
    joined = [take_in(out, path) for path in issues or []]
    if as_json:
        print(json.dumps([one.asdict() for one in found], indent=1))
        return
    _show(found)
    for repo, known, whole in joined:
        print(f"{repo}: {whole} merged pull requests, of {known} the commit is in the history")
    print(f"Kept in {out}.")


@app.command("export")
def export(
    repo: Annotated[str, typer.Argument(help="Such as deepspeedai/DeepSpeed.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="The JSON lines; an export that was interrupted goes on in them.")
    ],
    api: Annotated[str, typer.Option(help="Of another GitHub.", show_default=False)] = "",
) -> None:
    """Merged pull requests and the issues that they close, from GitHub; needs GITHUB_TOKEN."""
    from soli.bugs import github

    count = github.export(repo, out, os.environ.get("GITHUB_TOKEN", ""), api or github.API)
    print(
        f"{count} merged pull requests of {repo} in {out}; soli bugs mine ... --issues {out} takes them in."
    )


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Such as wrong-group; left out: all of them.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """A mechanism of bugs: what it is, how it shows, how it was fixed, and in which real commits."""
    from soli.bugs.catalogue import mechanism, mechanisms

    chosen = [mechanism(name)] if name else list(mechanisms().values())
    if as_json:
        print(json.dumps([asdict(one) for one in chosen], indent=1, default=str))
    elif not name:
        table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
        for one in chosen:
            table.add_row(one.name, one.what, f"{len(one.fixes)} fix{'es' * (len(one.fixes) > 1)}")
        Console().print(table)
    else:
        one = chosen[0]
        print(f"{one.name}: {one.what}\n")
        for word, text in (("shows", one.shows), ("fixed", one.fixed), ("found by", one.found)):
            print(f"  {word:<9} {text}")
        print(f"  {'is':<9} {one.symptom}, by {one.cause}, mended by {one.strategy}\n")
        for fix in one.fixes:
            print(f"  {fix.date} {fix.repo} {fix.commit[:10]} ({fix.lines} lines) {fix.subject}")


@app.command("agree")
def agree(
    labels: Annotated[Path, typer.Argument(help="The CSV file.", show_default=False)],
    sample: Annotated[
        Path | None, typer.Option(help="What the commits were drawn from, as JSON: population.")
    ] = None,
    db: Annotated[
        Path | None, typer.Option(help="What soli bugs mine wrote: its rules are judged by the labels.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """How labellers agree, where they do not, and how good the rules are that chose the fixes."""
    from soli.bugs import labels as of

    if (sample is None) != (db is None):
        raise SoliError(
            "rules are judged by what was drawn and what they chose",
            fix="--sample FILE --db FILE, or neither",
        )
    rows = of.read(labels)
    said: dict[str, Any] = {"pairs": [asdict(pair) for pair in of.pairs(rows)]}
    if sample is not None and db is not None:
        said["selection"] = {name: asdict(one) for name, one in of.judged(rows, sample, db).items()}
    if as_json:
        print(json.dumps(said, indent=1))
        return
    for pair in of.pairs(rows):
        print(
            f"{pair.first} and {pair.second}: {pair.fix.count} commits, {len(pair.differ)} labelled differently"
        )
        for name, one in {"is a fix": pair.fix, **pair.dimensions}.items():
            print(
                f"  {name:<9} kappa {one.value:.2f} ({one.low:.2f} to {one.high:.2f}), {one.alike:.0%} of {one.count} alike"
            )
        for a, b in pair.differ:
            words = "; ".join(
                f"{name} {getattr(a, name) or '-'} / {getattr(b, name) or '-'}"
                for name in ("fix", *of.DIMENSIONS)
                if getattr(a, name) != getattr(b, name)
            )
            print(f"    {a.repo} {a.commit[:10]} {words}")
    for name, one in said.get("selection", {}).items():
        shares = ", ".join(
            f"{what} {p:.2f} ({low:.2f} to {high:.2f})"
            for what, (p, low, high) in (("precision", one["precision"]), ("recall", one["recall"]))
        )
        print(f"the rules, a fix if {name}: {shares}; {one['fixes']} fixes among the labelled commits")


def _show(found: list[Mined]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("commits", "new", "fixes", "lines, median"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        table.add_row(one.repo, str(one.commits), str(one.new), str(one.fixes), f"{one.median:.0f}")
    Console().print(table)
    for one in found:
        shares = ", ".join(
            f"{definition} {100 * p:.0f}% ({100 * low:.0f} to {100 * high:.0f})"
            for definition, (p, low, high) in one.small.items()
        )
        print(f"{one.repo}, of 10 lines or fewer by what is counted: {shares}")
        for word, by in (("fixes", one.selected), ("no fixes", one.rejected)):
            print(
                f"{one.repo}, {word} by rule: " + ", ".join(f"{rule} {count}" for rule, count in by.items())
            )
