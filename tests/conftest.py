"""One pool of ranks for the whole session, and a disk that is soon full."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SOLI_CACHE", tempfile.mkdtemp(prefix="soli-cache-"))  # what is measured of the machine

from soli.verify.pool import Pool

STARTS = {
    "auto",
    "documents",
    "engine_input",
    "launch",
    "local_faults",
    "local_hosts",
    "local_namespaces",
    "main_job",
    "network_lab",
}
"""Files whose tests start ranks of their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of ranks run one after another, in one worker (pytest-xdist): together they would wait for each other's cores."""
    for item in items:
        if {"pool", "many"} & set(getattr(item, "fixturenames", ())) or item.path.stem.removeprefix(
            "test_"
        ) in STARTS:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def many() -> Iterator[Pool]:
    """For what takes more than four; started when it is first asked for."""
    made = Pool(16)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.fail(f"cannot mount a small tmpfs (this test needs root): {mounted.stderr}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
