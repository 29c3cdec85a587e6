"""The command `soli`: one file a verb. Nothing here imports torch, so that help and mistakes are quick."""

import errno
import json
import os
import sys
from typing import Annotated

from typer import Exit, Option, Typer

from soli.cli import bugs, calibrate, checkpoint, env, hardware, plan, roles, run, train
from soli.core.errors import SoliError
from soli.core.package import SOLI
from soli.core.report import render

app = Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(said: bool) -> None:
    if said:
        print(f"soli {SOLI}")
        raise Exit


@app.callback()
def soli(version: Annotated[bool, Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Your sequential PyTorch program on N devices, with a proof that it computes the same thing."""


app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run.run)
app.command("train")(train.train)
app.add_typer(plan.app, name="plan")
app.command("hardware")(hardware.hardware)
app.command("calibrate")(calibrate.calibrate)
app.command("roles")(roles.roles)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bugs.app, name="bugs")
app.command("env")(env.env)


def main() -> None:
    """The entry point: a SoliError is one screen and its exit code; under --json an object too, on the standard output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 as long as the program runs
            os.set_inheritable(getattr(sys, name).fileno(), True)  # ranks have it too
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:  # of the standard output: nobody reads it any more, or its disk is full
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename:
            raise
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 what is left in it
        if error.errno == errno.ENOSPC:
            print("soli: the output cannot be written: no space is left there", file=sys.stderr)
        sys.exit(1)
    except SoliError as error:
        if "--json" in sys.argv and sys.argv[1] != "run":  # whose words are its program's
            print(json.dumps({"error": error.to_json()}, indent=1))
        print(render(error), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
