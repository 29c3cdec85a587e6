"""What users give the engine: batches, datasets, optimizers, checkpoints, and what is wrong with them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from cases import CASES
from noted import noted
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from soli.verify.parity import BOUND, Case, check
from sweep import spread, swept
from test_engine import DATA, Named, engine_for
from test_launch import clean_environment

# --- datasets and batches ---------------------------------------------------------------------------------


class Mapped(Dataset):
    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, i: int):
        return DATA[i]


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(DATA)


SOURCES = {
    "list": lambda: (DATA, {}),
    "dataset": lambda: (Mapped(), {}),
    "stream": lambda: (Streamed(), {}),
    "anything that iterates": lambda: ({i: d for i, d in enumerate(DATA)}.values(), {}),
}


def rows(source: str):
    engine = engine_for("dp=2,zero=1")
    dataset, options = SOURCES[source]()
    parts = list(engine.batches(dataset, 6, shuffle=False, **options))
    return [part.data["x"] for part in parts], [part.total for part in parts]


@pytest.mark.parametrize("source", SOURCES)
def test_a_rank_loads_its_own_rows_of_any_source(pool: Pool, source: str) -> None:
    parts = pool.run(rows, source, ranks=2)
    assert parts[0][1] == parts[1][1] == [6, 6, 6, 5]
    rebuilt = torch.cat([torch.cat(pair) for pair in zip(parts[0][0], parts[1][0], strict=True)])
    assert torch.equal(rebuilt, torch.stack([d["x"] for d in DATA]))


SCRIPT = """
import soli, torch

class Mapped(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, i):
        assert torch.utils.data.get_worker_info() is not None
        return torch.tensor([float(i)]), torch.tensor([0.0])

engine = soli.parallelize(
    torch.nn.Linear(1, 1), soli.losses.mse(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=2"
)
for part in engine.batches(Mapped(), 4, shuffle=False, workers=2):
    engine.step(part)
    print("rows", engine.step_count, part.start, part.data[0].flatten().tolist(), flush=True)
"""


def test_workers_load_the_samples(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "soli.cli.main", "run", "-n", "2", "--all-ranks", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=clean_environment())
    assert done.returncode == 0, done.stderr
    found = sorted(line[line.index("rows") :] for line in done.stdout.splitlines() if "rows" in line)
    assert found == [
        "rows 1 0 [0.0, 1.0]",
        "rows 1 2 [2.0, 3.0]",
        "rows 2 0 [4.0, 5.0]",
        "rows 2 2 [6.0, 7.0]",
        "rows 3 0 [8.0, 9.0]",
        "rows 3 2 [10.0]",
    ]


def caught(call, *args, **options) -> tuple[str, int]:
    try:
        call(*args, **options)
    except SoliError as error:
        return str(error), error.exit_code
    return "", 0


def too_small():
    engine = engine_for("dp=4")
    one = {"x": torch.randn(3, 5), "targets": torch.zeros(3, 3)}
    ragged = {"x": torch.randn(3, 5), "targets": torch.zeros(4, 3)}
    return [
        caught(engine.step, one),
        caught(engine.batches, DATA, 3),
        caught(engine.batches, [], 4),
        caught(engine.batches, Streamed(), 4),
        caught(engine.step, ragged),
        caught(engine.step, {"y": torch.randn(4, 5), "targets": torch.zeros(4, 3)}),
        caught(engine.step, {"x": "words"}),
    ]


def test_batches_that_cannot_be(pool: Pool) -> None:
    for found in pool.run(too_small, ranks=4):
        for (text, code), words in zip(
            found,
            [
                "3 rows, dp=4",
                "global_batch=3, dp=4",
                "the dataset is empty",
                "pass shuffle=False",
                "x: 3, targets: 4",
                "needs 'x' and the batch has no such entry",
                "no tensor with rows",
            ],
            strict=True,
        ):
            assert words in text.replace("['", "").replace("']", ""), text
            assert code == 2


# --- optimizers -------------------------------------------------------------------------------------------


def grouped(params):
    params = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


OPTIMIZERS = {
    "groups": grouped,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def optimizer_row(name: str, case: str, plan: str, ranks: int):
    chosen = CASES[case]
    return check(Case(case, chosen.make, OPTIMIZERS[name], chosen.clip), plan, ranks)


@pytest.mark.parametrize(
    ("name", "plan", "ranks"), spread([(name,) for name in OPTIMIZERS], [("dp=2,zero=1", 2), ("dp=3,zero=3", 3)])
)
def test_optimizers_equal_the_sequential_ones(pool: Pool, name: str, plan: str, ranks: int) -> None:
    for case in ("gpt", "odd"):
        for row in pool.run(optimizer_row, name, case, plan, ranks, ranks=ranks):
            assert row.worst <= BOUND, row


def instance(plan: str, as_instance: bool):
    made = Named()
    build = lambda p: torch.optim.AdamW(p, lr=1e-2)
    engine = parallelize(
        made, losses.mse("targets"), optimizer=build(made.parameters()) if as_instance else build, plan=plan
    )
    return [float(engine.step(batch)) for batch in engine.batches(DATA, 6)]


def test_an_optimizer_may_be_an_instance_on_the_plain_model(pool: Pool) -> None:
    a = pool.run(instance, "dp=2,zero=3", True, ranks=2)
    b = pool.run(instance, "dp=2,zero=3", False, ranks=2)
    assert a == b
    assert a[0][-1] < a[0][0]


class Scaled(Named):
    """A parameter without dims, whose gradient is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.net(x).square() * self.scale


def scaled(plan: str, path: str, save: bool):
    engine = parallelize(
        Scaled().double(), losses.mse("targets"), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), plan=plan
    )
    if not save:
        engine.load(path)
        return engine.global_state_dict(optimizer=True)
    for _ in range(3):
        engine.step({"x": torch.ones(4, 5).double(), "targets": 9 * torch.ones(4, 3).double()})
    engine.save(path)
    return engine.global_state_dict(optimizer=True)


