"""Colours and file formats of all pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loop_formats.run_files import whole_file
from loop_plumbing.breakage import raised_as

mpl.rcParams["text.parse_math"] = False  # a task id may hold dollars
mpl.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.limits": (-3, 5)}

# Okabe and Ito's colours, told apart with any kind of colour vision; the last is for what has no name of its own.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", (0, (6, 2)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (10, 3)), (0, (8, 2, 2, 2)), (0, (4, 1, 1, 1)), "-")
MARKS: Any = {each: {"ls": ls, "marker": mark} for each, ls, mark in zip(COLOURS, DASHES, "os^vP*hX", strict=True)}
"""The dash and the point of the curve in a colour, by which curves are told apart in grey too."""


def panels(count: int, width: float = 15.0, **options: Any) -> tuple[Figure, np.ndarray]:
    """Make a figure with room for ``count`` panels, at most four in a row; surplus panels of the last row, fewer
    than there are rows, are hidden.
    If panels share the x axis, the lowest visible panel of each column shows the axis's numbers."""
    rows = -(-max(count, 1) // 4)
    columns = -(-max(count, 1) // rows)
    figure, grid = plt.subplots(rows, columns, figsize=(width * columns / 4, 3.25 * rows), squeeze=False, **options)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for axes in lowest(grid):
        axes.tick_params(labelbottom=True)
    return figure, grid


def lowest(grid: np.ndarray) -> list[Axes]:
    """Return the lowest visible panel of each column."""
    return [each for column in grid.T for each in [axes for axes in column if axes.get_visible()][-1:]]


def save(figure: Figure, output: Path, name: str) -> list[Path]:
    """Write ``<name>.png`` and ``<name>.svg``, each whole or not at all, and close the figure; returns the paths.

    Raises:
        ValueError: they cannot be written there.
    """
    written, cannot = [], f"{output} does not take pictures, give another --out: "
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loop"}), raised_as(ValueError, cannot, OSError):
        output.mkdir(parents=True, exist_ok=True)
        for suffix in ("png", "svg"):
            path = output / f"{name}.{suffix}"
            with whole_file(path) as partial:
                figure.savefig(partial, format=suffix, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
            written.append(path)
    plt.close(figure)
    return written
