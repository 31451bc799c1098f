"""From checked tensors to launched kernels that quantize and dequantize.

Tensors come in the kernels' orientation: K is the last dimension of all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cutegemm.choice import plan as planning
from cutegemm.cute import standalone
from cutegemm.cute.launch_size import MAX_CTAS
from cutegemm.cute.quantize import config
from cutegemm.cute.quantize.build import build
from cutegemm.cute.quantize.config import Signature, Tile
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem.quantization import INPUTS, Format, Group, group_along
from cutegemm.run import steps
from cutegemm.run.environment import variable
from cutegemm.run.steps import Step

MAX_EXTENT = 2**31 - 2**16
"""Rows and elements of a row are counted in 32 bits, up to the end of the last tile."""
_kernels = planning.Memo(limit=1024)
_plans = planning.Memo(limit=4096)


class Lies(NamedTuple):
    """How matrices lie in memory: (matrices, rows, K) and their strides in elements; 0 for an extent of 1.

    `align`: the largest power of 2, at most 16, that divides the address in elements.
    """

    extents: tuple[int, int, int]
    strides: tuple[int, int, int]
    align: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Lies:
        extents: Any = (*(1,) * (3 - tensor.dim()), *tensor.shape)
        strides: Any = (*(0,) * (3 - tensor.dim()), *tensor.stride())
        units = tensor.data_ptr() // tensor.element_size() | 16
        free = tuple(stride if extent > 1 else 0 for extent, stride in zip(extents, strides, strict=True))
        return cls(extents, (free[0], free[1], free[2]), units & -units)

    @property
    def along_k(self) -> bool:
        """Whether the elements of a row are neighbours."""
        return self.extents[2] == 1 or self.strides[2] == 1

    def width(self, most: int) -> int:
        """The largest power of 2, at most `most`, of neighbouring elements that every row is made of, aligned."""
        bits = most | self.align | self.extents[2] | self.strides[0] | self.strides[1]
        return bits & -bits

    def turned(self) -> Lies:
        """With rows and K exchanged."""
        (batch, rows, k), (s_batch, s_rows, s_k) = self.extents, self.strides
        return Lies((batch, k, rows), (s_batch, s_k, s_rows), self.align)


class Plan(NamedTuple):
    """The launches of a call in order, and how many partial maxima they exchange."""

    steps: tuple[Step, ...]
    maxima: int


def quantized(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, format: Format, group: Group | None) -> Plan:
    """Writes the values of x and, with a group, the scales; without one the scales are given. Returns what it ran.

    x, values: (rows, K) or (matrices, rows, K), not empty; K contiguous in the values. scale: of as many dimensions, or
    (); any strides.
    """
    plan = plan_of(x, values, scale, format, group)
    run(plan, x, values, scale, {"v"} if group is None else {"v", "s"})
    return plan


def can_spread(x: torch.Tensor, group: Group, places: int) -> bool:
    """Whether one launch quantizes the rows of x and writes each to as many `places` (`run_spread`)."""
    along_k = Lies.of(x).along_k
    in_rows = group.rows == 1 and config.in_one_pass(group, INPUTS[x.dtype], along_k, x.shape[-1])
    return x.dim() == 2 and in_rows and 0 < places <= config.MOST_PLACES


def plan_of(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, format: Format, group: Group | None, places: int = 0
) -> Plan:
    """What `quantized` runs, and with `places`, of which `can_spread` was asked, `run_spread`."""
    arch = steps.arch_of(x.device)
    lies = Lies.of(x), Lies.of(values), _scales(scale, x.dim())
    key = "quantize", x.dtype, format, group, places, arch, x.device.index, lies, variable("CUTEGEMM_CACHE_DIR")
    plan = _plans.get(key)
    if plan is None:
        plan = _quantize_plan(*lies, INPUTS[x.dtype], format.name, group, arch, x.device, places)
        _plans.put(key, plan)
    found: Plan = plan
    return found


def told(plan: Plan, values: torch.Tensor, scales: torch.Tensor | None) -> tuple[Any, ...] | None:
    """How the C++ part launches a plan (`native.tell`), of results such as these; None where it cannot.
    scales: None where they are given.
    """
    launchers = steps.launchers(plan.steps, values.device)
    shape = None if scales is None else tuple(scales.shape)
    return None if launchers is None else (launchers, tuple(values.shape), values.stride(), shape, plan.maxima)


def restored(values: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, format: Format) -> None:
    """Writes values * scale into x; tensors as in `quantized`, K contiguous in both."""
    arch = steps.arch_of(x.device)
    lies = Lies.of(x), Lies.of(values), _scales(scale, x.dim())
    key = "restore", x.dtype, format, arch, x.device.index, lies, variable("CUTEGEMM_CACHE_DIR")
    plan = _plans.get(key)
    if plan is None:
        x_lies, v_lies, s_lies = lies
        vector = config.vector_of(INPUTS[x.dtype], True)
        width = min(x_lies.width(vector), v_lies.width(vector))
        signature = Signature("back", INPUTS[x.dtype], format.name, _given_group(x_lies, s_lies), True, width)
        plan = Plan((_over_tiles(signature, lies, arch, x.device),), 0)
        _plans.put(key, plan)
    run(plan, x, values, scale, {"x"})


def _scales(scale: torch.Tensor, dims: int) -> Lies:
    """Scales of a whole tensor are one number, of whatever row and K."""
    return Lies.of(scale.reshape((1,) * dims) if scale.dim() == 0 else scale)


def _given_group(x: Lies, scale: Lies) -> Group:
    """The elements that share a given scale: the checks have seen that there are such."""
    rows, k = (group_along(of_x, of_scale) for of_x, of_scale in zip(x.extents[1:], scale.extents[1:], strict=True))
    assert rows is not None
    assert k is not None
    return Group(rows, k)


def _quantize_plan(
    x: Lies, v: Lies, s: Lies, dtype: str, values: str, group: Group | None, arch: Arch, device: torch.device,
    places: int = 0,
) -> Plan:  # fmt: skip
    k = x.extents[2]
    vector = config.vector_of(dtype, x.along_k)
    width = min(v.width(vector), x.width(vector)) if x.along_k else v.width(vector)

    def signature(does: str, group: Group) -> Signature:
        return Signature(does, dtype, values, group, x.along_k, width, places)

    if group is None:
        return Plan((_over_tiles(signature("given", _given_group(x, s)), (x, v, s), arch, device),), 0)
    if config.in_one_pass(group, dtype, x.along_k, k):
        return Plan((_over_tiles(signature("whole", group), (x, v, s), arch, device),), 0)
    first, maxima, parts = _maxima_step(x, v, s, dtype, values, group, arch, device)
    second = _over_tiles(signature("parts", group), (x, v, s), arch, device, parts)
    return Plan((first, second), maxima)


def _maxima_step(
    x: Lies, v: Lies, s: Lies, dtype: str, values: str, group: Group, arch: Arch, device: torch.device
) -> tuple[Step, int, int]:
    """(the launch that finds partial maxima, how many there are, how many the second launch takes the maximum of)."""
    if group.rows == 0 and not x.along_k and x.turned().along_k:
        x = x.turned()  # the largest element of a whole tensor is the same either way
    vector = config.vector_of(dtype, x.along_k)
    signature = Signature("amax", dtype, values, group, x.along_k, x.width(vector) if x.along_k else _power(x, vector))
    matrices, rows, k = x.extents
    tile = config.choose(signature, rows, k, matrices, arch.sm_count)
    if group.rows:
        tile = tile._replace(deep_r=1)
    tiles_r, tiles_k = -(-rows // tile.rows), -(-k // tile.k)
    # Eight CTAs of 256 threads fill an SM.
    if group.rows:
        parts = max(min(tiles_k, -(-8 * arch.sm_count // (tiles_r * matrices))), 1)
        maxima, ctas = matrices * rows * parts, parts * tiles_r * matrices
    else:
        parts = max(min(tiles_r * tiles_k * matrices, 8 * arch.sm_count, config.MOST_PARTS), 1)
        maxima = ctas = parts
    return _step(signature, tile, (x, v, s), arch, device, parts, ctas), maxima, parts


def _power(x: Lies, most: int) -> int:
    """The largest power of 2, at most `most`, that divides K."""
    bits = most | x.extents[2]
    return bits & -bits


def _over_tiles(
    signature: Signature, lies: tuple[Lies, Lies, Lies], arch: Arch, device: torch.device, parts: int = 0
) -> Step:
    """The launch of one CTA for each tile."""
    matrices, rows, k = lies[0].extents
    tile = config.choose(signature, rows, k, matrices, arch.sm_count)
    if max(lies[0].extents) > MAX_EXTENT:
        raise ValueError(f"x: got extents {lies[0].extents} (matrices, rows, K), accepted are {MAX_EXTENT} at most")
    ctas = -(-rows // tile.rows) * -(-k // tile.k) * matrices
    if ctas > MAX_CTAS:
        raise ValueError(f"x: {ctas} CTAs would quantize {lies[0].extents}; a grid has at most {MAX_CTAS}")
    return _step(signature, tile, lies, arch, device, parts, ctas)


def _step(
    signature: Signature, tile: Tile, lies: tuple[Lies, Lies, Lies], arch: Arch, device: torch.device, parts: int,
    ctas: int,
) -> Step:  # fmt: skip
    """A launch, its numbers in the order of `cute.quantize.kernel.NUMBERS`."""
    x, v, s = lies
    matrices, rows, k = x.extents
    strides = (each for lie in (x, s) for each in (lie.strides[1], lie.strides[2], lie.strides[0]))
    early = int(standalone.begins_early(ctas, tile.threads, arch))
    return Step(
        _kernel(signature, tile, arch, device),
        (rows, k, matrices, parts, ctas, *strides, v.strides[1], v.strides[0], early),
    )


def _kernel(signature: Signature, tile: Tile, arch: Arch, device: torch.device) -> StandaloneKernel:
    key = signature, tile, arch, device.index, variable("CUTEGEMM_CACHE_DIR")
    kernel: StandaloneKernel | None = _kernels.get(key)
    if kernel is None:
        if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
            raise GemmError(
                f"this call's kernel ({tile}) is not loaded yet, and loading it would break the CUDA graph capture "
                "under way; make the same call once, with tensors of the same description, before capturing"
            )
        kernel = build(signature, tile, arch)
        _kernels.put(key, kernel)
    return kernel


def run(plan: Plan, x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, written: set[str]) -> None:
    """Launches a plan, or emulates it: on the tensors that it was made for, or others that lie as they do."""
    maxima = torch.empty(plan.maxima, dtype=torch.float32, device=x.device) if plan.maxima else None
    steps.run(plan.steps, config.POINTERS, (x, values, scale, maxima), x.device, written | {"p"})


def run_spread(plan: Plan, x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, row_of: torch.Tensor) -> None:
    """Launches a plan of rows that are spread. row_of: (rows of x * places,) int32, the rows of the values."""
    steps.run(plan.steps, config.POINTERS, (x, values, scale, row_of), x.device, {"v", "s"})
