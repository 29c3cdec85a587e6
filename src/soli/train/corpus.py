"""From a source to documents, and which of them are for validation.

A document is a text that is modelled on its own. It goes to validation when the hash of its text says so:
the split is the same on every machine and in every order, and two equal documents never fall on both sides.

    stdlib    the source of Python's standard library: every .py file but installed packages, tests, and
              two folders of tables (encodings, pydoc_data) that teach nothing about code; about 10 MB
    text      one file, cut at line ends into about 64 documents or into documents of 16 KiB, whichever
              is smaller, since a single document cannot be split
    folder    every file that matches data.pattern, hidden ones left out; .jsonl files line by line
    jsonl     one JSON object a line; its field data.field is the document
    dataset   a Hugging Face dataset on disk (`Dataset.save_to_disk`); of a dictionary the split `train`
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from soli.core.errors import SoliError, blaming, nearest, needing
from soli.train.config import Data

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
PIECE = 16 * 1024
MARKS_OF_A_DATASET = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Document:
    name: str
    text: str

    def digest(self) -> bytes:
        """32 bytes that depend on the text alone."""
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=32).digest()


def place(digest: bytes) -> float:
    """A number from 0 to 1 that the document's text draws: those below a part are for validation."""
    return int.from_bytes(digest[:8], "big") / 2**64


def kind_of(data: Data) -> str:
    """What lies at data.path: one of config.KINDS but `auto`."""
    if data.kind != "auto":
        return data.kind
    if data.path == "stdlib":
        return "stdlib"
    path = Path(data.path)
    if not data.path or not os.path.exists(path):
        allowed = "stdlib, or an existing file or folder"
        fix = nearest(data.path, ["stdlib", *map(str, path.parent.glob("*"))], "check data.path (--data)")
        raise SoliError("there is no such data", got=data.path, allowed=allowed, fix=fix)
    if path.is_dir():
        if (path / "train.bin").exists():
            return "tokens"
        return "dataset" if any((path / mark).exists() for mark in MARKS_OF_A_DATASET) else "folder"
    return {".jsonl": "jsonl", ".bin": "tokens"}.get(path.suffix, "text")


def documents(data: Data) -> Iterator[Document]:
    """Every document of the source, in a fixed order, up to data.megabytes. Empty texts are left out.

    Raises SoliError for a missing or empty source, a file that is not UTF-8, and a line that does not parse.
    """
    read = {
        "stdlib": _stdlib, "text": lambda: _pieces(Path(data.path)), "folder": lambda: _folder(Path(data.path), data),
        "jsonl": lambda: _lines(Path(data.path), data.field), "dataset": lambda: _dataset(Path(data.path), data.field),
    }[kind_of(data)]  # fmt: skip
    room = data.megabytes * 1e6 if data.megabytes else float("inf")
    any_text = False
    for document in read():
        if not document.text.strip():
            continue
        if any_text and room <= 0:
            return
        any_text = True
        room -= _size(document)
        yield document
    if not any_text:
        raise SoliError("the data holds no text", got=data.path, allowed="at least two documents", fix="check data.path")


def _size(document: Document) -> int:
    """Bytes of the text in UTF-8. JSON can spell half a character (\\ud800), which has none."""
    try:
        return len(document.text.encode("utf-8"))
    except UnicodeEncodeError as error:
        got = ascii(document.text[error.start])
        allowed = "text that UTF-8 can say"
        raise SoliError(f"{document.name} holds half a character", got=got, allowed=allowed, fix="mend the file: this is one half of a surrogate pair") from error


def read_text(path: Path) -> str:
    """The text of a file, or a SoliError that names the file and the byte that is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SoliError("the file cannot be read", got=f"{path}: {error.strerror}", fix="check data.path (--data), data.kind") from error
    except UnicodeDecodeError as error:
        got = f"byte 0x{error.object[error.start]:02x} at {error.start}"
        raise SoliError(f"{path} is not UTF-8", got=got, allowed="text in UTF-8", fix="convert it (iconv), or leave it out by data.pattern") from error


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    every = (path.relative_to(root) for path in root.rglob("*.py"))
    files = sorted(path for path in every if not LEFT_OUT & set(path.parts))
    if not files:
        raise SoliError("this Python has no source of its standard library", got=root, fix="give a text file or folder: --data PATH")
    for file in files:
        # _sysconfigdata_*.py records how this Python was built: paths of one machine, no program.
        if not file.name.startswith("_sysconfigdata"):
            yield Document(str(file), read_text(root / file))


def _pieces(path: Path) -> Iterator[Document]:
    text = read_text(path)
    size = max(256, min(PIECE, len(text) // 64))
    start = number = 0
    while start < len(text):
        room = min(start + 2 * size, len(text))
        # after a line; of lines that are longer, after a word; or where there is no room for more
        end = text.find("\n", start + size, room) + 1 or text.find(" ", start + size, room) + 1 or room
        yield Document(f"{path.name}:{number}", text[start:end])
        start, number = end, number + 1


def _folder(root: Path, data: Data) -> Iterator[Document]:
    if not root.is_dir():
        raise SoliError("there is no such folder", got=root, fix="check data.path (--data)")
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(root).parts)
    wrong = lambda error: SoliError("data.pattern is no pattern inside the folder", got=f"{data.pattern!r}: {error}", allowed="such as **/*.txt")
    with blaming(wrong, ValueError, NotImplementedError):  # an absolute one, or "**" inside a name
        files = sorted(path for path in root.glob(data.pattern) if path.is_file() and not hidden(path))
    if not files:
        raise SoliError("no file of the folder matches", got=f"{data.pattern} in {root}", fix="check data.pattern")
    for path in files:
        if path.suffix == ".jsonl":
            yield from _lines(path, data.field)
        else:
            yield Document(str(path.relative_to(root)), read_text(path))


def _lines(path: Path, field: str) -> Iterator[Document]:
    if not path.is_file():
        raise SoliError("there is no such file", got=path, fix="check data.path (--data)")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise SoliError(f"{place}: not JSON", got=f"{line[:60]!r}: {error}", allowed="one JSON object a line") from error
            yield Document(f"{path.name}:{number}", _field(row, field, place))


def _field(row: object, field: str, place: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if isinstance(text, str):
        return text
    there = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
    what = f"{place}: no text in the field {field!r}"
    got = there if text is None else f"{field} = {text!r}"
    raise SoliError(what, got=got, allowed="an object with a text in that field", fix="name the field: data.field")


def _dataset(path: Path, field: str) -> Iterator[Document]:
    with needing("a Hugging Face dataset needs the package `datasets`", "hf"):
        import datasets
    wrong = lambda error: SoliError("this is no dataset on disk", got=error, allowed="a folder of Dataset.save_to_disk")
    with blaming(wrong, FileNotFoundError, ValueError):
        data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise SoliError("the dataset has no split `train`", got=", ".join(data), fix=f"give the folder of one split, {path / next(iter(data))}")
        data = data["train"]
    if field not in data.column_names:
        raise SoliError(f"the dataset has no field {field!r}", got=", ".join(data.column_names), fix="name it: data.field")
    for number, text in enumerate(data[field]):
        yield Document(f"{path.name}:{number}", _field({field: text}, field, f"{path}, row {number}"))
