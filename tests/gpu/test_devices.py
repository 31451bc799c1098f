"""Two GPUs in one process: tensors on one of them while the other is the current device."""

from __future__ import annotations

import pytest
import torch

from tests import needs
from tests.problems import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

KERNELS = [
    ("legacy", "double_buffer_shared/bm256/bn128/bk32/tm16/tn8", "fp32"),  # more than 48 KB of shared memory
    ("legacy", "wmma_double_buffer", "bf16"),
    ("cutlass2x", "cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id4", "bf16"),
    ("cutlass2x", "cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id1/k2", "bf16"),
    ("cutlass2x", "cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/streamk", "bf16"),
    ("cute", "sm80/128x128x32/w64x64/s4/g8", "bf16"),
    ("cute", "simt/128x128x16/w32x64/s3/g8", "fp32"),
    ("cute", "sm90/128x128x64/coop2/c2x2/s4/serp8/pdl", "bf16"),
    ("cute", "sm90/128x128x64/coop2/c1x1/s4/row/k8/pdl", "bf16"),
    ("cute", "sm90/128x128x64/coop2/c1x1/s4/serp8/streamk/pdl", "bf16"),
]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize(("backend", "config", "dtype"), KERNELS)
def test_a_kernel_first_used_on_a_device_that_is_not_current(backend, config, dtype, current, seed):
    """A device that no call has used this kernel on gets all that the kernel needs, whichever device is current."""
    needs.kernel(backend, config)
    other = 1 - current
    with torch.cuda.device(current):
        for number, device in enumerate((other, current, other)):
            # A size of its own each time, so that the call is bound anew.
            case = Case.random(256 + 8 * number, 1600, 520, dtype, seed=seed, device=f"cuda:{device}")
            case.run(backend=backend, config=config)
            assert torch.cuda.current_device() == current


def test_the_choice_for_a_device_that_is_not_current(seed):
    for shape in ((512, 512, 512), (16, 4096, 4096), (256, 256, 65536), (3, 5, 7)):
        case = Case.random(*shape, "bf16", seed=seed, device="cuda:1")
        with torch.cuda.device(0):
            case.run()
