"""Ranks of one program draw alike: Python's random, numpy's and torch's generators begin with the launcher's number on each of them.

A program that seeds nothing builds another model and shuffles its data in another way in every process; as ranks they would not be one program.
One that calls torch.manual_seed and the like has what it says. numpy and torch are seeded when the program imports them, and not before: what it
sets for them in os.environ still counts.
"""

import random
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SEEDS: dict[str, Callable[[Any, int], object]] = {
    "numpy.random": lambda module, seed: module.seed(seed),
    "torch": lambda module, seed: module.manual_seed(seed),
}
"""Modules with a generator of their own, and how it is seeded."""


class Seeding(MetaPathFinder):
    """Finds these modules as ever, and seeds each after its first import. `seed`: below 2**32."""

    def __init__(self, seed: int) -> None:
        self.seed, self.left = seed, dict(SEEDS)
        random.seed(seed)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        begin = self.left.pop(fullname, None)
        found = PathFinder.find_spec(fullname, path, target) if begin is not None else None
        if begin is None or found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def seeded(module: ModuleType) -> None:
            execute(module)
            begin(module, self.seed)

        found.loader.exec_module = seeded  # type: ignore[method-assign]
        return found
