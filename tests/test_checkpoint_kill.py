"""`kill -9` of a saving process at many moments: the last complete checkpoint always loads.

Run as a program, this file is the nursery: it imports torch once and forks the processes to be killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from soli.checkpoint import latest, load, read_manifest, save
from soli.checkpoint.folder import hidden
from soli.checkpoint.tool import check
from soli.core.layout import Sharded, from_flat, from_whole

SIZE = 150_000  # elements; one save takes some milliseconds, so kills fall everywhere in it


def tensors_at(step: int) -> dict[str, Sharded]:
    return {
        "model.w": from_flat(torch.full((SIZE,), float(step)), (SIZE,), 0),
        "rng.step": from_whole(torch.tensor(step)),
    }


def save_forever(folder: Path, step: int, started: int) -> None:
    """Save step after step under three names in turn, so that most saves replace a checkpoint."""
    while True:
        save(folder / f"slot{step % 3}", tensors_at(step), {"step": step}, overwrite=True)
        os.write(started, step.to_bytes(8, "little"))
        step += 1


def confirmed(read: int) -> int:
    """The last step that the dead process had reported as saved; -1 if none."""
    data = b""
    while part := os.read(read, 1 << 16):
        data += part
    return int.from_bytes(data[-8:], "little") if data else -1


def nursery(folder: Path, kills: int) -> None:
    rng = random.Random(5)
    known, between, leftovers = -1, 0, 0
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            save_forever(folder, known + 1, write)
        os.close(write)
        time.sleep(rng.uniform(0.001, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = confirmed(read)
        os.close(read)
        newest = latest(folder)
        if newest is None:
            assert max(known, reported) == -1, "a complete checkpoint was lost"
            continue
        step = read_manifest(newest).state["step"]
        assert step >= max(known, reported), f"step {step} is older than {known}, {reported}"
        between += not newest.exists()
        leftovers += sum(len(hidden(folder / f"slot{i}", "partial")) for i in range(3))
        wanted = tensors_at(-1)
        load(newest, wanted)
        for sharded in wanted.values():
            assert all(bool((piece == step).all()) for _, piece in sharded.pieces)
        assert check(newest) == []
        known = step
    for i in range(3):
        save(folder / f"slot{i}", tensors_at(known + 1 + i), {"step": known + 1 + i}, overwrite=True)
    assert sorted(p.name for p in folder.iterdir()) == ["slot0", "slot1", "slot2"], "leftovers of the dead"
    print(json.dumps({"steps": known, "leftovers": leftovers, "between": between}))


def test_kill_at_any_moment_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), "40"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["steps"] > 10, "too few saves between the kills to mean anything"
    assert seen["leftovers"] > 5, "the kills did not fall inside saves"


def test_death_between_the_two_renames(tmp_path: Path) -> None:
    """The one moment at which a replaced checkpoint is not under its name."""
    save(tmp_path / "100", tensors_at(1), {"step": 1})
    (tmp_path / "100").rename(tmp_path / ".100.replaced-0123456789ab")
    (tmp_path / ".100.partial-0123456789ab").mkdir()
    (tmp_path / ".200.partial-0123456789ab").mkdir()
    (tmp_path / ".100.partial-mine").mkdir()
    assert latest(tmp_path) == tmp_path / "100"
    wanted = tensors_at(0)
    assert load(tmp_path / "100", wanted) == {"step": 1}
    assert check(tmp_path / "100") == []
    save(tmp_path / "100", tensors_at(2), {"step": 2}, overwrite=True)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [".100.partial-mine", ".200.partial-0123456789ab", "100"], "only this name's dead are removed"
    assert read_manifest(tmp_path / "100").state == {"step": 2}


if __name__ == "__main__":
    nursery(Path(sys.argv[1]), int(sys.argv[2]))
