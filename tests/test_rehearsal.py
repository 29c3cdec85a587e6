"""A rehearsed step against the real one: the same bytes, the same operations, the same collectives; and what it says."""

from __future__ import annotations

import resource
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soli
from cases import CASES
from everyplan import spaces
from pool import Pool
from soli.core.errors import SoliError
from soli.core.events import events
from soli.core.frames import here
from soli.core.plan import Plan
from soli.core.versions import FLOPS
from soli.engine.engine import parallelize
from soli.engine.rehearse import Program, rehearse
from soli.mesh.record import recorder
from soli.models.gpt import GPT, GPTConfig
from soli.models.llama import Llama, LlamaConfig
from soli.planner.cost.memory import activations_of_layer
from soli.planner.cost.points import FULL, NONE
from soli.planner.hardware.clusters import read_cluster
from soli.planner.hollow import Hollow, Tracker, hollowed
from soli.planner.legality import resolve
from soli.planner.models import Model
from soli.planner.task import Task
from sweep import swept

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import rehearsed

ROWS = [
    ("gpt", "dp=1,recompute=selective", 1),
    ("gpt", "dp=1,precision=bf16,accumulate=2", 1),
    ("gpt", "dp=2,zero=3,recompute=full", 2),
    ("gpt-dropout", "dp=2,zero=2,accumulate=2", 2),
    ("gpt", "tp=2", 2),
    ("bert", "cp=2,zero=2,accumulate=3,recompute=full", 2),
    ("gpt", "tp=4,tensor=2d", 4),
    ("gpt-masked", "cp=2,zero=1,context=scores", 2),
    ("llama", "tp=2,sp=on,recompute=selective", 2),
    swept("gpt-masked", "dp=2,cp=2,replicate=2,zero=1,context=scores", 4),
    swept("llama", "dp=2,tp=2,sp=on,zero=2,recompute=selective", 4),
    swept("gpt", "dp=2,pp=2,zero=3,microbatches=2,accumulate=2,schedule=zbv", 4),
    swept("llama", "cp=2,pp=2,microbatches=2,schedule=gpipe,context=scores", 4),
    ("gpt-start", "pp=2,microbatches=4,schedule=interleaved,chunks=2,recompute=full", 2),
    ("gpt-masked", "pp=2,microbatches=4,schedule=dualpipev,recompute=full", 2),
    swept("gpt-masked", "pp=2,tp=2,sp=on,microbatches=4,schedule=dualpipev,recompute=full", 4),
    swept("vit", "cp=2,pp=2,microbatches=4,schedule=zbv,zero=3,recompute=full", 4),
    # A rank without a target keeps no graph while it waits for others.
    ("hf-t5", "dp=2,zero=3,accumulate=1", 2),
    swept("hf-bert", "tp=4,tensor=2d", 4),
]


@pytest.mark.parametrize(("name", "plan", "ranks"), ROWS)
def test_memory_is_what_is_tracked(pool: Pool, name: str, plan: str, ranks: int) -> None:
    """A hundredth at most of the peak. States but for the steps of AdamW of another rank's parameters, 4 bytes each."""
    row = rehearsed.row(pool, name, plan, ranks)
    assert row.error <= rehearsed.BOUND
    parameters = len(list(CASES[name].make()[0].parameters()))
    assert abs(row.states - row.states_rehearsed) <= 4 * parameters


def really(name: str, plan: str) -> list[tuple[str, tuple[int, ...], int]]:
    """The collectives of a step of this rank, really run: the third, before which parameters are not compared."""
    case = CASES[name]
    model, loss_fn, batches = case.make()
    engine = parallelize(model.double(), loss_fn, optimizer=case.optimizer, clip=case.clip, plan=plan)
    for _ in range(2):
        engine.step(batches[0])
    recorder.clear()
    engine.step(batches[0])
    return [(record.operation, record.ranks, record.bytes) for record in recorder.records]


def program(name: str) -> Program:
    case = CASES[name]
    model, loss_fn, batches = case.make()
    model.double()
    return Program(model, case.optimizer(model.parameters()), loss_fn, batches[0], case.clip, backend="local")


def of_tokens(model: nn.Module, rows: int, seq: int) -> Program:
    """A language model that AdamW trains on a batch [rows, seq]."""
    tokens = torch.zeros(rows, seq, dtype=torch.int64)
    return Program(
        model,
        torch.optim.AdamW(model.parameters()),
        soli.losses.cross_entropy("targets"),
        {"tokens": tokens, "targets": tokens},
    )


