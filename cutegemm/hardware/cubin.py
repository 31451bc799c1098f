"""What a kernel takes, read from its machine code: registers, static shared memory, stack. No driver and no tool is
needed.

A cubin is an ELF file. `.nv.info` lists attributes as (format, attribute, size) and a value; format 4 is a sized value
that begins with the index of the kernel's symbol. Attribute 0x2f is the register count, 0x11 the frame size (as
`cuobjdump -elf` names them, EIATTR_REGCOUNT and EIATTR_FRAME_SIZE). The size of `.nv.shared.<kernel>` is the static
shared memory.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_REGCOUNT, _FRAME_SIZE, _SIZED = 0x2F, 0x11, 0x04
_INLINE = (0x01, 0x02, 0x03)  # formats whose value lies in the size field
_SYMTAB = 2


@dataclass(frozen=True)
class Usage:
    """Per thread: `registers`, `stack` (bytes of the local memory frame). Per CTA: `static_smem` bytes.

    From compute capability 9.0 on `static_smem` counts the system's 1 KiB, too.
    """

    kernel: str
    registers: int
    static_smem: int
    stack: int


def usage(cubin: bytes) -> list[Usage]:
    """The resources of every kernel in a cubin, by name.

    Raises ValueError when the bytes are no cubin or name no registers.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("cubin: no 64-bit ELF file")
    try:
        found = _usage(cubin)
    except (struct.error, IndexError, KeyError) as why:
        raise ValueError(f"cubin: the ELF file is damaged ({why!r})") from why
    if not found:
        raise ValueError("cubin: it names the registers of no kernel")
    return found


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def code(cubin: bytes) -> list[tuple[int, int]]:
    """Where the instructions of its kernels lie: first byte and number of bytes of each. Raises ValueError as `usage`
    does.
    """
    usage(cubin)
    return [(section.offset, section.size) for section in _sections(cubin) if section.name.startswith(".text.")]


def code_digest(cubin: bytes) -> str:
    """A digest of what a cubin does: instructions, constants, launch attributes, registers, stack and shared memory
    of its kernels.

    Names of kernels, symbols and line tables do not count. Raises ValueError as `usage` does.
    """
    digest = hashlib.sha256()
    for kernel in usage(cubin):
        digest.update(f"{kernel.registers} {kernel.static_smem} {kernel.stack}\n".encode())
    for section in _sections(cubin):
        kind = next((kind for kind in (".text.", ".nv.constant", ".nv.info.") if section.name.startswith(kind)), None)
        if kind is not None:
            digest.update(f"{kind} {section.size}\n".encode())
            digest.update(cubin[section.offset : section.offset + section.size])
    return digest.hexdigest()


def _usage(cubin: bytes) -> list[Usage]:
    sections = _sections(cubin)
    names = _symbols(cubin, sections)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for section in sections:
        if section.name == ".nv.info":
            for attribute, symbol, value in _attributes(cubin[section.offset : section.offset + section.size]):
                if attribute == _REGCOUNT:
                    registers[names[symbol]] = value
                elif attribute == _FRAME_SIZE:
                    frames[names[symbol]] = value
    reserved = ".nv.shared.reserved."
    smem = {
        s.name.removeprefix(".nv.shared."): s.size
        for s in sections
        if s.name.startswith(".nv.shared.") and not s.name.startswith(reserved)
    }
    return [Usage(name, registers[name], smem.get(name, 0), frames.get(name, 0)) for name in sorted(registers)]


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, strings = struct.unpack_from("<3H", cubin, 0x3A)
    raw = [struct.unpack_from("<2I4Q2I2Q", cubin, table + i * size) for i in range(count)]
    base = raw[strings][4]
    return [_Section(_text(cubin, base + r[0]), r[1], r[4], r[5], r[6]) for r in raw]


def _symbols(cubin: bytes, sections: list[_Section]) -> list[str]:
    for section in sections:
        if section.kind == _SYMTAB:
            base = sections[section.link].offset
            return [
                _text(cubin, base + struct.unpack_from("<I", cubin, section.offset + at)[0])
                for at in range(0, section.size, 24)
            ]
    return []


def _attributes(info: bytes) -> list[tuple[int, int, int]]:
    """(attribute, symbol, value) of every sized attribute of two words."""
    found, at = [], 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<2BH", info, at)
        at += 4
        if form == _SIZED:
            if size == 8:
                symbol, value = struct.unpack_from("<2I", info, at)
                found.append((attribute, symbol, value))
            at += size
        elif form not in _INLINE:
            raise KeyError(f"attribute format {form:#x}")
    return found


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
