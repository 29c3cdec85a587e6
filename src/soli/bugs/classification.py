"""Whether a commit is a fix and of what, by rules that are data (classification.toml): a word, how sure they are, and why.

The rules are a linear model that can be read: every rule that matches adds its weight to one word, a word's probability is the
softmax of the sums. Weights and priors were fitted to labels of development (benchmarks/bugs/fit.py).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from soli.bugs.selection import unfit, written
from soli.bugs.syntax import Edit
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.errors import Problem, raise_all

PLACES = ("subject", "body", "paths", "kinds", "edits", "most", "size", "rule", "said")
FIX = ("yes", "no")
FLAGS = re.IGNORECASE | re.MULTILINE
FEW = 6
Source = tuple[str, str, int]
"""Kind, path and lines of a file."""


@dataclass(frozen=True)
class Hint:
    """If `match` is found in that place of a fix, `weight` speaks for `word`."""

    word: str
    name: str
    where: str
    match: re.Pattern[str]
    weight: float


@dataclass(frozen=True)
class Hints:
    """Of one dimension: priors of its words, and what speaks for each."""

    prior: dict[str, float]
    hints: tuple[Hint, ...]


@dataclass(frozen=True)
class Verdict:
    """A word, its probability, and the rules that spoke for it, the heaviest first, each with what it matched."""

    word: str
    confidence: float
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Classifier:
    """Every dimension's hints; of whether it is a fix at all, which takes a probability of `least`; `digest`: of the text that they were read from."""

    dimensions: dict[str, Hints]
    fix: Hints
    least: float
    digest: str


def places(subject: str, body: str, of: list[Source], edits: Sequence[Edit], rule: str = "") -> dict[str, str]:
    """Where rules look. `edits`: of its source and build files. `rule`: of selection."""
    kinds = sorted({kind for kind, _, _ in of})
    lines = [lines for kind, _, lines in of if kind in ("source", "build")]
    most = Counter(edit.what for edit in edits).most_common(1)
    return {
        "subject": subject, "body": body, "paths": "\n".join(f"{kind} {path}" for kind, path, _ in of), "kinds": " ".join(kinds),
        "edits": "\n".join(map(str, edits)), "most": most[0][0] if most else "", "size": f"{sum(lines)} lines, {len(lines)} files", "rule": rule,
        "said": f"{rule}; {' '.join(kinds)}; {'no' if not edits else 'few' if len(edits) <= FEW else 'many'} edits; {subject}",
    }  # fmt: skip


def matches(hints: Hints, of: Mapping[str, str]) -> list[re.Match[str] | None]:
    """What each hint finds in a fix."""
    return [hint.match.search(of[hint.where]) for hint in hints.hints]


def verdict(hints: Hints, of: Mapping[str, str], least: tuple[str, float] | None = None) -> Verdict:
    """The likeliest word of one dimension; with `least` the first of two words where it has that probability, else the other."""
    found = matches(hints, of)
    matched = np.array([[one is not None for one in found]], dtype=float)
    chances = dict(zip(hints.prior, likely(hints, matched)[0], strict=True))
    word = max(chances, key=lambda one: chances[one])
    if least:
        word = least[0] if chances[least[0]] >= least[1] else next(one for one in chances if one != least[0])
    spoke = [(h, m) for h, m in zip(hints.hints, found, strict=True) if m and h.word == word and h.weight > 0]
    said = [f"{h.name}: {_short(m)}" for h, m in sorted(spoke, key=lambda one: -one[0].weight)]
    return Verdict(word, float(chances[word]), tuple(said))


def decided(made: Classifier, of: Mapping[str, str]) -> Verdict:
    """Whether it is a fix: yes or no."""
    return verdict(made.fix, of, (FIX[0], made.least))


def likely(hints: Hints, matched: NDArray[np.float64]) -> NDArray[np.float64]:
    """[fixes, words] probabilities of [fixes, hints] matches."""
    words = list(hints.prior)
    speaks = np.zeros((len(hints.hints), len(words)))
    for row, hint in enumerate(hints.hints):
        speaks[row, words.index(hint.word)] = hint.weight
    return softmax(matched @ speaks + np.array(list(hints.prior.values())), axis=1)


def classifier(path: Path | None = None) -> Classifier:
    """soli's own, or a file's. SoliError with all that is wrong in it."""
    said, digest = written("classification.toml", path)
    least: Any = said["fix"].pop("least", None) if isinstance(said.get("fix"), dict) else None
    words = {**{name: tuple(known) for name, known in DIMENSIONS.items()}, "fix": FIX}
    wrong = [problem for name, known in words.items() for problem in _wrong(name, known, said.get(name))]
    if not isinstance(least, float) or not 0 < least < 1:
        wrong.append(Problem("fix: 'least' is a probability", got=repr(least)))
    raise_all(wrong)
    made = {name: _hints(known, said[name]) for name, known in words.items()}
    fix = made.pop("fix")
    return Classifier(made, fix, least, digest)


def _wrong(name: str, known: tuple[str, ...], said: Any) -> Iterator[Problem]:
    """What is wrong with what a file says of a dimension."""
    given: Mapping[str, Any] = said if isinstance(said, dict) else {}
    if not given:
        yield Problem("nothing is said of a dimension", got=name, fix=f'[{name}."{known[-1]}"]')
    for word, one in given.items():
        if word not in known:
            yield Problem(f"{name} has no such word", got=word, allowed=", ".join(known))
            continue
        rules = one.get("rules", []) if isinstance(one, dict) else None
        tables = isinstance(rules, list) and all(isinstance(rule, dict) for rule in rules)
        if not (tables and isinstance(one.get("prior"), int | float)) or set(one) - {"prior", "rules"}:
            yield Problem(f"{name} {word}: it has a prior, which is a number, and rules, which are tables", got=repr(one)[:200])
        for rule in (rules or ()) if tables else ():
            yield from _wrong_rule(f"{name} {word}: {rule.get('name', 'a rule without a name')}", rule)


def _wrong_rule(said: str, rule: Mapping[str, Any]) -> Iterator[Problem]:
    where = [name for name in PLACES if name in rule]
    if len(where) != 1 or not rule.get("name") or set(rule) - {*PLACES, "name", "weight"}:
        yield Problem(f"{said}: a rule has a name, a weight, and looks in one place", got=", ".join(rule), allowed=", ".join(PLACES))
    else:
        yield from unfit(rule[where[0]], f"{said}: this")
    if not isinstance(rule.get("weight", 1.0), int | float):
        yield Problem(f"{said}: a weight is a number", got=repr(rule["weight"]))


def _hints(known: tuple[str, ...], said: Mapping[str, Any]) -> Hints:
    # a word that is not there is never said
    prior = {word: float(said[word]["prior"]) if word in said else -np.inf for word in known}
    rules = [(word, rule) for word in known if word in said for rule in said[word].get("rules", ())]
    return Hints(prior, tuple(_hint(word, rule) for word, rule in rules))


def _hint(word: str, rule: Mapping[str, Any]) -> Hint:
    where = next(name for name in PLACES if name in rule)
    return Hint(word, rule["name"], where, re.compile(rule[where], FLAGS), float(rule.get("weight", 1.0)))


def _short(found: re.Match[str]) -> str:
    """What was matched, to the end of its line where more follows."""
    end = found.string.find("\n", found.end())
    return " ".join(found.string[found.start() : end if end >= 0 else None].split())[:80]
