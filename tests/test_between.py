"""What a program does to its model between steps: modes hold, changes that training could not follow are refused."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.test_kept import DIM, Plain, case_of
from torch import Tensor, nn

from pool import Pool
from soli.core.errors import SoliError
from soli.engine.engine import Engine, parallelize
from soli.verify.parity import BOUND, adamw, check
from sweep import spread


class Frozen(Plain):
    """The statistics and the dropout of its second layer are off, as a fine-tuning program has them."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.4))

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].eval()


def error_and_modes(plan: str) -> tuple[float, list[bool]]:
    case = case_of(Frozen)
    model, loss_fn, batches = case.make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    engine.evaluate([batches[1]])
    return check(case, plan, 0).worst, [module.training for module in engine.model.modules()]


@pytest.mark.parametrize("plan", ["dp=2,zero=3,recompute=full", "tp=2", "pp=2,microbatches=2"])
def test_modules_in_evaluation_mode_stay_so(pool: Pool, plan: str) -> None:
    expected = [module.training for module in Frozen().modules()]
    for error, modes in pool.run(error_and_modes, plan, ranks=2):
        assert error < BOUND
        assert modes == expected


def test_a_model_in_evaluation_mode_is_trained_and_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    model, loss_fn, batches = case_of(Plain).make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan="dp=1")
    for batch in batches:
        model.eval()
        engine.step(batch)
    assert model.training
    assert capsys.readouterr().out.count("the model was in evaluation mode") == 1


def exchanged(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def tied(model: nn.Module) -> None:
    model.head.weight = model.embed.weight


def frozen(model: nn.Module) -> None:
    model.embed.requires_grad_(False)


def hooked(model: nn.Module) -> None:
    model.embed.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def replaced(model: nn.Module) -> None:
    model.head.bias.data = torch.zeros_like(model.head.bias)


def written(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.bias.fill_(0.5)


def one_written(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.bias[0] = 0.5


def one_of_data_written(model: nn.Module) -> None:
    model.head.weight.data[0, 0] = 0.5


def attempt(plan: str, change: Callable[[nn.Module], None]) -> tuple[str, Tensor]:
    """What the second step says after a change, and the bias then."""
    model, loss_fn, batches = case_of(Plain).make()
    engine: Engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    try:
        change(engine.model)
        engine.step(batches[1])
    except SoliError as error:
        return str(error), torch.empty(0)
    return "", engine.global_state_dict()["head.bias"]


@pytest.mark.parametrize(
    ("change", "plan", "said"),
    [
        (exchanged, "dp=2", "exchanged for others"),
        (tied, "dp=2,zero=1", "got     head.weight"),
        (frozen, "tp=2", "frozen or unfrozen"),
        (frozen, "dp=2", "got     embed.weight\n"),
        (hooked, "dp=2,zero=1", "got     embed.weight"),
        (replaced, "dp=2,zero=1", "got     head.bias\n"),
        (replaced, "dp=2,zero=1", "or write in place"),
        (replaced, "dp=2,zero=3", "use zero=0"),
        (one_written, "dp=2,zero=3", "got     __setitem__ of head.bias\n"),
        (one_of_data_written, "dp=2,zero=3", "got     __setitem__ of head.weight\n"),
        (one_of_data_written, "tp=2,zero=3", "got     __setitem__ of head.weight\n"),
    ],
)
def test_changes_that_training_cannot_follow_are_refused(
    pool: Pool, change: Callable[[nn.Module], None], plan: str, said: str
) -> None:
    for text, _ in pool.run(attempt, plan, change, ranks=2):
        assert said in text


ABSENT: dict[str, Callable[[Tensor], object]] = {
    "__setitem__": lambda x: x.__setitem__(slice(3), 0.0),
    "gt": lambda x: x.masked_fill_(x > 0, 0.0),
    "index_put_": lambda x: x.detach().view(-1).index_put_((torch.tensor([0, 1]),), torch.zeros(2).double()),
    "clamp_": lambda x: x.data.clamp_(-1, 1),
    "fill_": lambda x: x.T.fill_(0.0),
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], 0.5),
    "lerp": lambda x: torch.zeros(x.shape).double().lerp(x, 0.5),
    "__getitem__": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
}


def used_where_it_is_not(name: str, plan: str) -> str:
    model, loss_fn, batches = case_of(Plain).make()
    engine: Engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan)
    for batch in batches[:2]:
        engine.step(batch)
    weight = model.head.weight
    assert (weight.shape, weight.numel(), torch.zeros_like(weight).sum()) == ((29, DIM), 29 * DIM, 0)
    with torch.no_grad(), pytest.raises(SoliError) as caught:
        ABSENT[name](weight)
    engine.step(batches[0])
    assert float(engine.copy_model().head.weight.norm()) > 0
    return str(caught.value)


