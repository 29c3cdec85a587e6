"""Tensor parallelism over two ranks: by hand (all-reduces in two autograd functions), by hand with the residual
stream cut along the sequence as Megatron does it (all-gathers and reduce-scatters), and by DTensor."""

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import workload
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from entries import Step, start

Way = Callable[[Tensor], Tensor]


def build(mode: str, size: str) -> Step:
    """The training step: every rank sees the whole batch and holds its part of each block."""
    start()
    model = workload.build_model(size)
    shape = workload.SIZES[size]
    kind = SequenceBlock if mode == "hand-sp" else Block
    model.blocks = nn.ModuleList(kind(block, shape.heads) for block in model.blocks)
    if mode == "hand-sp":
        return sequence_step(model)
    if mode == "hand":
        for block in model.blocks:
            by_hand(block, enter, leave)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        for block in model.blocks:
            parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("out", "down")})
    return trained(model, lambda batch: workload.mean_loss(model(batch["tokens"]), batch["targets"]))


def trained(model: nn.Module, loss_of: Callable[[dict[str, Tensor]], Tensor], cut: Sequence[nn.Parameter] = ()) -> Step:
    """A training step. The gradients of `cut` are summed over the ranks."""
    parts = [p for p in model.parameters() if isinstance(p, DTensor)]  # fused AdamW takes no mixture
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [workload.build_optimizer(group) for group in (parts, plain) if group]

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        if cut:
            sum_gradients(cut)
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
            layer.weight, layer.bias = (nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone()))
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


class Move(torch.autograd.Function):
    """`there` forward, `back` on the gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def enter(x: Tensor) -> Tensor:
    """Identity forward, all-reduce backward."""
    return Move.apply(x, lambda x: x.view_as(x), summed)


def leave(x: Tensor) -> Tensor:
    """All-reduce forward, identity backward."""
    return Move.apply(x, lambda x: summed(x.clone()), lambda grad: grad)


def summed(x: Tensor) -> Tensor:
    """The sum over the ranks, in place where that is possible."""
    x = x.contiguous()
    dist.all_reduce(x)
    return x


class Apply(nn.Module):
    """A module of a function."""

    def __init__(self, function: Way) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Row(nn.Module):
    """Row-parallel: the bias once, after the sum."""

    def __init__(self, weight: Tensor, bias: Tensor, leave: Way) -> None:
        super().__init__()
        self.weight, self.bias, self.leave = nn.Parameter(weight), nn.Parameter(bias), leave

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, self.weight)) + self.bias


def by_hand(block: Block, enter: Way, leave: Way) -> None:
    """Keep this rank's rows of the column-parallel layers and columns of the row-parallel ones."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("q", "k", "v", "up"):
        layer = getattr(block, name)
        layer.weight = nn.Parameter(layer.weight.detach().chunk(world)[rank].clone())
        layer.bias = nn.Parameter(layer.bias.detach().chunk(world)[rank].clone())
    for name in ("out", "down"):
        layer = getattr(block, name)
        part = layer.weight.detach().chunk(world, dim=1)[rank].clone()
        setattr(block, name, Row(part, layer.bias.detach().clone(), leave))
    block.enter = Apply(enter)


class SequenceBlock(Block):
    """The same over a stream of shape [T / ranks, B, D]; the sequence comes first, so that parts are contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(self.norm1(x))
        T, B, _ = h.shape
        q, k, v = (f(h).view(T, B, -1, self.head_width).permute(1, 2, 0, 3) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).reshape(T, B, -1))
        return x + self.down(F.gelu(self.up(self.enter(self.norm2(x)))))


def sequence_step(model: workload.GPT) -> Step:
    """The training step with the stream cut along the sequence; embedding and head are whole on every rank."""
    for block in model.blocks:
        by_hand(block, gather, scatter)
    cut = [model.norm.weight, model.norm.bias]  # have seen this rank's tokens only
    for block in model.blocks:
        cut += [*block.norm1.parameters(), *block.norm2.parameters(), block.out.bias, block.down.bias]

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"].t()
        x = split(model.embed(tokens) + model.position(torch.arange(len(tokens)))[:, None])
        for block in model.blocks:
            x = block(x)
        return workload.mean_loss(model.head(join(model.norm(x))), batch["targets"].t())

    return trained(model, loss_of, cut)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Over the ranks, in one all-reduce."""
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(grad.view_as(p))


def gathered(x: Tensor) -> Tensor:
    """Every rank's part, one after the other."""
    whole = x.new_empty(len(x) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


def scattered(x: Tensor) -> Tensor:
    """This rank's part of the sum over the ranks."""
    part = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous())
    return part


def own(x: Tensor) -> Tensor:
    """This rank's part of what every rank has."""
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def gather(x: Tensor) -> Tensor:
    """Before column-parallel layers: all-gather forward, reduce-scatter backward."""
    return Move.apply(x, gathered, scattered)


def scatter(x: Tensor) -> Tensor:
    """After row-parallel layers: reduce-scatter forward, all-gather backward."""
    return Move.apply(x, scattered, gathered)


def split(x: Tensor) -> Tensor:
    """Where what every rank computes alike ends: its part forward, all-gather backward."""
    return Move.apply(x, own, gathered)


def join(x: Tensor) -> Tensor:
    """Where it begins again: all-gather forward, its part backward."""
    return Move.apply(x, gathered, own)
