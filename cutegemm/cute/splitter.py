"""The kernel that splits fp32 operands into parts, before the products: one pass over both operands.

    CTA            64 rows x 64 of K of A or B, 256 threads
    K-major        a thread takes 4 neighbours along K of four rows
    other major    a thread reads 4 neighbours along the rows, for four k; the tile goes through shared memory
    then           each part of 4 neighbours along K is stored as 8 (bf16) or 16 bytes (tf32)

Reads and writes are whole sectors either way. All four loads of a thread are under way before the first is used. How a
number is split, and why, is told in `problem.parts`: part i is what the parts before it leave of x, rounded to nearest
(even; for mma.sync, whose GPUs may be older, ties of tf32 away from zero). These differences are exact. The first part
of a number that would round to infinity is the largest finite one. An infinity is 1 of its sign and, in the last part,
itself: that part meets the first part of the other operand alone (but in bf16x9), which is 0 only where the number is,
and has its sign. So products are what they are in IEEE 754.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cutegemm.cute import types
from cutegemm.cute.source import aligned
from cutegemm.hardware.arch import LINE
from cutegemm.problem import Signature
from cutegemm.problem.parts import Parts

ROWS = DEPTH = 64
"""A CTA's tile: rows, and elements of K."""
THREADS = 256
GROUP = 4
"""Neighbours along K that a thread splits together."""
PITCH = DEPTH + 1
"""Words from one row of the shared tile to the next: neighbours along the rows lie in different banks."""
_PASSES = ROWS * DEPTH // (THREADS * GROUP)
_LANES = DEPTH // GROUP
_LARGEST_BF16, _LARGEST_TF32 = "7F7F0000", "7F7FE000"


@cute.jit
def matrices(batch: Int32, batch_stride: Int64):
    """How many matrices an operand has: with stride 0 one serves the whole batch."""
    count = batch
    if batch_stride == 0:
        count = Int32(1)
    return count


