"""The command `soli`: one file a verb. Nothing here imports torch, so that help and mistakes are quick."""

from __future__ import annotations

import sys

from typer import Typer

from soli.cli import bugs, calibrate, checkpoint, env, hardware, plan, roles, run, train
from soli.core.errors import SoliError
from soli.core.report import render

app = Typer(
    help="Your sequential PyTorch program on N devices, with a proof that it computes the same thing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
    """The entry point: a SoliError is one screen and its exit code."""
    try:
        app()
    except SoliError as error:
        print(render(error), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
