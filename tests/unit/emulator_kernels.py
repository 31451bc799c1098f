"""Small PTX kernels for the emulator's tests, and a way to run them on numpy arrays."""

from __future__ import annotations

import struct

import numpy as np

from cutegemm.emulator import Checks, Launch, Memory, Report, parse_module, run

REGISTERS = (".reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<320>; .reg .f32 %f<64>; .reg .b64 %d<48>;"
             " .reg .b32 tid, lane, warp, s;")  # fmt: skip


def kernel(body: str, *, params: int = 1, shared: int = 4096, target: str = "sm_90a") -> str:
    """A kernel named k with ``params`` pointers in %d0, %d1, ... and registers tid, lane, warp and s (shared
    memory).
    """
    declared = ", ".join(f".param .u64 p{n}" for n in range(params))
    loads = " ".join(f"ld.param.u64 %d{n}, [p{n}];" for n in range(params))
    return f""".version 8.4
.target {target}
.address_size 64
.shared .align 1024 .b8 smem[{shared}];
.visible .entry k({declared})
{{
{REGISTERS}
{loads}
mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5; mov.u32 s, smem;
{body}
ret;
}}
"""


def launch(text: str, *arrays: np.ndarray, threads: int = 64, grid: int = 1, cluster: int = 1, seed: int | None = 0,
           checks: Checks | None = None, extra: bytes = b"", profile: bool = False) -> Report:  # fmt: skip
    """Run kernel k of ``text``; the arrays are its pointers, ``extra`` are parameter bytes after them."""
    memory = Memory()
    for n, a in enumerate(arrays):
        memory.map(a, name=f"array {n}")
    params = b"".join(struct.pack("<Q", a.ctypes.data) for a in arrays) + extra
    shape = Launch("k", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), params=params)
    return run(parse_module(text), shape, memory, seed=seed, checks=checks, profile=profile)


def output(n: int = 64, dtype=np.uint32) -> np.ndarray:
    return np.zeros(n, dtype)


#: store register %r9 of every thread to the first pointer
STORE = "mul.wide.u32 %d40, tid, 4; add.s64 %d40, %d40, %d0; st.global.u32 [%d40], %r9;"
#: the byte address of the thread's own word in shared memory, in %r1
OWN_WORD = "shl.b32 %r1, tid, 2; add.u32 %r1, %r1, s;"
