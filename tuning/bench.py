"""Times cutegemm against torch (cuBLAS): `python -m tuning.bench --help`.

Method: the candidates are timed in the same process, round by round in turns, with inputs that rotate through three
times the L2 cache and one CUDA graph a round (`tuning.timing`). Every result is checked against the float64 reference
before it is timed. A ratio above 1 is faster than torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

import cutegemm
from cutegemm import reference
from cutegemm.arch import Arch
from cutegemm.errors import GemmError
from cutegemm.problem import Problem, torch_dtype
from cutegemm.roofline import roofline
from tuning import timing

ROUNDS = 9


def operands(m: int, n: int, k: int, dtype: torch.dtype, majors: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal A (m, k) and B (k, n) on the GPU, "t" A or "n" B K-major; see `Problem.of`."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(rows: int, cols: int, row_major: bool) -> torch.Tensor:
        shape = (rows, cols) if row_major else (cols, rows)
        values = torch.randn(shape, device="cuda", generator=generator).to(dtype)
        return values if row_major else values.t()

    return draw(m, k, majors[0] == "t"), draw(k, n, majors[1] == "t")


def bench_shape(m: int, n: int, k: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks and times one shape; one row a candidate, torch first."""
    dtype = torch_dtype(options.dtype)
    arch = Arch.of_device()
    problem = Problem.of(m, n, k, options.dtype, majors=options.majors, precision=options.precision)
    sets = timing.rotation(problem.min_bytes, arch.l2_bytes)
    inputs = [operands(m, n, k, dtype, options.majors, seed) for seed in range(sets)]
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    precision = options.precision if options.dtype == "fp32" else None
    candidates: dict[str, list[Callable[[], object]]] = {}
    candidates["torch"] = [partial(torch.mm, a, b, out=out) for a, b in inputs]
    a, b = inputs[0]
    want = reference.expected(a, b, precision=options.precision)
    for name, backend, config in _asked(options):
        try:
            got = cutegemm.gemm(a, b, out=out.fill_(math.nan), precision=precision, backend=backend, config=config)
        except (GemmError, ValueError) as why:
            print(f"{m}x{n}x{k} {name}: {why}", file=sys.stderr)
            continue
        verdict = reference.check(got, want)
        if not verdict.ok:
            print(f"{m}x{n}x{k} {name}: WRONG, not timed: {verdict.message}", file=sys.stderr)
            continue
        call: dict[str, Any] = {"precision": precision, "backend": backend, "config": config, "out": out}
        for x, y in inputs:
            cutegemm.prepare(x, y, **call)
        candidates[name] = [partial(cutegemm.gemm, x, y, **call) for x, y in inputs]
    del want
    torch.cuda.empty_cache()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    try:
        found = timing.interleaved(candidates, problem.flops, options.rounds)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    bound = roofline(problem, arch)
    return [
        {
            "shape": f"{m}x{n}x{k}",
            "what": name,
            "us": timed.us,
            "spread": (timed.high - timed.low) / timed.us,
            "tflops": timed.tflops(problem.flops),
            "of_bound": bound.share(timed.us * 1e-6),
            "ratio": found["torch"].us / timed.us,
        }
        for name, timed in found.items()
    ]


def host_cost(calls: int = 100, rounds: int = 50) -> dict[str, float]:
    """Microseconds of host time of an eager 128^3 fp16 call, without a graph: the fastest of many rounds."""
    a, b = operands(128, 128, 128, torch.float16, "tn", 0)
    best: dict[str, float] = {}
    todo: dict[str, Callable[[], object]] = {
        "torch.mm": lambda: torch.mm(a, b),
        "cutegemm.gemm": lambda: cutegemm.gemm(a, b),
    }
    for _ in range(rounds):
        for name, call in todo.items():
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            took = (time.perf_counter() - start) / calls * 1e6
            torch.cuda.synchronize()
            best[name] = min(best.get(name, math.inf), took)
    return best


def _asked(options: argparse.Namespace) -> list[tuple[str, str, str | None]]:
    if options.config:
        return [(text, options.backend, text) for text in options.config.split(",")]
    return [(options.backend, options.backend, None)]


def _shapes(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    shapes = []
    for text in options.shapes.split(","):
        parts = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
        if len(parts) not in (1, 3) or min(parts) < 1:
            raise SystemExit(f"--shapes: got {text!r}, expected MxNxK or one number for a square product")
        shapes.append((parts[0], parts[0], parts[0]) if len(parts) == 1 else (parts[0], parts[1], parts[2]))
    return shapes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tuning.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", default="1024,2048,4096,8192", help="MxNxK or one number, comma-separated")
    parser.add_argument("--dtype", default="bf16", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--precision", default="ieee", choices=["ieee", "tf32"], help="for fp32")
    parser.add_argument("--majors", default="tn", choices=["tn", "tt", "nn", "nt"], help="tn: both K-major")
    parser.add_argument("--backend", default="auto", choices=["auto", "cute", "cutlass2x", "legacy"])
    parser.add_argument("--config", help="configurations of that backend, comma-separated")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--host", action="store_true", help="host cost of an eager call instead")
    parser.add_argument("--json", help="also write every figure to this file")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.precision != "ieee" and options.dtype != "fp32":
        parser.error(f"--precision {options.precision} is for fp32 operands, not {options.dtype}")
    if not torch.cuda.is_available():
        print("tuning.bench times kernels on a GPU, and torch sees none here. Without one, try:")
        print("  python -m cutegemm.emulator --shape 256 --dtype fp16      (runs and profiles a kernel)")
        return 2
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "nvidia-cutlass-dsl"))
    print(f"{timing.gpu_state()}; {versions}, CUDA {torch.version.cuda}")
    if options.host:
        print(tabulate(host_cost().items(), headers=["eager 128^3 fp16", "host us a call"], floatfmt=".2f"))
        return 0
    kind = f"{options.dtype} {options.precision} {options.majors}"
    print(f"{kind}, normal inputs, interleaved, L2-cold, CUDA graphs, median of rounds")
    rows = []
    for m, n, k in _shapes(options):
        rows += bench_shape(m, n, k, options)
    headers = ["shape", "", "us", "+-", "TFLOP/s", "of bound", "ratio"]
    table = [
        (r["shape"], r["what"], f"{r['us']:.1f}", f"{r['spread']:.1%}", f"{r['tflops']:.1f}", f"{r['of_bound']:.1%}",
         f"{r['ratio']:.3f}")
        for r in rows
    ]  # fmt: skip
    print(tabulate(table, headers=headers, disable_numparse=True))
    for name in dict.fromkeys(r["what"] for r in rows if r["what"] != "torch"):
        ratios = [r["ratio"] for r in rows if r["what"] == name]
        mean = statistics.geometric_mean(ratios)
        print(f"{name}: ratio to torch {mean:.3f} (geometric mean), {min(ratios):.3f} to {max(ratios):.3f}")
    print(timing.gpu_state())
    if options.json:
        with open(options.json, "w") as out:
            json.dump({"options": vars(options), "rows": rows}, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
