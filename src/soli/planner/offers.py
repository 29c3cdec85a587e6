"""What each program can run of what is searched; soli's own limits are those of `legality.BUILT`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soli.core.errors import Problem
from soli.core.plan import RECOMPUTE
from soli.core.tables import table
from soli.planner.cost.points import DUALPIPEV, GPIPE, INTERLEAVED, LINE, ONE, RING, ZBH1, ZBV
from soli.planner.legality import BUILT

SOLI = "soli"
SOME = 3.0
"""Of `recompute`, where it is fixed: some layers of each stage are computed again, and some not."""
SCHEDULES = {"1f1b": ONE, "interleaved": INTERLEAVED, "gpipe": GPIPE, "zbh1": ZBH1, "zbv": ZBV, "dualpipev": DUALPIPEV}  # fmt: skip
LACKS = {
    "ep": len(BUILT["ep"]) == 1,
    "some": not any(value not in RECOMPUTE for value in BUILT["recompute"]),
    "offload": len(BUILT["offload"]) == 1,
    "fp8": "fp8" not in BUILT["precision"],
}
"""Which choices soli has not built."""
CHOOSES: dict[str, list[str]] = table(__package__, "offers.toml")
"""The choices that a program has beside the usual value."""


def chooses(framework: str, name: str) -> bool:
    """Whether a program has more of a choice than its usual value."""
    return not LACKS.get(name, False) if framework == SOLI else name in CHOOSES.get(framework, ())


def unable(framework: str, fixed: Mapping[str, float], precisions: Sequence[str]) -> list[Problem]:
    """What is fixed that the program does not run."""
    return [
        Problem(f"{framework} does not run {what} yet", allowed="another --framework")
        for name, what, asked in (
            ("ep", f"ep={fixed.get('ep', 1):g}", fixed.get("ep", 1) != 1),
            ("ulysses", "context=ulysses", fixed.get("context", RING) != RING),
            ("schedules", "schedules beside 1f1b and interleaved", fixed.get("schedule", ONE) > INTERLEAVED),
            ("offload", "offload=optimizer", fixed.get("offload", 0) != 0),
            ("fp8", "precision=fp8", "fp8" in precisions),
            ("grids", "tensor=2d or 3d", fixed.get("tensor", LINE) != LINE),
            ("some", "recompute=some", fixed.get("recompute") == SOME),
        )
        if asked and not chooses(framework, name)
    ]
