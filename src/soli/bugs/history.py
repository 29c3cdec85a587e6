"""A git history as data: every commit of HEAD with its message, and the lines that it adds and deletes in each file.

One `git log` reads it all: DeepSpeed, Megatron-LM and Colossal-AI take 15 s on one core, where a library that asks git
commit by commit takes many minutes. What is mined is data and never run: no hook, filter, text conversion, external diff or
pager of the repository is used, and nothing is fetched.
"""

import codecs
import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from soli.core.errors import SoliError, blaming

FIELDS = ("%H", "%P", "%at", "%ct", "%B")
MARK, PART, END = (f"{sign}{secrets.token_hex(8)}" for sign in "\x1e\x1f\x1d")
"""What stands between commits and their fields: no message can have it."""
LATEST = 253402300799  # the last second of the year 9999: git takes any number for a date
SET = (
    "core.fsmonitor=false", "core.hooksPath=/dev/null", "core.quotePath=off", "diff.external=", "diff.renameLimit=400", "protocol.allow=never",
    # what a clone's own settings would make of the output: other prefixes of paths, a root without files, hunks joined, another encoding
    "diff.noprefix=false", "diff.mnemonicPrefix=false", "diff.srcPrefix=a/", "diff.dstPrefix=b/", "diff.interHunkContext=0",
    "log.showRoot=true", "log.showSignature=false", "i18n.logOutputEncoding=UTF-8",
)  # fmt: skip
SAFE = [word for setting in SET for word in ("-c", setting)]


@dataclass(frozen=True)
class File:
    """One file of a change. `was`: its path before, where it was renamed. A binary file has no lines: 0, 0."""

    path: str
    was: str
    added: int
    deleted: int


@dataclass(frozen=True)
class Commit:
    """One commit. Times are seconds since 1970, of the author and of the committer."""

    hash: str
    parents: tuple[str, ...]
    written: int
    committed: int
    subject: str
    body: str
    files: tuple[File, ...]


