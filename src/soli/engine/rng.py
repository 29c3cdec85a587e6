"""The random state of a rank, of torch, numpy and Python, as one tensor of bytes: JSON, so that nothing is pickled.

The engine draws nothing from it (dropout and the order of the data are functions of the seed); a dataset or
a user's own loop may. Each rank's is saved, so that a run under the same plan goes on with the same draws.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils import checkpoint


def state() -> Tensor:
    """The states of this rank's generators, as bytes [n]."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    found = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": [bytes(s.tolist()).hex() for s in torch.cuda.get_rng_state_all()] if _on_cuda() else [],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(words), next_gauss],
    }
    return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)


def restore(state: Tensor) -> None:
    """Set the generators to what `state()` gave."""
    found = json.loads(bytes(state.tolist()))
    torch.set_rng_state(_tensor(found["torch"]))
    if _on_cuda() and len(found["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(text) for text in found["cuda"]])
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, words, next_gauss = found["python"]
    random.setstate((version, tuple(words), next_gauss))


@contextmanager
def kept() -> Iterator[None]:
    """Around what soli runs of a program beside its steps. The generators are afterwards as they were before, and torch says nothing of
    checkpoints without gradients, which are these runs' own."""
    before = state()
    try:
        with patch.object(checkpoint, "check_backward_validity", lambda _: None):
            yield
    finally:
        restore(before)


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
