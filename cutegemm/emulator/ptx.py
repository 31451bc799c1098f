"""PTX as data: modules, kernels, instructions and their operands.

Accepts the PTX of NVRTC, nvcc and the CuTe DSL. ``ptx_parser.parse_module`` gives the kernels (``entries``), their
parameter layout, their registers (one dense index per register class) and their instructions with resolved
operands and labels. Scopes ``{ }`` inside a body have registers and labels of their own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property

from cutegemm.emulator.errors import LaunchError

#: bytes of each PTX fundamental type
TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 1,
}  # fmt: skip

#: register class of each declared register type; a class is one array of the machine
REGISTER_CLASS = {t: ("p" if t == "pred" else str(max(16, TYPE_BYTES[t] * 8))) for t in TYPE_BYTES}


def target_number(target: str) -> int:
    """The number of a PTX target: 90 of sm_90a; 0 where there is none."""
    return int("".join(filter(str.isdigit, target)) or 0)


@dataclass(frozen=True, slots=True)
class Reg:
    name: str
    cls: str  # "p", "16", "32", "64", "128"
    index: int


@dataclass(frozen=True, slots=True)
class Imm:
    value: int  # an integer, or the bits of a float literal
    kind: str  # "int", "f32" or "f64": how the literal was written


@dataclass(frozen=True, slots=True)
class Special:
    name: str  # without the leading %


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Vec:
    items: tuple


def narrowed(bits: int) -> int:
    """The bits of an fp64 number, as those of the nearest fp32 number."""
    (number,) = struct.unpack("<d", struct.pack("<Q", bits))
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def items_of(operand) -> list:
    """The items of a vector operand; any other operand alone."""
    return list(operand.items) if isinstance(operand, Vec) else [operand]


@dataclass(frozen=True, slots=True)
class Addr:
    base: object  # Reg, Symbol or None
    offset: int
    coords: tuple | None = None  # the coordinates of a tensor address
    extra: tuple = ()  # im2col offsets and the like


@dataclass(frozen=True, slots=True)
class Pair:
    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Negated:
    reg: Reg


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`: the result is dropped."""


@dataclass(slots=True)
class Instr:
    op: str
    parts: tuple[str, ...]  # op split at dots
    operands: tuple
    guard: Reg | None
    guard_negated: bool
    line: int
    text: str

    @property
    def name(self) -> str:
        return self.parts[0]

    def has(self, part: str) -> bool:
        return part in self.parts

    @property
    def addressed(self) -> list:
        """The operands without a cache policy behind them, which has no effect here."""
        return list(self.operands[:-1] if any("cache_hint" in part for part in self.parts) else self.operands)

    def where(self) -> str:
        text = self.text if len(self.text) <= 180 else f"{self.text[:100]} ... {self.text[-60:]}"
        return f"PTX line {self.line}: {text}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A .global, .const, .shared, .local or .param variable."""

    name: str
    space: str
    size: int  # bytes; 0 for an extern array without a size
    align: int
    init: bytes | None = None
    extern: bool = False
    #: (byte offset, symbol name, addend) of addresses to fill in
    relocations: tuple = ()


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    offset: int
    size: int
    align: int


@dataclass
class Kernel:
    name: str
    line: int
    params: list[Param]
    directives: dict[str, tuple[int, ...]]
    instrs: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    register_counts: dict[str, int] = field(default_factory=dict)
    register_names: dict[str, Reg] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)

    @property
    def reqntid(self) -> tuple[int, int, int] | None:
        return self._block("reqntid")

    @property
    def maxntid(self) -> tuple[int, int, int] | None:
        return self._block("maxntid")

    def _block(self, directive: str) -> tuple[int, int, int] | None:
        got = self.directives.get(directive)
        return (*got, 1, 1)[:3] if got else None  # type: ignore[return-value]

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    text: str
    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]

    @property
    def entries(self) -> list[str]:
        return list(self.kernels)

    def kernel(self, name: str) -> Kernel:
        if name in self.kernels:
            return self.kernels[name]
        raise LaunchError(f"no entry named {name!r} in this PTX; it has: {', '.join(self.kernels) or 'none'}")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()
