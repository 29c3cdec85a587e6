"""Losses in units that no tokenizer changes, and the loss of a model that knows nothing but frequencies."""

import math
from typing import Any

import numpy as np

from soli.train.windows import Span

CHUNK = 1 << 22


def bits_per_byte(nats: float, count: int) -> float:
    """All of the loss (nats, summed over targets) as bits for each of the `count` bytes of text."""
    if count < 1:
        raise ValueError(f"bits per byte of {count} bytes")
    return nats / math.log(2) / count


def counts(span: Span) -> np.ndarray[Any, Any]:
    """How often each id is a target in the span, [V], int64."""
    ids, total = span.ids()[1:], np.zeros(span.vocab, dtype=np.int64)
    for start in range(0, len(ids), CHUNK):
        total += np.bincount(ids[start : start + CHUNK], minlength=span.vocab)
    return total


def unigram(train: Span, validation: Span) -> float:
    """Nats per token of the validation targets under the frequencies of the training targets.

    Every id counts once more than it was seen, so that one that only validation has costs something finite.
    This is what a model scores that has learnt the frequencies and nothing about order.
    """
    seen, asked = counts(train) + 1, counts(validation)
    return float(-(asked * np.log(seen / seen.sum())).sum() / asked.sum())
