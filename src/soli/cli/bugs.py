"""`soli bugs`: what goes wrong in distributed training, from the fixes of real frameworks."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer

from soli.cli.options import AsJson
from soli.cli.tables import show as show_table
from soli.core.errors import SoliError, needing

if TYPE_CHECKING:
    from soli.bugs.mine import Mined

Clones = Annotated[list[Path], Argument(help="Whole clones, bare or not; nothing in them is run.", show_default=False)]
Database = Annotated[Path, Option(help="The SQLite file: soli bugs mine writes it, classify adds words.")]
Sample = Annotated[Path | None, Option(help="What the labelled commits were drawn from, as JSON.")]

app = Typer(help="Bugs of distributed training, from the fixes of real frameworks.", no_args_is_help=True)


@app.command("mine")
def mine(
    repos: Clones, out: Annotated[Path, Option(help="The SQLite file; what is in it stays.")] = Path("bugs.db"),
    rules: Annotated[Path | None, Option(help="Rules of selection, as soli/bugs/selection.toml has them.")] = None,
    issues: Annotated[list[Path] | None, Option(help="What soli bugs export wrote.")] = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Read git histories: every commit, whether it fixes a bug, why or why not, and how large it is."""
    from soli.bugs import github
    from soli.bugs.mine import mine as read

    found = read(repos, out, rules)
    joined = [github.load(out, path) for path in issues or []]
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    _show(found)
    for repo, known, whole in joined:
        print(f"{repo}: {whole} merged pull requests, of {known} the commit is in the history")
    print(f"Kept in {out}.")


@app.command("classify")
def classify(
    repos: Clones,
    db: Database = Path("bugs.db"),
    rules: Annotated[Path | None, Option(help="Rules, as soli/bugs/classification.toml has them.")] = None,
    endpoint: Annotated[str, Option(help="An OpenAI-compatible one, such as http://127.0.0.1:8000/v1; its key is in OPENAI_API_KEY.")] = "",
    model: Annotated[str, Option(help="To ask there where the rules are not sure.")] = "",
    at_most: Annotated[int, Option(help="Commits to ask the model of.", min=1)] = 1000,
    as_json: AsJson = False,
) -> None:
    """What each fix is of: symptom, cause, strategy, stage; by rules on message and changed syntax, then by a model if there is one."""
    with needing("reading what commits change needs packages that are not installed", "bugs"):
        from soli.bugs import classify as of
    from soli.bugs.endpoint import Endpoint

    if model and not endpoint:
        raise SoliError("a model is asked at an endpoint", fix="--endpoint http://127.0.0.1:8000/v1")
    asked = Endpoint(endpoint, model, os.environ.get("OPENAI_API_KEY", "")) if endpoint else None
    found = of.classify(repos, db, rules, asked, at_most)
    if found.said:
        said = f"the model at {endpoint} was not asked any more, and the rules' words stand: {found.said}"
        print(f"soli: {said}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    print(
        f"{found.fixes} fixes in {db}; {found.looked} commits were looked at now. By their syntax {found.taken} are fixes that their "
        f"messages do not call so, and {found.dropped} are none."
    )
    if found.unread:
        print(f"{found.unread} fixes change no Python, C++ or CUDA: their words are by message and files alone.")
    for dimension, counts in found.words.items():
        shares = ", ".join(f"{word} {count}" for word, count in counts.items())
        print(f"{dimension}: {shares}; not sure of {found.unsure.get(dimension, 0)}")
    if asked:
        print(f"{model} said words for {found.asked} fixes; {found.nonsense} of its answers said nothing.")


@app.command("export")
def export(
    repo: Annotated[str, Argument(help="Such as deepspeedai/DeepSpeed.", show_default=False)],
    out: Annotated[Path, Option(help="The JSON lines; an export that was interrupted goes on in them.")],
    api: Annotated[str, Option(help="Of another GitHub.", show_default=False)] = "",
) -> None:
    """Merged pull requests and the issues that they close, from GitHub; needs GITHUB_TOKEN."""
    from soli.bugs import github

    count = github.export(repo, out, os.environ.get("GITHUB_TOKEN", ""), api or github.API)
    print(f"{count} merged pull requests of {repo} in {out}; soli bugs mine ... --issues {out} takes them in.")


