"""Host time of an eager call, ours beside torch's: `python -m tuning.host_cost`.

Calls of a size whose kernel takes less time than its launch (128^3, fp16) are issued back to back without a
synchronization, and the host's clock is read; the fastest of many rounds counts, rounds of all candidates in turn.
Backward passes are issued by autograd's own thread, so that they are timed to the end of `backward()`.

`--choice` times, without a GPU, what the heuristic takes to choose for a problem that it has not met: random problems
of `tuning.untuned`, the fastest of some rounds each, after one that worked out what problems of a magnitude share.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable

import torch
from tabulate import tabulate

import cutegemm
from cutegemm import arch as arch_table
from cutegemm import heuristics
from tuning import timing, untuned


def candidates(size: int, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """What is called: name -> (torch's way, ours)."""
    functional = torch.nn.functional
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, weight = (torch.randn(size, size, device="cuda", generator=generator).to(dtype) for _ in range(2))
    bias, out = torch.randn(size, device="cuda", generator=generator).to(dtype), torch.empty_like(x)
    b = weight.t()
    theirs = torch.nn.Linear(size, size, device="cuda", dtype=dtype)
    ours = cutegemm.nn.Linear(size, size, device="cuda", dtype=dtype)
    wide = x.float()

    def without_gradients(function: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(function)

    def autocast(function: Callable[..., object], *tensors: torch.Tensor) -> Callable[[], object]:
        def call() -> object:
            with torch.autocast("cuda", dtype=dtype):
                return function(*tensors)

        return call

    def step(module: torch.nn.Module) -> Callable[[], object]:
        return lambda: module(x).backward(out)

    return {
        "mm": (lambda: torch.mm(x, b), lambda: cutegemm.gemm(x, b)),
        "mm, out=": (lambda: torch.mm(x, b, out=out), lambda: cutegemm.gemm(x, b, out=out)),
        "addmm": (lambda: torch.addmm(out, x, b), lambda: cutegemm.gemm(x, b, out, beta=1.0)),
        "linear": (lambda: functional.linear(x, weight, bias), lambda: cutegemm.linear(x, weight, bias)),
        "linear, then gelu": (
            lambda: functional.gelu(functional.linear(x, weight, bias)),
            lambda: cutegemm.linear(x, weight, bias, "gelu"),
        ),
        "nn.Linear, no_grad": (without_gradients(lambda: theirs(x)), without_gradients(lambda: ours(x))),
        "nn.Linear, recorded": (lambda: theirs(x), lambda: ours(x)),
        "nn.Linear, forward and backward": (step(theirs), step(ours)),
        "mm under autocast": (autocast(torch.mm, wide, wide), autocast(cutegemm.gemm, wide, wide)),
        "mm as an operator": (
            lambda: torch.ops.aten.mm.default(x, b),
            lambda: torch.ops.cutegemm.gemm.default(x, b),
        ),
    }


def measure(todo: dict[str, Callable[[], object]], calls: int, rounds: int) -> dict[str, float]:
    """Host microseconds a call, the fastest round of each."""
    best = dict.fromkeys(todo, float("inf"))
    for call in todo.values():
        call()
    for _ in range(rounds):
        for name, call in todo.items():
            for _ in range(calls // 5):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / calls * 1e6)
            torch.cuda.synchronize()
    return best


def choices(count: int, rounds: int) -> list[float]:
    """Host microseconds that each of `count` random bf16 problems takes to choose for on an H200, ascending."""
    arch = arch_table.get("H200")
    problems = untuned.draw(count, 0, "bf16", "tn", arch)
    best = [float("inf")] * count
    for turn in range(rounds + 1):
        for place, problem in enumerate(problems):
            fresh = dataclasses.replace(problem)  # one that remembers nothing
            start = time.perf_counter()
            heuristics.choose(fresh, arch)
            if turn:
                best[place] = min(best[place], (time.perf_counter() - start) * 1e6)
    return sorted(best)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tuning.host_cost", description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", type=int, default=128, help="M = N = K")
    parser.add_argument("--calls", type=int, default=100, help="calls a round")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--choice", type=int, metavar="COUNT", help="time the heuristic's choice for COUNT problems")
    options = parser.parse_args(arguments)
    if options.choice is not None:
        if options.choice < 1 or options.rounds < 1:
            parser.error("--choice and --rounds must be at least 1")
        took = choices(options.choice, options.rounds)
        print(f"a choice of the heuristic takes {statistics.median(took):.1f} us in the median of {len(took)} random "
              f"problems, {statistics.fmean(took):.1f} on average, {took[-1]:.1f} at most")  # fmt: skip
        return 0
    if not torch.cuda.is_available():
        print("tuning.host_cost times launches on a GPU, and torch sees none here")
        return 2
    print(timing.gpu_state())
    pairs = candidates(options.size, torch.float16)
    flat = {f"{name}/{who}": pair[i] for name, pair in pairs.items() for i, who in enumerate(("torch", "ours"))}
    best = measure(flat, options.calls, options.rounds)
    rows = [
        (name, best[f"{name}/torch"], best[f"{name}/ours"], best[f"{name}/torch"] / best[f"{name}/ours"])
        for name in pairs
    ]
    headers = [f"eager {options.size}^3 fp16", "torch, us", "cutegemm, us", "ratio"]
    print(tabulate(rows, headers=headers, floatfmt=".2f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
