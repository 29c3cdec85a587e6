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
from test_streams import alike

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


class Described(Named):
    """A state_dict of its own with its options, as neuraloperator's models have."""

    options = {"width": 4}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {"options": self.options}


def test_what_else_a_state_dict_has_is_said_not_to_be_saved(tmp_path: Path) -> None:
    given = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2), "plan": "dp=1"}
    engine, again = (parallelize(Described(), losses.mse("targets"), **given) for _ in range(2))
    engine.step(BATCH)
    assert engine.global_state_dict()["options"] == {"width": 4}
    engine.save(tmp_path / "c")
    assert [note["text"] for note in noted() if "is no tensor is not saved: options" in note["text"]]
    again.load(tmp_path / "c")
    assert torch.equal(again.step(BATCH), engine.step(BATCH))


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


class Decaying(torch.optim.Optimizer):
    """Counts its steps in states that are no parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.state["seen"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["seen"] += 1
        whole = self.state["global"]
        whole |= {"steps": whole.get("steps", 0) + 1, "least": -float("inf"), "by": {3: 0.5}}
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=whole["by"][3] / whole["steps"])


def decaying(plan: str, folder: str) -> Any:
    made = lambda: parallelize(Named(), losses.mse("targets"), optimizer=Decaying, plan=plan, example=BATCH)
    engine, again = made(), made()
    for _ in range(2):
        engine.step(BATCH)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    engine.save(folder, extra={"plateau": plateau.state_dict()})
    assert again.load(folder)["plateau"] == plateau.state_dict()
    assert again.optimizer.state["global"] == engine.optimizer.state["global"]
    assert again.optimizer.state["seen"] == 2
    return [float(engine.step(BATCH)) for _ in range(2)] == [float(again.step(BATCH)) for _ in range(2)]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_states_of_an_optimizer_that_are_no_parameters_come_back(pool: Pool, tmp_path: Path, plan: str) -> None:
    assert pool.run(decaying, plan, str(tmp_path / "c"), ranks=2) == [True, True]


def test_a_rate_that_is_a_tensor_is_saved_with_its_scheduler(tmp_path: Path) -> None:
    made = lambda: parallelize(
        Named(),
        losses.mse("targets"),
        optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        plan="dp=1",
    )
    engine, again = made(), made()
    engine.step(BATCH)
    engine.save(tmp_path / "c")
    again.load(tmp_path / "c")
    assert [float(engine.step(BATCH)) for _ in range(2)] == [float(again.step(BATCH)) for _ in range(2)]
    assert again.optimizer.param_groups[0]["lr"].shape == ()


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [(torch.optim.AdamW, "dp=2"), (torch.optim.AdamW, "dp=2,zero=1"), (torch.optim.AdamW, "dp=2,zero=3"), (torch.optim.AdamW, "pp=2"), (torch.optim.Adafactor, "dp=2")],
)
def test_a_proof_in_fp64_begins_in_the_midst_of_a_run(pool: Pool, tmp_path: Path, optimizer: type[torch.optim.Optimizer], plan: str) -> None:
    assert max(pool.run(proven, optimizer, plan, str(tmp_path / "c"), ranks=2)) < 1e-12
    with pytest.raises(SoliError, match="another shape or dtype"):
        made_of(optimizer, "dp=1", Named().bfloat16()).load(tmp_path / "c")


def made_of(optimizer: type[torch.optim.Optimizer], plan: str, model: nn.Module | None = None) -> Any:
    return parallelize(model or Named(), losses.mse("targets"), optimizer=lambda p: optimizer(p, lr=1e-2), plan=plan, example=BATCH)


def proven(optimizer: type[torch.optim.Optimizer], plan: str, folder: str) -> float:
    """How far the loss after two steps of precision=fp64 is from that of a plain loop in float64, of batches in float32."""
    engine = made_of(optimizer, "dp=2")
    engine.step(BATCH)
    engine.save(folder)
    model = engine.copy_model().double()
    again = made_of(optimizer, f"{plan},precision=fp64")
    again.load(folder)
    assert "are cast" in noted()[-1]["text"]
    plain = optimizer(model.parameters(), lr=1e-2)
    held = dict(engine.model.named_parameters())
    for name, param in model.named_parameters():
        plain.state[param] = {k: v.double() if v.shape else v.clone() for k, v in engine.optimizer.state[held[name]].items()}
    x, targets = BATCH["x"].double(), BATCH["targets"].double()
    for _ in range(2):
        plain.zero_grad()
        loss = nn.functional.mse_loss(model(x), targets)
        loss.backward()
        plain.step()
        found = again.step(BATCH)
    assert {x.dtype for state in again.optimizer.state.values() for x in state.values() if x.shape} == {torch.float64}
    return abs(float(loss) - float(found)) / float(loss)


class Exact(torch.optim.SGD):
    """Keeps sums in float64 beside weights in float32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("total", torch.zeros_like(p, dtype=torch.float64))
            p.sub_(total.add_(p.grad).float(), alpha=0.1)


