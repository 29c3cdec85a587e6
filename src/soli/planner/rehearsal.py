"""What is known of a step that was rehearsed, rank by rank. Plain data; engine/rehearse.py makes it."""

from dataclasses import dataclass

from soli.core.plan import Plan
from soli.planner.hollow import Call


@dataclass(frozen=True)
class Sent:
    """A collective: over which ranks, of how many bytes (mesh/record.py), and whether others run meanwhile."""

    operation: str
    ranks: tuple[int, ...]
    bytes: int
    late: bool

    @property
    def stride(self) -> int:
        """Between neighbours."""
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1


@dataclass(frozen=True)
class Action:
    """Part of a pipeline's step: F, B, I or W of a microbatch on a stage; which calls and collectives it has."""

    kind: str
    stage: int
    number: int
    calls: tuple[int, int]  # from, to
    sent: tuple[int, int]


@dataclass(frozen=True)
class RankRun:
    """A step of one rank."""

    rank: int
    part: int  # of the sequence, that it has
    states: int  # bytes between steps
    peak: int  # bytes at the step's fullest moment, the states among them
    calls: list[Call]
    sent: list[Sent]
    actions: list[Action]
    reads: tuple[str, ...] = ()  # modules, and where they read a value that a rehearsal has not: they read 0
    writes: tuple[str, ...] = ()  # buffers that the step changed


@dataclass(frozen=True)
class Rehearsal:
    """A step under a plan: a rank of each stage with the first part of the sequence, and one with the last.

    Ranks that differ from these on other axes do the same, or less.
    """

    plan: Plan
    ranks: list[RankRun]

    @property
    def stages(self) -> list[RankRun]:
        """A rank of each."""
        return [run for run in self.ranks if run.part == 0]

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(run.peak for run in self.ranks)

    @property
    def reads(self) -> tuple[str, ...]:
        """Of all ranks."""
        return tuple(dict.fromkeys(place for run in self.ranks for place in run.reads))

    @property
    def writes(self) -> tuple[str, ...]:
        """Of all ranks."""
        return tuple(dict.fromkeys(name for run in self.ranks for name in run.writes))

    @property
    def states(self) -> int:
        """Bytes that the rank with the most keeps between steps."""
        return max(run.states for run in self.ranks)
