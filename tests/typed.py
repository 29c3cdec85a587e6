"""`soli` as it is typed, in a process of its own that is a fork of one that has the imports: they take seconds."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

from pool import IMPORTED


def soli(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120
) -> CompletedProcess[str]:
    """What it printed and its exit code. What is no SoliError ends it with a traceback, as in a shell."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="soli-typed-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        out.touch()
        err.touch()
        process = context.Process(
            target=_typed,
            args=(words, str(cwd or Path.cwd()), dict(os.environ if env is None else env), str(out), str(err)),
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutExpired(["soli", *words], timeout, out.read_text(), err.read_text())
        assert process.exitcode is not None
        return CompletedProcess(["soli", *words], process.exitcode, out.read_text(), err.read_text())


def soli_anew(*words: str) -> CompletedProcess[str]:
    """The same in a new interpreter: what a command does not import itself, nothing has imported for it."""
    command = [sys.executable, "-m", "soli.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def _typed(words: tuple[str, ...], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    for file, path, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT),
        (2, err, os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, how, 0o600), file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["soli", *words]
    from soli.cli.main import main

    main()
