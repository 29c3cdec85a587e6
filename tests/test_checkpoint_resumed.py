"""What a checkpoint brings back beside tensors, and what it is not loaded into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from noted import noted
from pool import Pool
from soli import checkpoint, losses, parallelize
from soli.checkpoint.transfer import import_
from soli.core.errors import SoliError
from test_engine import DATA, Named, engine_for

BATCH = {name: torch.stack([sample[name] for sample in DATA[:6]]) for name in ("x", "targets")}


class Keeping(Named):
    """A module with something of its own to save."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def keeping(kept: Any, plan: str) -> Any:
    return parallelize(
        Keeping(kept), losses.mse("targets"), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), plan=plan
    )


def kept_by(plan: str, folder: str) -> list[Any]:
    found = []
    for number, kept in enumerate(({"seen": 3, "by": [0.5, None]}, torch.arange(3))):
        engine = keeping(kept, plan)
        engine.step(BATCH)
        engine.save(f"{folder}/{number}")
        again = keeping({} if number == 0 else torch.zeros(2), plan)
        again.load(f"{folder}/{number}")
        found.append(again.model.kept.tolist() if number else again.model.kept)
        found.append(set(again.global_state_dict()) == set(engine.copy_model().state_dict()))
    return found


def test_what_modules_save_of_their_own_comes_back(pool: Pool, tmp_path: Path) -> None:
    expected = [{"seen": 3, "by": [0.5, None]}, True, [0, 1, 2], True]
    assert kept_by("dp=1", str(tmp_path)) == expected
    assert pool.run(kept_by, "dp=2,zero=3", str(tmp_path / "two"), ranks=2) == [expected] * 2


def test_what_modules_save_that_cannot_come_back_is_refused(tmp_path: Path) -> None:
    engine = keeping({"deep": torch.zeros(2)}, "dp=1")
    with pytest.raises(SoliError, match=r"state\['modules'\]\['_extra_state'\]\['deep'\] is not JSON"):
        engine.save(tmp_path / "c")
    engine = engine_for("dp=1")
    engine.save(tmp_path / "c")
    with pytest.raises(SoliError, match="by get_extra_state"):
        keeping(1, "dp=1").load(tmp_path / "c")


def freezing(plan: str, folder: str) -> list[bool]:
    """Steps with all layers or without the first, then the other way, and back."""
    found = []
    for number, frozen in enumerate((False, True, False)):
        model = Named()
        model.net[0].requires_grad_(not frozen)
        engine = parallelize(
            model, losses.mse("targets"), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), plan=plan, example=BATCH
        )
        if number:
            notes = len(noted())
            engine.load(f"{folder}/{number - 1}")
            said = [note["text"] for note in noted()[notes:]]
            found.append(frozen == any("that are frozen now are not read: net.0.bias, net.0.weight" in t for t in said))
        engine.step(BATCH)
        engine.save(f"{folder}/{number}")
        found.append(("optimizer.net.0.weight.exp_avg" in engine.global_state_dict(optimizer=True)) is not frozen)
    return found


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_layers_are_frozen_and_unfrozen_by_a_checkpoint_under_every_plan(pool: Pool, tmp_path: Path, plan: str) -> None:
    assert pool.run(freezing, plan, str(tmp_path / "c"), ranks=2) == [[True] * 5] * 2


def grouped(plan: str, kind: type = torch.optim.AdamW, schedule: str = "StepLR", turned: bool = False) -> Any:
    model = Named()
    weights, rest = ([p for p in model.parameters() if (p.dim() > 1) is two] for two in (True, False))
    groups = [{"params": weights, "lr": 0.1}, {"params": rest, "lr": 0.2}]
    return parallelize(
        model,
        losses.mse("targets"),
        optimizer=kind(groups[::-1] if turned else groups),
        scheduler=lambda o: getattr(torch.optim.lr_scheduler, schedule)(o, 2),
        plan=plan,
    )


def refused(plan: str, folder: str) -> list[str]:
    engine = grouped(plan)
    engine.step(BATCH)
    engine.save(folder)
    said = []
    for options in ({"kind": torch.optim.SGD}, {"schedule": "CosineAnnealingLR"}, {"turned": True}, {}):
        other = grouped(plan, **options)
        before = other.global_state_dict()
        try:
            other.load(folder)
            said.append("")
        except SoliError as error:
            said.append(str(error))
            assert all(torch.equal(x, before[name]) for name, x in other.global_state_dict().items())
    return said


def test_optimizers_schedulers_and_groups_of_another_kind_are_refused(pool: Pool, tmp_path: Path) -> None:
    for plan in ("dp=2", "dp=2,zero=3"):
        for kind, schedule, turned, same in pool.run(refused, plan, str(tmp_path / plan), ranks=2):
            assert "of another optimizer" in kind
            assert "of another scheduler" in schedule
            assert "net.0.bias: group 0, saved in 1" in turned
            assert not same