@pytest.mark.parametrize("name", ABSENT)
def test_a_weight_without_values_is_not_computed_with(pool: Pool, name: str) -> None:
    """torch's own words, NaN, or nothing (`x > 0` was nowhere true), in the place of what one process does."""
    for said in pool.run(used_where_it_is_not, name, "dp=2,zero=3", ranks=2):
        assert "under zero=3 no rank has its values then" in said
        assert f"{name} of head.weight" in said


@pytest.mark.parametrize(
    ("change", "plan"), [(replaced, "dp=2"), (written, "dp=2"), (written, "dp=2,zero=1"), (written, "dp=2,zero=2")]
)
def test_changes_that_it_can_follow_are_followed(pool: Pool, change: Callable[[nn.Module], None], plan: str) -> None:
    (alone, sequential), *_ = pool.run(attempt, "dp=1", change, ranks=1)
    assert not alone
    for text, bias in pool.run(attempt, plan, change, ranks=2):
        assert not text
        torch.testing.assert_close(bias, sequential, rtol=1e-10, atol=1e-12)


def averaged(kept: nn.Module, model: nn.Module) -> None:
    for mine, new in zip(kept.parameters(), model.parameters(), strict=True):
        mine.mul_(0.9).add_(new, alpha=0.1)


def by_differences(kept: nn.Module, model: nn.Module) -> None:
    for mine, new in zip(kept.parameters(), model.parameters(), strict=True):
        mine += 0.1 * new.detach().square()


def at_once(kept: nn.Module, model: nn.Module) -> None:
    torch._foreach_add_(list(kept.parameters()), [x.data for x in model.parameters()])


def norms(kept: nn.Module, model: nn.Module) -> None:
    for param in model.parameters():
        float(param.norm())


def as_arrays(kept: nn.Module, model: nn.Module) -> None:
    for param in model.parameters():
        param.detach().numpy()


def to_a_file(kept: nn.Module, model: nn.Module) -> None:
    torch.save(list(model.parameters()), io.BytesIO())


def as_a_vector(kept: nn.Module, model: nn.Module) -> None:
    nn.utils.parameters_to_vector(model.parameters())


def asked(kept: nn.Module, model: nn.Module) -> None:
    model.state_dict()


def part_asked(kept: nn.Module, model: nn.Module) -> None:
    model.layers[0].state_dict()


def given(kept: nn.Module, model: nn.Module) -> None:
    model.load_state_dict(kept.state_dict())


def smaller(kept: nn.Module, model: nn.Module) -> None:
    """What each rank can do with what it has."""
    assert sum(x.numel() for x in model.parameters()) == sum(x.numel() for x in kept.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    for mine in model.parameters():
        mine.mul_(0.5)
    average.update_parameters(model)
    for mine, other in zip(model.parameters(), average.module.parameters(), strict=True):
        mine.copy_(other)


def weights_used(use: Callable[[nn.Module, nn.Module], None], plan: str) -> tuple[str, dict[str, Tensor]]:
    """What is said of a use of the model's weights beside a copy from before, after a step, and the weights then."""
    model, loss_fn, batches = case_of(Plain).make()
    kept = copy.deepcopy(model.double())
    engine: Engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            use(kept, model)
    except SoliError as error:
        return str(error), {}
    return "", engine.global_state_dict()


def done_as_by_one(pool: Pool, use: Callable[[nn.Module, nn.Module], None], plan: str) -> None:
    (said, expected), *_ = pool.run(weights_used, use, "dp=1", ranks=1)
    assert not said
    for text, found in pool.run(weights_used, use, plan, ranks=2):
        assert not text
        torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (averaged, "add_ is called with a weight of another stage"),
        (by_differences, "add_ is called with a weight of another stage"),
        (at_once, "_foreach_add_ is called with a weight of another stage"),
        (to_a_file, "written to a file"),
        (norms, "__float__ is called with a weight of another stage, and its values are not here"),
        (as_arrays, "numpy is called with a weight of another stage, and its values are not here"),
        (as_a_vector, "cat is called with a weight of another stage beside what is here"),
    ],
)
def test_a_weight_of_another_stage_does_not_pass_for_nothing(
    pool: Pool, use: Callable[[nn.Module, nn.Module], None], said: str
) -> None:
    for rank, (text, _) in enumerate(pool.run(weights_used, use, "pp=2", ranks=2)):
        assert said in text
        assert f"of rank {1 - rank}" in text


