"""What the tests of the emulator's arithmetic share: snippets run by name, and references in exact Python numbers."""

import math
from fractions import Fraction

import numpy as np

from tests.ptx_snippet_table import SNIPPETS
from tests.ptx_snippets import data, emulate, floats

BY_NAME = {s.name: s for s in SNIPPETS}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
#: bits of significand, exponent of the smallest subnormal, largest exponent
FORMATS = {
    "f32": (24, -149, 127),
    "f16": (11, -24, 15),
    "bf16": (8, -133, 127),
    "f64": (53, -1074, 1023),
}


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def typed(x: int, t: str) -> int:
    bits = int(t.lstrip("usb"))
    return signed(x, bits) if t[0] == "s" else x & ((1 << bits) - 1)


def clip(x, low, high):
    return max(low, min(high, x))


def run(name: str) -> tuple[list[list[int]], list[list[int]]]:
    s = BY_NAME[name]
    inputs = data(s, 2, 7)
    return inputs.tolist(), emulate(s, inputs).tolist()


def check(name: str, reference) -> None:
    """``reference`` takes the inputs as unsigned bits and gives the outputs' bits."""
    inputs, got = run(name)
    s = BY_NAME[name]
    widths = {"16": 0xFFFF, "x2": 0xFFFFFFFF, "32": 0xFFFFFFFF, "64": (1 << 64) - 1}
    masks = [0xFFFF if t == "e8x2" else widths[t[-2:]] for t in s.outputs]
    for row, out in zip(inputs, got, strict=True):
        want = reference(*row)
        want = want if isinstance(want, tuple) else (want,)
        for w, o, mask in zip(want, out, masks, strict=True):
            assert w is None or o == w & mask, f"{name}: in {[hex(v) for v in row]}: got {o:#x}, want {w & mask:#x}"


def rounded(x: Fraction, t: str, mode: str) -> float:
    """x in format t: an integer multiple of the unit in the last place, chosen by the mode."""
    precision, lowest, top = FORMATS[t]
    if x == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(x))) if abs(x) < Fraction(2) ** 900 else 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, lowest)
    n = x / unit
    down = math.floor(n)
    rest = n - down
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1)
    else:
        up = {"rm": False, "rp": rest > 0, "rz": rest > 0 and x < 0}[mode]
    result = (down + up) * unit
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** top
    if abs(result) > largest:
        toward = {
            "rn": math.inf,
            "rz": largest,
            "rm": largest if x > 0 else math.inf,
            "rp": math.inf if x > 0 else largest,
        }[mode]
        return math.copysign(float(toward), x)
    return float(result)


def value(bits: int, t: str) -> float:
    return float(floats(np.array([bits], np.uint64), t)[0])


def same(got: int, want: float, t: str) -> bool:
    x = value(got, t)
    return (math.isnan(x) and math.isnan(want)) or x == want