class Casting(Named):
    """Its loss is of float32, whatever it is given."""

    def forward(self, x, coupled):
        out = self.net(x).float()
        return out + 1e-2 * out.mean(0) * coupled[0].float()


@pytest.mark.parametrize("coupled", [False, True])
def test_losses_of_float32_add_up_in_float64(coupled: bool) -> None:
    """Models from elsewhere cast so: rows that are apart differ by float32's rounding, and coupled ones by more."""
    model = Casting().double()
    engine = parallelize(
        model, losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1,accumulate=2"
    )
    generator = torch.Generator().manual_seed(0)
    x, targets = (torch.randn(14, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    batch = {"x": x, "targets": targets.float(), "coupled": torch.full((14,), coupled)}
    if coupled:
        with pytest.raises(SoliError, match=r"couples the rows|is a mean over"):
            engine.step(batch)
    else:
        assert engine.step(batch) > 0


def one_rank_couples() -> str:
    """A mean on rank 1, whose rows alone the check could see."""
    rank = torch.distributed.get_rank()

    def loss(output, batch):
        total, count = losses.mse("targets")(output, batch)
        return (total / count, 1.0) if rank == 1 else (total, count)

    engine = parallelize(Named(), loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=2")
    batch = {"x": torch.randn(8, 5), "targets": torch.ones(8, 3)}
    try:
        engine.step(batch)
    except SoliError as error:
        return f"{error.consequence} {error.problems[0].what}"
    return "nothing"


def test_what_one_rank_finds_in_the_first_step_is_raised_on_all(pool: Pool) -> None:
    """And at once: without it the other rank would wait for this one in its next collective."""
    said = pool.run(one_rank_couples, ranks=2, deadline=30)
    assert said == [f"{other} the loss's count does not add up over the rows of the batch" for other in (True, False)]


def test_a_parameter_without_dims(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(scaled, "dp=1", str(tmp_path / "one"), True, ranks=1)[0]
    assert expected["optimizer.scale.exp_avg"] < 0
    for zero in (1, 2, 3):
        path = str(tmp_path / f"{zero}")
        for found in pool.run(scaled, f"dp=2,zero={zero}", path, True, ranks=2):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=BOUND, atol=0.0)
        again = pool.run(scaled, "dp=1", path, False, ranks=1)[0]
        back = pool.run(scaled, f"dp=2,zero={zero}", str(tmp_path / "one"), False, ranks=2)[1]
        assert all(torch.equal(again[name], found[name]) for name in expected)
        assert all(torch.equal(back[name], value) for name, value in expected.items())


# --- checkpoints ------------------------------------------------------------------------------------------


class Wider(Named):
    """Other sizes, one parameter more, one less."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.Linear(5, 9, bias=False)
        self.net[4] = nn.Linear(9, 4)
        self.more = nn.Parameter(torch.zeros(2))


def loads(path: str, other_model: bool):
    engine = engine_for("dp=2,zero=3")
    if other_model:
        engine = parallelize(
            Wider(),
            losses.mse("targets"),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
            plan="dp=2,zero=3",
        )
    before = engine.global_state_dict()
    text, code = caught(engine.load, path)
    after = engine.global_state_dict()
    return text, code, all(torch.equal(before[name], after[name]) for name in before)


def writes(path: str):
    engine = engine_for("dp=2,zero=1")
    for batch in engine.batches(DATA, 6):
        engine.step(batch)
    engine.save(path)


def test_a_checkpoint_that_does_not_fit_is_refused_whole(pool: Pool, tmp_path: Path) -> None:
    good = tmp_path / "good"
    pool.run(writes, str(good), ranks=2)
    for text, code, unchanged in pool.run(loads, str(good), True, ranks=2):
        assert (code, unchanged) == (2, True)
        for words in ("model.net.0.bias", "model.net.4.weight", "model.more is missing", "(4, 9)", "(3, 9)"):
            assert words in text, text
    cut = tmp_path / "cut"
    shutil.copytree(good, cut)
    largest = max(cut.rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-40])
    foreign, pickled = tmp_path / "foreign", tmp_path / "pickled"
    for folder in (foreign, pickled):
        folder.mkdir()
    save_file({"a": torch.zeros(2)}, foreign / "model.safetensors")
    torch.save({"model": {}}, pickled / "pytorch_model.bin")
    for path, words in (
        (cut, f"{largest.name} is truncated"),
        (foreign, "import"),
        (pickled, "pytorch_model.bin"),
        (tmp_path / "goood", "good"),
    ):
        for text, code, unchanged in pool.run(loads, str(path), False, ranks=2):
            assert (code, unchanged) == (1 if path == cut else 2, True), text
            assert words in text, text


def on_a_full_disk(path: str, wait: bool):
    engine = engine_for("dp=2,zero=2")
    stream = engine.batches(DATA, 6)
    engine.step(next(stream))
    first = caught(engine.save, path, wait=wait, extra={"note": "n" * 500_000})
    if not wait:
        first = caught(engine.saving.wait)
    loss = float(engine.step(next(stream)))
    for _ in range(2):  # its error comes once more where nobody asked for it, and not for good
        again = caught(engine.save, path, extra={"note": "n"}, overwrite=True)
    engine.load(path)
    return first, again, loss


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_nothing_and_training_goes_on(pool: Pool, small_disk: Path, wait: bool) -> None:
    found = pool.run(on_a_full_disk, str(small_disk / "1"), wait, ranks=2)
    for (text, code), again, _ in found:
        assert ("No space left on device" in text, code) == (True, 2), text
        assert again == ("", 0)
    assert found[0][2] == found[1][2]
    assert [path.name for path in small_disk.iterdir()] == ["1"]


def test_one_label_a_row_is_no_next_token() -> None:
    with pytest.raises(SoliError, match=r"from_model\(shifted=False\)"):
        losses.from_model()({"loss": torch.ones(())}, {"labels": torch.zeros(4, dtype=torch.int64)})


class Labelled(nn.Module):
    """A model with a mean loss of its own, of tokens or of next ones. All rows count as many labels."""

    def __init__(self, shifted: bool, head: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shifted = shifted
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight.data.mul_(head)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor):
        logits = self.head(self.embed(tokens))
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def labelled(shifted: bool, said: bool, plan: str, head: float = 1.0, first: int = 0) -> str:
    model = Labelled(shifted, head).double()
    engine = parallelize(
        model, losses.from_model(shifted=said), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan
    )
    tokens = torch.arange(24).reshape(4, 6) * 5 % 11
    labels = tokens.clone()
    labels[:, 0] += first * (-100 - labels[:, 0])
    return caught(engine.step, {"tokens": tokens, "labels": labels})[0]


@pytest.mark.parametrize(
    ("plan", "shifted", "right"),
    [
        *((plan, shifted, right) for plan in ("dp=2", "tp=2") for shifted in (True, False) for right in (True, False)),
        *(swept("zero=3", shifted, shifted) for shifted in (True, False)),
        *(("zero=3", shifted, not shifted) for shifted in (True, False)),
        *(swept("dp=2,accumulate=2", shifted, not shifted) for shifted in (True, False)),
        *(("dp=2,accumulate=2", shifted, shifted) for shifted in (True, False)),
    ],
)
def test_which_labels_a_model_counts_is_found_out(pool: Pool, plan: str, shifted: bool, right: bool) -> None:
    found = pool.run(labelled, shifted, shifted == right, plan, ranks=2)
    for text in found:
        assert (f"from_model(shifted={shifted})" in text) != right, text
        assert bool(text) != right, text


@pytest.mark.parametrize("said", [True, False])
def test_labels_that_tell_nothing_are_not_held_against_a_model(pool: Pool, said: bool) -> None:
    """A head of zeros has one loss for all labels."""
    assert pool.run(labelled, True, said, "dp=2", 0.0, ranks=2) == [""] * 2


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_a_wrong_choice_is_found_out_where_no_first_label_counts_yet(shifted: bool, said: bool) -> None:
    """Those of a later batch may, and were counted wrong from there on, without a word. A model may read its masks from labels: it is no error."""
    for plan in ("dp=1", "dp=1,accumulate=2"):
        before = len(noted())
        assert labelled(shifted, said, plan, first=1) == ""
        told = [note["text"] for note in noted()[before:] if "no first label of a row counts" in note["text"]]
        assert len(told) == (shifted != said)
        assert all(f"from_model(shifted={said}) was said" in text and f"say shifted={shifted}" in text for text in told), told


class Writing(nn.Module):
    """Doubles its batch in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mul_(2))


class Squeezing(nn.Module):
    """Gives its batch another shape in place, beside an expanded view of what it had."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.squeeze_(-1)
        return self.layer(x * mask)[:, 0]


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,accumulate=2"])
def test_checks_leave_a_batch_in_the_shape_that_it_had(plan: str) -> None:
    x, y = torch.arange(12.0, dtype=torch.float64).reshape(4, 3), torch.ones(4, 1, dtype=torch.float64)
    mask, model = y.expand(4, 3), Squeezing().double()
    wanted = (model.layer(x) - y).square().mean()
    loss = lambda out, batch: ((out - batch["y"]).square().sum(), len(out))
    engine = parallelize(model, loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    assert torch.allclose(engine.step({"x": x, "mask": mask, "y": y}), wanted, rtol=BOUND, atol=0)


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,accumulate=2"])
def test_checks_leave_a_batch_as_it_was_that_the_forward_writes_into(plan: str) -> None:
    """It was doubled by each of them before it was trained on."""
    x, y = torch.arange(12.0, dtype=torch.float64).reshape(4, 3), torch.ones(4, 1, dtype=torch.float64)
    model = Writing().double()
    wanted, start = (model.layer(2 * x) - y).square().mean(), x.clone()
    engine = parallelize(model, losses.mse("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
    assert torch.allclose(engine.step({"x": x, "y": y}), wanted, rtol=BOUND, atol=0)
    assert torch.equal(x, 2 * start)
