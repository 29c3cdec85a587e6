"""`soli train --resume` in this process: rates, and settings that a run began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soli.core.errors import SoliError
from soli.parallel import precision
from soli.train import loop
from typed import soli

CONFIG = """
[model]
dim = 16
layers = 1
heads = 2
context = 16
[optim]
batch = 4
warmup = 6
[run]
sample_tokens = 0
save_every = 4
"""


def begun(folder: Path, plan: str, steps: int) -> Path:
    """The directory of a run that was trained on a few tokens."""
    for name, count in (("train", 1000), ("validation", 100)):
        (folder / f"{name}.bin").write_bytes((np.arange(count, dtype="<u2") * 7 % 50).tobytes())
        (folder / f"{name}.json").write_text(json.dumps({"dtype": "uint16", "vocab": 50}))
    config = folder / "my.toml"
    config.write_text(f'{CONFIG}folder = "{folder}/runs"\n')
    loop.main(config, plan=plan, steps=steps, data=str(folder))
    (run,) = (folder / "runs").glob("*/")
    return run


def rates(run: Path) -> dict[int, float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["lr"] for row in rows if row["kind"] == "train"}


def test_a_run_that_skipped_its_steps_goes_on_with_the_rate_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = precision.LossScale
    monkeypatch.setattr(precision, "LossScale", lambda: large(2.0**40))  # every step overflows
    run = begun(tmp_path, "dp=1,precision=fp16", 4)
    loop.main(resume=run, steps=6)
    assert len(rates(run)) == 6
    assert len(set(rates(run).values())) == 1


def test_what_a_run_began_with_is_known_when_its_file_was_edited(tmp_path: Path) -> None:
    run = begun(tmp_path, "dp=1", 4)
    file = run / "config.toml"
    text = file.read_text()
    model = {"dim = 16": "dim = 32", "dropout = 0.0": "dropout = 0.5"}
    for edits in (model, {"clip = 1.0": "clip = 0.5", "warmup = 6": "warmup = 3"}):
        changed = text
        for old, new in edits.items():
            assert old in changed
            changed = changed.replace(old, new)
        file.write_text(changed)
        with pytest.raises(SoliError) as caught:
            loop.main(resume=run, steps=6)
        said = "a run that is resumed has the {} that it began with"
        assert {p.what for p in caught.value.problems} == {said.format(line.split(" = ")[0]) for line in edits}
    file.write_text(text)
    assert loop.main(resume=run, steps=5)["steps"] == 5


def test_a_run_that_is_through_and_resumed_says_its_last_loss_once(tmp_path: Path) -> None:
    run = begun(tmp_path, "dp=1", 4)
    before = (run / "metrics.jsonl").read_text()
    loop.main(resume=run)
    assert (run / "metrics.jsonl").read_text() == before


def test_a_run_that_another_job_goes_on_with_is_left_alone(tmp_path: Path) -> None:
    """Its metrics would be the other's, and the rest of them in no file. Here the other one is this process, which has begun it."""
    run = begun(tmp_path, "dp=1", 4)
    rows = (run / "metrics.jsonl").read_text()
    done = soli("train", "--resume", str(run), "--steps", "6", "-n", "1")
    assert done.returncode == 2
    assert f"another job goes on with this run\n    got     {run}" in done.stderr
    assert (run / "metrics.jsonl").read_text() == rows
    assert loop.main(resume=run, steps=6)["steps"] == 6
