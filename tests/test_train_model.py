"""The GPT of `models/gpt.py`, and what a run writes about itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from soli.core.errors import SoliError
from soli.mesh.world import World
from soli.models.gpt import GPT, GPTConfig, generate
from soli.train import picture, rundir, settings, tokens
from soli.train.agree import from_rank_0
from soli.train.config import Config
from soli.train.log import Log, clock

TINY = GPTConfig(vocab=50, dim=16, layers=2, heads=2, context=8)


def made(config: GPTConfig = TINY, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def test_shapes_and_the_loss_at_the_start() -> None:
    model = made()
    out = model(torch.randint(50, (3, 7)))
    assert out.shape == (3, 7, 50)
    loss = F.cross_entropy(out.flatten(0, 1), torch.randint(50, (21,)))
    assert loss.item() == pytest.approx(math.log(50), abs=0.15)  # knows nothing yet
    with pytest.raises(ValueError, match="9 tokens"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="divide"):
        GPT(replace(TINY, heads=3))


def test_no_position_sees_what_comes_after() -> None:
    model = made().eval()
    a = torch.randint(50, (1, 8))
    b = a.clone()
    b[0, 5:] = (b[0, 5:] + 1) % 50
    torch.testing.assert_close(model(a)[:, :5], model(b)[:, :5])
    assert not torch.allclose(model(a)[:, 5:], model(b)[:, 5:])


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = made().state_dict(), made().state_dict(), made(seed=1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    deep = made(replace(TINY, dim=128, layers=8)).blocks[0]
    assert float(deep.mlp.down.weight.std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(deep.mlp.up.weight.std()) == pytest.approx(0.02, rel=0.05)


def test_tied_and_untied() -> None:
    tied, untied = made(), made(replace(TINY, tied=False))
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 50 * 16
    copy = made(seed=1)
    copy.load_state_dict(tied.state_dict())
    assert torch.equal(copy.head.weight, tied.embedding.weight)


def test_dropout_acts_in_training_alone() -> None:
    model = made(replace(TINY, dropout=0.5))
    x = torch.randint(50, (2, 8))
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_generate() -> None:
    model = made().train()
    out = generate(model, [1, 2], 20, temperature=1.0, seed=3)
    assert len(out) == 20
    assert all(0 <= token < 50 for token in out)
    assert out == generate(model, [1, 2], 20, temperature=1.0, seed=3)
    assert out != generate(model, [1, 2], 20, temperature=1.0, seed=4)
    assert generate(model, [1], 1, temperature=0) == [int(model(torch.tensor([[1]]))[0, -1].argmax())]
    assert model.training
    with pytest.raises(ValueError, match="at least one"):
        generate(model, [], 3)


def test_a_run_directory_and_its_metrics(tmp_path: Path) -> None:
    config = replace(Config(), run=replace(Config().run, folder=str(tmp_path), name="my run!"))
    (beside := tmp_path / "a file").write_text("")
    with pytest.raises(SoliError, match="the operating system refused to make"):  # as on a disk that is read-only
        rundir.create(replace(config, run=replace(config.run, folder=str(beside / "runs"))))
    folder, other = rundir.create(config), rundir.create(config)
    assert folder != other
    assert folder.name.endswith("-my-run")
    log = Log(folder, 0, 2, 3, 0)
    for step in (1, 2, 3):
        log.step(step, 5.0 - step, 100, 1e-3, 0.5)
    log.look(2, 3.5, 4, None)
    log.close()
    Log(folder, 1, 2, 3, 0).step(9, 1.0, 1, 1.0, None)  # rank 1 writes nothing
    rows = rundir.read_metrics(folder)
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("train", 1), ("train", 2), ("train", 3), ("validation", 2),
    ]  # fmt: skip
    assert rows[0]["loss"] == 4.0
    with (folder / rundir.METRICS).open("a") as file:
        file.write('{"kind": "tr')  # a killed run
    rundir.forget_after(folder, 2)
    assert [row["step"] for row in rundir.read_metrics(folder)] == [1, 2, 2]
    assert any((folder / "tensorboard").iterdir())
    picture.draw(rows, 4.5, "title", folder / "loss.png")
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_is_begun_with_its_records_and_resumed_on_the_same_data(tmp_path: Path) -> None:
    for name in ("text", "run"):
        (tmp_path / name).mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i}")
    config = Config()
    config = replace(
        config,
        data=replace(config.data, path=str(tmp_path / "text"), validation=0.3),
        tokenizer=replace(config.tokenizer, vocab=257),
    )
    run = tmp_path / "run"
    with pytest.raises(SoliError, match="no run to resume"):
        rundir.existing(run)
    rundir.begin(run, config, tokens.prepare(config, tmp_path / "cache", print))
    assert rundir.existing(run) == run
    assert settings.load(run / rundir.CONFIG) == config
    assert json.loads((run / "env.json").read_text())["torch"] == torch.__version__
    tokens.load_tokenizer(run / "tokenizer.json")
    rundir.begin(run, config, tokens.prepare(config, tmp_path / "cache", print))
    assert len(list(run.glob("env*.json"))) == 2
    (tmp_path / "text" / "3.txt").write_text("another")
    with pytest.raises(SoliError, match="not what this run began with"):
        rundir.begin(run, config, tokens.prepare(config, tmp_path / "cache", print))


def test_small_words() -> None:
    assert [clock(s) for s in (-3, 5, 75, 3700)] == ["0:00", "0:05", "1:15", "1:01:40"]
    assert picture.smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    world = World(0, 1, torch.device("cpu"), "single", 10.0)
    assert from_rank_0(world, lambda: {"a": 1}, "x") == {"a": 1}
