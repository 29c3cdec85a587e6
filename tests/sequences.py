"""Small models, each with another way to use its sequence, for tests of context parallelism.

Legend: B rows, S positions, M positions of a memory, W width, H heads, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soli import losses
from soli.parallel.context.ring import Call, Spans, calls
from soli.verify.parity import Case, adamw

VOCAB, WIDTH, HEADS, LENGTH, MEMORY = 23, 12, 6, 9, 5
Batch = dict[str, Tensor]


def pairs(of_q: Spans, of_k: Spans, causal: bool) -> list[int]:
    """How many pairs of a query and a key each rank of a ring computes."""

    def count(call: Call) -> int:
        n, m = (stop - start for start, stop in (call.rows, call.columns))
        return n * (n + 1) // 2 if call.diagonal else n * m

    return [sum(count(c) for keys in of_k for c in calls(queries, keys, causal)) for queries in of_q]


class Part(nn.Module):
    """What stands in a block: x [B, S, W] and the batch -> [B, S, W]."""

    def __init__(self, heads: int = HEADS, groups: int = HEADS) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, WIDTH // heads
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # No bias of keys: its gradient is zero but for rounding.
        self.key, self.value = (nn.Linear(WIDTH, size * groups, bias=b) for b in (False, True))

    def made(self, x: Tensor, of: Tensor | None = None) -> list[Tensor]:
        """Queries of x, keys and values of `of`: [B, H, S, W / H]."""
        of = x if of is None else of
        given = (self.query(x), self.heads), (self.key(of), self.groups), (self.value(of), self.groups)
        return [y.unflatten(-1, (n, WIDTH // self.heads)).transpose(1, 2) for y, n in given]

    def end(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(-2))

    def attend(self, x: Tensor, of: Tensor | None = None, **how: Any) -> Tensor:
        return self.end(F.scaled_dot_product_attention(*self.made(x, of), **how))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.attend(x, is_causal=True)


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def apart(size: int) -> Tensor:
    """[S, S]: how far a key lies behind a query."""
    places = torch.arange(size)
    return places.unsqueeze(1) - places


class Padded(Part):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        seen = batch["kept"][:, None, None, :] & causal(x.shape[1])
        return self.attend(x, attn_mask=seen)


class Window(Part):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        far = apart(x.shape[1])
        return self.attend(x, attn_mask=(far >= 0) & (far < 3))


class Packed(Part):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        documents = batch["documents"]
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        return self.attend(x, attn_mask=(same & causal(x.shape[1])).unsqueeze(1))


class Slopes(Part):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        slopes = torch.tensor([0.5**i for i in range(self.heads)], dtype=x.dtype)
        bias = -slopes[:, None, None] * apart(x.shape[1])
        return self.attend(x, attn_mask=bias.masked_fill(~causal(x.shape[1]), -math.inf))


class Relative(Part):
    """A bias that is learnt, looked up by pairs as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * LENGTH, self.heads)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        bias = self.bias(apart(x.shape[1]) + LENGTH).permute(2, 0, 1)
        return self.attend(x, attn_mask=bias)


class Tabled(Part):
    """A bias that is learnt, a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(self.heads, 2 * LENGTH) / 3)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.attend(x, attn_mask=self.table[:, apart(x.shape[1]) + LENGTH])


class Biased(Part):
    """A parameter is the bias as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(self.heads, LENGTH, LENGTH) / 3)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.attend(x, attn_mask=self.table)


class Written(Part):
    """Attention written out."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.made(x)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~causal(x.shape[1]), -math.inf)
        return self.end(scores.softmax(-1) @ v)


class Einsum(Part):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.made(x)
        weights = torch.einsum("bhqe,bhke->bhqk", q, k).softmax(-1)
        return self.end(torch.einsum("bhqk,bhke->bhqe", weights, v))


class Cross(Part):
    """Keys of a memory of another length."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.attend(x, batch["memory"])


class Grouped(Part):
    def __init__(self) -> None:
        super().__init__(6, 2)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.attend(x, is_causal=True, enable_gqa=True)