@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        ("gpt", "dp=2,zero=3", 2),
        ("gpt", "dp=2,tp=2,sp=on,zero=1", 4),
        ("gpt", "tp=4,tensor=2d", 4),
        ("gpt", "pp=2,cp=2,microbatches=2,context=ulysses", 4),
    ],
)
def test_collectives_are_those_of_the_run(pool: Pool, name: str, plan: str, ranks: int) -> None:
    real = pool.run(really, name, plan, ranks=ranks)
    for run in rehearse(program(name), resolve(Plan.parse(plan), ranks)).ranks:
        assert [(sent.operation, sent.ranks, sent.bytes) for sent in run.sent] == real[run.rank]


def test_operations_are_those_of_the_run() -> None:
    """The same calls with the same shapes, flops and bytes, in the same order."""
    case = CASES["gpt-dropout"]
    model, loss_fn, batches = case.make()
    tracker = Tracker()
    with tracker:
        engine = parallelize(model.double(), loss_fn, optimizer=case.optimizer, clip=case.clip, plan="dp=1")
        engine.step(batches[0])
        tracker.calls = []
        engine.step(batches[0])
    found = rehearse(program("gpt-dropout"), Plan(dp=1)).ranks[0].calls
    heavy = lambda calls: [(call.name, call.shapes, call.flops) for call in calls if call.flops]
    assert heavy(found) == heavy(tracker.calls)
    assert sum(call.flops for call in found) > 0


def test_a_model_larger_than_the_machine() -> None:
    """16 billion parameters in fp32, 260 GB of states in all: those of a rank by hand, and no memory taken."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=32000, context=512, dim=8192, layers=20, heads=64))
    count = sum(p.numel() for p in model.parameters())
    made = of_tokens(model, 8, 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = rehearse(made, Plan(dp=8, zero=3, recompute="full"))
    assert found.states == pytest.approx(count / 8 * 16, rel=0.01)  # a weight, its gradient, two moments in fp32
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300e3  # kB


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "pp=2,microbatches=2", "tp=2"])
def test_states_that_an_optimizer_has_are_those_that_it_would_make(plan: str) -> None:
    """And take no memory themselves: a copy of 200 MB is not made."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.GELU()) for _ in range(6)))
    made = Program(model, torch.optim.AdamW(model.parameters()), squares, (torch.randn(8, 2048), torch.randn(8, 2048)))
    asked = resolve(Plan.parse(plan), 2)
    fresh = rehearse(made, asked)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    made.optimizer.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = rehearse(made, asked)
    assert [(run.states, run.peak) for run in found.ranks] == [(run.states, run.peak) for run in fresh.ranks]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100e3  # kB


@pytest.mark.parametrize("plan", ["pp=2,microbatches=4", "pp=4,microbatches=4,zero=1,schedule=gpipe"])
def test_what_another_stage_has_takes_nothing(plan: str) -> None:
    """All stages together have what one device has: by hand, since who tracks could count what is not there."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)))
    count = sum(p.numel() for p in model.parameters())
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    made = Program(model, torch.optim.AdamW(model.parameters()), squares, batch)
    found = rehearse(made, resolve(Plan.parse(plan), int(plan[3])))
    assert sum(run.states for run in found.stages) == count * 16 + 4 * len(list(model.parameters()))


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), outputs.numel()


class Chooses(nn.Module):
    """A forward whose shapes depend on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y[y[:, 0] > 0]


def test_what_cannot_be_run_for_its_shapes_is_named() -> None:
    model = Chooses()
    made = Program(
        model,
        torch.optim.SGD(model.parameters()),
        lambda out, batch: (out.sum(), 1),
        (torch.randn(4, 8), torch.zeros(4)),
    )
    with pytest.raises(SoliError, match="depends on values") as caught:
        rehearse(made, Plan(dp=1))
    said = str(caught.value)
    assert "Chooses" in said
    assert "test_rehearsal.py:" in said


def test_a_rehearsal_leaves_nothing_behind(capsys: Any) -> None:
    """Neither words nor events, nor records, nor random numbers, nor gradients; and the model is as it was."""
    made = program("gpt-dropout")
    weights = [p.clone() for p in made.model.parameters()]
    random, seen, issued = torch.get_rng_state(), len(events.recent), recorder.issued
    rehearse(made, Plan(dp=1, pp=2, microbatches=2))
    assert torch.equal(random, torch.get_rng_state())
    assert (len(events.recent), recorder.issued) == (seen, issued)
    assert all(torch.equal(p, w) and p.grad is None for p, w in zip(made.model.parameters(), weights, strict=True))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("keys", [1, 2, 8])
