"""Time and memory of rows of a table, each with its interval; from constants, and from steps that were measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from soli.core.errors import SoliError
from soli.planner import measured
from soli.planner.columns import TIMES
from soli.planner.cost.constants import known, repeated, spread_of
from soli.planner.cost.points import Array, Points, points
from soli.planner.cost.step import Step, step
from soli.planner.measured import Measured, fit
from soli.planner.row import Row
from soli.planner.rows import read, read_measured

GB = 1e9
FEWEST = 8
"""Measured rows of a framework on a generation from which constants are fitted."""
RUNS = 0.95
"""Of what tensors can take the share in which a run is taken to fit, but where what it leaves out was chosen so that it does: the rest is broken up.
Of 128 runs that ran out of memory 22 are predicted to fit so, and 31 in the whole; of 3,430 that ran 66 not to, and 41 (docs/log.md, 2026-11-29)."""


@dataclass(frozen=True)
class Prediction:
    """What one row will take; or why that cannot be said. 90% of what is measured should lie between low and high."""

    predicted_time_s: float | None = None
    time_low_s: float | None = None
    time_high_s: float | None = None
    predicted_memory_gb: float | None = None
    memory_low_gb: float | None = None
    memory_high_gb: float | None = None
    feasible: bool | None = None  # what is predicted of memory is there (RUNS); memory_high_gb says how sure that is
    inferred: tuple[str, ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Learnt:
    """What measured rows of one framework and generation said."""

    constants: dict[str, float]
    factors: measured.Factors


def predict(table: Iterable[Mapping[str, str]], known_rows: Iterable[Mapping[str, str]] = ()) -> list[Prediction]:
    """A prediction for each row, in their order. `known_rows`: measured ones, from which constants are fitted."""
    rows = [read(row) for row in table]
    families = {family_of(row) for row in rows if not row.refused}
    learnt = learn([read_measured(row) for row in known_rows], families)
    found = [Prediction(refused="; ".join(row.refused)) for row in rows]
    for family in sorted(families):
        at = [i for i, row in enumerate(rows) if not row.refused and family_of(row) == family]
        p = points([rows[i].point for i in at])
        cost, low, high = costs(p, family, learnt)
        narrow = (p.eighth > 0) & (cost.memory > RUNS * p.capacity)  # whoever ran it had to make it fit, and gathered parameters in 8 bits
        if narrow.any():
            p = replace(p, eighth=np.where(narrow, 0.0, p.eighth))
            cost, low, high = costs(p, family, learnt)
        spread = spread_of(family[0])
        for place, i in enumerate(at):
            time, memory = float(cost.time[place]), float(cost.read[place])
            least, most = (memory * spread[name] for name in ("memory_low", "memory_high"))
            found[i] = Prediction(
                time, time * float(low[place]), time * float(high[place]), memory / GB, least / GB, most / GB,
                feasible=bool(cost.memory[place] <= p.capacity[place] * (1.0 if rows[i].chosen else RUNS)), inferred=(*rows[i].inferred, *["parameters gathered in 8 bits"] * bool(narrow[place])),
            )  # fmt: skip
            if rows[i].timeless:
                found[i] = replace(found[i], predicted_time_s=None, time_low_s=None, time_high_s=None)
    return found


def family_of(row: Row) -> tuple[str, str]:
    """Rows of one family share constants."""
    return row.framework, row.generation


def costs(p: Points, family: tuple[str, str], learnt: Mapping[tuple[str, str], Learnt]) -> tuple[Step, Array, Array]:
    """The points' costs, and between what multiples of their times 90% are measured."""
    mine = learnt.get(family)
    if mine is None:
        spread = spread_of(family[0])
        low, high = (np.full(len(p), spread[name]) for name in ("time_low", "time_high"))
        factors = measured.published(*family)
        return step(p, repeated(known(*family), len(p)), *(factors.at(p) if factors else ())), low, high
    cost = step(p, repeated(mine.constants, len(p)), *mine.factors.at(p))
    return cost, *measured.between(mine.factors, p, cost)


def learn(rows: Sequence[Row], families: set[tuple[str, str]]) -> dict[tuple[str, str], Learnt]:
    """Constants and factors of the families that were measured. SoliError where what was says too little."""
    usable = [row for row in rows if not row.refused and row.time is not None and family_of(row) in families]
    if rows and not usable:
        raise SoliError(
            "no measured row helps",
            got=f"{len(rows)} rows, {sum(row.time is not None for row in rows)} of them with a time and "
            f"{sum(bool(row.refused) for row in rows)} that cannot be read",
            allowed=f"rows of {', '.join(map(' on '.join, sorted(families)))}, with " + " or ".join(TIMES),
        )
    found = {}
    for family in sorted({family_of(row) for row in usable}):
        own = [row for row in usable if family_of(row) == family]
        if len(own) < FEWEST:
            what = "constants cannot be fitted to so few measured rows"
            raise SoliError(what, got=f"{len(own)} of {family[0]} on {family[1]}", allowed=f"{FEWEST} or more of each framework and generation of devices")
        found[family] = learn_family(own, known(*family))
    return found


def learn_family(rows: Sequence[Row], parent: Mapping[str, float]) -> Learnt:
    """What these rows, of one family, say."""
    p, known_of = arrays(rows)
    fitted = fit(p, known_of, parent)
    return Learnt(fitted, measured.learn(p, repeated(fitted, len(p)), known_of.times))


def arrays(rows: Sequence[Row]) -> tuple[Points, Measured]:
    """Points of rows, and what was measured of each."""
    times, memories, states = (np.array([getattr(row, name) for row in rows], dtype=float) for name in ("time", "memory", "states"))  # None: NaN
    # That a run fitted says something of memory where the row says all that memory depends on.
    fits = np.array([float(row.fits) if row.whole else np.nan for row in rows])
    return points([row.point for row in rows]), Measured(times, memories, states, fits)
