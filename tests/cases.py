"""The parity cases: small models, each with something that distributed training tends to get wrong."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foreign
from soli import losses
from soli.losses import LossFn
from soli.models.bert import Bert, BertConfig
from soli.models.gpt import GPT, GPTConfig
from soli.models.llama import Llama, LlamaConfig
from soli.models.vit import ViT, ViTConfig
from soli.verify.parity import Case, adamw
from t5 import T5, T5Config

STEPS = 3
IGNORE = losses.IGNORE


def _tokens(rows: int, length: int = 7, vocab: int = 29, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, length + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}


def _gpt(rows: list[int], *, dropout: float = 0.0, tied: bool = True, mask: bool = False, length: int = 7) -> Any:
    torch.manual_seed(11)
    model = GPT(GPTConfig(vocab=29, context=length, dim=12, layers=3, heads=3, dropout=dropout, tied=tied))
    batches = [_tokens(n, length, seed=i) for i, n in enumerate(rows)]
    if mask:
        for batch in batches:
            batch["targets"][: len(batch["targets"]) // 2] = IGNORE  # the first ranks have no counted target
            batch["targets"][-1, 1:] = IGNORE
    return model, losses.cross_entropy("targets"), batches


def gpt() -> Any:
    return _gpt([8] * STEPS)


def gpt_dropout() -> Any:
    return _gpt([8] * STEPS, dropout=0.2)


def gpt_ragged() -> Any:
    return _gpt([8, 9, 5], tied=False)


def gpt_masked() -> Any:
    return _gpt([8] * STEPS, mask=True)


def gpt_start() -> Any:
    """Sequences of 11 of which the first three targets count: in no plan have all ranks of cp some."""
    model, loss_fn, batches = _gpt([8] * STEPS, length=11)
    for batch in batches:
        batch["targets"][:, 3:] = IGNORE
    return model, loss_fn, batches


class Odd(nn.Module):
    """Sizes that nothing divides, a frozen layer, an unused one, one used only by some rows, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.unused = nn.Linear(3, 7)
        self.sometimes = nn.Linear(13, 13)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(13, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        x = torch.tanh(self.frozen(x))
        rare = x[:, 0] > 0.3
        if rare.any():  # ranks differ in whether they use this layer
            x = torch.where(rare[:, None], torch.tanh(self.sometimes(x)), x)
        return self.last(x)


def odd() -> tuple[nn.Module, LossFn, list[Any]]:
    torch.manual_seed(5)
    model = Odd()
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "x": torch.randn(n, 5, generator=generator).double(),
            "targets": torch.randn(n, 3, generator=generator).double(),
        }
        for n in (9, 8, 11)
    ]
    return model, losses.mse("targets"), batches


class Skipping(nn.Module):
    """Rows choose their block: ranks run different blocks, which hangs where gathers follow the data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        y = x
        for number, block in enumerate(self.blocks):
            chosen = which == number
            if chosen.any():
                y = torch.where(chosen[:, None], F.gelu(block(y)), y)
        return y


def skipping() -> tuple[nn.Module, LossFn, list[Any]]:
    torch.manual_seed(7)
    model = Skipping()
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(STEPS):
        x, t = (torch.randn(8, 6, generator=generator).double() for _ in range(2))
        batches.append({"x": x, "targets": t, "which": torch.arange(8) // 2})
    return model, losses.mse("targets"), batches


def llama() -> Any:
    """Grouped queries: six heads on two keys. Rotary positions, gated MLP, a head of its own."""
    torch.manual_seed(12)
    model = Llama(LlamaConfig(vocab=29, dim=24, layers=2, heads=6, groups=2, hidden=20, dropout=0.1))
    return model, losses.cross_entropy("targets"), [_tokens(n, seed=i) for i, n in enumerate((8, 9, 5))]


def bert() -> Any:
    """A fused projection, padding, dropout everywhere, and a head that is the embedding with a bias."""
    torch.manual_seed(13)
    model = Bert(BertConfig(vocab=29, dim=12, layers=2, heads=3, context=7, dropout=0.1))
    batches = [_tokens(8, seed=i) for i in range(STEPS)]
    for batch in batches:
        batch["mask"] = torch.arange(7)[None, :] < torch.tensor([7, 5, 7, 3, 7, 7, 6, 4])[:, None]
        batch["targets"][~batch["mask"]] = IGNORE
    return model, losses.cross_entropy("targets"), batches


def t5() -> Any:
    """Encoder and decoder of other lengths, relative biases, one embedding for three uses."""
    torch.manual_seed(14)
    model = T5(T5Config(vocab=29, dim=12, layers=2, heads=3, head_dim=4, hidden=20, buckets=8, farthest=16))
    batches = [_tokens(8, length=7, seed=i) for i in range(STEPS)]
    for number, batch in enumerate(batches):
        target = _tokens(8, length=5, seed=9 + number)
        batch |= {"source": batch.pop("tokens"), "target": target["tokens"], "targets": target["targets"]}
    return model, losses.cross_entropy("targets"), batches


def vit() -> Any:
    """Patches, a class token, torch's own MultiheadAttention with dropout, five classes."""
    torch.manual_seed(15)
    model = ViT(ViTConfig(classes=5, size=8, patch=4, dim=12, layers=2, heads=3, dropout=0.1))
    generator = torch.Generator().manual_seed(4)
    images = [torch.randn(8, 3, 8, 8, generator=generator).double() for _ in range(STEPS)]
    batches = [{"images": x, "targets": torch.arange(8) % 5} for x in images]
    return model, losses.cross_entropy("targets"), batches


