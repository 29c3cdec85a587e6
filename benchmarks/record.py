"""What every result says of its making, and how it is written."""

import datetime
import json
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import probe

from soli.core.package import SOLI


def head() -> dict[str, object]:
    """When, with which command, where, and with what a result was made. Of a path that is one machine's its name is said."""
    given = [re.sub(r"(^|=)/(\S*/)?", r"\1", one) for one in sys.argv[1:]]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given]),
        "machine": probe.machine(),
        "versions": {"torch": version("torch"), "soli": SOLI},
    }


def line(result: dict) -> str:
    """The same for people, as a page begins."""
    about = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['date']}, `{result['command']}`; {about['processor']}, {about['cores']} cores, {versions}."


def write(result: dict, text: str, out: Path) -> None:
    """`out`.json and `out`.md, each whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".json", json.dumps(result, indent=1) + "\n"), (".md", text)):
        fresh = out.with_name(out.name + suffix + ".new")
        fresh.write_text(content)
        fresh.replace(out.with_name(out.name + suffix))
