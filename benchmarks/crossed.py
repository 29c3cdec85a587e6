"""Constants of all published runs at once: what is a device's, what is a program's, and what is left to their pair.

The logarithm of each constant is a sum of four: the default (of some programs its own), the generation's, the
framework's and the pair's; and of memory a fork's (FORKS).
Each part is drawn to 0 by a normal prior (ridge; crossed random effects, Searle et al. 1992, 4):
a pair that nobody measured is then the sum of what its device does under other programs and what its program does on other
devices. How near products come to a peak is more a device's, how long launches take more a program's: see `deviation`. What all
times of one source are off by together is found beside the constants, and kept by nobody.

Fitted by Gauss-Newton with Levenberg's damping on the rows' soft-L1 loss, as planner/measured.py's, but with one derivative a row
and constant, however many parts there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soli.planner.cost.constants import DEFAULT, MEANINGS, NAMES, Constants
from soli.planner.cost.points import Array, Points
from soli.planner.cost.programs import MEGATRON, OLD, TESTS
from soli.planner.cost.step import step
from soli.planner.measured import BOUNDS, TIME_ERROR, Measured, logs, residuals_of

Family = tuple[str, str]
OTHER = "other"
"""A framework that nobody measured: rows that name none (rows.py) follow it."""
PAIR = 0.12
SOURCE = 0.1
"""How far a source's times may be off together, as a logarithm: its machines, its versions and how it measures are its own, and
rows of one source are not so many witnesses (random effects; Searle et al. 1992, 3)."""
ROUNDS, SMALL, SETTLED = 40, 1e-4, 4
DEVICE = (
    "product_share", "product_half", "product_half_inner", "low_share", "attention_share", "stream_share", "link_share",
    "net_share", "send_share", "latency_scale",
)  # fmt: skip
"""Constants that a generation has its own part of."""
KNOWN = {
    "stream_share": 0.4, "product_share": 0.6, "score_bytes": 0.5, "logit_bytes": 0.5, "latency_scale": 0.5,
    "layer_floor": 0.25, "step_overhead": 0.5, "microbatch_overhead": 0.5, "collective_floor": 0.3, "gather_floor": 0.3, "attention_share": 0.5,
    "link_share": 0.4, "element_bytes": 0.4, "straggling": 1.5, "product_half": 0.15, "product_half_inner": 0.15,
}  # fmt: skip
"""Constants whose default is better known than others', and by how much: what kernels move can be counted, and bandwidths,
launches and products were measured alone."""
LAWS = ("product_half", "product_half_inner")
"""Constants that shape a law: well known of one device, and a pair with runs of its own follows those."""
COUNTED = {
    MEGATRON: {"logit_bytes": 24.0, "waited_sums": 0.6, "hidden_gradients": 0.7},
    OLD: {"element_bytes": 27.0, "logit_bytes": 62.0, "hidden_gradients": 0.1},
    "megatron-deepspeed": {"workspace": 4e9},
    TESTS: {"logit_bytes": 62.0},
    "fsdp": {"logit_kept": 10.0},
    "deepspeed": {"gather_floor": 1.5e-3},
}
"""Where programs start that do what others do not. The loss over a cut vocabulary (arXiv 1909.08053, 3) is eleven kernels of
fp32 numbers; Megatron-Core has fused them, and runs tp's sums and the gradients' behind products
(--tp-comm-overlap, --overlap-grad-reduce); before it, gradients were summed when the backward had ended. Its layers, and those of its fork Megatron-DeepSpeed, move 54
bytes a token and hidden unit, as two equal parts of 27: two norms 8, two sums of bias, dropout's mask and residual in one kernel each
14, heads put in order 16, the activation with its bias in one kernel 16. torch's own loss keeps logits in 16 bits and in fp32, and one
of their softmax and its gradient. What DeepSpeed's ZeRO-3 launches for a layer is what Qwen's ladder takes beyond its adapters' runs
without it (QwenLM/Qwen@03cd81f5, README: microbatches of 256 to 2,048 tokens take 0.26 s on an A100, with adapters 0.15 s)."""
FORKS = {"megatron-deepspeed": OLD}
"""Programs whose kernels are another's: what a step takes is that one's, what they keep their own. Where the fork's times were its own,
one source's machines told another's: without theirs, BigScience's runs on A100 and vTrain's were 6.5 and 11.8% off, with the
constants that Megatron-LM's other sources had 6.2 and 8.8% (docs/log.md, 2026-11-29)."""
KEPT = {
    "logit_kept": (0.1, 0.2), "activation_scale": (0.04, 0.08), "resident": (0.5, 1.0),
    "workspace": (0.5, 1.0),
}  # fmt: skip
"""Constants of memory, and how far the default and a program may be from them: what a layer keeps is counted, what a program keeps beside
is not. They are a program's, of no device."""


