"""Start N ranks of a program on this machine, and end them together.

Why not torchrun: its agent imports torch (seconds), every rank prints the same error, and exit codes are
lost. Here the launcher imports no torch, a failure ends the job within seconds, and one report says which
rank was first, with what, and where the others stood. On many hosts torchrun and Slurm work as they are.
"""

import ctypes
import errno
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

import psutil

from soli.core.errors import SoliError, blaming
from soli.core.report import STACKS_SIGNAL
from soli.mesh.backends import cores, cpu_backend
from soli.mesh.launch.blame import Ended, report, still, stuck

GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves after one has failed."""
ENDING_SECONDS = 10.0
"""And how long the one that failed may take for what a program does at its end (atexit), or for threads that do not end."""
STACKS_SECONDS, TERM_SECONDS, KILL_SECONDS = 0.5, 2.0, 5.0
"""How long they have to write their stacks, then to end on SIGTERM, then on SIGKILL."""
ASKED_SECONDS = 30.0
"""How long ranks may take to end, with a checkpoint perhaps, once they were interrupted (Ctrl-C) or told to end (SIGTERM)."""
LATE_SECONDS = 30.0
"""How long after the last rank that ended it is said where the others stand."""
INTERRUPTED, TERMINATED = 130, 143
_POLL_SECONDS = 0.02
ERROR, STACKS, WAITS = "SOLI_ERROR_FILE", "SOLI_STACKS_FILE", "SOLI_WAITS_FILE"
FILES = {ERROR: "error{}.json", STACKS: "stacks{}.txt", WAITS: "waits{}.json"}
"""What a rank writes for the launcher: the variables that name its files to it, and their names."""
_PR_SET_PDEATHSIG = 1
_SHOWING = threading.Lock()


@dataclass(kw_only=True)
class _Rank(Ended):
    folder: Path
    log: Path | None  # None: its output is shown
    process: subprocess.Popen[str] = field(init=False)

    def file(self, name: str) -> Path:
        """The one of FILES that it is told of."""
        return self.folder / FILES[name].format(self.rank)

    def poll(self) -> bool:
        """Note whether it ended; True while it runs."""
        if not self.ended:
            now = time.time()
            if self.process.poll() is None:
                self.seen = now
            else:
                self.code, self.ended = self.process.returncode, time.time()
        return not self.ended

    def waits(self) -> dict[str, Any] | None:
        """In what its main thread waits; what a child of it says is the child's."""
        found = _read(self.file(WAITS))
        return found if found and found["pid"] == self.process.pid else None

    def look(self) -> bool:
        """Note what it wrote down of its end; whether it has failed. While a thread of it lives it runs on after that.

        What a child wrote counts if the rank failed too; what was shown by a program that went on and ended well is no failure.
        """
        if self.ended and self.code == 0:
            self.error = None
            return False
        left = bool(self.ended)
        found = _read(self.file(ERROR))
        if found and (found["pid"] == self.process.pid or (left and not self.killed)):
            self.error = found
        return bool(left or self.error)


def _read(path: Path) -> dict[str, Any] | None:
    """What a rank has written; None: nothing yet, or it is writing, or was killed while it wrote."""
    with suppress(ValueError, FileNotFoundError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def launch(n: int, argv: list[str], *, log_dir: Path | None = None, all_ranks: bool = False, backend: str | None = None) -> int:
    """Run `argv` as n ranks of this machine until all have ended; returns the exit code of the job.

    Rank 0's output is shown, that of the others goes to `rank<r>.log` in `log_dir` (a new temporary folder
    if None); all_ranks: everything is shown, each line with its rank. `backend`: see backends.py. A rank may end with 0 while others
    run on. The code is that of the error that came first (SoliError's own, the rank's own exit code, or 1),
    130 after Ctrl-C, 143 after SIGTERM, which the ranks get too.
    """
    if n < 1:
        raise SoliError("the number of ranks is below 1", got=n, allowed="1, 2, 3, ...")
    chosen, _ = cpu_backend(backend)
    port = _port(n)
    logged = n > 1 and not all_ranks
    with blaming(lambda error: SoliError("what the ranks write has no folder", got=error, fix="name one to write in with --logs"), OSError):
        folder = log_dir or Path(tempfile.mkdtemp(prefix="soli-run-"))
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    code = 1
    try:
        if logged:
            others = "rank1.log" if n == 2 else f"rank1.log to rank{n - 1}.log"
            print(f"soli: {n} ranks; rank 0 is shown, the others in {folder}: {others}", file=sys.stderr)
        meeting = _meeting(port, chosen)
        with _told_to_end():
            code = _code_of(n, argv, meeting, folder, logged, all_ranks)
        if code not in (0, INTERRUPTED, TERMINATED):
            _sweep(meeting["SOLI_JOB"])
        return code
    finally:
        if log_dir is None and not (logged and (code or any(log.stat().st_size for log in folder.glob("*.log")))):
            shutil.rmtree(folder, ignore_errors=True)  # the user was not told of it, or nobody has said anything there


class _Terminated(BaseException):
    """This process was told to end."""


def _told_to_end() -> ExitStack:
    """SIGTERM (a scheduler's, docker's, timeout's) as an exception: without it the launcher ends at once, and with it all ranks."""
    afterwards = ExitStack()

    def told(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: ranks that are told may be saving
        raise _Terminated

    if threading.current_thread() is threading.main_thread():  # no other one may set it
        afterwards.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, told))
    return afterwards


