"""The study as a page with plots and as Markdown: the same blocks, written twice."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soli.bugs.agreement import Share, bounded, percent
from soli.bugs.labels import ALL, Judged, Selection
from soli.bugs.mine import SMALL
from soli.bugs.store import SURE
from soli.bugs.study import LINES
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.page import svg, template

Said = Mapping[str, Any]  # what study.py finds
Selected = Mapping[str, Selection] | None
LONG = 25  # characters of a cell that is words and no number
KINDS = (("fixes", "fixes"), ("no fixes", "others"))  # how tables call them, and study.py
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")


@dataclass(frozen=True)
class Heading:
    """A title, of level 1 to 3."""

    level: int
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under their titles."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def words(self) -> list[bool]:
        """Of each column, whether a cell of it is words and no number."""
        return [any(len(row[i]) > LONG for row in self.rows) for i in range(len(self.titles))]


@dataclass(frozen=True)
class Figure:
    """A plot; Markdown has its caption only where a table says the same."""

    caption: str
    draw: Callable[[Any], None]


Block = Heading | Table | Figure | str


def markdown(said: Said, judged: Sequence[Judged] = (), selected: Selected = None) -> str:
    """The report without plots."""
    shown = [block for block in blocks(said, judged, selected) if not isinstance(block, Figure)]
    return "\n\n".join(map(_markdown, shown)) + "\n"


def page(said: Said, judged: Sequence[Judged] = (), selected: Selected = None) -> str:
    """The report as one HTML page. Nothing is fetched, nothing runs in it."""
    return template(__package__, "report.html").render(blocks=blocks(said, judged, selected), svg=svg, long=LONG) + "\n"


def _markdown(block: Heading | Table | str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Table):
        head, *rows = ["| " + " | ".join(row) + " |" for row in (block.titles, *block.rows)]
        return "\n".join([head, "|" + "---|" * len(block.titles), *rows])
    return block


def blocks(said: Said, judged: Sequence[Judged] = (), selected: Selected = None) -> Iterator[Block]:
    """The whole report in order."""
    paper, labels = said["paper"], said["labels"]
    yield Heading(1, "Bugs of distributed training, from the fixes in git histories")
    yield (
        f"Beside each question stands what {paper['source']} states of {paper['bugs']} bugs that people read. Brackets are 95% intervals: of the counting "
        "alone, not of the rules' mistakes, which the last section has. Words are of the commits that message and syntax make a fix by the rules. "
        "Sizes and syntax are of those whose message does: the rules on syntax know both, and what they choose is small for that reason."
    )
    if labels:
        yield (
            f"`by labels`: of the words of labeller {labels['labeller']} ({'; '.join(labels['made_by'])}) for commits drawn from those "
            "whose message makes them a fix."
        )
    counts = ("commits", "fixes", "others")
    yield Table(
        ["history", "commits", "fixes", "no fixes, of code", "from", "to", "HEAD"],
        [[h["repo"], *(f"{h[key]:,}" for key in counts), h["first"], h["last"], h["head"][:10]] for h in said["histories"]],
    )  # fmt: skip
    for question in said["questions"]:
        yield Heading(2, question["name"])
        yield Table(["stated", "here", "by"], [[s["text"], s["verdict"], s["why"]] for s in question["statements"]])
        if question["dimension"] == "strategy":
            yield from _effort(said)
        if question["dimension"] in ("symptom", "cause", "strategy"):
            yield from _dimension(said, question["dimension"])
        else:
            yield from _hard(said)
    yield Heading(2, "Training or inference")
    yield from _dimension(said, "stage")
    yield from _quality(judged, selected or {})


def _dimension(said: Mapping[str, Any], dimension: str) -> Iterator[Block]:
    table = said["words"][dimension]
    repos, labelled = list(table["repos"]), table["labels"]
    titles, rows = [dimension, "fixes", "share", *repos], []
    titles += [f"by labels, {labelled['count']} fixes"] if labelled else []
    for word, (count, part) in table["all"].items():
        rows.append([word, f"{count:,}", percent(part), *(percent(table["repos"][repo][word][1]) for repo in repos)])
        rows[-1] += [percent(labelled["words"][word][1])] if labelled else []
    yield Table(titles, rows)
    yield Figure(f"Shares of each {dimension} by repository, with intervals.", lambda axes: _bars(axes, table["repos"]))
    years, words = table["years"], list(table["all"])
    of = lambda n: (f"{sum(n.values()):,}", *(f"{n.get(word, 0) / sum(n.values()):.0%}" for word in words))
    yield Table(["year", "fixes", *words], [[year, *of(n)] for year, n in years.items()])
    yield Figure(f"Fixes of each year by {dimension}.", lambda axes: _years(axes, years, words))


def _effort(said: Mapping[str, Any]) -> Iterator[Block]:
    sizes = said["sizes"]
    repos = [h["repo"] for h in said["histories"]]
    yield (
        f"Fixes of {SMALL} lines or fewer, by what is counted; the study states {said['paper']['share']:.0%}. `source`: added and deleted lines of source and build files; "
        "`larger`: of each such file the larger of the two; `added`: added ones; `all`: of every file. `by labels`: of the commits that the labels call "
        "fixes, among the chosen and the rejected, each counted for as many as it stands for. "
        f"Left out here and below: {said['left']['fixes']:,.0f} fixes and {said['left']['others']:,.0f} others that change no source or build file, such as pipelines alone."
    )
    others = ("repositories alike", "in the study's mix", "before the study", "by labels", "by syntax too", "no fixes")
    head = ["lines", "all fixes", *repos, *others, "median"]
    keys = ("alike", "mix", "before", "labels", "syntax", "others")
    shares = lambda row: (row["all"], *map(row["repos"].get, repos), *(row[key] for key in keys))
    yield Table(head, [[name, *map(percent, shares(row)), f"{row['median']:.0f}"] for name, row in sizes.items()])
    caption = f"Fixes of {SMALL} lines or fewer by what is counted; the line is what the study states."
    yield Figure(caption, lambda axes: _small(axes, sizes, said["paper"]["share"]))
    lines = said["lines"]
    yield Table(["source lines at most", *map(str, LINES)], [[name, *map(percent, lines[key])] for name, key in KINDS])
    yield Figure("Share of commits of so many source lines or fewer.", lambda axes: _curves(axes, lines))
    yield Heading(3, f"Strategies of the fixes of {SMALL} source lines or fewer")
    yield Table(["strategy", "fixes", "share"], [[word, f"{n:,}", percent(part)] for word, (n, part) in said["small"].items()])
    yield from _syntax(said["syntax"])
    if days := said["days"]:
        quartiles = ", ".join(f"{one:.1f}" for one in days["quartiles"])
        yield f"Of {days['count']} closed issues: days from opening to the fix {quartiles} (quartiles), reviewers {days['reviewers']} (median)."
    else:
        yield "How long a fix took is not in git: `soli bugs export` and `soli bugs mine --issues` take it from GitHub."


def _syntax(syntax: Mapping[str, Any]) -> Iterator[Block]:
    fixes, others = syntax["fixes"], syntax["others"]
    if not others["count"]:
        return
    yield Heading(3, "What is done to the syntax")
    rows = []
    for what, part in sorted(fixes["shares"].items(), key=lambda one: -one[1][0]):
        other = others["shares"].get(what)
        rows.append([what, percent(part), percent(other), f"{part[0] / other[0]:.2f}" if other and other[0] else ""])
    yield Table(["", f"of {fixes['count']:,} fixes", f"of {others['count']:,} that are none", "ratio"], rows)


def _hard(said: Mapping[str, Any]) -> Iterator[Block]:
    places = lambda of: (percent(of["one file"]), percent(of["one folder"]))
    spread = [(name, said["spread"][key]) for name, key in KINDS]
    rows = [[name, f"{of['count']:,}", *places(of), f"{of['median']:.0f}"] for name, of in spread]
    yield Table(["", "commits", "one source file", "one folder", "files, median"], rows)
    causes = [word for word in DIMENSIONS["cause"] if any(word in row for row in said["together"].values())]
    symptoms = sorted(said["together"].items(), key=lambda one: -sum(one[1].values()))
    yield Table(["symptom by cause", *causes], [[symptom, *(str(row.get(cause, 0)) for cause in causes)] for symptom, row in symptoms])


def _quality(judged: Sequence[Judged], selected: Mapping[str, Selection]) -> Iterator[Block]:
    yield Heading(2, "How far the words are right")
    if not judged:
        yield "No labels were given (--labels), so nothing is known of it here."
        return
    if selected:
        yield "The rules of selection, by labels of what they took and of what they left: of what they take the share that are fixes, and of all fixes the share that they take."
        rows = [[who, bounded(one.precision), bounded(one.recall), str(one.fixes)] for who, one in selected.items()]
        yield Table(["a fix if", "precision", "recall", "fixes among the labelled"], rows)
    yield f"Sure: verdicts with a confidence of {SURE} or more; of the others a model is asked, if there is one, and the labels count."
    head = ["dimension", "labeller", "fixes", "alike", "kappa", "sure", "kappa where sure"]
    alike = lambda one: f"{one.kappa.alike:.0%}" if one.kappa.count else "-"
    sure = lambda one: f"{one.sure.count / one.kappa.count:.0%}" if one.kappa.count else "-"
    who = lambda one: [one.dimension, one.labeller, str(one.kappa.count)]
    how = lambda one: [alike(one), str(one.kappa), sure(one), str(one.sure)]
    yield Table(head, [who(one) + how(one) for one in judged])
    for one in (one for one in judged if one.labeller == ALL):
        yield Heading(3, f"{one.dimension}: labels on which all agree (down) and the rules (across)")
        shares = lambda word, one=one: [percent(one.precision.get(word)), percent(one.recall.get(word))]
        rows = [[word, *map(str, row), *shares(word)] for word, row in zip(one.words, one.matrix, strict=True)]
        yield Table(["", *one.words, "precision", "recall"], rows)


def _bars(axes: Any, repos: Mapping[str, Mapping[str, tuple[int, Share]]]) -> None:
    words, height = list(next(iter(repos.values()))), 0.8 / len(repos)
    for i, (repo, table) in enumerate(repos.items()):
        parts = np.array([table[word][1] for word in words])
        places = np.arange(len(words)) + (i - (len(repos) - 1) / 2) * height
        errors = np.abs(parts[:, 1:].T - parts[:, 0])
        look = {"color": COLORS[i % len(COLORS)], "label": repo, "error_kw": {"linewidth": 0.8}}
        axes.barh(places, parts[:, 0], height=height, xerr=errors, **look)
    axes.set(yticks=np.arange(len(words)), yticklabels=words, xlabel="share of fixes")
    axes.invert_yaxis()
    axes.legend(frameon=False)


def _years(axes: Any, years: Mapping[str, Mapping[str, int]], words: Sequence[str]) -> None:
    bottom = np.zeros(len(years))
    for i, word in enumerate(words):
        counts = np.array([row.get(word, 0) for row in years.values()], dtype=float)
        axes.bar(list(years), counts, bottom=bottom, color=COLORS[i % len(COLORS)], label=word, width=0.7)
        bottom += counts
    axes.set(ylabel="fixes")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _small(axes: Any, sizes: Mapping[str, Any], stated: float) -> None:
    for i, (key, label) in enumerate((("all", "fixes"), ("others", "no fixes"))):
        rows = [(name, row[key]) for name, row in sizes.items() if row[key]]
        if not rows:
            continue
        parts = np.array([part for _, part in rows])
        places = np.arange(len(rows)) + (i - 0.5) * 0.3
        errors = np.abs(parts[:, 1:].T - parts[:, 0])
        axes.bar(places, parts[:, 0], width=0.28, yerr=errors, color=COLORS[i], label=label)
    axes.axhline(stated, color="black", linestyle="--", linewidth=1)
    axes.set(xticks=np.arange(len(sizes)), xticklabels=list(sizes), ylabel=f"share of {SMALL} lines or fewer")
    axes.legend(frameon=False)


def _curves(axes: Any, lines: Mapping[str, Sequence[Share]]) -> None:
    for i, (label, key) in enumerate(KINDS):
        parts = np.array(lines[key])
        axes.plot(LINES, parts[:, 0], marker="o", color=COLORS[i], label=label)
        axes.fill_between(LINES, parts[:, 1], parts[:, 2], color=COLORS[i], alpha=0.2)
    axes.set(xscale="log", xticks=LINES, xticklabels=[str(n) for n in LINES])
    axes.set(ylim=(0, 1), xlabel="source lines", ylabel="share")
    axes.legend(frameon=False)