def deviation(part: str, name: str) -> float:
    """Of a part's logarithm. `part`: default, generation, framework, fork or pair."""
    if name in KEPT:
        default, own = KEPT[name]
        return {DEFAULT: default, "framework": own, "fork": own}.get(part, 1e-4)
    device = name in DEVICE
    usual = {
        DEFAULT: 0.36, "generation": 0.18 if device else 0.0, "framework": 0.06 if device else 0.36, "pair": PAIR,
    }  # fmt: skip
    return max(usual.get(part, 0.0) * (1.0 if part == "pair" and name in LAWS else KNOWN.get(name, 1.0)), 1e-4)


@dataclass(frozen=True)
class Crossed:
    """What was found: parts [set, constant], sets by name."""

    names: dict[tuple[str, str], int]
    parts: NDArray[np.float64]

    def of(self, framework: str = "", generation: str = "") -> dict[str, float]:
        """Every constant of a framework on a generation; of either alone, or the default, where one is empty."""
        found = begin(framework)
        for part in parts_of((framework, generation)):
            if part in self.names:
                found = found + self.parts[self.names[part]]
        low, high = BOUNDS.T
        values = np.exp(np.clip(found, low, high))
        return {name: float(f"{value:.5g}") for name, value in zip(NAMES, values, strict=True)}


def begin(framework: str) -> Array:
    """Logarithms of the constants of a program of which no run is known."""
    counted = COUNTED.get(FORKS.get(framework, ""), {}) | COUNTED.get(framework, {})
    return logs({name: meaning.default for name, meaning in MEANINGS.items()} | counted)


def parts_of(family: Family) -> tuple[tuple[str, str], ...]:
    """The parts that add up to a family's."""
    framework, generation = family
    program = FORKS.get(framework, framework)
    own = ("fork", framework) if framework in FORKS else ("none", "")
    return ("default", ""), ("generation", generation), ("framework", program), own, ("pair", f"{program} {generation}")


def fit_crossed(
    points: Points, measured: Measured, families: Sequence[Family], sources: Sequence[str], weights: Array
) -> Crossed:
    """The parts of all families. `weights` [5, N]: of what rows say, as `residuals_of` has it.

    What the times of a source are off by together is found beside them, and kept by nobody: the next source has another.
    """
    kinds = [part for family in sorted(set(families)) for part in parts_of(family)]
    names = {part: i for i, part in enumerate(dict.fromkeys(kinds))}
    members = np.array([[names[part] for part in parts_of(family)] for family in families])
    scale = 1 / np.array([[deviation(kind, name) for name in NAMES] for kind, _ in names]) ** 2
    start = np.stack([begin(framework) for framework, _ in families])
    low, high = BOUNDS.T
    own = np.unique(np.array(sources), return_inverse=True)[1]

    def rows_off(at: Array) -> Array:
        one = Constants(**{name: np.exp(at[:, c]) for c, name in enumerate(NAMES)})
        return residuals_of(step(points, one), points, measured)

    def loss(parts: Array) -> float:
        off, _, shifts = _together(rows_off(np.clip(start + parts[members].sum(1), low, high)), weights, own)
        held = (parts**2 * scale).sum() + (shifts**2).sum() / SOURCE**2
        return float((weights * 2 * (np.sqrt(1 + off**2) - 1)).sum() + held)

    parts = np.zeros((len(names), len(NAMES)))
    best, damping, still = loss(parts), 1e-2, 0
    for _ in range(ROUNDS):
        free = start + parts[members].sum(1)
        at = np.clip(free, low, high)
        plain = rows_off(at)
        slopes = _slopes(rows_off, at, plain) * np.where((free >= low) & (free <= high), 1.0, 0.1)
        off, sure, _ = _together(plain, weights, own)
        gram, pull = _normal(slopes, off, weights / np.sqrt(1 + off**2), members, len(names))
        gram = gram - _followed(slopes[0], sure, own, members, len(names))
        pull = pull + parts * scale
        while damping < 1e6:
            moved = parts + np.clip(_solve(gram, pull, scale, damping), -1.0, 1.0)
            if (found := loss(moved)) < best:
                break
            damping *= 5
        else:
            break
        still = still + 1 if best - found < SMALL * best else 0
        parts, best, damping = moved, found, max(damping / 4, 1e-5)
        if still >= 3:
            break
    return Crossed(names, parts)