@app.command("show")
def show(name: Annotated[str, Argument(help="Such as wrong-group; left out: all of them.")] = "", as_json: AsJson = False) -> None:
    """A mechanism of bugs: what it is, how it shows, how it was fixed, and in which real commits."""
    from soli.bugs.catalogue import mechanism, mechanisms

    chosen = [mechanism(name)] if name else list(mechanisms().values())
    if as_json:
        print(json.dumps([asdict(one) for one in chosen], indent=1, default=str))
    elif not name:
        rows = ([one.name, one.what, f"{len(one.fixes)} fix{'es' * (len(one.fixes) > 1)}"] for one in chosen)
        show_table(["", "", ""], [], rows, pad_edge=False, show_header=False)
    else:
        one = chosen[0]
        print(f"{one.name}: {one.what}\n")
        for word, text in (("shows", one.shows), ("fixed", one.fixed), ("found by", one.found)):
            print(f"  {word:<9} {text}")
        print(f"  {'is':<9} {one.symptom}, by {one.cause}, mended by {one.strategy}\n")
        for fix in one.fixes:
            print(f"  {fix.date} {fix.repo} {fix.commit[:10]} ({fix.lines} lines) {fix.subject}")


@app.command("report")
def report(
    out: Annotated[Path, Option(help="A folder: study.html, study.md, study.json.", show_default=False)], db: Database = Path("bugs.db"),
    labels: Annotated[Path | None, Option(help="Labels, to stand beside the rules and to judge them.")] = None, sample: Sample = None,
) -> None:  # fmt: skip
    """The four questions of arXiv 2506.10426 asked of the mined fixes, beside what it states; with commits that are no fixes."""
    with needing("the report needs a package that is not installed", "bugs"):
        from soli.bugs import report as written
    from soli.bugs import labels as of
    from soli.bugs.study import study

    if out.exists() and not out.is_dir():
        raise SoliError("the report is a folder's", got=f"{out}, a file", fix="name a folder with --out")
    if sample and not labels:
        raise SoliError("a sample says what labels stand for, and there are none", fix="--labels FILE")
    rows = of.read(labels) if labels else []
    said = study(db, rows, of.population(sample) if sample else None)
    judged = of.judge_words(rows, db) if rows else []
    selected = of.judged(rows, sample, db) if rows and sample else {}
    texts = {
        "study.md": written.markdown(said, judged, selected),
        "study.html": written.page(said, judged, selected),
        "study.json": _json({**said, "judged": judged, "selection": selected}) + "\n",
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    for question in said["questions"]:
        print(question["name"])
        for one in question["statements"]:
            print(f"  {one['text']} {one['verdict'].capitalize()}.")
    print(f"In {out}: study.html, study.md, study.json.")


@app.command("label")
def label(
    repos: Clones, labeller: Annotated[str, Option(help="Who labels.", show_default=False)], db: Database = Path("bugs.db"),
    labels: Annotated[Path, Option(help="The CSV file, everybody's.")] = Path("labels.csv"),
    sample: Annotated[Path, Option(help="The commits that were drawn; made if there is none.")] = Path("sample.json"),
    fixes: Annotated[int, Option(help="How many to draw of the fixes.", min=0)] = 150,
    rest: Annotated[int, Option(help="And of what the rules rejected though code was changed.", min=0)] = 0,
    seed: Annotated[int, Option(help="Of the draw.")] = 0, port: Annotated[int, Option(help="0: any that is free.", min=0, max=65535)] = 0,
) -> None:  # fmt: skip
    """A page on this machine to label commits on, for two people or more; soli bugs agree says how they agree."""
    with needing("the page needs packages that are not installed", "bugs"):
        from soli.bugs import label_page
        from soli.bugs import labels as rows
        from soli.bugs import sample as of
    if not labeller.strip():
        raise SoliError("a labeller has a name", got=repr(labeller), fix="--labeller NAME: what two people say is compared")
    if labels.exists():
        rows.read(labels)  # what is wrong with it is said here, and not on the page
    before = sample.exists()
    said = of.drawn(sample, db, seed, {"fix": fixes, "rest": rest}, repos)
    if before:
        print(f"The commits that {sample} has: --fixes, --rest and --seed draw into another --sample.")
    label_page.serve(of.items(said, db, repos), labels, labeller, port)


@app.command("agree")
def agree(
    labels: Annotated[Path, Argument(help="The CSV file.", show_default=False)],
    sample: Sample = None,
    db: Annotated[Path | None, Option(help="What was mined and classified: its rules are judged by the labels.")] = None,
    as_json: AsJson = False,
) -> None:
    """How labellers agree, where they do not, and how good the rules are that chose the fixes and gave them words."""
    from soli.bugs import labels as of
    from soli.bugs.agreement import bounded

    if sample is not None and db is None:
        raise SoliError("rules are judged by what was drawn and what they chose", fix="--db FILE, which soli bugs mine wrote")
    rows = of.read(labels)
    pairs = of.pairs(rows)
    judged = of.judge_words(rows, db) if db is not None else []
    selected = of.judged(rows, sample, db) if sample is not None and db is not None else {}
    if as_json:
        print(_json({"pairs": pairs, "judged": judged, **({"selection": selected} if selected else {})}))
        return
    if not pairs:
        print(f"one labeller, {rows[0].labeller}, of {len({(row.repo, row.commit) for row in rows})} commits: agreement is of two")
    for pair in pairs:
        print(f"{pair.first} and {pair.second}: {pair.fix.count} commits, {len(pair.differ)} labelled differently")
        for name, one in {"is a fix": pair.fix, **pair.dimensions}.items():
            print(f"  {name:<9} {one.told}")
        for a, b in pair.differ:
            said = ((name, getattr(a, name), getattr(b, name)) for name in ("fix", *of.DIMENSIONS))
            words = "; ".join(f"{name} {one or '-'} / {other or '-'}" for name, one, other in said if one != other)
            print(f"    {a.repo} {a.commit[:10]} {words}")
    for verdict in judged:
        shares = f"{verdict.kappa.told}; where the rules are sure {verdict.sure}, of {verdict.sure.count}"
        print(f"the words for {verdict.dimension} by {verdict.labeller}: {shares}")
    for name, rules in selected.items():
        shares = f"precision {bounded(rules.precision)}, recall {bounded(rules.recall)}"
        print(f"the rules, a fix if {name}: {shares}; {rules.fixes} fixes among the labelled commits")


def _json(said: Any) -> str:
    """JSON, which has no word for what is no number: null."""
    return json.dumps(json.loads(json.dumps(said, default=asdict), parse_constant=lambda _: None), indent=1)


def _show(found: list[Mined]) -> None:
    from soli.bugs.agreement import percent

    rows = ([one.repo, str(one.commits), str(one.new), str(one.fixes), f"{one.median:.0f}"] for one in found)
    show_table([""], ("commits", "new", "fixes", "lines, median"), rows, pad_edge=False)
    for one in found:
        if one.gone:
            print(f"{one.repo}, commits that the history has no more, taken out with what was said of them: {one.gone}")
        shares = ", ".join(f"{definition} {percent(part)}" for definition, part in one.small.items())
        print(f"{one.repo}, of 10 lines or fewer by what is counted: {shares}")
        for word, by in (("fixes", one.selected), ("no fixes", one.rejected)):
            print(f"{one.repo}, {word} by rule: " + ", ".join(f"{rule} {count}" for rule, count in by.items()))
