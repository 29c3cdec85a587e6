"""How other programs are run: ip, tc, and whatever lives in a namespace. Lists of words, never a shell."""

import os
import shutil
import subprocess

from network import LabError

NEEDED = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}
WITH_US = ["setpriv", "--pdeathsig", "KILL"]
"""What is started with these words before it dies with this process, even if that is killed."""


def run(*words: str, given: str | None = None) -> str:
    """What the command prints; LabError with what it complained of if it fails."""
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def inside(namespace: str) -> list[str]:
    """The words that run a command in a namespace; /sys/class/net shows that namespace then."""
    return [*WITH_US, "ip", "netns", "exec", namespace]


def why_not() -> str:
    """What keeps this process from making a lab; empty: nothing."""
    if os.geteuid() != 0:
        return "the network lab needs root: it makes network namespaces and shapes their links"
    for command, package in NEEDED.items():
        if shutil.which(command) is None:
            return f"the network lab needs the command {command} (of {package})"
    name = f"solitry{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
    except LabError as error:
        return f"no network namespaces here: {error}"
    return ""
