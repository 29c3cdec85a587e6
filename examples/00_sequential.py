"""A sequential program: plain PyTorch on one device."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
x = torch.randn(256, 8)
y = x.sin().sum(1, keepdim=True)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    rows = slice(step % 4 * 64, step % 4 * 64 + 64)
    loss = (model(x[rows]) - y[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss:.5f}")