def _code_of(n: int, argv: list[str], meeting: dict[str, str], folder: Path, logged: bool, prefixed: bool) -> int:
    ranks: list[_Rank] = []
    try:
        for number in range(n):
            log = folder / f"rank{number}.log" if logged and number else None
            ranks.append(_start(number, n, argv, meeting, folder, log, prefixed))
        relays = [relay for rank in ranks for relay in _relays(rank)] if prefixed else []
        failed = _watch(ranks)
        quiet = time.time()  # a child of a rank's may hold its output; who reads slowly (a pager) is waited for
        while any(relay.is_alive() for relay in relays) and time.time() - quiet < 1.0:
            quiet = time.time() if _SHOWING.locked() and not failed else quiet
            time.sleep(_POLL_SECONDS)
    except (KeyboardInterrupt, _Terminated) as told:
        told_to = isinstance(told, _Terminated)
        _interrupt(ranks, signal.SIGTERM if told_to else None)
        print("soli: told to end" if told_to else "soli: interrupted", file=sys.stderr)
        return TERMINATED if told_to else INTERRUPTED
    except BaseException:
        for rank in ranks:
            rank.process.kill()
        raise
    if not failed:
        return 0
    text, code = report([_ended(rank) for rank in ranks])
    sys.stdout.flush()
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def _meeting(port: int, backend: str) -> dict[str, str]:
    """Where and over what the ranks meet, and what they have alike: the order of their sets, and what they draw (draws.py)."""
    seed = _asked("SOLI_SEED", "seed", 0, 2**32 - 1) or str(secrets.randbits(32))  # else another one in each run
    alike = {"SOLI_SEED": seed, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", seed), "SOLI_BACKEND": backend}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SOLI_JOB": secrets.token_hex(8), **alike}


def _asked(name: str, what: str, least: int, most: int) -> str:
    """A whole number that the user set in the environment; empty where it is not."""
    said = os.environ.get(name, "")
    if said and not (said.isdecimal() and least <= int(said) <= most):
        raise SoliError(f"{name} is no {what}", got=said, allowed=f"{least} to {most}", fix="unset it")
    return said


def _port(n: int) -> int:
    """MASTER_PORT if the user set it, else a free port."""
    said = _asked("MASTER_PORT", "port", 1, 65535)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(said or 0) if n > 1 else 0))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else "cannot be used"
            what = f"port {said} on 127.0.0.1 {why}, so the ranks cannot meet there"
            raise SoliError(what, got=f"MASTER_PORT={said}: {error.strerror}", allowed="a free port", fix="unset MASTER_PORT, and soli finds a free one") from error
        return int(said) if said else int(probe.getsockname()[1])


def _start(rank: int, n: int, argv: list[str], meeting: dict[str, str], folder: Path, log: Path | None, piped: bool) -> _Rank:
    made = _Rank(rank=rank, folder=folder, log=log)
    for name in FILES:
        made.file(name).unlink(missing_ok=True)
    env = {
        "OMP_NUM_THREADS": str(max(1, cores() // n)),
        **os.environ,
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(n)),
        **meeting,
        "PYTHONUNBUFFERED": "1",  # a rank that is killed has written all that it printed
        **{name: str(made.file(name).absolute()) for name in FILES},
    }
    wrong = lambda error: SoliError("the program cannot be started", got=f"{error.filename or argv[0]}: {error.strerror}")
    with blaming(wrong, OSError), ExitStack() as ours:  # the child has its own
        output: IO[str] | int | None = ours.enter_context(log.open("w", encoding="utf-8")) if log else subprocess.PIPE if piped else None
        made.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL if rank else None, stdout=output, stderr=subprocess.STDOUT if log else output, text=True,
            encoding=getattr(sys.stdout, "encoding", None), errors="backslashreplace", preexec_fn=_with_the_launcher(os.getpid()),
        )  # fmt: skip
    made.seen = time.time()
    return made


