"""Megatron-Core's tensor parallelism, without and with its sequence parallelism.

Its VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear and vocab_parallel_cross_entropy, in the workload's
GPT with the sequence first, as Megatron has it. q, k and v are one layer, a head's three after each other. With
sequence parallelism the gradients of norms and row biases are summed in one all-reduce, as in its finalize_model_grads
(which wants its DDP wrapper around the model).
On a CPU: torch.cuda.current_device, at which it allocates, answers the CPU; parameters are made there
(use_cpu_initialization); its fused accumulation of gradients, a CUDA extension, is off. Attention, GELU and norms are
PyTorch's: its own want CUDA for their fusions and for the tracker of random states.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import workload
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn

from entries import Step, start
from entries.tensor import trained

NO_INIT = {"init_method": nn.Identity()}  # never called: every weight is copied in


def build(mode: str, size: str) -> Step:
    """The training step: every rank sees the whole batch and holds its part of each layer."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    start()
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(world)
    config = ModelParallelConfig(
        tensor_model_parallel_size=world,
        sequence_parallel=mode == "tp-sp",
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    model = GPT(workload.build_model(size), workload.SIZES[size].heads, config)
    cut = model.seen_in_part() if config.sequence_parallel else []

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"])
        return vocab_parallel_cross_entropy(logits, batch["targets"].t().contiguous()).mean()

    return trained(model, loss_of, cut)


class Block(nn.Module):
    """workload.Block of Megatron's layers, over [T, B, D] or, with sequence parallelism, [T / ranks, B, D]."""

    def __init__(self, block: workload.Block, heads: int, config: ModelParallelConfig) -> None:
        super().__init__()
        width = block.out.in_features
        self.norm1, self.norm2, self.head_width = block.norm1, block.norm2, width // heads
        column = {"config": config, "bias": True, **NO_INIT}
        row = column | {"input_is_parallel": True, "skip_bias_add": False}
        self.qkv = ColumnParallelLinear(width, 3 * width, **column)
        self.out = RowParallelLinear(width, width, **row)
        self.up = ColumnParallelLinear(width, 4 * width, **column)
        self.down = RowParallelLinear(4 * width, width, **row)
        fill(self.qkv, by_head(block.qkv.weight, heads), by_head(block.qkv.bias, heads))
        fill(self.up, block.up.weight, block.up.bias)
        fill(self.out, block.out.weight, block.out.bias)
        fill(self.down, block.down.weight, block.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv, _ = self.qkv(self.norm1(x))
        T, B, _ = qkv.shape
        q, k, v = qkv.view(T, B, -1, 3, self.head_width).permute(3, 1, 2, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).reshape(T, B, -1))[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))[0]))[0]


class GPT(nn.Module):
    """workload.GPT of Megatron's layers; the logits are cut over the vocabulary and have the sequence first."""

    def __init__(self, model: workload.GPT, heads: int, config: ModelParallelConfig) -> None:
        super().__init__()
        vocabulary, width = model.head.weight.shape
        self.embed = VocabParallelEmbedding(vocabulary, width, config=config, **NO_INIT)
        self.position, self.norm = model.position, model.norm
        self.blocks = nn.ModuleList(Block(block, heads, config) for block in model.blocks)
        self.head = ColumnParallelLinear(width, vocabulary, config=config, bias=False, **NO_INIT)
        self.sequence_parallel = config.sequence_parallel
        fill(self.embed, model.embed.weight)
        fill(self.head, model.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        x = x.transpose(0, 1).contiguous()
        if self.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[0]

    def seen_in_part(self) -> list[nn.Parameter]:
        """What saw this rank's tokens only: norms and biases after the sum."""
        found = [*self.norm.parameters()]
        for block in self.blocks:
            found += [*block.norm1.parameters(), *block.norm2.parameters(), block.out.bias, block.down.bias]
        return found


def by_head(rows: Tensor, heads: int) -> Tensor:
    """From all of q, all of k, all of v to one head's q, k and v after the other's."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def fill(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    """Copy this rank's part of the whole weight, and of the bias where that is cut."""
    for own, whole in ((layer.weight, weight), (getattr(layer, "bias", None), bias)):
        if own is None or whole is None:
            continue
        dim = next((d for d in range(own.ndim) if own.shape[d] != whole.shape[d]), None)
        part = whole if dim is None else whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
        own.data.copy_(part.detach())