def test_what_every_rank_does_to_its_own_stages_weights_is_done(pool: Pool) -> None:
    done_as_by_one(pool, smaller, "pp=2")


MIXING = {
    "mean": lambda model: model.embed.weight.sub_(model.embed.weight.mean(0)),
    "norm": lambda model: model.head.weight.div_(model.head.weight.norm(2, 1, True)),
    "std": lambda model: model.head.weight.mul_(model.head.weight.std(False)),
    "linalg_qr": lambda model: model.head.weight.copy_(torch.linalg.qr(model.head.weight)[0]),
    "renorm": lambda model: model.head.weight.copy_(torch.renorm(model.head.weight, 2, 0, 0.1)),
    "matmul": lambda model: model.head.weight.copy_(model.head.weight @ model.layers[0].weight),
    "_foreach_norm": lambda model: torch._foreach_mul_([model.head.weight], torch._foreach_norm([model.head.weight])),
    "__setitem__": lambda model: model.embed.weight.__setitem__(3, 0.0),
    "__getitem__": lambda model: model.embed.weight[torch.tensor([3])].sum(),
    "sum": lambda model: torch.sum(input=model.embed.weight),
    "index_fill_": lambda model: model.embed.weight.index_fill_(0, torch.tensor([0, 3]), 0.0),
    "fill_diagonal_": lambda model: model.embed.weight.fill_diagonal_(0.0),
    "select": lambda model: model.embed.weight.select(0, 0).zero_(),
    "unbind": lambda model: model.embed.weight.unbind()[0].zero_(),
    "split": lambda model: model.embed.weight.split(2)[0].zero_(),
}
COMPUTED = {
    "norm": lambda x: x.data.norm(),
    "sum": lambda x: (x * x).sum(),
    "max": lambda x: x.detach().clone().abs().max(),
    "__getitem__": lambda x: x.T[0],
    "mean": lambda x: x.view(-1).mean(),
    "any": lambda x: torch.isnan(x).any(),
    "dot": lambda x: torch.dot(x.flatten(), x.flatten()),
    "cat": lambda x: torch.cat([x, x]).norm(),
    "along another": lambda x: x.norm(dim=1).mean(),
    "_foreach_norm": lambda x: torch._foreach_norm(torch._foreach_mul([x], 0.5)),
    "broadcast": lambda x: (x + torch.zeros(2, 1, 1))[0].sum(),
}
PLACES = {
    "ellipsis": lambda x: x[..., 0, :],
    "none": lambda x: x[None, 0],
    "array": lambda x: x[np.array([0])],
    "rows": lambda x: x[torch.arange(len(x)) < 1],
}


def mixed(name: str, plan: str) -> str:
    return weights_used(lambda _, model: MIXING[name](model), plan)[0]


@pytest.mark.parametrize("name", MIXING)
def test_what_takes_elements_together_that_ranks_have_apart_is_refused(pool: Pool, name: str) -> None:
    assert mixed(name, "dp=1") == ""
    for said in pool.run(mixed, name, "tp=2", ranks=2):
        assert f"{name} of " in said, said
        assert "which is cut along dim" in said


def placed(name: str) -> str:
    return weights_used(lambda _, model: PLACES[name](model.embed.weight).sum(), "tp=2")[0]


@pytest.mark.parametrize("name", PLACES)
def test_places_of_a_dim_that_is_cut_are_refused(pool: Pool, name: str) -> None:
    assert all("__getitem__ of " in said for said in pool.run(placed, name, ranks=2))


def computed(name: str, plan: str) -> str:
    return weights_used(lambda _, model: COMPUTED[name](model.embed.weight), plan)[0]


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_of_a_part_is_one(pool: Pool, name: str) -> None:
    """Each was of this rank's part, without a word."""
    assert computed(name, "dp=1") == ""
    assert all("of embed.weight, which is cut along dim" in said for said in pool.run(computed, name, "tp=2", ranks=2))


WHOLE: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "view_as": lambda kept, model: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(kept.parameters()), model.parameters()),
    "copy_": lambda kept, model: model.embed.weight.copy_(kept.embed.weight),
    "mul_": lambda kept, model: model.layers[0].bias.data.mul_(kept.layers[0].bias > 0),
    "__setitem__": lambda kept, model: model.embed.weight.__setitem__(..., kept.embed.weight),
    "__set__": lambda kept, model: setattr(model.embed.weight, "data", kept.embed.weight.data),
}


