"""`soli checkpoint`: show, check, export, import."""

from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from soli.core.errors import failure

app = Typer(help="Look at, check, export and import checkpoints.", no_args_is_help=True)


@app.command("show")
def show(path: Path) -> None:
    """What a checkpoint holds."""
    from soli.checkpoint import tool

    print(tool.show(path))


@app.command("check")
def check(path: Path) -> None:
    """Verify every checksum, and that the parts tile every tensor."""
    from soli.checkpoint import read_manifest, tool

    read_manifest(path)  # what is no checkpoint is the user's mistake, as elsewhere
    if found := tool.check(path):
        raise failure(found)
    print(f"{path}: complete, every checksum right")


@app.command("export")
def export(
    path: Path, out: Path, form: Annotated[str, Option("--format", help="safetensors (one file) or hf (a folder).")] = "safetensors",
    config: Annotated[Path | None, Option(help="A config.json to put beside the weights (hf).")] = None,
) -> None:  # fmt: skip
    """Write the model's weights for others."""
    from soli.checkpoint import transfer

    for file in transfer.export(path, out, format=form, config=config):
        print(file)


@app.command("import")
def import_(source: Path, out: Path) -> None:
    """Make a checkpoint of a safetensors file or a Hugging Face folder."""
    from soli.checkpoint import transfer

    transfer.import_(source, out)
    print(out)