class OneKey(Part):
    def __init__(self) -> None:
        super().__init__(6, 1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.attend(x, is_causal=True, enable_gqa=True)


class ThreeHeads(Part):
    def __init__(self) -> None:
        super().__init__(3, 3)


class OneHead(Part):
    """Attention of x [B, S, W] without a dim of heads."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        given = (self.query(x), self.key(x), self.value(x))
        return self.out(F.scaled_dot_product_attention(*given, is_causal=True))


class Torchs(nn.Module):
    """torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=~batch["kept"], need_weights=False)[0]


class Sums(nn.Module):
    """What came before, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.gate(x).sigmoid().cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Shifted(nn.Module):
    """Each position mixed with the one before it, as in RWKV."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.mix(torch.cat([x, before], -1))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.one(x)
        y += x
        y[:, 0] = 0.0
        y[:, 2:4] *= 2.0
        y.masked_fill_(~batch["kept"].unsqueeze(-1), 0.0)
        z = self.two(y)
        z.add_(y).mul_(0.5)
        return z


class Experts(nn.Module):
    """Each token goes to the best two of four; written as most of those are that loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + weight * torch.tanh(expert(x))
        return out


class Routed(Experts):
    """The same, where an expert sees the tokens that chose it and no others."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                out.index_add_(0, row, torch.tanh(expert(flat[row])) * weights[row, place].unsqueeze(-1))
        return out.view_as(x)


class Chosen(nn.Module):
    """The positions with the largest scores, added to all."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.mix = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        scores, places = self.score(x).tanh().squeeze(-1).topk(4, 1)
        chosen = x.gather(1, places.unsqueeze(-1).expand(-1, -1, WIDTH))
        return (self.mix(chosen) * scores.unsqueeze(-1)).sum(1, keepdim=True)


class InPieces(Part):
    """Attention of some queries at a time, as for long sequences on small memory."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.made(x)
        seen = causal(x.shape[1])
        parts = [
            F.scaled_dot_product_attention(q[:, :, a : a + 3], k, v, attn_mask=seen[a : a + 3])
            for a in range(0, x.shape[1], 3)
        ]
        return self.end(torch.cat(parts, 2))


class Prefixed(Part):
    """Positions that are learnt stand before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        return self.attend(x, is_causal=True)[:, 2:]


class Mixer(nn.Module):
    """A product over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class Looked(nn.Module):
    """Sums of what came before, made stable by a largest value that has no gradient; it is read again with one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.one(x)
        with torch.no_grad():
            most = y.amax(1, keepdim=True)
        return self.two((y - most).exp().cumsum(1).log() + most) * y.amax(1, keepdim=True)


class Block(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), part()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.part(self.norm(x), batch)
        return x + self.down(F.gelu(self.up(x)))


End = Callable[[nn.Linear, Tensor, Batch], Any]
"""The head, the last hidden values [B, S, W] and the batch -> what the model returns."""


class Model(nn.Module):
    def __init__(self, part: Callable[[], nn.Module], end: End) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(part) for _ in range(2))
        self.norm, self.head, self.end = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB), end

    def forward(
        self, tokens: Tensor, kept: Tensor, documents: Tensor, source: Tensor, targets: Tensor, one: Tensor
    ) -> Any:
        batch = {"kept": kept, "documents": documents, "targets": targets, "one": one}
        batch["memory"] = self.embedding(source)
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, batch)
        return self.end(self.head, self.norm(x), batch)


def mean_of_model(head: nn.Linear, x: Tensor, batch: Batch) -> Any:
    """A model that computes its own mean loss, as transformers' do."""
    found = F.cross_entropy(head(x).flatten(0, 1), batch["targets"].flatten())
    return SimpleNamespace(loss=found)


def masked_mean(head: nn.Linear, x: Tensor, batch: Batch) -> Tensor:
    kept = batch["kept"].unsqueeze(-1).to(x.dtype)
    return head((x * kept).sum(1) / kept.sum(1))


