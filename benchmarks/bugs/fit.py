"""Weights and priors of soli/bugs/classification.toml, fitted to labels of development; it writes them into the file.

    python benchmarks/bugs/fit.py --db bugs.db HISTORY...

Regularised maximum likelihood of the labels (each dimension by itself), weights not below nothing: a rule speaks for its word or
is silent; one that gets no weight is taken out. Whether a commit is a fix is learnt of all, each as heavy as what it stands for.
What ten folds of the same labels say of it is printed, and what the others' labels say of each repository that no rule was written
by; the labels that judge it (labels.csv, elsewhere) are not read here.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from soli.bugs import labels, store
from soli.bugs.agreement import kappa
from soli.bugs.classification import Hints, classifier, likely, matches
from soli.bugs.classify import looked_at
from soli.bugs.mine import name
from soli.bugs.taxonomy import DIMENSIONS

HERE = Path(__file__).resolve().parent
FILE = HERE.parent.parent / "src" / "soli" / "bugs" / "classification.toml"
RIDGE, FOLDS = 1.0, 10
LEAST = 0.05  # a weight below it is none
UNSEEN, ELSEWHERE = (
    "E",
    "F",
)  # whose labels no rule was written by; and who read repositories that no rule was written by


def seen(base, repos: dict[str, Path], rows: list[labels.Label]) -> list[dict[str, str]]:
    """What rules see of each labelled commit."""
    found = {}
    for repo, path in repos.items():
        hashes = sorted({row.commit for row in rows if row.repo == repo})
        found |= {(repo, hash_): of for hash_, of, _ in looked_at(base, repo, path, hashes)}
    return [found[row.repo, row.commit] for row in rows]


def fitted(hints: Hints, matched: np.ndarray, true: np.ndarray, heavy: np.ndarray) -> Hints:
    """The same rules with other weights and priors. `matched`: [fixes, rules]; `true`: [fixes] numbers of words; `heavy`: [fixes] how much each counts."""
    words = list(hints.prior)
    of = np.array([words.index(hint.word) for hint in hints.hints])

    def cost(x: np.ndarray) -> tuple[float, np.ndarray]:
        prior, weight = x[: len(words)], x[len(words) :]
        speaks = np.zeros((len(of), len(words)))
        speaks[np.arange(len(of)), of] = weight
        sums = matched @ speaks + prior
        sums -= sums.max(axis=1, keepdims=True)
        chance = np.exp(sums)
        chance /= chance.sum(axis=1, keepdims=True)
        wrong = chance.copy()
        wrong[np.arange(len(true)), true] -= 1
        wrong *= heavy[:, None]
        slope = (matched * wrong[:, of]).sum(axis=0)
        value = -(heavy * np.log(chance[np.arange(len(true)), true] + 1e-300)).sum()
        value += RIDGE * (weight**2).sum() / 2 + (prior**2).sum() / 20
        return value, np.concatenate([wrong.sum(axis=0) + prior / 10, slope + RIDGE * weight])

    bounds = [(None, None)] * len(words) + [(0.0, None)] * len(of)
    found = minimize(cost, np.zeros(len(words) + len(of)), jac=True, bounds=bounds, method="L-BFGS-B")
    if not found.success:
        sys.exit(f"the fit did not end: {found.message}")
    best = found.x.round(2)
    weights = best[len(words) :]
    return Hints(
        dict(zip(words, best[: len(words)], strict=True)),
        tuple(
            type(hint)(hint.word, hint.name, hint.where, hint.match, float(w) if w >= LEAST else 0.0)
            for hint, w in zip(hints.hints, weights, strict=True)
        ),
    )


def counts(base, rows: list[labels.Label]) -> np.ndarray:
    """[rows] how many commits each stands for, over the mean: by its repository, whether its message calls it a fix, says nothing of it, or
    another thing, and whether it is small; of these strata the labelled commits are uniform samples."""
    query = f"SELECT repo, hash, change.fix, rule = 'silent', source BETWEEN 1 AND 40 FROM change JOIN size USING (repo, hash) WHERE {store.CODE}"
    strata = {
        (repo, hash_): (repo, fix, silent, silent and small) for repo, hash_, fix, silent, small in base.execute(query)
    }
    there, drawn = Counter(strata.values()), Counter(strata[row.repo, row.commit] for row in rows)
    found = np.array([there[strata[row.repo, row.commit]] / drawn[strata[row.repo, row.commit]] for row in rows])
    return found / found.mean()


def main() -> None:
    """Fit, say how well, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repos", nargs="+", type=Path)
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--labels", type=Path, default=HERE / "development.csv")
    parser.add_argument("--look", action="store_true", help="only say how well")
    args = parser.parse_args()
    rows = [row for row in labels.read(args.labels) if row.fix != "unsure"]
    made = classifier(FILE)
    with store.opened(args.db) as base:
        of = seen(base, {name(path): path for path in args.repos}, rows)
        heavy = counts(base, rows)
        unseen = [i for i, row in enumerate(rows) if row.labeller == UNSEEN]
        heavy_unseen = counts(base, [rows[i] for i in unseen])
    text = FILE.read_text(encoding="utf-8")
    yes = np.array([row.fix == "yes" for row in rows])
    for dimension in ("fix", *DIMENSIONS):
        hints = made.fix if dimension == "fix" else made.dimensions[dimension]
        words = list(hints.prior)
        use = np.arange(len(rows)) if dimension == "fix" else np.flatnonzero(yes)
        matched = np.array([[m is not None for m in matches(hints, of[i])] for i in use], dtype=float)
        true = np.array([words.index(getattr(rows[i], dimension)) for i in use])
        weight = heavy[use] if dimension == "fix" else np.ones(len(use))
        chances = np.zeros((len(use), len(words)))
        fold = np.random.default_rng(0).integers(FOLDS, size=len(use))
        for k in range(FOLDS):
            there = fitted(hints, matched[fold != k], true[fold != k], weight[fold != k])
            chances[fold == k] = likely(there, matched[fold == k])
        if dimension == "fix":
            say_fix(chances[:, 0], true == 0, weight)
            print(f"of the {len(unseen)} that no rule was written by:")
            say_fix(chances[unseen, 0], true[unseen] == 0, heavy_unseen)
            others = np.array([row.repo if row.labeller == ELSEWHERE else "" for row in rows])
            for repo in sorted(set(others) - {""}):
                there = fitted(hints, matched[others != repo], true[others != repo], weight[others != repo])
                chances[others == repo] = likely(there, matched[others == repo])
            print(f"of {len(set(others)) - 1} repositories, each by the labels of all others:")
            say_fix(chances[others != "", 0], true[others != ""] == 0, weight[others != ""])
        else:
            found = kappa([words[i] for i in true], [words[i] for i in chances.argmax(axis=1)])
            print(
                f"{dimension}: {len(use)} fixes, of other folds kappa {found.value:.2f} ({found.low:.2f} to {found.high:.2f}), {found.alike:.0%} alike"
            )
        text = written(text, dimension, fitted(hints, matched, true, weight), words)
    if not args.look:
        FILE.write_text(text, encoding="utf-8")


