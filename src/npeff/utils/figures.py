"""Figures as files: PNG to look at, SVG for papers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npeff.utils.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "svg")
BLUE, RED, PURPLE = "#1f6f8b", "#b03a2e", "#6a4c93"
"""Colours that figures share."""


def new_figure(width: float = 6, height: float = 3.5) -> Figure:
    """An empty figure, in inches. No window system is asked for, and matplotlib is imported only here."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_figure(path: Path, draw: Callable[[Any, Any], None], values: Any) -> None:
    """Let `draw` fill one pair of axes with `values`, and write the figure."""
    figure = new_figure()
    draw(figure.subplots(), values)
    write_figure(path, figure)


def write_figure(path: Path, figure: Figure, dpi: int = 150) -> None:
    """Write `path`.png and `path`.svg; the same figure gives the same files."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "npeff", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # texts have characters that the font does not
        for kind, metadata in (("png", {}), ("svg", {"Date": None})):
            with whole_file(path.with_name(f"{path.name}.{kind}")) as temporary:
                figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)


def remove_figure(path: Path) -> None:
    """Remove a figure that an earlier call has written."""
    for kind in KINDS:
        path.with_name(f"{path.name}.{kind}").unlink(missing_ok=True)


def plain_axes(axes: Any) -> None:
    """Without the frame above and at the right."""
    axes.spines[["top", "right"]].set_visible(False)
