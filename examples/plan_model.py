"""A program to plan, without a weight in memory: soli plan examples/plan_model.py:llama_8b --cluster h100:8x64 --global-batch 1024"""

import torch

import soli
from soli.models.llama import Llama, LlamaConfig


def llama_8b():
    """Llama 3 of 8 billion parameters on the meta device, one row of 8192 tokens, and its loss."""
    sizes = LlamaConfig(vocab=128256, dim=4096, layers=32, heads=32, groups=8, hidden=14336, theta=500_000.0)
    with torch.device("meta"):
        model = Llama(sizes)
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    return model, {"tokens": tokens, "targets": tokens}, soli.losses.cross_entropy("targets")
