"""Plots of measured tables. Needs matplotlib (`pip install cutegemm[plot]`).

python -m tuning.plot bench.json bench.png       draws what `python -m tuning.bench --json` wrote, on any machine
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import TABLE
from cutegemm.tuner.report import bound_of, shape_text, tflops
from cutegemm.tuner.search import Outcome
from tuning import bench_report, cli
from tuning.bench_report import Result

MARKED = 8192
"""The square size that the published figures are for; a mark at another size would compare what cannot be compared."""


@dataclass(frozen=True)
class Bar:
    """A kernel at a square size. ratio: its speed over that of cuBLAS. mark: TFLOP/s published at `MARKED`, or None."""

    name: str
    size: int
    tflops: float
    ratio: float
    mark: float | None


def plot_bars(bars: Sequence[Bar], axis: str, mark: str, path: str | Path) -> None:
    """A group of bars a name, in the order given, and a bar a size in it.

    Bars of the size `MARKED` have their mark as a black line, and the axis then says that it is `mark`. `axis` is what
    the axis says first.

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
            if bar.mark is not None and size == MARKED:
                axes.plot([bar.mark] * 2, [y - height / 2, y + height / 2], color="black", linewidth=1.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    marked = any(bar.mark is not None and bar.size == MARKED for bar in bars)
    axes.set_xlabel(f"{axis}; black: {mark} at {MARKED}\u00b3" if marked else axis)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_bench(results: Sequence[Result], arch: Arch, path: str | Path, title: str = "") -> None:
    """Three panels: TFLOP/s of each provider over the flop of the product, its ratio to the first one shape by shape,
    and where the shapes lie under the roofline of `arch`.

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

    first = results[0].provider
    others = [name for name in providers if name != first]
    width = 0.8 / max(len(others), 1)
    for number, name in enumerate(others):
        own = [r for r in timed if r.provider == name]
        places = [shapes.index(r.shape) + (number - (len(others) - 1) / 2) * width for r in own]
        ratios.bar(places, [r.ratio or 0.0 for r in own], width=0.9 * width, color=colors[name])
    ratios.axhline(1.0, color="black", linewidth=1)
    ratios.set_xticks(range(len(shapes)), shapes, rotation=60, ha="right", fontsize=7)
    ratios.set(ylabel=f"speed over {first}")

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
    return {TABLE[dtype].units[precision] for dtype, precision in kinds}


def plot_sweep(outcomes: Sequence[Outcome], arch: Arch, path: str | Path) -> None:
    """Two panels with bars a shape for the winner and for cuBLAS: TFLOP/s with the roofline bound as a line, and the
    share of that bound, where shapes that memory limits are as tall as those that arithmetic limits. Groups of rows
    have neither line nor share, see `report.bound_of`.

    Raises RuntimeError saying what to install when matplotlib is missing; ValueError when there is nothing to draw.
    """
    drawn = [o for o in outcomes if o.winner is not None]
    if not drawn:
        raise ValueError("nothing was measured, so there is nothing to draw")
    pyplot = load_pyplot()
    figure, (speed, shares) = pyplot.subplots(2, 1, sharex=True, figsize=(max(6.0, 0.7 * len(drawn) + 2), 8))
    for place, outcome in enumerate(drawn):
        best, bound = outcome.winner, bound_of(outcome, arch)
        assert best is not None
        assert best.seconds is not None
        bars = [(place - 0.2, best.seconds, "C0", "winner"), (place + 0.2, best.reference_seconds, "C7", "cuBLAS")]
        for at, seconds, color, name in bars:
            if seconds:
                label = name if place == 0 else None
                speed.bar(at, tflops(outcome, seconds), 0.4, color=color, label=label)
                if bound is not None:
                    shares.bar(at, 100 * bound.share(seconds), 0.4, color=color)
        if best.reference_seconds:
            tallest = min(best.seconds, best.reference_seconds)
            height = 0.0 if bound is None else 100 * bound.share(tallest)
            shares.text(place, height, f"{1 / best.score:.2f}x", ha="center")
        if bound is None:
            continue
        line = tflops(outcome, bound.bound_s)
        speed.plot([place - 0.45, place + 0.45], [line] * 2, color="black", label=None if place else "bound")
    shares.axhline(100, color="black", linewidth=1)
    shares.set_xticks(range(len(drawn)), [shape_text(o) for o in drawn], rotation=45, ha="right", fontsize=8)
    speed.set_ylabel("TFLOP/s")
    shares.set_ylabel("% of the bound; on the bars: winner over cuBLAS")
    speed.set_title(f"{arch.name}, {drawn[0].problem.dtype}")
    speed.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


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
    made = cli.parser("plot", (__doc__ or "").split("\n\n")[0])
    made.add_argument("json", help="a file that `python -m tuning.bench --json` wrote")
    made.add_argument("image", help="the file to draw into: .png, .svg, .pdf")
    options = made.parse_args(arguments)
    try:
        results = bench_report.read(options.json)
        given = json.loads(Path(options.json).read_text())
        header, kind = given["header"], given["options"]
        title = f"{kind['dtype']} {kind['majors']}, {header['before'].split(',')[0]}"
        plot_bench(results, arch_table.get(header["arch"]), options.image, title=title)
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as why:
        print(f"{made.prog}: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
