"""Attention of one block of queries with one block of keys, which gives the log of its sum of exponentials too.

With it blocks are put together (FlashAttention, arXiv 2205.14135, 2307.08691): forward as ring.py does it, backward
each alone, since the weights of any block are exp(score - lse) once out and lse of all keys are known.

torch's kernels do the work where they can: on the CPU its flash attention, on CUDA the memory-efficient one, which
takes a bias. For the rest there is the same written out, in memory of l * s. What torch 2.13's CPU kernel does was
tried: it takes 16 to 64 bits; k and v of one head size; a bias of 2 or 4 dims in the type of sums; it ends the process
on empty tensors and reads wrongly what has no stride of 1 in its last dim. A row that sees nothing gives zeros, but 0
as its lse; here such a row is computed as one that sees all, and then emptied, so that no kernel meets it. Groups of
heads are repeated: the kernel's backward did not always know them.

    Legend: b batch, h heads of queries, g heads of keys, l queries, s keys, e head size of q and k, f head size of v
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


class Given(NamedTuple):
    """What a kernel is given, with g = h. `bias`: what is added to the scores, of which `causal` hides those of later keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool
    scale: float


class Kernel(NamedTuple):
    """forward(given) -> out, lse; and backward(given, grad, out, lse) -> dq, dk, dv."""

    forward: Callable[[Given], tuple[Tensor, Tensor]]
    backward: Callable[[Given, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    causal: bool  # it hides later keys by itself


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, h, l, e], k [b, g, s, e], v [b, g, s, f] -> out [b, h, l, f] and lse [b, h, l] in the type of sums.

    `mask` [b or 1, h or 1, l, s] is bool (True may be seen) or is added; `causal` hides key j from query i < j. Both
    may be given. A row that sees nothing gives zeros and the lse -inf.
    """
    kernel = chosen(q, k, v)
    q, k, v = (_plain(x) for x in (q, _repeated(k, q), _repeated(v, q)))
    if mask is None and (kernel.causal or not causal):
        return kernel.forward(Given(q, k, v, None, causal, scale))
    bias, hidden = _bias(mask, causal, q, k)
    out, lse = kernel.forward(Given(q, k, v, bias, False, scale))
    return out.masked_fill(hidden.unsqueeze(-1), 0), lse.masked_fill(hidden, -math.inf)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """This block's part of dq [b, h, l, e], its dk [b, g, s, e] and dv [b, g, s, f]; `out` and `lse` are of all keys."""
    kernel = chosen(q, k, v)
    every_k, every_v = _repeated(k, q), _repeated(v, q)
    bias = None
    if mask is not None or (causal and not kernel.causal):
        bias, hidden = _bias(mask, causal, q, k)
        lse = lse.masked_fill(hidden, math.inf)  # exp(score - inf) = 0: no part in any gradient
        causal = False
    grad, q, every_k, every_v, out = (_plain(x) for x in (grad, q, every_k, every_v, out))
    dq, dk, dv = kernel.backward(Given(q, every_k, every_v, bias, causal, scale), grad, out, lse)
    return dq, _summed(dk, k), _summed(dv, v)


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel that takes such tensors."""
    size, of_values = q.shape[-1], v.shape[-1]
    if 0 in (*q.shape, *k.shape, *v.shape):
        return WRITTEN
    if q.device.type == "cpu" and size == of_values:
        return CPU
    return CUDA if q.device.type == "cuda" and q.dtype != torch.float64 and size % 8 == 0 and of_values % 8 == 0 else WRITTEN


def sums(dtype: torch.dtype) -> torch.dtype:
    """In which type what is of `dtype` is added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _plain(x: Tensor) -> Tensor:
    """With a stride of 1 in the last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """[b, g, s, e] -> [b, h, s, e]: key head i serves query heads i * h/g and on."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient [b, h, s, e] of what was repeated -> [b, g, s, e]."""
    return grad if grad.shape == x.shape else grad.unflatten(1, (x.shape[1], grad.shape[1] // x.shape[1])).sum(2, dtype=sums(grad.dtype))


def _bias(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to the scores [.., l, s], and which rows [.., l] see nothing; to these nothing is added."""
    size, high = (q.shape[2], k.shape[2]), sums(q.dtype)
    if mask is None:
        bias = torch.zeros((1, 1, *size), dtype=high, device=q.device)
    elif mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=high, device=q.device).masked_fill_(~mask, -math.inf)
    else:
        bias = mask.to(high)
    if causal:
        bias = bias.masked_fill(torch.ones(size, dtype=torch.bool, device=q.device).triu_(1), -math.inf)
    hidden = (bias == -math.inf).all(-1)
    return bias.masked_fill(hidden.unsqueeze(-1), 0).contiguous(), hidden


# --- written out ------------------------------------------------------------------------------------------


def _written_scores(of: Given) -> Tensor:
    high = sums(of.q.dtype)
    scores = (of.q.to(high) * of.scale) @ of.k.to(high).mT
    return scores if of.bias is None else scores + of.bias


def _written_forward(of: Given) -> tuple[Tensor, Tensor]:
    scores = _written_scores(of)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    return (weights @ of.v.to(weights.dtype)).to(of.q.dtype), lse


def _written_backward(of: Given, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_written_scores(of) - lse.unsqueeze(-1)).exp()
    q, k, v, out, grad = (x.to(weights.dtype) for x in (of.q, of.k, of.v, out, grad))
    of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * of.scale
    return of_scores @ k, of_scores.mT @ q, weights.mT @ grad


# --- torch's kernels --------------------------------------------------------------------------------------


def _cpu_forward(of: Given) -> tuple[Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(of.q, of.k, of.v, 0.0, of.causal, attn_mask=of.bias, scale=of.scale)


def _cpu_backward(of: Given, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, of.q, of.k, of.v, out, lse, 0.0, of.causal, attn_mask=of.bias, scale=of.scale)


def _cuda_bias(of: Given) -> Tensor | None:
    """[b, h, l, s] in q's type, of which the kernel wants rows that begin at multiples of 16."""
    if of.bias is None:
        return None
    s = of.bias.shape[-1]
    return F.pad(of.bias.to(of.q.dtype), (0, -s % 16))[..., :s].expand(*of.q.shape[:3], s)


def _cuda_forward(of: Given) -> tuple[Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_efficient_attention
    out, lse, _, _ = kernel(of.q, of.k, of.v, _cuda_bias(of), True, 0.0, of.causal, scale=of.scale)
    return out, lse[..., : of.q.shape[2]]  # it comes padded to a multiple of 32


def _cuda_backward(of: Given, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    seed = offset = torch.zeros((), dtype=torch.int64, device=of.q.device)  # of a dropout that is not
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, of.q, of.k, of.v, _cuda_bias(of), out, lse, seed, offset, 0.0,
        [True, True, True, False], of.causal, scale=of.scale,
    )  # fmt: skip
    return dq, dk, dv


WRITTEN = Kernel(_written_forward, _written_backward, causal=False)
CPU = Kernel(_cpu_forward, _cpu_backward, causal=True)
CUDA = Kernel(_cuda_forward, _cuda_backward, causal=True)
