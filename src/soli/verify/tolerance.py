"""How far two orders of the same sums may differ: machine epsilon times the depth of the computation.

Two plans compute the same sums in another order. A sum of n terms passes n roundings in the worst order, and
along the longest path from an input to an updated parameter the roundings of all sums on it add up. Each
step starts from the error of the one before and adds its own.
"""

import torch
from torch import nn

OF_AN_UPDATE = 16
"""Operations between a gradient and an updated parameter: clipping, and AdamW's moments, root and quotient."""


def depth(model: nn.Module, terms: int) -> int:
    """Roundings on the longest path of a step; `terms`: rows (times positions) that a gradient sums over.

    A matrix [out, in] sums over `in` forward and over `out` backward; a vector [n] (of a norm, a bias) stands
    for reductions over n both ways.
    """
    shapes = [p.shape for p in model.parameters() if p.numel()]
    return sum((s[0] + s.numel() // s[0]) if len(s) > 1 else 2 * s.numel() for s in shapes) + terms + OF_AN_UPDATE


def bound(model: nn.Module, terms: int, steps: int, dtype: torch.dtype) -> float:
    """The relative error that rounding alone may cause after `steps` steps in `dtype`."""
    return torch.finfo(dtype).eps * depth(model, terms) * steps
