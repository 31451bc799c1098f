"""Times cutegemm against cuBLAS and others: `python -m tuning.bench --suite square,llm,deep --providers all`.

Method: the providers are timed in the same process, round by round in alternating order, with inputs that rotate
through three times the L2 cache and one CUDA graph a round (`cutegemm.tuner.timing`), which holds the very calls that a
user would capture. Beside each ratio stands its spread; where that holds 1, it says parity. Every result is checked
against the float64 reference before it is timed; a wrong one is not timed. A ratio above 1 is faster than torch. The
kernels of ours that will run are compiled ahead, in processes of their own. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from tabulate import tabulate

import cutegemm
from cutegemm.hardware.arch import Arch
from cutegemm.hardware.roofline import roofline
from cutegemm.problem import PRECISIONS, Problem, reference, torch_dtype
from cutegemm.problem.dtypes import PRODUCTS, why_mixture_refused, why_precision_refused
from cutegemm.tuner import timing
from cutegemm.tuner.poison import poison
from tuning import bench_report, cli, random_shapes, suites
from tuning.bench_basis import Case, NotServed, Prepared, Provider, cases
from tuning.bench_providers import NAMES, Cutegemm, make, versions
from tuning.bench_report import Result

ROUNDS = 9
FP64_ROWS = 256
"""Rows of an fp64 result that are checked, at most."""

Timer = Callable[[Mapping[str, Sequence[Callable[[], object]]], float, int], Mapping[str, timing.Timing]]
"""timer(calls by provider, flops, rounds): as `timing.interleaved`."""


def bench_case(
    case: Case,
    providers: Sequence[Provider],
    arch: Arch,
    *,
    rounds: int = ROUNDS,
    device: str = "cuda",
    timer: Timer = timing.interleaved,
) -> list[Result]:
    """Checks and times one product; a result for each provider, in their order. Ratios are to the first one."""
    problem = case.problem
    sets = timing.rotation(problem.min_bytes, arch.l2_bytes) if device == "cuda" else 1
    inputs = [case.operands(seed, device) for seed in range(sets)]
    out = torch.empty(problem.m, problem.n, device=device, dtype=torch_dtype(problem.out_dtype))
    a, b = inputs[0]
    rows = slice(None)
    if problem.dtype == "fp64":  # its reference has twice as many digits, in software
        rows = slice(None, None, -(-problem.m // FP64_ROWS) | 1)  # odd, so that every row of a tile is among them
    ready: dict[str, Prepared] = {}
    verdicts: dict[str, str] = {}
    with _tf32(problem.precision == "tf32"):
        want = reference.expected(a[rows], b, precision=problem.precision, out_dtype=out.dtype)
        for provider in providers:
            try:
                prepared = provider.prepare(problem, arch, inputs, out)
                poison(out)
                prepared.calls[0]()
            except NotServed as why:
                verdicts[provider.name] = f"not served: {why}"
                continue
            verdict = reference.check(out[rows], want)
            if verdict.ok:
                ready[provider.name] = prepared
            verdicts[provider.name] = "ok" if verdict.ok else f"wrong: {verdict.message}"
        del want
        if device == "cuda":
            torch.cuda.empty_cache()
        calls = {name: prepared.calls for name, prepared in ready.items()}
        with bench_report.Monitor(device == "cuda") as monitor:
            found = timer(calls, problem.flops, rounds)
    first = found.get(providers[0].name)
    bound = roofline(problem, arch)
    clock, watts = monitor.typical()
    results = []
    for provider in providers:
        name = provider.name
        timed = found.get(name)
        result = _result(case, name, verdicts[name])
        if timed is not None:
            spread = None if first is None else timed.spread(first)
            result = replace(
                result,
                backend=ready[name].backend,
                config=ready[name].config,
                before=ready[name].before,
                us=timed.us,
                low=timed.low,
                high=timed.high,
                tflops=timed.tflops(problem.flops),
                of_bound=bound.share(timed.us * 1e-6),
                limit=bound.limit,
                intensity=bound.intensity,
                ratio=None if first is None else first.us / timed.us,
                ratio_low=spread.low if spread else None,
                ratio_high=spread.high if spread else None,
                clock_mhz=clock,
                watts=watts,
            )
        results.append(result)
    return results


def _result(case: Case, provider: str, verdict: str) -> Result:
    problem = case.problem
    return Result(str(problem), problem.m, problem.n, problem.k, provider, verdict, lies=case.lies)


def with_kernel_names(cases: Sequence[Case], results: Sequence[Result]) -> list[Result]:
    """The results, those of torch with the kernels that cuBLAS launched.

    Asked after all that is timed: a process that has been profiled may launch more slowly.
    """
    named = []
    by_name = {str(case): case for case in cases}
    for result in results:
        if result.provider == "torch" and result.us is not None:
            case = by_name[result.shape]
            a, b = case.operands(0)
            with _tf32(case.problem.precision == "tf32"), contextlib.suppress(RuntimeError):
                result = replace(result, kernels=kernel_names(functools.partial(torch.mm, a, b)))
        named.append(result)
    return named


def kernel_names(call: Callable[[], object]) -> tuple[str, ...]:
    """The kernels that a call launches, as the profiler names them."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    names = (event.name for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return tuple(dict.fromkeys(name for name in names if not name.startswith(("Memcpy", "Memset"))))


