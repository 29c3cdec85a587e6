"""`soli`: one verb a file. Nothing here imports torch, so that help and mistakes are quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from soli.core.errors import SoliError
from soli.core.report import render

app = typer.Typer(
    help="Your sequential PyTorch program on N devices, with a proof that it computes the same thing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoints = typer.Typer(help="Look at, check, export and import checkpoints.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")

Ranks = Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks on this machine.")]


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="A Python program that calls soli.parallelize.")],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Its arguments.")] = None,
    ranks: Ranks = 1,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Show the output of every rank.")] = False,
) -> None:
    """Run a script as N ranks on this machine."""
    from soli.mesh.launch.local import launch

    if not script.is_file():
        raise SoliError("there is no such script", got=str(script), fix="give the path of a Python file")
    raise typer.Exit(launch(ranks, [sys.executable, str(script), *(arguments or [])], all_ranks=all_ranks))


@app.command()
def train(
    config: Annotated[Optional[Path], typer.Argument(help="A TOML file; without one the main job runs.")] = None,
    plan: Annotated[Optional[str], typer.Option(help='Such as "dp=2,zero=3", or auto.')] = None,
    steps: Annotated[Optional[int], typer.Option(min=1, help="Optimizer steps.")] = None,
    minutes: Annotated[Optional[float], typer.Option(min=0.1, help="Wall-clock budget, where steps are not said.")] = None,
    data: Annotated[Optional[str], typer.Option(help="A text file or folder, .jsonl, dataset on disk, token file.")] = None,
    name: Annotated[Optional[str], typer.Option(help="Of the run directory.")] = None,
    resume: Annotated[Optional[Path], typer.Option(help="A run directory to go on from.")] = None,
    seed: Annotated[Optional[int], typer.Option(help="Of everything random.")] = None,
    ranks: Ranks = 2,
) -> None:
    """Train a GPT on text: Python's own standard library unless told otherwise."""
    from soli.cli.train import start

    given = {
        "config_path": str(config) if config else None,
        "plan": plan,
        "steps": steps,
        "minutes": minutes,
        "data": data,
        "name": name,
        "resume": str(resume) if resume else None,
        "seed": seed,
    }
    raise typer.Exit(start(ranks, given))


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False) -> None:
    """What this machine is, what works and what does not: for a bug report."""
    from soli.cli.env import show

    print(show(as_json))


@app.command()
def plan(
    text: Annotated[str, typer.Argument(help='Such as "dp=2,zero=3".')],
    ranks: Ranks = 1,
    form: Annotated[str, typer.Option(help="text, toml or json.")] = "text",
) -> None:
    """Check a plan for N ranks and print it with every degree filled in."""
    from soli.core.plan import Plan
    from soli.planner.legality import resolve

    if form not in ("text", "toml", "json"):
        raise SoliError("a plan has no such form", got=form, allowed="text, toml, json")
    made = resolve(Plan.parse(text), ranks)
    print({"text": str(made), "toml": made.to_toml().rstrip(), "json": made.to_json()}[form])


@checkpoints.command("show")
def checkpoint_show(path: Path) -> None:
    """What a checkpoint holds."""
    from soli.checkpoint.tool import show

    print(show(path))


@checkpoints.command("check")
def checkpoint_check(path: Path) -> None:
    """Verify every checksum, and that the parts tile every tensor."""
    from soli.checkpoint.tool import check
    from soli.core.errors import raise_all

    raise_all(check(path))
    print(f"{path}: complete, every checksum right")


@checkpoints.command("export")
def checkpoint_export(
    path: Path,
    out: Path,
    form: Annotated[str, typer.Option("--format", help="safetensors (one file) or hf (a folder).")] = "safetensors",
    config: Annotated[Optional[Path], typer.Option(help="A config.json to put beside the weights.")] = None,
) -> None:
    """Write the model's weights for others."""
    from soli.checkpoint.tool import export

    for file in export(path, out, format=form, config=config):
        print(file)


@checkpoints.command("import")
def checkpoint_import(source: Path, out: Path) -> None:
    """Make a checkpoint of a safetensors file or a Hugging Face folder."""
    from soli.checkpoint.tool import import_

    import_(source, out)
    print(out)


def main() -> None:
    """The entry point: a SoliError is one screen and its exit code."""
    try:
        app()
    except SoliError as error:
        print(render(error), file=sys.stderr)
        sys.exit(error.exit_code)
