"""Which commits are fixes: rules that are data (selection.toml), each verdict with the rule that gave it."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from soli.bugs.history import Commit
from soli.core import tables
from soli.core.errors import Problem, raise_all

PLACES = ("subject", "tag", "body", "kinds", "parents")
OTHER, UNNAMED = "other", "a rule without a name"
TAG = re.compile(r"^(?:ADLR/megatron-lm!\d+ - )?(?:\[([^\]]{1,40})\]|([\w/ -]{1,24})(?:\([^)]*\))?!?:(?=\s))")
PULL = re.compile(r"\(#(\d+)\)\s*$|\((?:!|GH-)(\d+)\)\s*$|^ADLR/megatron-lm!(\d+)\b|^Merge (?:pull request|branch).*?#(\d+)")
CLOSES = re.compile(r"\b(?:close[sd]?|fix(?:e[sd])?|resolve[sd]?)\s*:?\s+(?:[\w.-]+/[\w.-]+)?#(\d+)", re.I)


@dataclass(frozen=True)
class Rule:
    """If `match` is found in that place of a commit, it is a fix, or none."""

    name: str
    where: str
    match: re.Pattern[str]
    fix: bool
    why: str


@dataclass(frozen=True)
class Rules:
    """What decides, and `digest`: of the text that it was read from."""

    kinds: tuple[tuple[str, re.Pattern[str]], ...]
    rules: tuple[Rule, ...]
    digest: str
    left_out: tuple[str, ...] = ()  # names of files that have no lines

    def kind(self, path: str) -> str:
        """What a file is: test, docs, source, ..."""
        return next((name for name, pattern in self.kinds if pattern.search(path)), OTHER)

    def of(self, commit: Commit) -> Rule:
        """The rule that decides on a commit."""
        places = {
            "subject": commit.subject, "tag": tag(commit.subject), "body": commit.body,
            "kinds": " ".join(sorted({self.kind(file.path) for file in commit.files})),
            "parents": " ".join(commit.parents) if len(commit.parents) > 1 else "",
        }  # fmt: skip
        return next(rule for rule in self.rules if rule.match.search(places[rule.where]))


def tag(subject: str) -> str:
    """What stands before a colon or in brackets at a subject's beginning, in small letters: `fix` of "fix(moe): ..."."""
    found = TAG.match(subject)
    return (found.group(1) or found.group(2)).strip().lower() if found else ""


def pull(subject: str) -> int | None:
    """The number of the pull (or merge) request that a subject names."""
    found = PULL.search(subject)
    return int(next(filter(None, found.groups()))) if found else None


def closes(commit: Commit) -> list[int]:
    """The issues that a message says it closes."""
    return sorted({int(number) for number in CLOSES.findall(f"{commit.subject}\n{commit.body}")})


def written(own: str, path: Path | None) -> tuple[dict[str, Any], str]:
    """Rules as they were written, in soli's own file or in another one, and the digest of their text."""
    said, text = tables.read(path or files("soli.bugs").joinpath(own), "the file of rules")
    return said, hashlib.sha256(text.encode()).hexdigest()[:16]


def rules(path: Path | None = None) -> Rules:
    """soli's own, or a file's. SoliError with all that is wrong in it."""
    said, digest = written("selection.toml", path)
    raise_all(replace(one, what=f"{path or 'selection.toml'}: {one.what}") for one in _wrong(said))
    kinds = tuple((one.get("name", ""), re.compile(one["path"], re.I)) for one in said.get("kind", []))
    rule = lambda one: Rule(one.get("name", UNNAMED), one["where"], re.compile(one["match"], re.I), one["fix"], one["why"])
    return Rules(kinds, tuple(map(rule, said["rule"])), digest, tuple(map(str, said.get("left_out", []))))


def _wrong(said: dict[str, Any]) -> Iterator[Problem]:
    lists = {key: said.get(key, []) for key in ("kind", "rule")}
    for key, given in lists.items():
        if not (isinstance(given, list) and all(isinstance(one, dict) for one in given)):
            yield Problem(f"'{key}' is a list of tables", got=repr(given)[:80], allowed=f"[[{key}]]")
            lists[key] = []
    for one in lists["kind"]:
        yield from unfit(one.get("path"), f"{one.get('name', UNNAMED)}: 'path'")
    for one in lists["rule"]:
        name = one.get("name", UNNAMED)
        if one.get("where") not in PLACES:
            yield Problem(f"{name}: there is no such place", got=repr(one.get("where")), allowed=", ".join(PLACES))
        if not isinstance(one.get("fix"), bool) or not one.get("why"):
            yield Problem(f"{name}: a rule says whether it is a fix, and why", allowed="fix = true or false, why = '...'")
        yield from unfit(one.get("match"), f"{name}: 'match'")
    if not isinstance(said.get("left_out", []), list):
        yield Problem("'left_out' is a list of names", got=repr(said["left_out"])[:80])
    if not lists["rule"] or lists["rule"][-1].get("match"):
        yield Problem("the last rule must decide on whatever is left", fix="match = ''")


def unfit(pattern: Any, what: str) -> Iterator[Problem]:
    """A problem where this is no pattern."""
    try:
        re.compile(pattern)
    except (TypeError, re.error) as error:
        yield Problem(f"{what} is no pattern", got=str(error))
