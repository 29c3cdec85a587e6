"""A Llama: RMS norms, rotary positions, grouped queries, gated MLP, no biases. Plain PyTorch.

Shape letters: B windows, T positions, V vocabulary, C model width (dim), H query heads, G key heads, D width of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama. `groups` key heads serve `heads` query heads; `hidden` is the MLP's width."""

    vocab: int
    dim: int = 128
    layers: int = 4
    heads: int = 4
    groups: int = 2
    hidden: int = 352
    theta: float = 10_000.0
    dropout: float = 0.0
    tied: bool = False


def rotary(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, D] of rotary position embedding (arXiv 2104.09864)."""
    powers = torch.arange(0, width, 2, device=positions.device) / width
    angles = torch.outer(positions.double(), theta ** -powers.double())
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [.., T, D] by each position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention whose query heads share key heads, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.width = config.heads, config.groups, config.dim // config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.dim, config.heads * self.width, bias=False)
        self.key = nn.Linear(config.dim, config.groups * self.width, bias=False)
        self.value = nn.Linear(config.dim, config.groups * self.width, bias=False)
        self.out = nn.Linear(config.heads * self.width, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.query(x).view(B, T, self.heads, self.width).transpose(1, 2)
        k = self.key(x).view(B, T, self.groups, self.width).transpose(1, 2)
        v = self.value(x).view(B, T, self.groups, self.width).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        dropout = self.dropout if self.training else 0.0
        grouped = self.groups < self.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(B, T, self.heads * self.width))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202), [B, T, C] -> [B, T, C]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Norm, attention, add; norm, MLP, add."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """tokens [B, T] (int64) -> logits [B, T, V]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.dim % (2 * config.heads) or config.heads % config.groups:  # angles are of pairs
            raise ValueError(f"dim {config.dim}, {config.heads} heads of an even width and {config.groups} groups do not divide")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, place = self.embedding(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotary(place, self.config.dim // self.config.heads, self.config.theta, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
