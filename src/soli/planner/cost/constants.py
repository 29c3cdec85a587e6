"""What is fitted: how near to their data sheets devices and frameworks come. One set a (generation, framework).

constants.toml has the sets, which `make fit-planner` writes. A set says what is different from the one that it
follows: a framework on one generation follows the framework on all, and that one the default. Nothing is fitted a
model or a row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from soli.planner.cost.points import Array


@dataclass(frozen=True)
class Meaning:
    """A constant: where it starts, between what it must stay, and what it is."""

    default: float
    low: float
    high: float
    what: str


# The bounds are what devices do: the best products that were measured reach 78 to 87% of the peak, nccl-tests' sums 60 to
# 76% of NVLink, with 46 to 79 us for 2 to 8 ranks (benchmarks/published). Without them one source's constants are absurd
# where another's runs go: a network at a twentieth of its rate, fitted to rows that know none. The
# workspace is cuBLAS', 32 MiB on Hopper and under CUBLAS_WORKSPACE_CONFIG=:4096:8.
# Defaults: 183 products that SimuMax measured on an A100 (MooreThreads/SimuMax@4dcaae5, configs/system/a100_pcie.json) reach
# 0.79 M/(M + 161) N/(N + 161) K/(K + 129) of the peak, 4.9% off; torch's cross entropy of 16 bits reads and writes 38 bytes a logit.
MEANINGS: dict[str, Meaning] = {
    "product_share": Meaning(0.75, 0.3, 0.92, "of the peak that a large product reaches"),
    "product_half": Meaning(161.0, 1.0, 4000.0, "rows of a product at which it reaches half of that"),
    "product_half_inner": Meaning(129.0, 1.0, 2000.0, "columns, and summed elements, at which it does"),
    "low_share": Meaning(0.75, 0.3, 1.2, "of product_share that a product of 8 bits or fewer reaches"),
    "attention_share": Meaning(0.95, 0.3, 1.3, "of what attention's kernel reaches alone"),
    "score_bytes": Meaning(8.0, 2.0, 60.0, "moved for each score that is kept in memory, forward"),
    "stream_share": Meaning(0.85, 0.3, 1.0, "of the memory's bandwidth that is reached"),
    "element_bytes": Meaning(40.0, 12.0, 200.0, "moved for each token and hidden unit in a layer's forward"),
    "logit_bytes": Meaning(38.0, 4.0, 200.0, "moved for each logit, forward and backward"),
    "layer_floor": Meaning(6.5e-4, 1e-6, 5e-3, "seconds in which a layer's forward is launched"),
    "collective_floor": Meaning(3e-5, 1e-6, 1e-3, "seconds that a layer's collective adds to that"),
    "routing_floor": Meaning(1e-3, 1e-6, 1e-2, "seconds that experts and their router add to that"),
    "microbatch_overhead": Meaning(1e-3, 1e-6, 3e-2, "seconds of a microbatch beside its layers"),
    "step_overhead": Meaning(5e-3, 1e-5, 1.0, "seconds of a step beside its microbatches"),
    "straggling": Meaning(0.004, 1e-4, 0.03, "of a step that the slowest rank adds, each doubling of ranks"),
    "link_share": Meaning(0.75, 0.3, 1.0, "of a link's bandwidth that a collective reaches"),
    "net_share": Meaning(0.7, 0.4, 1.0, "of the network's bandwidth that a collective reaches"),
    "send_share": Meaning(0.3, 0.05, 1.0, "of either that a stage's send reaches"),
    "latency_scale": Meaning(2.0, 0.5, 9.0, "latency of a collective's step, in the device's"),
    "hidden_gradients": Meaning(0.3, 0.02, 1.0, "of the gradients' reduction that runs behind the backward"),
    "waited_sums": Meaning(1.5, 0.1, 5.0, "time that what 8 ranks of tp send takes in a layer, by what it takes alone"),
    "hidden_gathers": Meaning(0.8, 0.0, 1.0, "of a layer's time behind which its parameters are gathered"),
    "optimizer_bytes": Meaning(32.0, 12.0, 120.0, "moved for each parameter's update"),
    "logit_kept": Meaning(6.0, 2.0, 18.0, "bytes that a logit takes at the peak"),
    "activation_scale": Meaning(1.0, 0.5, 2.0, "kept activations by those that the formulas count"),
    "resident": Meaning(1.0e8, 1.0e7, 2.0e9, "bytes that stay beside parameters, gradients and the optimizer's"),
    "workspace": Meaning(3.4e7, 1.0e7, 6.0e9, "bytes that a step takes beside its activations"),
}
NAMES = tuple(MEANINGS)
DEFAULT = "default"
LIKE = {"soli": "fsdp"}
"""Frameworks that were not measured on such devices, and the most alike that was: eager PyTorch with flash attention."""
SPREADS = {"time_low": 0.5, "time_high": 2.0, "memory_low": 0.5, "memory_high": 1.5}
"""What is measured, by what is predicted: 5% of rows that were not fitted lie below low, 5% above high. And where
nothing is known of it."""


@dataclass(frozen=True)
class Constants:
    """Each constant as an array [N], beside Points. The names are those of MEANINGS."""

    values: dict[str, Array]

    def __getattr__(self, name: str) -> Array:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


@cache
def sets() -> dict[str, dict[str, float]]:
    """The sets of constants.toml by name: "default", "megatron", "megatron ampere", ..."""
    text = files(__package__).joinpath("constants.toml").read_text(encoding="utf-8")
    return {name: dict(entry) for name, entry in tomllib.loads(text).items()}


def chain(framework: str, generation: str) -> tuple[str, str, str]:
    """The sets that one follows, the most general first."""
    framework = LIKE.get(framework, framework)
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
    return SPREADS | {
        key: value for name in (DEFAULT, framework) for key, value in sets().get(name, {}).items() if key in SPREADS
    }


def constants(of: Sequence[dict[str, float]]) -> Constants:
    """One set a place."""
    return Constants({name: np.array([one[name] for one in of], dtype=np.float64) for name in NAMES})


def repeated(one: Mapping[str, float], count: int) -> Constants:
    """The same constants at every place."""
    return Constants({name: np.full(count, one[name], dtype=np.float64) for name in NAMES})
