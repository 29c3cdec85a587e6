"""`soli bugs classify`: rules that are data, verdicts that are kept, and a model that may be down or talk nonsense."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from answering import answering
from soli.bugs import store
from soli.bugs.classification import FIX, PLACES, Hint, Hints, classifier, decided, likely, places, verdict
from soli.bugs.classify import classify
from soli.bugs.endpoint import Endpoint, Nonsense, instructions, words
from soli.bugs.mine import mine
from soli.bugs.syntax import Edit
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.errors import SoliError
from test_bugs_mine import commit, git
from typed import soli

UNKNOWN = "\n".join(f'[{name}."unknown"]\nprior = 0.0' for name in DIMENSIONS)
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks" / "bugs"))

import fit  # noqa: E402

RIGHT = {"symptom": "hang", "cause": "communication", "strategy": "ordering", "stage": "training"}


@pytest.fixture
def mined(tmp_path: Path) -> tuple[Path, Path]:
    """A history of four fixes and a change that is none, and what was mined of it."""
    repo = tmp_path / "owner+name"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    commit(repo, "Add a step", {"train.py": "def step(x):\n    return x.sum()\n"})
    commit(
        repo, "Fix a deadlock: wait for the send", {"train.py": "def step(x):\n    work.wait()\n    return x.sum()\n"}
    )
    commit(
        repo,
        "Fix AttributeError when x is None",
        {"train.py": "def step(x):\n    work.wait()\n    if x is None:\n        return 0\n    return x.sum()\n"},
    )
    commit(repo, "Fix the build with CUDA 12", {"setup.py": "flags = ['-std=c++17']\n"})
    commit(repo, "Fix", {"other.py": "x = 1\n"})
    commit(repo, "Faster", {"other.py": "x = 2\n"})
    mine([repo], tmp_path / "bugs.db")
    return repo, tmp_path / "bugs.db"  # fmt: skip


def said(db: Path, query: str) -> list[tuple]:
    with sqlite3.connect(db) as base:
        return base.execute(query).fetchall()


def word(db: Path, subject: str, dimension: str) -> str:
    ((found,),) = said(db, f"SELECT word FROM class JOIN change USING (repo, hash) WHERE subject LIKE '{subject}%' AND dimension = '{dimension}'")  # fmt: skip
    return str(found)


def test_the_rules_are_of_the_taxonomy_and_every_word_has_one() -> None:
    made = classifier()
    for dimension, hints in {**made.dimensions, "fix": made.fix}.items():
        assert list(hints.prior) == list({**DIMENSIONS, "fix": FIX}[dimension])
        assert np.isfinite(list(hints.prior.values())).all()
        assert all(hint.weight >= 0 and hint.where in PLACES for hint in hints.hints)


def test_fixes_get_words_with_a_confidence_and_evidence(mined: tuple[Path, Path]) -> None:
    repo, db = mined
    found = classify([repo], db)
    assert found.looked == 6  # whatever speaks of no fault is looked at too
    assert (found.taken, found.dropped) == (0, 0)
    assert found.fixes == 4
    assert word(db, "Fix a deadlock", "symptom") == "hang"
    assert word(db, "Fix AttributeError", "symptom") == "crash"
    assert word(db, "Fix AttributeError", "strategy") == "conditional logic"
    assert word(db, "Fix the build", "symptom") == "build failure"
    assert sum(found.words["symptom"].values()) == 4
    ((evidence, confidence),) = said(db, "SELECT evidence, confidence FROM verdict JOIN change USING (repo, hash) WHERE subject LIKE 'Fix Attr%' AND dimension = 'strategy'")  # fmt: skip
    assert any("x is None" in one for one in json.loads(evidence))
    assert 0.3 < confidence <= 1
    edited = said(db, "SELECT what, count FROM edited JOIN change USING (repo, hash) WHERE subject LIKE 'Fix Attr%'")
    assert ("condition added", 1) in edited
    others = said(db, "SELECT count(DISTINCT hash) FROM edited JOIN change USING (repo, hash) WHERE NOT fix")
    assert others == [(2,)]  # the first and Faster: the control group


def test_a_rerun_classifies_what_is_new(mined: tuple[Path, Path], tmp_path: Path) -> None:
    repo, db = mined
    classify([repo], db)
    assert classify([repo], db).looked == 0
    commit(repo, "Fix a hang", {"other.py": "x = 3\n"})
    mine([repo], db)
    assert classify([repo], db).looked == 1
    rules = tmp_path / "rules.toml"
    rules.write_text(
        f'{UNKNOWN}\n[fix]\nleast = 0.5\n[fix."yes"]\nprior = 0.0\nrules = [{{ name = "faster", subject = "^Faster", weight = 1.0 }}]\n[fix."no"]\nprior = 0.5'
    )
    found = classify([repo], db, rules)
    assert found.looked == 7  # other rules: all again
    assert (found.fixes, found.taken, found.dropped) == (1, 1, 5)
    assert found.words["symptom"] == {"unknown": 1}
    assert said(db, "SELECT subject FROM fix") == [("Faster",)]
    assert len(said(db, "SELECT * FROM other")) == 6


def test_other_rules_of_selection_and_other_histories(mined: tuple[Path, Path], tmp_path: Path) -> None:
    """What was decided by a message is decided again where its rule is another one; a history that is not given keeps its words."""
    repo, db = mined
    second = tmp_path / "other+name"
    second.mkdir()
    git(second, "init", "-q", "-b", "main")
    commit(second, "Fix a crash", {"a.py": "x = 1\n"})
    mine([second], db)
    classify([repo, second], db)
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[kind]]\nname = "source"\npath = "py$"\n[[rule]]\nname = "all"\nwhere = "subject"\nmatch = ""\nfix = true\nwhy = "x"\n'
    )
    mine([repo], db, rules)
    assert said(db, "SELECT DISTINCT repo FROM verdict") == [("other/name",)]
    assert classify([repo], db).looked == 6
    assert len(said(db, "SELECT DISTINCT repo FROM class")) == 2


def test_a_verdict_is_the_softmax_of_the_weights(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rest = "\n".join(f'[{name}."unknown"]\nprior = 0.0' for name in list(DIMENSIONS)[1:])
    rules.write_text(
        '[symptom."hang"]\nprior = 0.5\nrules = [{ name = "waits", subject = "waits?", weight = 1.5 }, { name = "two", edits = "^call added", weight = 0.25 }]\n'
        f'[symptom."crash"]\nprior = 1.0\n{rest}\n[fix]\nleast = 0.6\n[fix."yes"]\nprior = 0.3\n[fix."no"]\nprior = 0.0'
    )
    made = classifier(rules)
    hints = made.dimensions["symptom"]
    of = places("It waits", "", [("source", "a.py", 3)], [Edit("call added", "wait ()", 2)])
    found = verdict(hints, of)
    assert (found.word, found.evidence) == ("hang", ("waits: waits", "two: call added: wait ()"))
    assert found.confidence == pytest.approx(np.exp(2.25) / (np.exp(2.25) + np.exp(1.0)))
    assert likely(hints, np.array([[0.0, 0.0]]))[0].argmax() == 0  # crash, by its prior: the first word
    assert decided(made, of).word == "no"  # 0.57 is not 0.6
    assert decided(replace(made, least=0.55), of).word == "yes"
    assert of["size"] == "3 lines, 1 files"
    assert of["paths"] == "source a.py"
    assert of["said"] == "; source; few edits; It waits"
    many = places("Fix it", "", [("test", "t.py", 3), ("source", "a.py", 3)], [Edit("call added", "wait ()", 2)] * 7, "tests")  # fmt: skip
    assert many["said"] == "tests; source test; many edits; Fix it"
    assert places("Fix it", "", [("ci", "a.yml", 3)], [])["said"] == "; ci; no edits; Fix it"


def test_a_commit_that_counts_twice_is_fitted_as_two() -> None:
    """The weights that benchmarks/bugs/fit.py gives rules are those of the same labels, repeated."""
    hints = Hints(
        {"yes": 0.0, "no": 0.0},
        tuple(Hint(word, word, "subject", re.compile("x"), 1.0) for word in ("yes", "no", "yes")),
    )
    random = np.random.default_rng(0)
    matched, true, heavy = (
        random.integers(2, size=(60, 3)).astype(float),
        random.integers(2, size=60),
        random.integers(1, 5, size=60),
    )
    one = fit.fitted(hints, matched, true, heavy.astype(float))
    two = fit.fitted(hints, matched.repeat(heavy, axis=0), true.repeat(heavy), np.ones(heavy.sum()))
    assert [hint.weight for hint in one.hints] == pytest.approx(
        [hint.weight for hint in two.hints], abs=0.011
    )  # two decimals are kept
    assert list(one.prior.values()) == pytest.approx(list(two.prior.values()), abs=0.011)
    assert any(hint.weight > 0 for hint in one.hints)


def test_two_clones_of_one_name_are_refused(mined: tuple[Path, Path], tmp_path: Path) -> None:
    repo, db = mined
    twin = tmp_path / "elsewhere" / "owner+name"
    twin.mkdir(parents=True)
    with pytest.raises(SoliError, match="two of these histories have one name"):
        classify([repo, twin], db)


def test_all_that_is_wrong_with_rules_is_said(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[symptom."sad"]\nprior = 0\n[symptom."crash"]\nprior = 0\nrules = [{ name = "a", subject = "(" }, { name = "b" }, { name = "c", subject = "x", weight = "y" }, { name = "d", subject = "x", wieght = 2 }]\n[symptom."hang"]\nrules = []\n'
    )
    with pytest.raises(SoliError) as caught:
        classifier(rules)
    for text in ("symptom has no such word", "a: this is no pattern", "b: a rule has a name, a weight, and looks in one place", "symptom hang: it has a prior", "fix: 'least' is a probability", "c: a weight is a number", "nothing is said of a dimension"):  # fmt: skip
        assert text in str(caught.value)
    rules.write_text("[")
    with pytest.raises(SoliError, match="is not TOML"):
        classifier(rules)


def test_a_history_without_python_is_classified_by_its_messages(tmp_path: Path) -> None:
    repo = tmp_path / "a+go"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    commit(repo, "Begin", {"main.go": "package main\n"})
    commit(repo, "Fix a deadlock: it hangs for ever", {"main.go": "package other\n"})
    mine([repo], tmp_path / "bugs.db")
    found = classify([repo], tmp_path / "bugs.db")
    assert found.fixes == found.unread > 0
    assert said(tmp_path / "bugs.db", "SELECT DISTINCT what FROM edited") == [("",)]


def test_what_was_not_mined_is_refused(mined: tuple[Path, Path], tmp_path: Path) -> None:
    repo, db = mined
    with pytest.raises(SoliError, match="no such file"):
        classify([repo], tmp_path / "none.db")
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q", "-b", "main")
    commit(other, "Begin", {"a.py": "x = 1\n"})
    with pytest.raises(SoliError, match="were not mined"):
        classify([repo, other], db)


# --- a model ----------------------------------------------------------------------------------------------


@contextmanager
def model(answer: Callable[[dict], tuple[int, str]]) -> Iterator[tuple[str, list[dict]]]:
    """An endpoint on this machine: what it answers to each request, and the requests that came."""

    def said(request: dict) -> tuple[int, dict[str, str], str]:
        status, text = answer(request)
        return status, {"Content-Type": "application/json"}, text

    with answering(said) as (url, asked):
        yield f"{url}/v1", asked


def message(text: str) -> tuple[int, str]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return 200, json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


def test_a_model_is_asked_where_rules_are_not_sure(mined: tuple[Path, Path]) -> None:
    repo, db = mined
    with model(lambda _: message(f"Sure! {json.dumps({**RIGHT, 'why': 'it waits'})}")) as (url, asked):
        found = classify([repo], db, endpoint=Endpoint(url, "small", "secret"))
        ((unsure,),) = said(
            db,
            "SELECT count(DISTINCT hash) FROM verdict WHERE by = 'rules' AND dimension != 'fix' AND confidence < 0.6",
        )
        assert 0 < unsure == found.asked == len(asked)
        assert (asked[0]["model"], asked[0]["key"], asked[0]["path"]) == (
            "small",
            "Bearer secret",
            "/v1/chat/completions",
        )
        shown = "\n".join(one["content"] for one in asked[0]["messages"])
        assert "+++ b/" in shown
        assert "missing precondition" in shown
        for dimension, right in RIGHT.items():
            rows = said(db, f"SELECT word, by, confidence FROM class WHERE dimension = '{dimension}'")
            assert len(rows) == 4
            assert all((got == right) if by == "model" else confidence >= 0.6 for got, by, confidence in rows)
        assert classify([repo], db, endpoint=Endpoint(url, "small")).asked == 0  # asked once


def test_an_answer_that_drips_is_not_waited_for(mined: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of it is quick, and all of it is not."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Drip(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(100):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return
                if over.wait(0.1):
                    return

        def log_message(self, *words: object) -> None:
            pass

    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Drip)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("soli.bugs.endpoint.LONGEST", 1.0)
    try:
        found = classify([mined[0]], mined[1], endpoint=Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "m"))
    finally:
        over.set()
        server.shutdown()
        server.server_close()
    assert "no whole answer in 1 s" in found.said


def test_what_was_classified_before_an_interruption_is_kept(
    mined: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, db = mined
    monkeypatch.setattr("soli.bugs.classify.batched", lambda todo: [[one] for one in todo])
    kept = store.edited
    calls: list[str] = []

    def interrupted(base: object, repo: str, hash_: str, done: object) -> None:
        calls.append(hash_)
        if len(calls) == 3:
            raise KeyboardInterrupt
        kept(base, repo, hash_, done)

    monkeypatch.setattr(store, "edited", interrupted)
    with pytest.raises(KeyboardInterrupt):
        classify([repo], db)
    assert said(db, "SELECT count(DISTINCT hash) FROM verdict") == [(2,)]
    monkeypatch.setattr(store, "edited", kept)
    assert classify([repo], db).looked == 4


def test_an_endpoint_that_is_down_leaves_the_rules_words(mined: tuple[Path, Path]) -> None:
    repo, db = mined
    found = classify([repo], db, endpoint=Endpoint("http://127.0.0.1:9/v1", "m"))
    assert (found.asked, found.fixes) == (0, 4)
    assert found.said.startswith("it does not answer: ")
    assert {by for (by,) in said(db, "SELECT by FROM verdict")} == {"rules"}


@pytest.mark.parametrize(
    "text",
    [
        "I do not know",
        '{"symptom": "sad"}',
        "[1]",
        json.dumps({**RIGHT, "cause": "hang"}),
        "{" * 5000,
        '{"a":' + "[" * 5000,
        '{"symptom": ["crash"]}',
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_nonsense_is_counted_and_not_kept(mined: tuple[Path, Path], text: str) -> None:
    repo, db = mined
    with model(lambda _: message(text)) as (url, asked):
        found = classify([repo], db, endpoint=Endpoint(url, "m"))
    assert found.nonsense == len(asked) > 0
    assert found.asked == 0
    assert {by for (by,) in said(db, "SELECT by FROM verdict")} == {"rules"}
    with pytest.raises(Nonsense):
        words(text)


def test_a_long_answer_counts_by_its_end() -> None:
    with pytest.raises(Nonsense, match="of 320000 characters the last 20000 were looked through"):
        words("{" * 320_000)
    assert words("{" * 320_000 + json.dumps(RIGHT))[0] == RIGHT


def test_half_a_character_is_kept_as_the_sign_for_it(mined: tuple[Path, Path]) -> None:
    """JSON may have one, and UTF-8 has not: in a model's reason, and in what GitHub says."""
    repo, db = mined
    with model(lambda _: message(json.dumps({**RIGHT, "why": "half \ud83d"}))) as (url, _):
        assert classify([repo], db, endpoint=Endpoint(url, "m")).asked
    assert {json.loads(why)[0] for (why,) in said(db, "SELECT evidence FROM verdict WHERE by = 'model'")} == {"half \ufffd"}
    with store.opened(db) as base:
        store.put(base, "issue", "owner/name", 1, "\udcff half \ud83d", "", "[]", 0, None)
    assert said(db, "SELECT title FROM issue") == [("\ufffd half \ufffd",)]


