"""What commits change, read from a local history: each file before and after, and the lines that differ. Nothing of it is run.

A diff is read here and not by unidiff, which takes a folder whose name ends in " b" for two names.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from soli.bugs.history import git, stopped
from soli.bugs.selection import rules
from soli.core.errors import SoliError

AT_ONCE = 200  # commits: what is held in memory
MARK, END = "\x1e", "\x1d"
# no line of a diff begins so: each has a sign before its text
COMMIT = re.compile(f"(?m)^{MARK}([0-9a-f]{{40,64}}){END}$")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
SUBMODULE = re.compile(r"(?:index \S+|new file mode|deleted file mode) 160000$")
ABSENT = "/dev/null"
LANGUAGES = {".py": "python", ".c": "cpp", ".cc": "cpp", ".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".h": "cpp", ".hpp": "cpp"}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One file of one commit. `removed`, `added`: line numbers from 0, of `before` and of `after`. `opened`, `closed`: lines of `before` above
    which something was put in, and of `after` above which something was taken away, and nothing put in its place."""

    path: str
    was: str
    before: str
    after: str
    removed: frozenset[int]
    added: frozenset[int]
    opened: frozenset[int]
    closed: frozenset[int]

    @property
    def language(self) -> str:
        """python or cpp."""
        return LANGUAGES[PurePosixPath(self.path).suffix]


def changes(repo: Path, hashes: Sequence[str]) -> Iterator[tuple[str, list[Change]]]:
    """The Python, C++ and CUDA files of each of these commits, in their order. A commit without one has an empty list."""
    for some in batched(hashes):
        patches = dict(_patches(repo, some, "-U0", (f":(glob)**/?*{suffix}" for suffix in LANGUAGES)))
        files = {hash_: _files(patch) for hash_, patch in patches.items()}
        wanted = sorted({name for all_ in files.values() for one in all_ for name in one.blobs if name.strip("0")})
        texts = _blobs(repo, wanted)
        for hash_ in some:
            yield (hash_, [_change(one, *(texts.get(name, "") for name in one.blobs)) for one in files.get(hash_, [])])


def patches(repo: Path, hashes: Sequence[str], lines: int) -> dict[str, str]:
    """Commits' diffs for readers: of each its first lines, and how many more there are. Pictures and the like are left out."""
    paths = [".", *(f":(exclude,icase,glob)**/{name}" for name in (*rules().left_out, "*.lock", "*.ipynb"))]
    found = dict.fromkeys(hashes, "")
    for some in batched(hashes):
        found |= {hash_: _first(text, lines) for hash_, text in _patches(repo, some, "-U4", paths)}
    return found


def _first(text: str, lines: int) -> str:
    found = text.strip("\n").split("\n")
    more = len(found) - lines
    return "\n".join([*(line[:300] for line in found[:lines]), *([f"... {more} more lines"] if more > 0 else [])])


def batched(hashes: Sequence[str]) -> Iterator[Sequence[str]]:
    yield from (hashes[i : i + AT_ONCE] for i in range(0, len(hashes), AT_ONCE))


def _patches(repo: Path, hashes: Sequence[str], context: str, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    arguments = (
        "log", "--no-walk=unsorted", "--stdin", "-p", context, "--full-index", "-M", "--no-ext-diff", "--no-textconv", "--no-color",
        f"--format=tformat:{MARK}%H{END}", "--", *paths,
    )  # fmt: skip
    _, *found = COMMIT.split(_said(repo, arguments, hashes).decode(errors="replace"))
    yield from zip(found[::2], found[1::2], strict=True)


@dataclass
class _File:
    """A file of a diff: names of its blobs and its paths before and after, and of each hunk where it begins and how long it is, twice."""

    blobs: tuple[str, str] = ("", "")
    was: str = ""
    now: str = ""
    hunks: list[tuple[int, int, int, int]] = field(default_factory=list)
    submodule: bool = False  # then its blobs are commits of another repository


def _files(text: str) -> list[_File]:
    """Each file of a commit's diff (git's, without context) that has lines."""
    found: list[_File] = []
    lines = iter(text.split("\n"))
    for line in lines:
        hunk = HUNK.match(line)
        if line.startswith("diff --git "):
            found.append(_File())
        elif SUBMODULE.match(line):
            found[-1].submodule = True
        elif line.startswith("index "):
            old, _, new = line.split()[1].partition("..")
            found[-1].blobs = (old, new)
        elif line.startswith("--- "):
            found[-1].was = _named(line[4:].rstrip("\t"))
        elif line.startswith("+++ "):
            found[-1].now = _named(line[4:].rstrip("\t"))
        elif hunk:
            old_at, old_count, new_at, new_count = (int(number or 1) for number in hunk.groups())
            found[-1].hunks.append((old_at, old_count, new_at, new_count))
            left = old_count + new_count
            while left:  # lines of files, which may look like anything
                left -= not next(lines).startswith("\\")
    return [file for file in found if file.hunks and not file.submodule]


def _change(file: _File, before: str, after: str) -> Change:
    removed, added, opened, closed = set[int](), set[int](), set[int](), set[int]()
    # one without lines begins after the line that it names
    for old_at, old_count, new_at, new_count in file.hunks:
        removed |= set(range(old_at - 1, old_at - 1 + old_count))
        added |= set(range(new_at - 1, new_at - 1 + new_count))
        opened |= set() if old_count else {old_at}
        closed |= set() if new_count else {new_at}
    path = file.was if file.now == ABSENT else file.now
    return Change(path, file.was, before, after, *map(frozenset, (removed, added, opened, closed)))


def _named(name: str) -> str:
    """A path as it is, of one as git writes it: in quotes where it has a quote, a backslash, a tab or a new line in it."""
    if name.startswith('"'):
        name = re.sub(r"\\(.)", lambda found: {"t": "\t", "n": "\n"}.get(found[1], found[1]), name[1:-1])
    return name if name == ABSENT else name[2:]


def _blobs(repo: Path, names: Sequence[str]) -> dict[str, str]:
    """The text of files by name of their blob. SoliError where one is not there."""
    said, found, at = _said(repo, ("cat-file", "--batch"), names), dict[str, str](), 0
    for name in names:
        end = said.index(b"\n", at)
        words = said[at:end].split()
        if len(words) != 3:
            raise SoliError("the history lacks a file that a commit changed", got=f"{repo}: {said[at:end].decode(errors='replace')}", allowed="a whole clone", fix="git fsck --full; clone it again")
        start, size = end + 1, int(words[2])
        found[name] = said[start : start + size].decode(errors="replace")
        at = start + size + 1
    return found


def _said(repo: Path, words: tuple[str, ...], given: Sequence[str]) -> bytes:
    """What git prints for these lines of input."""
    with git(repo, *words, stdin=subprocess.PIPE) as process:
        out, error = process.communicate("".join(f"{line}\n" for line in given).encode())
    if process.returncode:
        raise stopped(repo, error.decode(errors="replace"), process.returncode)
    return out
