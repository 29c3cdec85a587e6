"""Streams of batches from call to call, through evaluations, checkpoints and other batches; and what a loop does when a step failed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from noted import noted
from pool import Pool
from soli import losses, parallelize
from soli.core.errors import SoliError
from soli.engine.batch import Part
from soli.engine.deciding import peek
from test_engine import DATA, Named, engine_for

ALL = torch.stack([sample["x"] for sample in DATA])


def read(stream: Any, most: int | None = None) -> list[torch.Tensor]:
    return [part.data["x"] for part in islice(stream, most)]


def alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_loop_that_asks_for_an_epoch_at_a_time_has_one_after_another() -> None:
    engine = engine_for("dp=1")
    each = [read(engine.batches(DATA, 6)) for _ in range(3)]
    assert [len(epoch) for epoch in each] == [4, 4, 4]
    assert not alike(each[0], each[1])
    assert alike([x for epoch in each for x in epoch], read(engine_for("dp=1").batches(DATA, 6, epochs=3)))


def test_a_stream_that_is_read_again_gives_the_next_epoch() -> None:
    stream = engine_for("dp=1").batches(DATA, 6)
    first = read(stream, 2) + read(stream)
    assert next(stream, None) is None
    assert alike(first + read(stream), read(engine_for("dp=1").batches(DATA, 6, epochs=2)))


def test_loops_that_take_as_many_batches_as_there_are_have_an_epoch_each() -> None:
    stream = engine_for("dp=1").batches(DATA, 6)
    epochs = [[part.data["x"] for _, part in zip(range(len(stream)), stream, strict=False)] for _ in range(2)]
    assert alike([x for epoch in epochs for x in epoch], read(engine_for("dp=1").batches(DATA, 6, epochs=2)))
    assert stream
    assert len(engine_for("dp=1").batches(DATA, 6, epochs=0)) == 0


@pytest.mark.parametrize("plan", ["dp=1", "auto"])
@pytest.mark.parametrize("odd", [{"global_batch": "6"}, {"workers": -1}, {"epochs": 1.5}])
def test_numbers_of_batches_are_whole(odd: dict[str, Any], plan: str) -> None:
    with pytest.raises(SoliError, match=f"{next(iter(odd))} of engine.batches is a whole number"):
        engine_for(plan).batches(DATA, **{"global_batch": 6} | odd)


class Sized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)

    def __len__(self) -> int:
        return len(DATA)


def test_a_stream_that_knows_its_length_is_read_one_after_another() -> None:
    """torch's have a __getitem__, which gives nothing."""
    _, batch = peek(Sized(), 3, None)
    assert torch.equal(batch["x"], ALL[:3])


@pytest.mark.parametrize("epochs", [None, 2])
def test_a_loop_may_ask_how_many_batches_there_are(epochs: int | None) -> None:
    stream = engine_for("dp=1").batches(DATA, 5, epochs=epochs)
    assert len(stream) == len(read(stream)) == 5 * (epochs or 1)
    with pytest.raises(TypeError, match="nobody knows"):
        len(engine_for("dp=1").batches(Sized(), 5, shuffle=False))


class Endless:
    def __getitem__(self, number: int) -> Any:
        return DATA[number % 24]


@pytest.mark.parametrize("plan", ["dp=1", "auto"])
@pytest.mark.parametrize("dataset", [None, 5, Endless()])
def test_what_gives_no_samples_in_any_order_is_none(dataset: Any, plan: str) -> None:
    with pytest.raises(SoliError, match="is given no dataset"):
        engine_for(plan).batches(dataset, 6)


def test_a_batch_of_numpys_number_of_samples_is_saved(tmp_path: Path) -> None:
    engine = engine_for("dp=1")
    found = read(engine.batches(DATA, np.int64(6)), 2)
    engine.save(tmp_path / "c")
    assert alike(found, read(engine_for("dp=1").batches(DATA, 6), 2))


