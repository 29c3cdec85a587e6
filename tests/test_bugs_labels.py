"""Labels: read and written alike, all that is wrong at once, how labellers agree, how good a selection is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from soli.bugs.labels import Label, draw, pairs, read, selection, write
from soli.core.errors import SoliError
from typed import soli

ONE = Label("a/b", "1" * 40, "fix", "A", "a person", "2026-01-01", "yes", "crash", "API misuse", "call", "training", "", "it says, \"so\"")  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    labels = [ONE, replace(ONE, labeller="B", fix="no", symptom="", cause="", strategy="", stage="")]
    write(tmp_path / "labels.csv", labels[::-1])
    assert read(tmp_path / "labels.csv") == labels


def test_all_that_is_wrong_is_said(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    write(path, [ONE, ONE, replace(ONE, commit="2", fix="perhaps"), replace(ONE, commit="3", symptom="sad"), replace(ONE, commit="4", cause="", sample="x")])  # fmt: skip
    with pytest.raises(SoliError) as caught:
        read(path)
    said = str(caught.value)
    for text in ("labels this commit twice", "'fix' says none of yes, no, unsure", "'symptom' says none of crash", "'cause' says none of", "'sample' says none of"):  # fmt: skip
        assert text in said
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SoliError, match="no table of labels"):
        read(path)
    with pytest.raises(SoliError, match="cannot be read"):
        read(tmp_path / "none.csv")


def test_labellers_are_compared_where_both_have_labels() -> None:
    number = lambda i: str(i) * 40
    first = [replace(ONE, commit=number(i), symptom=word) for i, word in enumerate(("crash", "hang", "crash", "hang"))]
    second = [replace(one, labeller="B") for one in first[:3]]
    second[1] = replace(second[1], symptom="crash")
    second.append(replace(ONE, commit=number(3), labeller="B", fix="no", symptom="", cause="", strategy="", stage=""))
    (found,) = pairs([*first, *second])
    assert (found.first, found.second, found.fix.count, found.fix.alike) == ("A", "B", 4, 0.75)
    assert found.dimensions["symptom"].count == 3
    assert found.dimensions["symptom"].alike == pytest.approx(2 / 3)
    assert [a.commit[0] for a, _ in found.differ] == ["1", "3"]
    assert found.fix.told.endswith("75% of 4 alike")
    (none,) = pairs([first[0], second[1]])
    assert (none.fix.told, str(none.fix)) == ("none to compare", "-")


def test_a_selection_is_judged_by_both_samples() -> None:
    """Of 100 chosen half are fixes, of 900 rejected a tenth: 50 found and 90 missed. Other rules are judged by the same labels."""
    yes = lambda sample, i, word, who="A": replace(ONE, sample=sample, commit=f"{sample}{i}", fix=word, labeller=who)
    labels = [yes("fix", i, "yes" if i < 5 else "no") for i in range(10)] + [yes("rest", i, "yes" if i < 1 else "no") for i in range(10)]  # fmt: skip
    size = {"fix": 100, "rest": 900}
    chosen = {(ONE.repo, f"fix{i}") for i in range(10)}
    found = selection(labels, size, chosen)
    assert (found.precision[0], found.recall[0], found.fixes) == (0.5, pytest.approx(50 / 140), 6)
    assert found.precision[1] < 0.5 < found.precision[2]
    assert found.recall[1] < 50 / 140 < found.recall[2]
    # Two of the chosen that are none left out, and a rejected one that is, taken in, which stands for 90.
    other = chosen - {(ONE.repo, "fix8"), (ONE.repo, "fix9")} | {(ONE.repo, "rest0")}
    found = selection(labels, size, other)
    assert (found.precision[0], found.recall[0]) == (pytest.approx(140 / 170), 1.0)
    more = [*labels, yes("fix", 0, "no", "B"), yes("fix", 9, "yes", "B")]
    assert selection(more, size, chosen).precision[0] == pytest.approx(0.4)
    assert selection(more, size, chosen, strict=False).precision[0] == pytest.approx(0.6)


def test_the_interval_of_a_selection_holds() -> None:
    """Drawn from 2,000 commits whose precision (0.75) and recall (0.6) are known, in 95 of 100 times or nearly."""
    import numpy as np

    random = np.random.default_rng(1)
    inside = np.zeros(2)
    for _ in range(60):
        labels = [replace(ONE, sample=s, commit=f"{s}{i}", fix="yes" if random.random() < p else "no") for s, p in (("fix", 0.75), ("rest", 0.2)) for i in range(100)]  # fmt: skip
        found = selection(labels, {"fix": 800, "rest": 2000}, {(ONE.repo, f"fix{i}") for i in range(100)})
        inside += [low <= truth <= high for truth, (_, low, high) in ((0.75, found.precision), (0.6, found.recall))]
    assert (inside >= 53).all()


def test_what_is_drawn_is_drawn_again(tmp_path: Path) -> None:
    from soli.bugs import store

    with store.opened(tmp_path / "bugs.db", made=True) as base:
        base.execute("INSERT INTO history VALUES ('a/b', '', 0, '')")
        for i in range(40):
            rule = ("fix", "silent", "merge")[i % 3]
            base.execute(
                "INSERT INTO change VALUES ('a/b', ?, 0, 0, '', '', ?, ?, NULL)", (f"{i:040d}", rule == "fix", rule)
            )
            base.execute("INSERT INTO file VALUES ('a/b', ?, 'a.py', '', 'source', 1, 0)", (f"{i:040d}",))
        first, size = draw(base, 7, {"fix": 5, "rest": 4}, ["a/b"])
        assert draw(base, 7, {"fix": 5, "rest": 4}, ["a/b"])[0] == first != draw(base, 8, {"fix": 5, "rest": 4}, ["a/b"])[0]
        assert size == {"fix": 14, "rest": 13}
        hashes = {name: {hash_ for _, hash_ in rows} for name, rows in first.items()}
        assert {int(h) % 3 for h in hashes["fix"]} == {0}
        assert {int(h) % 3 for h in hashes["rest"]} == {1}
        assert draw(base, 7, {"fix": 0, "rest": 0}, ["c/d"])[1] == {"fix": 0, "rest": 0}
        with pytest.raises(SoliError, match="not so many commits"):
            draw(base, 7, {"fix": 15, "rest": 4}, ["a/b"])


LABELS = Path(__file__).parent.parent / "benchmarks/bugs"


def test_the_labels_that_are_kept() -> None:
    """150 fixes at the least, by three labellers, with who made each; none that was read while the rules were made."""
    labels = read(LABELS / "labels.csv")
    by = {who: [one for one in labels if one.labeller == who] for who in ("A", "B", "C")}
    assert len({(one.repo, one.commit) for one in labels}) == 460
    for who in by:
        assert {(one.repo, one.commit) for one in by[who]} == {(one.repo, one.commit) for one in labels}
        assert sum(one.fix == "yes" and one.sample == "fix" for one in by[who]) >= 150
    assert all(one.made_by and one.date and (one.why or (one.labeller == "C" and one.fix != "yes")) for one in labels)
    known = set((LABELS / "read.txt").read_text().split())
    assert not known & {one.commit for one in labels}
    assert json.loads((LABELS / "sample.json").read_text())["drawn"] == {"fix": 200, "rest": 260}
    development = read(LABELS / "development.csv")
    assert not {one.commit for one in development} & {one.commit for one in labels}


def test_agree_as_typed(tmp_path: Path) -> None:
    run = lambda *words: soli("bugs", "agree", *words)
    done = run(str(LABELS / "labels.csv"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "A and B: 460 commits" in done.stdout
    assert 0.5 < json.loads(run(str(LABELS / "labels.csv"), "--json").stdout)["pairs"][0]["fix"]["value"] <= 1
    lacking = run(
        str(LABELS / "labels.csv"), "--sample", str(LABELS / "sample.json"), "--db", str(tmp_path / "none.db")
    )
    assert lacking.returncode == 2
    assert "there is no such file" in lacking.stderr
    assert not (tmp_path / "none.db").exists()
    assert "--db FILE" in run(str(LABELS / "labels.csv"), "--sample", "x").stderr
    alone = tmp_path / "alone.csv"
    alone.write_text("".join(line for line in (LABELS / "labels.csv").open() if ",A," in line or line.startswith("repo,")), encoding="utf-8")
    assert run(str(alone)).stdout == "one labeller, A, of 460 commits: agreement is of two\n"
