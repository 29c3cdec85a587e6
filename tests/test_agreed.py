"""What one rank alone has otherwise is refused where it begins to matter, and the error names the rank and the thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pool import Pool
from soli.core.errors import SoliError
from soli.engine.batch import Part
from soli.engine.engine import Engine, parallelize

PLANS = ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"]
Change = Callable[[Engine], None]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(8, 4)).double()


def loss_fn(output: Tensor, batch: Any) -> tuple[Tensor, float]:
    return (output - batch[1]).square().sum(), output.numel()


def batch(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(8, 8, generator=draw).double(), torch.randn(8, 4, generator=draw).double()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def steps(engine: Engine, change: Change, last: int = 4) -> str:
    """What is said, and at which step, where the third begins after a change on the rank that has one."""
    for number in range(last):
        if number == 2:
            change(engine)
        try:
            engine.step(batch(number))
        except SoliError as error:
            return f"{number + 1}: {error}"
    return "it ran"


def nothing(engine: Engine) -> None:
    """What is no change."""


def changed(plan: str, change: Change, everywhere: bool) -> str:
    engine = parallelize(model(), loss_fn, optimizer=adam, plan=plan)
    return steps(engine, change if everywhere or engine.rank == 1 else nothing)


def rate(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 1.0


def rate_as_tensor(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)


def decay(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.5


def cleared(engine: Engine) -> None:
    engine.optimizer.state.clear()


def limit(engine: Engine) -> None:
    engine.max_norm = 1e-3


def scaled_weight(engine: Engine) -> None:
    with torch.no_grad():
        next(engine.model.parameters()).mul_(1.5)


def replaced(engine: Engine) -> None:
    param = next(engine.model.parameters())
    param.data = param.data * 1.5


def loaded(engine: Engine) -> None:
    engine.model.load_state_dict({name: x * 2 for name, x in engine.model.state_dict().items()})


def same_values(engine: Engine) -> None:
    with torch.no_grad():
        next(engine.model.parameters()).mul_(1.0)


def other_optimizer(engine: Engine) -> None:
    engine.optimizer.__class__ = type("Other", (type(engine.optimizer),), {})


def scheduled(engine: Engine) -> None:
    engine.scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=1.0)


def seeded(engine: Engine) -> None:
    engine.seed = 5


def ahead(engine: Engine) -> None:
    engine.step_count += 4


def looked_up(engine: Engine) -> None:
    made = engine.optimizer
    made.state[torch.nn.Parameter(torch.zeros(1))].get("step")


def clipped(engine: Engine) -> None:
    engine.forward_backward(batch(9))
    engine.clip(0.01 if engine.rank else 1.0)
    engine.update()


@pytest.mark.parametrize("plan", PLANS)
def test_a_rate_of_one_rank_is_refused_and_one_of_all_is_not(pool: Pool, plan: str) -> None:
    for said in pool.run(changed, plan, rate, False, ranks=2):
        assert said.startswith("3: rank 1 would take another step than the others at step 3")
        assert "lr of group 0: 1.0, and 0.01 on the others" in said
    assert pool.run(changed, plan, rate, True, ranks=2) == ["it ran"] * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rate_as_tensor, "lr of group 0"),
        (decay, "weight_decay of group 0: 0.5, and 0.01"),
        (cleared, "states as the newest step left them"),
        (limit, "clip: 0.001, and None"),
        (other_optimizer, "optimizer: 'Other', and 'AdamW'"),
        (scheduled, "scheduler: 'ConstantLR', and 'NoneType'"),
        (seeded, "seed: 5, and 0"),
        (ahead, "steps before: 6, and 2"),
    ],
)
def test_other_options_of_one_rank_are_named(pool: Pool, change: Change, named: str) -> None:
    assert all(named in said for said in pool.run(changed, "dp=2", change, False, ranks=2))
    assert pool.run(changed, "dp=2", change, True, ranks=2) == ["it ran"] * 2


@pytest.mark.parametrize(
    ("change", "plan"),
    [
        (scaled_weight, "dp=2"),
        (scaled_weight, "dp=2,zero=1"),
        (scaled_weight, "tp=2"),
        (replaced, "dp=2"),
        (loaded, "dp=2"),
    ],
)
def test_parameters_that_one_rank_changes_are_refused(pool: Pool, change: Change, plan: str) -> None:
    named = "wrote into parameters: True" if plan == "tp=2" else "checksum of "
    for said in pool.run(changed, plan, change, False, ranks=2):
        assert said.startswith("3: rank 1 ")
        assert named in said
    assert pool.run(changed, plan, change, True, ranks=2) == ["it ran"] * 2


def silently(path: str) -> str:
    """No version of a tensor tells of what is written by `.data`."""
    engine = parallelize(model(), loss_fn, optimizer=adam, plan="dp=2")
    engine.step(batch(0))
    next(engine.model.parameters()).data.mul_(1 + engine.rank)
    try:
        engine.save(path) if path else engine.step(batch(1))
    except SoliError as error:
        return str(error)
    return "it ran"


def test_parameters_are_compared_at_early_steps_and_before_a_save(pool: Pool, tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "saved")):
        for said in pool.run(silently, path, ranks=2):
            assert said.startswith("rank 1 has other values than the others in the same parameters after 1 steps")


def written_late() -> str:
    engine = parallelize(model(), loss_fn, optimizer=adam, plan="dp=2")
    for number in range(6):
        if number == 2:
            next(engine.model.parameters()).data.mul_(1 + engine.rank)
        try:
            engine.step(batch(number))
        except SoliError as error:
            return f"{number + 1}: {error}"
    return "it ran"


def test_parameters_are_compared_before_the_fourth_step_too(pool: Pool) -> None:
    for said in pool.run(written_late, ranks=2):
        assert said.startswith("4: rank 1 has other values than the others in the same parameters after 3 steps")


def own_noise(engine: Engine) -> None:
    """Into what no rank has a part of."""
    with torch.no_grad():
        for param in engine.model.parameters():
            if type(param) is nn.Parameter:
                param.add_(1e-3 * (1 + engine.rank))


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sp=on,zero=1"])
def test_what_ranks_of_tp_have_whole_is_compared_too(pool: Pool, plan: str) -> None:
    """Each computed with its own, without a word."""
    for said in pool.run(changed, plan, own_noise, True, ranks=2):
        assert said.startswith("4: ranks of tp have other values than each other in weights that each has whole, after 3 steps")
        assert "got     1.0.bias" in said


@pytest.mark.parametrize("change", [same_values, looked_up])
def test_values_that_stay_are_no_change(pool: Pool, change: Change) -> None:
    assert pool.run(changed, "dp=2", change, False, ranks=2) == ["it ran"] * 2


def frozen_stage() -> str:
    """All of the first stage's parameters are frozen, and every rank lets go of what it has."""
    made = model()
    made[0].requires_grad_(False)
    engine = parallelize(made, loss_fn, optimizer=adam, plan="pp=2,microbatches=2")
    return steps(engine, cleared)


