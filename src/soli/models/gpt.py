"""A GPT: pre-norm blocks, learned positions, GELU MLP, causal attention. Plain PyTorch.

Shape letters: B windows, T positions, V vocabulary, C model width (dim), H heads, D width of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `tied`: the output projection is the token embedding itself."""

    vocab: int
    dim: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 256
    dropout: float = 0.0
    tied: bool = True


class Attention(nn.Module):
    """Causal self-attention, [B, T, C] -> [B, T, C].

    Queries, keys and values are three projections, and the heads are counted from the width of what
    they give: so the code reads the same whether a rank holds all heads or some of them.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.dim // config.heads, config.dropout
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        by_heads = lambda x: x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, T, D]
        q, k, v = (by_heads(project(x)) for project in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two layers with a GELU between, four times as wide inside, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Norm, attention, add; norm, MLP, add."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """tokens [B, T] (int64, T <= context) -> logits [B, T, V].

    The weights come from the default generator, so `torch.manual_seed` before the constructor fixes them.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.dim % config.heads:
            raise ValueError(f"dim {config.dim} does not divide into {config.heads} heads")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's start: normal 0.02; what is added to the residual stream shrinks with the depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            if isinstance(block, Block):
                for last in (block.attention.out, block.mlp.down):
                    nn.init.normal_(last.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens, but this GPT reads {self.config.context} at most")
        x = self.drop(self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: GPT, prompt: list[int], n: int, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """Continue `prompt` (at least one token) by `n` tokens; returns the new ones only.

    Temperature 0 takes the likeliest token. The draw depends on nothing but `seed`: it has its own
    generator, on the CPU, so that every device draws alike. The model is left in the mode it was in.
    """
    if not prompt:
        raise ValueError("generate needs at least one token to start from")
    draw = torch.Generator().manual_seed(seed)
    device, training = model.embedding.weight.device, model.training
    model.eval()
    tokens = list(prompt)
    for _ in range(n):
        logits = model(torch.tensor([tokens[-model.config.context :]], device=device))[0, -1].float().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            tokens.append(int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=draw)))
    model.train(training)
    return tokens[len(prompt) :]
