"""The main job in one minute: multiply with the real compiled kernels and compare with the float64 reference.

`make demo`, or `python -m cutegemm.demo`. On a GPU the kernels run there. Without one they are compiled all the same,
and run in the emulator of their PTX, with every check on.
"""

from __future__ import annotations

import sys
import time

import torch
from tabulate import tabulate

import cutegemm
from cutegemm.choice import plan
from cutegemm.problem import reference

SIZES = {"cpu": (384, 256, 192), "cuda": (4096, 4096, 4096)}
KINDS = ((torch.float16, None), (torch.bfloat16, None), (torch.float32, "ieee"), (torch.float32, "tf32"))


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        print(f"Running on {torch.cuda.get_device_name()}.")
    else:
        try:
            name = plan.emulated_arch().name
        except ValueError as why:
            print(f"cutegemm.demo: {why}", file=sys.stderr)
            return 2
        print(f"No GPU here: the kernels are compiled for {name} and their PTX runs in the emulator (CUTEGEMM_ARCH).")
    m, n, k = SIZES[device]
    rows, right = [], True
    for dtype, precision in KINDS:
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(n, k, device=device).to(dtype).t()
        bias = torch.randn(n, device=device)
        options = {"bias": bias, "activation": "gelu", "precision": precision, "backend": "cute"}
        start = time.perf_counter()
        cutegemm.prepare(a, b, **options)
        compiled = time.perf_counter()
        d = cutegemm.gemm(a, b, **options)
        if device == "cuda":
            torch.cuda.synchronize()
        done = time.perf_counter()
        want = reference.expected(a, b, bias=bias, activation="gelu", precision=precision or "ieee")
        verdict = reference.check(d, want)
        right &= verdict.ok
        kind = str(dtype).removeprefix("torch.") + (f" {precision}" if precision else "")
        rows.append((kind, f"{compiled - start:.2f} s", f"{done - compiled:.3f} s", verdict.message))
    print(f"D = gelu(A @ B + bias), {m}x{n}x{k}, backend 'cute', against float64:")
    print(tabulate(rows, headers=["operands", "compile or load", "run", "result"]))
    print("\nWhat one of these calls does (cutegemm.explain):\n")
    cutegemm.explain(a, b, bias=bias, activation="gelu", precision="tf32", backend="cute")
    print(f"\n{'All results are right.' if right else 'A RESULT IS WRONG.'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
