"""Launches CUTLASS 2.x kernels of every kind on ragged shapes and checks them, for NVIDIA's compute-sanitizer:

    for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 \\
            python -m tests.gpu.sanitize_cutlass2x; done

Run it once without the tool, so that nvcc is done. initcheck is not of use: a CTA at an edge skips the copy of what
lies beyond it and multiplies what shared memory holds; those outputs are never stored.
"""

from __future__ import annotations

import sys

import torch

from cutegemm.arch import Arch
from tests.gpu import cutlass2x_cases

GROUPS = ("majors", "alignment", "batch", "split")


def main() -> int:
    torch.cuda.init()
    arch = Arch.of_device(0)
    found = cutlass2x_cases.specs(arch, sample=1)
    chosen = {name: found[name] for name in GROUPS}
    chosen["published"] = found["published"][1::16]
    cutlass2x_cases.build(chosen, arch)
    count = 0
    for group in chosen.values():
        for number, spec in enumerate(group):
            spec.run(number)
            count += 1
    print(f"{count} problems right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
