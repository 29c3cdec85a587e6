"""One rank of one memory measurement: wide linear layers under one ZeRO stage (memory.py starts it)."""

import argparse
import os
from pathlib import Path

import probe
import torch
from rank import finish
from torch import Tensor, nn

BATCH = 4
LEARNING_RATE = 1e-5  # the layers are wide and their number is a parameter: small enough to be stable always


class Stack(nn.Module):
    """Residual linear layers: nearly all of its memory is parameters, and what belongs to them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_sum(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Squared error: its sum over the rows, and how many rows they are."""
    return (output - batch["targets"]).pow(2).mean(dim=1).sum(), len(output)


def build_batch(width: int) -> dict[str, Tensor]:
    """The one global batch."""
    generator = torch.Generator().manual_seed(7)
    x, targets = torch.randn(2, BATCH, width, generator=generator)
    return {"x": x, "targets": targets}


def optimizer(parameters: object) -> torch.optim.Optimizer:
    """fp32 AdamW: two states a parameter."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)  # type: ignore[arg-type]


def build_model(layers: int, width: int) -> Stack:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Stack(layers, width)


def warm(width: int = 64) -> None:
    """Train something tiny first, so that the kernels' code and the pools they start are in the baseline."""
    model, batch = build_model(2, width), build_batch(width)
    tiny = optimizer(model.parameters())
    total, _ = loss_sum(model(batch["x"]), batch)
    total.backward()
    tiny.step()


def measure(name: str, layers: int, width: int) -> dict:
    """Resident memory before the model, and its peak in steps 2 to 4."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    system, _, mode = name.partition(":")
    if system == "soli":
        import soli  # not at the top: the rows by hand must not carry it
    else:
        import torch.distributed as dist
        import workload
        from entries import byhand

        workload.LEARNING_RATE = LEARNING_RATE
        if world > 1:
            dist.init_process_group("gloo")
    warm()
    batch = build_batch(width)
    probe.trim()
    base = probe.memory()["rss"]
    if system == "soli":
        engine = soli.parallelize(
            build_model(layers, width), loss_sum, optimizer=optimizer, plan=f"dp={world},zero={mode}"
        )
        step = lambda: float(engine.step(batch))
    else:
        model = byhand.split(mode, build_model(layers, width))
        part = workload.local_part(batch, rank, world)
        update = byhand.build_optimizer(mode, model)

        def step() -> float:
            total, count = loss_sum(model(part["x"]), part)
            (total / count).backward()
            update.step()
            update.zero_grad()
            return float(total.detach() / count)

    losses = [step()]  # the optimizer's states are made in the first step
    probe.trim()
    probe.reset_peak()
    losses += [step() for _ in range(3)]
    after = probe.memory()
    probe.trim()
    return {
        "losses": losses, "base": base, "growth": after["peak"] - base,
        "resident": probe.memory()["rss"] - base, "shared": after.get("shared", 0),
    }  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", required=True, help="soli:STAGE or hand:MODE")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    finish(args.out, lambda meeting: measure(args.row, args.layers, args.width))


if __name__ == "__main__":
    main()
