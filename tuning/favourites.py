"""What the cost model likes best at random shapes, timed: `python -m tuning.favourites --count 64 --dtype fp32`.

Shapes are drawn at random (`tuning.random_shapes`), `--count` of them for each of `--majors`. At each of them the
cheapest configuration of every candidate of `cute` counts, with the splits of K that the model likes best: the `--best`
cheapest are checked and timed in turns with torch, captured and L2-cold. So are `--more` of them with the model's next
best splits, which teaches what splits cost, and those of `--also`, whose splits are powers of two. With `--chosen` so
is what the choice takes for a shape that nobody measured. With `--tiles` the cheapest of each tile and schedule counts,
instead of each candidate. `--scaling blocks` is for fp8 and int8. With `--epilogue swiglu` N counts the columns of gate
and of up; torch computes the product alone. Products of more than `SUSTAINED_FLOPS`, which bring tensor cores to the
power limit, are timed in blocks of `BLOCK_SECONDS`, in two rounds. Printed is a text table for `tuning.calibrate` and
`tuning.learn`, a block a shape. What is wrong or fails is named in it, and has no time. The exit status is 1 if a shape
has no times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutegemm import backend as backends
from cutegemm.choice import heuristics
from cutegemm.cute.simt.registers import MAJORS
from cutegemm.problem.dtypes import ITEMSIZE, KINDS, PRECISIONS, PRODUCTS
from cutegemm.problem.scales import SCALED
from cutegemm.tuner.compile_pool import default_jobs
from cutegemm.tuner.space import Candidate
from cutegemm.tuner.timer import TORCH, Timer, TimerBroken, TimerLost
from cutegemm.tuner.timing import SUSTAINED_FLOPS
from tuning import calibrate, cli, contest, random_shapes

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.tuner.compile_pool import CompilePool

SPLITS = (1, 2, 4, 8, 16, 32)
"""Of K, for a configuration of `--also` that names none."""
OTHER_SPLITS = 1.3
"""Of `--more`: so many times as many as those that the model likes best, or as few."""
BLOCK_SECONDS, SUSTAINED_ROUNDS = 0.12, 2
"""Of products of more than `SUSTAINED_FLOPS`; shorter than a sweep's blocks, since there are many candidates."""


def favourites(
    problem: Problem,
    arch: Arch,
    best: int,
    also: Sequence[Any] = (),
    more: int = 0,
    tiles: bool = False,
    chosen: bool = False,
) -> list[Candidate]:
    """The cheapest configuration of each of the `best` cheapest candidates, or of their tiles and schedules; with
    `chosen` what the choice takes; then each configuration of `also`.

    Of `more` of the candidates the cheapest with other splits too, `OTHER_SPLITS` times as many or as few. One of
    `also` whose K may be split and is not gets the cheapest of `SPLITS`. Those that cannot serve the problem, and those
    that are among the candidates, are left out.
    """
    cute = backends.get("cute")
    found: dict[str, Candidate] = {}
    others: dict[str, Candidate] = {}
    sizes = problem.m, problem.n, problem.k, problem.batch
    named = cute.shortlist(problem.signature, arch, *(1 << (size - 1).bit_length() for size in sizes))
    families = {cute.parse(text).family for text, _ in named}
    for config in heuristics.ascending(problem, arch, "cute"):
        if families and config.family not in families:  # small tiles of another family, for tiny products alone
            continue
        whole = str(replace(config, splits=1) if hasattr(config, "splits") else config)
        if tiles:
            whole = "/".join(whole.split("/")[:3])
        if whole not in found:
            if len(found) == best:
                break
            found[whole] = Candidate("cute", config)
        elif len(others) < more:
            few, many = sorted((config.splits, found[whole].config.splits))
            if many >= OTHER_SPLITS * few:
                others.setdefault(whole, Candidate("cute", config))
    choice = heuristics.untuned(problem, arch, "cute") if chosen else None
    if choice is not None and str(choice[1]) not in {each.text for each in found.values()}:
        found[str(choice[1])] = Candidate("cute", choice[1])
    for given in also:
        splits = SPLITS if getattr(given, "splits", 0) == 1 else ()
        forms = [replace(given, splits=number) for number in splits] or [given]
        valid = [config for config in forms if cute.check(config, problem, arch) is None]
        if valid and str(given) not in found:
            cheapest = min(valid, key=lambda config: heuristics.estimate(problem, config, "cute", arch))
            found[str(given)] = Candidate("cute", cheapest)
    return [*found.values(), *others.values()]


