"""Settings: everything wrong is told at once; what is written reads back; sizes, schedule, step count."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from soli.core.errors import SoliError
from soli.train import settings
from soli.train.config import Config
from soli.train.schedule import MEASURED_TO, Schedule, due, steps_that_fit
from soli.train.size import sized

WRONG = """
seed = 3
[modle]
dim = 64
[model]
dim = 100
heads = 3
layers = "four"
tied = 1
[optim]
learning_rate = 0.1
warmpu = 30
lr = -1.0
beta1 = nan
[data]
kind = "jsnl"
validation = 0.9
[run]
plan = "dp=2,zeor=1"
"""


def test_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(WRONG)
    with pytest.raises(SoliError) as caught:
        settings.load(path)
    text = str(caught.value)
    assert len(caught.value.problems) == 12
    for words in (
        "seed stands outside a table",
        "put it under [run]",
        "did you mean 'model'?",
        "model.layers has the wrong type",
        "model.tied has the wrong type",
        "unknown setting optim.learning_rate",
        "did you mean 'warmup'?",
        "optim.lr is out of range",
        "0 to 1",
        "optim.beta1 is out of range",
        "did you mean 'jsonl'?",
        "data.validation is out of range",
        "model.dim does not divide into model.heads",
        "no key 'zeor'",
    ):
        assert words in text, words
    assert str(path) in text
    assert caught.value.everywhere
    assert caught.value.exit_code == 2


def test_a_broken_or_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[run\nsteps = 3")
    with pytest.raises(SoliError, match="is not TOML") as caught:
        settings.load(path)
    assert "line 1" in str(caught.value)
    with pytest.raises(SoliError, match="no such configuration file"):
        settings.load(tmp_path / "other.toml")
    with pytest.raises(SoliError, match="folder is no folder"):
        settings.load(None, {"run.folder": str(path / "runs")})
    path.write_text("[modle]")
    with pytest.raises(SoliError, match=r"unknown table \[modle\]"):
        settings.load(path)


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[run]\nsteps = 3\nseed = 5\n[optim]\nlr = 1\n")
    config = settings.load(path, {"run.steps": 7, "run.seed": None, "run.name": "12", "optim.clip": 0})
    assert (config.run.steps, config.run.seed, config.run.name) == (7, 5, "12")
    assert (config.optim.lr, config.optim.clip) == (1.0, 0.0)
    assert isinstance(config.optim.lr, float)
    with pytest.raises(SoliError) as caught:
        settings.load(None, {"run.steps": -1, "run.stepz": 3})
    assert len(caught.value.problems) == 2


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    config = Config()
    odd = 'a "b" \\ \n\t\x7f é 🎼 # c'
    config = replace(config, run=replace(config.run, prompt=odd, name="x"), optim=replace(config.optim, lr=1e-5))
    settings.write(config, path)
    assert settings.load(path) == config
    assert path.read_text().count("#") >= sum(len(fields(getattr(config, t.name))) for t in fields(config))


def test_sizes_grow_with_the_machine_and_keep_what_is_said() -> None:
    small, line = sized(Config(), 2, 0)
    large, _ = sized(Config(), 64, 8)
    assert (small.model.dim, small.model.layers, small.model.heads) == (128, 4, 4)
    assert "2 cores" in line
    assert large.model.dim > 2 * small.model.dim
    assert large.optim.lr < small.optim.lr
    for config in (small, large):
        assert config.model.dim % config.model.heads == 0
        assert sized(config, 4, 0)[0] == config  # a resolved configuration is resolved
    said = settings.load(None, {"model.heads": 5, "model.layers": 3})
    model = sized(said, 2, 0)[0].model
    assert (model.heads, model.layers, model.dim % 5) == (5, 3, 0)


def test_the_warm_up_does_not_depend_on_the_steps() -> None:
    late, told = Schedule(20, 0, 0.1), Schedule(20, 500, 0.1)
    assert [late(i) for i in range(MEASURED_TO)] == [told(i) for i in range(MEASURED_TO)]
    late.steps = 500
    assert [late(i) for i in range(501)] == [told(i) for i in range(501)]
    assert told(0) == 1 / 20
    assert told(20) == 1.0
    assert told(500) == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(map(told, range(20, 500)), map(told, range(21, 501)), strict=True))
    with pytest.raises(SoliError, match="warmup is too short"):
        settings.load(None, {"optim.warmup": MEASURED_TO - 1})


def test_steps_that_fit() -> None:
    quick = steps_that_fit([9.0, 9.0] + [0.1] * 10, 112.0, 0, 16)
    assert quick == pytest.approx(920, abs=1)  # (112 - 12) * 0.92 / 0.1; the slow first two do not count
    assert steps_that_fit([9.0, 9.0] + [0.1] * 10, 112.0, 1600, 16) == pytest.approx(920 - 50, abs=1)
    assert steps_that_fit([1.0] * 12, -5.0, 100, 16) == 1


@pytest.mark.parametrize(("steps", "times"), [(100, 10), (103, 10), (7, 10), (1, 2), (5, 2)])
def test_due_counts_as_often_as_asked_and_at_the_end(steps: int, times: int) -> None:
    days = [step for step in range(1, steps + 1) if due(step, steps, 0, times)]
    assert len(days) == min(times, steps)
    assert days[-1] == steps
    assert [s for s in range(1, 8) if due(s, 7, 3, 99)] == [3, 6, 7]


def test_what_is_wrong_by_itself_is_not_told_of_its_default_too(tmp_path: Path) -> None:
    """0 steps stood in the place of -1, and were told to be too few."""
    with pytest.raises(SoliError) as refused:
        settings.load(None, {"run.steps": -1, "run.seed": 2**40})
    assert [problem.what for problem in refused.value.problems] == ["run.steps is out of range", "run.seed is out of range"]
    assert "0 to 2147483647" in str(refused.value)


def test_a_list_of_tables_is_told_how_a_table_is_written(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[[data]]\npath = "x"\n')
    with pytest.raises(SoliError, match=r"put it under \[data\]"):
        settings.load(tmp_path / "c.toml")


def test_a_name_that_is_no_text_is_named_before_anything_is_written(tmp_path: Path) -> None:
    """As a shell gives bytes that are not UTF-8."""
    with pytest.raises(SoliError) as told:
        settings.load(None, {"data.path": "caf\udce9.txt", "run.name": "a\udcff", "run.folder": str(tmp_path)})
    assert [problem.what for problem in told.value.problems] == [f"{name} is no text that a file of settings can hold" for name in ("data.path", "run.name")]
