"""Mining: the commits of local git histories into one file, those that fix a bug among them, and why the others do not."""

import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scipy.stats import binomtest

from soli.bugs import history, store
from soli.bugs.selection import rules
from soli.core.errors import SoliError

SMALL = 10  # lines of a fix that the study calls small


@dataclass(frozen=True)
class Mined:
    """A repository. `rejected`, `selected`: commits by rule. `gone`: commits that were kept before and are no
    longer in the history. `small`: of each size's definition the share of fixes of SMALL lines or fewer, and its 95% interval."""

    repo: str
    head: str
    commits: int
    new: int
    gone: int
    fixes: int
    selected: dict[str, int]
    rejected: dict[str, int]
    median: float
    small: dict[str, tuple[float, float, float]]


def mine(paths: Sequence[Path], out: Path, chosen: Path | None = None) -> list[Mined]:
    """Read these histories into `out`. All of one is kept, or nothing. SoliError where one is not whole, or none has a fix."""
    made, found = rules(chosen), []
    for repo, path in histories(paths).items():
        with store.opened(out, made=True) as base:
            found.append(summary(base, repo, *store.add(base, repo, history.read(path, made.left_out), made)))
    if not any(one.fixes for one in found):
        got = ", ".join(f"{one.repo}: {one.commits} commits" for one in found)
        raise SoliError("no fix of a bug was found", got=got, fix="other rules: --rules FILE")
    return found


def histories(paths: Collection[Path]) -> dict[str, Path]:
    """Those in these folders by what they are called. SoliError where two have one name, or one is not whole."""
    names = [name(path) for path in paths]
    if twice := {one for one in names if names.count(one) > 1}:
        raise SoliError("two of these histories have one name", got=", ".join(sorted(twice)), fix="name their folders owner+name, or mine them into two files")
    for path in paths:
        history.check(path)
    return dict(zip(names, paths, strict=True))


def name(path: Path) -> str:
    """What a history is called: owner/name of the folder owner+name (or of the last two folders of a bare mirror), else the folder."""
    parts = [part for part in path.resolve().parts if part not in (".git", "repo", "repo.git")]
    return parts[-1].removesuffix(".git").replace("+", "/")


def summary(base: sqlite3.Connection, repo: str, count: int, new: int, gone: int) -> Mined:
    """What is known of a repository."""
    by_rule = "SELECT rule, count(*) FROM change WHERE repo = ? AND fix = ? GROUP BY rule ORDER BY 2 DESC"
    rejected, selected = (dict(base.execute(by_rule, (repo, fix))) for fix in (0, 1))
    rows = base.execute('SELECT source, larger, added, "all", files FROM fix WHERE repo = ?', (repo,)).fetchall()
    sized = [row for row in rows if row[-1]]  # the others change pipelines alone, and have no size
    sizes = {definition: [row[i] for row in sized] for i, definition in enumerate(store.SIZES)}
    head = store.column(base, "SELECT head FROM history WHERE repo = ?", repo)[0]
    return Mined(
        repo, head, count, new, gone, len(rows), selected, rejected, median(sizes["source"]) if sized else 0.0,
        {definition: share(sum(size <= SMALL for size in values), len(values)) for definition, values in sizes.items()},
    )  # fmt: skip


def share(part: int, whole: int) -> tuple[float, float, float]:
    """A share and its 95% interval (Wilson 1927)."""
    if not whole:
        return 0.0, 0.0, 1.0
    interval = binomtest(part, whole).proportion_ci(method="wilson")
    return part / whole, float(interval.low), float(interval.high)