for at_once_name in ("copy", "mul", "lerp"):
    WHOLE[f"_foreach_{at_once_name}_"] = lambda kept, model, name=at_once_name: getattr(torch, f"_foreach_{name}_")(  # type: ignore[misc]
        [x.data for x in model.parameters()], list(kept.parameters()), *[0.5] * (name == "lerp")
    )


def written_whole(name: str, plan: str) -> str:
    return weights_used(WHOLE[name], plan)[0]


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_for_the_whole_is_not_written_into_a_part(pool: Pool, name: str) -> None:
    """It ended in torch's words."""
    assert written_whole(name, "dp=1") == ""
    for said in pool.run(written_whole, name, "tp=2", ranks=2):
        assert f"{name} of " in said
        assert "with what is of the whole one's size" in said


def by_lengths(kept: nn.Module, model: nn.Module, write: Callable[[Tensor, Tensor], object]) -> None:
    """A vector of some weights, cut as programs cut it."""
    some = [name for name, x in model.named_parameters() if x.dim() == 2]
    vector, at = torch.cat([kept.get_parameter(name).flatten() for name in some]).clone(), 0
    for x in map(model.get_parameter, some):
        write(x, vector[at : at + x.numel()])
        at += x.numel()


def own_vector(kept: nn.Module, model: nn.Module) -> None:
    """One that a program makes of what is here is cut by what is here."""
    moments = torch.zeros(sum(x.numel() for x in model.parameters())).double()
    for x, some in zip(model.parameters(), moments.split([x.numel() for x in model.parameters()]), strict=True):
        x.add_(some.lerp_(x.flatten(), 0.1).view(x.shape)).add_(x.new_zeros(x.shape))
        x.sub_(copy.deepcopy(x) * 0.1).mul_(torch.linspace(0.5, 1, x.shape[-1]).double() if x is model.embed.weight else 1.0)


BY_SIZE: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "copy_": lambda kept, model: by_lengths(kept, model, lambda x, some: x.data.copy_(some.view(x.shape))),
    "add_": lambda kept, model: by_lengths(kept, model, lambda x, some: x.data.view(-1).add_(some)),
    "add": lambda kept, model: model.head.weight.copy_(model.head.weight + torch.randn(model.head.weight.shape).double()),
    "mul_": lambda kept, model: model.head.weight.data.mul_(torch.rand(model.head.weight.shape) < 0.5),
    "_foreach_add_": lambda kept, model: torch._foreach_add_([model.embed.weight.data], [torch.randn(model.embed.weight.shape).double()]),
    "lerp_": lambda kept, model: model.embed.weight.lerp_(torch.randn(len(model.embed.weight), 1).double(), 0.5),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_what_is_made_by_the_size_of_a_part_is_not_put_beside_it(pool: Pool, name: str) -> None:
    """Vectors of some weights that were cut by the lengths of parts, and draws of a part's shape, were of every rank's first elements, without a word."""
    for said in pool.run(made_by_size, name, ranks=2):
        assert "with numbers of the part's size, between steps, that are the same on every rank" in said
        assert f"got     {name} of " in said


def made_by_size(name: str) -> str:
    model, loss_fn, batches = case_of(Plain).make()
    kept = copy.deepcopy(model.double())
    engine: Engine = parallelize(model, loss_fn, optimizer=adamw, plan="tp=2")
    engine.step(batches[0])
    with torch.no_grad():
        BY_SIZE[name](kept, model)
    with pytest.raises(SoliError) as caught:
        engine.global_state_dict() if name == "add" else engine.evaluate([batches[0]]) if name == "mul_" else engine.step(batches[0])
    return str(caught.value)


def test_what_a_program_makes_of_parts_is_put_beside_them(pool: Pool) -> None:
    done_as_by_one(pool, own_vector, "tp=2")


def noisy(kept: nn.Module, model: nn.Module) -> None:
    for x in model.parameters():
        x.add_(torch.randn_like(x)).data.mul_(x.data.new_empty(x.shape).uniform_())


def test_what_is_drawn_for_weights_of_other_stages_is_drawn_there_too(pool: Pool) -> None:
    """It was not, and what each rank drew next was another number than one process drew."""
    done_as_by_one(pool, noisy, "pp=2")


