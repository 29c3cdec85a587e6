"""A plot as text of SVG, for pages that need no other file."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


def svg(draw: Callable[[Any], None]) -> str:
    """What `draw` draws on matplotlib's axes, without a date or random names in it."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "soli", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(9.0, 3.6), layout="constrained")
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