def compile_ahead(
    cases: Sequence[Case], providers: Sequence[Provider], arch: Arch, jobs: int | None = None
) -> tuple[int, float]:
    """Compiles the kernels of ours that the benchmark will run, in parallel; (how many, seconds).

    What does not compile is left to say so when it is prepared.
    """
    from tuning.prebuild import compile_all

    wanted = [
        (signature, backend, str(config))
        for case in cases
        for provider in providers
        for signature, backend, config in provider.kernels(case.problem, arch)
    ]
    if not wanted:
        return 0, 0.0
    count, seconds, _ = compile_all(wanted, arch, jobs)
    return count, seconds


def eager_cost(calls: int = 100, rounds: int = 50) -> dict[str, float]:
    """Microseconds of host time of an eager 128^3 fp16 call, without a graph: the fastest of many rounds."""
    a, b = Case(Problem.of(128, 128, 128, "fp16")).operands(0)
    todo: dict[str, Callable[[], object]] = {
        "torch.mm": lambda: torch.mm(a, b),
        "cutegemm.gemm": lambda: cutegemm.gemm(a, b),
    }
    return timing.host_us(todo, calls, rounds)


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """torch's TF32 switch for matmul, set within the block."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def run(
    cases: Sequence[Case],
    providers: Sequence[Provider],
    arch: Arch,
    *,
    rounds: int = ROUNDS,
    device: str = "cuda",
    timer: Timer = timing.interleaved,
    say: Callable[[str], None] = lambda text: None,
    keep: Callable[[list[Result]], None] = lambda results: None,
) -> tuple[list[Result], bool]:
    """(the results of every case, whether all were measured). Ctrl-C ends it with what there is.

    `keep` is called after every case with the results so far.
    """
    results: list[Result] = []
    try:
        for number, case in enumerate(cases, 1):
            say(f"[{number}/{len(cases)}] {case}")
            try:
                results += bench_case(case, providers, arch, rounds=rounds, device=device, timer=timer)
            except RuntimeError as why:  # out of memory; a launch that ruined the CUDA context
                reason = f"not measured: {type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"
                results += [_result(case, provider.name, reason) for provider in providers]
                say(reason)
                if device == "cuda":
                    with contextlib.suppress(RuntimeError):
                        torch.cuda.empty_cache()
            keep(results)
    except KeyboardInterrupt:
        return results, False
    return results, True


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("bench", (__doc__ or "").split("\n\n")[0])
    what = parser.add_argument_group("what", "shapes add up; without any, 1024, 2048, 4096 and 8192 cubed")
    cli.add_shapes(what)
    what.add_argument("--dtype", default="bf16", choices=tuple(PRODUCTS))
    what.add_argument("--precision", default="ieee", choices=PRECISIONS, help="fast of fp8, the others of fp32")
    what.add_argument(
        "--out-dtype", choices=tuple(PRODUCTS), help="of D; by default as gemm has it: of fp8 bf16, of int8 int32"
    )
    what.add_argument("--majors", default="tn", choices=["tn", "tt", "nn", "nt"], help="tn: both K-major")
    what.add_argument("--random", type=int, metavar="COUNT", default=0, help="shapes that tuning.random_shapes draws")
    random_shapes.add_option(what, " by --random")
    what.add_argument("--seed", type=int, default=0, help="of --random")
    behind = "0 to 7 elements by which operands begin behind a multiple of 16 bytes: 3 both, a3 A, b3 B; or all"
    what.add_argument("--offsets", default="0", help=f"comma-separated, {behind}")
    who = parser.add_argument_group("who")
    who.add_argument("--providers", default="cutegemm", help=f"all, or comma-separated of {', '.join(NAMES)}")
    who.add_argument("--against", default="torch", metavar="PROVIDER", help="what ratios are to (default torch)")
    who.add_argument("--backend", default="auto", choices=["auto", "cute", "cutlass2x", "legacy"],
                     help="of --config")  # fmt: skip
    who.add_argument("--config", help="configurations of that backend, comma-separated, beside the providers")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--rounds", type=cli.count, default=ROUNDS, help=f"measured rounds (default {ROUNDS}); of products over 1e11 "
        f"flop {timing.MOST_BLOCKS} at most"
    )  # fmt: skip
    how.add_argument(
        "--sustained", action="store_true", help="products of 1e10 to 1e11 flop, too, in long blocks at the power "
        "limit, in place of short rounds at full clock"
    )  # fmt: skip
    how.add_argument("--jobs", type=int, help="compile processes; by default a core each, as many as memory holds")
    how.add_argument("--cublas-kernels", action="store_true", help="name the kernels that cuBLAS picked")
    how.add_argument("--host", action="store_true", help="host cost of an eager call instead")
    into = parser.add_argument_group("into")
    into.add_argument("--json", metavar="FILE", type=cli.output)
    into.add_argument("--csv", metavar="FILE", type=cli.output)
    into.add_argument(
        "--plot", metavar="FILE", type=cli.output, help="TFLOP/s over size, ratios, roofline (needs matplotlib)"
    )
    return parser


def _timer(sustained: bool) -> Timer:
    return functools.partial(
        timing.interleaved, sustained_from=timing.PAUSED_FLOPS if sustained else timing.SUSTAINED_FLOPS
    )


def _providers(options: argparse.Namespace) -> list[Provider]:
    found = make(options.providers.split(","), options.against)
    return found + [Cutegemm(options.backend, text) for text in (options.config or "").split(",") if text]


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if refused := why_precision_refused(options.dtype, options.precision):
        parser.error(f"--{refused}")
    if refused := why_mixture_refused(options.dtype, out_dtype=options.out_dtype):
        parser.error(refused.replace("out_dtype", "--out-dtype", 1))
    try:
        shapes, providers = cli.shapes(options, [options.majors]), _providers(options)
        starts = suites.starts(options.offsets)
    except (OSError, ValueError) as why:
        parser.error(str(why))
    if options.flops != random_shapes.ANY and not options.random:
        parser.error("--flops: got it without --random, whose shapes it bounds")
    if options.random < 0:
        parser.error(f"--random: got {options.random}, expected a number of shapes")
    if not shapes and not options.random:
        shapes = [suites.Laid(shape, options.majors) for shape in suites.parse("1024,2048,4096,8192")]
    if not torch.cuda.is_available():
        print("tuning.bench times kernels on a GPU, and torch sees none here. Without one, try:")
        print("  python -m cutegemm.emulator --shape 256 --dtype fp16      (runs and profiles a kernel)")
        return 2
    before = timing.gpu_state()
    print(f"{before}; {versions(providers)}, CUDA {torch.version.cuda}")
    if options.host:
        print(tabulate(eager_cost().items(), headers=["eager 128^3 fp16", "host us a call"], floatfmt=".2f"))
        return 0
    print(f"{options.dtype} {options.precision} {options.majors}: {bench_report.METHOD}")
    arch = Arch.of_device()
    if options.random:
        problems = random_shapes.drawn(options, options.random, options.seed, options.majors, arch)
        shapes += [suites.Laid((problem.m, problem.n, problem.k), options.majors) for problem in problems]
    asked = cases(dict.fromkeys(shapes), options.dtype, options.precision, starts, options.majors, options.out_dtype)
    count, seconds = compile_ahead(asked, providers, arch, options.jobs)
    if count:
        print(f"compiled {count} kernels in {seconds:.0f} s")
    header = {"before": before, "versions": versions(providers), "arch": arch.name}

    def keep(results: list[Result]) -> None:
        bench_report.write(results, header, vars(options), json_path=options.json, csv_path=options.csv)

    results, whole = run(
        asked, providers, arch, rounds=options.rounds, keep=keep, timer=_timer(options.sustained),
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    header["after"] = timing.gpu_state()
    if options.cublas_kernels and whole:
        results = with_kernel_names(asked, results)
    print(bench_report.table(results))
    print(bench_report.summary(results))
    print(header["after"])
    keep(results)
    if options.plot and results:
        from tuning.plot import plot_bench

        try:
            plot_bench(results, arch, options.plot, title=f"{options.dtype} {options.majors}, {before.split(',')[0]}")
        except (RuntimeError, ValueError) as why:
            print(f"--plot: {why}", file=sys.stderr)
    if not whole:
        print("interrupted: these are the shapes measured so far", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