MAKERS = (gpt, gpt_dropout, gpt_ragged, gpt_masked, gpt_start, llama, bert, t5, vit, odd, skipping)
CASES = {
    case.name: case
    for case in (Case(make.__name__.replace("_", "-"), make, adamw) for make in (*MAKERS, *foreign.MAKERS))
}
TABLE = Path(__file__).with_name("plans.toml")
PLANS: dict[int, list[str]] = {int(n): plans for n, plans in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


def refused(name: str, plan: str) -> bool:
    """Whether this model cannot be under this plan.

    One whose rows choose among blocks has no stages, nor products that ranks with other rows compute together; what
    has no sequence has none to cut.
    """
    chooses = name in ("odd", "skipping")
    return (name == "skipping" and "pp=" in plan) or (chooses and ("cp=" in plan or "tensor=" in plan))


Row = tuple[str, str, int]
"""Model, plan, ranks."""


def rows() -> list[Row]:
    """The whole matrix."""
    return [
        (name, plan, ranks)
        for ranks, plans in PLANS.items()
        for plan in plans
        for name in CASES
        if not refused(name, plan)
    ]


SOME = ("dp", "microbatches", "accumulate")
"""Keys whose number changes how often the same code runs, not which code."""


def choices(plan: str) -> list[str]:
    """The keys of a plan with their values; of those in SOME, only that they are there."""
    keys = [key.split("=") for key in plan.split(",")]
    return [key if key in SOME else f"{key}={value}" for key, value in keys]


WAYS = ("tp", "tensor", "sp", "cp", "context", "pp", "zero", "recompute")
"""Keys that every model is to be under, whatever their value."""


def covered(name: str, plan: str) -> set[frozenset[str]]:
    """What a row shows together: every two of its plan's choices, and the model with each of its ways."""
    chosen = choices(plan)
    ways = {frozenset((name, key)) for key in (choice.split("=")[0] for choice in chosen) if key in WAYS}
    return {frozenset(pair) for pair in combinations(chosen, 2)} | ways


def selection(most_ranks: int) -> list[Row]:
    """Rows that cover, together, all that the matrix's rows of so many ranks do: the one of fewest ranks of several."""
    pairs = {row: covered(*row[:2]) for row in rows() if row[2] <= most_ranks}
    return greedy(pairs, lambda row, new: (new, -row[2]))


def greedy(pairs: dict[Row, set[frozenset[str]]], worth: Callable[[Row, int], Any]) -> list[Row]:
    """The row that is worth the most by how much it covers that is left, and so on."""
    left: set[frozenset[str]] = set().union(*pairs.values())
    chosen = []
    while left:
        best = max(pairs, key=lambda row: worth(row, len(pairs[row] & left)))
        chosen.append(best)
        left -= pairs[best]
    return chosen


AXES_OF_ONE = tuple(key for key in WAYS if key != "tensor")
IN_SUITE: dict[str, tuple[str, ...]] = {
    # gpt-dropout without dropout, and gpt-masked where cp finds no target
    "gpt": (), "gpt-start": ("cp",),
    # they run the code that bert, llama, gpt-2, t5 and vit run
    "hf-bert": ("tp",), "hf-mistral": ("tp",), "hf-opt": ("tp",), "hf-qwen2": ("tp",), "hf-t5": ("tp",), "hf-vit": ("tp",),
    # in larger grids: test_grids.py
    "gpt-dropout": AXES_OF_ONE, "llama": AXES_OF_ONE, "vit": AXES_OF_ONE,
}  # fmt: skip
"""Ways in which the suite has a model, where it has not all; the sweep has them all."""


def suite(most_ranks: int) -> list[Row]:
    """The cheapest rows that show every two choices of a plan together, every model, and each in all of its ways or in those named."""

    def shown(name: str, plan: str) -> set[frozenset[str]]:
        left_out = {frozenset((name, key)) for key in set(WAYS) - set(IN_SUITE.get(name, WAYS))}
        return covered(name, plan) - left_out | {frozenset((name,))}

    pairs = {row: shown(*row[:2]) for row in rows() if row[2] <= most_ranks}
    heavy = {name: 3 if name.endswith("t5") else 1 for name in CASES}  # two stacks, of two kinds of attention
    return greedy(pairs, lambda row, new: new / math.sqrt(row[2] * heavy[row[0]]))
