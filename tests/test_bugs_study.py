"""The study: what is counted, by a file of mined fixes made here; verdicts; the page, the Markdown and the command."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from soli.bugs import report, store
from soli.bugs.agreement import confusion
from soli.bugs.classify import classify
from soli.bugs.labels import ALL, judge_words, write
from soli.bugs.mine import mine, share
from soli.bugs.study import _share_checked, compared, study
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.errors import SoliError
from test_bugs_labels import ONE
from test_bugs_mine import commit, git
from typed import soli


@pytest.fixture
def mined(tmp_path: Path) -> Path:
    """Two histories: three fixes of 2, 20 and 4 lines, two commits that are none."""
    for name, changes in (
        ("a+one", [("Begin", 30), ("Fix a hang", 1), ("Fix a crash", 10), ("Faster", 5)]),
        ("b+two", [("Fix an AttributeError", 2)]),
    ):
        repo = tmp_path / name
        repo.mkdir()
        git(repo, "init", "-q", "-b", "main")
        commit(repo, "Start here", {"x.txt": "x\n"})
        lines = [f"x{i} = 0\n" for i in range(40)]
        (repo / "a.py").write_text("".join(lines))
        for number, (subject, count) in enumerate(changes):
            lines[:count] = [f"x{i} = {number + 1}\n" for i in range(count)]
            commit(repo, subject, {"a.py": "".join(lines)}, f"20{20 + number}-06-01T00:00:00+00:00")
    mine([tmp_path / "a+one", tmp_path / "b+two"], tmp_path / "bugs.db")
    return tmp_path


@pytest.fixture
def classified(mined: Path) -> Path:
    classify([mined / "a+one", mined / "b+two"], mined / "bugs.db")
    return mined


def test_what_is_counted(classified: Path) -> None:
    said = study(classified / "bugs.db")
    assert [(h["repo"], h["fixes"]) for h in said["histories"]] == [("a/one", 2), ("b/two", 1)]
    with sqlite3.connect(classified / "bugs.db") as base:
        sizes = [size for (size,) in base.execute("SELECT source FROM fix")]
    row = said["sizes"]["source"]
    assert row["labels"] is None
    assert row["all"] == share(sum(size <= 10 for size in sizes), 3)
    assert row["repos"]["a/one"] == share(1, 2)
    assert row["before"] == row["all"]  # all of them are of before the study
    assert row["mix"] is None  # other repositories than the study's
    assert said["lines"]["fixes"][2] == row["all"]
    assert sum(count for count, _ in said["words"]["symptom"]["all"].values()) == 3
    assert said["words"]["symptom"]["years"]["2021"] == {"hang": 1}
    assert said["words"]["symptom"]["labels"] is None
    assert sum(sum(row.values()) for row in said["together"].values()) == 3
    assert said["spread"]["fixes"]["one file"][0] > 0
    assert said["syntax"]["fixes"]["count"] == 3
    assert said["syntax"]["others"]["count"] == 2
    assert said["days"] is None
    assert "value changed" in said["syntax"]["fixes"]["shares"]


def test_sizes_are_of_what_messages_call_fixes(classified: Path) -> None:
    """Whatever the rules on syntax say: they know how large a commit is. By labels each commit counts for what it stands for."""
    db = classified / "bugs.db"
    before = study(db)["sizes"]["source"]
    with sqlite3.connect(db) as base:
        base.execute(
            "UPDATE verdict SET word = 'no' WHERE dimension = 'fix' AND (repo, hash) IN (SELECT repo, hash FROM size WHERE source > 10)"
        )
        keys = base.execute("SELECT repo, hash, told, source FROM judged").fetchall()
    labels = [replace(ONE, repo=r, commit=h, sample="fix" if told else "rest", labeller="A") for r, h, told, _ in keys]
    after = study(db, labels, {"fix": 30, "rest": 4})["sizes"]["source"]
    assert after["all"] == before["all"] == share(1, 3)
    assert after["syntax"] == share(1, 1)
    small = [10 if told else 2 for _, _, told, size in keys if size <= 10]
    assert after["labels"][0] == pytest.approx(sum(small) / 34)


def test_a_fix_without_a_source_file_has_no_size(classified: Path) -> None:
    """Of pipelines alone: it is left out of every table of sizes, and that is said."""
    db = classified / "bugs.db"
    with sqlite3.connect(db) as base:
        labels = [replace(ONE, repo=r, commit=h, sample="fix" if told else "rest", labeller="A") for r, h, told in base.execute("SELECT repo, hash, told FROM judged")]  # fmt: skip
    before = study(db, labels, {"fix": 30, "rest": 4})
    commit(classified / "a+one", "Fix the nightly pipeline", {".github/workflows/a.yml": "x\n"})
    commit(classified / "a+one", "A pipeline more", {".github/workflows/b.yml": "x\n"})
    (one,) = mine([classified / "a+one"], db)
    assert (one.fixes, one.small["all"]) == (3, share(1, 2))
    classify([classified / "a+one"], db)
    after = study(db, labels, {"fix": 30, "rest": 4})
    head = git(classified / "a+one", "rev-parse", "HEAD~1")
    more = study(db, [*labels, replace(labels[0], commit=head, sample="fix")], {"fix": 40, "rest": 4})
    assert more["sizes"]["all"]["labels"][0] == pytest.approx(before["sizes"]["all"]["labels"][0])
    for name in ("sizes", "lines", "small", "spread", "syntax"):
        assert after[name] == before[name], name
    assert (before["left"], after["left"]) == ({"fixes": 0, "others": 0}, {"fixes": 1, "others": 1})
    assert "Left out here and below: 1 fixes and 1 others" in report.markdown(after)


def test_shares_bear_a_statement_out_or_not_by_their_intervals() -> None:
    table = lambda **counts: {word: (n, share(n, sum(counts.values()))) for word, n in counts.items()}
    far, near = table(a=800, b=150, c=50), table(a=10, b=9, c=8)
    assert compared("order", ["a", "b", "c"], far)[0] == "agrees"
    assert compared("order", ["c", "b", "a"], far)[0] == "does not agree"
    assert compared("order", ["a", "b", "c"], near)[0] == "agrees, within the intervals"
    assert compared("order", ["b", "a", "c"], near)[0] == "cannot be told: the intervals overlap"
    assert compared("first", ["a", "b"], far)[0] == "agrees"
    assert compared("first", ["c"], far)[0] == "does not agree"
    assert compared("last", ["c"], far)[0] == "agrees"
    assert compared("last", ["a"], far)[0] == "does not agree"
    assert compared("last", ["c"], table(a=1, b=0, c=0))[0] == "cannot be told: the intervals overlap"
    assert compared("present", ["a", "c"], far)[0] == "agrees"
    assert compared("present", ["d"], far)[0] == "does not agree"
    assert "a 80% (77 to 82)" in compared("first", ["a"], far)[1]


def test_a_share_is_looked_for_among_the_ways_to_count() -> None:
    rows = lambda **counts: {name: {"all": share(n, 1000)} for name, n in counts.items()}
    one = {"share": 0.48}
    assert (
        _share_checked(one, rows(source=520, all=420))[0]
        == "it depends on what is counted: more than all, less than source"
    )
    assert _share_checked(one, rows(source=490, all=420))[0] == "agrees by source and not by the others"
    assert _share_checked(one, rows(source=490))[0] == "agrees by source"
    assert _share_checked(one, rows(source=620, all=600)) == (
        "does not agree",
        "by what is counted: all 60% (57 to 63), source 62% (59 to 65)",
    )


def test_rules_are_judged_by_labels(classified: Path) -> None:
    db = classified / "bugs.db"
    with sqlite3.connect(db) as base:
        base.execute("UPDATE verdict SET word = 'crash', confidence = 1 WHERE dimension = 'symptom'")
        keys = base.execute("SELECT repo, hash, subject FROM change WHERE fix").fetchall()
        unsure = next(hash_ for _, hash_, subject in keys if "hang" in subject)
        base.execute("UPDATE verdict SET confidence = 0.59 WHERE dimension = 'symptom' AND hash = ?", (unsure,))
    labels = [
        replace(ONE, repo=repo, commit=hash_, labeller=who, symptom="hang" if "hang" in subject else "crash" if who == "A" or "Attr" in subject else "unknown")
        for repo, hash_, subject in keys
        for who in "AB"
    ]  # fmt: skip
    found = {(one.dimension, one.labeller): one for one in judge_words(labels, db)}
    a = found["symptom", "A"]
    assert a.words == ("crash", "hang")
    assert a.matrix == ((2, 0), (1, 0))
    assert a.precision["crash"] == share(2, 3)
    assert a.recall == {"crash": share(2, 2), "hang": share(0, 1)}
    assert a.kappa.value == pytest.approx(0.0)
    assert (a.sure.count, a.sure.value) == (2, 1.0)
    assert found["symptom", ALL].kappa.count == 2  # where both say one word
    assert confusion(("x", "y"), "xxy", "xyy") == ((1, 1), (0, 1))


def test_the_report_is_written_twice(classified: Path, tmp_path: Path) -> None:
    db, labels = classified / "bugs.db", classified / "labels.csv"
    with sqlite3.connect(db) as base:
        write(
            labels, [replace(ONE, repo=r, commit=h) for r, h in base.execute("SELECT repo, hash FROM change WHERE fix")]
        )
    run = lambda *words: soli("bugs", "report", *words)
    done = run("--db", str(db), "--labels", str(labels), "--out", str(tmp_path / "study"))
    assert done.returncode == 0, done.stderr
    assert "48% of the fixes are 10 lines or fewer." in done.stdout
    text = (tmp_path / "study" / "study.md").read_text()
    page = (tmp_path / "study" / "study.html").read_text()
    told = json.loads((tmp_path / "study" / "study.json").read_text())
    assert told["sizes"]["source"]["count"] == 3
    assert {one["dimension"] for one in told["judged"]} == set(DIMENSIONS)
    for words in ("Which symptoms do the bugs have?", "git alone cannot tell", "labels on which all agree"):
        assert words in text
        assert words in page
    assert page.count("<svg") == 10
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://matplotlib.org", "").replace("http://purl.org", "").replace("http://creativecommons.org", "")  # fmt: skip
    for line in text.splitlines():
        assert "nan" not in line.split()


def test_what_was_not_classified_is_refused(mined: Path) -> None:
    with pytest.raises(SoliError, match="not all commits in this file are classified"):
        study(mined / "bugs.db")
    with pytest.raises(SoliError, match="no such file"):
        study(mined / "none.db")
    with store.opened(mined / "empty.db", made=True):
        pass
    with pytest.raises(SoliError, match="no fix of a bug"):
        study(mined / "empty.db")


def test_what_other_rules_classified_is_refused(classified: Path) -> None:
    with sqlite3.connect(classified / "bugs.db") as base:
        base.execute("UPDATE verdict SET version = 'others' WHERE repo = 'b/two'")
    with pytest.raises(SoliError, match="2 sets of rules"):
        study(classified / "bugs.db")


def test_where_every_commit_is_a_fix_there_is_no_control_group(classified: Path) -> None:
    """What is not known is not written as a number; labels of none of them are refused."""
    with sqlite3.connect(classified / "bugs.db") as base:
        base.execute(f"UPDATE change SET fix = 1 WHERE {store.CODE}")
    said = study(classified / "bugs.db")
    assert said["sizes"]["source"]["others"] is None
    assert "nan" not in report.markdown(said)
    assert report.page(said).count("<svg") == 10
    with pytest.raises(SoliError, match="none of these labels is of a fix that this file has"):
        judge_words([replace(ONE, commit="9" * 40)], classified / "bugs.db")


def test_markdown_and_page_say_the_same(classified: Path) -> None:
    said = study(classified / "bugs.db")
    text, page = report.markdown(said), report.page(said)
    for block in report.blocks(said):
        if isinstance(block, report.Table):
            assert " | ".join(block.titles) in text
            assert all(f">{row[0]}</td>" in page for row in block.rows)
