"""Plots of measured tables. Needs matplotlib (`pip install cutegemm[plot]`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuning.ladder import label
from tuning.workbench import Row


def plot_ladder(rows: Sequence[Row], path: str | Path) -> None:
    """A bar per rung and size: TFLOP/s, the share of cuBLAS written on it, the bar to meet as a line.

    Raises RuntimeError saying what to install when matplotlib is missing; ValueError when there is nothing to draw.
    """
    if not rows:
        raise ValueError("rows: nothing to draw")
    pyplot = _pyplot()
    sizes = sorted({row.problem.m for row in rows})
    names = list(dict.fromkeys(label(row) for row in rows))
    figure, axes = pyplot.subplots(figsize=(11, 0.34 * len(names) * max(len(sizes), 1) ** 0.5 + 2.2))
    height = 0.8 / len(sizes)
    for i, size in enumerate(sizes):
        at = [names.index(label(row)) + (i - (len(sizes) - 1) / 2) * height for row in rows if row.problem.m == size]
        mine = [row for row in rows if row.problem.m == size]
        axes.barh(at, [row.tflops for row in mine], height=0.9 * height, label=f"{size}\u00b3")
        for y, row in zip(at, mine, strict=True):
            axes.text(row.tflops, y, f" {100 * row.ratio:.0f} %", va="center", fontsize=7)
            if row.config.spec.bar is not None and size == 8192:
                axes.plot([row.config.spec.bar] * 2, [y - height / 2, y + height / 2], color="black", linewidth=1.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s (share of cuBLAS beside the bar; black: published bar at 8192\u00b3)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as why:
        raise RuntimeError("plots need matplotlib: pip install 'cutegemm[plot]'") from why
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
