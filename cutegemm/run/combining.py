"""From the rows of a mixture's tokens to the launched kernel that adds them up, gathers, spreads or clears them."""

from __future__ import annotations

import math
from typing import Any

import torch

from cutegemm.choice import plan as planning
from cutegemm.cute import standalone
from cutegemm.cute.combine import config
from cutegemm.cute.combine.config import Signature, Tile
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.hardware.arch import Arch
from cutegemm.problem import packing
from cutegemm.problem.dtypes import dtype_name
from cutegemm.run import runner, steps
from cutegemm.run.environment import variable
from cutegemm.run.steps import Step

_kernels = planning.Memo(limit=256)
_steps = planning.Memo(limit=4096)
"""Launches by what they depend on."""


def run(rows: torch.Tensor, row_of: torch.Tensor, top_k: int) -> torch.Tensor | None:
    """As `pytorch.combining.combine`; None where the GPU cannot run the kernel."""
    step = step_of(rows, top_k)
    return None if step is None else _launched(step, rows, row_of, (rows.shape[0] // top_k, rows.shape[1]))


def step_of(rows: torch.Tensor, top_k: int) -> Step | None:
    """The launch that adds up these rows; None where the GPU cannot run the kernel, or they are not contiguous."""
    return _step(rows, rows.shape[0] // top_k, top_k, "add up") if rows.is_contiguous() else None


def in_order(a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """As `packing.in_order`, by the kernel where that can be."""
    pitch, bits = packing.pitch_of(a.shape[1], a.element_size()), packing.as_bits(a)
    step = _step(bits, len(index), 1, "gather", pitch)
    if step is None:
        return packing.in_order(a, index)
    return _launched(step, bits, index, (len(index), pitch))[:, : a.shape[1]].view(a.dtype)


def gathered(a: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
    """As `torch_grouped.gathered`, in contiguous rows; None where the GPU cannot run the kernel."""
    step = _step(a, len(index), 1, "gather")
    return None if step is None else _launched(step, a, index, (len(index), a.shape[1]))


def spread(rows: torch.Tensor, row_of: torch.Tensor, top_k: int) -> torch.Tensor | None:
    """As `pytorch.combining.spread`; None where the GPU cannot run the kernel, or a row is not contiguous."""
    step = spread_step_of(rows, top_k)
    return None if step is None else _launched(step, rows, row_of, (rows.shape[0] * top_k, rows.shape[1]))


def spread_step_of(rows: torch.Tensor, top_k: int) -> Step | None:
    """The launch that copies each of these rows to its places; None as of `spread`."""
    return _step(rows, rows.shape[0], top_k, "spread")


def spread_values(values: torch.Tensor, row_of: torch.Tensor, top_k: int) -> torch.Tensor | None:
    """As `spread`, of rows whose copies begin at multiples of 16 bytes, as `packing.in_order` has them."""
    step, pitch = values_step_of(values, top_k), packing.pitch_of(values.shape[1], values.element_size())
    if step is None:
        return None
    made = _launched(step, packing.as_bits(values), row_of, (values.shape[0] * top_k, pitch))
    return made[:, : values.shape[1]].view(values.dtype)


def values_step_of(values: torch.Tensor, top_k: int) -> Step | None:
    """The launch of `spread_values`; None as of `spread`."""
    pitch = packing.pitch_of(values.shape[1], values.element_size())
    return _step(packing.as_bits(values), values.shape[0], top_k, "spread", pitch)


def clear_behind(made: torch.Tensor, ends: torch.Tensor) -> bool:
    """Writes zeros into the rows of a row-major matrix behind its last group, and says whether it has: not where the
    GPU cannot run the kernel. ends: of the groups, int32.
    """
    step = _step(made, made.shape[0], len(ends), "clear", made.stride(0))
    if step is None:
        return False
    steps.run([step], config.POINTERS, (None, ends.contiguous(), made), made.device, {"made"})
    return True


def _launched(step: Step, rows: torch.Tensor, row_of: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    made = rows.new_empty(shape)
    steps.run([step], config.POINTERS, (rows.detach(), row_of.contiguous(), made), rows.device, {"made"})
    return made


def _step(rows: torch.Tensor, tokens: int, top_k: int, does: str, pitch: int | None = None) -> Step | None:
    """The launch for that many tokens, or rows to clear, of which `top_k` is the number of groups; None where there is
    nothing to do, the GPU cannot run the kernel, or a capture is under way that loading it would break.

    pitch: elements from one row that is made to the next.
    """
    where = None if rows.is_cuda else variable("CUTEGEMM_ARCH"), variable("CUTEGEMM_CACHE_DIR")
    of_rows = rows.shape, rows.stride(), rows.dtype, rows.device, rows.data_ptr() & 15
    key = *of_rows, tokens, top_k, does, pitch, *where
    step: Step | None = _steps.get(key)
    if step is None:
        step = _new_step(rows, tokens, top_k, does, pitch)
        if step is not None:
            _steps.put(key, step)
    return step


def _new_step(rows: torch.Tensor, tokens: int, top_k: int, does: str, pitch: int | None) -> Step | None:
    """As `_step`."""
    columns, size = rows.shape[1], rows.element_size()
    name = dtype_name(rows.dtype)
    if name is None or (columns > 1 and rows.stride(1) != 1):
        return None
    # Of a single row the distance to the next is free.
    given, made = rows.stride(0) if rows.shape[0] > 1 else columns, columns if pitch is None else pitch
    width = math.gcd(columns * size, given * size, rows.data_ptr() or 16, 16)
    tile = Tile()
    vectors, given, made = (each * size // width for each in (columns, given, made))
    most = config.MOST_CLEARED if does == "clear" else config.MOST_VECTORS
    if not 0 < tokens * vectors <= most or given > config.MOST_VECTORS:
        return None
    arch, ctas = steps.arch_of(rows.device), -(-tokens * vectors // tile.threads)
    known = top_k if top_k <= config.MOST_UNROLLED else 0
    if does == "clear":  # mostly there is nothing to do
        ctas, known = min(ctas, arch.sm_count), 0
    kernel = _kernel(Signature(name, width, known, does), tile, arch, rows.device)
    if kernel is None:
        return None
    early = int(standalone.begins_early(ctas, tile.threads, arch))
    return Step(kernel, (tokens, vectors, top_k, rows.shape[0], given, made, ctas, early))


def _kernel(signature: Signature, tile: Tile, arch: Arch, device: torch.device) -> StandaloneKernel | None:
    """The kernel, which is remembered; None as of `_step`."""
    key = signature, arch, device.index, variable("CUTEGEMM_CACHE_DIR")
    kernel: StandaloneKernel | None = _kernels.get(key)
    capturing = device != runner._CPU and torch.cuda.is_current_stream_capturing()
    if kernel is None and not capturing and tile.why_invalid(arch) is None:
        kernel = build(signature, tile, arch)
        _kernels.put(key, kernel)
    return kernel


def build(signature: Signature, tile: Tile, arch: Arch) -> StandaloneKernel:
    """The kernel, from the store or compiled now. Raises GemmError with the compiler's words."""

    def operator() -> Any:
        from cutegemm.cute.combine.kernel import Combine

        return Combine(tile, signature)

    return standalone.build(signature, tile, arch, operator)
