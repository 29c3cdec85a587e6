"""The ranks that save or load together: they succeed together or raise the same error together.

DCP has drivers of its own (`dcp.save`, `dcp.load`). soli calls DCP's planners and does the few collectives
itself, because those drivers turn an error of one rank into a CheckpointException full of tracebacks (a
BaseException, which `except Exception` lets pass), warn on every save of a single process, and write to the
log what soli is about to report.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from soli.core.errors import FAILURE, MISTAKE, Problem, SoliError, failure
from soli.core.tables import table

T = TypeVar("T")
R = TypeVar("R")
Group = dist.ProcessGroup | None
"""Whose ranks save or load together; None: the default group's."""

FIXES = {getattr(errno, name): fix for name, fix in table(__package__, "fixes.toml").items()}


@dataclass(frozen=True)
class Team:
    """The ranks of one process group; one rank alone if there is none."""

    rank: int = 0
    size: int = 1
    group: Group = None

    def each(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; every rank gets all results in rank order, or the same error."""
        outcome, error = _attempt(what, work)
        outcomes = [outcome]
        if self.size > 1:
            outcomes = [None] * self.size  # type: ignore[list-item]
            self._talk(what, lambda: dist.all_gather_object(outcomes, outcome, group=self.group))
        return self._results(outcomes, error)

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` on the first rank; every rank gets its result, or its error."""
        outcome, error = _attempt(what, work) if self.rank == 0 else (None, None)
        box = [outcome]
        if self.size > 1:
            self._talk(what, lambda: dist.broadcast_object_list(box, group=self.group, group_src=0))
        return self._results(box, error)[0]

    def plan(self, what: str, local: Callable[[], T], decide: Callable[[list[T]], list[R]]) -> R:
        """Gather `local()` of every rank, let the first rank `decide`, and give each rank its part."""
        outcome, error = _attempt(what, local)
        if self.size == 1:
            decided, mine = _attempt(what, lambda: decide(self._results([outcome])))
            return self._results([decided], error or mine)[0][0]
        outcomes: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._talk(what, lambda: dist.gather_object(outcome, outcomes, group=self.group, group_dst=0))
        answers: list[Any] | None = None
        if outcomes is not None:
            decided, mine = _attempt(what, lambda: decide(self._results(outcomes)))
            error = error or mine
            answers = [(part, None) for part in decided[0]] if decided[1] is None else [decided] * self.size
        answer: list[Any] = [None]
        self._talk(what, lambda: dist.scatter_object_list(answer, answers, group=self.group, group_src=0))
        return self._results(answer, error)[0]

    def _talk(self, what: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise failure(f"a rank was lost while {what}", got=f"rank {self.rank} of {self.size}: {error}", fix="look at the reports of the other ranks: one of them ended first") from error

    def _results(self, outcomes: list[Any], cause: Exception | None = None) -> list[Any]:
        """What all ranks have, or one error with the problems of all of them; `cause` is this rank's own exception."""
        failed = [(rank, SoliError.from_json(data)) for rank, (_, data) in enumerate(outcomes) if data]
        if not failed:
            return [result for result, _ in outcomes]
        everyone = len(failed) == len(outcomes)
        problems: dict[Problem, None] = {}
        for rank, error in failed:
            for problem in error.problems:
                name = "" if everyone and problem in failed[0][1].problems else f"rank {rank}: "
                problems.setdefault(replace(problem, what=name + problem.what))
        code = MISTAKE if all(error.exit_code == MISTAKE for _, error in failed) else FAILURE
        raise SoliError(problems, exit_code=code, everywhere=True) from cause


ALONE = Team()


def team_of(group: Group) -> Team:
    """The ranks of `group`; of the default group if None; this process alone if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    rank = dist.get_rank(group)
    if rank < 0:
        raise SoliError("this rank is not in the group it saves or loads with", fix="pass a group it is in")
    return Team(rank, dist.get_world_size(group), group)


def _attempt(what: str, work: Callable[[], T]) -> tuple[tuple[Any, dict[str, Any] | None], Exception | None]:
    """(result, None) or (None, the error as JSON), and the exception itself for this rank's traceback."""
    try:
        return (work(), None), None
    except Exception as error:
        return (None, as_soli_error(what, error).to_json()), error


def as_soli_error(what: str, error: Exception) -> SoliError:
    """`error` as soli reports it: an OSError is the user's disk, anything else unknown a failure."""
    if isinstance(error, SoliError):
        return error
    got = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        fix = FIXES.get(error.errno or 0, "mend what the operating system reports, then try again")
        return SoliError(f"the operating system refused {what}", got=got, fix=fix)
    return failure(f"{what} failed", got=got, fix="report this with the traceback: soli did not expect it")
