"""The same program on an Engine: the loss says its sum and its count, and the rest is one call."""

import torch
from torch import nn

import soli

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
x = torch.randn(256, 8)
y = x.sin().sum(1, keepdim=True)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = soli.parallelize(model, soli.losses.mse(), optimizer=optimizer, clip=1.0)
for step in range(40):
    rows = slice(step % 4 * 64, step % 4 * 64 + 64)
    loss = engine.step((x[rows], y[rows]))
    if step % 10 == 9 and engine.rank == 0:
        print(f"step {step + 1} loss {loss:.5f}")
