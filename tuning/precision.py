"""Error against time of float32's precisions: `python -m tuning.precision`, on a Hopper GPU.

For each kind of input and each size: time and error of `gemm` with every precision and of torch.mm (cuBLAS SGEMM), in
the same process, captured in CUDA graphs as `cutegemm.tuner.timing` does it. Errors are relative to |A||B|, largest and
root mean square, against float64. `--plot FILE` draws error against time, one picture for each kind of input.

Without a GPU `--emulate` shows the errors alone: in the emulator, whose tensor cores add as those of the GPU in
CUTEGEMM_ARCH do, beside a chain of fused multiply-adds in the order of K. Small sizes only; `--config` names a kernel.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

import cutegemm
from cutegemm.errors import UnsupportedError
from tuning import cli

INPUTS = ("normal", "uniform", "exponents", "cancelling", "powers")
PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x6", "bf16x9")
EMULATED = "sm90/64x96x32/coop1/c1x1/s3/row"
"""The configuration that `--emulate` runs by default."""


@dataclass(frozen=True)
class Point:
    """What one way to multiply gives for one kind of input: errors relative to |A||B|; None where nothing was timed."""

    inputs: str
    size: str
    name: str
    largest: float
    mean: float
    us: float | None = None
    tflops: float | None = None


def inputs(kind: str, m: int, n: int, k: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 A (m, k) and column-major B (k, n).

    kind: "normal"; "uniform" in [0, 1), whose sums have one sign; "exponents" from 2^-40 to 2^40 within a sum;
    "cancelling": the second half of K undoes the first but for one part in 2^12; "powers" of two of both signs.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def one(rows: int) -> torch.Tensor:
        normal = torch.randn(rows, k, generator=generator, device=device)
        if kind == "uniform":
            return torch.rand(rows, k, generator=generator, device=device)
        if kind == "exponents":
            return normal * 2.0 ** torch.randint(-20, 21, (rows, k), generator=generator, device=device)
        if kind == "powers":
            return normal.sign() * 2.0 ** torch.randint(-8, 9, (rows, k), generator=generator, device=device)
        return normal

    a, b = one(m), one(n)
    if kind == "cancelling":
        half = k // 2
        a[:, half : 2 * half] = -a[:, :half] * (1 + 2.0**-12)
        b[:, half : 2 * half] = b[:, :half]
    return a, b.T


def error(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(largest, root mean square) of |got - a b| relative to |a||b|."""
    a, b = a.double(), b.double()
    relative = (got.double() - a @ b).abs() / (a.abs() @ b.abs())
    return float(relative.max()), float(relative.square().mean().sqrt())


def by_sgemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each result as one chain of fused multiply-adds in the order of K, as SGEMM's threads compute it."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(a.shape[1]):
        total = (total + a[:, k : k + 1].double() * b[k : k + 1].double()).float().double()
    return total.float()


def emulated(kind: str, m: int, n: int, k: int, seed: int, config: str = EMULATED) -> list[Point]:
    """Errors in the emulator."""
    a, b = inputs(kind, m, n, k, seed)
    size = f"{m}x{n}x{k}"
    points = [Point(kind, size, "chain of FMA", *error(by_sgemm(a, b), a, b))]
    for precision in PRECISIONS[1:]:
        got = cutegemm.gemm(a, b, precision=precision, backend="cute", config=config)
        points.append(Point(kind, size, precision, *error(got, a, b)))
    return points


