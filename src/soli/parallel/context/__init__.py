"""Kernels of context parallelism: attention of a sequence that is cut over ranks, on plain local tensors."""