def test_stages_without_states_have_no_other_states(pool: Pool) -> None:
    assert pool.run(frozen_stage, ranks=2) == ["it ran"] * 2


def odd_stream_in_a_grid(evaluated: bool) -> str:
    engine = parallelize(model(), loss_fn, optimizer=adam, plan="dp=2,tp=2")
    data = [(torch.randn(8).double(), torch.randn(4).double()) for _ in range(16)]
    batches = engine.batches(data, 8, shuffle=False, name="other" if engine.rank == 3 else "train")
    try:
        engine.evaluate(batches) if evaluated else engine.step(next(iter(batches)))
    except SoliError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize("evaluated", [False, True])
def test_the_odd_rank_of_a_grid_is_named_on_all(pool: Pool, evaluated: bool) -> None:
    """Though it stands in the data of its own group of dp alone."""
    for said in pool.run(odd_stream_in_a_grid, evaluated, ranks=4, deadline=20):
        assert said.startswith("rank 3 ")
        assert "name: 'other', and 'train' on the others" in said


def test_another_limit_of_a_clip_is_refused_at_the_next_step(pool: Pool) -> None:
    for said in pool.run(changed, "dp=2", clipped, True, ranks=2):
        assert "the limit of the newest clip(): 0.01, and 1.0" in said


