"""Products on a cube of ranks: 3D tensor parallelism (Agarwal et al. 1995; Bian et al., arXiv 2105.14450).

Each of the three matrices is cut along one axis more than its two dims need, and gathered over it where it is read;
a part of a sum is scattered over it. Per rank, what is sent falls with the square of the cube's edge, where that of
a 1D product does not fall at all. An axis may be of size 1, and the three may differ: 2.5D is A x A x D.

    y[T_B, N_A] = scattered over B of  x[T, K_B] @ W[N_A, K_B]^T      x gathered over A, W over D
    dx[T_A, K_B] = scattered over A of  dy[T, N_A] @ W[N_A, K_B]      dy gathered over B, W over D
    dW[N_AD, K_B] = scattered over D of  dy[T, N_A]^T @ x[T, K_B]     dy gathered over B, x over A

    Legend: T tokens of the ranks with one number of D, N new, K summed; A ranks along `gather`, B along `scatter`,
    D along `depth`; n, k this rank's block of W before its cut over D; e bytes of an element
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from soli.mesh.collectives import Axis
from soli.parallel.keep import carried
from soli.parallel.precision import lowered
from soli.parallel.tensor.moves import collected_later, scattered_later
from soli.parallel.tensor.split import Split
from soli.parallel.tensor.summa import GRADIENT_OF_W, GRADIENT_OF_X, flat, plainly

INPUT, WEIGHT = "input of a product", "a weight"
OUTPUT, GRADIENT = "output of a product", "gradient of an output"


class _Cuts(NamedTuple):
    """How a product lies on the cube, see `linear`."""

    tokens_in: Split
    tokens_out: Split
    of_w: Split
    gather: Axis
    scatter: Axis
    depth: Axis


def linear(x: Tensor, w: Tensor, *, tokens_in: Split, tokens_out: Split, gather: Axis, scatter: Axis, depth: Axis, of_w: Split) -> Tensor:
    """x [T_A, .., K_B], W [N_AD, K_B] -> y [T_B, .., N_A].

    x's dim 0 is cut over `gather` by tokens_in, y's over `scatter` by tokens_out; W's dim 0, which is already the
    part N_A of this rank, once more over `depth` by of_w. What is gathered is dropped after the product and gathered
    again for the backward.

    Bytes of a rank's collectives, with T^ of a cut for its parts padded to the largest, times their number, and m
    for the product of x's dims between the first and the last; those over an axis of size 1 are none:

        forward     all_gather over gather T^in m k e,   over depth n^ k e,  reduce_scatter over scatter T^out m n e
        backward    all_gather over scatter T^out m n e
        for dx      all_gather over depth n^ k e,        reduce_scatter over gather T^in m k e
        for dW      all_gather over gather T^in m k e,   reduce_scatter over depth n^ k e
    """
    x, w = lowered(x), lowered(w)
    parts = tokens_in.local(gather.size, gather.index), of_w.local(depth.size, depth.index)
    if (x.shape[0], w.shape[0]) != parts or x.shape[-1] != w.shape[1] or tokens_in.size != tokens_out.size:
        raise ValueError(f"x {list(x.shape)} and W {list(w.shape)} are not the rank's parts {list(parts)}")
    return _Linear.apply(x, w, _Cuts(tokens_in, tokens_out, of_w, gather, scatter, depth))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, cuts: _Cuts) -> Tensor:
        for_x, for_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if for_w else None, w if for_x else None)
        ctx.cuts = cuts
        there = lambda x: scattered_later(_product(x, w, cuts), cuts.tokens_out, cuts.scatter, OUTPUT)()
        with plainly(x.device):
            # Under selective recomputation the sum is kept: nothing is sent again.
            return carried(x, there, alone=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with plainly(dy.device):
            return *_gradients(dy, x, w, ctx.cuts), None


def _product(x: Tensor, w: Tensor, cuts: _Cuts) -> Tensor:
    """[T, .., N_A], a part of a sum over K. Both are gathered at once, and what was gathered ends here."""
    of_x = collected_later(x, cuts.tokens_in, cuts.gather, INPUT)
    of_weight = collected_later(w, cuts.of_w, cuts.depth, WEIGHT)
    return F.linear(of_x(), of_weight())


def _gradients(dy: Tensor, x: Tensor | None, w: Tensor | None, cuts: _Cuts) -> tuple[Tensor | None, Tensor | None]:
    """dx [T_A, .., K_B] and dW [N_AD, K_B] of dy [T_B, .., N_A]. Without W no dx is wanted, without x no dW."""
    tokens_in, tokens_out, of_w, gather, scatter, depth = cuts
    of_y = collected_later(dy, tokens_out, scatter, GRADIENT)
    of_weight = None if w is None else collected_later(w, of_w, depth, WEIGHT)
    of_x = None if x is None else collected_later(x, tokens_in, gather, INPUT)
    new = of_y()
    del of_y
    dx = dw = None
    if of_weight is not None:
        dx = scattered_later(torch.matmul(new, of_weight()), tokens_in, gather, GRADIENT_OF_X)
        of_weight = None  # what was gathered goes with it
    if of_x is not None:
        dw = scattered_later(flat(new).t() @ flat(of_x()), of_w, depth, GRADIENT_OF_W)
        of_x = None
    return None if dx is None else dx(), None if dw is None else dw()
