"""The planner reads a transformer's dimensions from its program: the same as a configuration says, or a refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import soli
from soli.cli import programs
from soli.cli.main import app
from soli.cli.plan_search import program_of, read
from soli.core.errors import SoliError
from soli.models.bert import Bert, BertConfig
from soli.models.gpt import GPT, GPTConfig
from soli.models.llama import Llama, LlamaConfig
from soli.models.vit import ViT, ViTConfig
from soli.planner import explain
from soli.planner.capture import capture
from soli.planner.dimensions import read_program
from soli.planner.hardware.clusters import read_cluster
from soli.planner.models import Model, read_model
from soli.planner.task import Task
from t5 import T5, T5Config

ROOT = Path(__file__).parent.parent
TOKENS = torch.zeros(1, 64, dtype=torch.int64)


def planned(model: nn.Module, batch: Any = TOKENS) -> tuple[Model, tuple[str, ...]]:
    return read_program("it", model, batch, lambda traced, given: traced(given))


# --- soli's own models ------------------------------------------------------------------------------------

OWN: dict[str, tuple[Any, Any, Model]] = {
    "gpt": (
        lambda: GPT(GPTConfig(50257, 768, 12, 12, 1024, dropout=0.1)), TOKENS,
        Model("it", 12, 768, 12, 12, 64, 3072, False, 50257, 0, 1, True, 64),
    ),
    "llama": (
        lambda: Llama(LlamaConfig(128256, 4096, 32, 32, 8, 14336)), TOKENS,
        Model("it", 32, 4096, 32, 8, 128, 14336, True, 128256, 0, 1, False, 64),
    ),
    "bert": (
        lambda: Bert(BertConfig(30522, 768, 12, 12, 512)), TOKENS,
        Model("it", 12, 768, 12, 12, 64, 3072, False, 30522, 0, 1, True, 64, both_ways=True),
    ),
    "vit": (
        lambda: ViT(ViTConfig(1000, 224, 16, 3, 768, 12, 12)), torch.zeros(1, 3, 224, 224),
        Model("it", 12, 768, 12, 12, 64, 3072, False, 1000, 0, 1, True, 197, both_ways=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_own_models_have_their_dimensions(name: str) -> None:
    make, batch, wanted = OWN[name]
    with torch.device("meta"):
        model = make()
    found, inferred = planned(model, batch)
    assert found == wanted
    assert found.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.03)
    assert any("the batch has" in word for word in inferred)
    assert any("no embedding" in word for word in inferred) == (name == "vit")


class Headed(GPT):
    """Modules without parameters beside each other, first of all and after one that has some."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.before = nn.Sequential(nn.Identity(), nn.Identity())
        self.after = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Identity())

    def forward(self, tokens: Tensor) -> Tensor:
        self.after(self.before(self.norm.weight[:8]))
        return super().forward(tokens)


def test_modules_without_parameters_are_no_stack() -> None:
    torch.manual_seed(0)
    config = GPTConfig(512, 128, 2, 4, 64)
    assert planned(Headed(config))[0] == planned(GPT(config))[0]


def test_a_deferred_model_is_read_as_an_eager_one() -> None:
    make = lambda: GPT(GPTConfig(512, 128, 2, 4, 64))
    with soli.deferred():
        deferred = make()
    torch.manual_seed(0)
    eager = make()
    before = {name: p.clone() for name, p in eager.named_parameters()}
    assert planned(deferred) == planned(eager)
    assert all(torch.equal(p, before[name]) for name, p in eager.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in eager.modules())


def test_two_stacks_are_refused() -> None:
    with torch.device("meta"):
        model = T5(T5Config(512))
    with pytest.raises(SoliError, match="no transformer that the planner knows") as refused:
        read_program("t5", model, TOKENS, lambda traced, one: traced(one, one))
    assert "an encoder and a decoder" in str(refused.value)


