"""What runs first in a rank of `soli run`: python -m soli.mesh.launch.rank script.py arguments...

It lets every error of the script, from its first line on, reach the launcher's one report, and it lets the
launcher ask for stacks before (or without) soli being imported. The script is then run as `__main__`, as
`python script.py` would run it: its globals are those of the real main module, so pickling and
multiprocessing work. No torch here.
"""

from __future__ import annotations

import builtins
import faulthandler
import os
import signal
import sys
from pathlib import Path

from soli.core.report import install_hook


def prepare() -> None:
    """Report uncaught errors to the launcher, and dump stacks on SIGUSR1 into the file that it named."""
    install_hook(int(os.environ.get("RANK", "0")))
    path = os.environ.get("SOLI_STACKS_FILE")
    if path:
        faulthandler.register(signal.SIGUSR1, file=open(path, "w", encoding="utf-8"), all_threads=True)  # noqa: SIM115


def run(script: str, arguments: list[str]) -> None:
    """Run a script in this process as its main program."""
    prepare()
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    namespace = vars(sys.modules["__main__"])
    namespace.clear()
    namespace.update(__name__="__main__", __file__=str(Path(script).resolve()), __builtins__=builtins)
    namespace.update(__spec__=None, __package__=None, __loader__=None, __cached__=None, __doc__=None)
    exec(code, namespace)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
