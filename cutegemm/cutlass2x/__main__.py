"""Shows what a configuration becomes, and builds it:

python -m cutegemm.cutlass2x --config cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id4 --emit
python -m cutegemm.cutlass2x --list --dtype bf16 --arch sm_90a
python -m cutegemm.cutlass2x --build published --dtype bf16 --arch sm_90a

Without --dtype a configuration is shown for the first of fp16, fp32, TF32 that it can serve.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from cutegemm.cutlass2x import BACKEND, FORM, build_many, emit, published
from cutegemm.cutlass2x.config import TAKES
from cutegemm.errors import GemmError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import DTYPES, PRECISIONS, Problem
from cutegemm.problem.dtypes import kind_names
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a reader that has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GemmError, ValueError, KeyError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs: got {options.jobs}, accepted is 1 or more")
    arch = arch_table.get(options.arch)
    problem = _problem(options, arch)
    refused = BACKEND.supports(problem, arch)
    if refused:
        raise ValueError(refused)
    if options.list:
        for config in BACKEND.configs(problem, arch):
            print(config)
        return 0
    if options.build == "published":
        configs = [c for c in published() if BACKEND.check(c, problem, arch) is None]
    else:
        config = BACKEND.parse(options.config) if options.config else BACKEND.default(problem, arch)
        invalid = BACKEND.check(config, problem, arch)
        if invalid:
            raise ValueError(f"config: {config} cannot serve {problem}: {invalid}")
        configs = [config]
    if options.emit:
        print(emit.translation_unit([(problem.signature, config) for config in configs]))
        return 0
    begun = time.monotonic()
    build_many([(problem.signature, config) for config in configs], arch, jobs=options.jobs)
    print(f"{len(configs)} kernels for {problem.signature} on {arch.name}: {time.monotonic() - begun:.2f} s")
    return 0


def _problem(options: argparse.Namespace, arch: Arch) -> Problem:
    """What the options describe: of the dtypes and precisions they leave open, the first that serves --config."""
    size = options.size
    if size < 1:
        raise ValueError(f"--size: got {size}, accepted is 1 or more")

    def of(dtype: str, precision: str) -> Problem:
        out = options.out_dtype or dtype
        epilogue = Epilogue(out if options.c else None, out if options.bias else None, "n", options.activation)
        return Problem.of(
            size, size, size, dtype,
            majors=options.majors, out_dtype=options.out_dtype, precision=precision, epilogue=epilogue,
        )  # fmt: skip

    kinds = [kind for kind in TAKES if options.dtype in (None, kind[0]) and options.precision in (None, kind[1])]
    if not kinds and options.precision is None:
        raise ValueError(f"--dtype: got {options.dtype!r}; accepted are {kind_names(TAKES)}")
    if not kinds:
        raise ValueError(
            f"--precision: got {options.precision!r} for {options.dtype}; accepted are {kind_names(TAKES)}"
        )
    problems = [of(*kind) for kind in kinds]
    if options.config:
        config = BACKEND.parse(options.config)
        problems.sort(key=lambda problem: BACKEND.check(config, problem, arch) is not None)
    return problems[0]


def _parser() -> argparse.ArgumentParser:
    also = "`cutegemm emit` is the same command as `python -m cutegemm.cutlass2x`."
    parser = argparse.ArgumentParser(
        prog="python -m cutegemm.cutlass2x", description=f"{(__doc__ or '').split(':')[0]}. {also}"
    )
    parser.add_argument("--config", help=f"{FORM}; the default configuration when left out")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--emit", action="store_true", help="print the C++ that is compiled")
    what.add_argument("--list", action="store_true", help="print every valid configuration")
    what.add_argument("--build", choices=("config", "published"), default="config", help="compile into the store")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--out-dtype", choices=DTYPES)
    parser.add_argument("--precision", choices=PRECISIONS)
    parser.add_argument("--majors", choices=("tn", "tt", "nn", "nt"), default="tn", help="BLAS letters of A and B")
    parser.add_argument("--activation", choices=ACTIVATIONS)
    parser.add_argument("--c", action="store_true", help="with beta * C")
    parser.add_argument("--bias", action="store_true", help="with a bias along the columns")
    parser.add_argument("--size", type=int, default=4096, help="M = N = K, for alignment and the default choice")
    parser.add_argument("--arch", default="sm_80", help="sm_80, sm_90a, ...")
    parser.add_argument("--jobs", type=int, help="nvcc processes at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
