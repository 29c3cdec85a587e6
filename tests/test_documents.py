"""What README, quickstart and the examples show is there, and works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOLI = [sys.executable, "-c", "from soli.cli.main import main; main()"]
ROOT = Path(__file__).parent.parent


def lines_of(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True, cwd=ROOT)
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


def test_the_examples_print_the_same_losses() -> None:
    first = lines_of([sys.executable, "examples/00_sequential.py"])
    assert len(first) == 4
    assert lines_of([sys.executable, "examples/01_engine.py"]) == first
    assert lines_of([*SOLI, "run", "-n", "2", "examples/02_parallel.py"]) == first
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert lines_of([*torchrun, "examples/02_parallel.py"]) == first


def test_the_documents_name_commands_that_exist() -> None:
    """Every `soli` verb and make target that README and quickstart show is there."""
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/quickstart.md").read_text()
    for verb in set(re.findall(r"^(?:\.venv/bin/)?soli (\w+)", text, re.MULTILINE)):
        subprocess.run([*SOLI, verb, "--help"], capture_output=True, timeout=60, check=True)
    targets = set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE))
    assert targets
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)
    for path in re.findall(r"\]\(([\w./]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / path).exists(), path
