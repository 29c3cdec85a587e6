"""What is given wrongly, or of a strange form: refused with words, or taken as it is meant."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pool import Pool
from soli import losses, parallelize
from soli.bugs.classification import classifier
from soli.bugs.github import _begun
from soli.bugs.selection import rules
from soli.cli.train import check
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine import auto
from soli.train import tokens
from soli.train.config import Config, Data, Tokenizer
from soli.train.corpus import documents


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


BATCH = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), "y": torch.arange(8) % 3}


def engine(**more: Any) -> Any:
    return parallelize(Net(), losses.cross_entropy("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **{"plan": "dp=1", **more})


# --- plans, seeds, losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[]", "3", "null", '[["tp", 2]]'])
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(SoliError, match="a plan is an object of keys and values"):
        Plan.from_json(text)


@pytest.mark.parametrize("wrong", [{"tp": 1.5}, {"dp": 1.0}, {"accumulate": True}, {"sp": "no"}, {"sp": 1}, {"tp": None}, {"tp": "2"}, {"recompute": 0.5}])
def test_values_of_another_type_are_no_plan(wrong: dict[str, Any]) -> None:
    with pytest.raises(SoliError, match=f"'{next(iter(wrong))}' of the plan is of another type"):
        Plan(**wrong)
    assert Plan(dp=None) == Plan()


def test_any_whole_number_is_a_seed() -> None:
    rows = [{name: x[i] for name, x in BATCH.items()} for i in range(8)]
    orders = []
    for seed in (3, 2**45, 2**63 + 3, torch.default_generator.initial_seed()):
        made = engine(seed=seed)
        orders.append([batch.data["x"].sum().item() for batch in made.batches(rows, 2, epochs=1)])
    assert orders[0] != orders[1]
    assert all(len(order) == 4 for order in orders)
    for seed in ("a", 1.5, None):
        with pytest.raises(SoliError, match="seed is a whole number"):
            engine(seed=seed)


def test_a_norm_is_of_gradients() -> None:
    with pytest.raises(SoliError, match="gradient_norm"):
        engine().gradient_norm()


def test_a_mean_square_is_of_a_tensor() -> None:
    with pytest.raises(SoliError, match="the model's output is no tensor"):
        losses.mse("y")((torch.zeros(3),), {"y": torch.zeros(3)})


def not_finite(plan: str) -> str:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide = nn.Linear(4, 4000)
            self.bad = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(x)[:, :4] + torch.sqrt(self.bad)  # whose gradient is infinite at 0

    made = parallelize(Root(), losses.mse("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan, clip=1.0)
    with pytest.raises(SoliError) as refused:
        made.step({"x": torch.randn(8, 4), "y": torch.randn(8, 4)})
    return str(refused.value)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_a_gradient_that_is_not_finite_is_named_by_all(pool: Pool, plan: str) -> None:
    """Where one rank has its part, the others' words said "no parameter", and one of them is printed."""
    said = pool.run(not_finite, plan, ranks=2)
    assert len(set(said)) == 1
    assert "of bad" in said[0]


def test_what_a_plan_took_more_in_its_one_trial_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "trial", lambda program, plan, world, steps: (0.01, 2e9))
    monkeypatch.setattr(auto, "free_memory", lambda *_: 10e9)
    made = engine(plan="auto", example=BATCH, rows=8)
    made.step(BATCH)
    assert any("took 2.00 GB" in line or "took 2 GB" in line or "took 2.0 GB" in line for line in made.choice.lines), made.choice.lines


# --- launchers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK is no number"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "LOCAL_RANK is no number"),
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "5"}, "not SLURM_JOB_NODELIST"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "two"}, "SLURM_NTASKS is no number|not SLURM"),
    ],
)
def test_variables_of_a_launcher_that_are_not_there_or_no_numbers(given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from soli.mesh.world import join

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SOLI_JOB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SoliError, match=said):
        join()


def test_env_lists_a_backend_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLI_BACKEND", "foo")
    done = subprocess.run([sys.executable, "-m", "soli", "env", "--json"], capture_output=True, text=True)
    assert "foo" in json.dumps(json.loads(done.stdout)["problems"]), done.stderr


