"""Roles: found from the model's run, said by the user, checked in float64; checkpoints and errors under tp."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, WhisperConfig

from cases import CASES
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine.batch import Caller
from soli.engine.engine import parallelize
from soli.engine.layout import Runner
from soli.engine.remembered import Remembering
from soli.mesh.record import recorder
from soli.models.gpt import GPT, GPTConfig
from soli.parallel.tensor import cut
from soli.verify.parity import adamw
from typed import soli, soli_anew


def roles(model: nn.Module, batch: Any, ranks: int, loss=None, hints=None) -> dict[str, tuple]:
    rows = len(next(iter(batch.values())))
    runner = Runner(model, Caller(model), Remembering(loss or losses.from_model()), batch, rows, Plan(tp=ranks))
    found, _ = runner.search(ranks, False, hints or {})
    return {
        n: (r.kind, None if r.split is None else (r.split.dim, r.split.parts, r.split.atoms)) for n, r in found.items()
    }


class Attention(nn.Module):
    """One way to write attention: how q, k and v are fused, and how many heads share a key."""

    def __init__(self, fused: str, heads: int, groups: int, head: int = 4) -> None:
        super().__init__()
        self.fused, self.heads, self.groups, self.head = fused, heads, groups, head
        self.qkv = nn.Linear(12, (heads + 2 * groups) * head)
        self.out = nn.Linear(heads * head, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h, g, e = self.heads, self.groups, self.head
        made = self.qkv(x)
        if self.fused == "thirds":  # [q | k | v], as GPT-2
            q, k, v = made.split([h * e, g * e, g * e], -1)
            q, k, v = q.view(b, s, h, e), k.view(b, s, g, e), v.view(b, s, g, e)
        elif self.fused == "outer three":  # ViTs: [3, heads, head]
            q, k, v = made.reshape(b, s, 3, h, e).permute(2, 0, 1, 3, 4)
        elif self.fused == "inner three":  # GPT-NeoX: [heads, 3 * head]
            q, k, v = made.view(b, s, h, 3 * e).chunk(3, -1)
        else:  # groups of [queries..., key, value], as Falcon 40B
            grouped = made.view(b, s, g, h // g + 2, e)
            q, k, v = grouped[..., :-2, :].reshape(b, s, h, e), grouped[..., -2, :], grouped[..., -1, :]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(h // g, 1) for t in (k, v))
        weights = (q @ k.transpose(-2, -1) / e**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, h * e))


class Block(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(12), Attention(*args)
        self.gate_up, self.down = nn.Linear(12, 20, bias=False), nn.Linear(10, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Stack(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*args) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BATCH = {"x": torch.linspace(-1, 1, 120).view(2, 5, 12), "targets": torch.ones(2, 5, 12)}
ROOT = Path(__file__).resolve().parent.parent
MSE = losses.mse("targets")


@pytest.mark.parametrize(
    ("fused", "heads", "groups", "expected"),
    [
        ("thirds", 4, 4, ((16, 16, 16), 4)),
        ("thirds", 4, 2, ((16, 8, 8), 2)),
        ("thirds", 3, 3, ((12, 12, 12), 3)),
        ("outer three", 4, 4, ((16, 16, 16), 4)),
        ("inner three", 4, 4, ((48,), 4)),
        ("groups", 4, 2, ((32,), 2)),
    ],
)
def test_fused_matrices_are_taken_apart_by_heads(fused: str, heads: int, groups: int, expected: tuple) -> None:
    found = roles(Stack(fused, heads, groups), BATCH, 2, MSE)
    parts, atoms = expected
    for layer in ("blocks.0", "blocks.1"):
        assert found[f"{layer}.attention.qkv.weight"] == ("column", (0, parts, atoms))
        assert found[f"{layer}.attention.qkv.bias"] == ("bias", (0, parts, atoms))
        assert found[f"{layer}.attention.out.weight"] == ("row", (1, (heads * 4,), atoms))
        assert found[f"{layer}.attention.out.bias"] == ("replicated", None)
        assert found[f"{layer}.gate_up.weight"] == ("column", (0, (10, 10), 10))
        assert found[f"{layer}.down.weight"] == ("row", (1, (10,), 10))


def test_too_few_heads_stay_whole_and_the_rest_is_cut() -> None:
    found = roles(Stack("thirds", 3, 1), BATCH, 4, MSE)
    assert found["blocks.0.attention.qkv.weight"] == ("replicated", None)
    assert found["blocks.0.attention.out.weight"] == ("replicated", None)
    assert found["blocks.0.down.weight"] == ("row", (1, (10,), 10))


def test_what_the_user_says_holds() -> None:
    hints = {"*.attention.qkv": "replicated", "*.1.gate_up": "replicated"}
    found = roles(Stack("thirds", 4, 4), BATCH, 2, MSE, hints)
    assert found["blocks.0.attention.qkv.weight"] == ("replicated", None)
    assert found["blocks.0.gate_up.weight"][0] == "column"
    assert found["blocks.1.gate_up.weight"] == ("replicated", None)


def gpt() -> GPT:
    return GPT(GPTConfig(vocab=29, context=7, dim=12, layers=2, heads=3, dropout=0.1, tied=True))


def test_gpt() -> None:
    tokens = torch.arange(14).view(2, 7)
    found = roles(gpt(), {"tokens": tokens, "targets": tokens}, 2, losses.cross_entropy("targets"))
    assert found["embedding.weight"] == ("vocabulary", (0, (29,), 29))
    assert found["positions.weight"] == ("replicated", None)
    assert found["blocks.1.attention.key.weight"] == ("column", (0, (12,), 3))
    assert found["blocks.1.mlp.down.weight"] == ("row", (1, (48,), 48))
    assert found["norm.weight"] == ("replicated", None)


def test_the_search_leaves_the_model_as_it_was() -> None:
    model = gpt()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    tokens = torch.arange(14).view(2, 7)
    roles(model, {"tokens": tokens, "targets": tokens}, 2, losses.cross_entropy("targets"))
    assert all(type(p) is nn.Parameter and not hasattr(p, "cuts") for p in model.parameters())
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())


# --- on ranks -------------------------------------------------------------------------------------------


def fused_parity(fused: str, heads: int, groups: int) -> float:
    """The worst error of the loss and the gradients of a stack under tp, in float64."""
    torch.manual_seed(0)
    model = Stack(fused, heads, groups).double()
    batch = {n: t.double() for n, t in BATCH.items()}
    total, count = MSE(model(batch["x"]), batch)
    (total / count).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(0)
    engine = parallelize(Stack(fused, heads, groups).double(), MSE, optimizer=adamw, plan="tp=3,sp=on")
    loss = engine.forward_backward(batch)
    got = engine.global_gradients()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(
        abs(float(loss) - float(total / count)),
        *(float((got[n] - g).abs().max()) / largest for n, g in expected.items()),
    )


@pytest.mark.parametrize(("fused", "heads", "groups"), [("thirds", 4, 2), ("outer three", 5, 5), ("groups", 4, 4)])
def test_fused_matrices_compute_the_same(pool: Pool, fused: str, heads: int, groups: int) -> None:
    assert all(error < 1e-12 for error in pool.run(fused_parity, fused, heads, groups, ranks=3))


def wrong_rule() -> str:
    """A rule that forgets the sum of a column's input: the check must refuse the layout before training."""
    real = cut.entered
    cut.entered = lambda run, x: x
    try:
        engine = parallelize(
            Stack("thirds", 4, 4), MSE, optimizer=adamw, plan="tp=2", example=BATCH, roles={"*.qkv": "column"}
        )
        engine.step(BATCH)
    except SoliError as error:
        return str(error)
    finally:
        cut.entered = real
    return ""


