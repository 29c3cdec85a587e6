"""Corpora of every kind, from real small files, and the split by hash."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from soli.core.errors import SoliError
from soli.train.config import Data
from soli.train.corpus import Document, documents, kind_of, place


def texts(data: Data) -> list[str]:
    return [document.text for document in documents(data)]


def test_the_standard_library() -> None:
    found = list(documents(Data(megabytes=1.5)))
    assert 1.5e6 <= sum(len(d.text.encode()) for d in found) < 3e6
    assert any("def " in d.text for d in found)
    assert not any("test/" in d.name or "site-packages" in d.name or "_sysconfigdata" in d.name for d in found)
    assert found == list(documents(Data(megabytes=1.5)))


def test_a_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    whole = "".join(f"line {i} é\n" for i in range(5000)) + "no end"
    path.write_text(whole, encoding="utf-8")
    pieces = texts(Data(path=str(path)))
    assert "".join(pieces) == whole
    assert len(pieces) > 40
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.md").write_text("x")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "c.jsonl").write_text('{"text": "c1"}\n\n{"text": "c2"}\n')
    assert texts(Data(path=str(tmp_path))) == ["a", "x", "c1", "c2"]
    assert texts(Data(path=str(tmp_path), pattern="*.txt")) == ["a"]
    with pytest.raises(SoliError, match="no file of the folder matches"):
        texts(Data(path=str(tmp_path), pattern="*.rst"))


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one", "body": "1"}) + "\n" + json.dumps({"text": "two"}) + "\n")
    assert texts(Data(path=str(path))) == ["one", "two"]
    with pytest.raises(SoliError, match=r"a\.jsonl, line 2: no text in the field 'body'"):
        texts(Data(path=str(path), field="body"))
    path.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(SoliError, match=r"a\.jsonl, line 2: not JSON"):
        texts(Data(path=str(path)))
    path.write_text('{"text": "half \\ud800"}\n')
    with pytest.raises(SoliError, match="half a character"):
        texts(Data(path=str(path)))


def test_a_dataset_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two", ""], "n": [1, 2, 3]})
    rows.save_to_disk(str(tmp_path / "rows"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "test"))
    assert texts(Data(path=str(tmp_path / "rows"))) == ["one", "two"]
    assert texts(Data(path=str(tmp_path / "both"))) == ["one", "two"]
    with pytest.raises(SoliError, match="no split `train`"):
        texts(Data(path=str(tmp_path / "test")))
    with pytest.raises(SoliError, match="no field 'body'"):
        texts(Data(path=str(tmp_path / "rows"), field="body"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # Python's own way to say: not installed
    with pytest.raises(SoliError, match="needs the package `datasets`"):
        texts(Data(path=str(tmp_path / "rows")))


def test_what_is_missing_empty_or_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("a poem")
    with pytest.raises(SoliError, match=r"did you mean .*poem\.txt"):
        kind_of(Data(path=str(tmp_path / "peom.txt")))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(SoliError, match="holds no text"):
        texts(Data(path=str(tmp_path / "empty.txt")))
    (tmp_path / "latin.txt").write_bytes("né".encode("latin-1"))
    with pytest.raises(SoliError, match=r"latin\.txt is not UTF-8") as caught:
        texts(Data(path=str(tmp_path / "latin.txt")))
    assert "0xe9 at 1" in str(caught.value)


def test_long_lines_are_cut_after_words_or_anywhere(tmp_path: Path) -> None:
    for text in ("some words " * 9000, "x" * 99_999, ("y" * 700 + "\n") * 90):
        (tmp_path / "one.txt").write_text(text)
        found = texts(Data(path=str(tmp_path / "one.txt")))
        assert "".join(found) == text
        assert max(map(len, found)) <= 2 * max(256, len(text) // 64)
        assert len(found) >= 32
        ends = {piece[-1] for piece in found}
        assert ends == {text[-1]}, "after a word, a line, or where all is alike"


def test_the_split_depends_on_the_text_alone() -> None:
    digests = [Document(f"{i}", f"document {i}").digest() for i in range(4000)]
    kept = sum(place(digest) < 0.1 for digest in digests)
    assert 320 < kept < 480
    assert Document("a", "same").digest() == Document("b", "same").digest()
    # Fixed: the split must not move between machines or versions.
    assert [i for i in range(60) if place(digests[i]) < 0.1] == [3, 19, 20, 28, 38]
