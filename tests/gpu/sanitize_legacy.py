"""Launches every rung of the ladder on ragged shapes and checks it, for NVIDIA's compute-sanitizer:

for tool in memcheck racecheck synccheck initcheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 python tests/gpu/sanitize_legacy.py; done
"""

from __future__ import annotations

import torch

import cutegemm
from cutegemm.reference import check, expected
from legacy_cuda.rungs import RUNGS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Aligned to 16 bytes and not; several CTAs along both axes; K of several tiles and a ragged one.
SHAPES = ((280, 136, 72), (133, 263, 51))


def main() -> int:
    torch.manual_seed(0)
    wrong = 0
    for rung in RUNGS.values():
        for dtype in rung.dtypes[:1]:
            for m, n, k in SHAPES:
                a, b = torch.randn(2, m, k).to(DTYPES[dtype]), torch.randn(2, k, n).to(DTYPES[dtype])
                c = torch.randn(2, m, n).to(DTYPES[dtype])
                for on_a, on_b in ((a.cuda(), b.cuda()), (a.mT.contiguous().cuda().mT, b.mT.contiguous().cuda().mT)):
                    got = cutegemm.gemm(on_a, on_b, c.cuda(), beta=0.5, backend="legacy", config=rung.name)
                    verdict = check(got.cpu(), expected(a, b, c, beta=0.5, tensor_cores=rung.tensor_cores))
                    if not verdict:
                        wrong += 1
                        print(f"{rung.name} {dtype} {m}x{n}x{k}: {verdict.message}")
    print(f"{len(RUNGS)} rungs, {wrong} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
