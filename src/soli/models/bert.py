"""A BERT: bidirectional encoder, post-norm, one fused projection for queries, keys and values. Plain PyTorch.

Shape letters: B rows, T positions, V vocabulary, C model width (dim), H heads, D width of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT. `kinds`: of token (sentence A and B)."""

    vocab: int
    dim: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    kinds: int = 2
    dropout: float = 0.1


class Layer(nn.Module):
    """Attention, add, norm; MLP, add, norm (arXiv 1810.04805)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.p = config.heads, config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.attention_norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.p if self.training else 0.0)
        x = self.attention_norm(x + self.drop(self.out(mixed.transpose(1, 2).reshape(B, T, C))))
        return self.norm(x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """tokens [B, T] (int64), mask [B, T] (True: a token, False: padding) -> logits [B, T, V]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.dim % config.heads:
            raise ValueError(f"dim {config.dim} does not divide into {config.heads} heads")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Parameter(torch.zeros(config.context, config.dim))
        self.kinds = nn.Embedding(config.kinds, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.transform = nn.Linear(config.dim, config.dim)
        self.transform_norm = nn.LayerNorm(config.dim)
        self.bias = nn.Parameter(torch.zeros(config.vocab))  # of the head, which is the embedding
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, kinds: Tensor | None = None) -> Tensor:
        kinds = torch.zeros_like(tokens) if kinds is None else kinds
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]] + self.kinds(kinds)
        x = self.drop(self.norm(x))
        wide = None if mask is None else mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, wide)
        return F.linear(self.transform_norm(F.gelu(self.transform(x))), self.embedding.weight, self.bias)
