"""A T5: encoder and decoder, relative position biases, RMS norms, no biases in layers. Plain PyTorch.

Shape letters: B rows, S source positions, T target positions, V vocabulary, C model width (dim), H heads, D width
of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class T5Config:
    """Sizes of a T5. `buckets` of relative distance, the farthest of which is `farthest`."""

    vocab: int
    dim: int = 128
    layers: int = 3
    heads: int = 4
    head_dim: int = 32
    hidden: int = 256
    buckets: int = 32
    farthest: int = 128
    dropout: float = 0.1


def buckets_of(distance: Tensor, both: bool, count: int, farthest: int) -> Tensor:
    """The bucket of each distance key - query (arXiv 1910.10683): near ones exactly, far ones by their logarithm."""
    start = torch.zeros_like(distance)
    if both:
        count //= 2
        start = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    scale = (count - exact) / math.log(farthest / exact)
    far = exact + (torch.log(distance.clamp(min=1).double() / exact) * scale).long()
    return start + torch.where(distance < exact, distance, far.clamp(max=count - 1))


class Attention(nn.Module):
    """Attention without scale, [B, T, C] and memory [B, S, C] -> [B, T, C]; `bias` [1, H, T, S] is added."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.heads, self.width, self.p = config.heads, config.head_dim, config.dropout
        inner = config.heads * config.head_dim
        self.q, self.k, self.v = (nn.Linear(config.dim, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, config.dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        shape = (x.shape[0], -1, self.heads, self.width)
        q = self.q(x).view(shape).transpose(1, 2)
        k, v = (f(memory).view(shape).transpose(1, 2) for f in (self.k, self.v))
        scores = q @ k.transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        mixed = F.dropout(weights, self.p, self.training) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Norm, attention, add; in the decoder norm, attention to the encoder, add; norm, MLP, add."""

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        self.self_norm, self.self_attention = nn.RMSNorm(config.dim), Attention(config)
        self.cross_norm = nn.RMSNorm(config.dim) if decoder else None
        self.cross_attention = Attention(config) if decoder else None
        self.norm = nn.RMSNorm(config.dim)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.self_norm(x)
        x = x + self.drop(self.self_attention(normed, normed, bias))
        if memory is not None and self.cross_norm is not None and self.cross_attention is not None:
            x = x + self.drop(self.cross_attention(self.cross_norm(x), memory, None))
        return x + self.drop(self.down(self.drop(F.relu(self.up(self.norm(x))))))


class T5(nn.Module):
    """source [B, S], target [B, T] (int64, shifted right by whoever makes the batch) -> logits [B, T, V]."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.encoder_bias = nn.Embedding(config.buckets, config.heads)
        self.decoder_bias = nn.Embedding(config.buckets, config.heads)
        self.encoder = nn.ModuleList([Layer(config, decoder=False) for _ in range(config.layers)])
        self.decoder = nn.ModuleList([Layer(config, decoder=True) for _ in range(config.layers)])
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.drop = nn.Dropout(config.dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)

    def bias(self, table: nn.Embedding, length: int, both: bool) -> Tensor:
        """[1, H, length, length]; what lies ahead is -inf in the decoder."""
        place = torch.arange(length, device=table.weight.device)
        distance = place[None, :] - place[:, None]
        found = table(buckets_of(distance, both, self.config.buckets, self.config.farthest))
        found = found.permute(2, 0, 1).unsqueeze(0)
        return found if both else found.masked_fill(distance > 0, float("-inf"))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, bias = self.drop(self.embedding(source)), self.bias(self.encoder_bias, source.shape[1], both=True)
        for layer in self.encoder:
            x = layer(x, bias)
        memory = self.drop(self.encoder_norm(x))
        y, bias = self.drop(self.embedding(target)), self.bias(self.decoder_bias, target.shape[1], both=False)
        for layer in self.decoder:
            y = layer(y, bias, memory)
        y = self.drop(self.decoder_norm(y)) * self.config.dim**-0.5
        return F.linear(y, self.embedding.weight)
