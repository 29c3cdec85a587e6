"""Tensor parallelism over two ranks, written by hand (all-reduces in two autograd functions) and by DTensor."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import workload
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from entries import Step, start


def build(mode: str, size: str) -> Step:
    """The training step: every rank sees the whole batch and holds its part of each block."""
    start()
    model = workload.build_model(size)
    shape = workload.SIZES[size]
    model.blocks = nn.ModuleList(Block(block, shape.heads) for block in model.blocks)
    if mode == "hand":
        for block in model.blocks:
            by_hand(block)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        for block in model.blocks:
            parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("out", "down")})
    parts = [p for p in model.parameters() if isinstance(p, DTensor)]  # fused AdamW takes no mixture
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [workload.build_optimizer(group) for group in (parts, plain) if group]

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = workload.mean_loss(model(batch["tokens"]), batch["targets"])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


class Block(nn.Module):
    """workload.Block with q, k and v apart, so that each rank can take whole heads."""

    def __init__(self, block: workload.Block, heads: int) -> None:
        super().__init__()
        width = block.out.in_features
        self.norm1, self.norm2, self.head_width = block.norm1, block.norm2, width // heads
        for name, weight, bias in zip("qkv", block.qkv.weight.chunk(3), block.qkv.bias.chunk(3), strict=True):
            layer = nn.Linear(width, width)
            layer.weight, layer.bias = (
                nn.Parameter(weight.detach().clone()),
                nn.Parameter(bias.detach().clone()),
            )
            setattr(self, name, layer)
        self.out, self.up, self.down = block.out, block.up, block.down
        self.enter, self.leave = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        h = self.enter(self.norm1(x))
        q, k, v = (f(h).view(B, T, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.out(mixed.transpose(1, 2).reshape(B, T, -1)))
        return x + self.leave(self.down(F.gelu(self.up(self.enter(self.norm2(x))))))


class Enter(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Apply(nn.Module):
    """A module of an autograd function; a row-parallel layer's bias is added after the sum."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


class Row(nn.Module):
    """Row-parallel: the bias once, after the sum."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(F.linear(x, self.weight)) + self.bias


def by_hand(block: Block) -> None:
    """Keep this rank's rows of the column-parallel layers and columns of the row-parallel ones."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("q", "k", "v", "up"):
        layer = getattr(block, name)
        layer.weight = nn.Parameter(layer.weight.detach().chunk(world)[rank].clone())
        layer.bias = nn.Parameter(layer.bias.detach().chunk(world)[rank].clone())
    for name in ("out", "down"):
        layer = getattr(block, name)
        part = layer.weight.detach().chunk(world, dim=1)[rank].clone()
        setattr(block, name, Row(part, layer.bias.detach().clone()))
    block.enter = Apply(Enter)
