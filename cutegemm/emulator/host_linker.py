"""Links host code into this process: an ELF relocatable object in, callable addresses out.

LLVM's ORC linker (llvmlite) takes the object's bytes and an address for each symbol that it imports, so neither a
compiler nor a CUDA library is needed. ORC leaves ``.init_array`` of such objects alone; `link` returns the addresses of
those initializers, for a caller that wants them run (nvcc registers its kernels there).
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cutegemm import locks
from cutegemm.emulator.entries import CaptureError

_LOCAL, _GLOBAL, _FUNCTION, _SECTION = 0, 1, 2, 3
_SYMTAB, _RELA, _INIT_ARRAY = 2, 4, 14
# ORC brings these itself.
_PLATFORM_SYMBOLS = {"_GLOBAL_OFFSET_TABLE_", "atexit", "__cxa_atexit", "__dso_handle"}


@dataclass(frozen=True)
class _Symbol:
    name: str
    place: int  # of its record in the image
    binding: int
    kind: int
    section: int
    value: int


@dataclass
class ObjectFile:
    """The symbols and sections of an ELF64 little-endian relocatable object (System V ABI, AMD64 supplement).

    Raises CaptureError for other bytes.
    """

    image: bytes
    sections: dict[str, bytes] = field(init=False, default_factory=dict)
    symbols: list[_Symbol] = field(init=False, default_factory=list)
    initializers: list[_Symbol] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        image = self.image
        if image[:6] != b"\x7fELF\x02\x01" or len(image) < 64 or struct.unpack_from("<H", image, 16)[0] != 1:
            raise CaptureError("not an ELF64 little-endian relocatable object")
        try:
            self._read()
        except (struct.error, StopIteration, ValueError, IndexError, OverflowError) as error:
            raise CaptureError(f"the object file is damaged: {error or type(error).__name__}") from error

    @property
    def defined(self) -> set[str]:
        """Names it defines for others."""
        return {s.name for s in self.symbols if s.section and s.binding != _LOCAL}

    @property
    def imported(self) -> set[str]:
        """Names it needs."""
        return {s.name for s in self.symbols if not s.section and s.binding != _LOCAL}

    def linkable(self) -> bytes:
        """The image with its initializers made visible to the linker, and with a ``__dso_handle`` of its own.

        The linker's own one may lie further from the code than the code's 32-bit offsets reach. It is an address that
        nobody reads, so that the beginning of some code serves, under a name that the linker does not define.
        """
        image = bytearray(self.image)
        for symbol in self.initializers:
            image[symbol.place + 4] = _GLOBAL << 4 | symbol.kind
            image[symbol.place + 5] = 0  # default visibility
        code = next((s.section for s in self.symbols if s.kind == _FUNCTION and s.section), 0)
        for symbol in self.symbols:
            if symbol.name == "__dso_handle" and not symbol.section and code:
                (name,) = struct.unpack_from("<I", image, symbol.place)
                struct.pack_into("<IBBHQ", image, symbol.place, name + 1, _GLOBAL << 4, 0, code, 0)
        return bytes(image)

    def _read(self) -> None:
        image = self.image
        table, size, count, names_index = (
            struct.unpack_from("<Q", image, 40)[0],
            *struct.unpack_from("<HHH", image, 58),
        )
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        heads = [struct.unpack_from("<IIQQQQIIQQ", image, table + size * i) for i in range(count)]
        section_names = heads[names_index][4]
        named = [self._text(section_names + head[0]) for head in heads]
        for name, head in zip(named, heads, strict=True):
            self.sections.setdefault(name, image[head[4] : head[4] + head[5]])
        symtab = next(head for head in heads if head[1] == _SYMTAB)
        strings = heads[symtab[6]][4]
        for place in range(symtab[4], symtab[4] + symtab[5], 24):
            name_at, info, _, section, value = struct.unpack_from("<IBBHQ", image, place)
            name = self._text(strings + name_at)
            self.symbols.append(_Symbol(name, place, info >> 4, info & 15, section, value))
        for head in heads:
            if head[1] == _RELA and heads[head[7]][1] == _INIT_ARRAY:
                records = range(head[4], head[4] + head[5], 24)
                for _, relocation, addend in (struct.unpack_from("<QQq", image, place) for place in records):
                    self.initializers.append(self._initializer(self.symbols[relocation >> 32], addend))

    def _initializer(self, symbol: _Symbol, addend: int) -> _Symbol:
        if symbol.kind != _SECTION:
            return symbol
        return next(s for s in self.symbols if s.kind == _FUNCTION and (s.section, s.value) == (symbol.section, addend))

    def _text(self, place: int) -> str:
        return self.image[place : self.image.index(b"\0", place)].decode(errors="replace")


def resolve(names: Iterable[str], stand_ins: Mapping[str, int]) -> dict[str, int]:
    """An address for each imported name: a stand-in, or this process's own symbol (C and C++ libraries, libtvm_ffi).

    Raises CaptureError naming a symbol that nobody has.
    """
    addresses = {}
    for name in sorted(set(names) - _PLATFORM_SYMBOLS):
        address = stand_ins.get(name) or process_symbol(name)
        if address is None:
            raise CaptureError(f"host code imports {name!r}, which has no stand-in in the emulator")
        addresses[name] = address
    return addresses


def process_symbol(name: str) -> int | None:
    """The address of a symbol of libtvm_ffi (``TVMFFI...``), the C++ library or this process; None if none has it."""
    libraries: tuple[str | None, ...] = (None, "libstdc++.so.6", "libgcc_s.so.1")
    if name.startswith("TVMFFI"):
        import tvm_ffi.libinfo

        libraries = (str(tvm_ffi.libinfo.find_libtvm_ffi()),)
    for library in libraries:
        try:
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value
        except (AttributeError, OSError):
            continue
    return None


_lock = locks.lock()
_numbers = itertools.count()
_session: list[Any] = []  # the process's one ORC session, made at first use


def link(image: bytes, symbols: Iterable[str], imports: Mapping[str, int]) -> Any:
    """Links ``image`` and returns a tracker: ``tracker[name]`` is the address of each of ``symbols``, valid as long as
    the tracker lives. Raises CaptureError with the linker's message.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise CaptureError(
            "running this kernel on CPU tensors needs llvmlite: pip install 'cutegemm[emulator]'"
        ) from error

    with _lock:
        if not _session:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            _session.append(llvm.create_lljit_compiler(use_jit_link=True))
        builder = llvm.JITLibraryBuilder().add_object_img(image)
        for name in symbols:
            builder.export_symbol(name)
        for name, address in imports.items():
            builder.import_symbol(name, address)
        try:
            return builder.link(_session[0], f"cutegemm_host_{next(_numbers)}")
        except RuntimeError as error:
            raise CaptureError(f"the object could not be linked: {error}") from error


_callbacks: list[Any] = []  # for good: native code keeps their addresses


def callbacks(signatures: Mapping[str, tuple[Any, Any, Iterable[Any]]]) -> dict[str, int]:
    """Addresses of C functions for Python ones, given as name -> (function, result type, argument types)."""
    functions = {name: ctypes.CFUNCTYPE(result, *kinds)(action) for name, (action, result, kinds) in signatures.items()}
    _callbacks.extend(functions.values())
    return {name: int(ctypes.cast(function, ctypes.c_void_p).value or 0) for name, function in functions.items()}
