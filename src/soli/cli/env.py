"""`soli env`: this machine, what works on it, and what does not and why. Made to be pasted."""

import json
import os
import platform
import re
import resource
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from soli.cli.options import AsJson
from soli.core.errors import SoliError
from soli.core.package import SOLI
from soli.mesh.backends import cores, cpu_backend, processor

REQUIREMENT = re.compile(r"([\w.-]+)(?:.*extra == ['\"](\w+))?")
FEW_FILES, LITTLE_SHM = 1024, 64 * 2**20


def env(as_json: AsJson = False) -> None:
    """What this machine is, what works and what does not: for a bug report."""
    facts = gather()
    print(json.dumps(facts, indent=2) if as_json else as_text(facts))


def as_text(facts: dict[str, Any]) -> str:
    """The facts in two columns, what does not work below them."""
    rows = [(key, value) for key, value in facts.items() if key not in ("packages", "problems")]
    rows += facts["packages"].items()
    lines = [f"{key:<22} {', '.join(value) if isinstance(value, list) else value}" for key, value in rows]
    problems = facts["problems"] or ["nothing that soli knows of"]
    return "\n".join([*lines, "", "does not work:", *(f"- {problem}" for problem in problems)])


def gather() -> dict[str, Any]:
    """Everything that a bug report needs; `problems` says what does not work and why."""
    import psutil

    problems: list[str] = []
    memory = psutil.virtual_memory()
    own, needed = _soli(problems)
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}", "processor": processor() or "unknown",
        "cores": f"{cores()} usable of {os.cpu_count()}", "memory": f"{_gib(memory.total)}, {_gib(memory.available)} free",
        "/dev/shm": _shm(problems), "ulimit -n": _open_files(problems), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "python": f"{platform.python_version()} at {sys.executable}", "soli": own,
        "packages": {name: _version(name, extra, problems) for name, extra in needed.items()},
    }  # fmt: skip
    return facts | _torch(problems) | {"problems": problems}


def _torch(problems: list[str]) -> dict[str, Any]:
    """Devices and backends, as torch sees them."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation is what this command is for
        problems.append(f"torch cannot be imported: {type(error).__name__}: {error}")
        return {}
    devices = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if not devices:
        why = "torch finds no device" if torch.version.cuda else "this torch is built without it"
        problems.append(f"CUDA: {why}")
    facts: dict[str, Any] = {"torch": f"{torch.__version__}, CUDA {torch.version.cuda}, {torch.get_num_threads()} threads", "devices": devices or ["cpu"]}
    if not dist.is_available():
        problems.append("this torch is built without torch.distributed: one rank only")
        return facts
    try:
        backend, why = cpu_backend()
        facts["CPU ranks talk over"] = f"{backend} ({why})"
    except SoliError as error:
        problems += [f"{one.what}: {one.got}" for one in error.problems]
    for name, there in (("local", True), ("gloo", dist.is_gloo_available())):
        facts[name] = _try(name, problems) if there else _missing(name, problems)
    facts["nccl"] = "built in" if dist.is_nccl_available() else _missing("nccl", problems)
    facts["mpi"] = "built in; soli does not use it" if dist.is_mpi_available() else "not built in"
    return facts


def _missing(backend: str, problems: list[str]) -> str:
    problems.append(f"{backend}: this torch is built without it")
    return "not built in"


def _try(backend: str, problems: list[str]) -> str:
    """Not a flag but a group of one rank and a sum on it."""
    import torch
    import torch.distributed as dist

    import soli.backend  # noqa: F401 (makes `local` known)

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as `soli run` does on one machine
    try:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    except (RuntimeError, SoliError) as error:
        problems.append(f"{backend}: a group of one rank fails: {str(error).splitlines()[0]}")
        return "fails"
    return "works (a group of one rank was made, and summed)"


def _shm(problems: list[str]) -> str:
    if not os.path.isdir("/dev/shm"):
        problems.append("/dev/shm is not there: data loaders with workers fail")
        return "not there"
    space = shutil.disk_usage("/dev/shm")
    if space.free < LITTLE_SHM:
        problems.append("/dev/shm is almost full: data loaders with workers fail (docker: --shm-size)")
    return f"{_gib(space.total)}, {_gib(space.free)} free"


def _open_files(problems: list[str]) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        problems.append(f"only {soft} files may be open: many ranks or loader workers need more (ulimit -n)")
    return " of ".join("unlimited" if n == resource.RLIM_INFINITY else str(n) for n in (soft, hard))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _soli(problems: list[str]) -> tuple[str, dict[str, str]]:
    """Its version; what it needs, and what its extras need beside it, each with its extra; but for what only development does."""
    try:
        own, said = version("soli"), requires("soli") or []
    except PackageNotFoundError:
        problems.append("soli is run from its source and is not installed, so what it needs was not looked for")
        return f"{SOLI}, not installed", {}
    return own, {one[1]: one[2] or "" for one in filter(None, map(REQUIREMENT.match, said)) if one[2] != "dev"}


def _version(name: str, extra: str, problems: list[str]) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        problems.append(f"{name} is not installed" + (f" (optional: soli[{extra}])" if extra else ""))
        return "not installed"