def test_an_epoch_that_was_left_is_ended_by_the_next_call() -> None:
    engine = engine_for("dp=1")
    whole = read(engine_for("dp=1").batches(DATA, 6, epochs=2))
    found = [*read(engine.batches(DATA, 6), 1), *read(engine.batches(DATA, 6)), *read(engine.batches(DATA, 6))]
    assert alike(found, whole)


def test_epochs_that_are_behind_a_stream_are_not_read_again_and_that_is_said() -> None:
    engine = engine_for("dp=1")
    assert len(read(engine.batches(DATA, 6, epochs=2))) == 8
    assert not read(engine.batches(DATA, 6, epochs=2))
    assert "'train' has 2 epochs behind it" in noted()[-1]["text"]


@pytest.mark.parametrize("seen", [1, 3])
def test_an_evaluation_is_of_all_rows_and_leaves_the_training_where_it_stands(seen: int) -> None:
    engine, plain = engine_for("dp=1"), engine_for("dp=1")
    expected = read(plain.batches(DATA, 6, epochs=2))
    found = read(engine.batches(DATA, 6), seen)
    mean = float((engine.model(ALL) - torch.stack([d["targets"] for d in DATA])).detach().square().mean())
    for _ in range(2):
        assert engine.evaluate(engine.batches(DATA, 4, shuffle=False)) == pytest.approx(mean, rel=1e-6)
    assert alike([*found, *read(engine.batches(DATA, 6, epochs=2))], expected)


def test_batches_of_another_size_go_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    engine = engine_for("dp=1")
    order = torch.cat(read(engine_for("dp=1").batches(DATA, 6)))
    for part in islice(engine.batches(DATA, 6), 2):
        engine.step(part)
    engine.save(tmp_path / "c")
    for size in (12, 4, 3):
        engine.load(tmp_path / "c")
        assert torch.equal(torch.cat(read(engine.batches(DATA, size))), order[12:])
    engine.load(tmp_path / "c")
    for dataset, size in ((DATA, 5), (DATA[:20], 6)):
        with pytest.raises(SoliError, match="in the midst of an epoch of other batches"):
            read(engine.batches(dataset, size))


@pytest.mark.parametrize("dataset", [DATA, {i: d for i, d in enumerate(DATA)}.values()], ids=["numbered", "stream"])
def test_two_datasets_that_are_read_by_turns_need_a_name_each(dataset: Any) -> None:
    engine, shuffle = engine_for("dp=1"), dataset is DATA
    pairs = zip(engine.batches(dataset, 6, shuffle=shuffle), engine.batches(dataset, 6, shuffle=shuffle), strict=True)
    with pytest.raises(SoliError, match="two iterators read the stream 'train' by turns"):
        list(pairs)
    a, b = (engine.batches(dataset, 6, shuffle=shuffle, name=name) for name in "ab")
    assert [len(x.data["x"]) for pair in zip(a, b, strict=True) for x in pair] == [6, 6, 6, 6, 6, 6, 5, 5]


@pytest.mark.parametrize("plan", ["dp=1", "auto"])
def test_a_generator_that_is_left_and_asked_again_loses_nothing(tmp_path: Path, plan: str) -> None:
    engine, endless = engine_for(plan), (d for _ in range(99) for d in DATA)
    found = [read(engine.batches(endless, 6, shuffle=False), 2) for _ in range(3)]
    whole = [x for _ in range(2) for x in ALL]
    assert torch.equal(torch.cat([x for some in found for x in some]), torch.stack(whole[:36]))
    engine.step(next(engine.batches(endless, 6, shuffle=False)))
    engine.save(tmp_path / "c")
    stream = engine.batches(endless, 6, shuffle=False)
    next(stream)
    engine.load(tmp_path / "c")
    with pytest.raises(SoliError, match="cannot be read again"):
        next(stream)
    smaller = (d for _ in range(99) for d in DATA)
    read_so = [read(engine.batches(smaller, size, shuffle=False, name="smaller"), n) for size, n in ((8, 1), (2, 5))]
    assert torch.equal(torch.cat([x for some in read_so for x in some]), torch.stack(whole[:18]))
    anew = (d for _ in range(99) for d in DATA)
    assert torch.equal(read(engine.batches(anew, 6, shuffle=False), 1)[0], torch.stack([*ALL, *ALL, *ALL][42:48]))


