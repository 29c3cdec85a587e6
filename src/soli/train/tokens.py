"""From documents to token files: train a byte-pair tokenizer, encode, keep the result by its content.

One process does this; the others open what it wrote. The default corpus of about 10 MB takes about 8 s on
one core: the tokenizer is trained on `tokenizer.sample_megabytes` of it, and everything is encoded.
"""

import hashlib
import heapq
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from soli.checkpoint.team import as_soli_error
from soli.core.errors import SoliError, blaming
from soli.core.progress import busy
from soli.train.config import Config
from soli.train.corpus import Document, documents, kind_of, place, read_text
from soli.train.windows import DTYPES, Span, open_tokens, sum_of, width_for, write_header

END = "<|end|>"  # the end of a document, id 0
FORMAT = b"soli tokens 1"  # goes into the key of the cache: change it when the encoding changes
BATCH_BYTES = 1 << 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Tokens:
    """What the training reads. `tokenizer` is None for token files that came without one."""

    train: Span
    validation: Span
    tokenizer: Path | None
    key: str


def to_json(tokens: Tokens) -> dict[str, Any]:
    """For the other ranks; `from_json` gives the same back."""
    return json.loads(json.dumps(asdict(tokens), default=str))  # paths are texts there


def from_json(data: dict[str, Any]) -> Tokens:
    spans = {part: Span(**{**data[part], "path": Path(data[part]["path"])}) for part in ("train", "validation")}
    return Tokens(**spans, tokenizer=data["tokenizer"] and Path(data["tokenizer"]), key=data["key"])


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level byte-pair tokenizer of at most `vocab` tokens; every text can be encoded and decoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    signs = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=signs, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _plain(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json; raises SoliError when it is none, or has no end of document."""
    text = read_text(path)
    with blaming(lambda error: SoliError(f"{path} is no tokenizer", got=error, allowed="a tokenizer.json")):  # the library raises a bare Exception
        tokenizer = Tokenizer.from_str(text)
    if tokenizer.token_to_id(END) != 0:
        what = f"{path} does not end its documents as soli does"
        fix = "leave tokenizer.path empty, or encode the text yourself into a .bin"
        raise SoliError(what, got=f"{END} has id {tokenizer.token_to_id(END)}", allowed=f"{END} with id 0", fix=fix)
    return _plain(tokenizer)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """A text that happens to hold `<|end|>` is a text, no end of a document. The file does not keep this."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def prepare(config: Config, cache: Path, say: Say) -> Tokens:
    """Token files for the data of this configuration: opened, found in `cache`, or made there.

    say: is told what was found, and how it was made.
    """
    if kind_of(config.data) == "tokens":
        found = _opened(Path(config.data.path), config.data.validation)
        return replace(found, key="-".join([found.key, *map(sum_of, sorted({found.train.path, found.validation.path}))]))
    given = Path(config.tokenizer.path) if config.tokenizer.path else None
    survey = _survey(config, say)
    key = hashlib.blake2b(survey.digest, digest_size=10)
    key.update(repr((config.data.validation, config.tokenizer.vocab, config.tokenizer.sample_megabytes)).encode())
    key.update(read_text(given).encode() if given else b"trained")
    home = cache / key.hexdigest()
    if not home.exists():
        _make(config, survey, given, home, say)
    return _opened(home, config.data.validation)


def _opened(path: Path, part: float) -> Tokens:
    """Token files at `path`: a folder with train.bin and validation.bin, or one .bin, cut near its end."""
    folder = path if path.is_dir() else path.parent
    tokenizer = folder / "tokenizer.json" if (folder / "tokenizer.json").exists() else None
    if path.is_dir():
        train, validation = open_tokens(path / "train.bin"), open_tokens(path / "validation.bin")
        if train.vocab != validation.vocab:
            raise SoliError(f"{path}: two vocabularies", got=f"train {train.vocab}, validation {validation.vocab}")
        return Tokens(train, validation, tokenizer, path.name)
    whole = open_tokens(path)
    cut = len(whole) - max(2, round(len(whole) * part))
    if cut < 2:
        raise SoliError(f"{path} is too short to split", got=f"{len(whole)} tokens", allowed="4 or more")
    validation = replace(whole, start=cut, bytes=None)
    if tokenizer:
        text = decode(load_tokenizer(tokenizer), validation.ids()[1:].tolist()).replace(END, "")
        validation = replace(validation, bytes=len(text.encode("utf-8")) or None)  # of nothing but ends there are no bits per byte
    return Tokens(replace(whole, stop=cut, bytes=None), validation, tokenizer, path.stem)


@dataclass
class _Survey:
    """What the first pass over the documents finds."""

    digest: bytes = b""
    documents: int = 0
    kept: int = 0  # documents for validation
    bytes: int = 0
    sample: tuple[str, ...] = ()
    part: float = 0.0  # documents that draw less are for validation


def _survey(config: Config, say: Say) -> _Survey:
    """Read everything once: sizes, the digest of the whole, and the tokenizer's sample.

    The sample is the training documents of the smallest hashes: a fair draw, the same in every order.
    """
    found, whole = _Survey(part=config.data.validation), hashlib.blake2b(FORMAT)
    heap: list[tuple[int, int, str]] = []
    least, alike = b"\xff" * 32, 0  # the training document that drew least, and how often it is there
    held, room = 0, config.tokenizer.sample_megabytes * 1e6
    with busy(f"reading {config.data.path}") as done:
        for document in documents(config.data):
            digest, size = document.digest(), len(document.text.encode("utf-8"))
            whole.update(digest)
            found.documents, found.bytes = found.documents + 1, found.bytes + size
            done(size)
            if place(digest) < found.part:
                found.kept += 1
                continue
            heapq.heappush(heap, (-int.from_bytes(digest, "big"), found.documents, document.text))
            held += len(document.text)
            alike = 1 if digest < least else alike + (digest == least)
            least = min(least, digest)
            while held > room and len(heap) > 1 + alike:
                held -= len(heapq.heappop(heap)[2])
    if not found.kept and 0 < 2 * alike <= found.documents:  # as may be of few: then the one that drew least
        heap = [one for one in heap if one[0] != -int.from_bytes(least, "big")]
        found.kept, found.part = alike, math.nextafter(place(least), 1.0)
    if found.kept in (0, found.documents):
        what = "the split left nothing for " + ("validation" if found.kept == 0 else "training")
        got = f"{found.documents} documents, {config.data.validation:g} of them for validation" + (f", {alike} with the same text" if alike > 1 else "")
        fix = "give more documents (one is a file of text, a line of .jsonl, a row of a dataset; those with the same text stay together), or another data.validation"
        raise SoliError(what, got=got, fix=fix)
    found.digest = whole.digest()
    found.sample = tuple(text for _, _, text in sorted(heap))
    read = f"{found.documents} documents, {found.bytes / 1e6:.1f} MB"
    say(f"data: {config.data.path}, {read}, {found.kept} documents for validation")
    return found


def _make(config: Config, survey: _Survey, given: Path | None, home: Path, say: Say) -> None:
    """Train the tokenizer, encode both parts, and let the folder appear under its name when it is whole."""
    start = time.perf_counter()
    with blaming(partial(as_soli_error, f"to make {home.parent}"), OSError):
        home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{home.name}.", dir=home.parent, ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        tokenizer = load_tokenizer(given) if given else train_tokenizer(survey.sample, config.tokenizer.vocab)
        tokenizer.save(str(work / "tokenizer.json"))
        how = "loaded" if given else f"trained on {sum(map(len, survey.sample)) / 1e6:.1f} MB"
        say(f"tokenizer: {tokenizer.get_vocab_size()} tokens, {how}, {time.perf_counter() - start:.1f} s")
        _encode(config, tokenizer, survey, work)
        try:
            os.rename(work, home)
        except OSError:
            if not home.exists():  # else another run made the same at the same time: take that
                raise
    say(f"tokens: written to {home}, {time.perf_counter() - start:.1f} s")


def _encode(config: Config, tokenizer: Tokenizer, survey: _Survey, folder: Path) -> None:
    vocab = tokenizer.get_vocab_size()
    writers = {part: _Writer(folder / f"{part}.bin", width_for(vocab)) for part in ("train", "validation")}
    batch: list[Document] = []

    def flush() -> None:
        texts = [document.text for document in batch]
        for document, coded in zip(batch, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            part = "validation" if place(document.digest()) < survey.part else "train"
            size = len(document.text.encode("utf-8"))
            writers[part].add(coded.ids, size)
            done(size)
        batch.clear()

    with busy("encoding", survey.bytes) as done:
        held = 0
        for document in documents(config.data):
            batch.append(document)
            held += len(document.text)
            if held >= BATCH_BYTES:
                flush()
                held = 0
        flush()
    for writer in writers.values():
        writer.close(vocab)


class _Writer:
    """Appends documents to one token file, which starts with an end of document."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype = path, dtype
        self.file = path.open("wb")
        self.tokens = self.documents = self.bytes = 0
        self._put([0])

    def _put(self, ids: list[int]) -> None:
        self.file.write(np.asarray(ids, dtype=DTYPES[self.dtype]).tobytes())
        self.tokens += len(ids)

    def add(self, ids: list[int], size: int) -> None:
        self._put([*ids, 0])
        self.documents, self.bytes = self.documents + 1, self.bytes + size

    def close(self, vocab: int) -> None:
        self.file.close()
        counts = {"tokens": self.tokens, "documents": self.documents, "bytes_": self.bytes}
        write_header(self.path, dtype=self.dtype, vocab=vocab, **counts)
