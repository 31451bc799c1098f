"""`python -m tuning.ladder`: climbs a ladder of kernels, checks every rung, and says how fast each is.

With a GPU every rung is checked against the float64 reference at each size and at a ragged one, timed against cuBLAS
interleaved (`cutegemm.tuner.timing`), and printed beside the figures that others published. Without one the rungs run
in the emulator on a small size,
and their profiles are printed instead: instructions, shared-memory bank conflicts, global sectors, arithmetic
intensity.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cutegemm.hardware.arch import Arch
from legacy_cuda.config import LegacyConfig, parse
from legacy_cuda.rungs import AUTOTUNED, AUTOTUNED_BAR, LADDERS, ladder
from tuning import cli
from tuning.workbench import Row, Workbench, host_cost

RAGGED = (261, 390, 77)
LARGEST_EMULATED = 512
SMALL = {"fp32": (128, 128, 32), "16bit": (256, 128, 32)}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns 1 when a rung is wrong."""
    parser = cli.parser("ladder", (__doc__ or "").partition("\n")[0])
    names = (*LADDERS, "hopper")
    parser.add_argument("name", nargs="?", choices=names, help="of the ladder, as --ladder (default fp32)")
    parser.add_argument("--ladder", choices=names)
    parser.add_argument("--size", type=_sizes, default=None, help="square sizes, e.g. 4096,8192")
    parser.add_argument("--dtype", choices=LADDERS["16bit"], default="bf16", help="operands of the 16-bit ladder")
    parser.add_argument(
        "--rung",
        type=lambda text: text.split(","),
        default=None,
        help="only these rungs or configurations; of the Hopper ladder, steps by number",
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds per rung")
    parser.add_argument(
        "--autotune", type=float, default=0.0, metavar="SECONDS", help="search the autotuned rungs this long"
    )
    parser.add_argument(
        "--plot", default=None, type=cli.output, metavar="PNG", help="also draw the ladder (needs matplotlib)"
    )
    parser.add_argument("--emulate", action="store_true", help="use the emulator even where there is a GPU")
    options = parser.parse_args(argv)
    if options.name and options.ladder and options.name != options.ladder:
        parser.error(f"--ladder: got {options.ladder} beside {options.name}; name one")
    options.ladder = options.name or options.ladder or "fp32"
    taken = LADDERS.get(options.ladder, (options.dtype,))
    dtype = options.dtype if options.dtype in taken else taken[0]
    if options.ladder == "hopper":
        return _hopper(parser, options)
    try:
        chosen = _chosen(options.ladder, options.rung)
    except ValueError as why:
        parser.error(str(why))
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected at least 1")
    if options.emulate or not cuda_is_there():
        from tuning.ladder_profile import profile_ladder

        if options.plot or options.autotune:
            parser.error("--plot and --autotune need timings, and those need a GPU")
        if max(options.size or (1,)) > LARGEST_EMULATED:
            parser.error(f"--size: the emulator takes up to {LARGEST_EMULATED} here")
        shapes = [(size, size, size) for size in options.size or ()] or [SMALL[options.ladder]]
        return max(profile_ladder(chosen, dtype, shape) for shape in shapes)
    return _on_gpu(chosen, dtype, options)


def _hopper(parser: argparse.ArgumentParser, options: Any) -> int:
    from tuning import ladder_hopper

    if options.autotune or options.dtype != "bf16":
        parser.error("--ladder hopper: its steps are bf16 configurations; --autotune and --dtype do not apply")
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected at least 1")
    try:
        steps = ladder_hopper.chosen(options.rung)
    except ValueError as why:
        parser.error(str(why))
    if options.emulate or not cuda_is_there():
        if options.plot or options.size:
            parser.error("--plot and --size are for a GPU; the emulator runs a small shape")
        return ladder_hopper.emulate(steps)
    return ladder_hopper.climb(steps, options.size or (8192,), options.rounds, options.plot)


def cuda_is_there() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as why:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 4096,8192") from why
    if not all(size > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes must be positive")
    return sizes


def _chosen(name: str, texts: list[str] | None) -> list[LegacyConfig]:
    if texts is None:
        return [LegacyConfig.of(rung.name) for rung in ladder(name)]
    try:
        configs = [parse(text) for text in texts]
    except ValueError as why:
        raise ValueError(f"--rung: {str(why).removeprefix('config: ')}") from None
    for config in configs:
        if config.spec.ladder != name:
            raise ValueError(f"--rung: {config.rung} is on the ladder {config.spec.ladder!r}, not {name!r}")
    return configs


def _on_gpu(chosen: list[LegacyConfig], dtype: str, options: Any) -> int:
    import torch

    from cutegemm.tuner.timing import gpu_state

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    arch = Arch.of_device()
    print(f"GPU: {gpu_state()}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(
        f"Method: {options.rounds} rounds, blocks of cuBLAS (torch.mm, no TF32) and the rung in turn, "
        "second half of each block, CUDA graphs, normal random inputs, row-major"
    )
    print(f"Host cost of a launch: {host_cost(dtype, arch, chosen[-1])}")
    ragged = {config: _check_ragged(config, dtype, arch) for config in chosen}
    rows: list[Row] = []
    for size in options.size or (4096, 8192):
        bench = Workbench(size, size, size, dtype, arch)
        found = _autotuned(bench, options.autotune) if options.autotune else []
        for family, config in [*(("", config) for config in chosen), *found]:
            if config not in ragged:
                ragged[config] = _check_ragged(config, dtype, arch)
            row = bench.measure(config, options.rounds)
            rows.append(replace(row, family=family, verdict=row.verdict if row.verdict != "ok" else ragged[config]))
            print(
                f"  {size} {config}: {row.tflops:.2f} TFLOP/s, {row.ratio:.3f} of cuBLAS, {rows[-1].verdict}",
                flush=True,
            )
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    print(f"GPU: {gpu_state()}")
    print(table(rows))
    if options.plot:
        draw(rows, options.plot)
        print(f"drawn: {options.plot}")
    return 0 if all(row.verdict == "ok" for row in rows) else 1


def _autotuned(bench: Workbench, seconds: float) -> list[tuple[str, LegacyConfig]]:
    from legacy_cuda.space import FAMILIES
    from tuning.autotune import autotune

    found = ((family, autotune(bench, family, budget_s=seconds, report=print)) for family in FAMILIES)
    return [(family, config) for family, config in found if config is not None]


def table(rows: Sequence[Row]) -> str:
    """The ladder as text: one line a rung and size, measured beside published."""
    from tabulate import tabulate

    head = ("size", "rung", "ms", "TFLOP/s", "of cuBLAS", "bar", "verdict", "published")
    lines = [
        (
            row.problem.m,
            label(row),
            f"{row.seconds * 1e3:.3f}",
            f"{row.tflops:.2f}",
            f"{100 * row.ratio:.1f} %",
            _bar(row),
            row.verdict,
            "; ".join(map(str, AUTOTUNED[row.family] if row.family else row.config.spec.published)),
        )
        for row in rows
    ]
    return tabulate(lines, headers=head, disable_numparse=True)


def draw(rows: Sequence[Row], path: str) -> None:
    """A bar per rung and size: TFLOP/s, the share of cuBLAS written on it, the bar to meet as a line.

    Raises RuntimeError saying what to install when matplotlib is missing; ValueError when there is nothing to draw.
    """
    from tuning.plot import Bar, plot_bars

    if not rows:
        raise ValueError("rows: nothing to draw")
    bars = [Bar(label(row), row.problem.m, row.tflops, row.ratio, row.config.spec.bar) for row in rows]
    plot_bars(bars, "TFLOP/s, beside the bar the share of cuBLAS", "the published bar", path)


def label(row: Row) -> str:
    """The rung, with the parameters that are not its defaults."""
    default = LegacyConfig.of(row.config.rung).parameters
    changed = (f"{name}{value}" for name, value in row.config.parameters.items() if value != default[name])
    text = "/".join((row.config.rung, *changed))
    return f"autotuned {row.family}: {text}" if row.family else text


def _bar(row: Row) -> str:
    bar = row.config.spec.bar
    if row.family and row.problem.dtype in LADDERS["fp32"]:
        bar = AUTOTUNED_BAR
    if bar is None or row.problem.m != 8192:
        return ""
    return f"{bar} {'met' if row.tflops >= bar else 'MISSED'}"


def _check_ragged(config: LegacyConfig, dtype: str, arch: Arch) -> str:
    verdict = Workbench(*RAGGED, dtype, arch).check(config)
    return verdict if verdict == "ok" else f"at {RAGGED}: {verdict}"


if __name__ == "__main__":
    raise SystemExit(main())
