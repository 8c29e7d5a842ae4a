"""Inline SVG with CSS variables for colours: one drawing serves light, dark and print; its bytes are reproducible."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import matplotlib.style
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Matplotlib draws in these stand-ins; `_themed` turns each into var(--NAME), which style.css.j2 defines.
INK, MUTED, RULE = "#a10001", "#a10002", "#a10003"
POLICY, REFERENCE, GIBBS, OTHER = "#a10004", "#a10005", "#a10006", "#a10007"
PAPER = "#a10008"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    POLICY: "policy",
    REFERENCE: "reference",
    GIBBS: "gibbs",
    OTHER: "other",
    PAPER: "paper",
}
WIDTH = 4.3  # inches; at 72 points an inch a phone's column shows the text at about its nominal size

_SETTINGS: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "private-rlhf",
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.titlecolor": INK,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "axes.unicode_minus": True,
}


def draw(name: str, description: str, height: float, paint: Callable[[Axes], None]) -> Markup:
    """One panel as an inline `<svg>`.

    Args:
        name: unique on the page; prefixes the ids.
        description: what the picture says, for readers who cannot see it.
        height: inches; the width is always `WIDTH`.
        paint: draws into the axes it is given.
    """
    with matplotlib.rc_context():
        matplotlib.style.use("default")
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(buffer.getvalue(), name, description)


def _inline(document: str, name: str, description: str) -> Markup:
    """The bare `<svg>` element: no prologue, metadata, namespaces or fixed size; ids made unique on the page."""
    body = document[document.index("<svg") :]
    for pattern in (r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->"):
        body = re.sub(pattern, "", body, flags=re.DOTALL)
    body = body.replace("xlink:href=", "href=")
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    rest = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{name}-", rest)
    rest = re.sub(r"\n\s*", "\n", rest)
    opening = f'<svg {box.group() if box else ""} role="img" aria-label="{escape(description)}"'
    return Markup(_themed(f"{opening}>{rest}".strip()))


def _themed(text: str) -> str:
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text