@pytest.mark.parametrize("plan", ["dp=1", "auto"])
def test_what_gives_no_samples_is_refused(plan: str) -> None:
    engine = engine_for(plan)
    with pytest.raises(SoliError, match="a DataLoader gives batches"):
        engine.batches(DataLoader(DATA, 3), 6, shuffle=False)
    with pytest.raises(SoliError, match="mapping by names"):
        engine.batches({"x": ALL, "targets": ALL}, 6)
    assert alike(read(engine.batches(DataLoader(DATA, None), 6, shuffle=False)), list(ALL.split(6)))
    assert len(read(engine.batches(dict(enumerate(DATA)), 6, epochs=2))) == 4


def test_a_stream_that_gives_nothing_is_no_endless_loop() -> None:
    with pytest.raises(SoliError, match="gave no samples in epoch 1"):
        read(engine_for("dp=1").batches(iter(DATA), 6, epochs=2, shuffle=False))
    with pytest.raises(SoliError, match="gave no samples in epoch 0"):
        read(engine_for("dp=1").batches(iter(()), 6, shuffle=False))


@pytest.mark.parametrize("dataset", [DATA, {i: d for i, d in enumerate(DATA)}.values()], ids=["numbered", "stream"])
def test_a_checkpoint_that_a_loop_loads_moves_the_loop(tmp_path: Path, dataset: Any) -> None:
    shuffle = dataset is DATA
    whole = read(engine_for("dp=1").batches(dataset, 6, epochs=2, shuffle=shuffle))
    engine, found = engine_for("dp=1"), []
    for part in engine.batches(dataset, 6, epochs=2, shuffle=shuffle):
        found.append(part.data["x"])
        engine.step(part)
        if len(found) == 1:
            engine.save(tmp_path / "c")
        if len(found) == 6:
            engine.load(tmp_path / "c")
    assert alike(found, [*whole[:6], *whole[1:]])


@pytest.mark.parametrize("begun", [0, 1])
def test_an_iterator_that_is_held_goes_on_in_the_order_of_the_checkpoints_seed(tmp_path: Path, begun: int) -> None:
    engine = engine_for("dp=1", seed=5)
    stream = engine.batches(DATA, 6, epochs=2)
    engine.step(next(stream))
    engine.save(tmp_path / "c")
    other = engine_for("dp=1", seed=6)
    held = other.batches(DATA, 6, epochs=2)
    read(held, begun)
    other.load(tmp_path / "c")
    assert "the checkpoint's seed 5 goes on" in noted()[-1]["text"]
    assert alike(read(held), read(stream))


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_batch_that_was_not_trained_on_is_the_first_of_a_resumed_run(tmp_path: Path, ahead: int, steps: int) -> None:
    """Batches that a program has in hand when it saves (at the top of its loop, or fetched ahead); another stream is only read."""
    engine = engine_for("dp=1")
    stream, whole = engine.batches(DATA, 6, epochs=2), read(engine_for("dp=1").batches(DATA, 6, epochs=2))
    inhand = [next(stream) for _ in range(ahead)]
    for _ in range(steps):
        inhand.append(next(stream))
        engine.step(inhand.pop(0))
    if steps:
        read(engine.batches(DATA, 6, shuffle=False, name="looked at"), 1)
    engine.save(tmp_path / "c")
    again = engine_for("dp=1")
    again.load(tmp_path / "c")
    assert alike(read(again.batches(DATA, 6, epochs=2)), whole[steps:])
    assert len(read(again.batches(DATA, 6, shuffle=False, name="looked at"))) == (3 if steps else 4)


