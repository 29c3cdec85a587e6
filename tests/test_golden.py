"""The layout of every tensor of every model under some plans is the one that tests/golden holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import layouts
from pool import Pool
from sweep import swept

FOLDER = Path(__file__).resolve().parent / "golden"


ALIKE = ("hf-bert", "hf-mistral", "hf-opt", "hf-qwen2", "hf-vit", "t5")
"""Laid out by the same rules as others."""
OTHERS = [name for name in layouts.MODELS if name != "gpt"]
"""Under all plans in the sweep; what a model's own layout is, plans of two ranks say, and gpt's how axes go together."""


@pytest.mark.parametrize(
    ("name", "ranks"), [("gpt", 4), *((name, 2) for name in OTHERS if name not in ALIKE), *(swept(name, 4) for name in OTHERS)]
)
def test_layouts_are_the_golden_ones(pool: Pool, name: str, ranks: int) -> None:
    golden, found = json.loads((FOLDER / f"{name}.json").read_text()), layouts.of_case(pool, name, ranks)
    wanted = {plan: golden[plan] for plan in (golden if ranks == 4 else found)}
    assert layouts.text(found) == layouts.text(wanted), "if this change is meant: make golden"


def test_every_model_has_a_file_and_no_file_is_left() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(layouts.MODELS)