@pytest.mark.parametrize("model", ["vit:classes=10,dim=10,heads=3", "bert:vocab=100,dim=10,heads=3", "llama:vocab=100,dim=12,heads=4"])
def test_sizes_that_a_model_cannot_have(model: str) -> None:
    command = [sys.executable, "-m", "soli", "plan", model, "--cluster", "h100:8", "--global-batch", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot have these sizes" in done.stderr


# --- data of the main job ---------------------------------------------------------------------------------


def test_settings_are_apart_in_the_key_of_what_is_kept(tmp_path: Path) -> None:
    """296 and 14.0, and 2961 and 4.0, were one text."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of words {i * i}" for i in range(300)), encoding="utf-8")
    apart = [(0.05, 296, 14.0), (0.05, 2961, 4.0)]
    assert len({tokens.prepare(_settings(text, *one), tmp_path / "cache", lambda _: None).key for one in apart}) == 2


def _settings(text: Path, validation: float, vocab: int, size: float) -> Config:
    return Config(data=Data(path=str(text), validation=validation), tokenizer=Tokenizer(vocab=vocab, sample_megabytes=size))


@pytest.mark.parametrize(("size", "said"), [(0, None), (-1, "bytes")])
def test_bytes_of_a_token_file_are_known_or_not(size: int, said: str | None, tmp_path: Path) -> None:
    for part, count in (("train", 4000), ("validation", 300)):
        np.random.default_rng(0).integers(1, 60, count).astype("<u2").tofile(tmp_path / f"{part}.bin")
        (tmp_path / f"{part}.json").write_text(json.dumps({"dtype": "uint16", "vocab": 64, "bytes": size}))
    if said:
        with pytest.raises(SoliError, match="a whole number, 0 or more"):
            tokens._opened(tmp_path, 0.05)
    else:
        assert tokens._opened(tmp_path, 0.05).validation.bytes is None


@pytest.mark.parametrize(
    ("more", "said"), [({"kind": "text"}, "cannot be read"), ({"pattern": ""}, "no pattern"), ({"pattern": "/etc/*"}, "no pattern"), ({"pattern": "**a"}, "no pattern|no file")]
)
def test_folders_and_patterns_that_cannot_be_read(more: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(SoliError, match=said):
        list(documents(Data(path=str(tmp_path), **more)))


# --- bugs -------------------------------------------------------------------------------------------------


def test_an_export_that_cannot_be_written_anew_is_there_still(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    rows = [json.dumps({"number": n, "title": "x" * 200}) for n in range(2000)]
    out.write_text("\n".join([json.dumps({"repo": "a/b", "format": 1}), *rows, json.dumps({"cursor": "c"}), ""]), encoding="utf-8")
    before = out.read_bytes()
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as a disk that is full
    try:
        with pytest.raises(OSError, match="File too large"):
            _begun(out, "a/b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert out.read_bytes() == before


@pytest.mark.parametrize("rule", ['["x"]', "3", '"abc"'])
def test_rules_that_are_no_tables(rule: str, tmp_path: Path) -> None:
    from importlib.resources import files

    own = files("soli.bugs").joinpath("classification.toml").read_text(encoding="utf-8")
    file = tmp_path / "rules.toml"
    head, _, rest = own.partition("rules = [")
    file.write_text(f"{head}rules = {rule}\n{rest.partition(chr(10) + ']')[2]}", encoding="utf-8")
    with pytest.raises(SoliError, match="rules, which are tables"):
        classifier(file)
    selected = files("soli.bugs").joinpath("selection.toml").read_text(encoding="utf-8")
    head, _, rest = selected.partition("left_out = [")
    file.write_text(f'{head}left_out = "abc"\n{rest.partition("]")[2]}', encoding="utf-8")
    with pytest.raises(SoliError, match="'left_out' is a list of names"):
        rules(file)


def test_names_that_are_too_long_and_a_type_that_is_no_text(tmp_path: Path) -> None:
    for command, said in ((["plan", "x" * 300, "--cluster", "h100", "--global-batch", "8"], "the model cannot be read"), (["train", "--data", "x" * 300], "there is no such data")):
        done = subprocess.run([sys.executable, "-m", "soli", *command], capture_output=True, text=True)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    np.ones(8, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text(json.dumps({"dtype": ["uint16"], "vocab": 64}))
    with pytest.raises(SoliError, match="uint16, uint32"):
        tokens._opened(tmp_path / "a.bin", 0.05)


def test_the_main_job_takes_what_parallelize_takes() -> None:
    named = dict.fromkeys(("plan", "steps", "minutes", "data", "name", "seed"))
    check(2, None, None, named | {"plan": "auto=probe"})
    with pytest.raises(SoliError, match="auto=some"):
        check(2, None, None, named | {"plan": "auto=some"})
