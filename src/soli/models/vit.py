"""A ViT: patches of an image, a class token, pre-norm encoder blocks. Plain PyTorch.

Shape letters: B images, P patches, C model width (dim), H heads, D width of a head, K classes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT for square images of `channels`."""

    classes: int
    size: int = 32
    patch: int = 4
    channels: int = 3
    dim: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0


class Block(nn.Module):
    """Norm, attention, add; norm, MLP, add (arXiv 2010.11929)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attention = nn.MultiheadAttention(config.dim, config.heads, config.dropout, batch_first=True)
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class ViT(nn.Module):
    """images [B, channels, size, size] -> logits [B, K]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.dim % config.heads:
            raise ValueError(f"dim {config.dim} does not divide into {config.heads} heads")
        if config.size % config.patch:
            raise ValueError(f"patches of {config.patch} do not tile an image of {config.size}")
        count = (config.size // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.dim, config.patch, config.patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.positions = nn.Parameter(torch.zeros(1, count + 1, config.dim))
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.normal_(self.cls, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x = self.drop(x + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
