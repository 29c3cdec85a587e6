"""One pool of ranks for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from soli.verify.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool(4)
    yield made
    made.close()