def test_states_that_are_wider_than_their_weights_come_back_so(tmp_path: Path) -> None:
    engine, again = made_of(Exact, "dp=1"), made_of(Exact, "dp=1")
    for _ in range(3):
        engine.step(BATCH)
    engine.save(tmp_path / "c")
    again.load(tmp_path / "c")
    kept = [[one.optimizer.state[p]["total"] for p in one.optimizer.param_groups[0]["params"]] for one in (engine, again)]
    assert alike(*kept)
    assert {total.dtype for total in kept[1]} == {torch.float64}


def test_tensors_of_an_optimizer_that_are_no_parameters_are_refused(tmp_path: Path) -> None:
    engine = made_of(torch.optim.SGD, "dp=1")
    engine.step(BATCH)
    engine.optimizer.state["mean"] = torch.ones(3)
    engine.step(BATCH)
    with pytest.raises(SoliError, match=r"tensors that are no parameter's(.|\n)*got     mean"):
        engine.save(tmp_path / "c")


def test_another_engine_of_the_process_reads_what_is_being_saved(tmp_path: Path) -> None:
    engine, other = (made_of(torch.optim.AdamW, "dp=1", Wide()) for _ in range(2))
    for steps in (1, 2):
        engine.step(BATCH)
        engine.save(tmp_path / "c", wait=False, overwrite=True)
        other.load(tmp_path / "c")
        assert other.step_count == steps


class Wide(Named):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 200_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * self.wide(x).mean()


def test_gradients_of_other_weights_are_not_applied_to_loaded_ones(tmp_path: Path) -> None:
    engine = keeping(3, "dp=1")
    engine.step(BATCH)
    engine.save(tmp_path / "c")
    engine.forward_backward(BATCH)
    with pytest.raises(SoliError, match=r"load\(\) between forward_backward\(\) and update\(\)"):
        engine.load(tmp_path / "c")
    engine.discard()
    engine.load(tmp_path / "c")


def test_options_that_a_program_has_otherwise_are_said(tmp_path: Path) -> None:
    made = lambda **options: parallelize(Named(), losses.mse("targets"), optimizer=lambda p: torch.optim.AdamW(p, **options), plan="dp=1")
    made(lr=0.1).save(tmp_path / "c")
    for options, said in (({"lr": 0.1}, False), ({"lr": 0.2, "betas": (0.8, 0.999)}, True)):
        before = [id(note) for note in noted()]
        again = made(**options)
        again.load(tmp_path / "c")
        told = [note["text"] for note in noted() if id(note) not in before and "options of the optimizer" in note["text"]]
        assert told == (["options of the optimizer are the checkpoint's, and not the program's: betas, lr"] if said else [])
        assert again.optimizer.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_is_nothing_to_import(tmp_path: Path) -> None:
    keeping(3, "dp=1").save(tmp_path / "c")
    with pytest.raises(SoliError, match="is a checkpoint of soli"):
        import_(tmp_path / "c", tmp_path / "d")
    assert not (tmp_path / "d").exists()


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
