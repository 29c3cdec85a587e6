"""What each program can run of what is searched; soli's own limits are those of `legality.BUILT`."""

from collections.abc import Mapping, Sequence

from soli.core.errors import Problem
from soli.core.plan import RECOMPUTE
from soli.core.tables import table
from soli.planner.cost import points
from soli.planner.cost.points import CUBE, DUALPIPEV, GPIPE, GRID, INTERLEAVED, LINE, ONE, RING, ZBH1, ZBV
from soli.planner.legality import BUILT

SOLI = "soli"
SOME = 3.0
"""Of `recompute`, where it is fixed: some layers of each stage are computed again, and some not."""
SCHEDULES = {"1f1b": ONE, "interleaved": INTERLEAVED, "gpipe": GPIPE, "zbh1": ZBH1, "zbv": ZBV, "dualpipev": DUALPIPEV}  # fmt: skip
NAMED = {value: name for name, value in SCHEDULES.items()}
LEVELS = {"none": points.NONE, "selective": points.SELECTIVE, "full": points.FULL}
OFFLOADS = {"none": 0.0, "optimizer": 1.0}
TENSORS = {"1d": LINE, "2d": GRID, "3d": CUBE}
CONTEXTS = {"ring": RING, "ulysses": points.ULYSSES}
WORDS: dict[str, dict[str, float]] = {
    "recompute": {**LEVELS, "some": SOME}, "context": CONTEXTS, "schedule": SCHEDULES, "tensor": TENSORS,
    "precision": {name: float(points.PRECISIONS.index(name)) for name in ("bf16", "fp16", "fp8")},
    "offload": OFFLOADS, "sp": {"on": 1.0, "off": 0.0}, "zero": {str(n): float(n) for n in range(4)},
}  # fmt: skip
"""Of what is fixed what is no number above 0."""
LACKS = {
    "ep": len(BUILT["ep"]) == 1,
    "some": not any(value not in RECOMPUTE for value in BUILT["recompute"]),
    "offload": len(BUILT["offload"]) == 1,
    "fp8": "fp8" not in BUILT["precision"],
    "windows": True,  # a mask that a program gives torch's attention leaves nothing out
}
"""Which choices soli has not built."""
MORE: dict[str, list[str]] = table(__package__, "offers.toml")["more"]
"""The choices that a program has beside the usual value."""
LESS: dict[str, list[str]] = table(__package__, "offers.toml")["less"]
"""And those that it lacks, where others have them."""


def chooses(framework: str, name: str) -> bool:
    """Whether a program has a choice, or more of one than its usual value."""
    if framework == SOLI:
        return not LACKS.get(name, False)
    usual = any(name in words for words in LESS.values())
    return name in MORE.get(framework, ()) or (usual and name not in LESS.get(framework, ()))


def unable(framework: str, fixed: Mapping[str, float], precisions: Sequence[str]) -> list[Problem]:
    """What is fixed that the program does not run."""
    one = lambda name, usual=1.0: fixed.get(name, usual)
    order = NAMED[one("schedule", ONE)]
    asked = (  # choice, its words, whether it is asked for
        ("ep", f"ep={one('ep'):g}", one("ep") != 1), ("ulysses", "context=ulysses", one("context", RING) != RING),
        ("ring", "context=ring", fixed.get("context") == RING and one("cp", 2) > 1),
        ("crossed", "cp beside tp or pp", one("cp") > 1 and max(one("tp"), one("pp")) > 1),
        ("sp", "sp=on", one("sp", 0) == 1), (order, f"schedule={order}", order != "1f1b"),
        ("interleaved", f"chunks={one('chunks'):g}", one("chunks") > 1),
        ("deep", f"zero={one('zero'):g} in a pipeline", one("zero") > 1 and one("pp") > 1),
        ("copies", f"replicate={one('replicate'):g} with less than zero=3", one("replicate") > 1 and one("zero", 3) < 3),
        ("offload", "offload=optimizer", one("offload", 0) != 0), ("fp8", "precision=fp8", "fp8" in precisions),
        ("grids", "tensor=2d or 3d", one("tensor", LINE) != LINE or "rows" in fixed),
        ("some", "recompute=some", one("recompute", 0) == SOME),
    )  # fmt: skip
    lacking = (words for name, words, wanted in asked if wanted and not chooses(framework, name))
    return [Problem(f"{framework} does not run {words} yet", allowed="another --framework") for words in lacking]


def spelt(fixed: Mapping[str, float], *only: str, between: str = ", ") -> str:
    """What is fixed, or some of it, as `fixed_of` reads it."""
    names = {name: {value: word for word, value in values.items()} for name, values in WORDS.items()}
    return between.join(f"{name}={names.get(name, {}).get(fixed[name], f'{fixed[name]:g}')}" for name in only or fixed if name in fixed)
