"""Random generators: the states of torch's and of others, and seeds that are hashes of what they are for."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

OTHERS = [False]
"""Whether a forward of this process draws from those that are not torch's; states of theirs take 0.1 ms to read."""


def states() -> tuple[bytes, ...]:
    """The states of torch's: of the CPU, and of the GPU in use."""
    found = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.get_rng_state())
    return tuple(state.numpy().tobytes() for state in found)


def after(start: tuple[bytes, ...], nonces: int) -> tuple[bytes, ...]:
    """The states after so many calls of a probe, each of which draws its nonce and nothing else."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(start[0]), dtype=torch.uint8))
    for _ in range(nonces):
        torch.randint(2**62, (), generator=generator)
    return generator.get_state().numpy().tobytes(), *start[1:]


def others() -> tuple[Any, ...]:
    """The states of the generators that are not torch's. Not as numpy writes them, which takes 12 ms."""
    return random.getstate(), _comparable(np.random.get_state(legacy=False))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


Held = tuple[Any, Any, Any]


def held() -> Held:
    """The states of Python's random, of numpy's and of torch's (of the CPU)."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def hold(states: Held) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextmanager
def apart(number: int, going_on: Held | None = None) -> Iterator[Callable[[], bool]]:
    """Inside, these begin with a number, or go on from states; afterwards they are as before. Whether one was drawn from."""
    before = held()
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    if going_on is not None:
        hold(going_on)
    start = others(), states()
    try:
        yield lambda: (others(), states()) != start
    finally:
        hold(before)


def seed(number: int) -> None:
    """torch.manual_seed, which formats a stack for each kind of device that is not in use (0.2 ms)."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def mixed(base: int, row: int) -> int:
    """splitmix64: neighbouring rows get unrelated seeds."""
    mask = 2**64 - 1
    z = (base + (row + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
