"""The one error type of soli: what is wrong, what was got, what is allowed, how to mend it.

Problems are collected and reported together, before a process starts where that is possible. The exit
code tells a mistake of the user (2) from a failure at run time (1).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec

P = ParamSpec("P")
MISTAKE = 2
FAILURE = 1
TOLD = ("exit_code", "everywhere", "consequence")
"""What is told of an error to other processes, beside its problems."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in words a user can act on. `seen`: a mechanism of real bugs (soli/bugs/catalogue.toml)."""

    what: str
    got: str = ""
    allowed: str = ""
    fix: str = ""
    seen: str = ""

    def __str__(self) -> str:
        seen = f"before in other frameworks: soli bugs show {self.seen}" if self.seen else ""
        told = {"got": self.got, "allowed": self.allowed, "fix": self.fix, "seen": seen}
        return "\n".join([self.what, *(f"  {label:<8}{text}" for label, text in told.items() if text)])


class SoliError(Exception):
    """Raised for everything that soli refuses or notices.

    `everywhere` is True when every rank raises the same error, so that it is printed once.
    """

    def __init__(
        self, what: str | Iterable[Problem], *, got: object = "", allowed: object = "", fix: str = "", seen: str = "",
        exit_code: int = MISTAKE, everywhere: bool = False,
    ) -> None:  # fmt: skip
        self.problems = tuple([Problem(what, str(got), str(allowed), fix, seen)] if isinstance(what, str) else what)
        self.exit_code, self.everywhere = exit_code, everywhere
        self.consequence = False  # True: another rank's failure is the likely cause of this one
        self.lost = False  # True: others that this rank talks to are not there any more, and none can go on
        self.told = False  # True: these are the words of the rank that failed, which says them too
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in TOLD} | {"problems": [asdict(one) for one in self.problems]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SoliError:
        error = cls([Problem(**problem) for problem in data["problems"]])
        vars(error).update({name: data[name] for name in TOLD})
        return error


on_all_ranks = functools.partial(SoliError, everywhere=True)
"""A mistake that every rank finds alike: it is told once."""
failure = functools.partial(SoliError, exit_code=FAILURE)
"""An error at run time that is nobody's typing mistake (exit code 1)."""


def listing(told: Callable[P, Iterator[Problem]]) -> Callable[P, list[Problem]]:
    """Lets a function that yields problems return the list of them."""

    @functools.wraps(told)
    def all_of(*args: P.args, **kwargs: P.kwargs) -> list[Problem]:
        return list(told(*args, **kwargs))

    return all_of


def raise_all(problems: Iterable[Problem], *, everywhere: bool = False) -> None:
    """Raise one error that lists every problem, or return if there is none."""
    if found := tuple(problems):
        raise SoliError(found, everywhere=everywhere)


@contextmanager
def blaming(failed: Callable[[Any], Exception], *kinds: type[Exception]) -> Iterator[None]:
    """Around code that is not soli's: `failed` says how what it raises is told. `kinds`: of these alone."""
    kinds = kinds or (Exception,)
    try:
        yield
    except SoliError:
        raise
    except kinds as error:
        raise failed(error) from error


def needing(what: str, extra: str) -> AbstractContextManager[None]:
    """Around imports of what only some who install soli have. `what`: the problem, where it is not there."""
    return blaming(lambda error: SoliError(what, got=error, fix=f"pip install 'soli[{extra}]'"), ModuleNotFoundError)


def nearest(word: str, known: Iterable[str], otherwise: str = "", least: float = 0.6) -> str:
    """How to mend a word that nobody knows: the one of those known that is most like it; `otherwise` where none is (`least`: of 1)."""
    near = difflib.get_close_matches(word, list(known), 1, least)
    return f"did you mean '{near[0]}'?" if near else otherwise


def listed(names: list[str]) -> str:
    """The first four, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def in_a_line(error: Exception) -> str:
    """An error in a line."""
    if isinstance(error, SoliError):
        first = error.problems[0]
        return f"{first.what} ({first.got})" if first.got else first.what
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]
