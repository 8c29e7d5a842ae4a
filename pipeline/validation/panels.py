"""Drawings of the validation studies: matplotlib figures without pyplot, written as PNG and reproducible SVG."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANEL = (3.6, 3.0)  # inches
COLOURS = ("#1f5fa8", "#c8553d", "#3b8f5a", "#8a5fb0", "#b8860b", "#555555")


def style() -> AbstractContextManager[None]:
    """The settings of every drawing: `lab.validate` runs a study under them, so that a plot says what differs."""
    return matplotlib.rc_context(
        {
            "axes.grid": True,
            "axes.prop_cycle": cycler(color=COLOURS),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": 9,
            "grid.alpha": 0.5,
            "grid.linewidth": 0.4,
            "legend.fontsize": 7,
            "legend.frameon": False,
            "lines.markersize": 3,
            "svg.fonttype": "path",
            "svg.hashsalt": "private-rlhf",
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
        }
    )


def new_figure(panels: int = 1, size: tuple[float, float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` axes side by side; size (width, height) in inches, PANEL each by default."""
    figure = Figure(figsize=size or (PANEL[0] * panels, PANEL[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def band(axes: Axes, x: np.ndarray, mean: np.ndarray, half: np.ndarray, line: str = "-", **style: Any) -> None:
    """The curve `mean` (K,) in a band of ± half (K,)."""
    axes.plot(x, mean, line, **style)
    axes.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.15, linewidth=0)


def save(figure: Figure, folder: Path, stem: str) -> None:
    """Writes folder/stem.png and folder/stem.svg; the bytes of the SVG depend on the drawing alone."""
    with style():
        figure.savefig(folder / f"{stem}.png", dpi=130)
        figure.savefig(folder / f"{stem}.svg", metadata={"Date": None, "Creator": None})
