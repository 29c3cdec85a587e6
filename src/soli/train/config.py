"""Every setting of `soli train`: one place, typed, with its bounds beside it.

A setting that depends on the machine or on the run (0 or "" below) is filled in by `train/size.py` or at
the start of the run; the resolved configuration lies in the run directory as `config.toml` and is itself
a valid configuration.
"""

from dataclasses import dataclass, field
from typing import Any

KINDS = ("auto", "stdlib", "text", "folder", "jsonl", "dataset", "tokens")


def setting(default: Any, words: str, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its meaning and its bounds (both inclusive), read by `train/settings.py`."""
    return field(default=default, metadata={"help": words, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class Data:
    path: str = setting("stdlib", "stdlib, or a file or folder of text, .jsonl, dataset on disk, .bin")
    kind: str = setting("auto", "what lies at path; auto looks", choices=KINDS)
    field: str = setting("text", "the field of a .jsonl line or of a dataset that holds the text")
    pattern: str = setting("**/*", "which files of a folder, as a glob")
    validation: float = setting(0.05, "part of the documents that is kept for validation", low=0.0001, high=0.5)
    megabytes: float = setting(0.0, "read about so many MB (10^6 bytes) at most; 0: everything", low=0)
    cache: str = setting("", "folder of encoded tokens, by content; empty: `tokens` beside the runs")


@dataclass(frozen=True)
class Tokenizer:
    path: str = setting("", "a tokenizer.json to use; empty: train one on the training documents")
    vocab: int = setting(4096, "tokens of a trained tokenizer, at most", low=257, high=1_000_000)
    sample_megabytes: float = setting(4.0, "text that the tokenizer is trained on, MB", low=0.001)


@dataclass(frozen=True)
class Model:
    dim: int = setting(0, "width; 0: sized to the machine", low=0)
    layers: int = setting(0, "blocks; 0: sized to the machine", low=0)
    heads: int = setting(0, "attention heads; 0: sized to the machine", low=0)
    context: int = setting(128, "tokens of a window", low=2)
    dropout: float = setting(0.0, "part of the activations dropped in training", low=0, high=0.95)
    tied: bool = setting(True, "the output projection is the token embedding")


@dataclass(frozen=True)
class Optim:
    lr: float = setting(0.0, "peak learning rate of AdamW; 0: by the width of the model", low=0, high=1)
    batch: int = setting(16, "windows of a step, over all ranks", low=1)
    warmup: int = setting(20, "steps of linear warm-up", low=0)
    floor: float = setting(0.1, "the learning rate ends at this part of its peak (cosine)", low=0, high=1)
    beta1: float = setting(0.9, "AdamW", low=0, high=0.9999)
    beta2: float = setting(0.95, "AdamW", low=0, high=0.99999)
    weight_decay: float = setting(0.1, "AdamW", low=0, high=10)
    clip: float = setting(1.0, "largest norm of the gradient; 0: no clipping", low=0)


@dataclass(frozen=True)
class Run:
    name: str = setting("", "ends the name of the run directory; empty: what the data is called")
    folder: str = setting("runs", "where run directories are made")
    plan: str = setting("auto", "how to split: auto, auto=probe, or a plan such as dp=2,zero=3")
    seed: int = setting(0, "weights, dropout, order of the data, sample", low=0, high=2**31 - 1)
    minutes: float = setting(2.2, "wall clock of the whole command; decides `steps` if that is 0", low=0)
    steps: int = setting(0, "optimizer steps; 0: as many as fit into `minutes`", low=0)
    evaluate_every: int = setting(0, "steps between looks at validation; 0: ten looks in all", low=0)
    evaluate_windows: int = setting(64, "windows of such a look (the last one takes all)", low=1)
    save_every: int = setting(0, "steps between checkpoints; 0: in the middle and at the end", low=0)
    sample_tokens: int = setting(200, "tokens of the sample at the end; 0: none", low=0)
    temperature: float = setting(0.7, "of the sample; 0: the likeliest token", low=0, high=10)
    prompt: str = setting("", "the sample continues this; empty: def for the stdlib, else a new document")


@dataclass(frozen=True)
class Config:
    """The whole configuration; its TOML has one table for each field."""

    data: Data = field(default_factory=Data)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    run: Run = field(default_factory=Run)
