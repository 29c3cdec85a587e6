"""Tokenizer, token files, windows, and the units of the loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soli.core.errors import SoliError
from soli.train import measure, tokens
from soli.train.config import Config
from soli.train.corpus import documents, place
from soli.train.windows import IGNORED, Span, Spread, Windows, open_tokens, width_for, write_header

TOKENIZER = tokens.train_tokenizer(["def f(x):\n    return x + 1\n", "été 音楽 " * 20], 300)


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    assert tokens.decode(TOKENIZER, tokens.encode(TOKENIZER, text)) == text


def test_the_end_mark_in_a_text_is_text() -> None:
    ids = tokens.encode(TOKENIZER, f"a{tokens.END}b")
    assert 0 not in ids
    assert tokens.decode(TOKENIZER, ids) == f"a{tokens.END}b"


def corpus(folder: Path) -> Config:
    for i in range(40):
        words = " ".join(f"word{(i * j) % 17} été" for j in range(1, 60 + i))
        (folder / f"{i:02}.txt").write_text(f"document {i}\n{words}\n", encoding="utf-8")
    config = Config()
    return replace(
        config,
        data=replace(config.data, path=str(folder), validation=0.2),
        tokenizer=replace(config.tokenizer, vocab=320),
    )


def test_prepare_encodes_each_document_once_and_caches(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    config, said = corpus(tmp_path / "text"), []
    found = tokens.prepare(config, tmp_path / "cache", said.append)
    assert found.tokenizer is not None
    tokenizer = tokens.load_tokenizer(found.tokenizer)
    for span, kept in ((found.train, False), (found.validation, True)):
        mine = [d.text for d in documents(config.data) if (place(d.digest()) < 0.2) is kept]
        assert tokens.decode(tokenizer, span.ids().tolist()) == tokens.END + "".join(t + tokens.END for t in mine)
        assert span.bytes == sum(len(text.encode()) for text in mine)
    assert any("tokenizer" in line for line in said)
    stamp = found.train.path.stat().st_mtime_ns
    assert tokens.prepare(config, tmp_path / "cache", said.append) == found
    assert found.train.path.stat().st_mtime_ns == stamp
    assert tokens.from_json(json.loads(json.dumps(tokens.to_json(found)))) == found
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [found.key]  # no half-made folder is left
    # What soli wrote is itself data that can be given, and another text is another key.
    home = found.train.path.parent
    again = replace(config, data=replace(config.data, path=str(home)))
    reopened = tokens.prepare(again, tmp_path / "other", said.append)
    assert replace(reopened, key=found.key) == found
    (tmp_path / "text" / "00.txt").write_text("changed")
    assert tokens.prepare(config, tmp_path / "cache", said.append).key != found.key


def test_token_files_are_known_by_their_content(tmp_path: Path) -> None:
    config, keys = Config(), set()
    for name in ("mine.bin", "mine"):
        config = replace(config, data=replace(config.data, path=str(tmp_path / name), validation=0.2))
        (tmp_path / "mine").mkdir(exist_ok=True)
        for changed in range(3):
            for i, file in enumerate(("train.bin", "validation.bin", "../mine.bin")):
                path = tmp_path / "mine" / file
                (np.arange(99, dtype="<u2") + (changed == i + 1)).tofile(path)
                write_header(path, dtype="uint16", vocab=101, tokens=99, documents=1, bytes_=99)
            keys.add(tokens.prepare(config, tmp_path, print).key)
    assert len(keys) == 4, "three of the folder, and one of a file that is the same"


def test_a_split_without_validation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    config = replace(Config(), data=replace(Config().data, path=str(tmp_path)))
    with pytest.raises(SoliError, match="nothing for validation"):
        tokens.prepare(config, tmp_path / "cache", print)


def test_of_few_documents_one_is_for_validation(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    for i in range(8):
        (tmp_path / "few" / f"{i}.txt").write_text(f"document {i} " * 20)
    config = replace(Config(), data=replace(Config().data, path=str(tmp_path / "few"), validation=1e-4))
    found = tokens.prepare(config, tmp_path / "cache", print)
    least = min(documents(config.data), key=lambda d: place(d.digest()))
    assert found.validation.bytes == len(least.text)
    assert found.train.bytes == sum(len(d.text) for d in documents(config.data)) - len(least.text)
    small = replace(config, tokenizer=replace(config.tokenizer, sample_megabytes=1e-5))
    assert tokens.prepare(small, tmp_path / "cache", print).validation.bytes == len(least.text)
    for i in range(8):
        (tmp_path / "few" / f"{i}.txt").write_text("alike " * 20)
    with pytest.raises(SoliError, match="nothing for validation") as refused:
        tokens.prepare(config, tmp_path / "cache", print)
    assert "8 documents, 0.0001 of them for validation, 8 with the same text" in str(refused.value)


def test_a_given_tokenizer_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(SoliError, match="is no tokenizer"):
        tokens.load_tokenizer(path)


def write(path: Path, ids: list[int], dtype: str, vocab: int, **more: object) -> Path:
    path.write_bytes(np.asarray(ids, dtype=np.dtype(dtype).newbyteorder("<")).tobytes())
    path.with_suffix(".json").write_text(json.dumps({"dtype": dtype, "vocab": vocab, **more}))
    return path


@pytest.mark.parametrize(("dtype", "vocab"), [("uint16", 65536), ("uint32", 70000)])
def test_the_format_of_a_token_file(tmp_path: Path, dtype: str, vocab: int) -> None:
    ids = [0, 1, vocab - 1, 258]
    span = open_tokens(write(tmp_path / "a.bin", ids, dtype, vocab, tokens=4, bytes=9))
    assert width_for(vocab) == dtype
    assert isinstance(span.ids(), np.memmap)
    assert span.ids().tolist() == ids
    assert (tmp_path / "a.bin").read_bytes()[-2:] == (b"\x02\x01" if dtype == "uint16" else b"\x00\x00")
    assert (len(span), span.vocab, span.bytes) == (4, vocab, 9)
    write_header(tmp_path / "a.bin", dtype=dtype, vocab=vocab, tokens=4, documents=1, bytes_=9)
    assert open_tokens(tmp_path / "a.bin") == span


def test_token_files_that_do_not_fit_their_header(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with pytest.raises(SoliError, match="below 5"):
        open_tokens(write(path, [1, 5], "uint16", 5))
    with pytest.raises(SoliError, match="is not what"):
        open_tokens(write(path, [1, 2, 3], "uint16", 5, tokens=4))
    path.write_bytes(b"abc")
    with pytest.raises(SoliError, match="3 bytes"):
        open_tokens(path)
    path.with_suffix(".json").write_text('{"dtype": "int8", "vocab": "many"}')
    with pytest.raises(SoliError) as caught:
        open_tokens(path)
    assert len(caught.value.problems) == 2
    path.with_suffix(".json").unlink()
    with pytest.raises(SoliError, match="no such file"):
        open_tokens(path)


def test_one_token_file_is_cut_near_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", list(range(100)), "uint16", 100)
    config = replace(Config(), data=replace(Config().data, path=str(path), validation=0.1))
    found = tokens.prepare(config, tmp_path / "cache", print)
    assert found.train.ids().tolist() == list(range(90))
    assert found.validation.ids().tolist() == list(range(90, 100))
    assert found.tokenizer is None
    assert found.validation.bytes is None


@pytest.mark.parametrize("count", [2, 8, 9, 10, 25])
def test_windows_hold_every_target_once(tmp_path: Path, count: int) -> None:
    ids = list(range(1, count + 1))
    windows = Windows(open_tokens(write(tmp_path / "a.bin", ids, "uint16", 100)), 8)
    rows = [windows[i] for i in range(len(windows))]
    assert all(row["tokens"].shape == row["targets"].shape == (8,) for row in rows)
    assert rows[0]["tokens"].dtype == rows[0]["targets"].dtype == torch.int64
    have = torch.cat([row["tokens"] for row in rows])[: count - 1].tolist()
    wanted = torch.cat([row["targets"] for row in rows])
    assert have == ids[:-1]
    assert wanted[wanted != IGNORED].tolist() == ids[1:]
    assert windows.targets == count - 1
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_a_spread_of_windows(tmp_path: Path) -> None:
    windows = Windows(open_tokens(write(tmp_path / "a.bin", list(range(81)), "uint16", 100)), 8)
    assert [int(row["tokens"][0]) for row in map(Spread(windows, 3).__getitem__, range(3))] == [0, 24, 48]
    assert len(Spread(windows, 100)) == len(windows) == 10


def test_bits_per_byte_against_a_direct_count(tmp_path: Path) -> None:
    # A model that gives every id the same chance: log2(V) bits a token, whatever the text.
    texts = ["def f():\n", "été"]
    ids = [0]
    for text in texts:
        ids += [*tokens.encode(TOKENIZER, text), 0]
    size = sum(len(text.encode()) for text in texts)
    span = open_tokens(write(tmp_path / "a.bin", ids, "uint16", 300, bytes=size))
    windows = Windows(span, 4)
    nats = sum(
        float(
            torch.nn.functional.cross_entropy(
                torch.zeros(4, 300, dtype=torch.float64), windows[i]["targets"], reduction="sum"
            )
        )
        for i in range(len(windows))
    )
    assert measure.bits_per_byte(nats, size) == pytest.approx((len(ids) - 1) * math.log2(300) / size, rel=1e-12)
    with pytest.raises(ValueError, match="0 bytes"):
        measure.bits_per_byte(1.0, 0)


def test_unigram_against_a_direct_count(tmp_path: Path) -> None:
    train = Span(write(tmp_path / "a.bin", [3, 0, 1, 1, 2], "uint16", 5), "uint16", 5, 0, 5)
    validation = Span(write(tmp_path / "b.bin", [4, 1, 4], "uint16", 5), "uint16", 5, 0, 3)
    # Targets 0 1 1 2 and one more of each of five ids: 1 has 3 of 9, 4 has 1 of 9.
    assert measure.unigram(train, validation) == pytest.approx(-(math.log(3 / 9) + math.log(1 / 9)) / 2)