class Splitter:
    """The operator in the DSL that writes the parts of both fp32 operands to memory, where the products read them."""

    def __init__(self, signature: Signature, parts: Parts, rounding: str = "rn") -> None:
        """`rounding` to tf32: "rn", which needs compute capability 9.0, or "rna" (ties away from zero)."""
        self.parts, self.rounding = parts, rounding
        self.element = types.NUMERIC[parts.element]
        self.a = signature.a_major == "k", signature.align_a
        self.b = signature.b_major == "k", signature.align_b

    # -- host -------------------------------------------------------------------------------------------------------
    def launch(self, args) -> tuple[tuple, tuple]:
        """Launches the kernel; returns (pointer, rows, leading dimension, stride of matrices, matrices) of the parts
        of A and of those of B. `args`: the host entry's arguments by name.
        """
        step = 128 // self.element.width
        leading = Int64(cute.ceil_div(cutlass.max(args.k, Int32(1)), step) * step)
        count_a, count_b = matrices(args.batch, args.a_batch), matrices(args.batch, args.b_batch)
        parts = self.parts.count
        size = Int64(args.m) * count_a * leading * (parts * self.element.width // 8)
        first = args.workspace + Int64(args.operand_lines) * (LINE // 4)
        second = first + (size + LINE - 1) // LINE * (LINE // 4)
        to_a, to_b = (aligned(cute.recast_ptr(place, dtype=self.element), 16) for place in (first, second))
        depth = cute.ceil_div(args.k, DEPTH)
        tiles_a = cute.ceil_div(args.m, ROWS) * depth * count_a
        tiles_b = cute.ceil_div(args.n, ROWS) * depth * count_b
        self.kernel(
            (args.a, to_a, args.m, args.lda, args.a_batch, count_a),
            (args.b, to_b, args.n, args.ldb, args.b_batch, count_b),
            args.k,
            leading,
            tiles_a,
        ).launch(
            grid=(cutlass.max(tiles_a + tiles_b, Int32(1)), 1, 1),
            block=(THREADS, 1, 1),
            stream=args.stream,
        )
        return (
            (to_a, args.m, leading, args.m * leading, count_a * parts),
            (to_b, args.n, leading, args.n * leading, count_b * parts),
        )

    # -- device -----------------------------------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, a, b, k: Int32, leading: Int64, tiles_a: Int32):
        block = cute.arch.block_idx()[0]
        thread = cute.arch.thread_idx()[0]
        memory = None
        if cutlass.const_expr(not (self.a[0] and self.b[0])):
            words = cutlass.memory.SmemAllocator().allocate(ROWS * PITCH * 4, byte_alignment=16)
            memory = cute.make_tensor(cute.recast_ptr(words, dtype=Float32), cute.make_layout(ROWS * PITCH))
        if block < tiles_a:
            self._split(a, self.a, k, leading, block, thread, memory)
        else:
            self._split(b, self.b, k, leading, block - tiles_a, thread, memory)

    def _split(self, operand, form: tuple[bool, int], k, leading, number, thread, memory) -> None:
        """Splits tile `number` of an operand; `form`: (whether it is K-major, its alignment class)."""
        source, target, rows, pitch, batch_stride, count = operand
        (k_major, align), depth = form, cutlass.max(cute.ceil_div(k, DEPTH), 1)
        k_first, rest = number % depth * DEPTH, number // depth
        tiles = cute.ceil_div(rows, ROWS)
        row_first, matrix = rest % tiles * ROWS, rest // tiles
        base = source + Int64(matrix) * batch_stride
        across, along = thread % _LANES * GROUP, thread // _LANES
        found = []
        for n in range(_PASSES):
            other = along + n * (THREADS // _LANES)
            if k_major:
                place = base + Int64(row_first + other) * pitch + (k_first + across)
                left, beside = k - k_first - across, rows - row_first - other
            else:
                place = base + Int64(k_first + other) * pitch + (row_first + across)
                left, beside = rows - row_first - across, k - k_first - other
            found.append(_load(place, left, beside, align // 4))
        if not k_major:
            for n in range(_PASSES):
                for j in range(GROUP):
                    memory[(across + j) * PITCH + along + n * (THREADS // _LANES)] = found[n][j]
            cute.arch.sync_threads()
            for n in range(_PASSES):
                row = along + n * (THREADS // _LANES)
                found[n] = [memory[row * PITCH + across + j] for j in range(GROUP)]
        for n in range(_PASSES):
            row, column = row_first + along + n * (THREADS // _LANES), k_first + across
            left = cutlass.min(rows - row, k - column)
            pairs = [self._parts(found[n][j], found[n][j + 1]) for j in range(0, GROUP, 2)]
            for part in range(self.parts.count):
                place = target + (Int64(matrix + part * count) * rows + row) * leading + column
                _store(place, left, [word for pair in pairs for word in pair[part]])

    def _parts(self, first, second) -> list[tuple]:
        """The parts of two neighbours, each as 32-bit words."""
        return _bf16_parts(first, second) if self.element is BFloat16 else _tf32_parts(first, second, self.rounding)


def _load(place, left, beside, width: int) -> list:
    """`GROUP` neighbours, `width` at a time; zeros for those behind the end, of which `left` and `beside` tell."""
    found: list[Any] = []
    outputs = [f"{{$w{j}}}" for j in range(width)]
    kind = f"v{width}.f32 {{{', '.join(outputs)}}}" if width > 1 else f"f32 {outputs[0]}"
    zeros = " ".join(f"mov.f32 {output}, 0f00000000;" for output in outputs)
    text = f"{{ .reg .pred valid; setp.gt.s32 valid, {{$r1}}, 0; {zeros} @valid ld.global.{kind}, [{{$r0}}]; }}"
    for j in range(0, GROUP, width):
        inside = cutlass.min(left - j, beside)
        loaded = cute.arch.inline_ptx(
            text, write_only_types=[Float32] * width, read_only_args=[(place + j).toint(), inside]
        )
        found += loaded if width > 1 else (loaded,)
    return found


def _store(place, left, words: list) -> None:
    """Stores 2 or 4 words where something is left."""
    inputs = ", ".join(f"{{$r{j + 2}}}" for j in range(len(words)))
    cute.arch.inline_ptx(
        f"{{ .reg .pred valid; setp.gt.s32 valid, {{$r1}}, 0; @valid st.global.v{len(words)}.b32 [{{$r0}}], "
        f"{{{inputs}}}; }}",
        read_only_args=[place.toint(), left, *words],
    )


def _bf16_parts(first, second) -> list[tuple]:
    """Three words, each with one part of both: cvt rounds and packs two numbers at once."""
    given, steps = (("{$r0}", "{$r1}"), ("rx", "ry")), []
    for part in range(3):
        if part == 1:  # of what an infinity leaves
            steps.append(" ".join(_clamped(name, rest, _LARGEST_BF16) for name, rest in (("x", "rx"), ("y", "ry"))))
        steps.append(f"cvt.rn.bf16x2.f32 {{$w{part}}}, y, x;")
        if part < 2:
            ends = ("rx", "ry") if part == 0 else ("x", "y")
            steps.append(f"shl.b32 low, {{$w{part}}}, 16; and.b32 high, {{$w{part}}}, 0xFFFF0000;")
            for end, of, rounded in zip(ends, given[part], ("low", "high"), strict=True):
                steps.append(f"sub.rn.f32 {end}, {of}, {rounded};")
    words = cute.arch.inline_ptx(
        f"{{ .reg .b32 low, high, one; .reg .f32 x, y, rx, ry, size; .reg .pred infinite; "
        f"{_first('x', '{$r0}', _LARGEST_BF16)} {_first('y', '{$r1}', _LARGEST_BF16)} {' '.join(steps)} }}",
        write_only_types=[Int32] * 3,
        read_only_args=[first, second],
    )
    return [(word,) for word in words]


def _tf32_parts(first, second, rounding: str) -> list[tuple]:
    """Two words for each part: a tf32 number takes 32 bits."""
    steps = []
    for n, name in enumerate("xy"):
        steps += [
            _first(name, f"{{$r{n}}}", _LARGEST_TF32),
            f"cvt.{rounding}.tf32.f32 {{$w{n}}}, {name}; mov.b32 {name}, {{$w{n}}};",
            f"sub.rn.f32 {name}, {{$r{n}}}, {name}; cvt.{rounding}.tf32.f32 {{$w{n + 2}}}, {name};",
        ]
    words = cute.arch.inline_ptx(
        f"{{ .reg .b32 one; .reg .f32 x, y, size; .reg .pred infinite; {' '.join(steps)} }}",
        write_only_types=[Int32] * 4,
        read_only_args=[first, second],
    )
    return [(words[0], words[1]), (words[2], words[3])]


def _first(name: str, given: str, largest: str) -> str:
    """PTX: the register becomes what the first part rounds: the number, clamped; of an infinity 1 of its sign."""
    return (
        f"{_clamped(name, given, largest)} abs.f32 size, {given}; setp.eq.f32 infinite, size, 0f7F800000; "
        f"and.b32 one, {given}, 0x80000000; or.b32 one, one, 0x3F800000; selp.b32 {name}, one, {name}, infinite;"
    )


def _clamped(name: str, given: str, largest: str) -> str:
    """PTX: the register becomes the number, at most the largest finite number of the parts' type in magnitude."""
    low = f"{int(largest, 16) | 1 << 31:08X}"
    return f"min.f32 {name}, {given}, 0f{largest}; max.f32 {name}, {name}, 0f{low};"
