"""The layout of every tensor of every model under some plans is the one that tests/golden holds."""

from __future__ import annotations

from pathlib import Path

import pytest

import layouts
from pool import Pool
from sweep import swept

FOLDER = Path(__file__).resolve().parent / "golden"


ALIKE = ("hf-bert", "hf-mistral", "hf-opt", "hf-qwen2", "hf-vit", "t5")
"""Laid out by the same rules as others."""


@pytest.mark.parametrize("name", [swept(name) if name in ALIKE else name for name in layouts.MODELS])
def test_layouts_are_the_golden_ones(pool: Pool, name: str) -> None:
    found = layouts.text(layouts.of_case(pool, name))
    assert found == (FOLDER / f"{name}.json").read_text(), "if this change is meant: make golden"


def test_every_model_has_a_file_and_no_file_is_left() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(layouts.MODELS)
