"""`soli train` as a person types it: every kind of data, and a killed run that goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soli.train import settings
from soli.train.schedule import Schedule
from test_launch import clean_environment

SOLI = [sys.executable, "-m", "soli.cli.main"]
TEXTS = [f"{i} a rose is a rose is a rose, said {'Gertrude ' * (i % 5 + 1)}\n" * 20 for i in range(24)]
CONFIG = """
[model]
dim = 16
layers = 1
heads = 2
context = 16
[tokenizer]
vocab = 300
[data]
validation = 0.3
[optim]
batch = 4
warmup = 1
[run]
sample_tokens = 20
save_every = 50
"""


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "my.toml").write_text(CONFIG)
    command = [*SOLI, "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=clean_environment())


def the_run(folder: Path) -> Path:
    (found,) = [path for path in (folder / "runs").iterdir() if (path / "config.toml").exists()]
    return found


def write(folder: Path, kind: str) -> Path:
    path = folder / kind
    if kind == "text":
        path = folder / "poem.txt"
        path.write_text("".join(TEXTS))
    elif kind == "folder":
        path.mkdir()
        for i, text in enumerate(TEXTS):
            (path / f"{i}.md").write_text(text)
    elif kind == "jsonl":
        path = folder / "poem.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    elif kind == "dataset":
        import datasets

        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(path))
    else:
        path.mkdir()
        for name, count in (("train", 3000), ("validation", 500)):
            ids = np.arange(count, dtype="<u2") * 7 % 50
            (path / f"{name}.bin").write_bytes(ids.tobytes())
            (path / f"{name}.json").write_text(json.dumps({"dtype": "uint16", "vocab": 50}))
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sweep  # text is what test_a_killed_run_resumes_to_the_same_end trains on
@pytest.mark.parametrize("kind", ["folder", "jsonl", "dataset", "tokens"])
def test_ones_own_data(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    need_trained(tmp_path, train(tmp_path, "my.toml", "--plan", "dp=2,zero=3", "--steps", "30", "--data", str(path)), kind, 30)


def need_trained(folder: Path, done: subprocess.CompletedProcess[str], kind: str, steps: int) -> None:
    """What a run has left and said."""
    assert done.returncode == 0, done.stderr
    run = the_run(folder)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["plan"], summary["ranks"]) == (steps, "dp=2,zero=3", 2)
    loss = summary["validation"]
    assert (loss["bits_per_byte"] is None) is (kind == "tokens")  # of bare tokens nobody knows the bytes
    assert f"validation loss  {loss['nats_per_token']:.4f} nats per token" in done.stdout
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").iterdir())
    trained = [row for row in metrics(run) if row["kind"] == "train"]
    assert [row["step"] for row in trained] == list(range(1, steps + 1))
    assert trained[-1]["loss"] < trained[0]["loss"]
    if kind == "tokens":
        assert "no sample: the token files came without a tokenizer.json" in done.stdout
    else:
        assert (run / "sample.txt").read_text() in done.stdout


def test_a_killed_run_resumes_to_the_same_end(tmp_path: Path) -> None:
    """kill -9 of every process after step 50's checkpoint; resumed, it equals the run that was left alone."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = ("my.toml", "--plan", "dp=2,zero=3", "--steps", "100", "--data")
    for folder in (whole, killed):
        folder.mkdir()
        write(folder, "text")
    need_trained(whole, train(whole, *arguments, "poem.txt"), "text", 100)
    (killed / "my.toml").write_text(CONFIG)
    job = subprocess.Popen(
        [*SOLI, "train", *arguments, "poem.txt"],
        cwd=killed,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=clean_environment(),
    )
    until = time.monotonic() + 60
    while not list(killed.glob("runs/*/checkpoints/000050/manifest.json")):
        assert job.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)
    kill_all(job.pid)
    job.wait()
    run = the_run(killed)
    done = train(killed, "--resume", str(run))
    assert done.returncode == 0, done.stderr
    expected = {row["step"]: row["loss"] for row in metrics(the_run(whole)) if row["kind"] == "train"}
    rows = [row for row in metrics(run) if row["kind"] == "train"]
    assert {row["step"]: row["loss"] for row in rows} == expected
    assert len(rows) == len(expected) == 100
    a, b = (json.loads((path / "summary.json").read_text()) for path in (the_run(whole), run))
    assert a["validation"] == b["validation"]
    assert (the_run(whole) / "sample.txt").read_text() == (run / "sample.txt").read_text()
    before = (run / "config.toml").read_text()
    done = train(killed, "--resume", str(run), "--plan", "dp=2", "--seed", "9", "--name", "other")
    assert (done.returncode, *(f"has the {key} that it began with" in done.stderr for key in ("seed", "name"))) == (2, True, True), done.stderr
    assert (run / "config.toml").read_text() == before
    done = train(killed, "--resume", str(run), "--plan", "dp=2", "--steps", "110")
    assert done.returncode == 0, done.stderr  # on to more steps, under another plan
    assert metrics(run)[-1]["step"] == 110
    config = settings.load(run / "config.toml")
    rates = {row["step"]: row["lr"] for row in metrics(run) if row["kind"] == "train" and row["step"] > 100}
    schedule = Schedule(config.optim.warmup, 110, config.optim.floor)
    assert rates == pytest.approx({step: config.optim.lr * schedule(step - 1) for step in range(101, 111)})
    counted = {row["tokens"] for row in metrics(run) if row["kind"] == "train"}
    assert len(counted) > 1  # the last batch of an epoch has fewer
    done = train(killed, "--resume", str(killed / "runs" / "none"))
    assert (done.returncode, "there is no run to resume" in done.stderr) == (2, True)
    (run / "checkpoints" / "000110" / "manifest.json").unlink()  # it went on from the one before, and stopped at step 110, where this was in its way
    done = train(killed, "--resume", str(run), "--steps", "120")
    assert (done.returncode, "later checkpoints are not whole" in done.stderr, "got     000110" in done.stderr) == (2, True, True), done.stderr


def kill_all(launcher: int) -> None:
    """The launcher and its ranks, which have sessions of their own, all at once."""
    import psutil

    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)
