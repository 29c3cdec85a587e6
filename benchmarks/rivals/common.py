"""How a rival planner's program here is asked: rows or a task come as JSON by standard input, what it says goes out so.

A row is a point of soli's own reading (soli/planner/cost/points.py) with the device's name and data sheet, and what
it says of overlap: every planner is told the same, what a table leaves out and soli infers among it.
"""

import contextlib
import json
import resource
import sys
import traceback
from collections.abc import Callable

NONE, SELECTIVE, FULL = 0, 1, 2
"""What is recomputed, as a point has it."""
Row = dict


def answer(
    predict: Callable[[Row], dict], why_not: Callable[[Row], str], search: Callable[[dict], dict] | None = None
) -> None:
    """Answers what was asked. Whatever the planner prints goes to standard error."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        if "task" in asked and search is not None:
            start = spent()
            found = search(asked["task"])
            said = {"seconds": spent() - start, **found}
        else:
            said = [one(row, predict, why_not) for row in asked["rows"]]
    json.dump(said, sys.stdout)


def spent() -> float:
    """Seconds of CPU of this process and of those that it ran: neighbours do not count."""
    mine, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in (mine, theirs))


def one(row: Row, predict: Callable[[Row], dict], why_not: Callable[[Row], str]) -> dict:
    """Time in seconds and memory in bytes of a row, or why there are none."""
    if reason := why_not(row) or common_why_not(row):
        return {"refused": reason}
    try:
        return predict(row)
    except (Exception, SystemExit) as error:  # whatever it is, it is the planner's answer
        where = traceback.extract_tb(error.__traceback__)[-1].line or ""
        return {"refused": f"it stops: {type(error).__name__}: {(str(error).splitlines() or [where])[0][:160]}"}


def common_why_not(row: Row) -> str:
    """What keeps each of them from a row."""
    if row["frozen"]:
        return "frozen weights (LoRA)"
    if row["offload"]:
        return "its optimizer's state lies in the host's memory"
    return "" if microbatches(row) else "the last microbatch is smaller than the others"


def microbatches(row: Row) -> int:
    """Of a replica in a step; 0 where they differ in size."""
    each = row["dp"] * row["microbatch"]
    return int(row["global_batch"] // each) if row["global_batch"] % each == 0 else 0


def whole(row: Row, *names: str) -> list[int]:
    """These fields as integers."""
    return [round(row[name]) for name in names]
