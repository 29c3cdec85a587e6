"""What every entry trains: one GPT, its fixed weights and its fixed tokens. Imports torch only.

Shapes: B = batch, T = tokens, D = width, H = heads, V = vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE = 1e-3
SEED = 1234
DISTINCT_BATCHES = 4  # they come round again, so the loss falls far and a wrong update cannot hide in noise


@dataclass(frozen=True)
class Size:
    """One model and the global batch that it is given."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int


SIZES = {
    "small": Size(layers=12, width=256, heads=8, vocabulary=4096, tokens=256, batch=4),
    "big": Size(layers=8, width=768, heads=12, vocabulary=4096, tokens=256, batch=2),
}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, pre-norm blocks, a head of its own weights."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(size: str) -> GPT:
    """The model of one size with the weights that every entry starts from."""
    torch.manual_seed(SEED)
    model = GPT(SIZES[size])
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(0.0, 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
    return model


def build_batches(size: str) -> list[dict[str, Tensor]]:
    """The global batches, the same on every rank; step i takes batch i modulo their number."""
    shape = SIZES[size]
    generator = torch.Generator().manual_seed(SEED + 1)
    draw = (DISTINCT_BATCHES, shape.batch, shape.tokens + 1)
    ids = torch.randint(shape.vocabulary, draw, generator=generator)
    return [{"tokens": b[:, :-1].contiguous(), "targets": b[:, 1:].contiguous()} for b in ids]


def local_part(batch: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """This rank's rows of a global batch."""
    return {name: value.chunk(world)[rank] for name, value in batch.items()}


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the rows given; every rank has as many, so a mean of means is exact."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_optimizer(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of every entry."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)  # type: ignore[arg-type]