def block(problem: Problem, candidates: Sequence[Candidate], timer: Timer, pool: CompilePool, rounds: int) -> str:
    """The lines of a shape: what failed, torch's time, then the candidates' times, the fastest first.

    Where nothing could be timed, all of them begin with # and say why.
    """
    if not candidates:
        return f"# {problem}: no candidate serves it"
    failed = contest.compiled(pool.session(problem.signature, timer.arch), candidates)
    try:
        timer.open(problem)
        right = contest.right(timer, [each for each in candidates if each.key not in failed], failed)
        sustained = problem.flops > SUSTAINED_FLOPS
        turns = (SUSTAINED_ROUNDS, BLOCK_SECONDS) if sustained else (rounds, 0.0)
        found = dict(timer.time(right, *turns)) if right else {}
    except TimerBroken as why:  # which names the problem
        return f"# {why}"
    except TimerLost as why:
        return f"# {problem}: {why}"
    lines = [f"# {text}: {' '.join(why.split())}" for (_, text), why in failed.items()]
    if not found:
        return "\n".join([f"# {problem}: nothing to time", *lines])
    base = found.pop(TORCH)
    signature, sizes = problem.signature, f"{problem.m}x{problem.n}x{problem.k}"
    kind = calibrate.IN_BLOCKS if signature.epilogue.program.block_scales else signature.precision
    if signature.epilogue.gating:
        kind += f" {calibrate.GATED}"
    lines.append(f"== {sizes} {signature.dtype} {kind} {signature.majors} torch {base * 1e6:.2f} us")
    for (_, text), seconds in sorted(found.items(), key=lambda item: item[1]):
        rate = problem.flops / seconds * 1e-12
        lines.append(f"   {base / seconds:.3f} {seconds * 1e6:10.3f} {rate:6.2f} {text}")
    return "\n".join(lines)


def table(
    problems: Sequence[Problem],
    best: int,
    also: Sequence[Any],
    machine: contest.Machine,
    rounds: int,
    more: int = 0,
    tiles: bool = False,
    chosen: bool = False,
) -> Iterator[str]:
    """The blocks of all shapes. Kernels are compiled ahead, those of the first shapes first."""
    arch = machine.timer.arch
    wanted = [favourites(problem, arch, best, also, more, tiles, chosen) for problem in problems]
    for problem, candidates in zip(problems, wanted, strict=True):
        machine.pool.session(problem.signature, arch).ahead(candidates)
    for problem, candidates in zip(problems, wanted, strict=True):
        yield block(problem, candidates, machine.timer, machine.pool, rounds)


def _majors(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [each for each in found if each not in MAJORS]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, accepted are {', '.join(MAJORS)}, comma-separated")
    return found


def _configs(text: str) -> list[Any]:
    try:
        return [backends.get("cute").parse(each) for each in text.split(",") if each]
    except ValueError as why:
        raise argparse.ArgumentTypeError(str(why)) from why


def main(arguments: list[str] | None = None) -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    made = cli.parser("favourites", summary, more)
    made.add_argument("--count", type=cli.count, default=12, help="shapes for each of the majors (default 12)")
    made.add_argument("--seed", type=int, default=0, help="of the first majors; the others have the next ones")
    random_shapes.add_option(made)
    made.add_argument("--dtype", default="bf16", choices=PRODUCTS)
    made.add_argument("--precision", default="ieee", choices=PRECISIONS, help="tf32 of fp32, fast of fp8")
    made.add_argument("--scaling", choices=(calibrate.IN_BLOCKS,), help="scales of 1 x 128 of A and 128 x 128 of B")
    made.add_argument("--epilogue", choices=(calibrate.GATED,), help="of each product; by default none")
    made.add_argument(
        "--majors",
        type=_majors,
        help="of A and B, comma-separated (default all four; tn where tensor cores take no other)",
    )
    made.add_argument("--best", type=cli.count, default=10, help="candidates of a shape (default 10)")
    made.add_argument(
        "--more", type=cli.count, default=0, help="candidates of which other splits of K are timed too (default 0)"
    )
    made.add_argument("--tiles", action="store_true", help="of each tile and schedule one candidate")
    made.add_argument("--chosen", action="store_true", help="what the choice takes, too")
    made.add_argument("--also", type=_configs, default=[], help="further configurations, comma-separated")
    made.add_argument("--rounds", type=cli.count, default=3, help="measured rounds (default 3)")
    made.add_argument("--seconds", type=cli.seconds, help="time after which no further shape is begun: 60s, 2m")
    made.add_argument("--jobs", type=cli.count, default=default_jobs(), help="compile processes (default %(default)s)")
    options = made.parse_args(arguments)
    if (options.dtype, options.precision) not in KINDS:
        made.error(f"--precision: got {options.precision} with {options.dtype}, which has no such products")
    if options.scaling and (options.dtype not in SCALED or options.precision != PRECISIONS[0]):
        given = options.dtype if options.dtype not in SCALED else f"--precision {options.precision}"
        made.error(f"--scaling: got {options.scaling} with {given}; scales are for {', '.join(SCALED)}, not fast")
    by_k = ITEMSIZE[options.dtype] == 1 or options.precision == "tf32"
    majors = options.majors or list(MAJORS[:1] if by_k else MAJORS)
    begun, status = time.monotonic(), 0
    try:
        with contest.machine(options.jobs) as machine:
            arch = machine.timer.arch
            by_majors = [
                random_shapes.drawn(options, options.count, options.seed + number, each, arch, options.precision)
                for number, each in enumerate(majors)
            ]
            problems = [problem for of_each in zip(*by_majors, strict=True) for problem in of_each]
            problems = [random_shapes.followed(each, options.epilogue, bool(options.scaling)) for each in problems]
            wanted = options.best, options.also
            others = options.more, options.tiles, options.chosen
            for text in table(problems, *wanted, machine, options.rounds, *others):
                print(text, flush=True)
                status |= not any(line.startswith("==") for line in text.splitlines())
                if options.seconds and time.monotonic() - begun > options.seconds:
                    break
    except contest.NoGpu as why:
        print(f"tuning.favourites times kernels on a GPU: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbroken off", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
