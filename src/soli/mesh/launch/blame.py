"""One report of a failed job: the first cause, then what became of the other ranks."""

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from soli.core.errors import FAILURE, SoliError, failure
from soli.core.report import is_users, named, render

TAIL_LINES = 20
STUCK_SECONDS = 3.0
"""How long nothing came to any rank before none can go on: each has looked since, and only others can move what it waits for."""
CROSSED = failure(
    "no rank can go on: each waits for others, in a call that they do not make",
    fix="give every rank the same calls, in one order: look for a branch that depends on the rank or on its data",
)
LEFT = "  fix     every rank makes the same calls: look for a sys.exit(), a return or a shorter loop on that rank alone"
_BY_ANOTHER = re.compile(
    r"DistBackendError|DistNetworkError|third_party/gloo|Connection (closed by peer|reset by peer|refused)|"
    r"Broken pipe|Timed out waiting|NCCL communicator was aborted"
)
"""In the last line of a traceback: torch lost another rank; that rank is the cause."""


@dataclass(kw_only=True)
class Ended:
    """How one rank ended. `error` is what it wrote down itself; `killed`: the launcher had to end it."""

    rank: int
    seen: float = 0.0  # it was alive then
    ended: float = 0.0  # and not any more then
    killed: bool = False
    call: str = ""  # in which it waited for others when it was ended
    code: int = -signal.SIGKILL
    error: dict[str, Any] | None = None
    stacks: str = ""
    tail: str = ""  # of its log

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.code != 0 and not self.killed)

    @property
    def soli(self) -> SoliError | None:
        return SoliError.from_json(self.error["soli"]) if self.error and self.error["soli"] else None

    @property
    def last_line(self) -> str:
        return str(self.error["text"]).rstrip().splitlines()[-1] if self.error else ""

    @property
    def consequence(self) -> bool:
        """Whether another rank's failure is the likely cause."""
        return self.soli.consequence if self.soli else bool(_BY_ANOTHER.search(self.last_line))

    @property
    def when(self) -> float:
        """As early as known: a rank that another one notices to be gone died before that one's error."""
        if self.error is not None:
            return float(self.error["time"])
        return self.seen if self.code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS) else self.ended

    @property
    def story(self) -> str:
        """What makes two ranks' failures one and the same."""
        soli = self.soli
        if soli is not None:  # what all notice they notice each on the ranks that it shares a group with
            return re.sub(r"rank \d+", "rank", str(soli)) if soli.everywhere else str(soli)
        return str(self.error["text"]) if self.error else str(self.code)


def stuck(waits: Iterator[dict[str, Any] | None], ended: float) -> bool:
    """Whether ranks, all that run, wait (report.say) for each other or for one that has ended (at `ended`; 0: none has)."""
    found = list(waits)
    if not all(found) or (not ended and any(wait["looked"] is None for wait in found if wait)):
        return False
    woken = time.time() - STUCK_SECONDS  # they may need a while for the rest
    looked = min(wait["looked"] or woken for wait in found if wait)
    return looked - max(ended, *(wait["moved"] for wait in found if wait)) > STUCK_SECONDS


def report(ranks: list[Ended]) -> tuple[str, int]:
    """The text for the user (empty: the program has said it all) and the exit code of the job."""
    failed = [r for r in ranks if r.failed]
    if all(r.consequence for r in failed):  # then of those that ended well and did not stay for the others
        failed += [r for r in ranks if r.code == 0 and not r.killed and not r.failed]
    if not failed:
        return "\n".join([render(CROSSED), *map(_other, ranks)]), FAILURE
    failed.sort(key=lambda r: (r.consequence, r.when))
    cause = failed[0]
    same = [cause, *(r for r in failed[1:] if r.story == cause.story and not r.consequence)]
    if cause.soli is not None:  # of one story the lowest rank's words, whoever was the first to write them
        cause = min(same, key=lambda r: r.rank)
    first = _first(cause, sorted(r.rank for r in same), len(ranks) == 1)
    lines = [first, *(_other(r) for r in ranks if r not in same)]
    code = cause.soli.exit_code if cause.soli else cause.code if cause.code > 0 else FAILURE
    return "\n".join(filter(None, lines)), code


def _first(cause: Ended, numbers: list[int], alone: bool) -> str:
    """The first cause in full, and which ranks had it."""
    who = "the program" if alone else named(numbers)
    if (soli := cause.soli) is not None:
        return render(soli, str(cause.error["line"]) if cause.error else "", "" if alone else who)
    if cause.error is not None:
        text = str(cause.error["text"]).rstrip()
        return text if alone else f"soli: {who} failed:\n{text}"
    if cause.code > 0 and (alone or cause.rank == 0):
        return "" if alone else f"soli: {who} {_how(cause.code)}"  # its output is on the screen
    text = f"soli: {who} {_how(cause.code)}" + " while others waited" * (not cause.code)
    tail = cause.tail.rstrip().splitlines()[-TAIL_LINES:] if 0 not in numbers else []
    head = [f"  the last output of rank {cause.rank}:"] if tail else []
    return "\n".join([text, *head, *(f"  | {line}" for line in tail), *([] if cause.code else [LEFT])])


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _other(rank: Ended) -> str:
    """One line for a rank that is not the cause."""
    if rank.killed and rank.error is None:
        where = rank.call and f" in {rank.call}"
        return f"  rank {rank.rank} was still running{where} and was ended" + _standing(rank.stacks)
    soli, line = rank.soli, rank.error["line"] if rank.error else ""
    if what := soli.problems[0].what.splitlines()[0] if soli is not None else rank.last_line:
        what += f" (at {line})" if line else ""
        return f"  rank {rank.rank} {'then stopped' if rank.consequence else 'also failed'}: {what}"
    return f"  rank {rank.rank} {_how(rank.code)}"


def still(ranks: list[Ended], seconds: float) -> str:
    """Of ranks that run on after the others have ended."""
    lines = [f"  rank {rank.rank} still runs" + _standing(rank.stacks) for rank in ranks]
    return "\n".join([f"soli: the other ranks ended {seconds:g} s ago, and it goes on", *lines])


def _standing(stacks: str) -> str:
    """Where the main thread stood: its innermost line outside torch, the user's own if there is one."""
    main = re.split(r"^(?:Current thread|Thread) ", stacks, flags=re.MULTILINE)[-1]  # the oldest is the last
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    users = [frame for frame in frames if is_users(frame[0])]
    others = [frame for frame in frames if "/torch/" not in frame[0] and not frame[0].startswith("<")]
    for file, line, name in (users or others)[:1]:
        return f"; it stood at {file}:{line} in {name}"
    return ""
