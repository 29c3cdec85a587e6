"""What a row leaves out so that it fits: whoever ran it had to make it fit as well."""

from collections.abc import Mapping
from math import ceil

from soli.planner.cost import memory
from soli.planner.cost.constants import known, repeated
from soli.planner.cost.points import FULL, points
from soli.planner.row import GROUP, RECOMPUTE, SIZE, Row
from soli.planner.spellings import DEEPSPEED, FSDP


def fitted(found: Row) -> None:
    """Settles a row's microbatch, and how many of its layers are computed again, where it says neither, or one of them; and HSDP's groups.

    Frozen weights of products of 8 bits have as many if the run does not fit otherwise.
    An optimizer of which nothing is said is shared out, and then a sequence beside tp, if the run does not fit otherwise; under PyTorch, without tp
    and pp, the parameters too, if it does not fit whatever is computed again.
    Groups of states whose size nobody says are servers, or twice as many ranks until the run fits.
    A microbatch that was inferred is halved until the run fits, if all layers have to be computed again for it where nobody
    says which; then as many are as do not fit otherwise, or all, which is the one choice of a switch (gradient_checkpointing).
    """
    point, words = found.point, found.inferred

    def fits(**changes: float) -> bool:
        constants = repeated(known(found.framework, found.generation), 1)
        return bool(memory.peak(points([point | changes]), constants)[0] <= point["capacity"])

    least = {"recompute": FULL, "again": 0.0} if found.unsaid else {}
    if found.grouped and not fits(**least):
        while point["replicate"] % 2 == 0 and not fits(**least):
            point["replicate"] /= 2
        words.append(f"{GROUP}{point['dp'] * point['cp'] / point['replicate']:g}")
    small = least | ({"microbatch": 1.0} if any(word.startswith(SIZE) for word in words) else {})
    if point["frozen"] and point["low"] < 2 == point["weight"] and not fits(**small):
        point["weight"] = narrowed(point, 8.0, 2.0)
        words.append("frozen weights of 8 bits")
    alone = found.framework == FSDP and point["tp"] * point["pp"] == 1
    sharing = {"zero=0": ("zero=1", point["dp"] * point["cp"] > 1, {}), "zero=1": ("zero=3", alone, small), "sp=off": ("sp=on", True, {})}
    for silent, (shared, may, less) in sharing.items():
        if silent in words and may and not fits(**less):
            point[shared.split("=")[0]] = 3.0 if shared == "zero=3" else 1.0
            found.inferred = words = [shared if word == silent else word for word in words]
    if any(word.startswith(SIZE) for word in words):
        while point["microbatch"] > 1 and not fits(**least):
            point["microbatch"] //= 2
        found.inferred = words = [f"{SIZE}{point['microbatch']:g}" if w.startswith(SIZE) else w for w in words]
    if found.unsaid and not fits():
        own = ceil(point["layers"] / point["pp"])
        some, point["by_product"] = point["by_product"], 0.0  # torchtitan's default, beside which there is all
        switch = found.plain or some or (found.framework == DEEPSPEED and point["eager"] > 1)
        again = next((n for n in range(1, own) if not switch and fits(again=float(n))), own)
        point |= {"again": float(again)} if again < own else {"recompute": FULL, "again": 0.0}
        said = f"full-{again}of{own}" if again < own else "full"
        found.inferred = [RECOMPUTE + said if w.startswith(RECOMPUTE) else w for w in words]


def narrowed(point: Mapping[str, float], bits: float, other: float) -> float:
    """Bytes a parameter where matrices have so many bits, few ones 32 more for 64 elements (arXiv 2305.14314, 2), and tables no less than `other` bytes."""
    p = points([point])
    tables = float((2 - p.tied[0]) * p.vocab[0] * p.hidden[0] / memory.parameters(p)[0])
    return (bits + 32 / 64 * (bits < 16)) / 8 * (1 - tables) + max(other, bits / 8) * tables
