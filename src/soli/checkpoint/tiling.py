"""Do boxes cover a tensor exactly: every element once?"""

import math
from collections.abc import Iterable

from soli.core.errors import Problem
from soli.core.layout import Box


def overlaps(one: Box, other: Box) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in spans)


def inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box, which may be empty, does not leave a tensor of this shape."""
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    return all(min(o, n) >= 0 and o + n <= size for o, n, size in zip(box.offsets, box.sizes, shape, strict=True))


def tiling_problems(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> list[Problem]:
    """What keeps `boxes` from tiling a tensor of this shape: outside, overlapping, or not covering it."""
    found, fitting = [], []
    for box in boxes:
        if inside(box, shape) and box.numel:
            fitting.append(box)
        else:
            found.append(Problem(f"{name}: a box leaves the tensor or is empty", str(box), f"shape {shape}"))
    found += _overlap_problems(name, shape, fitting)
    covered, total = sum(box.numel for box in fitting), math.prod(shape)
    if not found and covered != total:
        got = f"{covered} of {total} elements"
        fix = "every element of a tensor must be held by some rank"
        found.append(Problem(f"{name}: the pieces do not cover the tensor", got, fix=fix))
    return found


def _overlap_problems(name: str, shape: tuple[int, ...], boxes: list[Box]) -> list[Problem]:
    """Sweep along the dim with the most distinct starts, so that few boxes are compared with each other."""
    if not shape:
        pairs = [(boxes[0], box) for box in boxes[1:]]
    else:
        dim = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in boxes}))
        pairs = []
        active: list[Box] = []
        for box in sorted(boxes, key=lambda box: box.offsets[dim]):
            active = [other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
            pairs += [(other, box) for other in active if overlaps(other, box)]
            active.append(box)
    return [Problem(f"{name}: two boxes overlap", f"{one} and {other}", fix="ranks may hold the same box, or boxes that do not meet; nothing between") for one, other in pairs]
