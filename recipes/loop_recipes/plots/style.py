"""Shared by all pictures: colours, and how a figure is written."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from loop_formats.run_files import whole_file

# Okabe and Ito's colours, told apart with any kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")


def save(figure: Figure, output: Path, name: str) -> list[Path]:
    """Write ``<name>.png`` and ``<name>.svg``, each whole or not at all, and close the figure; returns the paths."""
    output.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loop"}):
        for suffix in ("png", "svg"):
            path = output / f"{name}.{suffix}"
            with whole_file(path) as partial:
                figure.savefig(partial, format=suffix, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
            written.append(path)
    plt.close(figure)
    return written
