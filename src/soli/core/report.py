"""How an error reaches the user: one screen, once, with the exit code that it carries.

Under `soli run` a rank writes its error to a file and stays quiet; the launcher prints it once and says
which ranks had it. On its own, or under torchrun, a rank prints it; an error that every rank raises is
printed by rank 0 alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from soli.core.errors import SoliError
from soli.core.events import events

_PACKAGE = str(Path(__file__).parent.parent)


def install_hook(rank: int) -> None:
    """Let uncaught errors of this process be reported the way the module's docstring says."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        events.emit("error", error=str(error), type=kind.__name__)
        _write_for_launcher(rank, kind, error, trace)
        if not isinstance(error, SoliError):
            sys.__excepthook__(kind, error, trace)
            return
        quiet = "SOLI_ERROR_FILE" in os.environ or (error.everywhere and rank != 0)
        if not quiet:
            print(render(error, user_line(trace)), file=sys.__stderr__, flush=True)
        sys.stdout.flush()
        # sys.exit has no effect in a hook, and the exit code is part of the message.
        os._exit(error.exit_code)

    sys.excepthook = hook


def render(error: SoliError, line: str = "") -> str:
    """The text of an error as a terminal shows it."""
    head = "soli: " + ("cannot do this" if error.exit_code == 2 else "stopped") + (f", at {line}" if line else "")
    return "\n".join([head, *("- " + str(p).replace("\n", "\n  ") for p in error.problems)])


def user_line(trace: TracebackType | None) -> str:
    """file:line of the user's own code that led to an error: the last frame outside soli and site-packages."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((_PACKAGE, "<")) and "site-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _write_for_launcher(
    rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    path = os.environ.get("SOLI_ERROR_FILE")
    if not path:
        return
    known = error.to_json() if isinstance(error, SoliError) else None
    text = "".join(traceback.format_exception(kind, error, trace))
    data = {"rank": rank, "time": time.time(), "line": user_line(trace), "soli": known, "text": text}
    Path(path).write_text(json.dumps(data), encoding="utf-8")