def _with_the_launcher(launcher: int) -> Callable[[], None] | None:
    """What a new rank does first: let the kernel end it when the launcher ends, however that happens."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def first() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    return first


def _relays(rank: _Rank) -> list[threading.Thread]:
    """Threads that show a rank's output line by line."""

    def relay(source: IO[str], shown: TextIO) -> None:
        with source, suppress(OSError):  # nobody reads it any more, and the rank is to find out
            for line in source:
                with _SHOWING:
                    print(f"[{rank.rank}] {line.rstrip()}", file=shown, flush=True)

    pairs = ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr))
    threads = [threading.Thread(target=relay, args=pair, daemon=True) for pair in pairs if pair[0] is not None]
    for thread in threads:
        thread.start()
    return threads


def _running(ranks: list[_Rank]) -> list[_Rank]:
    return [rank for rank in ranks if rank.poll()]


def _watch(ranks: list[_Rank]) -> bool:
    """Wait for all ranks; once one has failed, or none can go on, end the others. True if so. Where some ended long before others, it is said."""
    told = False
    while running := _running(ranks):
        failed = any([rank.look() for rank in ranks])
        if failed and len(ranks) > 1:  # one alone keeps nobody waiting
            _wait([rank for rank in ranks if rank.error], ENDING_SECONDS)
            _wait(ranks, GRACE_SECONDS)
        ended = max(rank.ended for rank in ranks)
        if (failed and len(ranks) > 1) or stuck((rank.waits() for rank in running), ended):
            _stop(ranks)
            return True
        if ended and not told and time.time() - ended > LATE_SECONDS:
            told = True
            _ask(running)
            print(still([_ended(rank) for rank in running], LATE_SECONDS), file=sys.stderr, flush=True)
        time.sleep(_POLL_SECONDS)
    return any([rank.look() for rank in ranks])


def _wait(ranks: list[_Rank], seconds: float) -> None:
    until = time.time() + seconds
    while _running(ranks) and time.time() < until:
        time.sleep(_POLL_SECONDS)


def _ask(ranks: list[_Rank]) -> None:
    """Let ranks write where they stand."""
    for rank in ranks:
        if rank.file(STACKS).exists():  # else there is no handler yet, and the signal would end it
            rank.process.send_signal(STACKS_SIGNAL)
    _wait(ranks, STACKS_SECONDS)


def _stop(ranks: list[_Rank]) -> None:
    """Ask for stacks, then end what still runs, gently and then not."""
    for rank in _running(ranks):
        rank.killed, rank.call = True, (rank.waits() or {"call": ""})["call"]
    _ask(_running(ranks))
    for sent, patience in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        _send(ranks, sent, patience)


def _send(ranks: list[_Rank], sent: signal.Signals, patience: float) -> None:
    """A signal to what still runs, and time to end on it."""
    for rank in _running(ranks):
        rank.process.send_signal(sent)
    _wait(ranks, patience)


def _sweep(job: str) -> None:
    """End what the ranks of a job that failed have started and left, gently and then not: it has their environment, wherever it hangs."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it is gone meanwhile, or another user's
            if process.environ().get("SOLI_JOB") == job:
                process.terminate()
                left.append(process)
    for process in psutil.wait_procs(left, TERM_SECONDS)[1]:
        with suppress(psutil.Error):
            process.kill()


def _interrupt(ranks: list[_Rank], signalled: signal.Signals | None) -> None:
    """After Ctrl-C, which the terminal sends to the ranks too, or a signal that is handed on; (another) Ctrl-C ends them at once."""
    try:
        if signalled is not None:
            _send(ranks, signalled, 0.0)
        _wait(ranks, 1.0)
        if _running(ranks):
            print(f"soli: ranks may take {ASKED_SECONDS:g} s to end; Ctrl-C ends them now", file=sys.stderr)
            _wait(ranks, ASKED_SECONDS)
        _send(ranks, signal.SIGTERM, TERM_SECONDS)
    except (KeyboardInterrupt, _Terminated):
        print("soli: ending the ranks now", file=sys.stderr)
    _send(ranks, signal.SIGKILL, KILL_SECONDS)


def _ended(rank: _Rank) -> Ended:
    """With all that it left."""
    rank.look()
    if rank.file(STACKS).exists():
        rank.stacks = rank.file(STACKS).read_text(encoding="utf-8", errors="replace")
    if rank.log is not None:
        if rank.error:
            with suppress(OSError), rank.log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(rank.error["text"])
        rank.tail = rank.log.read_text(encoding="utf-8", errors="replace")[-2000:]
    return rank
