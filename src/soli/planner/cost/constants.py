"""What is fitted: how near to their data sheets devices and frameworks come. One set a (generation, framework).

constants.toml has the sets, which `make fit-planner` writes. A set says what is different from the one that it
follows: a framework on one generation follows the framework on all, and that one the default. Nothing is fitted a
model or a row; what several models' runs say of layers of a shape is in layers.toml (measured.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from soli.core.tables import table


@dataclass(frozen=True)
class Meaning:
    """A constant: where it starts, between what it must stay, and what it is (meanings.toml)."""

    default: float
    low: float
    high: float
    what: str


MEANINGS = {name: Meaning(**said) for name, said in table(__package__, "meanings.toml").items()}
NAMES = tuple(MEANINGS)
DEFAULT = "default"
LIKE = {"soli": "fsdp"}
"""Frameworks that were not measured on such devices, and the most alike that was: eager PyTorch with flash attention."""
ALIKE = {"blackwell-rtx": "ada"}
"""And generations: devices for graphics, whose peaks sum in fp32."""
SPREADS = {"time_low": 0.5, "time_high": 2.0, "memory_low": 0.5, "memory_high": 1.5, "near": 0.0}
"""What is measured, by what is predicted: 5% of rows that were not fitted lie below low, 5% above high. `near`: by how much two plans
of one workload are off beside each other, the median. And where nothing is known of it."""


class Constants(SimpleNamespace):
    """Each constant as an array [N], beside Points, or [1]. The names are those of MEANINGS."""

    def take(self, index: NDArray[np.intp]) -> Constants:
        """Of the points at these places."""
        return Constants(**{name: of[index] if len(of) > 1 else of for name, of in vars(self).items()})


@cache
def sets() -> dict[str, dict[str, float]]:
    """The sets of constants.toml by name: "default", "megatron", "megatron ampere", ..."""
    return table(__package__, "constants.toml")


def chain(framework: str, generation: str) -> tuple[str, str, str]:
    """The sets that one follows, the most general first."""
    framework, generation = LIKE.get(framework, framework), ALIKE.get(generation, generation)
    return DEFAULT, framework, f"{framework} {generation}"


def known(framework: str, generation: str) -> dict[str, float]:
    """Every constant of a framework on a generation, of the nearest set that says it."""
    found = {name: meaning.default for name, meaning in MEANINGS.items()}
    for name in chain(framework, generation):
        found |= {key: value for key, value in sets().get(name, {}).items() if key in NAMES}
    return found


def spread_of(framework: str) -> dict[str, float]:
    """See SPREADS: how far all sources are off that were left out, whatever their program; but Megatron's tests, which no other is like.

    A program's own are no narrower where four sources or more tell them, and hold too little where fewer do (docs/log.md). soli's memory
    has its own, by rehearsals and what a GPU took.
    """
    return SPREADS | {key: value for name in (DEFAULT, framework) for key, value in sets().get(name, {}).items() if key in SPREADS}


def repeated(one: Mapping[str, float], count: int) -> Constants:
    """The same constants at every place."""
    return Constants(**{name: np.full(count, one[name], dtype=np.float64) for name in NAMES})