def test_a_layout_that_computes_something_else_is_refused(pool: Pool) -> None:
    for said in pool.run(wrong_rule, ranks=2):
        assert "blocks.0 (Block) does not compute what it computes whole" in said
        assert 'roles={"blocks.0.*": "replicated"}' in said


def bad_input() -> list[str]:
    found = []
    for make in (
        lambda: parallelize(gpt(), MSE, optimizer=adamw, plan="tp=2", roles={"*.up": "rows"}),
        lambda: parallelize(gpt(), MSE, optimizer=adamw, plan="tp=2").global_state_dict(),
        lambda: parallelize(
            gpt(), MSE, optimizer=lambda p: torch.optim.Muon([w for w in p if w.dim() == 2], lr=0.1), plan="tp=2"
        ),
    ):
        try:
            make()
            found.append("")
        except SoliError as error:
            found.append(str(error))
    return found


def test_bad_input(pool: Pool) -> None:
    for role, early, muon in pool.run(bad_input, ranks=2):
        assert "the role of '*.up' is not known" in role
        assert "row" in role
        assert "example=batch" in early
        assert "cannot be tried, so whether its states can be cut is not known" in muon


DATA = [{"tokens": r[:-1], "targets": r[1:]} for r in torch.arange(30 * 8).view(30, 8) * 7 % 29]