# --- transformers' models ---------------------------------------------------------------------------------

GROUPED = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 64,
}  # fmt: skip
MIXED = GROUPED | {"moe_intermediate_size": 704, "n_routed_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 64}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "opt": ("OPTForCausalLM", {"max_position_embeddings": 64}),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "bert": ("BertForMaskedLM", {"max_position_embeddings": 64}),
    "modernbert": ("ModernBertForMaskedLM", {"max_position_embeddings": 64}),  # the first block has no norm before its attention
    "glm4_moe": ("Glm4MoeForCausalLM", MIXED | {"head_dim": 128, "first_k_dense_replace": 2}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", MIXED | {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", MIXED | {"num_experts": 8, "shared_expert_intermediate_size": 2112}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", MIXED | {"num_key_value_heads": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
}


def of_transformers(name: str, **more: Any) -> tuple[nn.Module, Any]:
    import transformers

    kind, options = FAMILIES[name]
    build = getattr(transformers, kind)
    config = build.config_class(**options)
    with torch.device("meta"):
        return build._from_config(config, **more), config


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_is_what_its_configuration_says(name: str, tmp_path: Path) -> None:
    model, config = of_transformers(name)
    config.save_pretrained(tmp_path)
    said, inferred = read_model(tmp_path)
    told = (f"attend to {said.window} tokens", f"{said.plain} of its {said.layers} layers have an MLP of 5632", "further tokens are left out", "as many as heads")
    assert [one for one in inferred if not any(words in one for words in told)] == []
    found, _ = read_program(
        said.name, model, {"input_ids": TOKENS, "labels": TOKENS}, lambda traced, one: traced(**one)
    )
    assert found == replace(said, window=0, windowed=0.0)  # a trace sees products, and not the mask that tells of a window
    tasks = [Task(one, read_cluster("h100:8x2"), 64, 2048) for one in (found, said)]
    plans = [[choice.plan for choice in explain.answer(one, 3).best] for one in tasks]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_attention_that_is_written_out_keeps_its_scores(name: str) -> None:
    found, inferred = planned(of_transformers(name, attn_implementation="eager")[0])
    fused, _ = planned(of_transformers(name)[0])
    assert fused.flash
    assert found == replace(fused, flash=False, both_ways=False)  # scores are all there anyway
    assert any("scores are kept" in word for word in inferred)
    assert found.point()["flash"] == 0.0


# --- programs of users ------------------------------------------------------------------------------------


class Block(nn.Module):
    """One product for all of attention, one for both halves of the gate, and of many experts if there are."""

    up: Any
    down: Any

    def __init__(self, dim: int = 256, ffn: int = 640, experts: int = 0, keys: int = 64) -> None:
        super().__init__()
        self.dim, self.experts, self.keys = dim, experts, keys
        self.qkv, self.out = nn.Linear(dim, dim + 2 * keys), nn.Linear(dim, dim)
        if experts:
            self.router = nn.Linear(dim, experts, bias=False)
            self.up, self.down = nn.Parameter(torch.empty(experts, dim, 2 * ffn)), nn.Parameter(torch.empty(experts, ffn, dim))  # fmt: skip
        else:
            self.up, self.down = nn.Linear(dim, 2 * ffn), nn.Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([self.dim, self.keys, self.keys], -1)
        q, k, v = (one.unflatten(-1, (-1, 32)).transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        if not self.experts:
            gate, up = self.up(x).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        gate, up = torch.matmul(x.unsqueeze(1), self.up).chunk(2, -1)
        every = torch.matmul(F.silu(gate) * up, self.down)
        index = chosen.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, self.dim)
        return x + (every.gather(1, index) * weights.transpose(1, 2).unsqueeze(-1)).sum(1)


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 256)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(256, 1000, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.table(x)))
        return out


