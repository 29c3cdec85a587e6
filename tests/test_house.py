"""The house: imports run one way, files and functions stay small, models know nothing of ranks."""

from __future__ import annotations

import ast
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "soli"
FILES = sorted(ROOT.rglob("*.py"))
MAY_IMPORT = {
    "core": {"core"},
    "planner": {"core", "planner"},
    "mesh": {"core", "mesh"},
    "parallel": {"core", "mesh", "parallel"},
    "losses": {"core"},
    "checkpoint": {"core", "mesh", "checkpoint"},
    "models": set(),
    "bugs": {"core", "bugs"},
    "engine": {"core", "planner", "mesh", "parallel", "losses", "checkpoint", "engine"},
    "verify": {"core", "bugs", "planner", "mesh", "parallel", "losses", "checkpoint", "engine", "models", "verify"},
    "train": {"core", "planner", "mesh", "parallel", "losses", "checkpoint", "engine", "models", "train", ""},
}
"""What each room may import of soli ('' is the public package itself). cli may import everything."""


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> set[tuple[str, str]]:
    found = set()
    for node in nodes_of(path):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
        found |= {(name.split(".")[0], (name.split(".") + [""])[1]) for name in names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_and_sizes(path: Path) -> None:
    allowed = MAY_IMPORT.get(room(path))
    if allowed is not None:
        wrong = {part for package, part in imported(path) if package == "soli"} - allowed
        assert not wrong, f"{room(path)} may not import {wrong}"
    if room(path) == "models":
        assert {package for package, _ in imported(path)} <= {
            "torch",
            "dataclasses",
            "__future__",
            "math",
            "collections",
        }
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 80, f"{node.name} is too long"


SILENT = (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(path: Path) -> int:
    """Those with more on them than space, a comment or a document string: words that explain are not to be saved."""
    found: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (*SILENT, tokenize.ENCODING) and not token.string.startswith('"""'):
                found |= set(range(token.start[0], token.end[0] + 1))
    return len(found)


def test_the_package_stays_small() -> None:
    assert sum(map(lines_of_code, FILES)) <= 25_000
