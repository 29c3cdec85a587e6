"""The command line, as a process where its exit code or its imports matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import soli as soli_package
from soli.core.package import SOLI
from soli.core.plan import Plan
from typed import soli, soli_anew


def test_neither_help_nor_the_launcher_imports_torch() -> None:
    modules = "soli.cli.main, soli.mesh.launch.local, soli.mesh.launch.rank"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_help_names_every_verb() -> None:
    done = soli("--help")
    assert done.returncode == 0
    for verb in ("run", "train", "plan", "roles", "env", "checkpoint"):
        assert f" {verb} " in done.stdout


@pytest.mark.parametrize("form", ["text", "toml", "json"])
def test_plan_prints_what_can_be_read_back(form: str) -> None:
    done = soli("plan", "zero=3", "-n", "4", "--format", form)
    read = {"text": Plan.parse, "toml": Plan.from_toml, "json": Plan.from_json}[form]
    assert read(done.stdout.strip()) == Plan(dp=4, zero=3)


def test_a_plan_that_cannot_be_is_a_mistake() -> None:
    done = soli("plan", "dp=3", "-n", "4")
    assert done.returncode == 2
    assert "the plan takes 3 ranks and 4 are there" in done.stderr
    assert "Traceback" not in done.stderr
    assert soli("plan", "auto", "-n", "4").stdout == "dp=4\n"


def test_train_refuses_all_mistakes_at_once_before_a_rank_starts(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(f"[run]\nfolder = {json.dumps(str(tmp_path / 'runs'))}\nstepz = 3\n")
    done = soli("train", str(config), "--plan", "dp=3", "--seed", "-1", "-n", "2")
    assert done.returncode == 2
    for problem in ("unknown setting run.stepz", "run.seed is out of range", "the plan takes 3 ranks and 2 are"):
        assert done.stderr.count(problem) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_train_checks_the_plan_of_the_file_and_prints_a_problem_once(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text('[run]\nplan = "dp=3"\n[optim]\nbatch = 2\n')
    done = soli("train", str(config), "-n", "2")
    assert (done.returncode, done.stderr.count("takes 3 ranks")) == (2, 1)
    done = soli("train", str(config), "-n", "3")
    assert (done.returncode, done.stderr.count("batch 2, dp=3"), "ranks; rank 0" in done.stdout) == (2, 1, False)
    done = soli("train", "--plan", "zeroo=3", "-n", "2")
    assert (done.returncode, done.stderr.count("no key 'zeroo'")) == (2, 1)


def test_it_says_its_version() -> None:
    assert soli("--version").stdout == f"soli {SOLI}\n"


def test_train_trains(tmp_path: Path) -> None:
    """Two ranks, three steps; and a mistake that only a rank can find is printed once, without traceback."""
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} a rose is a rose is a rose. " * 60)
    config = tmp_path / "my.toml"
    config.write_text(
        f"[run]\nfolder = {json.dumps(str(tmp_path / 'runs'))}\nsample_tokens = 0\n"
        "[model]\ndim = 16\nlayers = 1\nheads = 2\ncontext = 16\n"
        "[tokenizer]\nvocab = 300\n[data]\nvalidation = 0.3\n[optim]\nbatch = 4\nwarmup = 1\n"
    )
    done = soli("train", str(config), "--steps", "3", "--data", str(tmp_path / "text"), "--plan", "zero=1")
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in (tmp_path / "runs").iterdir() if (path / "summary.json").exists()]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["ranks"]) == (3, 2)
    for data in ("", str(tmp_path / "none")):
        done = soli("train", str(config), "--steps", "3", "--data", data)
        assert (done.returncode, done.stderr.count("soli: "), "there is no such data" in done.stderr) == (2, 1, True)  # before ranks are started
    (tmp_path / "bad.txt").write_bytes(b"a rose \xff")
    done = soli("train", str(config), "--steps", "3", "--data", str(tmp_path / "bad.txt"))
    assert done.returncode == 2
    assert done.stderr.count("soli: ") == 2  # where the logs are, and the report
    assert f"{tmp_path / 'bad.txt'} is not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {run.name, "tokens"}  # no folder of a run that was none


@pytest.mark.parametrize("arguments", [("hardware",), ("hardware", "--json"), ("plan", "llama-3-8b", "--cluster", "h100:8", "--global-batch", "64")])
def test_an_output_that_is_full_or_closed_is_no_traceback(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "soli", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "soli: the output cannot be written: no space is left there\n")
    closed = subprocess.Popen([sys.executable, "-m", "soli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    closed.stdout.close()
    assert (closed.stderr.read(), closed.wait(60)) == ("", 1)


@pytest.mark.parametrize(("closed", "out", "err"), [((1,), "", "rank 0 is shown"), ((2,), "0 of 2", ""), ((1, 2), "", "")])
def test_an_output_that_was_never_open_ends_nothing(tmp_path: Path, closed: tuple[int, ...], out: str, err: str) -> None:
    """As by >&- and 2>&-."""
    script, ran = tmp_path / "script.py", tmp_path / "ran"
    script.write_text(f"import os, sys\nprint(os.environ['RANK'], 'of 2')\nsys.stdout.flush()\nsys.stderr.flush()\nif os.environ['RANK'] == '0':\n    open({str(ran)!r}, 'w')\n")
    done = subprocess.run(
        [sys.executable, "-m", "soli", "run", "-n", "2", str(script)], capture_output=True, text=True, timeout=60, preexec_fn=lambda: [os.close(one) for one in closed]
    )  # fmt: skip
    assert (done.returncode, ran.exists()) == (0, True)
    assert out in done.stdout
    assert err in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_ranks_is_an_object_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "soli", "calibrate", "-n", "2", "--json"], capture_output=True, text=True, timeout=60, env={**os.environ, "SOLI_CACHE": str(tmp_path / "file")}
    )  # fmt: skip
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["problems"][0]["what"] == "what is measured of this machine cannot be kept"
    assert done.stderr.count("cannot be kept") == 1


def test_env_says_what_works_and_what_does_not() -> None:
    facts = json.loads(soli("env", "--json").stdout)
    assert facts["gloo"].startswith("works")
    assert facts["local"].startswith("works")
    assert facts["CPU ranks talk over"] == "local (ranks of one machine meet in shared memory, hosts over gloo)"
    assert facts["torch"].startswith(torch.__version__)
    assert facts["packages"]["torch"] == version("torch")
    assert facts["soli"] == version("soli") == SOLI
    assert {"scipy", "transformers", "openai"} <= facts["packages"].keys()
    assert "pytest" not in facts["packages"]
    assert any(problem.startswith("CUDA") for problem in facts["problems"]) == (not torch.cuda.is_available())


def test_env_of_a_source_that_is_not_installed(tmp_path: Path) -> None:
    """All that is installed is there, and soli beside it in PYTHONPATH."""
    for path in Path(torch.__file__).parents[1].iterdir():
        if "soli" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "soli").symlink_to(Path(soli_package.__file__).parent)
    command = [sys.executable, "-S", "-m", "soli.cli.main", "env"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert f"{SOLI}, not installed" in done.stdout
    assert "- soli is run from its source and is not installed" in done.stdout


def test_env_tells_of_a_gloo_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is really made: an interface that is not there makes it fail, with the reason."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    done = soli("env")
    assert done.returncode == 0
    assert "gloo                   fails" in done.stdout
    assert "- gloo: a group of one rank fails: " in done.stdout


def test_checkpoint_verbs(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "in.safetensors")
    made, out = str(tmp_path / "checkpoint"), tmp_path / "out.safetensors"
    assert soli_anew("checkpoint", "import", str(tmp_path / "in.safetensors"), made).returncode == 0
    assert "2 x 3" in soli("checkpoint", "show", made).stdout
    assert soli("checkpoint", "check", made).returncode == 0
    assert soli("checkpoint", "export", made, str(out)).stdout.strip() == str(out)
    assert torch.equal(load_file(out)["w"], torch.arange(6.0).reshape(2, 3))
    data = next(path for path in Path(made).rglob("*.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    assert soli("checkpoint", "check", str(tmp_path)).returncode == 2
    done = soli("checkpoint", "check", made)
    assert done.returncode == 1
    assert data.name in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "dp=2,zerro=1", "-n", "2"], "did you mean 'zero'"),
        (["plan", "dp=2", "--format", "xml"], "text, toml, json"),
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["train", "--resume", "nowhere"], "there is no run to resume"),
        (["checkpoint", "show", "nowhere"], "nowhere"),
        (["run", "-n", "2", "--plan", "dp=2", "train.py"], "soli run has no such option"),
        (["plan", "llama-3-70b"], "Missing option '--cluster'"),
        (["plan", "zero", "-n", "2"], "'zero' in the plan has no value"),
        (["bugs", "report", "--db", "none.db", "--out", __file__], "a file"),
        (["bugs", "label", ".", "--labeller", " "], "a labeller has a name"),
    ],
)
def test_mistakes_have_exit_code_2_and_one_screen(arguments: list[str], words: str) -> None:
    done = soli(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") < 25
