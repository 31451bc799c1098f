"""Launches CUTLASS 2.x kernels of every kind on ragged problems and checks them, for NVIDIA's compute-sanitizer:

    python -m tests.gpu.sanitize_cutlass2x --build
    for tool in memcheck synccheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 \\
            python -m tests.gpu.sanitize_cutlass2x; done
    for i in 1 2 3 4; do
        compute-sanitizer --tool racecheck --report-api-errors no --error-exitcode 9 \\
            python -m tests.gpu.sanitize_cutlass2x --small --shard $i/4 --seconds 45; done

The first command runs nvcc, and needs no GPU. racecheck is slow: `--small` takes the smallest problems that still reach
every published configuration and every kind of kernel, `--shard` a part of the list, and `--seconds` stops in time and
says where to go on (exit status 3). The reference is computed on the CPU, so that the tool watches these kernels alone.

initcheck is not of use: a CTA at an edge skips the copy of what lies beyond it and multiplies what shared memory holds;
those outputs are never stored.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

import cutegemm
from cutegemm.choice import plan
from cutegemm.hardware.arch import Arch
from cutegemm.problem import reference
from tests.gpu import cutlass2x_cases
from tests.gpu.cutlass2x_cases import Spec

GROUPS = ("majors", "alignment", "batch", "split")
STOPPED = 3
"""The exit status when the time was over before the list."""


def chosen(arch: Arch, small: bool) -> list[Spec]:
    """The problems, always in the same order."""
    if small:
        return cutlass2x_cases.smallest(arch)
    found = cutlass2x_cases.specs(arch, sample=1)
    return [spec for name in GROUPS for spec in found[name]] + found["published"][1::16]


def run(spec: Spec, seed: int, arch: Arch, device: str) -> None:
    """Computes on the device, checks on the CPU. Raises AssertionError with the worst element."""
    case = spec.case(seed, "cpu")
    numeric = {key: value for key, value in case.options.items() if key != "out"}
    want = reference.expected(case.a, case.b, **numeric)
    options = {key: moved(value, device) for key, value in case.options.items()}
    out = torch.full(want.value.shape, float("nan"), dtype=want.out_dtype).to(device)
    a, b = moved(case.a, device), moved(case.b, device)
    cutegemm.gemm(a, b, **{**options, "out": out}, backend="cutlass2x", config=spec.kernel(arch)[1])
    verdict = reference.check(out.cpu(), want)
    assert verdict.ok, f"{spec}: {verdict.message}"


def moved(value: object, device: str) -> object:
    """A tensor on the device with its strides, its offset and what lies between its elements; others as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    whole = value.as_strided((elements,), (1,), 0).to(device)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def part(text: str) -> tuple[int, int]:
    """ "2/5" as (2, 5): the second of five."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted is I/N with 1 <= I <= N")
    return int(index), int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when all were right, `STOPPED` when the time was over first."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize_cutlass2x")
    parser.add_argument("--build", action="store_true", help="compile the kernels and stop; needs no GPU")
    parser.add_argument("--small", action="store_true", help="the smallest problems, for racecheck")
    parser.add_argument("--shard", type=part, default=(1, 1), metavar="I/N", help="every Nth problem from the Ith")
    parser.add_argument("--first", type=int, default=0, help="how many of the shard to leave out: where one stopped")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no problem after so long")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    if options.build:
        arch = Arch.of_device(0) if torch.cuda.is_available() else plan.emulated_arch()
        both = {str(small): chosen(arch, small) for small in (False, True)}
        print(f"{cutlass2x_cases.build(both, arch)} kernels built in {time.monotonic() - begun:.1f} s")
        return 0
    if not torch.cuda.is_available():
        parser.error("it runs kernels on a GPU, and torch sees no CUDA device; --build needs none")
    torch.cuda.init()
    arch = Arch.of_device(0)
    index, count = options.shard
    specs = list(enumerate(chosen(arch, options.small)))[index - 1 :: count]
    cutlass2x_cases.build({"": [spec for _, spec in specs]}, arch)
    print(f"{len(specs)} problems, set up in {time.monotonic() - begun:.1f} s", flush=True)
    times = []
    for number, (seed, spec) in enumerate(specs[options.first :], options.first):
        if time.monotonic() - begun > options.seconds:
            print(f"problems {options.first} to {number - 1} right; go on with --first {number}")
            return STOPPED
        started = time.monotonic()
        run(spec, seed, arch, "cuda")
        times.append((time.monotonic() - started, spec))
    print(f"{len(times)} problems right in {time.monotonic() - begun:.1f} s")
    for seconds, spec in sorted(times, key=lambda pair: -pair[0])[:3]:
        print(f"  {seconds:.2f} s: {spec}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
