"""The run directory: its name, what is written into it once, and what a resumed run finds there."""

import datetime
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import torch

from soli.checkpoint import latest, read_manifest
from soli.checkpoint.team import as_soli_error
from soli.core.errors import Problem, SoliError, on_all_ranks, raise_all
from soli.core.files import write_whole
from soli.core.package import SOLI
from soli.train import settings
from soli.train.config import Config, Model
from soli.train.tokens import Tokens

CONFIG, METRICS, DATA = "config.toml", "metrics.jsonl", "data.json"
SAVED = ("lr", "warmup", "floor", "beta1", "beta2", "weight_decay", "clip", *get_type_hints(Model), "seed", "name")
"""Settings of which a checkpoint is, or that it or its folder brings with it."""


def create(config: Config) -> Path:
    """Make `runs/<time>-<name>/` and return it. Two runs of one second get two directories."""
    name = config.run.name or Path(config.data.path).stem
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    stem = Path(config.run.folder) / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}"
    folder, number = stem, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = stem.with_name(f"{stem.name}-{number}")
        except OSError as error:
            raise as_soli_error(f"to make {folder}", error) from error


def existing(folder: Path) -> Path:
    """The run directory to resume; raises SoliError when it is none."""
    if not (folder / CONFIG).is_file():
        near = sorted(str(p.parent) for p in folder.parent.glob("*/config.toml"))[-3:]
        allowed = "a run directory, with config.toml in it"
        fix = f"the newest here: {', '.join(near)}" if near else "check the path"
        raise SoliError("there is no run to resume", got=folder, allowed=allowed, fix=fix)
    return folder


def begin(folder: Path, config: Config, tokens: Tokens) -> None:
    """Write what is known before the first step: configuration, environment, data, tokenizer.

    A resumed run writes its environment beside the first one's. Raises SoliError when the data it finds is
    not the data that it began with.
    """
    try:
        fcntl.lockf(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError as error:
        raise SoliError("another job goes on with this run", got=folder, fix="wait until it has ended") from error
    except OSError as error:  # of a file system without locks
        print(f"soli: {folder} cannot be locked ({error.strerror}): see that no other job goes on with this run", file=sys.stderr)
    data = {
        "key": tokens.key, "vocab": tokens.train.vocab, "train": str(tokens.train.path), "validation": str(tokens.validation.path),
        "tokens": [len(tokens.train), len(tokens.validation)],
    }  # fmt: skip
    record, env = folder / DATA, "env.json"
    if record.exists():
        before = json.loads(record.read_text(encoding="utf-8"))
        if (before["key"], before["tokens"]) != (data["key"], data["tokens"]):
            got = f"{config.data.path}: key {data['key']}, {data['tokens']} tokens"
            allowed = f"key {before['key']}, {before['tokens']} tokens"
            raise SoliError("the data is not what this run began with", got=got, allowed=allowed, fix="give the same data, or start a new run")
        env = f"env-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    else:  # a resumed run's is written when its checkpoint was read: what is refused changes nothing
        settings.write(config, folder / CONFIG)
    write_json(record, data)
    write_json(folder / env, environment())
    if tokens.tokenizer:
        shutil.copyfile(tokens.tokenizer, folder / "tokenizer.json")


def environment() -> dict[str, Any]:
    """What the run ran on, for env.json."""
    return {
        "command": sys.argv, "folder": os.getcwd(), "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "soli": SOLI,
        "revision": revision(), "python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda,
        "platform": platform.platform(), "host": platform.node(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }  # fmt: skip


def revision() -> str | None:
    """The git revision of the working folder, with `+` if files differ from it; None outside of git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        state = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if state.stdout.strip() else "") if head.returncode == 0 else None


def write_json(path: Path, data: object) -> None:
    write_whole(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that a killed run left half-written is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def forget_after(folder: Path, step: int) -> None:
    """Drop the metrics of steps after `step`, which a resumed run takes again, and what saves left half."""
    kept = [row for row in read_metrics(folder) if row["step"] <= step]
    write_whole(folder / METRICS, "".join(json.dumps(row) + "\n" for row in kept))
    for dead in (folder / "checkpoints").glob(".*.partial-*"):  # of a save that was killed
        shutil.rmtree(dead)


def configuration(config_path: Path | None, resume: Path | None, named: Mapping[str, object]) -> Config:
    """The configuration that a command line asks for: a TOML or a run's own, then what was said beside it."""
    if resume is not None and config_path is not None:
        raise on_all_ranks("--resume takes the configuration of the run", got=config_path, fix="leave one out")
    start = config_path if resume is None else existing(resume) / CONFIG
    said = {"data.path" if key == "data" else f"run.{key}": value for key, value in named.items()}
    config = settings.load(start, said)
    if resume is not None:
        newest = latest(resume / "checkpoints")
        # what its own file says may have been edited since
        saved: dict[str, Any] = read_manifest(newest).state if newest else {"extra": {}, "step": -1}
        began, later = saved.get("extra", {}).get("config"), sorted(place.name for place in (resume / "checkpoints").glob("[0-9]*") if place.name.isdigit())
        if odd := [name for name in later if newest and int(name) > saved.get("step", -1)]:
            fix = f"remove them, and the run goes on from step {saved.get('step', -1)}; or mend them"
            raise on_all_ranks("later checkpoints are not whole, and in the way of those that this run would save", got=", ".join(odd), fix=fix)
        flat = lambda one: {**one["optim"], **one["model"], "seed": one["run"]["seed"], "name": one["run"]["name"]}
        then, now = flat(began or asdict(settings.load(start))), flat(asdict(config))
        what, differ = "a run that is resumed has the {} that it began with", [k for k in SAVED if then[k] != now[k]]
        raise_all(Problem(what.format(k), str(now[k]), str(then[k]), "start a new run") for k in differ)
    return config