def test_attention_of_queries_that_share_keys_counts_each_query(keys: int) -> None:
    """By the shapes of 2 sequences of 16 tokens and 8 heads of 4: two products forward, five backward."""
    query, key = (torch.empty(2, heads, 16, 4, device="meta") for heads in (8, keys))
    product = 2 * 2 * 8 * 16 * 16 * 4
    for kernel in ("efficient", "flash", "cudnn"):
        forward, backward = (
            FLOPS[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{end}")] for end in ("", "_backward")
        )
        assert forward(query, key, key, out_val=query) == 2 * product
        assert backward(query, query, key, key, query, out_val=query) == 5 * product


def test_hollow_values_are_zero_and_known_ones_stay() -> None:
    """What comes from weights is 0 where it is looked at; masks and positions of the batch are what they are."""
    hollow = Hollow()
    (model,) = hollowed(hollow, nn.Linear(64, 64))
    x = torch.arange(128.0).view(2, 64)
    with hollow:
        out = model(x)
        mask = x > 63
        assert float(out.detach().sum()) == 0.0
        assert hollow.is_hollow(out)
        assert int(mask.sum()) == 64
        assert not hollow.is_hollow(mask)
        assert out[mask[:, 0]].shape == (1, 64)  # by a mask that is known
    assert hollow.bytes >= 64 * 64 * 4


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
def test_what_changes_a_tensor_s_own_shape_is_done_to_hollow_ones(kind: type[nn.Module]) -> None:
    """torch's recurrent layers transpose in place: every operation, forward and backward, has the shapes that it has with values."""

    def run(model: nn.Module) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
        tracker.calls = []
        model(torch.zeros(4, 12, 8))[0].sum().backward()
        return [(call.name, call.shapes) for call in tracker.calls]

    plain, found = kind(8, 8, batch_first=True), []
    for tracker in (Tracker(), hollow := Hollow()):
        (model,) = hollowed(hollow, plain) if tracker is hollow else (plain,)
        with tracker:
            found.append(run(model))
    assert found[0] == found[1]
    x = torch.empty(3, 1, 2)
    with (hollow := Hollow()):
        hollow.mark(x)
        assert x.squeeze_().t_().unsqueeze_(0).shape == (1, 2, 3)
        assert x.shape == (1, 2, 3)


def test_looking_who_runs_keeps_nothing_that_a_frame_has_let_go_of() -> None:
    """Python before 3.13 keeps a copy of a frame's names that were looked at, until it ends."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[str, bool]:
            kept = torch.ones(3)
            seen = weakref.ref(kept)
            name = here()
            del kept
            return name, seen() is None

    name, gone = Model()(torch.ones(1))
    assert name.startswith("Model at ")
    assert gone


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("schedule", ["zbh1", "dualpipev"])
def test_a_backward_in_two_halves_makes_a_block_again_once(schedule: str, recompute: str) -> None:
    """Attention is computed as often as under 1F1B, whatever number of products has its own gradients' half."""
    model = GPT(GPTConfig(vocab=64, dim=64, layers=4, heads=4, context=128))
    made = of_tokens(model, 16, 128)

    def run(schedule: str, recompute: str) -> tuple[int, int]:
        plan = resolve(Plan.parse(f"pp=2,microbatches=4,schedule={schedule},recompute={recompute}"), 2)
        found = rehearse(made, plan)
        calls = [call.name for rank in found.ranks for call in rank.calls]
        return sum("attention" in name and "backward" not in name for name in calls), found.peak

    attended, peak = run(schedule, recompute)
    assert attended == run("1f1b", recompute)[0]
    if recompute == "full":  # beside what was made again, selective has the results that it had kept
        assert peak <= run(schedule, "none")[1]


def test_a_second_half_has_no_gradients_of_its_own() -> None:
    """Of few tokens and wide layers: what zbh1 takes beside its states is less than half of the gradients, which lie in the reducer."""
    made = of_tokens(GPT(GPTConfig(vocab=16, dim=256, layers=4, heads=4, context=4)), 4, 4)
    found = rehearse(made, resolve(Plan.parse("pp=2,microbatches=4,schedule=zbh1"), 2))
    gradients = 2 * 12 * 256**2 * 4
    assert all(run.peak - run.states < gradients / 2 for run in found.stages)


@pytest.mark.parametrize(
    ("kind", "on", "plan", "recompute"),
    [
        (kind, on, plan, recompute) if (i + j + k) % 2 == 0 else swept(kind, on, plan, recompute)  # every two of them together
        for i, (kind, on) in enumerate([(GPT, "cuda"), (Llama, "cuda"), (Llama, "cpu")])
        for j, plan in enumerate(["tp=1", "tp=2", "tp=2,sp=on"])
        for k, recompute in enumerate(["none", "full"])
    ],
)
def test_what_autocast_keeps_of_a_layer_is_counted(kind: type[nn.Module], on: str, recompute: str, plan: str) -> None:
    """The formula's bytes of a layer and token against the growth of a rehearsed peak with both: within a hundredth."""
    dim, seq, heads, ffn, ranks = 128, 64, 4, 512, 2 if "tp=2" in plan else 1
    config = GPTConfig if kind is GPT else LlamaConfig
    more = {"context": seq} if kind is GPT else {"groups": heads, "hidden": ffn}

    def peak(layers: int, rows: int) -> int:
        model = kind(config(vocab=64, dim=dim, layers=layers, heads=heads, **more))
        said = resolve(Plan.parse(f"{plan},precision=bf16,recompute={recompute}"), ranks)
        return rehearse(replace(of_tokens(model, rows, seq), device=on), said).peak

    sizes = {
        "layers": 1, "hidden": dim, "heads": heads, "kv_heads": heads, "head_size": dim // heads, "ffn": ffn,
        "gated": kind is Llama, "vocab": 64, "seq": seq, "tied": 0,
    }  # fmt: skip
    task = Task(
        Model("", **sizes, experts=0, active=1), read_cluster(f"{'h100' if on == 'cuda' else 'cpu'}:{ranks}"), 1, seq,
        fixed={"tp": float(ranks), "sp": float("sp" in plan), "recompute": {"none": NONE, "full": FULL}[recompute], "microbatch": 1.0},
    )  # fmt: skip
    counted = activations_of_layer(spaces(task))[0]
    grown = (peak(4, 128) - peak(4, 64)) - (peak(2, 128) - peak(2, 64))
    assert grown / (2 * 64) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    "plan", ["dp=2,zero=2,accumulate=2", "dp=2,zero=3,accumulate=2", "dp=2,pp=2,microbatches=2,zero=2"]
)
def test_whole_gradients_have_no_part_of_the_last_steps_beside_them(plan: str) -> None:
    """Of few tokens and wide layers: between steps there is half of a gradient, and at the fullest moment all of it in its place."""
    made = of_tokens(GPT(GPTConfig(vocab=16, dim=1024, layers=8, heads=4, context=4)), 8, 4)
    asked = Plan.parse(plan)
    found = rehearse(made, resolve(asked, 2 * asked.pp))
    gradients = 8 // asked.pp * 12 * 1024**2 * 4
    more = [run.peak - run.states for run in found.stages]
    gathered = 3 * 12 * 1024**2 * 4 if asked.zero == 3 else 0  # of three layers
    assert all(size < 0.75 * gradients + gathered for size in more), [size / gradients for size in more]


