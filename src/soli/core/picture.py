"""A plot as text of SVG, for pages that need no other file."""

import io
from collections.abc import Callable
from typing import Any


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