@pytest.mark.parametrize("answer", [(200, "<html>"), (200, "{}"), (404, '{"error": "no such model"}'), (500, "")])
def test_what_answers_and_is_no_model(mined: tuple[Path, Path], answer: tuple[int, str]) -> None:
    repo, db = mined
    with model(lambda _: answer) as (url, _):
        found = classify([repo], db, endpoint=Endpoint(url, "m"))
    assert found.asked == 0
    assert found.said or found.nonsense
    assert {by for (by,) in said(db, "SELECT by FROM verdict")} == {"rules"}


def test_the_last_answer_counts_and_a_commit_that_is_refused_is_one(
    mined: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = json.dumps({**RIGHT, "symptom": "crash"})
    assert words(f"First {draft}, no: {json.dumps(RIGHT)} {{}}")[0] == RIGHT
    repo, db = mined
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    answers = iter([(400, '{"error": {"message": "too long"}}')] + [message(json.dumps(RIGHT))] * 9)
    with model(lambda _: next(answers)) as (url, asked):
        found = classify([repo], db, endpoint=Endpoint(url, "m"))
    assert (found.nonsense, found.asked, found.said) == (1, len(asked) - 1, "")


def test_a_key_is_not_sent_in_the_open() -> None:
    with pytest.raises(SoliError, match="not sent over a connection that others can read"):
        Endpoint("http://example.org/v1", "m", "secret")
    with pytest.raises(SoliError, match="no endpoint"):
        Endpoint("example.org", "m")
    with pytest.raises(SoliError, match="several models"):
        Endpoint("http://127.0.0.1:1/v1", "")


def test_instructions_have_every_word() -> None:
    told = instructions()
    assert all(word in told for known in DIMENSIONS.values() for word in known)


def test_the_command_goes_on_without_the_model_and_says_so(mined: tuple[Path, Path]) -> None:
    repo, db = mined
    run = lambda *more: soli("bugs", "classify", str(repo), "--db", str(db), *more)
    done = run("--endpoint", "http://127.0.0.1:9/v1", "--model", "m")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was not asked any more, and the rules' words stand: it does not answer") == 1
    assert "4 fixes in" in done.stdout
    assert "6 commits were looked at now" in done.stdout
    told = json.loads(run("--json").stdout)
    assert (told["fixes"], told["looked"]) == (4, 0)
    assert "--model NAME" in run("--endpoint", "http://127.0.0.1:9/v1").stderr
    assert "a model is asked at an endpoint" in run("--model", "m").stderr
