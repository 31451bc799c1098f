"""Runs of fp32 fused multiply-adds in machine code, where llvmlite and an FMA unit are there.

A SIMT GEMM spends nearly all of its instructions in runs of ``fma.rn.f32``. NumPy has no fused multiply-add, and the
exact substitute in `numerics` costs ten passes. The host's own instruction gives the same bits. Lanes are independent,
so a run goes over 32 lanes at a time, all instructions of the run for each: their registers stay in the first-level
cache.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

_LOOPS = """
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)

define void @fma_run(i64 %lanes, i64 %count, ptr %table, i64 %offset) {
entry:
  br label %outer
outer:
  %lane = phi i64 [ 0, %entry ], [ %next_lane, %outer_end ]
  %more = icmp slt i64 %lane, %lanes
  br i1 %more, label %inner, label %done
inner:
  %k = phi i64 [ 0, %outer ], [ %next_k, %inner ]
  %bytes = shl i64 %lane, 2
  %at = add i64 %bytes, %offset
  %row = shl i64 %k, 2
  LOAD_POINTERS
  MULTIPLY
  %next_k = add i64 %k, 1
  %again = icmp slt i64 %next_k, %count
  br i1 %again, label %inner, label %outer_end
outer_end:
  %next_lane = add i64 %lane, 32
  br label %outer
done:
  ret void
}
"""


def _source() -> str:
    pointers, body = [], []
    for n, name in enumerate("dabc"):
        pointers += [
            f"%i{name} = add i64 %row, {n}",
            f"%p{name} = getelementptr i64, ptr %table, i64 %i{name}",
            f"%v{name} = load i64, ptr %p{name}",
            f"%w{name} = add i64 %v{name}, %at",
            f"%q{name} = inttoptr i64 %w{name} to ptr",
        ]
    for part in range(4):
        for name in "abc":
            body += [
                f"%g{name}{part} = getelementptr <8 x float>, ptr %q{name}, i64 {part}",
                f"%x{name}{part} = load <8 x float>, ptr %g{name}{part}, align 4",
            ]
        body += [
            f"%r{part} = call <8 x float> @llvm.fma.v8f32("
            f"<8 x float> %xa{part}, <8 x float> %xb{part}, <8 x float> %xc{part})",
            f"%gd{part} = getelementptr <8 x float>, ptr %qd, i64 {part}",
            f"store <8 x float> %r{part}, ptr %gd{part}, align 4",
        ]
    return _LOOPS.replace("LOAD_POINTERS", "\n  ".join(pointers)).replace("MULTIPLY", "\n  ".join(body))


@functools.lru_cache(maxsize=1)
def compiled() -> Any:
    """fma_run(lanes, count, table address, byte offset) as a ctypes function, or None where it cannot be had.

    table: int64 [count, 4], the addresses of the rows d, a, b, c of each instruction. lanes: a multiple of 32.
    """
    try:
        from llvmlite import binding
    except ImportError:
        return None
    if not binding.get_host_cpu_features().get("fma", False):
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    module = binding.parse_assembly(_source())
    module.verify()
    engine = binding.create_mcjit_compiler(module, target)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(
        engine.get_function_address("fma_run")
    )
    function.keep = engine  # type: ignore[attr-defined]
    return function


class FmaRun:
    """Consecutive fma.rn.f32 over registers: (d, a, b, c) register indices each."""

    def __init__(self, quads: list[tuple[int, int, int, int]]) -> None:
        self.quads = np.array(quads, np.int64)

    def __call__(self, X: Any) -> bool:
        """Execute for all lanes of a box; False where there is no compiled code for it."""
        function = compiled()
        if function is None:
            return False
        wave = X.wave
        regs = wave.regs["32"]
        table = wave.fma_tables.get(id(self))
        if table is None:
            table = wave.fma_tables[id(self)] = regs.ctypes.data + self.quads * regs.strides[0]
        warp_bytes = 128
        if X.w1 - X.w0 == wave.W:
            function(X.lanes, len(table), table.ctypes.data, X.c0 * wave.W * warp_bytes)
        else:
            for c in range(X.c0, X.c1):
                function((X.w1 - X.w0) * 32, len(table), table.ctypes.data, (c * wave.W + X.w0) * warp_bytes)
        return True
