"""What some figures leave: rows as JSON, and as a page in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def write_rows(path: Path, command: str, rows: list[dict[str, Any]], **about: Any) -> None:
    """The rows, after what made them and what else is to be known of all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"command": command, "torch": torch.__version__, **about, "rows": rows}
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def write_page(path: Path, words: Iterable[str], titles: str, rows: Iterable[str]) -> None:
    """Lines of words, and a table below them. `titles`, `rows`: cells with | between them."""
    head = [f"| {titles} |", "|" + "---|" * len(titles.split("|"))]
    lines = [*words, "", *head, *(f"| {row} |" for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
