"""Files that are whole, or as they were: a run may be killed at any moment."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file in place of what is there, all of it or nothing."""
    beside = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:  # a full disk: what was written of it would be in the way of all that comes
        beside.unlink(missing_ok=True)
        raise
