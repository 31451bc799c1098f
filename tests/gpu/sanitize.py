"""Runs every CuTe kernel family on small ragged problems, for NVIDIA's compute-sanitizer to watch:

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.sanitize

(and racecheck, initcheck, synccheck). Results are checked as in every test.
"""

from __future__ import annotations

import torch

from tests.problems import Case

CONFIGS = {
    ("fp16", None): ("sm80/128x256x64/w64x64/s3/g8", "sm80/64x64x32/w32x32/s2/g1", "sm80/32x32x32/w16x16/s5/g8"),
    ("bf16", None): ("sm80/128x128x32/w64x64/s4/g8",),
    ("fp32", None): ("simt/256x128x16/w64x64/s3/g8", "simt/64x64x8/w32x32/s2/g8"),
    ("fp32", "tf32"): ("sm80/128x128x32/w64x32/s3/g8", "sm80/64x64x16/w32x32/s2/g8"),
}


def main() -> None:
    torch.cuda.init()
    count = 0
    for (dtype, precision), configs in CONFIGS.items():
        for config in configs:
            for majors in ("tn", "nt"):
                for m, n, k in ((129, 257, 65), (72, 40, 136), (1, 3, 5)):
                    case = Case.random(m, n, k, dtype, majors=majors, seed=count, device="cuda", precision=precision)
                    case.options.update(bias=torch.randn(n, device="cuda"), activation="silu")
                    case.run(backend="cute", config=config)
                    count += 1
    print(f"{count} problems right")


if __name__ == "__main__":
    main()
