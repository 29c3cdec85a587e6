"""One report of a failed job: the first cause, then what became of the other ranks."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

from soli.core.errors import FAILURE, SoliError
from soli.core.report import render


@dataclass
class Ended:
    """How one rank ended. `error` is what it wrote down itself; `killed`: the launcher had to end it."""

    rank: int
    code: int
    time: float
    killed: bool
    error: dict[str, Any] | None
    stacks: str
    tail: str


def report(ranks: list[Ended]) -> tuple[str, int]:
    """The text for the user and the exit code of the job."""
    failed = sorted((r for r in ranks if r.code != 0 and not r.killed), key=_order)
    cause = failed[0]
    soli = _soli(cause)
    same = [r.rank for r in failed if soli is not None and _soli_text(r) == _soli_text(cause)]
    where = f"rank {cause.rank}" if len(same) < 2 else f"ranks {_ranges(same)}"
    if len(ranks) == 1:
        where = ""
    if soli is not None:
        line = cause.error["line"] if cause.error else ""
        lines = [render(soli, ", on ".join(filter(None, (line, where))))]
        code = soli.exit_code
    elif cause.error is not None:
        # Rank 0 has shown its own traceback; that of another rank is only in its log.
        text = cause.error["text"].rstrip()
        lines = [f"soli: rank {cause.rank} failed:" + ("\n" + text if cause.rank else " " + text.split("\n")[-1])]
        code = FAILURE
    else:
        lines = [f"soli: rank {cause.rank} {_how(cause.code)}" + (f"\n{cause.tail.rstrip()}" if cause.tail else "")]
        code = cause.code if cause.code > 0 else FAILURE
    lines += [_other(r) for r in ranks if r is not cause and r.rank not in same and (r.code != 0 or r.killed)]
    return "\n".join(lines), code


def _order(rank: Ended) -> tuple[bool, float]:
    """Errors that another rank caused come last; then by time."""
    soli = _soli(rank)
    return (soli is not None and soli.consequence), (rank.error["time"] if rank.error else rank.time)


def _soli(rank: Ended) -> SoliError | None:
    return SoliError.from_json(rank.error["soli"]) if rank.error and rank.error["soli"] else None


def _soli_text(rank: Ended) -> str:
    return str(_soli(rank))


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _other(rank: Ended) -> str:
    soli = _soli(rank)
    if soli is not None:
        return f"  rank {rank.rank} then stopped: {soli.problems[0].what}"
    if rank.error is not None:
        return f"  rank {rank.rank} also failed: {rank.error['text'].rstrip().splitlines()[-1]}"
    if rank.killed:
        return f"  rank {rank.rank} was still running and was ended" + _standing(rank.stacks)
    return f"  rank {rank.rank} {_how(rank.code)}"


def _standing(stacks: str) -> str:
    """The innermost line of the user's code in a faulthandler dump (the main thread is its last)."""
    main = stacks.split("Current thread")[-1] if "Current thread" in stacks else stacks
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    own = [f for f in frames if "site-packages" not in f[0] and "/soli/" not in f[0] and not f[0].startswith("<")]
    return f"; it stood at {own[0][0]}:{own[0][1]} in {own[0][2]}" if own else ""


def _ranges(ranks: list[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return " and ".join(map(str, ranks)) if len(ranks) == 2 else ", ".join(map(str, ranks))
