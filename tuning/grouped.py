"""Times `grouped_gemm` against torch's grouped_mm and a loop of torch.mm over the experts of published models.

Method as of tuning.bench: the providers are timed in one process, round by round in alternating order, as CUDA graphs
whose inputs rotate through three times the L2 cache; each result is checked first, in float64 (group by group, so that
it takes no more memory than a group). Ratios are to the best other provider; with `--dtype e4m3` to ours in bf16, with
`--gather` to rows that were gathered before, with `--weight-gradients` to one dense product with as many flops. With
`--config`, which may be given several times, the configurations named are timed in the same rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

from cutegemm.hardware.arch import Arch
from cutegemm.problem import MAX_EXTENT
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.tuner import timing
from cutegemm.tuner.grouped_bench import DRAWS
from tuning import bench_providers, cli, suites
from tuning.bench_report import ratios_text, short_text
from tuning.grouped_ways import FORWARD, GATHERED, GRADIENTS, OURS, QUACK, Draw, Kind, Ways
from tuning.scaled_ways import SCALED

Timer = Callable[[Mapping[str, Sequence[Callable[[], object]]], float, int], Mapping[str, timing.Timing]]
Row = dict[str, Any]
ROUNDS = 9
SKEWS = ("uniform", "zipf", "even", "uneven", "one")
"""How the rows of an entry may be divided (`suites.Experts`)."""
DEFAULT_SKEWS = ",".join(DRAWS)
"""Of products that are named: those of which the tuner takes the mean."""


def bench(
    entry: suites.Experts, arch: Arch, dtype: str = "bf16", majors: str = "tn", rounds: int = ROUNDS,
    device: str = "cuda", timer: Timer = timing.interleaved, kind: Kind = FORWARD, quack: bool = False,
    configs: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """A row for each provider: its verdict, microseconds, and of ours the ratio to whom `kind` says with its spread.

    configs: texts of configurations of "cute", each timed as ours is; the verdict of one that is refused says why.
    """
    asked = kind.problem(entry, dtype, majors)
    count = timing.rotation(asked.min_bytes, arch.l2_bytes) if device == "cuda" else 1
    sets = [_with_named(kind.ways(Draw(entry, seed, device), dtype, majors), configs) for seed in range(count)]
    verdicts = {name: way.verdict() for name, way in sets[0].items() if quack or name != QUACK}
    right = [name for name, verdict in verdicts.items() if verdict == "ok"]
    found = timer({name: [ways[name].call for ways in sets] for name in right}, asked.flops, rounds)
    ours = OURS, *configs
    others = [name for name in found if name == kind.against or (not kind.against and name not in ours)]
    rows = []
    for name, verdict in verdicts.items():
        row: Row = {"entry": str(entry), "provider": name, "verdict": verdict}
        if name in found:
            us = found[name].us
            row |= {"us": us, "tflops": found[name].tflops(asked.flops)}
        if name in found and name in ours:
            row |= {"config": sets[0][name].config(), "ratio": None}
            if others:
                best = min((found[other] for other in others), key=lambda timed: timed.us)
                row |= {"ratio": best.us / us, "spread": str(found[name].spread(best) or "-")}
            if name == OURS and entry.aim is not None and (kind, dtype) == (FORWARD, "bf16"):
                row["aim us"] = entry.aim
        rows.append(row)
    return rows


def _with_named(ways: Ways, configs: Sequence[str]) -> Ways:
    """The same, and our call by each of these configurations."""
    ours = ways[OURS]
    call: Callable[..., Any] = ours.call
    named = {
        config: ours._replace(call=partial(call, backend="cute", config=config), config=partial(str, config))
        for config in configs
    }
    return {OURS: ours, **named, **ways}


def summary(rows: Sequence[Row], kind: Kind = FORWARD) -> str:
    """The geometric mean of the ratios and the least, which are below what is wanted, and the aims in microseconds."""
    ratios = [(row["entry"], row["ratio"]) for row in rows if row["provider"] == OURS and row.get("ratio")]
    lines = []
    if ratios:
        lines.append(f"{OURS}: ratio to {kind.against or 'the best other'} {ratios_text(ratios)}")
        lines += [short] if (short := short_text(ratios, kind.aim)) else []
    aimed = [row for row in rows if "aim us" in row]
    if aimed:
        missed = [f"{row['entry']} {row['us']:.1f} of {row['aim us']:g}" for row in aimed if row["us"] > row["aim us"]]
        text = f"aims in us: {len(aimed) - len(missed)} of {len(aimed)} reached"
        lines.append(text + (f"; missed: {', '.join(missed)}" if missed else ""))
    return "\n".join(lines)


def named(products: str, skews: str) -> list[suites.Experts]:
    """An entry for each product and each way to divide its rows. Raises ValueError naming the option."""
    if wrong := [skew for skew in skews.split(",") if skew not in SKEWS]:
        raise ValueError(f"--skew: got {wrong[0]!r}, accepted are {', '.join(SKEWS)}, comma-separated")
    found = []
    for text in products.split(","):
        sizes = [int(each) if each.isdecimal() else 0 for each in text.split("x")]
        if len(sizes) != 4 or not all(1 <= size <= MAX_EXTENT for size in sizes) or sizes[0] > MOST_GROUPS:
            raise ValueError(
                f"--products: got {text!r}, expected groups x rows x N x K, such as 8x4096x4096x14336; at most "
                f"{MOST_GROUPS} groups"
            )
        groups, rows, n, k = sizes
        found += [suites.Experts("named", groups, rows, n, k, skew) for skew in skews.split(",")]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("grouped", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "e4m3"), help="e4m3: with scales")
    parser.add_argument(
        "--scaling", choices=tuple(SCALED), help="of e4m3: of rows (the default) or of blocks of 128 of K, the latter "
        "beside DeepGEMM where it is installed"
    )  # fmt: skip
    parser.add_argument("--majors", default="tn", choices=("tn", "tt"), help="tn: weights (G, N, K) as they are stored")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--gather", action="store_true", help="rows by an index, against rows gathered before")
    other.add_argument("--weight-gradients", action="store_true", help="groups of K, against one dense product")
    parser.add_argument("--rounds", type=cli.count, default=ROUNDS)
    parser.add_argument(
        "--products", help="in place of the suite: groups x rows x N x K, comma-separated, such as 8x4096x4096x14336"
    )
    parser.add_argument(
        "--skew", help=f"how the rows of these are divided among groups, comma-separated: {', '.join(SKEWS)} (default "
        f"{DEFAULT_SKEWS})"
    )  # fmt: skip
    parser.add_argument("--only", help="entries whose text has this in it, such as 'Qwen3' or 'zipf'")
    parser.add_argument("--config", action="append", default=[], help="a configuration to time too; repeatable")
    parser.add_argument("--aims", action="store_true", help="only the entries whose microseconds have an aim")
    parser.add_argument("--quack", action="store_true", help="also quack, which tunes itself for a minute an entry")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when no result was wrong and ours served every entry."""
    parser = _parser()
    options = parser.parse_args(arguments)
    kind = GATHERED if options.gather else GRADIENTS if options.weight_gradients else FORWARD
    if options.dtype == "e4m3":
        if kind != FORWARD or options.majors != "tn":
            parser.error("--dtype: got e4m3 with --gather, --weight-gradients or --majors tt; it is timed without them")
        kind = SCALED[options.scaling or "rows"]
    elif options.scaling:
        parser.error(f"--scaling: got {options.scaling} with --dtype {options.dtype}; scales are of e4m3")
    try:
        entries = suites.MOE if options.products is None else named(options.products, options.skew or DEFAULT_SKEWS)
    except ValueError as why:
        parser.error(str(why))
    if options.skew is not None and options.products is None:
        parser.error("--skew: got it without --products; the entries of the suite say how theirs are divided")
    wanted = [entry for entry in entries if options.only is None or options.only in str(entry)]
    wanted = [entry for entry in wanted if entry.aim is not None or not options.aims]
    if not wanted:
        parser.error(f"--only: no entry {'with an aim ' if options.aims else ''}has {options.only!r} in it")
    if options.quack and not bench_providers.installed(QUACK):
        parser.error("--quack: needs quack-kernels, which is not installed")
    try:
        cli.configurations(options.config)
    except ValueError as why:
        parser.error(str(why))
    if not torch.cuda.is_available():
        print("tuning.grouped times kernels on a GPU, and torch sees none here; tests.fuzz_groups emulates them")
        return 2
    print(timing.gpu_state())
    arch, rows = Arch.of_device(), []
    given = {"dtype": options.dtype, "majors": options.majors, "rounds": options.rounds}
    for number, entry in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {entry}", file=sys.stderr, flush=True)
        found = bench(entry, arch, **given, kind=kind, quack=options.quack, configs=options.config)
        for row in found:
            print("   ", *(f"{name} {row[name]}" for name in row if name != "entry"), file=sys.stderr, flush=True)
        rows += found
        torch.cuda.empty_cache()
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    print(summary(rows, kind))
    print(timing.gpu_state())
    wrong = any(row["verdict"].startswith("wrong") for row in rows)
    return 1 if wrong or any(row["verdict"] != "ok" for row in rows if row["provider"] == OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