def git(path: Path, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """git in a repository, with none of its own programs. The caller reads it and asks for its exit status."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # a replacement or a graft says that commits have other parents, or none
    environment |= dict.fromkeys(("GIT_CONFIG_NOSYSTEM", "GIT_NO_LAZY_FETCH", "GIT_NO_REPLACE_OBJECTS"), "1")
    environment |= dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_GRAFT_FILE"), os.devnull)
    environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    call = ["git", "--no-pager", *SAFE, "-c", f"safe.directory={path.resolve()}", "-C", str(path), *words]
    with blaming(lambda _: SoliError("git is not installed", fix="apt install git, or what your system has for it"), FileNotFoundError):
        return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=stdin, env=environment)


def asked(path: Path, *words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a short command."""
    with git(path, *words) as process:
        out, err = process.communicate()
    return process.returncode, out.decode(errors="replace").strip(), err.decode(errors="replace").strip()


def check(path: Path) -> int:
    """How many commits HEAD has. SoliError where the history is none, or not whole."""
    status, _, error = asked(path, "rev-parse", "--git-dir")
    if status:
        raise SoliError("this is no git repository", got=f"{path}: {_last(error)}", allowed="a clone, bare or not")
    if asked(path, "rev-parse", "--is-shallow-repository")[1] == "true":
        what = "the history is cut off: a shallow clone has its last commits only"
        raise SoliError(what, got=path, allowed="a whole clone", fix=f"git -C {path} fetch --unshallow")
    for key in ("extensions.partialclone", r"remote\..*\.(promisor|partialclonefilter)"):
        status, said, _ = asked(path, "config", "--local", "--get-regexp", key)
        if status == 0 and said:
            what = "the history is partial: a filtered clone fetches what it lacks when it is asked, and so has no sizes of changes"
            raise SoliError(what, got=f"{path}: {said.splitlines()[0]}", allowed="a whole clone", fix="git clone without --filter")
    if asked(path, "rev-parse", "--show-prefix")[1]:
        fix = asked(path, "rev-parse", "--show-toplevel")[1]
        raise SoliError("this is a folder of a repository, and a history is of all of it", got=path, fix=fix)
    if asked(path, "rev-parse", "--verify", "HEAD")[0]:
        if not asked(path, "rev-list", "-n1", "--all")[1]:
            raise SoliError("the history has no commits", got=path)
        got, fix = f"{path}: {asked(path, 'symbolic-ref', 'HEAD')[1]}", f"git -C {path} symbolic-ref HEAD refs/heads/BRANCH"
        raise SoliError("HEAD names no commit", got=got, allowed="a branch that is there", fix=fix)
    status, count, error = asked(path, "rev-list", "--count", "HEAD")
    if status:
        raise SoliError("the history cannot be read", got=f"{path}: {_last(error)}", fix="clone it again; git fsck says what is damaged")
    return int(count)


def read(path: Path, left_out: tuple[str, ...] = ()) -> Iterator[Commit]:
    """Every commit of HEAD, newest first, without the files whose names match `left_out`.

    SoliError where git stops before the last, or says more or fewer than it counted.
    """
    wanted = check(path)
    form = f"--format=tformat:{MARK + PART.join(FIELDS) + END}"
    exclude = [f":(exclude,icase,glob)**/{name}" for name in left_out]
    # Of a merge that is like one of its parents a path would hide the other side. A submodule is a commit, and has no lines.
    whole = ("--full-history", "--ignore-submodules=all", "--no-ext-diff", "--no-textconv")
    words = ("log", "--numstat", "-z", "-M", *whole, form, "HEAD", "--", ".", *exclude)
    # A path leaves out commits that touch nothing else: so those are asked for without one.
    found, count = {fields[0]: files for fields, files in _chunks(path, words)}, 0
    for fields, _ in _chunks(path, ("log", "-z", form, "HEAD")):
        hash_, parents, written, committed, message = fields
        subject, _, body = message.strip().partition("\n")
        count += 1
        times = (_time(written or committed), _time(committed or written))
        files = found.get(hash_, ())
        yield Commit(hash_, tuple(parents.split()), *times, subject.strip(), body.strip(), files)
    if count != wanted:
        raise SoliError("the history was not read whole", got=f"{path}: {count} of {wanted} commits", fix="git fsck")


def _chunks(path: Path, words: tuple[str, ...]) -> Iterator[tuple[list[str], tuple[File, ...]]]:
    """The fields and files of each commit that git prints."""
    with git(path, *words) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        rest, text = "", codecs.getincrementaldecoder("utf-8")("surrogateescape")
        while block := process.stdout.read(1 << 20):
            *whole, rest = (rest + text.decode(block)).split(MARK)
            yield from (_parsed(one) for one in whole if one)
        if rest:
            yield _parsed(rest)
        error = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise stopped(path, error, process.returncode)


def stopped(path: Path, error: str, status: int) -> SoliError:
    """What to raise when git ended before all was read."""
    what = "git stopped before the end of the history: it is damaged, or lacks some of its files"
    return SoliError(what, got=f"{path}: {_last(error)} (exit status {status})", allowed="a whole clone", fix="git fsck --full; clone it again")


def _parsed(text: str) -> tuple[list[str], tuple[File, ...]]:
    head, _, tail = text.partition(END)
    return head.split(PART), tuple(_files(tail))


def _files(text: str) -> Iterator[File]:
    """The lines of --numstat -z: "added TAB deleted TAB path NUL", or of a rename "... TAB NUL before NUL after NUL"."""
    words = iter(text.split("\0")) if "\t" in text else iter(())
    for word in words:
        if "\t" not in word:
            continue
        added, deleted, name = word.lstrip("\n").split("\t", 2)
        was = "" if name else next(words)
        yield File(name or next(words), was, _number(added), _number(deleted))


def _time(word: str) -> int:
    return min(max(int(word or 0), 0), LATEST)


def _number(word: str) -> int:
    return int(word) if word != "-" else 0


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "git said nothing"