@pytest.mark.parametrize(("experts", "tied"), [(0, True), (0, False), (8, True)])
def test_fused_weights_are_taken_apart(experts: int, tied: bool) -> None:
    """Of two blocks in training mode, with the kernel's dropout; all experts compute each token, and two are chosen."""
    with torch.device("meta"):
        model = Net(*(Block(experts=experts) for _ in range(2)), tied=tied)
    found, _ = planned(model)
    assert found == Model("it", 2, 256, 8, 2, 32, 640, True, 1000, experts, experts or 1, tied, 64)


def test_some_blocks_may_have_an_mlp_where_others_have_experts() -> None:
    """Whichever comes first; and of a width of its own."""
    with torch.device("meta"):
        model = Net(*(Block(experts=8 * (i % 2 == 0), ffn=640 if i % 2 == 0 else 768) for i in range(5)))
    found, inferred = planned(model)
    assert found == Model("it", 5, 256, 8, 2, 32, 640, True, 1000, 8, 8, True, 64, plain=2, plain_ffn=768)
    assert any("2 of its 5 layers have an MLP of 768 and no experts" in said for said in inferred)


class Sent(Block):
    """Experts that each take a fourth more than their share of tokens, which a product of ones and zeros hands to them; or all tokens, by
    einsum: what torch makes of it is one product of all experts' first matrices, and one that sums over them."""

    def __init__(self, handed: bool) -> None:
        super().__init__(experts=8)
        self.handed = handed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([self.dim, self.keys, self.keys], -1)
        q, k, v = (one.unflatten(-1, (-1, 32)).transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        if not self.handed:
            gate, up = torch.einsum("td,edf->etf", tokens, self.up).chunk(2, -1)
            weighed = F.silu(gate) * up * probabilities.t().unsqueeze(-1)
            return x + torch.einsum("etf,efd->td", weighed, self.down).view_as(x)
        weights, chosen = probabilities.t().topk(len(tokens) * 2 * 5 // 8 // 4)
        places = F.one_hot(chosen, len(tokens)).to(x.dtype)
        gate, up = torch.einsum("ect,td,edf->ecf", places, tokens, self.up).chunk(2, -1)
        every = torch.einsum("ecf,efd->ecd", F.silu(gate) * up, self.down)
        return x + torch.einsum("ecd,ect->td", every, places * weights.unsqueeze(-1)).view_as(x)


@pytest.mark.parametrize(("handed", "active"), [(False, 8), (True, 2.5)])
def test_a_token_counts_for_as_many_experts_as_compute_it(handed: bool, active: float) -> None:
    """By hand: 64 tokens, of which 8 experts take 20 each, are 2.5 for each token; handing them over and back multiplies 8 * 20 by 64, twice."""
    with torch.device("meta"):
        model = Net(Sent(handed), Sent(handed))
    found, inferred = planned(model)
    assert found == Model("it", 2, 256, 8, 2, 32, 640, True, 1000, 8, active, True, 64)
    assert f"each token is multiplied with {active} of 8 experts, whatever is chosen" in inferred
    others = [said for said in inferred if "products of activations" in said]
    layer = 64 * (256 * (256 + 128) + 256 * 256 + 256 * 8 + active * 3 * 256 * 640 + 2 * 64 * 256)
    sent = 2 * 8 * 20 * 64 * 256 if handed else 0
    share = 2 * sent / (2 * (layer + sent) + 64 * 256 * 1000)
    assert others == ([f"products of activations beside attention, {share:.0%} of the forward's flops, are not counted"] if handed else [])  # fmt: skip


class Wide(Block):
    """With much beside its attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(100_000))


class Branching(Block):
    def forward(this, x: Tensor) -> Tensor:  # noqa: N805 - not every program says self
        if x.mean() > 1:
            x = x / 2
        return super().forward(x)


class Failing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., 1:])


class Mistaken(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nothing  # type: ignore[attr-defined]


class Huge(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.new_empty(2**47)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(1000, 64), nn.Sequential(*(nn.Conv1d(64, 64, 1) for _ in range(3)))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.table(x).transpose(1, 2))
        return out


def shared() -> nn.Module:
    block = Block()
    return Net(block, block, block)


WRONG: dict[str, tuple[Any, str, str]] = {
    "beside": (lambda: Net(Wide(), Wide()), "are not all of it", "3% between them"),
    "branch": (lambda: Net(Branching()), "value that only a real run has", "Branching at .*test_capture.py:"),
    "failure": (lambda: Net(Failing()), "the program fails: mm", "Linear at .*test_capture.py:.*64, 255"),
    "mistake": (lambda: Net(Mistaken()), "its forward or its loss fails", "Mistaken at .*test_capture.py:.*no attribute"),
    "huge": (lambda: Net(Huge()), "has no addresses for", "Huge at .*test_capture.py:"),
    "convolution": (Convolution, "no transformer", 'no attention: (.|\n)*plan="auto"'),
    "mlp": (lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8)), "no transformer", "no attention: "),
    "shared": (shared, "no transformer", "blocks.0 to blocks.2 share weights"),
    "unlike": (lambda: Net(Block(), Block(ffn=512), Block(ffn=512)), "no transformer", r"blocks.0 and blocks.1 differ: .*up.weight 256 to 1280.*; and .*up.weight 256 to 1024"),
    "attentions": (lambda: Net(Block(), Block(keys=128)), "no transformer", "blocks.0 and blocks.1 differ"),
    "three": (lambda: Net(Block(), Block(ffn=512), Block(experts=4)), "no transformer", "blocks.0 and blocks.1 differ"),
    "mixtures": (lambda: Net(Block(experts=8), Block(experts=4)), "no transformer", "blocks.0 and blocks.1 differ"),
    "types": (lambda: Net(Block(), Wide(), Wide()), "no transformer", "or blocks that differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_understood_is_refused_with_the_reason(name: str) -> None:
    make, what, why = WRONG[name]
    with torch.device("meta"):
        model = make()
    with pytest.raises(SoliError, match=what) as refused:
        planned(model)
    (problem,) = refused.value.problems
    assert problem.got
    assert problem.allowed
    assert problem.fix
    refused.match(why)


def test_nothing_is_computed_and_no_memory_is_taken() -> None:
    """An 8 billion model of half a gigabyte of tokens' logits, in a process that may hold neither."""
    import resource

    _, batch, _ = programs.from_file(ROOT / "examples/plan_model.py", "llama_8b")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = f"{ROOT}/examples/plan_model.py:llama_8b"
    found, _ = read(file, program_of(file))
    assert found == replace(OWN["llama"][2], name="llama_8b", seq=batch["tokens"].shape[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes


def test_a_weight_may_be_larger_than_the_machine() -> None:
    """Which an allocator refuses at once, though nobody touches its pages."""
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**22, bias=False)  # 16 TiB
    trace = capture(model, torch.zeros(2, 2**20), lambda traced, one: traced(one))
    assert [call.flops for call in trace.products] == [2 * 2 * 2**42]


def test_products_are_where_they_were_done() -> None:
    with torch.device("meta"):
        model = Net(Block(), Block())
    trace = capture(model, TOKENS, lambda traced, one: traced(one))
    ours = [one for one in trace.products if "blocks.1" in one.where]
    assert [one.weight for one in ours] == [f"blocks.1.{n}.weight" for n in ("qkv", "out", "up", "down")]
    assert trace.tables == {"table.weight": (1000, 256)}
    assert sum(call.flops for call in trace.calls) > 2 * 64 * sum(p.numel() for p in model.parameters()) * 0.9


# --- files ------------------------------------------------------------------------------------------------

FILE = """
import torch
from soli.models.gpt import GPT, GPTConfig

def good():
    with torch.device("meta"):
        return GPT(GPTConfig(512, 128, 2, 4, 64)), {"tokens": torch.zeros(2, 64, dtype=torch.int64)}

def renamed():
    return good()[0], {"text": torch.zeros(2, 64, dtype=torch.int64)}

def alone():
    return good()[0]

def other():
    return 3, 4

def broken():
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "has no function 'missing'(.|\n)*good, renamed, alone, other, broken"),
        ("", "has no function ''(.|\n)*good, renamed"),
        ("renamed", "needs 'tokens' and the batch has no such entry(.|\n)*text"),
        ("alone", r"alone\(\) returned GPT(.|\n)*\(model, batch\)(.|\n)*return with the model a batch"),
        ("other", "is no torch.nn.Module(.|\n)*int"),
        ("broken", "broken.* fails(.|\n)*net.py:19: ZeroDivisionError"),
    ],
)
def test_a_file_that_is_wrong_is_said_to_be(name: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(FILE, encoding="utf-8")
    with pytest.raises(SoliError, match=said):
        read(f"{file}:{name}", program_of(f"{file}:{name}"))
    with pytest.raises(SoliError, match="no such file"):
        program_of(f"{tmp_path}/nothing.py:{name}")


def test_the_command_answers_all_its_questions_of_a_program(tmp_path: Path) -> None:
    file, page = tmp_path / "net.py", tmp_path / "answer.html"
    file.write_text(FILE, encoding="utf-8")
    words = ("plan", f"{file}:good", "--cluster", "h100:8x1", "--global-batch", "64")

    def ask(*more: str) -> str:
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        return done.stdout

    said = json.loads(ask("--json", "--why-not", "tp=8", "--html", str(page)))
    assert (said["model"], said["seq"], len(said["why_not"])) == ("good", 64, 1)
    assert any("the batch has" in word for word in said["inferred"])
    assert "<svg" in page.read_text(encoding="utf-8")
    text = ask("--whatif", "seq")
    assert "The longest sequence" in text
    assert "Read from the model: " in text


def test_vocabularies_that_positions_outnumber() -> None:
    with torch.device("meta"):
        models = [GPT(GPTConfig(vocab, 256, 4, 4, 256, tied=tied)) for vocab, tied in ((65, True), (256, False))]
    assert [(m.vocab, m.tied) for m, _ in map(planned, models)] == [(65, True), (256, False)]


class Classifier(Bert):
    """Two classes, by the first token; beside the table of tokens one of two kinds of them."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.kinds, self.classes = nn.Embedding(2, config.dim), nn.Linear(config.vocab, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.classes(super().forward(tokens)[:, 0] + self.kinds(tokens[:, 0]).sum())
        return out


def test_a_table_of_as_many_rows_as_classes_is_not_the_vocabulary() -> None:
    with torch.device("meta"):
        model = Classifier(BertConfig(8000, 256, 4, 4, 64))
    found, inferred = planned(model)
    assert (found.vocab, found.tied) == (8000, True)
    assert any("an embedding of 8000 and a last product of 2 are taken as one table of 8000" in said for said in inferred)


class Padded(Net):
    """Logits of the words that there are: the table has some rows more."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.blocks(self.table(x)), self.table.weight[:990])


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_a_table_may_have_more_rows_than_there_are_logits() -> None:
    with torch.device("meta"):
        model = Padded(*(Block() for _ in range(3)))
    assert planned(model)[0] == replace(planned(Net(*(Block() for _ in range(3))))[0], vocab=990)


def test_what_does_not_attend_ends_a_stack() -> None:
    with torch.device("meta"):
        table, head = nn.Embedding(1000, 256), nn.Linear(256, 1000, bias=False)
        model = nn.Sequential(Wrapped(table), *(Wrapped(Block()) for _ in range(3)), Wrapped(head))
    assert planned(model)[0] == replace(planned(Net(*(Block() for _ in range(3)), tied=False))[0], tied=False)
