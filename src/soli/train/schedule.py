"""How long to train, how fast to learn, and when to look: arithmetic, no torch."""

import math
import statistics
from collections.abc import Sequence

# The speed is measured over the steps after the first two, which also pay for allocation and warm caches.
MEASURED_FROM, MEASURED_TO = 3, 12
END_SECONDS = 12.0  # the sample, the picture, the last checkpoint, the end of the processes
MARGIN = 0.92  # part of what is left that is planned for: other programs may come


class Schedule:
    """Factor of the learning rate after `done` steps: linear warm-up, then a cosine down to `floor`.

    `steps` may be set late (0: not known yet): during the warm-up the factor does not depend on it, so a
    run whose steps were decided on the way equals one that was told them at the start.
    """

    def __init__(self, warmup: int, steps: int, floor: float) -> None:
        self.warmup, self.steps, self.floor = warmup, steps, floor

    def __call__(self, done: int) -> float:
        if done < self.warmup:
            return (done + 1) / self.warmup
        way = min(1.0, (done - self.warmup) / max(1, self.steps - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * way))


def steps_that_fit(seconds: Sequence[float], left: float, windows_to_check: int, batch: int) -> int:
    """How many more steps fit into `left` seconds, at least 1.

    seconds: of each step so far. windows_to_check: those of every look at validation to come and of the
    last one; a window costs there about half of what it costs in training (no backward pass).
    """
    step = statistics.median(seconds[MEASURED_FROM - 1 :] or seconds)
    return max(1, math.floor(((left - END_SECONDS) * MARGIN - step / 2 * windows_to_check / batch) / step))


def due(step: int, steps: int, every: int, times: int) -> bool:
    """Whether something that happens `every` steps (0: `times` times over the run) happens after `step`."""
    return step % every == 0 or step == steps if every else (step * times) // steps > ((step - 1) * times) // steps