def by_hand(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The next token's logarithm, picked and masked by hand."""
    logits, wanted = output[:, :-1], batch["tokens"][:, 1:]
    found = logits.log_softmax(-1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    kept = batch["kept"][:, 1:]
    return -(found * kept).sum(), kept.sum()


def next_token(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    logits, wanted = output[:, :-1, :].contiguous(), batch["tokens"][:, 1:].contiguous()
    total = F.cross_entropy(logits.view(-1, VOCAB), wanted.view(-1), reduction="sum")
    return total, wanted.numel()


def place(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Which position it is, as in extractive question answering: the classes are the sequence."""
    return F.cross_entropy(output, batch["one"] % LENGTH, reduction="sum"), len(output)


def own_labels(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Against labels that the logits give themselves, as a mean."""
    labels = output.detach().max(-1)[1]
    return F.cross_entropy(output.flatten(0, 1), labels.flatten()) * labels.numel(), labels.numel()


TOKENS, ONE = losses.cross_entropy("targets"), losses.cross_entropy("one")
PARTS: dict[str, Callable[[], nn.Module]] = {
    "padded": Padded, "window": Window, "packed": Packed, "slopes": Slopes, "relative": Relative, "tabled": Tabled,
    "written": Written, "einsum": Einsum, "cross": Cross, "grouped": Grouped, "one key": OneKey,
    "three heads": ThreeHeads, "one head": OneHead, "torch's": Torchs, "in pieces": InPieces, "prefixed": Prefixed,
    "sums": Sums, "mixer": Mixer, "chosen": Chosen, "looked at": Looked, "convolution": Convolution,
    "shifted": Shifted, "in place": InPlace, "experts": Experts, "routed": Routed, "biased": Biased,
}  # fmt: skip
ENDS: dict[str, tuple[End, losses.LossFn]] = {
    "class token": (lambda head, x, batch: head(x[:, 0]), ONE),
    "last token": (lambda head, x, batch: head(x[:, -1]), ONE),
    "mean": (lambda head, x, batch: head(x.mean(1)), ONE),
    "masked mean": (masked_mean, ONE),
    "largest": (lambda head, x, batch: head(x.amax(1)), ONE),
    "flat": (lambda head, x, batch: head(x.reshape(-1, WIDTH)).view(len(x), -1, VOCAB), TOKENS),
    "classes first": (
        lambda head, x, batch: head(x).transpose(1, 2),
        lambda y, batch: (F.cross_entropy(y, batch["targets"], reduction="sum"), (batch["targets"] >= 0).sum()),
    ),
    "next token": (lambda head, x, batch: head(x), next_token),
    "by hand": (lambda head, x, batch: head(x), by_hand),
    "first slice": (lambda head, x, batch: head(torch.tanh(x[:, :1]).squeeze(1)), ONE),
    "by length": (lambda head, x, batch: head(x[torch.arange(len(x)), batch["kept"].sum(1) - 1]), ONE),
    "place": (lambda head, x, batch: head(x).tanh()[..., 0], place),
    "own labels": (lambda head, x, batch: head(x), own_labels),
    "mean of the model": (mean_of_model, losses.from_model("targets", shifted=False)),
}
NAMES = [*PARTS, *ENDS]


def batches() -> list[Batch]:
    """Rows of a ragged number; the last positions of some are padding, and of all of the first two no target counts."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for rows in (4, 3):
        draw = lambda *size: torch.randint(VOCAB, size, generator=generator)
        kept = torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 7, 3])[:rows, None]
        targets = draw(rows, LENGTH).masked_fill(~kept, losses.IGNORE)
        targets[:2] = losses.IGNORE
        documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]).expand(rows, -1)
        made.append(
            {"tokens": draw(rows, LENGTH), "source": draw(rows, MEMORY), "one": draw(rows), "kept": kept,
             "targets": targets, "documents": documents}
        )  # fmt: skip
    return made


def case(name: str) -> Case:
    """A model with one of PARTS, or of ENDS, and else causal attention and logits of tokens."""
    end, loss = ENDS.get(name, (lambda head, x, batch: head(x), TOKENS))

    def make() -> Any:
        torch.manual_seed(17)
        return Model(PARTS.get(name, Part), end), loss, batches()

    return Case(name, make, adamw)
