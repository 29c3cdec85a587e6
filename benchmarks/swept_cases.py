"""`make sweep`: the cases that `make test` leaves out, and what came of each -> benchmarks/results/sweep.json."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

from pages import write_rows

RESULTS = Path("benchmarks/results/sweep.json")


def main() -> int:
    """pytest's exit code, or 1; nothing is written unless every case ran and passed."""
    if sys.argv[1:]:
        print("the sweep is run whole; some of it: python -m pytest -m sweep -k ...", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.xml"
        command = [sys.executable, "-m", "pytest", "-m", "sweep", f"--junitxml={file}"]
        code = subprocess.run(command, check=False).returncode
        if code:
            print(f"pytest ended with {code}: nothing is written")
            return code
        cases = list(ElementTree.parse(file).iter("testcase"))
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    if skipped:
        print(f"these did not run, and nothing is written: {skipped}", file=sys.stderr)
        return 1
    rows = [
        {"test": f"{case.get('classname')}.{case.get('name')}", "seconds": float(case.get("time", "nan"))}
        for case in cases
    ]
    git = ["git", "describe", "--always", "--dirty"]
    about = {
        "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": platform.machine(),
    }
    write_rows(RESULTS, "make sweep", rows, **about)
    print(f"{len(rows)} cases passed -> {RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
