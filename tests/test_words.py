"""Words of tables, many of each kind: what they come to of a row, and what is like them and means something else."""

from __future__ import annotations

import pytest
from tests.test_predict import ROW

from soli.planner.rows import read

TITAN = {"framework": "torchtitan"}


def each(row: dict[str, str], column: str, words: tuple[str, ...], **point: float) -> list[tuple[dict[str, str], dict[str, float]]]:
    return [(row | {column: word}, point) for word in words]


CASES = [
    *each(
        TITAN, "attention",
        ("standard attention", "vanilla", "PyTorch", "torch", "baseline", "no FA", "w/o FA", "no FA2", "without flash", "flash off", "FlashAttention: off",
         "flash-attn=False", "FlashAttention disabled", "non-fused", "PyTorch (standard)", "native PyTorch attention", "fused softmax", "dot_product",
         "without FlashAttention (standard)", "unoptimized", "HF baseline (standard attention)"), flash=0,
    ),
    *each(
        {"framework": "Megatron-LM"}, "attention",
        ("standard SDPA", "PyTorch SDPA", "FlashAttention (no dropout)", "flash attention, no bias", "baseline + flash", "FA2", "v2", "2", "aiter", "cudnn_flash_te",
         "mem-efficient", "fused kernels", "xformers"), flash=1,
    ),
    *each({"framework": "Megatron-LM", "attention": "PyTorch"}, "notes", ("flash-attn 2 elsewhere",), flash=0),
    *each({"framework": "FlashAttention's scripts"}, "attention", ("standard", "PyTorch"), flash=0),
    *each({"framework": "FlashAttention's scripts"}, "attention", ("", "n/a"), flash=1),
    *each(TITAN, "notes", ("standard attention", "vanilla attention", "no FA2", "without flash attention"), flash=0),
    *each(TITAN, "notes", ("2x faster than standard attention", "no fatal errors", "no fused norm"), flash=1),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "point"), CASES)
def test_words(changes: dict[str, str], point: dict[str, float]) -> None:
    row = read(ROW | changes)
    assert not row.refused, row.refused
    assert {name: row.point[name] for name in point} == pytest.approx(point)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"framework": name, "attention": "GQA"}, "attention: 'gqa' is not understood") for name in ("torchtitan", "FlashAttention's scripts")),
    ],
)  # fmt: skip
def test_what_is_said_of_words(changes: dict[str, str], said: str) -> None:
    row = read(ROW | changes)
    assert not row.refused, row.refused
    assert said in row.inferred
