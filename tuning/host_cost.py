"""Host time of an eager call, ours beside torch's: `python -m tuning.host_cost`.

Calls of a size whose kernel takes less time than its launch (128^3, fp16) are issued back to back without a
synchronization, and the host's clock is read; the fastest of many rounds counts, rounds of all candidates in turn.
Backward passes are issued by autograd's own thread, so that they are timed to the end of `backward()`.

`--stub` times the same calls on a machine without a GPU, for CPU tensors whose kernels are stand-ins that return at
once (`tuning.host_stub`): all that the host does but for the driver's launch and the launcher that encodes TMA
descriptors. Python's way and the C++ part's stand beside each other. The column of torch is its CPU operator at 16^3,
whose dispatch, allocation and bookkeeping are those of its CUDA operator, with a small product in place of cuBLAS's
choice and launch; that of "K split" has the time of a large product instead, and says nothing. Backward passes run in
the calling thread there. Beside `quantize` stands torch's conversion without scales, beside nn.Fp8Linear and
nn.Fp8SwiGLU torch's layers in 16 bits, beside `moe` and nn.Fp8MoE what transformers 5 calls, eager, in 16 bits.

`--choice` times, without a GPU, what the heuristic takes to choose for a problem that it has not met on the GPU that
`--arch` names: random problems of `tuning.random_shapes.sizes`, the fastest of some rounds each, after one that worked
out what problems of a magnitude share.

`--new-shapes` times what `gemm` takes on the host for a shape that it has not met, of a known signature (bf16, B
K-major) and with a loaded kernel: the checks, the winners, the heuristic's choice, and binding the kernel to the sizes.
Each shape is prepared once, which compiles or loads its kernel; then all plans, and nothing else, are forgotten before
each round. With a GPU the launch is timed too. Without one, plans for the emulator are timed up to where it would run
(`--arch` names the GPU, an H200 by default): this leaves out the launch and what binding a kernel asks of CUDA.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from tabulate import tabulate

import cutegemm
from cutegemm import native
from cutegemm.choice import heuristics
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.run import call as call_module
from cutegemm.run.progress import Bars
from cutegemm.tuner import timing
from tuning import cli, host_stub, moe, random_shapes


def candidates(
    size: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """What is called: name -> (torch's way, ours)."""
    functional = torch.nn.functional
    generator = torch.Generator(device=device).manual_seed(0)
    x, weight = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    bias, out = torch.randn(size, device=device, generator=generator).to(dtype), torch.empty_like(x)
    b = weight.t()
    theirs = torch.nn.Linear(size, size, device=device, dtype=dtype)
    ours = cutegemm.nn.Linear(size, size, device=device, dtype=dtype)
    wide = x.float()
    deep, other = (torch.ones(64, 16384, device=device, dtype=dtype) for _ in range(2))
    other = other.t()

    fp8 = torch.float8_e4m3fn
    quantized = cutegemm.nn.Fp8Linear.from_linear(theirs)
    values, rows = cutegemm.quantize(x, fp8)
    of_weight, columns = quantized.weight.t(), quantized.weight_scale.t()

    stacked = torch.cat((weight, weight))
    gated = cutegemm.nn.SwiGLU(size, size, device=device, dtype=dtype)
    gated_in_fp8 = cutegemm.nn.Fp8SwiGLU.from_weights(weight, weight, weight)

    def mlp(given: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(given, gate_up).chunk(2, -1)
        return functional.silu(gate) * up

    experts = torch.arange(2 * size, device=device).view(size, 2) % 8
    shares = torch.ones(size, 2, device=device, dtype=dtype)
    of_experts = torch.stack([stacked] * 8), torch.stack([weight] * 8)
    experts_in_fp8 = cutegemm.nn.Fp8MoE.from_weights(*of_experts)
    of_others = *(each.mT.contiguous() for each in of_experts), *(each[..., 0].contiguous() for each in of_experts)

    def without_gradients(function: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(function)

    def autocast(function: Callable[..., object], *tensors: torch.Tensor) -> Callable[[], object]:
        def call() -> object:
            with torch.autocast(device, dtype=dtype):
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
        "mm, then gating": (
            lambda: mlp(x, stacked),
            lambda: cutegemm.gemm(x, stacked.t(), epilogue=cutegemm.ops.swiglu),
        ),
        "nn.SwiGLU, no_grad": (
            without_gradients(lambda: functional.linear(mlp(x, stacked), weight)),
            without_gradients(lambda: gated(x)),
        ),
        "moe, two of eight experts": (
            lambda: moe.grouped_mm(x, experts, shares, *of_experts),
            lambda: cutegemm.moe(x, experts, shares, *of_experts),
        ),
        "moe as of gpt-oss": (
            lambda: moe.grouped_mm(x, experts, shares, *of_others),
            lambda: moe.ours(x, experts, shares, *of_others),
        ),
        "nn.Fp8MoE, two of eight experts": (
            without_gradients(lambda: moe.grouped_mm(x, experts, shares, *of_experts)),
            without_gradients(lambda: experts_in_fp8(x, experts, shares)),
        ),
        "quantize, rows": (lambda: x.to(fp8), lambda: cutegemm.quantize(x, fp8)),
        "mm of fp8, scales of rows": (
            lambda: torch._scaled_mm(values, of_weight, rows, columns, out_dtype=torch.bfloat16),
            lambda: cutegemm.gemm(values, of_weight, scale_a=rows, scale_b=columns),
        ),
        "nn.Fp8Linear": (without_gradients(lambda: theirs(x)), without_gradients(lambda: quantized(x))),
        "nn.Fp8SwiGLU": (
            without_gradients(lambda: functional.linear(mlp(x, stacked), weight)),
            without_gradients(lambda: gated_in_fp8(x)),
        ),
        "mm, K split": (lambda: torch.mm(deep, other), lambda: cutegemm.gemm(deep, other)),
        "mm as an operator": (
            lambda: torch.ops.aten.mm.default(x, b),
            lambda: torch.ops.cutegemm.gemm.default(x, b),
        ),
    }


def stubbed(calls: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """(name, torch's, Python's, the C++ part's) host microseconds of each call with a stand-in for the launch."""
    times = []
    for in_cpp in (False, True):
        with host_stub.on_cpu(in_cpp=in_cpp):
            pairs = candidates(16, torch.bfloat16, "cpu")
            flat = {f"{name}/{who}": pair[i] for name, pair in pairs.items() for i, who in enumerate(("torch", "ours"))}
            times.append(timing.host_us(flat, calls, rounds))
    first, second = times
    return [
        (name, min(first[f"{name}/torch"], second[f"{name}/torch"]), first[f"{name}/ours"], second[f"{name}/ours"])
        for name in pairs
    ]


def choices(count: int, rounds: int, arch: Arch) -> list[float]:
    """Host microseconds that each of `count` random bf16 problems takes to choose for on that GPU, ascending."""
    problems = random_shapes.sizes(count, 0, "bf16", "tn", arch)
    best = [float("inf")] * count
    for turn in range(rounds + 1):
        for place, problem in enumerate(problems):
            fresh = dataclasses.replace(problem)  # one that remembers nothing
            start = time.perf_counter()
            heuristics.choose(fresh, arch)
            if turn:
                best[place] = min(best[place], (time.perf_counter() - start) * 1e6)
    return sorted(best)


def new_shapes(count: int, rounds: int, arch: str) -> list[float]:
    """Host microseconds that each of `count` random shapes takes when `gemm` meets it, ascending; the least of rounds.

    On a GPU whole calls, in a row as those of `timing.host_us`: a round begins with an idle GPU. Without one
    `cutegemm.prepare` for the emulated GPU `arch`.
    """
    on_gpu = torch.cuda.is_available()
    device, backend = ("cuda", "auto") if on_gpu else ("cpu", "cute")
    call = cutegemm.gemm if on_gpu else cutegemm.prepare
    memo = call_module.memo
    before = os.environ.get("CUTEGEMM_ARCH")
    os.environ["CUTEGEMM_ARCH"] = arch
    bars = Bars()
    try:
        best = [float("inf")] * count
        empty = functools.partial(torch.empty, dtype=torch.bfloat16, device=device)
        operands = [(empty(m, k), empty(n, k).t()) for m, n, k in _shapes(count)]
        for place, (a, b) in enumerate(operands):
            cutegemm.prepare(a, b, backend=backend)
            bars.show("", f"prepared {place + 1} of {count}", place + 1, count)
        bars.close()  # before the first round that counts
        bars.say(f"prepared {count} of {count}")
        if on_gpu:
            native.wait()
        for turn in range(rounds + 1):
            memo.clear()
            if on_gpu:
                torch.cuda.synchronize()
            for place, (a, b) in enumerate(operands):
                start = time.perf_counter()
                call(a, b, backend=backend)
                if turn:  # the first one loads what is not loaded yet
                    best[place] = min(best[place], (time.perf_counter() - start) * 1e6)
    finally:
        bars.close()
        if before is None:
            del os.environ["CUTEGEMM_ARCH"]
        else:
            os.environ["CUTEGEMM_ARCH"] = before
    return sorted(best)


def _shapes(count: int) -> list[tuple[int, int, int]]:
    """Different (M, N, K), multiples of 8, so that all operands are aligned alike and the signature is one."""
    draw = random.Random(0)
    found: dict[tuple[int, int, int], None] = {}
    while len(found) < count:
        m, n, k = (8 * round(2 ** draw.uniform(3, 9)) for _ in range(3))
        found[m, n, k] = None
    return list(found)


def main(arguments: list[str] | None = None) -> int:
    parser = cli.parser("host_cost", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", type=cli.count, default=128, help="M = N = K")
    parser.add_argument("--calls", type=cli.count, default=100, help="calls a round")
    parser.add_argument("--rounds", type=cli.count, default=50)
    parser.add_argument("--stub", action="store_true", help="without a GPU: all but the launch itself")
    parser.add_argument(
        "--choice", type=cli.count, metavar="COUNT", help="time the heuristic's choice for COUNT problems"
    )
    parser.add_argument(
        "--new-shapes", type=cli.count, metavar="COUNT", help="time COUNT new shapes of a known signature"
    )
    parser.add_argument("--arch", default="H200", help="the GPU of --choice, and of --new-shapes where there is none")
    options = parser.parse_args(arguments)
    try:
        arch = arch_table.get(options.arch)
    except ValueError as error:
        parser.error(f"--{error}")
    if options.choice is not None:
        took = choices(options.choice, options.rounds, arch)
        print(f"a choice of the heuristic takes {statistics.median(took):.1f} us in the median of {len(took)} random "
              f"problems, {statistics.fmean(took):.1f} on average, {took[-1]:.1f} at most")  # fmt: skip
        return 0
    if options.new_shapes is not None:
        took = new_shapes(options.new_shapes, options.rounds, options.arch)
        where = "a call, launch included" if torch.cuda.is_available() else "without a GPU: up to the launch"
        print(f"a new shape of a known signature takes {statistics.median(took):.1f} us on the host in the median of "
              f"{len(took)}, {took[-1]:.1f} at most ({where})")  # fmt: skip
        return 0
    if options.stub:
        headers = ["16^3 bf16, no launch", "torch on the CPU, us", "Python, us", "C++, us"]
        print(tabulate(stubbed(options.calls, options.rounds), headers=headers, floatfmt=".2f"))
        return 0
    if not torch.cuda.is_available():
        print("tuning.host_cost times launches on a GPU, and torch sees none here")
        return 2
    print(timing.gpu_state())
    native.wait()
    print(f"host code: {native.status()}")
    pairs = candidates(options.size, torch.float16)
    flat = {f"{name}/{who}": pair[i] for name, pair in pairs.items() for i, who in enumerate(("torch", "ours"))}
    best = timing.host_us(flat, options.calls, options.rounds)
    rows = [
        (name, best[f"{name}/torch"], best[f"{name}/ours"], best[f"{name}/torch"] / best[f"{name}/ours"])
        for name in pairs
    ]
    headers = [f"eager {options.size}^3 fp16", "torch, us", "cutegemm, us", "ratio"]
    print(tabulate(rows, headers=headers, floatfmt=".2f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
