"""What runs first in a rank of `soli run`: python -m soli.mesh.launch.rank script.py arguments...

It lets every error of the script, from its first line on, reach the launcher's one report, and it lets the
launcher ask for stacks before (or without) soli being imported. The script is then run as `__main__`, as
`python script.py` would run it: its globals are those of the real main module, so pickling and
multiprocessing work. No torch here.
"""

import builtins
import os
import sys
from pathlib import Path

from soli.core.report import install_hook, stacks_on_request
from soli.mesh.launch.draws import Seeding


def prepare() -> None:
    """Report uncaught errors to the launcher, and dump stacks on a signal into the file that it named."""
    install_hook(int(os.environ.get("RANK", "0")))
    stacks_on_request()


def run(script: str, arguments: list[str]) -> None:
    """Run a script in this process as its main program."""
    prepare()
    sys.meta_path.insert(0, Seeding(int(os.environ["SOLI_SEED"])))
    sys.argv = [script, *arguments]
    path = Path(script).resolve()
    if not sys.flags.safe_path:
        sys.path[0] = str(path.parent)
    code = compile(path.read_bytes(), script, "exec", dont_inherit=True)
    namespace = vars(sys.modules["__main__"])
    known = {
        "__name__": "__main__", "__file__": str(path), "__builtins__": builtins,
        **dict.fromkeys(("__spec__", "__package__", "__loader__", "__cached__", "__doc__")),
    }  # fmt: skip
    namespace.clear()  # the names of this file too: from here on only what is local
    namespace.update(known)
    exec(code, namespace)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