@pytest.mark.parametrize("kind", ["data", "parts", "evaluated"])
def test_batches_that_are_trained_on_in_other_forms_are_not_read_again(tmp_path: Path, kind: str) -> None:
    engine, whole = engine_for("dp=1"), read(engine_for("dp=1").batches(DATA, 6))
    other = engine.batches(DATA, 6, shuffle=False, name="looked at")
    stream = engine.batches(DATA, 6)
    engine.step(next(stream))
    for part in islice(stream, 2):
        if kind == "evaluated":
            engine.forward_backward(part)
            engine.evaluate(other)
            engine.update()
        else:
            engine.step(part.data if kind == "data" else Part(part.data, 0, part.rows, part.rows))
    engine.save(tmp_path / "c")
    again = engine_for("dp=1")
    again.load(tmp_path / "c")
    assert alike(read(again.batches(DATA, 6)), whole[3:])


def test_a_checkpoint_of_before_a_stream_began_takes_it_back_to_its_begin(tmp_path: Path) -> None:
    engine = engine_for("dp=1")
    engine.save(tmp_path / "c")
    first = [float(engine.step(part)) for part in islice(engine.batches(DATA, 6), 2)]
    engine.load(tmp_path / "c")
    assert [float(engine.step(part)) for part in islice(engine.batches(DATA, 6), 2)] == first


def test_what_a_resumed_program_draws_is_what_it_would_have_drawn(tmp_path: Path) -> None:
    torch.manual_seed(4)
    engine = engine_for("dp=1")
    stream = engine.batches(DATA, 6)
    next(stream)
    torch.rand(1)
    engine.save(tmp_path / "c")
    expected = [(next(stream).start, float(torch.rand(1))) for _ in range(2)]
    again = engine_for("dp=1")
    again.load(tmp_path / "c")
    stream = again.batches(DATA, 6)
    assert [(next(stream).start, float(torch.rand(1))) for _ in range(2)] == expected


SCHEDULERS = {
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3], 0.5),
    "milestones in a sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.MultiStepLR(o, [1, 2], 0.5)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_count_by_numbers_are_saved(tmp_path: Path, name: str) -> None:
    def made():
        return parallelize(
            Named(), losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=1.0), scheduler=SCHEDULERS[name]
        )

    engine, rates = made(), []
    for number, part in enumerate(engine.batches(DATA, 4)):
        engine.step(part)
        rates.append(engine.optimizer.param_groups[0]["lr"])
        if number == 1:
            engine.save(tmp_path / "c")
    again = made()
    again.load(tmp_path / "c")
    found = []
    for part in again.batches(DATA, 4):
        again.step(part)
        found.append(again.optimizer.param_groups[0]["lr"])
    assert found == rates[2:]
    assert len(set(rates)) > 1


class Steep(nn.Module):
    """Its loss is finite where the gradient is not: the root's, of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.weight * x).sum(1, keepdim=True).abs().sqrt()


def caught_and_gone_on(plan: str) -> tuple[str, bool, bool]:
    engine = parallelize(
        Steep(), losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), clip=1.0, plan=plan
    )
    good = {"x": torch.ones(4, 3), "targets": torch.zeros(4, 1)}
    engine.step(good)
    before = engine.global_state_dict()["weight"]
    try:
        engine.step({"x": torch.zeros(4, 3), "targets": torch.zeros(4, 1) + 1})
        text = ""
    except SoliError as error:
        text = str(error)
    same = torch.equal(before, engine.global_state_dict()["weight"])
    engine.step(good)
    return text, same, torch.equal(before, engine.global_state_dict()["weight"])


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3"])
def test_a_program_may_go_on_after_a_gradient_that_is_not_finite(pool: Pool, plan: str) -> None:
    for text, same, still in pool.run(caught_and_gone_on, plan, ranks=2):
        assert "is not finite; nothing was updated" in text
        assert (same, still) == (True, False)


def by_hand_in_16_bits(_: int):
    engine = parallelize(
        Named(), losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=2,precision=fp16"
    )
    engine.loss_scale.scale = 2.0**40
    before = engine.global_state_dict()
    engine.forward_backward({"x": torch.randn(4, 5) * 1e3, "targets": torch.zeros(4, 3)})
    engine.update()
    after = engine.global_state_dict()
    return engine.last.skipped, all(torch.equal(before[k], after[k]) for k in before), engine.loss_scale.scale


def test_an_overflow_is_seen_by_update_without_clip(pool: Pool) -> None:
    assert pool.run(by_hand_in_16_bits, 0, ranks=2) == [(True, True, 2.0**39)] * 2


def with_gradients_of_before(plan: str) -> bool:
    def trained(stale: bool):
        model = Named()
        if stale:
            model(ALL).sum().backward()
        engine = parallelize(model, losses.mse("targets"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
        engine.step({"x": ALL[:4], "targets": torch.zeros(4, 3)})
        return engine.global_state_dict()

    clean, found = trained(False), trained(True)
    return all(torch.equal(clean[k], found[k]) for k in clean)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_gradients_of_before_are_none_of_a_step(pool: Pool, plan: str) -> None:
    assert pool.run(with_gradients_of_before, plan, ranks=2) == [True] * 2


class Shuffling(IterableDataset[Any]):
    """A stream that shuffles, as it is told to where soli cannot."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(24))
        if self.kind == "python":
            random.shuffle(numbers)
        order = {"python": numbers, "torch": torch.randperm(24).tolist(), "numpy": np.random.permutation(24).tolist()}
        for number in order[self.kind]:
            yield torch.tensor([number + random.random() / 2], dtype=torch.float64)


