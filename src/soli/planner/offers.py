"""What each program can run of what is searched; soli's own limits are those of `legality.BUILT`."""

from __future__ import annotations

from collections.abc import Mapping

from soli.core.errors import Problem
from soli.planner.legality import BUILT

SOLI = "soli"
USUAL = {"ep": 1.0}
"""The value of a choice that every program can run."""
CHOOSES: dict[str, tuple[str, ...]] = {
    "megatron": ("ep",),
    "megatron-deepspeed": ("ep",),
    "deepspeed": ("ep",),
    "fsdp": ("ep",),
}
"""The choices that a program has beside the usual value."""


def chooses(framework: str, name: str) -> bool:
    """Whether a program has more of a choice than its usual value."""
    return len(BUILT.get(name, (1, 2))) > 1 if framework == SOLI else name in CHOOSES[framework]


def unable(framework: str, fixed: Mapping[str, float]) -> list[Problem]:
    """What is fixed that the program does not run."""
    return [
        Problem(f"{framework} does not run {name}={fixed[name]:g} yet", allowed=f"{name}={usual:g}, or another --framework")
        for name, usual in USUAL.items()
        if fixed.get(name, usual) != usual and not chooses(framework, name)
    ]  # fmt: skip
