"""`make sweep`: the cases that `make test` leaves out, and what came of each -> benchmarks/results/sweep.json."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

from soli.verify.results import write_rows

RESULTS = Path("benchmarks/results/sweep.json")


def main() -> int:
    """pytest's exit code; nothing is written unless every case passed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.xml"
        command = [sys.executable, "-m", "pytest", "-m", "sweep", f"--junitxml={file}", *sys.argv[1:]]
        code = subprocess.run(command, check=False).returncode
        if code:
            print(f"pytest ended with {code}: nothing is written")
            return code
        cases = list(ElementTree.parse(file).iter("testcase"))
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
