"""One pool of ranks for the whole session, and a disk that is soon full."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SOLI_CACHE", tempfile.mkdtemp(prefix="soli-cache-"))  # what is measured of the machine

from pool import Pool

settings.register_profile("soli", deadline=None)  # how long an example takes on a busy machine says nothing
settings.load_profile("soli")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool(4, "forkserver")
    yield made
    made.close()


@pytest.fixture(scope="session")
def launched() -> Iterator[Pool]:
    """Ranks that order their sets each in its own way: what is decided by such an order, they decide differently."""
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def many() -> Iterator[Pool]:
    """For what takes more than four; started when it is first asked for."""
    made = Pool(16, "forkserver")
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
