"""CUtensorMap: the 128-byte descriptor of a TMA tensor, decoded.

Layout as the CuTe DSL's host code and cuTensorMapEncodeTiled write it for tiled tensors on sm_90, read off their output
(little endian):

    byte 0    u64   global address
    byte 8    u32   bits 4-6 rank - 1, bits 7-10 element type, bits 13-14 swizzle (0 none, 1 32 B, 2 64 B, 3 128 B),
                    bit 16 fp32 elements are loaded as tf32
    byte 12   u32x4 strides of dimensions 1-4 in units of 16 bytes, low 32 bits
    byte 28   4 bits each: the strides' upper bits
    byte 32   u32x5 dimensions - 1
    byte 52   3 bits each: element strides - 1
    byte 55   u8x5  box - 1
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

from cutegemm.emulator.errors import EmulationError

#: element type number -> (bytes, numpy code or format name used by reductions)
ELEMENTS = {
    0: (1, "u8"), 1: (2, "u16"), 2: (4, "u32"), 3: (4, "s32"), 4: (8, "u64"), 5: (8, "s64"), 6: (2, "f16"),
    7: (4, "f32"), 8: (4, "f32"), 9: (8, "f64"), 10: (2, "bf16"), 11: (4, "f32"), 12: (4, "f32"),
}  # fmt: skip
#: CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 and its flushing variant, which the DSL writes as fp32 with bit 16
TFLOAT32 = (11, 12)


@dataclass(frozen=True)
class TensorMap:
    """dims, box: elements, innermost first. strides: bytes of dimensions 1 and up. swizzle: 0, 32, 64 or 128 bytes.
    to_tf32: whether loads round fp32 elements to the nearest tf32.
    """

    address: int
    rank: int
    element: str
    element_bytes: int
    swizzle: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    to_tf32: bool = False

    @property
    def box_bytes(self) -> int:
        total = self.element_bytes
        for n in self.box:
            total *= n
        return total


@functools.lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    """The 64 meaningful bytes of a CUtensorMap -> TensorMap. Raises EmulationError for a form that is not supported."""
    address, word = struct.unpack_from("<QI", raw, 0)
    rank = ((word >> 4) & 7) + 1
    kind = (word >> 7) & 15
    if rank > 5 or kind not in ELEMENTS:
        raise EmulationError(
            f"a tensor map of rank {rank} and element type {kind}: not a tiled CUtensorMap of a known form"
        )
    if word >> 11 & 3:
        raise EmulationError("an interleaved tensor map: only the tiled form without interleave is supported")
    size, name = ELEMENTS[kind]
    low = struct.unpack_from("<4I", raw, 12)
    high = struct.unpack_from("<H", raw, 28)[0]
    strides = tuple((low[n] | ((high >> (4 * n)) & 15) << 32) * 16 for n in range(rank - 1))
    dims = tuple(d + 1 for d in struct.unpack_from("<5I", raw, 32)[:rank])
    steps = int.from_bytes(raw[52:55], "little")
    if any((steps >> (3 * n)) & 7 for n in range(rank)):
        raise EmulationError("a tensor map with element strides other than 1 is not supported")
    box = tuple(b + 1 for b in raw[55 : 55 + rank])
    swizzle = (0, 32, 64, 128)[word >> 13 & 3]
    return TensorMap(address, rank, name, size, swizzle, dims, strides, box, bool(word >> 16 & 1) or kind in TFLOAT32)