def trained(plan: str, path: str, load: bool, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(5)
    engine = parallelize(gpt().double(), losses.cross_entropy("targets"), optimizer=adamw, clip=1.0, plan=plan)
    found = []
    if load:
        assert engine.load(path) == {"a": 1}
    for batch in engine.batches(DATA, 7, epochs=3):
        found.append(float(engine.step(batch)))
        if engine.step_count == steps:
            break
    if not load:
        engine.save(path, extra={"a": 1})
    return found, engine.global_state_dict(optimizer=True)


@pytest.mark.parametrize(
    ("first", "n", "second", "m"),
    [("tp=2,sp=on", 2, "tp=2,sp=on", 2), ("tp=3", 3, "dp=2,zero=3", 2), ("dp=2,zero=2", 2, "dp=2,tp=2,zero=1", 4)],
)
def test_checkpoints_across_plans(pool: Pool, tmp_path: Path, first: str, n: int, second: str, m: int) -> None:
    straight, whole = pool.run(trained, "dp=1", str(tmp_path / "s"), False, 6, ranks=1)[0]
    one, _ = pool.run(trained, first, str(tmp_path / "c"), False, 3, ranks=n)[0]
    two, state = pool.run(trained, second, str(tmp_path / "c"), True, 6, ranks=m)[0]
    assert one + two == pytest.approx(straight, rel=1e-11)
    assert whole.keys() == state.keys()
    for name, value in whole.items():
        assert state[name].shape == value.shape
    if n == m:
        both = pool.run(trained, first, str(tmp_path / "b"), False, 6, ranks=n)[0]
        assert one + two == both[0]
        assert all(torch.equal(both[1][name], state[name]) for name in state)


def evaluated_first(plan: str) -> float:
    """The evaluation that lays the model out runs without dropout too."""
    torch.manual_seed(5)
    engine = parallelize(gpt().double(), losses.cross_entropy("targets"), optimizer=adamw, plan=plan)
    return engine.evaluate([{"tokens": torch.arange(28).view(4, 7), "targets": torch.arange(28).view(4, 7)}])


def test_an_evaluation_may_come_first(pool: Pool) -> None:
    expected = pool.run(evaluated_first, "dp=1", ranks=1)[0]
    assert pool.run(evaluated_first, "tp=2", ranks=2) == pytest.approx([expected] * 2, rel=1e-12)


def copied(plan: str) -> tuple[bool, float]:
    """A plain copy of the model: its parameters are plain and tied as before; how far its output is from one rank's."""
    torch.manual_seed(5)
    engine = parallelize(gpt().double(), losses.cross_entropy("targets"), optimizer=adamw, plan=plan)
    engine.step({"tokens": torch.arange(28).view(4, 7), "targets": torch.arange(28).view(4, 7)})
    plain = engine.copy_model().eval()
    tidy = all(type(p) is nn.Parameter for p in plain.parameters()) and plain.head.weight is plain.embedding.weight
    return tidy, float(plain(torch.arange(14).view(2, 7)).double().square().sum())


def test_a_copy_is_the_plain_model(pool: Pool) -> None:
    _, expected = pool.run(copied, "dp=1", ranks=1)[0]
    for plan, ranks in (("tp=2,sp=on", 2), ("dp=2,tp=2,zero=3,recompute=full", 4)):
        for tidy, got in pool.run(copied, plan, ranks=ranks):
            assert tidy
            assert got == pytest.approx(expected, rel=1e-12)


def tensor_bytes(plan: str, before: int = 2) -> dict[str, int]:
    """Of the step after so many. Before the first, second, fourth, ... parameters are compared."""
    model, loss_fn, batches = CASES["gpt"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    for _ in range(before):
        engine.step(batches[0])
    recorder.clear()
    engine.step(batches[1])
    found: dict[str, int] = {}
    for record in recorder.records:
        if record.axis == "tp":
            found[record.operation] = found.get(record.operation, 0) + record.bytes
    return found


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,recompute=selective"])
def test_bytes_of_a_step(pool: Pool, plan: str) -> None:
    """Four all-reduces of b * s * h a layer, one of the embedding, one of the head's input, and the loss's numbers."""
    b, s, h, layers, float32 = 8, 7, 12, 3, 4
    stream, logits = b * s * h * float32, 4 * b * s * float32  # the largest logit, and three sums
    for found in pool.run(tensor_bytes, plan, ranks=2):
        marks = 2 * 5 * 8  # five numbers from each rank, by which rows, options and losses that differ are found
        assert found == {"all_reduce": (4 * layers + 2) * stream + logits + marks}
    # Of what each rank has whole (norms, row biases, positions) three numbers from each rank.
    for beside in pool.run(tensor_bytes, plan, 1, ranks=2):
        assert beside["all_reduce"] - found["all_reduce"] == 2 * 3 * 8 * (6 * layers + 3)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_bytes_of_a_step_with_a_cut_sequence(pool: Pool, recompute: str) -> None:
    """Each all-reduce as a pair, of s rounded up to the ranks; gradients of norms and row biases are summed at once."""
    b, s, h, layers, float32 = 8, 8, 12, 3, 4
    stream = b * s * h * float32
    for found in pool.run(tensor_bytes, f"tp=2,sp=on,recompute={recompute}", ranks=2):
        assert found["reduce_scatter"] == (4 * layers + 2) * stream
        # Positions' gradient is gathered, b = 1. A block that runs again gathers what its columns read, and sums nothing.
        again = 2 * layers if recompute == "selective" else 0
        assert found["all_gather"] == (4 * layers + 2 + again) * stream + s * h * float32
        whole = (6 * layers + 2) * h * float32  # two norms and two biases a layer, and the last norm
        assert found["all_reduce"] == whole + 4 * b * 7 * float32 + 2 * 5 * 8


def tensors_alive(plan: str) -> tuple[list[int], int]:
    """Tensors after each of three steps without a garbage collection, and what the collector then finds of them."""
    model, loss_fn, batches = CASES["gpt"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan)
    engine.step(batches[0])
    gc.collect()
    gc.disable()
    alive = []
    for batch in batches:
        engine.step(batch)
        alive.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = sum(issubclass(type(o), Tensor) for o in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    return alive, found


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sp=on"])
def test_what_a_step_made_goes_with_it(pool: Pool, plan: str) -> None:
    """Activations remember what was entered or gathered of them: no cycle may hold them past the step."""
    for alive, found in pool.run(tensors_alive, plan, ranks=2):
        assert len(set(alive)) == 1
        assert found == 0


PROGRAM = """
import torch
from torch import nn
from soli.losses import mse

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

def make():
    return Net(), {"x": torch.ones(2, 6), "targets": torch.ones(2, 6)}, mse("targets")

def half():
    return Net()

def other():
    return Net(), {"x": torch.ones(2, 7), "targets": torch.ones(2, 6)}, mse("targets")
"""


TINY = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "architectures": ["WhisperForConditionalGeneration"]}


def test_the_command_needs_no_weights(tmp_path: Path) -> None:
    """A model of 8 billion parameters on the meta device, and one by its configuration, whose experts have a kernel."""
    text = soli("roles", "examples/plan_model.py:llama_8b", "--tp", "4", cwd=ROOT).stdout
    assert "8,029,995,008 of 8,030,261,248 parameters (100%) are cut over tp=4" in text
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    (tmp_path / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    found = json.loads(soli("roles", str(tmp_path), "--tp", "2", "--json").stdout)
    assert found["model.layers.1.self_attn.q_proj.weight"]["role"] == "column"
    assert found["lm_head.weight"]["cut"]["dim"] == 0


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(PROGRAM, encoding="utf-8")
    done = soli_anew("roles", f"{file}:make", "--tp", "3", "--json", "--role", "layers.1.0=replicated")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layers.0.0.weight"]["cut"] == {"dim": 0, "parts": [10], "atoms": 10}
    assert found["layers.1.0.weight"] == {"role": "replicated", "shape": [10, 6], "cut": None, "why": "you said so"}
    text = soli("roles", f"{file}:make").stdout
    assert "layers.*.2.weight" in text
    assert "390 of 408 parameters (96%) are cut over tp=2" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("net.py:nothing",), "has no function 'nothing'"),
        (("net.py:other",), "the model does not run on its batch"),
        (("odd.json",), "embed_dim must be divisible"),
        (("whisper.json",), "WhisperForConditionalGeneration, whose input is input_features"),
        (("net.py:half",), "(model, batch) or (model, batch, loss_fn)"),
        (("net.py:make", "--role", "layers.*=rows"), "the role of 'layers.*' is not known"),
        (("gone.py:make",), "there is no such file"),
        (("gone",), "there is no such model"),
    ],
)
def test_the_command_refuses(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "net.py").write_text(PROGRAM, encoding="utf-8")
    for name, heads in (("odd", 3), ("whisper", 2)):
        config = WhisperConfig(**TINY, encoder_attention_heads=heads, decoder_attention_heads=heads)
        (tmp_path / f"{name}.json").write_text(config.to_json_string(), encoding="utf-8")
    done = soli("roles", str(tmp_path / words[0]), *words[1:])
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_program_prints_is_beside_what_is_read(tmp_path: Path) -> None:
    """`--json` is JSON whatever the file says as it is imported and called."""
    noisy = PROGRAM.replace("def make():\n", "print('imported')\n\n\ndef make():\n    print('called')\n")
    (tmp_path / "noisy.py").write_text(noisy, encoding="utf-8")
    done = soli("roles", f"{tmp_path}/noisy.py:make", "--tp", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert [word for word in ("imported", "called") if word in done.stderr] == ["imported", "called"]