def odd_in_a_grid() -> str:
    engine = parallelize(model(), loss_fn, optimizer=adam, plan="dp=2,tp=2")
    return steps(engine, rate if engine.rank == 2 else nothing)


def test_the_odd_rank_of_four_is_named_on_all(pool: Pool) -> None:
    assert all("3: rank 2 would take" in said for said in pool.run(odd_in_a_grid, ranks=4))


DATA = [tuple(row) for row in zip(*batch(5), strict=True)] * 6


def streamed(how: str, everywhere: bool) -> str:
    """What is said where rank 1, or all, asks for other batches."""
    engine = parallelize(model(), loss_fn, optimizer=adam, plan="dp=2")
    other = everywhere or engine.rank == 1
    data = {"longer": DATA * 2, "permuted": DATA[1:] + DATA[:1]}.get(how, DATA) if other else DATA
    options: dict[str, Any] = {"shuffle": other if how == "shuffled" else how == "longer"}
    if other and how in ("name", "global_batch"):
        options[how] = {"name": "other", "global_batch": 12}[how]
    parts = iter(engine.batches(data, **{"global_batch": 8} | options))
    try:
        for number in range(3):
            part = next(parts)
            if number == 1 and how == "skipped" and other:
                part = next(parts)
            if how == "evaluated":
                engine.evaluate(engine.batches(data[8:] if other else data, 8, shuffle=False, name=None))
            if how == "evaluated in part":
                parts_of_all = list(engine.batches(data, 8, shuffle=False, name=None))
                engine.evaluate(parts_of_all[1:] if other else parts_of_all)
            if how == "by hand":  # rows that only this rank has
                part = Part(tuple(x + engine.rank for x in part.data), part.start, part.stop, part.total)
            engine.step(part)
    except SoliError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("longer", "size: 96, and 48 on the others"),
        ("permuted", "sample: "),
        ("shuffled", "shuffle: True, and False on the others"),
        ("name", "name: 'other', and 'train' on the others"),
        ("global_batch", "global_batch: 12, and 8 on the others"),
        ("skipped", "batch: (0, 2), and (0, 1) on the others"),
        ("evaluated", "size: 40, and 48 on the others"),
        ("evaluated in part", "marks of all"),
    ],
)
def test_other_batches_of_one_rank_are_named(pool: Pool, how: str, named: str) -> None:
    for said in pool.run(streamed, how, False, ranks=2):
        assert said.startswith(
            f"rank 1 {'evaluates other batches' if 'evaluated' in how else 'would take another step'}"
        )
        assert named in said
    assert pool.run(streamed, how, True, ranks=2) == ["it ran"] * 2


def test_parts_by_hand_are_a_ranks_own(pool: Pool) -> None:
    assert pool.run(streamed, "by hand", False, ranks=2) == ["it ran"] * 2


def odd_model(what: str) -> nn.Module:
    made = model()
    if what == "dropout":
        made[1][2].p = 0.3
    if what == "mode":
        made[1][2].eval()
    if what == "activation":
        made[0][1] = nn.ReLU()
    if what == "frozen":
        made[2].bias.requires_grad_(False)
    if what == "hook":
        made[2].register_forward_hook(lambda module, args, output: output * 2)
    made[1].scale, made[1].number = 0.5 if what == "number" else 0.25, int(what == "whole")
    if what == "gradient hook":
        made[2].weight.register_hook(lambda gradient: gradient * 2)
    return made


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def grouped(params: Any) -> torch.optim.Optimizer:
    rows = list(params)
    return torch.optim.AdamW([{"params": rows[:2], "weight_decay": 0.5}, {"params": rows[2:]}], lr=1e-2)


def absolute(output: Tensor, batch: Any) -> tuple[Tensor, float]:
    return (output - batch[1]).abs().sum(), output.numel()