def read_shuffled(kind: str, plan: str, folder: str, own: int) -> tuple[list[float], list[float], float]:
    random.seed(0), torch.manual_seed(0), np.random.seed(0)
    random.seed(own), [random.random() for _ in range(own)]  # a rank may have drawn by itself
    total = lambda out, batch: (out.square().sum(), len(out))
    make = lambda: parallelize(
        nn.Linear(1, 1).double(), total, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), plan=plan
    )
    engine, whole, rest = make(), [], []
    for number, part in enumerate(engine.batches(Shuffling(kind), 4, shuffle=False, epochs=2)):
        engine.step(part)
        whole += part.data.flatten().tolist()
        if number == 7:
            engine.save(folder, overwrite=True)
    resumed = make()
    resumed.load(folder)
    for part in resumed.batches(Shuffling(kind), 4, shuffle=False, epochs=2):
        rest += part.data.flatten().tolist()
    return whole, rest, random.random()


def of_rank(kind: str, plan: str, folder: str) -> tuple[list[float], list[float], float]:
    return read_shuffled(kind, plan, folder, dist.get_rank())


@pytest.mark.parametrize("kind", ["python", "torch", "numpy"])
def test_a_stream_that_shuffles_is_the_same_on_every_rank_and_after_a_resume(pool: Pool, tmp_path: Path, kind: str) -> None:
    whole, rest, _ = read_shuffled(kind, "dp=1", str(tmp_path / "one"), 0)
    assert rest == whole[32:]
    assert sorted(int(x) for x in whole[:24]) == list(range(24))
    assert whole[:24] != whole[24:]
    (first, left, _), (second, right, _) = pool.run(of_rank, kind, "dp=2", str(tmp_path / "two"), ranks=2)
    together = [x for i in range(0, 24, 2) for x in (*first[i : i + 2], *second[i : i + 2])]
    assert together == whole
    assert (left, right) == (first[16:], second[16:])


class Own(Dataset[Any]):
    """Samples that are drawn from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number + self.rng.random()])


def read_own(plan: str) -> str:
    total = lambda out, batch: (out.square().sum(), len(out))
    engine = parallelize(nn.Linear(1, 1), total, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), plan=plan)
    try:
        next(iter(engine.batches(Own(), 8)))
    except SoliError as error:
        return str(error)
    return "it ran"


def test_samples_that_a_generator_of_the_datasets_own_draws_are_refused_on_several_ranks(pool: Pool) -> None:
    assert all("another sample when it is asked again" in said for said in pool.run(read_own, "dp=2", ranks=2))
    assert read_own("dp=1") == "it ran"
