"""Drawings of the validation modules: matplotlib figures without pyplot, written as PNG and reproducible SVG."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANEL = (3.6, 3.0)  # inches
COLOURS = ("#1f5fa8", "#c8553d", "#3b8f5a", "#8a5fb0", "#b8860b", "#555555")


def new_figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` axes side by side, light grid, no frame on top and right."""
    figure = Figure(figsize=(PANEL[0] * panels, PANEL[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(visible=True, linewidth=0.4, alpha=0.5)
        each.tick_params(labelsize=8)
        each.set_prop_cycle(color=list(COLOURS))
    return figure, axes


def save(figure: Figure, folder: Path, stem: str) -> None:
    """Writes folder/stem.png and folder/stem.svg; the bytes of the SVG depend on the drawing alone."""
    with matplotlib.rc_context({"svg.hashsalt": "private-rlhf", "svg.fonttype": "path"}):
        figure.savefig(folder / f"{stem}.png", dpi=130)
        figure.savefig(folder / f"{stem}.svg", metadata={"Date": None, "Creator": None})
