"""`soli bugs mine` and `export`: small histories made here, a GitHub that was recorded, and histories that are not whole."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from answering import answering
from soli.bugs import github, history, store
from soli.bugs.changes import changes
from soli.bugs.classify import classify
from soli.bugs.mine import mine, name, share
from soli.bugs.selection import pull, rules, tag
from soli.core.errors import SoliError
from typed import soli

# --- histories --------------------------------------------------------------------------------------------


def git(repo: Path, *words: str, date: str = "2024-01-01T00:00:00+00:00") -> str:
    who = {f"GIT_{one}_{what}": "someone" for one in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**os.environ, **who, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(repo: Path, message: str, files: dict[str, str | None], date: str = "2024-01-01T00:00:00+00:00") -> str:
    """Write these files (None: take it away) and commit them."""
    for path, text in files.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (repo / path).unlink()
        else:
            (repo / path).write_text(text, encoding="utf-8")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", message, date=date)
    return git(repo, "rev-parse", "HEAD")


def lines(*numbers: int) -> str:
    return "".join(f"line {n}\n" for n in numbers)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A history with one commit for each thing that is to be told apart."""
    path = tmp_path / "owner+name"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    commit(path, "Begin", {"a.py": lines(1, 2, 3, 4), "README.md": "words\n"})
    commit(
        path,
        "fix(zero): reduce the last bucket (#7)\n\nCloses #3.",
        {"a.py": lines(1, 2, 30, 40, 5), "tests/test_a.py": lines(1)},
        "2024-01-05T00:00:00+00:00",
    )
    commit(path, "Fix typo in comment", {"a.py": lines(1, 2, 30, 40, 5, 6)})
    commit(path, "Fix the docs build", {"docs/page.md": "x\n"})
    commit(path, "[feat] faster fixups", {"b.py": lines(1)})
    commit(path, "Correct the group of the norm", {"c.cu": lines(1, 2)})
    commit(path, "Bump to 1.2.3, bugs fixed", {"version.py": lines(1)})
    commit(
        path,
        "Fix a hang with a name of its own\n\nÜber «names»\ttabs",
        {"d é\tf.py": lines(*range(12)), "picture.png": "no lines"},
    )
    git(path, "mv", "b.py", "deep file.py")
    commit(path, "Fix where it lies", {})
    git(path, "checkout", "-q", "-b", "side", "HEAD~1")
    commit(path, "Fix on a side", {"side.py": lines(1)})
    git(path, "checkout", "-q", "main")
    git(path, "merge", "-q", "--no-ff", "-m", "Merge pull request #9 from side: fix", "side")
    commit(path, "Nothing, to fix a build", {})
    commit(path, "Clamp the capacity\n\nThis PR fixes routing where tokens are few.", {"f.py": lines(1)})
    commit(path, "Wait for all streams\n\nResolves #12", {"f.py": lines(1, 2)})
    commit(path, "Add a missing import", {"f.py": lines(1, 2, 3)})
    return path


