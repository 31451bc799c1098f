"""Finds the fastest configuration of a shape and keeps it, for `gemm` to use.

    python -m tuning.sweep --shapes 4096x4096x4096,16x28672x4096 --dtype bf16
    python -m tuning.sweep --shapes 64x4096x7168 --dtype e4m3 --scaling blocks
    python -m tuning.sweep --shapes 8192 --config sm90/256x192x64/coop2/c1x2/s3/serp8/zig/pdl     of those named alone
    python -m tuning.sweep --shapes 16x28672x4096 --epilogue swiglu           with a program: N counts gate and up
    python -m tuning.sweep --suite llm --dtype bf16,fp16 --gpus all --resume --json sweep.json
    torchrun --nproc-per-node 8 -m tuning.sweep --suite llm                   on several hosts too: see docs/tuning.md
    python -m tuning.sweep --shapes 4096 --compile-only --arch sm_90a         without a GPU: fills the kernel store
    python -m tuning.sweep --shapes 300x520x200 --emulate --arch sm_90a       without a GPU: checks the numbers

Every valid configuration of the backends named is enumerated; the cost model says which to try first. Kernels compile
in processes of their own while those in front are checked against the float64 reference and timed beside cuBLAS. Each
measurement is in the winners store (`python -m tuning.winners list`) the moment it exists: Ctrl-C, a crash and a killed
process lose nothing. A shape's budget does not run while its search can but wait for the first of those processes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from cutegemm.problem import PRECISIONS
from cutegemm.problem.dtypes import PRODUCTS
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from cutegemm.problem.work import DENSE
from cutegemm.tuner.budget import MOST_HELP
from cutegemm.tuner.timer import GpuProcess, TimerBroken
from tuning import cli, suites

if TYPE_CHECKING:
    from cutegemm.cute.warps.config import TileConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.tuner.space import Ranker

RECIPES = ("tensor", "rows", "blocks")
"""Of `problem.scales`, which imports torch."""
NO_GPU = """\
tuning.sweep times kernels on a GPU, and torch sees none here. Without one:
  --compile-only --arch sm_90a   compiles the candidates into the kernel store and lists them as they would be timed
  --emulate --arch sm_90a        checks the numbers of the first candidates in the emulator, on small instances"""
NOTHING_TIMED = "Nothing was timed: the order is the cost model's, and no winner was recorded."


def parser() -> argparse.ArgumentParser:
    summary, _, more = (__doc__ or "").partition("\n\n")
    made = cli.parser("sweep", summary, more, keep_lines=True)
    cli.add_shapes(made.add_argument_group("shapes (any of these together)"))
    kind = made.add_argument_group("the product")
    kind.add_argument("--dtype", default="bf16", help=f"{', '.join(PRODUCTS)}, comma-separated (default bf16)")
    kind.add_argument("--majors", default="tn", help="tn (both K-major, the default), tt, nn, nt, comma-separated")
    kind.add_argument("--precision", default="ieee", choices=PRECISIONS, help="fast of fp8, the others of fp32")
    kind.add_argument("--scaling", choices=RECIPES, help="of fp8 and int8: blocks measures products with scales of "
                      "1 x 128 elements of A and 128 x 128 of B; tensor and rows measure the plain product, whose "
                      "winners these recipes take")  # fmt: skip
    kind.add_argument(
        "--out-dtype", choices=tuple(PRODUCTS), help="of D; by default as gemm has it: of fp8 bf16, of int8 int32"
    )
    kind.add_argument("--batch", type=int, default=1, help="matrices, or groups of a work")
    kind.add_argument("--work", default="dense", choices=("dense", "ragged_m", "ragged_n", "ragged_k", "gathered_m"),
                      help="groups that divide M, N or K, which the shapes then have the totals of")  # fmt: skip
    kind.add_argument("--constant", choices=("a", "b"), default="", help="an operand that no running kernel writes, as "
                      "gemm(constant=) promises: its winners are kept apart")  # fmt: skip
    kind.add_argument("--moe", action="store_true", help="the suite of experts of published models, in place of shapes")
    kind.add_argument("--epilogue", metavar="NAME", help="an epilogue program, whose winners are its own: swiglu, "
                      "geglu, silu, gelu_bias_residual, ... (another name gets the list); comma-separated")  # fmt: skip
    kind.add_argument("--activation", choices=ACTIVATIONS)
    kind.add_argument("--bias", metavar="DTYPE", choices=tuple(PRODUCTS), help="a bias along N is added")
    kind.add_argument("--c", metavar="DTYPE", choices=tuple(PRODUCTS), help="beta C is added")
    search = made.add_argument_group("the search")
    cli.add_backends(search)
    search.add_argument(
        "--budget",
        type=cli.seconds,
        default=60.0,
        help="time for each shape: 60s (the default), 2m, 1h; products over "
        f"1e10 flop need 40s for a sure final; {MOST_HELP}",
    )
    search.add_argument(
        "--config", action="append", default=[], help="a configuration of cute to try; repeatable. Nothing else is "
        "tried then but what gemm takes today"
    )  # fmt: skip
    search.add_argument("--candidates", type=int, help="configurations to try at most, for each shape (256)")
    search.add_argument(
        "--exhaustive", action="store_true", help="try all of them (or --candidates), as far as the budget goes"
    )
    search.add_argument(
        "--resume", action="store_true", help="skip what today's kernels have behind them: whole shapes, configurations"
    )
    search.add_argument("--jobs", type=int, help="compile processes; by default as cores and memory allow")
    search.add_argument(
        "--gpus", help="all, or indices such as 0,2; a process each, sharing the shapes (default 0; where torchrun "
        "starts several processes a host, that of LOCAL_RANK)"
    )  # fmt: skip
    search.add_argument("--store", type=cli.store, help="the winners file; by default the user's, which gemm reads")
    output = made.add_argument_group("output")
    output.add_argument("--json", type=cli.output, help="also write every measurement to this file")
    output.add_argument(
        "--plot", type=cli.output, help="also draw winners and cuBLAS into this file (needs matplotlib)"
    )
    dry = made.add_argument_group("without a GPU (nothing is timed)")
    way = dry.add_mutually_exclusive_group()
    way.add_argument("--compile-only", action="store_true", help="compile the candidates and list them")
    way.add_argument("--emulate", action="store_true", help="check the candidates' numbers in the emulator")
    dry.add_argument("--arch", default="sm_90a", help="the GPU to compile for: H200, sm_90a (the default), A100, ...")
    dry.add_argument("--show", type=int, default=20, help="lines of the list to print")
    return made


def problems(options: argparse.Namespace) -> list[Problem]:
    """What is to be tuned. Raises ValueError naming what is wrong."""
    from cutegemm.problem import Problem
    from tuning import posed

    if options.moe:
        epilogue = Epilogue(options.c, options.bias, "n", options.activation)
        _refuse_beside_moe(options)
        return [
            Problem.of(
                each.rows, each.n, each.k, dtype, majors=majors, batch=each.experts, out_dtype=options.out_dtype,
                precision=options.precision, epilogue=epilogue, work="ragged_m",
            )
            for dtype, majors, each in itertools.product(
                options.dtype.split(","), options.majors.split(","), suites.MOE
            )
        ]  # fmt: skip
    shapes = cli.shapes(options, options.majors.split(","))
    if not shapes:
        raise ValueError("name the shapes: --shapes 4096x4096x4096, --shapes-file F, --square 64..8192 or --suite llm")
    return posed.problems(options, options.dtype.split(","), shapes)


def _refuse_beside_moe(options: argparse.Namespace) -> None:
    """Raises ValueError for an option that says what the suite of experts says, which would be dropped."""
    given = {
        "--shapes": options.shapes, "--shapes-file": options.shapes_file, "--square": options.square,
        "--suite": options.suite, "--batch": options.batch != 1, "--work": options.work != "dense",
        "--scaling": options.scaling, "--constant": options.constant, "--epilogue": options.epilogue,
    }  # fmt: skip
    if refused := [name for name, value in given.items() if value]:
        raise ValueError(f"--moe: got it with {refused[0]}; its suite has shapes, groups, no scales and no program")


def main(arguments: list[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    dry = options.compile_only or options.emulate
    try:
        if (
            (options.candidates is not None and options.candidates < 1)
            or options.show < 0
            or (options.jobs is not None and options.jobs < 1)
        ):
            raise ValueError("--candidates and --jobs must be at least 1, --show at least 0")
        timed = {"--json": options.json, "--plot": options.plot, "--resume": options.resume, "--gpus": options.gpus}
        if dry and (refused := [name for name, value in timed.items() if value]):
            raise ValueError(f"{refused[0]}: it is for what is timed; --compile-only and --emulate time nothing")
        with ExitStack() as stack:
            # The GPU's process imports torch while this one does.
            options.gpus = options.gpus or _own_gpu()
            early = None if dry or options.gpus != "0" else stack.enter_context(_first_gpu())
            wanted, options.config = problems(options), cli.configurations(dict.fromkeys(options.config))
            _refuse_beside_config(options)
            if options.emulate and any(each.work != DENSE for each in wanted):
                raise ValueError(
                    "--emulate: got products in groups, accepted are dense ones; in a clone of the repository "
                    "`python -m tests.fuzz_groups` emulates groups"
                )
            if dry:
                return _without_gpu(wanted, options)
            return _on_gpus(wanted, options, early, stack)
    except KeyboardInterrupt:
        print("\nbroken off; what was measured until now is kept", file=sys.stderr)
        return 130
    except ValueError as why:
        made.error(str(why))


def _refuse_beside_config(options: argparse.Namespace) -> None:
    """Raises ValueError for an option that does not go with configurations that are named."""
    given = {"--backends": options.backends != ["cute"], "--resume": options.resume, "--exhaustive": options.exhaustive}
    if options.config and (refused := [name for name, value in given.items() if value]):
        raise ValueError(f"--config: got it with {refused[0]}; what it names, of backend cute, is all that is tried")


def _ranker(configs: Sequence[TileConfig]) -> Ranker | None:
    """Lists the configurations named that are valid for a problem, and prints why the others are not. None without
    any: then the cost model lists all."""
    from cutegemm import backend
    from cutegemm.choice import heuristics

    def valid(problem: Problem, arch: Arch, name: str) -> list[tuple[float, TileConfig]]:
        found = []
        for config in configs:
            if why := backend.get(name).check(config, problem, arch):
                print(f"{problem}: {config} is left out: {why}")
            else:
                found.append((heuristics.estimate(problem, config, name, arch), config))
        return found

    return valid if configs else None


def _why_none(problem: Problem, arch: Arch, options: argparse.Namespace) -> str:
    from cutegemm.tuner.space import why_none

    return "none of those named is valid" if options.config else why_none(problem, arch, options.backends)


def _limit(options: argparse.Namespace) -> int:
    from cutegemm.tuner.search import Options

    return options.candidates or (10**9 if options.exhaustive else Options.limit)


def _on_this_host() -> int:
    """Processes that a launcher has started on this host."""
    from cutegemm.tuner import shared

    return max(1, shared.of_environment("LOCAL_WORLD_SIZE", 1))


def _own_gpu() -> str:
    return os.environ.get("LOCAL_RANK", "0") if _on_this_host() > 1 else "0"


def _first_gpu() -> GpuProcess | ExitStack:
    return GpuProcess(0) if os.path.exists("/dev/nvidiactl") else ExitStack()


def _on_gpus(wanted: list[Problem], options: argparse.Namespace, early: object, stack: ExitStack) -> int:
    import torch

    from cutegemm.choice.plan import measured
    from cutegemm.tuner import report, shared
    from cutegemm.tuner import run as sweep_run
    from cutegemm.tuner.compile_pool import CompilePool, default_jobs
    from cutegemm.tuner.search import Options
    from cutegemm.winners import Winners

    count = torch.cuda.device_count()
    if count == 0:
        print(NO_GPU, file=sys.stderr)
        return 2
    indices = _indices(options.gpus, count)
    timers = [early] if isinstance(early, GpuProcess) else [stack.enter_context(GpuProcess(i)) for i in indices]
    store = Winners(options.store)
    limit = _limit(options)
    patience = None if options.exhaustive else Options.patience
    search = Options(options.budget, limit, patience, resume=options.resume)
    begun = time.monotonic()
    try:
        arch = timers[0].arch
        header = {"made": datetime.now(timezone.utc).isoformat(timespec="seconds"), "before": timers[0].describe()}
    except TimerBroken as why:
        print(why, file=sys.stderr)
        return 2
    wanted = [measured(problem, arch) for problem in wanted]
    print(f"{header['before']}\n{len(wanted)} problems on {len(timers)} GPUs, budget {options.budget:.0f} s each")
    progress = report.Progress(len(wanted), limit)

    def tell(lane: int, phase: str, outcome: report.Outcome) -> None:
        if phase == "finished":
            progress.finished(lane, outcome)
        else:
            progress.update(lane, phase, outcome)

    stop = threading.Event()
    pool = stack.enter_context(CompilePool(options.jobs or max(1, default_jobs() // _on_this_host())))
    try:
        part = None
        if shared.is_shared():
            part = stack.enter_context(shared.Gathering(wanted, store, arch.name, arch.sm_count))
            print(f"process {part.claims.rank} of {part.claims.world} that share the problems")
        outcomes = sweep_run.run(
            wanted, options.backends, timers, pool, store, search, report=tell, stop=stop,
            claims=part.claims if part else None, ranker=_ranker(options.config), seeded=not options.config,
            first=sweep_run.today if options.config else sweep_run.nothing,
        )  # fmt: skip
        outcomes = part.outcomes(outcomes, stop.is_set) if part else outcomes
    except shared.StoreLost as why:
        print(f"{why}; what was measured here is kept in {store.path}", file=sys.stderr)
        return 2
    finally:
        progress.close()
    if part is not None and part.claims.rank != 0:
        print(f"process {part.claims.rank}: {len(outcomes)} problems searched here; process 0 gathers them")
        return 130 if stop.is_set() else 0
    if outcomes:
        print(report.table(outcomes, arch))
        for none in (each.problem for each in outcomes if each.searched and not each.enumerated):
            print(f"{none}: no valid configuration; {_why_none(none, arch, options)}")
    left = len(wanted) - len(outcomes)
    if left:
        print(f"{left} of {len(wanted)} problems were not begun")
    header["after"] = timers[0].describe()
    where = f"kept in {store.path}" if store.path else "NOT kept: the winners store could not be written"
    print(f"{header['after']}\nmeasurements {where}; {time.monotonic() - begun:.1f} s in all")
    if options.json:
        cli.write(options.json, report.as_json(outcomes, arch, header))
    if options.plot:
        from tuning.plot import plot_sweep

        try:
            plot_sweep(outcomes, arch, options.plot)
        except (RuntimeError, ValueError) as why:
            print(f"--plot: {why}", file=sys.stderr)
    if stop.is_set():
        return 130
    return 0 if all(outcome.winner is not None for outcome in outcomes) else 1


def _indices(text: str, count: int) -> list[int]:
    if text == "all":
        return list(range(count))
    indices = [int(part) if part.isdecimal() else -1 for part in text.split(",")]
    if not all(0 <= index < count for index in indices) or len(set(indices)) != len(indices):
        raise ValueError(f"--gpus: got {text!r}, expected all or different indices below {count}")
    return indices


def _without_gpu(wanted: list[Problem], options: argparse.Namespace) -> int:
    from tabulate import tabulate

    from cutegemm.choice.plan import measured
    from cutegemm.hardware import arch as arch_table
    from cutegemm.run.progress import Bars
    from cutegemm.tuner.compile_pool import CompilePool
    from cutegemm.tuner.space import enumerate_all
    from tuning import sweep_dry

    arch: Arch = arch_table.get(options.arch)
    limit = _limit(options)
    bad = 0
    with CompilePool(options.jobs) as pool:
        for problem in (measured(each, arch) for each in wanted):
            candidates = enumerate_all(problem, arch, options.backends, _ranker(options.config))
            print(f"{problem} on {arch.name}: {len(candidates)} valid configurations")
            if not candidates:
                print(_why_none(problem, arch, options))
            with Bars() as bars:
                tell = lambda done, total, bars=bars: bars.show("", f"{done}/{total}", done, total)  # noqa: E731
                if options.compile_only:
                    session = pool.session(problem.signature, arch)
                    entries = sweep_dry.compile_only(candidates, session, limit, options.budget, report=tell)
                else:
                    few = min(limit, options.show or limit)
                    entries = sweep_dry.emulate(problem, candidates, arch, few, options.budget, report=tell)
            failures = sum(entry.outcome.startswith(("failed", "wrong")) for entry in entries)
            shown = entries if options.emulate else entries[: options.show]
            table = [
                (number, str(e.candidate), f"{e.candidate.estimate * 1e6:.2f}", e.outcome)
                for number, e in enumerate(shown, 1)
            ]
            print(tabulate(table, headers=["", "configuration", "us, estimated", "outcome"], disable_numparse=True))
            if len(entries) > len(shown):
                print(f"and {len(entries) - len(shown)} more")
            done = sum(e.outcome.startswith((sweep_dry.COMPILED, sweep_dry.STORED, "right")) for e in entries)
            bad += failures if done else 1  # nothing done is no success
            what = "are right in the emulator" if options.emulate else "are in the kernel store"
            print(f"{done} of {len(entries)} {what}")
    print(NOTHING_TIMED)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
