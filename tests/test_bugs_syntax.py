"""What changes do to syntax, read from real commits of small histories made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from soli.bugs.changes import changes, patches
from soli.bugs.syntax import edits
from soli.core.errors import SoliError
from test_bugs_mine import commit, git

PYTHON = """import os


def norm(grads, group):
    total = 0.0
    for grad in grads:
        total += grad.norm() ** 2
    dist.all_reduce(total, group=group)
    release(grads)
    return total ** 0.5
"""
CASES = {
    "a condition": ("    release(grads)\n", "    if grads is not None:\n        release(grads)\n", ["condition added: grads is not None", "statement indented: release(grads)"]),
    "an argument": ("group=group)", "group=world)", ["call changed: dist.all_reduce (total, group=world) <- (total, group=group)"]),
    "an import": ("import os\n", "from torch import os\n", ["import changed: from torch import os <- import os"]),
    "a call": ("    release(grads)\n", "    release(grads)\n    work.wait()\n", ["call added: work.wait ()"]),
    "a call less": ("    release(grads)\n", "", ["call removed: release (grads)"]),
    "a value": ("total = 0.0", "total = 1.0", ["value changed: total 1.0 <- 0.0"]),
    "a parameter": ("(grads, group)", "(grads, group=None)", ["function changed: norm (grads, group=None) <- (grads, group)"]),
    "what is given back": ("total ** 0.5", "total ** 2", ["return changed: return total ** 2 <- return total ** 0.5"]),
    "an error": ("    total = 0.0\n", "    assert grads, 'none'\n    total = 0.0\n", ["check added: assert grads, 'none'"]),
    "looks": ("(total, group=group)", "(\n        total,\n        group=group,\n    )", []),
    "words": ("import os\n", "import os  # a comment\n", []),
}  # fmt: skip


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = tmp_path / "owner+name"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    return path


def changed(repo: Path, file: str, before: str, after: str) -> list[str]:
    """What is read of a commit that makes one text of another."""
    commit(repo, "Begin", {file: before})
    hash_ = commit(repo, "Fix", {file: after})
    ((found, files),) = changes(repo, [hash_])
    assert found == hash_
    return [str(edit) for one in files for edit in edits(one)]


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_done_to_python(repo: Path, name: str) -> None:
    old, new, wanted = CASES[name]
    assert changed(repo, "a.py", PYTHON, PYTHON.replace(old, new)) == wanted


CALL = """work = foo(
    a,
)
try:
    run(
        a,
    )
except ValueError:
    log(1)
"""


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (
            "work = foo(\n    a,\n",
            "work = foo(\n    a,\n    group=group,\n",
            ["call changed: foo (a, group=group) <- (a)", "value changed: work foo(a, group=group) <- foo(a)"],
        ),
        ("    run(\n        a,\n", "    run(\n", ["call changed: run () <- (a)"]),
        ("    log(1)\n", "    log(1)\n    log(2)\n", ["call added: log (2)"]),
    ],
    ids=["an argument more", "one less", "more in a handler"],
)
def test_lines_that_are_put_in_or_taken_out_of_something_larger(
    repo: Path, old: str, new: str, wanted: list[str]
) -> None:
    assert sorted(changed(repo, "a.py", CALL, CALL.replace(old, new))) == wanted


def test_a_statement_that_moves(repo: Path) -> None:
    after = PYTHON.replace("    release(grads)\n", "").replace(
        "    total = 0.0\n", "    release(grads)\n    total = 0.0\n"
    )
    assert changed(repo, "a.py", PYTHON, after) == ["statement moved: release(grads)"]


CUDA = """#include <old.h>
__global__ void add(float* out, int count) {
  if (count > 1) {
    launch(out, count);
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("count > 1", "count >= 1", ["condition changed: (count >= 1) <- (count > 1)"]),
        ("launch(out, count)", "launch(out, count, stream)", ["call changed: launch (out, count, stream) <- (out, count)"]),
        ("    launch(out, count);\n", "    launch(out, count);\n    __syncthreads();\n", ["call added: __syncthreads ()"]),
        ("<old.h>", "<new.h>", ["import changed: #include <new.h> <- #include <old.h>"]),
        ("#include <old.h>\n", "#if TORCH_MAJOR > 1\n#include <old.h>\n#endif\n", ["version added: TORCH_MAJOR > 1"]),
    ],
)  # fmt: skip
def test_what_is_done_to_cuda(repo: Path, old: str, new: str, wanted: list[str]) -> None:
    assert changed(repo, "a.cu", CUDA, CUDA.replace(old, new)) == wanted


