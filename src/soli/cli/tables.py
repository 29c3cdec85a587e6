"""A table of numbers on the terminal, as several verbs show one."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

Texts = Iterable[str]


def show(words: Texts, numbers: Texts, rows: Iterable[Texts], more: Texts = (), wide: int | None = None, **look: Any) -> None:
    """Columns of words, of numbers, and perhaps of more words, under these titles. `look`: what rich's Table is told beside them; `wide`: characters
    of a line, where a terminal does not say it."""
    right = [Column(title, justify="right", no_wrap=True) for title in numbers]
    folded = (Column(title, overflow="fold") for title in more)
    table = Table(*words, *right, *folded, **{"box": box.SIMPLE, **look})
    for row in rows:
        table.add_row(*row)
    Console(width=wide).print(table)
