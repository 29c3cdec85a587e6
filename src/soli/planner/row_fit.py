"""What a row leaves out so that it fits: whoever ran it had to make it fit as well."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from soli.planner.cost import memory
from soli.planner.cost.constants import known, repeated
from soli.planner.cost.points import FULL, points
from soli.planner.row import RECOMPUTE, SIZE, Row


def fitted(found: Row) -> None:
    """Settles a row's microbatch, and how many of its layers are computed again, where it says neither, or one of them.

    A microbatch that was inferred is halved until the run fits, if all layers have to be computed again for it where nobody
    says which; then as many are as do not fit otherwise.
    """
    point, sized = found.point, any(word.startswith(SIZE) for word in found.inferred)
    take = lambda **changes: _peak(found, point | changes)
    while sized and point["microbatch"] > 1:
        if take(**({"recompute": FULL} if found.unsaid else {})) <= point["capacity"]:
            break
        point["microbatch"] = point["microbatch"] // 2
    if sized:
        found.inferred = [
            f"{SIZE}{point['microbatch']:g}" if w.startswith(SIZE) else w for w in found.inferred
        ]
    if not found.unsaid:
        return
    own = ceil(point["layers"] / point["pp"])
    if take() <= point["capacity"]:
        return
    fits = (n for n in range(1, own) if take(again=float(n)) <= point["capacity"])
    count = next(fits, own)
    point |= {"again": float(count)} if count < own else {"recompute": FULL}
    said = f"full-{count}of{own}" if count < own else "full"
    found.inferred = [RECOMPUTE + said if w.startswith(RECOMPUTE) else w for w in found.inferred]


def _peak(found: Row, point: Mapping[str, float]) -> float:
    """Bytes at the peak."""
    return float(memory.peak(points([point]), repeated(known(found.framework, found.generation), 1))[0])
