"""From the rows of tokens to the launched kernel that adds them up."""

from __future__ import annotations

import math
from typing import Any

import torch

from cutegemm.choice import plan as planning
from cutegemm.cute import standalone
from cutegemm.cute.combine import config
from cutegemm.cute.combine.config import Signature, Tile
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem.dtypes import dtype_name
from cutegemm.run import runner, steps
from cutegemm.run.environment import variable
from cutegemm.run.steps import Step

_kernels = planning.Memo(limit=256)


def run(rows: torch.Tensor, row_of: torch.Tensor, top_k: int) -> torch.Tensor | None:
    """As `pytorch.combining.combine`; None where the GPU cannot run the kernel."""
    step = step_of(rows, top_k)
    if step is None:
        return None
    sums = rows.new_empty((rows.shape[0] // top_k, rows.shape[1]))
    steps.run([step], config.POINTERS, (rows, row_of, sums), rows.device, {"sums"})
    return sums


def step_of(rows: torch.Tensor, top_k: int) -> Step | None:
    """The launch for these rows; None where the GPU cannot run the kernel, or they are not contiguous."""
    count, columns, size = rows.shape[0] // top_k, rows.shape[1], rows.element_size()
    width = math.gcd(columns * size, 16, rows.data_ptr() or 16)
    vectors, tile = columns * size // width, Tile()
    if count * vectors > config.MOST_VECTORS or not rows.is_contiguous():
        return None
    arch, ctas = steps.arch_of(rows.device), -(-count * vectors // tile.threads)
    signature = Signature(str(dtype_name(rows.dtype)), width, top_k if top_k <= config.MOST_UNROLLED else 0)
    key = signature, arch, rows.device.index, variable("CUTEGEMM_CACHE_DIR")
    kernel = _kernels.get(key)
    if kernel is None:
        if tile.why_invalid(arch) is not None:
            return None
        if rows.device != runner._CPU and torch.cuda.is_current_stream_capturing():
            raise GemmError(
                "the kernel that adds up the rows of tokens is not loaded yet, and loading it would break the CUDA "
                "graph capture under way; call cutegemm.moe once with tensors of the same description before capturing"
            )
        kernel = build(signature, tile, arch)
        _kernels.put(key, kernel)
    return Step(kernel, (count, vectors, top_k, ctas, int(tile.begins_early(ctas, arch))))


def build(signature: Signature, tile: Tile, arch: Arch) -> StandaloneKernel:
    """The kernel, from the store or compiled now. Raises GemmError with the compiler's words."""

    def operator() -> Any:
        from cutegemm.cute.combine.kernel import Combine

        return Combine(tile, signature)

    return standalone.build(signature, tile, arch, operator)
