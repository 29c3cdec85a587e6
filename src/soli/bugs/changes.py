"""What commits change, read from a local history: each file before and after, and the lines that differ. Nothing of it is run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from unidiff import PatchedFile, PatchSet, UnidiffParseError

from soli.bugs.history import git, stopped
from soli.bugs.selection import rules
from soli.core.errors import SoliError

AT_ONCE = 200  # commits: what is held in memory
MARK, END = "\x1esoli\x1e", "\x1d"  # before a commit, and before its diff, which may have any text in it
NONE = "0" * 40
ABSENT = "/dev/null"
LANGUAGES = {
    ".py": "python", ".c": "cpp", ".cc": "cpp", ".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".h": "cpp", ".hpp": "cpp",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One file of one commit. `removed`, `added`: line numbers from 0, of `before` and of `after`."""

    path: str
    was: str
    before: str
    after: str
    removed: frozenset[int]
    added: frozenset[int]

    @property
    def language(self) -> str:
        """python or cpp."""
        return LANGUAGES[PurePosixPath(self.path).suffix]


def changes(repo: Path, hashes: Sequence[str]) -> Iterator[tuple[str, list[Change]]]:
    """The Python, C++ and CUDA files of each of these commits, in their order. A commit without one has an empty list."""
    for some in _batched(hashes):
        patches = dict(_patches(repo, some, ("-U0", *(f"*{suffix}" for suffix in LANGUAGES))))
        files = {hash_: _files(hash_, patch) for hash_, patch in patches.items()}
        wanted = sorted(
            {name for one in files.values() for _, names in one for name in names if name != NONE}
        )
        texts = _blobs(repo, wanted) | {NONE: ""}
        for hash_ in some:
            yield hash_, [_change(file, texts[old], texts[new]) for file, (old, new) in files.get(hash_, [])]


def patches(repo: Path, hashes: Sequence[str], lines: int) -> dict[str, str]:
    """Commits' diffs for readers: of each its first lines, and how many more there are. Pictures and the like are left out."""
    paths = [".", *(f":(exclude,icase,glob)**/{name}" for name in (*rules().left_out, "*.lock", "*.ipynb"))]
    found = dict.fromkeys(hashes, "")
    for some in _batched(hashes):
        found |= {hash_: _first(text, lines) for hash_, text in _patches(repo, some, ("-U4", *paths))}
    return found


def _first(text: str, lines: int) -> str:
    found = text.strip("\n").split("\n")
    more = len(found) - lines
    return "\n".join(
        [*(line[:300] for line in found[:lines]), *([f"... {more} more lines"] if more > 0 else [])]
    )


def _batched(hashes: Sequence[str]) -> Iterator[Sequence[str]]:
    yield from (hashes[i : i + AT_ONCE] for i in range(0, len(hashes), AT_ONCE))


def _patches(repo: Path, hashes: Sequence[str], words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    context, *paths = words
    arguments = (
        "log", "--no-walk=unsorted", "--stdin", "-p", context, "--full-index", "-M", "--no-ext-diff", "--no-textconv", "--no-color",
        f"--format=tformat:{MARK}%H{END}", "--", *paths,
    )  # fmt: skip
    for one in _said(repo, arguments, hashes).decode(errors="replace").split(MARK)[1:]:
        hash_, _, text = one.partition(END)
        yield hash_, text


def _files(hash_: str, text: str) -> list[tuple[PatchedFile, tuple[str, str]]]:
    """Each file of a patch that has lines, and the names of its blobs before and after."""
    try:
        files = list(PatchSet(text.lstrip("\n")))
    except UnidiffParseError as error:
        raise SoliError("a commit's diff cannot be read", got=f"{hash_}: {error}") from error
    found = []
    for file in files:
        index = next((line for line in file.patch_info or () if line.startswith("index ")), "")
        if index and not file.is_binary_file:
            old, _, new = index.split()[1].partition("..")
            found.append((file, (old, new)))
    return found


def _change(file: PatchedFile, before: str, after: str) -> Change:
    removed, added = set[int](), set[int]()
    for hunk in file:
        removed |= set(range(hunk.source_start - 1, hunk.source_start - 1 + hunk.source_length))
        added |= set(range(hunk.target_start - 1, hunk.target_start - 1 + hunk.target_length))
    was, now = _named(file.source_file), _named(file.target_file)
    return Change(was if now == ABSENT else now, was, before, after, frozenset(removed), frozenset(added))


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
            raise SoliError(
                "the history lacks a file that a commit changed",
                got=f"{repo}: {said[at:end].decode(errors='replace')}",
                allowed="a whole clone",
                fix="git fsck --full; clone it again",
            )
        start, size = end + 1, int(words[2])
        found[name] = said[start : start + size].decode(errors="replace")
        at = start + size + 1
    return found


def _said(repo: Path, words: tuple[str, ...], given: Sequence[str]) -> bytes:
    """What git prints for these lines of input."""
    with tempfile.TemporaryFile() as file:  # a pipe would fill while nobody reads
        file.write("".join(f"{line}\n" for line in given).encode())
        file.seek(0)
        with git(repo, *words, stdin=file) as process:
            out, error = process.communicate()
    if process.returncode:
        raise stopped(repo, error.decode(errors="replace"), process.returncode)
    return out
