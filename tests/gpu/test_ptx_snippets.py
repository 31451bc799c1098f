"""PTX snippets on the GPU and in the emulator: identical bits, or within the snippet's bound."""

import ctypes

import numpy as np
import pytest
import torch

from tests.ptx_snippet_table import SNIPPETS
from tests.ptx_snippets import BLOCK, data, differing, emulate, ptx

pytestmark = pytest.mark.gpu
BLOCKS = 8
SEED = 20240


def on_gpu(text: str, inputs: np.ndarray, outputs: int) -> np.ndarray:
    """Run the kernel of ``text`` with the driver API."""
    from cuda.bindings import driver

    def done(result):
        code, *rest = result
        assert int(code) == 0, f"{driver.cuGetErrorString(code)[1]}\n{text}"
        return rest[0] if rest else None

    torch.cuda.init()
    a = torch.from_numpy(inputs.view(np.int64)).cuda()
    out = torch.zeros(len(inputs), outputs, dtype=torch.int64, device="cuda")
    module = done(driver.cuModuleLoadData(text.encode() + b"\0"))
    try:
        function = done(driver.cuModuleGetFunction(module, b"k"))
        arguments = ((a.data_ptr(), out.data_ptr()), (ctypes.c_void_p, ctypes.c_void_p))
        stream = torch.cuda.current_stream().cuda_stream
        done(driver.cuLaunchKernel(function, len(inputs) // BLOCK, 1, 1, BLOCK, 1, 1, 0, stream, arguments, 0))
        torch.cuda.synchronize()
    finally:
        done(driver.cuModuleUnload(module))
    return out.cpu().numpy().view(np.uint64)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.name.replace(" ", "_"))
def test_gpu_and_emulator_agree(snippet):
    inputs = data(snippet, BLOCKS, SEED)
    want = on_gpu(ptx(snippet), inputs, len(snippet.outputs))
    got = emulate(snippet, inputs)
    wrong = differing(snippet, got, want)
    at = np.flatnonzero(wrong)[:4]
    assert not wrong.any(), f"{snippet.body}\n{wrong.sum()} of {len(wrong)} threads differ; " + "; ".join(
        f"in {[hex(int(v)) for v in inputs[k]]} emulator "
        f"{[hex(int(v)) for v in got[k]]} GPU {[hex(int(v)) for v in want[k]]}"
        for k in at
    )