def read(base: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(base) as connection:
        return connection.execute(query).fetchall()


def test_each_commit_has_its_reason(repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "bugs.db"
    (found,) = mine([repo], out)
    assert (found.repo, found.commits, found.new, found.fixes) == ("owner/name", 15, 15, 8)
    by = dict(read(out, "SELECT subject, rule FROM change"))
    assert by == {
        "Begin": "silent",
        "fix(zero): reduce the last bucket (#7)": "tagged fix",
        "Fix typo in comment": "wording",
        "Fix the docs build": "beside",
        "[feat] faster fixups": "tagged",
        "Correct the group of the norm": "correction",
        "Bump to 1.2.3, bugs fixed": "release",
        "Fix a hang with a name of its own": "fix",
        "Fix where it lies": "fix",
        "Fix on a side": "fix",
        "Merge pull request #9 from side: fix": "merge",
        "Nothing, to fix a build": "nothing",
        "Clamp the capacity": "told",
        "Wait for all streams": "closes",
        "Add a missing import": "missing",
    }
    assert sum(found.selected.values()) == 8
    assert found.rejected["merge"] == found.rejected["beside"] == 1


def test_sizes_are_those_that_git_counts(repo: Path, tmp_path: Path) -> None:
    """By each definition: `fix(zero)` changes two lines, adds one, and one of a test; a picture has none; a renamed file neither."""
    out = tmp_path / "bugs.db"
    mine([repo], out)
    sizes = {
        subject: rest for subject, *rest in read(out, 'SELECT subject, source, larger, added, "all", files FROM fix')
    }
    assert sizes["fix(zero): reduce the last bucket (#7)"] == [5, 3, 3, 6, 1]
    assert sizes["Fix a hang with a name of its own"] == [12, 12, 12, 12, 1]
    assert sizes["Fix where it lies"] == [0, 0, 0, 0, 1]
    assert read(out, "SELECT path, was, kind FROM file WHERE was != ''") == [("deep file.py", "b.py", "source")]
    assert ("d é\tf.py",) in read(out, "SELECT path FROM file")
    assert read(out, "SELECT issue, by FROM closed ORDER BY issue") == [(3, "message"), (12, "message")]
    assert read(out, "SELECT pull FROM change WHERE pull IS NOT NULL ORDER BY 1") == [(7,), (9,)]
    assert read(out, "SELECT body FROM change WHERE subject LIKE '%hang%'") == [("Über «names»\ttabs",)]


def test_a_rerun_adds_what_is_new_and_other_rules_decide_again(repo: Path, tmp_path: Path) -> None:
    out, own = tmp_path / "bugs.db", tmp_path / "own.toml"
    mine([repo], out)
    before = read(out, "SELECT * FROM change ORDER BY hash")
    commit(repo, "Fix one more", {"e.py": lines(1)})
    (found,) = mine([repo], out)
    assert (found.commits, found.new, found.fixes) == (16, 1, 9)
    assert set(before) < set(read(out, "SELECT * FROM change"))
    own.write_text(
        "[[kind]]\nname='source'\npath='py$'\n[[rule]]\nname='any'\nwhere='subject'\nmatch=''\nfix=true\nwhy='all'\n"
    )
    (found,) = mine([repo], out, own)
    assert (found.new, found.fixes) == (0, 14)  # the merge and the empty one have no size
    assert {kind for (kind,) in read(out, "SELECT kind FROM file")} == {"source", "other"}


def test_what_is_built_with_is_no_document_and_another_release_of_it_no_fix() -> None:
    made = rules()
    kinds = {"csrc/CMakeLists.txt": "build", "requirements-dev.txt": "build", "requirements/dev.txt": "build", "notes.txt": "docs"}
    kinds |= {"docs/requirements.txt": "docs", "examples/a/requirements.txt": "example", "tests/requirements.txt": "test"}
    assert {path: made.kind(path) for path in kinds} == kinds
    robot = "Fixes #3 and a crash.\n\n---\nupdated-dependencies:\n- dependency-name: torch\n"
    said = [("Update torch requirement from <2 to <3", "This fixes #3"), ("Upgrade numpy from 1.2 to 1.3", ""), ("Torch", robot), ("Update the index from uint16 to int16", "Fixes #3")]  # fmt: skip
    of = lambda subject, body: made.of(history.Commit("", (), 0, 0, subject, body, (history.File("requirements.txt", "", 1, 1),))).name  # fmt: skip
    assert [of(*one) for one in said] == ["release", "release", "dependencies", "closes"]


def test_names_tags_numbers_and_shares() -> None:
    assert name(Path("/x/NVIDIA+Megatron-LM/repo")) == "NVIDIA/Megatron-LM"
    assert name(Path("/x/DeepSpeed.git")) == "DeepSpeed"
    assert [tag(s) for s in ("fix(moe): x", "[Hotfix] x", "Fix x: y", "ADLR/megatron-lm!2 - fix: x", "plain")] == ["fix", "hotfix", "fix x", "fix", ""]  # fmt: skip
    assert [pull(s) for s in ("x (#12)", "ADLR/megatron-lm!34 - x", "x #5", "x")] == [12, 34, None, None]
    low, high = share(48, 100)[1:]
    assert (round(low, 3), round(high, 3)) == (0.385, 0.577)  # Wilson's interval
    assert share(0, 0) == (0.0, 0.0, 1.0)


def test_a_side_whose_merge_is_like_one_parent_keeps_its_files(repo: Path, tmp_path: Path) -> None:
    """Whatever a path makes git hide: here the fix of a side that main had already."""
    git(repo, "checkout", "-q", "-b", "early")
    commit(repo, "Fix the step of the side", {"step.py": lines(1, 2)})
    git(repo, "checkout", "-q", "main")
    commit(repo, "Fix the step of main", {"step.py": lines(1, 2)})
    git(repo, "merge", "-q", "--no-ff", "-m", "Merge branch early", "early")
    (found,) = mine([repo], tmp_path / "bugs.db")
    assert (found.commits, found.fixes) == (18, 10)
    assert ("Fix the step of the side", 2) in read(tmp_path / "bugs.db", "SELECT subject, source FROM fix")


def test_a_clones_own_settings_change_nothing(repo: Path, tmp_path: Path) -> None:
    """Of prefixes, of a history's first commit, of hunks: neither what is mined nor the syntax that is read."""
    commit(repo, "Fix both ends", {"a.py": lines(0, 2, 30, 40, 5, 7)})
    seen = lambda: (list(history.read(repo)), list(changes(repo, [one.hash for one in history.read(repo)])))
    before = seen()
    root = next(one for one in before[0] if not one.parents)
    assert root.files
    for setting in ("diff.noprefix=true", "diff.mnemonicPrefix=true", "log.showRoot=false", "diff.interHunkContext=9"):
        git(repo, "config", *setting.split("="))
        assert seen() == before, setting
        git(repo, "config", "--unset", setting.split("=")[0])


def test_a_submodule_named_like_code_has_no_lines(repo: Path, tmp_path: Path) -> None:
    """Put in, moved on, and in place of a file: its blob is a commit of another repository."""
    for subject, path, made in (("Fix 1", "llama.cpp", "1" * 40), ("Fix 2", "llama.cpp", "2" * 40), ("Fix 3", "c.cu", "3" * 40)):  # fmt: skip
        git(repo, "update-index", "--add", "--cacheinfo", f"160000,{made},{path}")
        git(repo, "commit", "-q", "-m", subject)
    (found,) = mine([repo], tmp_path / "bugs.db")
    subjects = "SELECT subject, source FROM fix WHERE subject IN ('Fix 1', 'Fix 2', 'Fix 3')"
    assert found.commits == 18
    assert [subject for subject, _ in read(tmp_path / "bugs.db", subjects)] == ["Fix 3"]  # a file is gone
    assert classify([repo], tmp_path / "bugs.db").looked


# --- histories that are not whole, or hostile -------------------------------------------------------------


def cut(repo: Path, tmp_path: Path) -> Path:
    subprocess.run(["git", "clone", "-q", "--depth", "2", f"file://{repo}", str(tmp_path / "cut")], check=True)
    return tmp_path / "cut"


def filtered(repo: Path, tmp_path: Path) -> Path:
    git(repo, "config", "uploadpack.allowFilter", "true")
    words = ["git", "clone", "-q", "--bare", "--filter=blob:none", f"file://{repo}", str(tmp_path / "part")]
    subprocess.run(words, check=True)
    return tmp_path / "part"


def lacking(repo: Path, tmp_path: Path) -> Path:
    """A clone that lost a blob of a commit long ago: git prints all that comes before it."""
    blob = git(repo, "rev-parse", "HEAD~11:a.py")
    whole = tmp_path / "lacking"
    shutil.copytree(repo, whole)
    (whole / ".git/objects" / blob[:2] / blob[2:]).unlink()
    return whole


def headless(repo: Path, tmp_path: Path) -> Path:
    gone = git(repo, "rev-parse", "HEAD~3")
    broken = tmp_path / "headless"
    shutil.copytree(repo, broken)
    (broken / ".git/objects" / gone[:2] / gone[2:]).unlink()
    return broken


def empty(repo: Path, tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    return tmp_path / "empty"


def astray(repo: Path, tmp_path: Path) -> Path:
    """Its default branch is gone, and others are there."""
    shutil.copytree(repo, tmp_path / "astray")
    git(tmp_path / "astray", "symbolic-ref", "HEAD", "refs/heads/gone")
    return tmp_path / "astray"


def faultless(repo: Path, tmp_path: Path) -> Path:
    path = empty(repo, tmp_path)
    commit(path, "Begin", {"a.py": "x\n"})
    return path


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (cut, "a shallow clone has its last commits only"),
        (filtered, "the history is partial"),
        (lacking, "git stopped before the end of the history"),
        (headless, "the history cannot be read"),
        (empty, "the history has no commits"),
        (astray, r"HEAD names no commit[^$]*got +\S*astray: refs/heads/gone[^$]*symbolic-ref HEAD refs/heads/BRANCH"),
        (faultless, "no fix of a bug was found"),
        (lambda repo, folder: folder, "this is no git repository"),
        (lambda repo, folder: folder / "nowhere", "this is no git repository"),
    ],
)
def test_a_history_that_is_not_whole_is_an_error(
    broken: Callable[[Path, Path], Path], said: str, repo: Path, tmp_path: Path
) -> None:
    """And not a smaller number: nothing of it is kept."""
    out = tmp_path / "bugs.db"
    with pytest.raises(SoliError, match=said):
        mine([broken(repo, tmp_path)], out)
    assert not out.exists() or not read(out, "SELECT * FROM change WHERE fix")


@pytest.mark.parametrize("way", ["replace", "graft"])
def test_what_is_said_of_other_parents_does_not_cut_a_history(way: str, repo: Path, tmp_path: Path) -> None:
    """Commits that git would hide behind a replacement, or a graft, are read."""
    whole = len(list(history.read(repo)))
    head = git(repo, "rev-parse", "HEAD").strip()
    if way == "replace":
        git(repo, "replace", "--graft", head)
    else:
        (repo / ".git/info").mkdir(exist_ok=True)
        (repo / ".git/info/grafts").write_text(head + "\n", encoding="utf-8")
    assert git(repo, "rev-list", "--count", "HEAD").strip() == "1" != str(whole)
    assert len(list(history.read(repo))) == whole


def test_nothing_of_a_repository_is_run(repo: Path, tmp_path: Path) -> None:
    """External diffs, text conversions, filters, pagers and monitors that its configuration names."""
    marker = tmp_path / "run"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    program.chmod(0o755)
    commit(repo, "Fix attributes", {".gitattributes": "* diff=odd filter=odd\n", "z.py": lines(1, 2)})
    for key in (
        "diff.external",
        "diff.odd.textconv",
        "diff.odd.command",
        "filter.odd.smudge",
        "filter.odd.clean",
        "core.pager",
        "core.fsmonitor",
        "core.editor",
    ):
        git(repo, "config", key, str(program))
    assert git(repo, "log", "-1", "-p", "--ext-diff") is not None
    assert marker.exists()  # git itself runs them
    marker.unlink()
    (found,) = mine([repo], tmp_path / "bugs.db")
    assert found.fixes == 9
    assert not marker.exists()


def test_what_git_lacks_is_counted(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "check", lambda path: 99)
    with pytest.raises(SoliError, match="was not read whole"):
        mine([repo], tmp_path / "bugs.db")


def test_without_git(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SoliError, match="git is not installed"):
        mine([repo], tmp_path / "bugs.db")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense = [", "is not TOML"),
        ("[[rule]]\nname='a'\nwhere='sky'\nmatch=''\nfix=true\nwhy='w'\n", "there is no such place"),
        (
            "[[rule]]\nname='a'\nwhere='subject'\nmatch='('\nfix=true\nwhy='w'\n[[rule]]\nwhere='subject'\nmatch=''\nfix=true\nwhy='w'",
            "is no pattern",
        ),
        ("[[rule]]\nname='a'\nwhere='subject'\nmatch='x'\nfix=true\nwhy='w'\n", "must decide on whatever is left"),
        ("[[rule]]\nname='a'\nwhere='subject'\nmatch=''\n", "says whether it is a fix"),
    ],
)
def test_rules_that_cannot_be(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(SoliError, match=said) as refused:
        rules(path)
    assert str(path) in str(refused.value)
    with pytest.raises(SoliError, match="cannot be read"):
        rules(tmp_path / "none.toml")


def test_files_that_are_something_else(repo: Path, tmp_path: Path) -> None:
    text, other = tmp_path / "text.db", tmp_path / "other.db"
    text.write_text("not a database, but words " * 50)
    with pytest.raises(SoliError, match="no SQLite database"):
        mine([repo], text)
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE t (x)")
    with pytest.raises(SoliError, match="this version of soli knows"):
        mine([repo], other)
    (tmp_path / "empty.db").touch()
    assert mine([repo], tmp_path / "empty.db")[0].fixes == 8
    twin = tmp_path / "twin" / "owner+name"
    shutil.copytree(repo, twin)
    with pytest.raises(SoliError, match="have one name"):
        mine([repo, twin], tmp_path / "bugs.db")


def test_a_file_whose_making_was_cut_off_is_made_again(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kill in the middle of its schema, of which nothing is there then."""
    out = tmp_path / "bugs.db"
    first, rest = store.SCHEMA.split("CREATE TABLE closed")
    monkeypatch.setattr(store, "SCHEMA", first)  # the file is closed before the end
    with pytest.raises(SoliError), store.opened(out, made=True):
        raise SoliError("killed")
    monkeypatch.setattr(store, "SCHEMA", f"{first}CREATE TABLE closed{rest}")
    assert mine([repo], out)[0].fixes == 8


def test_a_full_disk_is_no_damage(repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "bugs.db"
    mine([repo], out)

    def filled() -> None:
        with store.opened(out) as base:
            base.execute("PRAGMA max_page_count = 1")
            store.put(base, "history", "a/b", "x" * 100_000, 0, "")

    with pytest.raises(SoliError, match=r"the disk has no room[^$]*make room"):
        filled()
    assert read(out, "SELECT repo FROM history") == [("owner/name",)]


# --- GitHub -----------------------------------------------------------------------------------------------


def listed(nodes: list[Any], more: str | None = None) -> dict[str, Any]:
    """A list as GitHub gives it; `more`: it has another page, from there on."""
    return {"pageInfo": {"hasNextPage": more is not None, "endCursor": more}, "nodes": nodes}


ISSUE = {"__typename": "Issue", "id": "I3", "number": 3, "title": "Gradients are lost", "bodyText": "It trains, and wrongly.", "createdAt": "2024-01-02T00:00:00Z", "closedAt": "2024-01-05T00:00:00Z", "labels": listed([{"name": "bug"}])}  # fmt: skip


def request(number: int, closes: list[dict[str, Any]], oid: str | None = None) -> dict[str, Any]:
    review = lambda login: {"author": {"login": login} if login else None}
    return {
        "__typename": "PullRequest", "id": f"P{number}", "number": number, "title": f"Request {number}", "createdAt": "2024-01-04T00:00:00Z", "mergedAt": "2024-01-05T00:00:00Z",
        "mergeCommit": {"oid": oid} if oid else None, "labels": listed([]),
        "reviews": listed([review("a"), review("b"), review("a"), review(None)]), "closingIssuesReferences": listed(closes),
    }  # fmt: skip


def page(nodes: list[dict[str, Any]], cursor: str | None, more: bool) -> dict[str, Any]:
    requests = {"totalCount": 3, "pageInfo": {"hasNextPage": more, "endCursor": cursor}, "nodes": nodes}
    return {"data": {"repository": {"pullRequests": requests}}}


PAGES = {None: page([request(7, [ISSUE]), request(8, [])], "two", True), "two": page([request(99, [ISSUE], "f" * 40)], "end", False), "end": page([], "end", False)}  # fmt: skip


@contextmanager
def served(answers: list[tuple[int, dict[str, str], Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A GitHub that gives these answers first, and then the recorded pages; what it was asked."""

    def said(request: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        status, headers, body = answers.pop(0) if answers else (200, {}, PAGES[request["variables"]["after"]])
        return status, headers, json.dumps(body)

    with answering(said) as (url, asked):
        yield f"{url}/graphql", asked


def test_issues_are_exported_and_joined(repo: Path, tmp_path: Path) -> None:
    """Through a gateway that fails, a limit that is over at once, and another way of saying it."""
    out, base = tmp_path / "requests.jsonl", tmp_path / "bugs.db"
    limited = {"errors": [{"type": "RATE_LIMITED", "message": "slow down"}]}
    with served([(502, {}, {}), (403, {"Retry-After": "0"}, {}), (200, {}, limited)]) as (api, asked):
        assert github.export("owner/name", out, "secret", api, pause=0.01) == 3
    assert [one["variables"]["after"] for one in asked] == [None, None, None, None, "two"]
    assert {one["key"] for one in asked} == {"bearer secret"}
    mine([repo], base)
    assert github.load(base, out) == github.load(base, out) == ("owner/name", 1, 3)
    assert read(base, "SELECT number, hash IS NULL, reviewers FROM request") == [(7, 0, 2), (8, 1, 2), (99, 1, 2)]
    # The issue was opened on the second of January, and its fix taken in on the fifth; the link is in the message and GitHub's own.
    assert read(base, "SELECT days, labels, reviewers FROM time_to_fix") == [(3.0, '["bug"]', 2)]
    assert read(base, "SELECT body FROM issue") == [("It trains, and wrongly.",)]


def test_long_lists_come_whole(tmp_path: Path) -> None:
    """Labels, reviews and issues come in pages of their own: all are asked for."""
    long = [{"name": f"label {n}"} for n in range(45)]
    issue = {**ISSUE, "labels": listed(long[:20], "20")}
    one = {**request(7, []), "closingIssuesReferences": listed([], "c")}
    nodes = {
        ("P7", "c"): {"closingIssuesReferences": listed([issue])},
        ("I3", "20"): {"labels": listed(long[20:40], "40")},
        ("I3", "40"): {"labels": listed(long[40:])},
    }

    def said(asked: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        of = asked["variables"]
        data = page([one], "end", False) if "id" not in of else {"data": {"node": nodes[of["id"], of["after"]]}}
        return 200, {}, json.dumps(data)

    with answering(said) as (url, asked):
        assert github.export("owner/name", tmp_path / "out.jsonl", "secret", url, pause=0.001) == 1
    written = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])
    assert written["closes"][0]["labels"] == [label["name"] for label in long]
    assert "on PullRequest { closingIssuesReferences(" in asked[1]["query"]
    assert "on Issue { labels(" in asked[2]["query"]
    assert len(asked) == 4


def test_an_export_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "requests.jsonl"
    with served([(200, {}, PAGES[None])] + [(500, {}, {})] * github.TRIES) as (api, asked):
        with pytest.raises(SoliError, match="GitHub does not answer"):
            github.export("owner/name", out, "secret", api, pause=0.001)
        out.write_text(out.read_text() + '{"number": 99, "tit')  # killed while it wrote
        with pytest.raises(SoliError, match="this is no export"):
            github.load(tmp_path / "bugs.db", out)
        assert github.export("owner/name", out, "secret", api) == 3
        assert asked[-1]["variables"]["after"] == "two"
        numbers = [json.loads(line).get("number") for line in out.read_text().splitlines()]
        assert [n for n in numbers if n] == [7, 8, 99]
        monkeypatch.setitem(PAGES, "end", page([], None, False))
        for _ in range(2):  # nothing is new, and nothing has no end
            assert github.export("owner/name", out, "secret", api) == 3
            assert asked[-1]["variables"]["after"] == "end"
            assert '{"cursor": null}' not in out.read_text()
            out.write_text(out.read_text() + '{"cursor": null}\n')  # as it was written once
        with pytest.raises(SoliError, match="holds another repository"):
            github.export("other/name", out, "secret", api)


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "thesis.txt"
    out.write_text("years of work")
    with served([]) as (api, asked), pytest.raises(SoliError, match=r"no export of GitHub's"):
        github.export("owner/name", out, "secret", api)
    assert out.read_text() == "years of work"
    assert not asked


@pytest.mark.parametrize(
    ("repo_name", "token", "api", "answer", "said"),
    [
        ("name", "t", "", None, "a repository is owner/name"),
        ("owner/name", "", "", None, "GitHub asks for a token"),
        ("owner/name", "t", "http://example.com/graphql", None, "not sent over a connection that others can read"),
        ("owner/name", "t", "", (401, {}, {}), "does not take this token"),
        ("owner/name", "t", "", (404, {}, {}), "refused the request"),
        (
            "owner/name",
            "t",
            "",
            (200, {}, {"errors": [{"message": "Could not resolve to a Repository"}]}),
            "refused the request",
        ),
    ],
)
def test_exports_that_cannot_be(repo_name: str, token: str, api: str, answer: Any, said: str, tmp_path: Path) -> None:
    with served([answer] if answer else []) as (own, asked), pytest.raises(SoliError, match=said):
        github.export(repo_name, tmp_path / "out.jsonl", token, api or own, pause=0.001)
    assert len(asked) == (answer is not None)


def test_a_token_follows_no_redirect(tmp_path: Path) -> None:
    with (
        answering(lambda said: (200, {}, json.dumps(PAGES[None]))) as (other, elsewhere),
        served([(302, {"Location": f"{other}/graphql"}, {})]) as (api, asked),
        pytest.raises(SoliError, match="302"),
    ):
        github.export("owner/name", tmp_path / "out.jsonl", "secret", api, pause=0.001)
    assert len(asked) == 1
    assert not elsewhere


def test_a_limit_by_the_hour_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as GitHub says, whether by status or in its answer; what it says is shown where it goes on saying it."""
    slept: list[float] = []
    monkeypatch.setattr(github.time, "sleep", slept.append)
    monkeypatch.setattr(github.time, "time", lambda: 1_000.0)
    limit = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1090"}
    told = {"errors": [{"type": "RATE_LIMITED", "message": "API rate limit exceeded"}]}
    with served([(403, limit, told), (200, limit, told)]) as (api, _):
        assert github.export("owner/name", tmp_path / "1.jsonl", "secret", api, pause=0.001) == 3
    assert slept.count(91) == 2
    with (
        served([(403, {}, told)] * github.TRIES) as (api, _),
        pytest.raises(SoliError, match="API rate limit exceeded"),
    ):
        github.export("owner/name", tmp_path / "2.jsonl", "secret", api, pause=0.001)


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"pullRequests": None},
        {"pullRequests": {"pageInfo": {}, "nodes": None}},
        {"pullRequests": listed([{**request(7, []), "mergedAt": None}])},
        {"pullRequests": listed([{**request(7, []), "reviews": None}])},
    ],
)
def test_answers_that_lack_a_part_are_told(part: Any, tmp_path: Path) -> None:
    with (
        served([(200, {}, {"data": {"repository": part}})]) as (api, _),
        pytest.raises(SoliError, match="is not what it should be") as caught,
    ):
        github.export("owner/name", tmp_path / "out.jsonl", "secret", api, pause=0.001)
    assert caught.value.exit_code == 1


def test_an_answer_that_is_no_text_is_asked_for_again(tmp_path: Path) -> None:
    answers = iter([b"\xff", b"[" * 100_000])
    said = lambda asked: (200, {}, next(answers, json.dumps(page([], None, False))))
    with answering(said) as (url, asked):
        assert github.export("owner/name", tmp_path / "out.jsonl", "secret", url, pause=0.001) == 0
    assert len(asked) == 3


@pytest.mark.parametrize("token", ["secret one", "secret\r\nX: y", "secret\x7f", "secrét"])
def test_a_token_is_not_printed(token: str, tmp_path: Path) -> None:
    """What a shell leaves around it is taken away, and one with other signs in it refused."""
    out = tmp_path / "out.jsonl"
    with served([]) as (api, asked):
        assert github.export("owner/name", out, " secret\r\n", api) == 3
        assert {one["key"] for one in asked} == {"bearer secret"}
        with pytest.raises(SoliError, match=r"got +one with other signs in it") as caught:
            github.export("owner/name", out, token, api)
    assert "secr" not in str(caught.value)


@pytest.mark.parametrize("rest", [b"\xff", b'{"cursor": "x\n', b'{"cursor": "x", 3}\n'])
def test_a_damaged_export_is_told_and_left_alone(rest: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(text := b'{"repo": "owner/name", "format": 1}\n' + rest)
    with served([]) as (api, asked), pytest.raises(SoliError, match=r"no export of GitHub's[^$]*another --out"):
        github.export("owner/name", out, "secret", api)
    assert (out.read_bytes(), asked) == (text, [])


@pytest.mark.parametrize(
    "answer",
    [
        {"data": {"repository": None}},
        {"data": None},
        [],
        {},
        {"errors": ["no"]},
        {"errors": "no"},
        {"errors": [{}, None]},
    ],
)
def test_answers_that_say_nothing_are_refusals(answer: Any, tmp_path: Path) -> None:
    with served([(200, {}, answer)]) as (api, _), pytest.raises(SoliError, match="refused the request"):
        github.export("owner/name", tmp_path / "out.jsonl", "secret", api, pause=0.001)


# --- histories that change, and words that look like git's --------------------------------------------------


def test_what_head_has_no_more_goes(repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "bugs.db"
    mine([repo], out)
    git(repo, "commit", "-q", "--amend", "-m", "Fix a missing import, amended")
    done = soli("bugs", "mine", str(repo), "--out", str(out))
    assert "owner/name, commits that the history has no more, taken out with what was said of them: 1\n" in done.stdout
    git(repo, "commit", "-q", "--amend", "-m", "Fix a missing import, amended again")
    (found,) = mine([repo], out)
    assert (found.commits, found.new, found.gone, found.fixes) == (15, 1, 1, 8)
    assert read(out, "SELECT count(*) FROM change") == [(15,)]
    assert read(out, "SELECT count(*) FROM file WHERE hash NOT IN (SELECT hash FROM change)") == [(0,)]
    other = tmp_path / "other" / "owner+name"
    other.mkdir(parents=True)
    git(other, "init", "-q")
    commit(other, "Fix another thing", {"a.py": lines(1)})
    with pytest.raises(SoliError, match="another history of this name"):
        mine([other], out)
    assert read(out, "SELECT count(*) FROM change") == [(15,)]


def test_a_folder_of_a_repository_is_no_history(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(SoliError, match="a folder of a repository") as raised:
        mine([repo / "tests"], tmp_path / "bugs.db")
    assert str(repo) in str(raised.value)


def test_messages_cannot_say_what_git_says(tmp_path: Path) -> None:
    path = tmp_path / "owner+name"
    path.mkdir()
    git(path, "init", "-q")
    for sign in "\x1d\x1e\x1f":
        message = f"Fix x{sign}9000\t9000\tevil.py{sign} and {sign}more"
        commit(path, message, {"a.py": lines(*range(ord(sign)))})
    commit(path, "Fix a name", {"new\nline.py": lines(1)})
    commit(path, "Fix a language", {"lib.rs": lines(1, 2, 3)})
    (found,) = mine([path], tmp_path / "bugs.db")
    assert (found.commits, found.fixes) == (5, 5)
    paths = {path for (path,) in read(tmp_path / "bugs.db", "SELECT path FROM file")}
    assert paths == {"a.py", "new\nline.py", "lib.rs"}
    assert read(tmp_path / "bugs.db", "SELECT source FROM size JOIN file USING (repo, hash) WHERE path = 'lib.rs'") == [
        (3,)
    ]


def test_an_export_is_of_the_folder_of_its_name(repo: Path, tmp_path: Path) -> None:
    """A clone is called as git clone calls it, an export owner/name; what was not mined is refused."""
    out, base = tmp_path / "requests.jsonl", tmp_path / "bugs.db"
    plain = tmp_path / "name"
    shutil.copytree(repo, plain)
    with served([]) as (api, _):
        github.export("owner/name", out, "secret", api, pause=0.001)
    mine([plain], base)
    assert github.load(base, out) == ("name", 1, 3)
    assert read(base, "SELECT count(*) FROM time_to_fix") == [(1,)]
    other = tmp_path / "other.db"
    path = tmp_path / "else"
    path.mkdir()
    git(path, "init", "-q")
    commit(path, "Fix it", {"a.py": lines(1)})
    mine([path], other)
    with pytest.raises(SoliError, match="not mined into this file"):
        github.load(other, out)


# --- as typed ---------------------------------------------------------------------------------------------


def test_the_commands(repo: Path, tmp_path: Path) -> None:
    run = lambda *words, **env: soli("bugs", *words, cwd=tmp_path, env={**os.environ, **env})
    done = run("mine", str(repo), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["fixes"] == 8
    with served([]) as (api, _):
        done = run("export", "owner/name", "--out", "r.jsonl", "--api", api, GITHUB_TOKEN="t")
        assert (done.returncode, done.stderr) == (0, "")
    done = run("mine", str(repo), "--issues", "r.jsonl")
    assert "owner/name, fixes by rule: fix 3, " in done.stdout
    assert "3 merged pull requests, of 1 the commit is in the history" in done.stdout
    done = run("mine", str(repo), "--out", "no/such/folder.db")
    assert (done.returncode, "this file cannot be opened" in done.stderr) == (2, True)
    (tmp_path / "bad.toml").write_text("rule = 3")
    done = run("mine", str(repo), "--rules", "bad.toml")
    assert (done.returncode, "'rule' is a list of tables" in done.stderr) == (2, True)
    done = run("mine", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "this is no git repository" in done.stderr
