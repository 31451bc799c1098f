"""Plots of measured tables. Needs matplotlib (`pip install cutegemm[plot]`).

python -m tuning.plot bench.json bench.png       draws what `python -m tuning.bench --json` wrote, on any machine
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegemm import arch as arch_table
from cutegemm.arch import Arch
from tuning import bench_report
from tuning.bench_report import Result
from tuning.ladder import label
from tuning.workbench import Row


def plot_ladder(rows: Sequence[Row], path: str | Path) -> None:
    """A bar per rung and size: TFLOP/s, the share of cuBLAS written on it, the bar to meet as a line.

    Raises RuntimeError saying what to install when matplotlib is missing; ValueError when there is nothing to draw.
    """
    if not rows:
        raise ValueError("rows: nothing to draw")
    bars = [Bar(label(row), row.problem.m, row.tflops, row.ratio, row.config.spec.bar) for row in rows]
    plot_bars(bars, "TFLOP/s (share of cuBLAS beside the bar; black: published bar at 8192\u00b3)", path)


@dataclass(frozen=True)
class Bar:
    """A kernel at a square size. ratio: its speed over that of cuBLAS. mark: TFLOP/s of the line to compare it with."""

    name: str
    size: int
    tflops: float
    ratio: float
    mark: float | None


def plot_bars(bars: Sequence[Bar], axis: str, path: str | Path) -> None:
    """A group of bars a name, in the order given, and a bar a size in it; the marks are drawn at 8192 only.

    Raises RuntimeError saying what to install when matplotlib is missing.
    """
    pyplot = load_pyplot()
    sizes = sorted({bar.size for bar in bars})
    names = list(dict.fromkeys(bar.name for bar in bars))
    figure, axes = pyplot.subplots(figsize=(11, 0.34 * len(names) * len(sizes) ** 0.5 + 2.2))
    height = 0.8 / len(sizes)
    for i, size in enumerate(sizes):
        mine = [bar for bar in bars if bar.size == size]
        at = [names.index(bar.name) + (i - (len(sizes) - 1) / 2) * height for bar in mine]
        axes.barh(at, [bar.tflops for bar in mine], height=0.9 * height, label=f"{size}\u00b3")
        for y, bar in zip(at, mine, strict=True):
            axes.text(bar.tflops, y, f" {100 * bar.ratio:.0f} %", va="center", fontsize=7)
            if bar.mark is not None and size == 8192:
                axes.plot([bar.mark] * 2, [y - height / 2, y + height / 2], color="black", linewidth=1.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_bench(results: Sequence[Result], arch: Arch, path: str | Path, title: str = "") -> None:
    """Three panels: TFLOP/s of each provider over the flop of the product, its ratio to torch shape by shape, and where
    the shapes lie under the roofline of `arch`.

    Raises RuntimeError saying what to install when matplotlib is missing; ValueError when nothing was timed.
    """
    timed = [result for result in results if result.us is not None]
    if not timed:
        raise ValueError("results: nothing was timed")
    pyplot = load_pyplot()
    providers = list(dict.fromkeys(result.provider for result in timed))
    shapes = list(dict.fromkeys(result.shape for result in sorted(timed, key=lambda result: result.flops)))
    figure, (speed, ratios, roof) = pyplot.subplots(3, 1, figsize=(max(8.0, 0.45 * len(shapes) + 3), 13))
    colors = {name: f"C{number}" for number, name in enumerate(providers)}
    for name in providers:
        own = sorted((r for r in timed if r.provider == name), key=lambda result: result.flops)
        speed.plot([r.flops for r in own], [r.tflops for r in own], "o-", color=colors[name], label=name, markersize=4)
        roof.plot([r.intensity for r in own], [r.tflops for r in own], "o", color=colors[name], markersize=4)
    speed.set(xscale="log", xlabel="flop of the product", ylabel="TFLOP/s", title=title)
    speed.legend()

    others = [name for name in providers if name != "torch"]
    width = 0.8 / max(len(others), 1)
    for number, name in enumerate(others):
        own = [r for r in timed if r.provider == name]
        places = [shapes.index(r.shape) + (number - (len(others) - 1) / 2) * width for r in own]
        ratios.bar(places, [r.ratio for r in own], width=0.9 * width, color=colors[name])
    ratios.axhline(1.0, color="black", linewidth=1)
    ratios.set_xticks(range(len(shapes)), shapes, rotation=60, ha="right", fontsize=7)
    ratios.set(ylabel="speed over torch")

    peak = max(arch.peak(unit) for unit in _units(timed))
    reach = sorted(r.intensity for r in timed if r.intensity)
    ends = [reach[0] / 2, max(reach[-1] * 2, 4 * peak * 1e12 / arch.hbm_bytes_per_s)]
    ridge = peak * 1e12 / arch.hbm_bytes_per_s
    corners = sorted({*ends, ridge})
    roof.plot(corners, [min(peak, x * arch.hbm_bytes_per_s * 1e-12) for x in corners], color="black", linewidth=1)
    roof.set(xscale="log", yscale="log", xlabel="flop per byte", ylabel="TFLOP/s")
    roof.set_title(f"roofline of {arch.name}: {peak:.0f} TFLOP/s, {arch.hbm_bytes_per_s * 1e-12:.1f} TB/s", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _units(results: Sequence[Result]) -> set[str]:
    """The arithmetic units of the problems, as `Arch.peak` names them."""
    kinds = {(r.problem.split()[1].split("->")[0], r.problem.split("/")[1]) for r in results}
    by_dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    return {"tfloat32" if precision != "ieee" else by_dtype[dtype] for dtype, precision in kinds}


def load_pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises RuntimeError saying what to install when it is missing."""
    try:
        import matplotlib
    except ImportError as why:
        raise RuntimeError("plots need matplotlib: pip install 'cutegemm[plot]'") from why
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cutegemm"})  # text stays text
    from matplotlib import pyplot

    return pyplot


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    made = argparse.ArgumentParser(prog="python -m tuning.plot", description=__doc__.split("\n\n")[0])
    made.add_argument("json", help="a file that `python -m tuning.bench --json` wrote")
    made.add_argument("image", help="the file to draw into: .png, .svg, .pdf")
    options = made.parse_args(arguments)
    try:
        results = bench_report.read(options.json)
        given = json.loads(Path(options.json).read_text())
        header, kind = given["header"], given["options"]
        title = f"{kind['dtype']} {kind['majors']}, {header['before'].split(',')[0]}"
        plot_bench(results, arch_table.get(header["arch"]), options.image, title=title)
    except (KeyError, OSError, RuntimeError, ValueError) as why:
        print(f"{made.prog}: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