def test_a_file_that_cannot_be_parsed_is_read_as_far_as_it_can(repo: Path) -> None:
    broken = PYTHON.replace("def norm(grads, group):", "print 'of Python 2'\ndef norm(grads, group):")
    found = changed(repo, "a.py", broken, broken.replace("group=group)", "group=world)"))
    assert found == ["call changed: dist.all_reduce (total, group=world) <- (total, group=group)"]


def test_files_that_come_go_and_are_renamed(repo: Path) -> None:
    commit(repo, "Begin", {"a.py": PYTHON, "b.txt": "x\n"})
    git(repo, "mv", "a.py", "c d.py")
    hash_ = commit(repo, "Fix", {"c d.py": PYTHON.replace("0.0", "1.0"), "new.py": "import x\n", "b.txt": "y\n"})
    ((_, files),) = changes(repo, [hash_])
    assert {(one.was, one.path) for one in files} == {("a.py", "c d.py"), ("/dev/null", "new.py")}
    assert sorted(str(edit) for one in files for edit in edits(one)) == [
        "import added: import x",
        "value changed: total 1.0 <- 0.0",
    ]
    gone = commit(repo, "Away", {"new.py": None})
    ((_, files),) = changes(repo, [gone])
    assert [str(edit) for one in files for edit in edits(one)] == ["import removed: import x"]


def test_names_and_texts_that_git_would_mark_off_with(repo: Path) -> None:
    name = 'a b/d "é"\t\\f.py'
    commit(repo, "Begin", {name: "x = 1\n"})
    hash_ = commit(repo, "Fix", {name: "x = '\x1e\x1d\x0c'\r\n"})
    mark = f"\x1e{'0' * 40}\x1d"
    marked = commit(repo, "Fix", {name: f"x = 2\n-- a\n++ b\n{mark}\n@@ -1 +1 @@\n"})
    other = commit(repo, "Fix", {name: "x = 3\n"})
    found = dict(changes(repo, [hash_, marked, other]))
    assert [[(one.path, one.was) for one in files] for files in found.values()] == [[(name, name)]] * 3
    assert str(edits(found[other][0])[0]).startswith("value changed: x 3 <- ")


def test_commits_come_in_order_and_those_without_code_too(repo: Path) -> None:
    hashes = [commit(repo, f"{i}", {"a.py": f"x = {i}\n"} if i % 2 else {"a.txt": f"{i}\n"}) for i in range(6)]
    found = list(changes(repo, hashes[::-1]))
    assert [hash_ for hash_, _ in found] == hashes[::-1]
    assert [len(files) for _, files in found] == [1, 0, 1, 0, 1, 0]


def test_a_diff_is_shown_with_what_is_left_out_of_it(repo: Path) -> None:
    hash_ = commit(repo, "Begin", {"a.py": "".join(f"x{i} = 1\n" for i in range(50)), "b.png": "picture"})
    shown = patches(repo, [hash_], 10)[hash_]
    assert shown.startswith("diff --git a/a.py b/a.py")
    assert shown.endswith("... 46 more lines")
    assert "b.png" not in shown


def test_a_history_that_lacks_a_file_is_said(repo: Path) -> None:
    hash_ = commit(repo, "Begin", {"a.py": "x = 1\n"})
    blob = git(repo, "rev-parse", "HEAD:a.py")
    (repo / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(SoliError, match="git stopped before the end"):
        list(changes(repo, [hash_]))