def begun(what: str, everywhere: bool) -> str:
    """What `parallelize` says of what rank 1, or all, gave otherwise."""
    other = everywhere or torch.distributed.get_rank() == 1
    made = odd_model(what if other else "")
    options: dict[str, Any] = {"optimizer": {"sgd": sgd, "groups": grouped}.get(what, adam) if other else adam}
    if other:
        options |= {"clip": {"clip": 0.5}, "seed": {"seed": 3}}.get(what, dict[str, float]())
    plan = "dp=2,zero=1" if what == "plan" and other else "dp=2"
    try:
        parallelize(made, absolute if other and what == "loss" else loss_fn, plan=plan, **options).step(batch(0))
    except SoliError as error:
        return str(error)
    return "it ran"


def test_a_whole_number_may_be_a_ranks_own(pool: Pool) -> None:
    assert pool.run(begun, "whole", False, ranks=2) == ["it ran"] * 2


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("dropout", "module 1.2: 'Dropout(p=0.3, inplace=False), in training, 0 hooks', and 'Dropout(p=0.0,"),
        ("mode", "module 1.2: 'Dropout(p=0.0, inplace=False), in evaluation, 0 hooks', and"),
        ("activation", "module 0.1: 'ReLU(), in training, 0 hooks', and 'Tanh()"),
        ("frozen", "2.bias: 'requires_grad=False, 0 hooks', and 'requires_grad=True"),
        ("hook", "in training, 1 hooks', and 'Linear("),
        ("gradient hook", "2.weight: 'requires_grad=True, 1 hooks'"),
        ("number", "1.scale: 0.5, and 0.25 on the others"),
        ("sgd", "optimizer: 'SGD', and 'AdamW'"),
        ("groups", "parameters of group 0: ['0.0.weight', '0.0.bias'], and"),
        ("clip", "clip: 0.5, and None"),
        ("seed", "seed: 3, and 0"),
        ("plan", "plan: 'dp=2,zero=1', and 'dp=2'"),
        ("loss", "loss: ('absolute', "),
    ],
)
def test_what_a_rank_begins_with_otherwise_is_named(pool: Pool, what: str, named: str) -> None:
    for said in pool.run(begun, what, False, ranks=2):
        assert said.startswith("rank 1 gave soli.parallelize other things than the others")
        assert named in said
    assert pool.run(begun, what, True, ranks=2) == ["it ran"] * 2


def scaled(plan: str) -> str:
    """A loss that is the rank's own, which no code tells."""
    factor = 1.0 + torch.distributed.get_rank()

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        total, count = loss_fn(output, batch)
        return total * factor, count

    engine = parallelize(model(), loss, optimizer=adam, plan=plan)
    return steps(engine, nothing)


def test_losses_of_the_same_rows_are_compared(pool: Pool) -> None:
    for said in pool.run(scaled, "tp=2", ranks=2):
        assert said.startswith("1: rank 1 has not what ranks of tp have alike at step 1")
        assert "loss of the same rows: " in said


def evaluated(plan: str) -> str:
    engine = parallelize(model(), loss_fn, optimizer=adam, plan=plan)
    x, y = batch(0)
    try:
        engine.evaluate([(x, y)])
        engine.evaluate([(x * (1 + engine.rank), y)])
    except SoliError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,microbatches=2"])
def test_evaluations_on_other_rows_are_refused(pool: Pool, plan: str) -> None:
    for said in pool.run(evaluated, plan, ranks=2):
        assert "were given different rows" in said
        assert said.startswith("rank 1 ")
        assert "in an evaluation after 0 steps" in said


def elsewhere(folder: str) -> tuple[str, str]:
    engine = parallelize(model(), loss_fn, optimizer=adam, plan="dp=2")
    own, said = Path(folder) / f"{engine.rank}", list[str]()
    engine.save(Path(folder) / "same")
    for call in (engine.save, engine.load):
        try:
            call(own)
        except SoliError as error:
            said.append(str(error))
    engine.load(Path(folder) / "." / "same")
    return said[0], said[1]


def test_checkpoints_at_other_paths_are_refused(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(elsewhere, str(tmp_path), ranks=2):
        for text in said:
            assert text.startswith("rank 1 names another checkpoint than the others")
            assert f"'{tmp_path}/1', and '{tmp_path}/0' on the others" in text