def measured(kind: str, m: int, n: int, k: int, seed: int) -> list[Point]:
    """Errors and times on the current GPU. The whole of A and B changes from call to call, so that L2 does not help."""
    from cutegemm.tuner import timing

    sets = [inputs(kind, m, n, k, seed + i, "cuda") for i in range(timing.rotation(4 * (m * k + k * n), 50 << 20, 8))]
    out = torch.empty(m, n, device="cuda")
    ways: dict[str, Callable[[Any, Any], Any]] = {"cuBLAS SGEMM": lambda a, b: torch.mm(a, b, out=out)}
    for name in PRECISIONS:
        ways[name] = functools.partial(cutegemm.gemm, precision=name, out=out)
    errors = {name: error(way(*sets[0]), *sets[0]) for name, way in ways.items()}
    calls = {name: [functools.partial(way, *pair) for pair in sets] for name, way in ways.items()}
    flops = 2.0 * m * n * k
    times = timing.interleaved(calls, flops=flops, rounds=9)
    return [
        Point(kind, f"{m}x{n}x{k}", name, *errors[name], times[name].us, flops / times[name].us / 1e6) for name in ways
    ]


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    rows = [[p.inputs, p.size, p.name, f"{p.largest:.1e}", f"{p.mean:.1e}", p.us or "", p.tflops or ""] for p in points]
    heads = ["inputs", "M x N x K", "by", "largest error", "root mean square", "us", "TFLOP/s"]
    return tabulate(rows, heads, floatfmt=("", "", "", "", "", ".1f", ".1f"), disable_numparse=[3, 4])


def plot(points: Sequence[Point], path: str) -> None:
    """Root mean square error against time, a picture for each kind of input. Raises RuntimeError without matplotlib."""
    from tuning.plot import load_pyplot

    pyplot = load_pyplot()
    kinds = list(dict.fromkeys(point.inputs for point in points))
    figure, pictures = pyplot.subplots(1, len(kinds), figsize=(3.6 * len(kinds), 3.6), sharey=True, squeeze=False)
    for axes, kind in zip(pictures[0], kinds, strict=True):
        for name in dict.fromkeys(point.name for point in points):
            mine = [point for point in points if (point.inputs, point.name) == (kind, name) and point.us is not None]
            axes.plot([p.us for p in mine], [p.mean for p in mine], marker="o", label=name)
        axes.set(title=kind, xscale="log", yscale="log", xlabel="time [us]")
    pictures[0][0].set_ylabel("error relative to |A||B|, root mean square")
    pictures[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


LARGE, SMALL = ((1024,) * 3, (4096,) * 3), ((128, 96, 64), (128, 96, 264), (128, 96, 2048))
"""The sizes measured on a GPU, and in the emulator."""
MOST_EMULATED = 1 << 27
"""M N K of a size that the emulator computes in minutes."""


def _size(text: str) -> tuple[int, int, int]:
    numbers = text.split("x")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers) or len(numbers) not in (1, 3):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected N or MxNxK")
    m, n, k = map(int, numbers if len(numbers) == 3 else numbers * 3)
    return m, n, k


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = cli.parser("precision", "error against time of float32's precisions")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_size,
        metavar="MxNxK",
        help="default: 1024 and 4096; with --emulate 128x96x64, 128x96x264 and 128x96x2048",
    )
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS), help="kinds of input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--emulate", action="store_true", help="errors alone, in the emulator")
    parser.add_argument("--config", default=EMULATED, help="what --emulate runs (default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", type=cli.output, help="draw error against time (.svg, .png)")
    options = parser.parse_args(arguments)
    sizes = options.sizes or (SMALL if options.emulate else LARGE)
    if options.emulate and (large := [size for size in sizes if math.prod(size) > MOST_EMULATED]):
        parser.error(f"--sizes: got {'x'.join(map(str, large[0]))}; the emulator takes up to {MOST_EMULATED} products")
    if options.emulate and options.plot:
        parser.error("--plot: there are no times to draw with --emulate")
    if not options.emulate and not torch.cuda.is_available():
        print("tuning.precision: there is no GPU; --emulate shows errors without one", file=sys.stderr)
        return 2
    run = functools.partial(emulated, config=options.config) if options.emulate else measured
    points = []
    try:
        for kind in options.inputs:
            for m, n, k in sizes:
                points += run(kind, m, n, k, options.seed)
    except (ValueError, UnsupportedError) as error:  # of --config
        parser.error(str(error))
    print(table(points))
    if options.plot:
        plot(points, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
