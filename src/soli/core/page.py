"""Pages of HTML that need no other file: from a template, and a plot as text of SVG."""

import io
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template


def template(package: str, name: str, **known: Any) -> Template:
    """A package's template, in which every value is escaped. `known`: what it has whenever it is rendered."""
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return pages.from_string(files(package).joinpath(name).read_text(encoding="utf-8"), globals=known)


def svg(draw: Callable[[Any], None]) -> str:
    """What `draw` draws on matplotlib's axes, without a date or random names in it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "soli", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
