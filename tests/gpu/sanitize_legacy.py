"""Launches every rung of the ladder on ragged shapes and checks it, for NVIDIA's compute-sanitizer:

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 python tests/gpu/sanitize_legacy.py;
        done

Run it once without the tool, so that the kernels are compiled: under it a kernel takes one or two seconds as it is.
`sanitize_legacy.py 0/3` takes every third rung, so that the slow tools can run side by side; a second argument
names the rungs to take.
"""

from __future__ import annotations

import sys

import torch

import cutegemm
from cutegemm.problem.reference import check, expected
from legacy_cuda.rungs import RUNGS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Aligned to 16 bytes and not; several CTAs along both axes; K of several tiles and a ragged one.
SHAPES = ((280, 136, 72), (133, 263, 51))


def main() -> int:
    share, of = map(int, (sys.argv[1] if len(sys.argv) > 1 else "0/1").split("/"))
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(RUNGS)
    torch.manual_seed(0)
    wrong = 0
    rungs = [RUNGS[name] for name in names][share::of]
    for rung in rungs:
        kind = DTYPES[rung.dtypes[0]]
        for (m, n, k), transposed in zip(SHAPES, (False, True), strict=True):
            a, b, c = (torch.randn(2, *size).to(kind) for size in ((m, k), (k, n), (m, n)))
            on_a, on_b = (x.mT.contiguous().cuda().mT if transposed else x.cuda() for x in (a, b))
            got = cutegemm.gemm(on_a, on_b, c.cuda(), beta=0.5, backend="legacy", config=rung.name)
            verdict = check(got.cpu(), expected(a, b, c, beta=0.5, tensor_cores=rung.tensor_cores))
            wrong += not verdict
            print(f"{rung.name} {m}x{n}x{k}: {verdict.message}", flush=True)
    print(f"{len(rungs)} rungs, {wrong} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
