"""How an error reaches the user: one screen, once, with the exit code that it carries.

Under `soli run` a rank writes its error to a file and stays quiet; the launcher prints it once and says
which ranks had it. On its own, or under torchrun, a rank prints it; an error that every rank raises is
printed by rank 0 alone.
"""

import faulthandler
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from types import TracebackType

from soli.core.errors import MISTAKE, Problem, SoliError
from soli.core.events import events

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_START = str(Path(_PACKAGE, "mesh", "launch", "rank.py"))
STACKS_SIGNAL: signal.Signals = getattr(signal, "SIGRTMAX", signal.SIGUSR1)
"""Asks a rank for its stacks: one that programs leave alone, since a rank that is asked may go on."""
FINISH: list[Callable[[], None]] = []
"""What every rank has to end before an error that is on all of them ends the process: a checkpoint that is being written."""


def install_hook(rank: int) -> None:
    """Let uncaught errors of this process be reported the way the module's docstring says."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        events.emit("error", error=str(error), type=kind.__name__)
        trace = _from_script(trace)
        if isinstance(error, SoliError) and (first := _users_own(error.__context__)):
            error.problems += (Problem("it came while an error of the program's own was on its way, and may come of that", got=first),)
        for finish in FINISH if isinstance(error, SoliError) and error.everywhere else ():
            finish()  # before the launcher knows: it ends the rank soon after
        told = _write_for_launcher(rank, error, trace)
        if not isinstance(error, SoliError):
            if not told:
                sys.__excepthook__(kind, error, trace)
            return
        if not told and not ((error.everywhere or error.told) and rank != 0):
            # Not sys.stderr: the hook that torch puts around this one has replaced it.
            print(render(error, user_line(trace)), file=sys.__stderr__, flush=True)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        # sys.exit has no effect in a hook, and the exit code is part of the message.
        os._exit(error.exit_code)

    sys.excepthook = hook


def _users_own(error: BaseException | None) -> str:
    """Of an error and those that were on their way before it, the newest that the program's own code raised, and where."""
    while error is not None and not any(is_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__)[-1:]):
        error = error.__context__
    return "" if error is None else f"{type(error).__name__}: {error}, at {user_line(error.__traceback__)}"


def stacks_on_request() -> None:
    """`soli run` asks a stuck rank for its stacks by a signal; they go to the file that it named."""
    if path := os.environ.get("SOLI_STACKS_FILE"):
        faulthandler.register(STACKS_SIGNAL, file=open(path, "w", encoding="utf-8"), all_threads=True)  # noqa: SIM115


SAY_SECONDS = 0.5
"""How long a rank waits for others before it says so, and then says it again."""


def say(call: str, moved: float = 0.0, looked: float | None = None) -> None:
    """For the launcher: the main thread waits in `call` ("": not any more), and is woken or looks itself.

    Nothing has come since `moved`, by what it saw when it `looked`.
    """
    if path := os.environ.get("SOLI_WAITS_FILE"):
        told = json.dumps({"pid": os.getpid(), "call": call, "moved": moved, "looked": looked} if call else None)
        with suppress(OSError):  # the folder is gone or full: no reason for a wait to fail
            Path(path).write_text(told, encoding="utf-8")


def waiting(call: str) -> ExitStack:
    """Around what waits for other ranks and does not return before they come."""
    say(call, time.time())
    afterwards = ExitStack()
    afterwards.callback(say, "")
    return afterwards


def render(error: SoliError, line: str = "", who: str = "") -> str:
    """The text of an error as a terminal shows it."""
    head = "soli: cannot do this" if error.exit_code == MISTAKE else "soli: stopped"
    head += (f", on {who}" if who else "") + (f", at {line}" if line else "")
    return "\n".join([head, *("- " + str(p).replace("\n", "\n  ") for p in error.problems)])


def user_line(trace: TracebackType | None) -> str:
    """file:line of the user's own code that led to an error: its last frame in a file of theirs."""
    frames = [frame for frame in traceback.extract_tb(trace) if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def is_users(filename: str) -> bool:
    """Whether a source file is neither soli's, nor Python's, nor an installed package's."""
    return not filename.startswith((_PACKAGE, _LIBRARY, "<")) and "site-packages" not in filename


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that start a script under `soli run`: None for a script that is no Python."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_START, "<frozen runpy")):
        trace = trace.tb_next
    return trace


def _write_for_launcher(rank: int, error: BaseException, trace: TracebackType | None) -> bool:
    """True if the launcher has it, and will show it."""
    if not (path := os.environ.get("SOLI_ERROR_FILE")):
        return False
    known = error.to_json() if isinstance(error, SoliError) else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    told = {"line": user_line(trace), "soli": known, "text": text}
    try:
        Path(path).write_text(json.dumps({"rank": rank, "pid": os.getpid(), "time": time.time(), **told}), encoding="utf-8")
    except OSError:
        return False
    return True


def named(numbers: list[int]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0-2, 5`, `ranks 0, 2, 4, ..., 1022`."""
    # of numbers that follow each other the distance from their places is the same
    spans = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    said = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    said[8:-1] = ["..."] * (len(said) > 9)  # a line has room for so many
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(said)}"
