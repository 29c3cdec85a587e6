"""torch's recurrent layers: their dropout, whose mask is one of rows (randomness.py), for which layers run one by one that torch's function runs
at once; and their parameters, which become other tensors in place.

torch.utils.swap_tensors refuses a tensor with weak references; recurrent modules keep some to their weights (to find out
whether they must be flattened again). They are made anew: the parameters are the same objects afterwards.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FUNCTIONS = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


def draws(args: tuple[Any, ...]) -> bool:
    """Of torch.lstm(input, state, weights, bias, layers, dropout, train, ...) and its packed form."""
    at = next((i for i, x in enumerate(args) if isinstance(x, float)), None)
    return at is not None and args[at] > 0 and args[at - 1] > 1 and args[at + 1] is True


def packed(args: tuple[Any, ...]) -> bool:
    """Whether rows are put together by their lengths (torch.lstm(data, batch_sizes, state, weights, ...))."""
    return isinstance(args[3], (list, tuple))


def layered(function: Any, drop: Callable[[Tensor, float], Tensor], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What the function returns: outputs, and the last state of each layer and direction, one tensor or (of lstm) two.

    drop: of what a layer hands to the next one, and with which probability.
    """
    outputs, state, weights, bias, layers, p, train, both, *first = args
    states, ends = (state,) if isinstance(state, Tensor) else tuple(state), []
    for n in range(layers):
        own = [s.unflatten(0, (layers, -1))[n] for s in states]
        of_layer = weights[n * len(weights) // layers : (n + 1) * len(weights) // layers]
        given = own[0] if isinstance(state, Tensor) else own
        outputs, *end = function(drop(outputs, p) if n else outputs, given, of_layer, bias, 1, 0.0, train, both, *first)
        ends.append(end)
    return outputs, *(torch.cat(end) for end in zip(*ends, strict=True))


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """While parameters of this model are swapped."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in module._flat_weights]
