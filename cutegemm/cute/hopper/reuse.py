"""The last step of compiling a kernel that promotes with scales: its FFMA keep the factor that they share.

A promotion with scales of blocks is a row of FFMA with one factor, `accumulator += partial * factor`, beside which the
tensor cores run for the other warpgroup. Both need the two banks of a register file: WGMMA reads and writes
accumulators, and an FFMA reads three registers, or two where it finds the factor in the operand cache, in which the one
before has left it (`.reuse` in the machine code). ptxas (13.x, also in the CuTe DSL) lets the warp yield after every
second FFMA behind a WGMMA, and what a warp keeps is lost when it yields. So half of them read three registers.

`keep_factors` lets the warp yield after every eighth only, and marks the factor in the seven before. Measured on an
H200 (docs/fp8.md): up to 3 % faster at the power limit and up to 4 % at full clock. Without any yield it is slower
where nothing can be kept (the additions of products without scales of blocks, up to 18 %): these are left as they are.

An instruction of sm_90 has 16 bytes, in two words of 64 bits, lower first. The bits used here are in agreement with
`nvdisasm` and the tables of CuAssembler (github.com/cloudcores/CuAssembler, Turing and later):

    lower   0..11   operation; FFMA of four registers is 0x223
            12..15  predicate, 7 is none
            16..23  destination; 24..31, 32..39 the first and second source
    upper   41..44  cycles until the next one; 45: 0 lets the warp yield
            52..57  barriers to wait for
            58..60  sources to keep, the first in the lowest bit
"""

from __future__ import annotations

import struct
from itertools import pairwise

from cutegemm.hardware.cubin import code

FFMA, NO_PREDICATE, NO_REGISTER = 0x223, 7, 255
SIZE = 16
STAY, KEEP_SECOND = 1 << 45, 1 << 59
EVERY = 8
"""FFMA from one at which the warp may yield to the next. 3 and 4 were as fast at full clock and slower at the power
limit; 2 is what ptxas does."""


def keep_factors(cubin: bytes) -> bytes:
    """The same machine code for sm_90, whose neighbouring FFMA with one second source keep it."""
    changed = bytearray(cubin)
    for begin, size in code(cubin):
        words = [struct.unpack_from("<2Q", cubin, at) for at in range(begin, begin + size, SIZE)]
        run = 0
        for number, (now, then) in enumerate(pairwise(words)):
            if not _keeps(now, then):
                run = 0
                continue
            run += 1
            low, high = now
            high = high & ~(STAY | KEEP_SECOND) if run % EVERY == 0 else high | STAY | KEEP_SECOND
            struct.pack_into("<2Q", changed, begin + number * SIZE, low, high)
    return bytes(changed)


def _keeps(now: tuple[int, int], then: tuple[int, int]) -> bool:
    """Whether both are FFMA with the same second source, which the second need not wait for."""
    if not (_is_ffma(now) and _is_ffma(then)):
        return False
    factor = now[0] >> 32 & 0xFF
    written, waits = now[0] >> 16 & 0xFF, then[1] >> 52 & 0x3F
    return factor == then[0] >> 32 & 0xFF and factor not in (written, NO_REGISTER) and not waits


def _is_ffma(words: tuple[int, int]) -> bool:
    return words[0] & 0xFFF == FFMA and words[0] >> 12 & 0xF == NO_PREDICATE