def _together(off: Array, weights: Array, own: NDArray[np.int64]) -> tuple[Array, Array, Array]:
    """Residuals without what each source's times are off by together; how much each of these counts; and what that is, as a
    logarithm: the best there is (soft L1 by weights that follow it)."""
    timed, found, shifts = off[0] != 0, off.copy(), np.zeros(own.max() + 1)
    for _ in range(SETTLED):
        sure = np.where(timed, weights[0] / np.sqrt(1 + found[0] ** 2), 0.0)
        shifts = -TIME_ERROR * np.bincount(own, sure * off[0]) / (np.bincount(own, sure) + (TIME_ERROR / SOURCE) ** 2)
        found[0] = np.where(timed, off[0] + shifts[own] / TIME_ERROR, 0.0)
    return found, sure, shifts


def _followed(slopes: Array, sure: Array, own: NDArray[np.int64], members: NDArray[np.int64], sets: int) -> Array:
    """What the normal equations lose as each source's shift follows the parts: its Schur complement. `slopes` [N, constants]: of times."""
    moved = np.zeros((own.max() + 1, sets, slopes.shape[1]))
    for part in members.T:
        np.add.at(moved, (own, part), sure[:, None] * slopes)
    flat = moved.reshape(len(moved), -1)
    held = np.bincount(own, sure) + (TIME_ERROR / SOURCE) ** 2
    return (flat.T @ (flat / held[:, None])).reshape(sets, -1, sets, slopes.shape[1])


def _slopes(rows_off: Callable[[Array], Array], at: Array, off: Array) -> Array:
    """[kinds, N, constants]: how each row's residuals change with each of its constants."""
    high, width = BOUNDS[:, 1], 1e-4
    found = np.empty((*off.shape, len(NAMES)))
    for c in range(len(NAMES)):
        moved = at.copy()
        moved[:, c] += np.where(at[:, c] + width > high[c], -width, width)
        found[..., c] = (rows_off(moved) - off) / (moved[:, c] - at[:, c])
    return found


def _normal(slopes: Array, off: Array, weights: Array, members: NDArray[np.int64], sets: int) -> tuple[Array, Array]:
    """The normal equations of the parts: [sets, constants] squared, and what pulls at each."""
    constants = slopes.shape[-1]
    gram, pull = np.zeros((sets, constants, sets, constants)), np.zeros((sets, constants))
    for own in np.unique(members, axis=0):
        at = (members == own).all(1)
        flat, held = slopes[:, at].reshape(-1, constants), weights[:, at].reshape(-1, 1)
        one, toward = flat.T @ (held * flat), (held * flat).T @ off[:, at].reshape(-1)
        for a in own:
            pull[a] += toward
            for b in own:
                gram[a, :, b, :] += one
    return gram, pull


def _solve(gram: Array, pull: Array, scale: Array, damping: float) -> Array:
    """A step of Levenberg and Marquardt."""
    size = pull.size
    full = gram.reshape(size, size) + np.diag(scale.ravel())
    full = full + damping * np.diag(np.diag(full))
    return np.asarray(np.linalg.solve(full, -pull.ravel()), dtype=np.float64).reshape(pull.shape)