class Repeats(nn.Module):
    """A layer again and again, each with a product after it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(layer, nn.Linear(64, 64, bias=False)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LAYERS, READ = 12, 4096


class Softmax(nn.Module):
    """torch's own, its arguments by name, or with a type that its caller wants."""

    def __init__(self, *dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1, *self.dtype) if self.dtype else torch.softmax(input=x, dim=-1)


def cross_entropies(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    """As a user writes it."""
    return torch.nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


@pytest.mark.parametrize(
    ("layer", "loss_fn", "plan", "more"),
    [
        # one kernel keeps what it reads; written out also what it scales
        (nn.RMSNorm(64), squares, "dp=1", -4 * LAYERS),
        # which it is on CUDA too after products in 16 bits, whose type is not its weight's: all but the first
        (nn.RMSNorm(64), squares, "dp=1,precision=bf16", -4),
        # autocast on CUDA makes a softmax of 16 bits in fp32, and the product keeps its cast beside it: all but the first
        (nn.Softmax(-1), squares, "dp=1,precision=bf16", 4 * (LAYERS - 1)),
        (Softmax(), squares, "dp=1,precision=bf16", 4 * (LAYERS - 1)),
        (Softmax(torch.bfloat16), squares, "dp=1,precision=bf16", 0),
        (nn.Softmax(-1), squares, "dp=1", 0),
        # and cross_entropy's in 16 bits, cast afterwards
        (nn.Identity(), cross_entropies, "dp=1,precision=bf16", -2),
    ],
)
def test_a_rehearsal_for_cuda_keeps_what_its_kernels_do(layer: nn.Module, loss_fn: Any, plan: str, more: int) -> None:
    """Bytes an element beside what the CPU's keep, by hand; on an H100: benchmarks/results/gpu.md."""
    model = Repeats(layer)
    targets = torch.zeros(READ, dtype=torch.int64) if loss_fn is cross_entropies else torch.zeros(READ, 64)
    made = Program(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn, (torch.zeros(READ, 64), targets))
    cpu, cuda = (rehearse(replace(made, device=on), resolve(Plan.parse(plan), 1)) for on in ("cpu", "cuda"))
    assert cuda.states == cpu.states
    assert (cuda.peak - cpu.peak) / (READ * 64) == pytest.approx(more, abs=0.5)
