"""What a few measured steps say of the others: each part of a step's time has a factor, 1 until it is known better.

Ridge regression of measured over predicted time on the parts' shares (MacKay 1992: a Gaussian prior around 1 and
Gaussian noise): with three probes five factors are not determined, and those that no probe tells of stay at 1.
"""

from collections.abc import Mapping

import numpy as np

from soli.planner.machine import PARTS

SPREAD, NOISE = 0.5, 0.05
"""Of a factor around 1 before anything is measured; of a measured step around its mean, relative."""


class Learnt:
    """Factors of the parts of a step's time."""

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._ratios: list[float] = []
        self.factors = np.ones(len(PARTS))

    def see(self, parts: Mapping[str, float], measured: float) -> None:
        """A step of these predicted parts took so many seconds."""
        whole = sum(parts[name] for name in PARTS)
        self._rows.append([parts[name] / whole for name in PARTS])
        self._ratios.append(measured / whole)
        x, y = np.array(self._rows), np.array(self._ratios)
        noise = (NOISE * y) ** 2  # a slow step's is larger
        weighted = x.T / noise
        precision = weighted @ x + np.eye(len(PARTS)) / SPREAD**2
        self.factors = 1 + np.linalg.solve(precision, weighted @ (y - x.sum(axis=1)))

    def seconds(self, parts: Mapping[str, float]) -> float:
        """Of a step of these predicted parts."""
        return float(max(sum(f * parts[name] for f, name in zip(self.factors, PARTS, strict=True)), 0.0))