def drawn(kept: nn.Module, model: nn.Module) -> None:
    nn.init.trunc_normal_(model.embed.weight, std=0.02)


def drawn_beside(kept: nn.Module, model: nn.Module) -> None:
    nn.init.orthogonal_(model.embed.weight)


@pytest.mark.parametrize("use", [drawn, drawn_beside])
def test_numbers_that_are_drawn_are_said_to_be(pool: Pool, use: Callable[[nn.Module, nn.Module], None]) -> None:
    for said, _ in pool.run(weights_used, use, "tp=2", ranks=2):
        what = "numbers are drawn into a weight between steps, of which each rank has a part"  # torch 2.11 makes normal ones of uniform ones
        assert re.match(rf"{what}\n  got     (normal|uniform)_ of embed.weight", said)


def by_parts(kept: nn.Module, model: nn.Module) -> None:
    """What parts have as the whole has it, and what is no computation."""
    for x in model.parameters():
        x[x.abs() < 0.05] = 0.0
        x.copy_(torch.where(x > 0.2, 0.2, x) + x.data.clamp(max=0.1))
    for x, dim in ((model.embed.weight, 1), (model.head.weight, 0)):  # cut along the other
        x.div_(x.norm(dim=dim, keepdim=True)).sub_(x.mean(dim, True))
        x.mul_(nn.functional.normalize(x, dim=dim))
        x.add_(x.softmax(dim=dim)).div_(torch.linalg.vector_norm(x, dim=dim, keepdim=True)).add_(x.detach().clone().view_as(x))
        x.select(dim, 0).zero_()
        x.masked_fill_(torch.isclose(x, torch.zeros_like(x)), 0.5)
    model.embed.weight[:, 0] += model.embed.weight.sum(-1)
    model.head.weight[3] = 0.0
    torch._foreach_mul_(list(model.parameters()), 0.5)
    torch._foreach_add_(list(model.parameters()), torch._foreach_abs(list(model.parameters())))
    nn.init.constant_(model.layers[0].bias, 0.25)
    model.zero_grad()
    torch.save(list(model.parameters()), io.BytesIO())
    torch.save(model.head.weight.data, file := io.BytesIO())
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is Tensor
    assert type(copy.deepcopy(model.head.weight.data * 2)) is Tensor
    copied = copy.deepcopy(model)
    assert "Parameter" in f"{model.head.weight}"
    assert model.head.weight.numpy().ndim == 2
    assert float(copied.head.weight.norm()) > 0
    assert nn.utils.parameters_to_vector(model.parameters()).numel() > 0
    smaller(model, model)


def test_what_parts_have_as_the_whole_has_it_is_done(pool: Pool) -> None:
    done_as_by_one(pool, by_parts, "tp=2")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw, at once": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd, at once": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "rmsprop, at once": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.1, weight_decay=0.1, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "nadam, at once": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, foreach=True),
    "asgd, at once": lambda p: torch.optim.ASGD(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1),
}


def trained(name: str, plan: str) -> dict[str, Tensor]:
    model, loss_fn, batches = case_of(Plain).make()
    engine = parallelize(model.double(), loss_fn, optimizer=OPTIMIZERS[name], clip=0.5, plan=plan)
    for batch in batches:
        engine.step(batch)
    return engine.global_state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_parts(pool: Pool, name: str) -> None:
    expected = trained(name, "dp=1")
    for found in pool.run(trained, name, "tp=2", ranks=2):
        torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(
    ("use", "plan"),
    spread([(asked,), (part_asked,), (given,)], [("tp=2",), ("pp=2",), ("dp=2,zero=3",), ("dp=2,zero=1",), ("dp=1",)]),
)
def test_a_state_of_parts_is_not_taken_for_the_whole(
    pool: Pool, use: Callable[[nn.Module, nn.Module], None], plan: str
) -> None:
    for text, _ in pool.run(weights_used, use, plan, ranks=1 if plan == "dp=1" else 2):
        if plan in ("dp=1", "dp=2,zero=1"):
            assert not text
        else:
            assert "state_dict() of a model that lies on several ranks" in text


def plain_state(plan: str) -> bool:
    model, loss_fn, batches = case_of(Plain).make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    state, plain = engine.global_state_dict(), engine.copy_model()
    plain.load_state_dict(state)
    return all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp=2,zero=3,recompute=full"])
def test_a_plain_copy_has_a_plain_state(pool: Pool, plan: str) -> None:
    assert all(pool.run(plain_state, plan, ranks=2))