def say_fix(chance: np.ndarray, true: np.ndarray, weight: np.ndarray) -> None:
    """Precision and recall, of other folds, at several probabilities that a fix must have."""
    for least in np.arange(0.3, 0.75, 0.05):
        taken = chance >= least
        both = (weight * taken * true).sum()
        print(
            f"a fix from {least:.2f} on: precision {both / (weight * taken).sum():.2f}, recall {both / (weight * true).sum():.2f}"
        )


def written(text: str, dimension: str, hints: Hints, words: list[str]) -> str:
    """The file with these numbers in place of its own, without the rules that have none."""
    for word in words:
        start = text.index(f'[{dimension}."{word}"]')
        end = text.find("\n]", start)
        weights = iter([hint.weight for hint in hints.hints if hint.word == word])
        lines = []
        for line in text[start:end].split("\n"):
            if line.startswith("prior = "):
                lines.append(f"prior = {hints.prior[word]:.2f}")
            elif "{ weight = " in line:
                weight = next(weights)
                lines += [re.sub(r"weight = [-\d.]+", f"weight = {weight:.2f}", line)] * (weight > 0)
            else:
                lines.append(line)
        text = text[:start] + "\n".join(lines) + text[end:]
    return text


if __name__ == "__main__":
    sys.exit(main())