def test_a_checkpoint_that_does_not_say_its_classes_and_groups_loads(tmp_path: Path) -> None:
    engine = engine_for("dp=1")
    engine.step(BATCH)
    saved = checkpoint.save
    with pytest.MonkeyPatch.context() as patch:
        old = lambda path, tensors, state, **rest: saved(
            path, tensors, {k: v for k, v in state.items() if k not in ("members", "classes", "modules")}, **rest
        )
        patch.setattr(checkpoint, "save", old)
        engine.save(tmp_path / "c")
    again = engine_for("dp=1")
    again.load(tmp_path / "c")
    assert float(again.step(BATCH)) == float(engine.step(BATCH))


class Counting(torch.optim.Optimizer):
    """States that are no tensors, and an update that depends on their types."""

    def __init__(self, params: Any, lr: float = 0.1, strange: Any = None) -> None:
        super().__init__(params, {"lr": lr, "strange": strange})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "on": True, "none": group["strange"], "most": float("inf"), "rate": 0.5}
                state["step"] += 1
                for _ in range(state["step"] % 3):
                    p.mul_(0.999)
                p.sub_(p.grad, alpha=group["lr"] / state["step"] * state["rate"])


def counting(plan: str, folder: str) -> Any:
    made = lambda strange=None: parallelize(
        Named(), losses.mse("targets"), optimizer=lambda p: Counting(p, 0.1, strange), plan=plan, example=BATCH
    )
    engine, again, strange = made(), made(), made({"a": torch.ones(1)})
    for _ in range(2):
        engine.step(BATCH)
    engine.save(folder)
    again.load(folder)
    states = [
        [(key, value) for p in one.optimizer.param_groups[0]["params"] for key, value in one.optimizer.state[p].items()]
        for one in (engine, again)
    ]
    assert states[0] == states[1]
    assert [type(value) for _, value in states[0]] == [type(value) for _, value in states[1]]
    assert [float(engine.step(BATCH)) for _ in range(2)] == [float(again.step(BATCH)) for _ in range(2)]
    strange.step(BATCH)
    with pytest.raises(SoliError, match=r"neither tensors nor numbers(.|\n)*\.none: dict"):
        strange.save(folder + "-strange")
    return states[1][:5]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "pp=2,microbatches=2"])
def test_states_of_an_optimizer_that_are_no_tensors_keep_their_types(pool: Pool, tmp_path: Path, plan: str) -> None:
    for states in pool.run(counting, plan, str(tmp_path / "c"), ranks=2):
        assert states == [("step", 2), ("on", True), ("none", None), ("most", float("inf")), ("rate", 0.5)]


def test_weights_alone_leave_the_rates_and_that_is_said(tmp_path: Path) -> None:
    engine = engine_for("dp=1")
    save_file(engine.global_state_dict(), tmp_path / "w.safetensors")
    import_(tmp_path / "w.safetensors", tmp_path / "c")
    for _ in range(4):
        engine.step(BATCH)
    engine.load(tmp_path / "c")
    assert engine.step_count == 0
    assert engine.scheduler.last_epoch == 4
    said = "step start anew; learning rate, scheduler and loss scale stay as they are"
    assert noted()[-1]["text"].endswith(said)


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.more = nn.Linear(6, 11, bias=False)
        self.head.weight = self.more.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def tied(plan: str, folder: str) -> list[Any]:
    """What comes of its own state dict: as it is, without the first name, and with two values."""
    batch = {"tokens": torch.arange(8).view(4, 2), "targets": torch.arange(8).view(4, 2)}
    options: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "plan": plan, "example": batch}
    engine = parallelize(Tied(), losses.cross_entropy("targets"), **options)
    whole, found = engine.global_state_dict(), []
    for number in range(3):
        again = parallelize(Tied(1), losses.cross_entropy("targets"), **options)
        given = {name: value.clone() for name, value in whole.items() if number != 1 or name != "embed.weight"}
        if number == 2:
            given["head.weight"][3] += 1
        name = f"{folder}{number}"
        if engine.rank == 0:
            save_file(given, f"{name}.safetensors")
            import_(f"{name}.safetensors", name)
        again.global_state_dict()  # the others wait
        try:
            again.load(name)
            found.append(all(torch.equal(x, whole[n]) for n, x in again.global_state_dict().items()))
        except SoliError as error:
            found.append(str(error).split(" in the")[0])
    return found


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2"])
def test_tied_weights_load_under_either_name(pool: Pool, tmp_path: Path, plan: str) -> None:
    expected = [True, True, "a weight that the model has once has two values"]
    assert pool.run(tied, plan, str(tmp_path / "c"), ranks=2) == [expected] * 2
