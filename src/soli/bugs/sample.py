"""Commits to label: drawn at random once, and kept in a file with what each stands for, so that every labeller has the same."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from soli.bugs import labels, store
from soli.bugs.changes import patches
from soli.bugs.label_page import Item
from soli.bugs.mine import histories
from soli.core.errors import SoliError, blaming
from soli.core.files import write_whole

LINES = 400  # of a diff that a person is shown


def drawn(path: Path, mined: Path, seed: int, counts: dict[str, int], repos: Collection[Path]) -> dict[str, Any]:
    """What the file says; if there is none, what is drawn now of these histories, which is kept in it."""
    if path.exists():
        wrong = lambda error: SoliError("this holds no commits that were drawn", got=f"{path}: {error!r}", fix="another --sample")
        with blaming(wrong, OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text(encoding="utf-8"))
            if not all(isinstance(said["commits"][name], list) for name in labels.SAMPLES):
                raise ValueError("no lists of commits")
        return dict(said)
    with store.opened(mined) as base:
        heads = base.execute("SELECT repo, head, rules FROM history ORDER BY repo").fetchall()
        of = set(histories(repos))
        commits, population = labels.draw(base, seed, counts, of)
        heads = [row for row in heads if row[0] in of]
    said = {
        "seed": seed, "population": population, "drawn": counts, "rules": sorted({rules for *_, rules in heads}),
        "heads": {repo: head for repo, head, _ in heads}, "commits": commits,
    }  # fmt: skip
    write_whole(path, json.dumps(said, indent=1) + "\n")
    return said


def items(said: Mapping[str, Any], mined: Path, repos: Collection[Path]) -> list[Item]:
    """Each drawn commit as it is shown. SoliError where its history is not given."""
    where = histories(repos)
    if lacking := {repo for commits in said["commits"].values() for repo, _ in commits} - set(where):
        raise SoliError("commits of other histories were drawn", got=", ".join(sorted(lacking)), fix="give these clones too")
    all_ = [(sample, repo, hash_) for sample, commits in said["commits"].items() for repo, hash_ in commits]
    with store.opened(mined) as base:
        rows = base.execute("SELECT repo, hash, subject, body FROM change")
        texts = {(repo, hash_): (subject, body) for repo, hash_, subject, body in rows}
    if unknown := [f"{repo} {hash_[:10]}" for _, repo, hash_ in all_ if (repo, hash_) not in texts]:
        got = f"{mined} lacks {len(unknown)}: {', '.join(unknown[:3])} ..."
        raise SoliError("commits were drawn that this file does not have", got=got, fix="the file that they were drawn from, or another --sample")
    of = lambda repo: [hash_ for _, other, hash_ in all_ if other == repo]
    diffs = {(repo, hash_): diff for repo, path in where.items() for hash_, diff in patches(path, of(repo), LINES).items()}
    return [Item(repo, hash_, sample, *texts[repo, hash_], diffs[repo, hash_]) for sample, repo, hash_ in all_]
