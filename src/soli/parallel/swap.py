"""Parameters that become other tensors in place, in modules that refer to them weakly too.

torch.utils.swap_tensors refuses a tensor with weak references; recurrent modules keep some to their weights (to find out
whether they must be flattened again). They are made anew: the parameters are the same objects afterwards.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """While parameters of this model are swapped."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in module._flat_weights]
