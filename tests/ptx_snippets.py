"""Small PTX programs with inputs and outputs, run in the emulator and, in the GPU tests, on hardware.

A snippet names its inputs a, b, c, e and its outputs x, y; each thread has its own. ``ptx`` wraps the body into a
kernel that loads the inputs from 8-byte slots and stores the outputs to 8-byte slots. The snippets themselves are in
`tests.ptx_snippet_table`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from cutegemm.emulator import Launch, Memory, parse_module, run

WIDTH = {
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "tf32": 4,
    "e8x2": 2,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
}
BLOCK = 256


@dataclass(frozen=True)
class Snippet:
    """kind: 'bits' (identical), 'float' (identical but for the payload of a NaN), or a relative tolerance."""

    name: str
    ins: str
    outs: str
    body: str
    kind: str | float = "bits"
    arch: str = "sm_80"
    scale: float = 0.0  # inputs are normal random floats of this scale instead of bit patterns
    cluster: int = 1  # CTAs

    @property
    def inputs(self) -> list[str]:
        return self.ins.split()

    @property
    def outputs(self) -> list[str]:
        return self.outs.split()


def ptx(snippet: Snippet) -> str:
    lines = [".version 8.4", f".target {snippet.arch}", ".address_size 64", "",
             ".visible .entry k(.param .u64 pin, .param .u64 pout)", f".reqntid {BLOCK}, 1, 1",
             f".explicitcluster .reqnctapercluster {snippet.cluster}" if snippet.cluster > 1 else "", "{",
             ".reg .pred p, q, r; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %d<16>; .reg .f32 %f<64>;",
             ".reg .b64 %in, %out; .reg .b32 %me, %ln; .shared .align 16 .b8 smem[8192];"]  # fmt: skip
    for name, t in [*zip("abce", snippet.inputs, strict=False), *zip("xy", snippet.outputs, strict=False)]:
        lines.append(f".reg .b{8 * WIDTH[t]} {name};")
    n_in, n_out = len(snippet.inputs), len(snippet.outputs)
    lines += [
        "mov.u32 %me, %ctaid.x;",
        f"mad.lo.u32 %me, %me, {BLOCK}, 0;",
        "mov.u32 %r0, %tid.x;",
        "add.u32 %me, %me, %r0;",
        "mov.u32 %ln, %laneid;",
        "ld.param.u64 %in, [pin];",
        "ld.param.u64 %out, [pout];",
        f"mad.wide.u32 %in, %me, {8 * n_in}, %in;",
        f"mad.wide.u32 %out, %me, {8 * n_out}, %out;",
    ]
    for k, (name, t) in enumerate(zip("abce", snippet.inputs, strict=False)):
        lines.append(f"ld.global.b{8 * WIDTH[t]} {name}, [%in+{8 * k}];")
    lines.append(snippet.body)
    for k, (name, t) in enumerate(zip("xy", snippet.outputs, strict=False)):
        lines.append(f"st.global.b{8 * WIDTH[t]} [%out+{8 * k}], {name};")
    return "\n".join([*lines, "ret;", "}"])


#: values that arithmetic goes wrong at, as bits
EDGES = {
    2: [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7BFF, 0x0400, 0x03FF, 0x7F80, 0x3F80,
    0x7E00, 0x8001],
    4: [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x3F800000, 0xBF800000, 0x7F800000,
    0xFF800000,
        0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x00000001, 0x80000001, 0x477FE000, 0x477FF000, 0x4B000000, 0x4B000001,
        0x4F000000,
        0xCF000000, 0x4F800000, 0x5F000000, 0x3F000000, 0x3FC00000, 0x40200000, 0x7FC00000, 0x38800000, 0x337FFFFF,
        0x43E00000,
        0x43E80000, 0x47600000],
    8: [0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 32, (1 << 32) - 1, 0x3FF0000000000000, 0xBFF0000000000000,
        0x7FF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x0010000000000000, 0x000FFFFFFFFFFFFF, 0x36A0000000000000,
        0x47EFFFFFF0000000],
}  # fmt: skip


def data(snippet: Snippet, blocks: int, seed: int) -> np.ndarray:
    """Inputs, uint64 [threads, inputs]: edge values against each other, then random bits and random floats."""
    rng = np.random.default_rng(seed)
    n = blocks * BLOCK
    out = np.zeros((n, len(snippet.inputs)), np.uint64)
    for k, t in enumerate(snippet.inputs):
        width = WIDTH[t]
        bits = rng.integers(0, 1 << 63, n, np.uint64) * np.uint64(2) + rng.integers(0, 2, n).astype(np.uint64)
        floats = rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)
        if snippet.scale:
            floats = rng.standard_normal(n) * snippet.scale
        if t in ("f16", "f16x2"):
            halves = np.clip(floats, -65504, 65504).astype(np.float16).view(np.uint16).astype(np.uint64)
            real = halves | (np.roll(halves, 1) << np.uint64(16))
        elif t in ("bf16", "bf16x2"):
            halves = (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint64)
            real = halves | (np.roll(halves, 1) << np.uint64(16))
        elif t in ("f32", "tf32"):
            real = floats.astype(np.float32).view(np.uint32).astype(np.uint64)
        elif t == "f64":
            real = floats.view(np.uint64)
        else:
            real = bits >> (rng.integers(0, 8 * width, n).astype(np.uint64) + np.uint64(64 - 8 * width))
        mixed = np.where(rng.random(n) < 0.5, bits, real) if not snippet.scale else real
        if not snippet.scale:
            edges = np.array(EDGES[width], np.uint64)
            at = np.arange(n)
            index = at % len(edges) if k % 2 == 0 else at // len(edges) % len(edges)
            mixed = np.where(at < min(n, len(edges) ** 2), edges[index], mixed)
        out[:, k] = mixed & np.uint64((1 << (8 * width)) - 1)
    return out


def emulate(snippet: Snippet, inputs: np.ndarray, seed: int | None = 0) -> np.ndarray:
    """Outputs, uint64 [threads, outputs]."""
    out = np.zeros((len(inputs), len(snippet.outputs)), np.uint64)
    memory = Memory()
    memory.map(inputs, name="in", writable=False)
    memory.map(out, name="out")
    params = struct.pack("<QQ", inputs.ctypes.data, out.ctypes.data)
    grid, cluster = (len(inputs) // BLOCK, 1, 1), (snippet.cluster, 1, 1)
    launch = Launch("k", grid, (BLOCK, 1, 1), cluster=cluster, params=params)
    run(parse_module(ptx(snippet)), launch, memory, seed=seed)
    return out


def differing(snippet: Snippet, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Which threads' outputs differ by more than the snippet's kind allows."""
    wrong = np.zeros(len(got), bool)
    for k, t in enumerate(snippet.outputs):
        a, b = got[:, k], want[:, k]
        parts = 2 if t in ("f16x2", "bf16x2") else 1
        base = t.removesuffix("x2")
        for part in range(parts):
            x, y = (v >> np.uint64(16 * part) for v in (a, b))
            if snippet.kind == "bits" or base not in ("f16", "bf16", "f32", "f64"):
                wrong |= x != y
                continue
            fx, fy = floats(x, base), floats(y, base)
            both_nan = np.isnan(fx) & np.isnan(fy)
            if snippet.kind == "float":
                same = narrow(x, base) == narrow(y, base)
            else:
                scale = max(snippet.scale, 1.0)
                same = (fx == fy) | (
                    np.abs(fx - fy) <= float(snippet.kind) * np.maximum(np.abs(fy), scale if snippet.scale else 1e-30)
                )
            wrong |= ~(same | both_nan)
    return wrong


def narrow(bits: np.ndarray, t: str) -> np.ndarray:
    return bits & np.uint64((1 << (8 * WIDTH[t])) - 1)


def floats(bits: np.ndarray, t: str) -> np.ndarray:
    bits = narrow(bits, t)
    if t == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if t == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64) if t == "f32" else bits.view(np.float64)
