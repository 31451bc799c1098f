"""PTX instructions to generated Python: basic blocks, and the code generator that the instruction families use.

Each basic block becomes one Python function over a box of warps (`machine.Box`), in two variants: for all lanes, and
for the lanes of a mask. An instruction family registers one emitter per opcode with ``@emits``; the emitter
writes source lines through ``Gen``. A block ends at a label, a branch, or an instruction that can make warps
wait (its own block, run by a handler registered with ``@synchronizes``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutegemm.emulator.errors import EmulationError, UnsupportedInstruction
from cutegemm.emulator.fast_fma import FmaRun
from cutegemm.emulator.machine import BASE_CODE, DTYPES
from cutegemm.emulator.memory import SHARED_BASE
from cutegemm.emulator.ptx import (
    Addr,
    Imm,
    Instr,
    Kernel,
    Label,
    Module,
    Negated,
    Reg,
    Sink,
    Special,
    Symbol,
    Variable,
    Vec,
    narrowed,
)

EMITTERS: dict[str, Callable[[Gen, Instr], None]] = {}
#: opcode prefix -> function(wave, box, instr, mask) -> (lanes that wait, whether they stay at this block)
SYNCHRONIZERS: dict[str, Callable] = {}
#: functions and constants that generated code calls by name
RUNTIME: dict[str, Any] = {"np": np}

PTX_CODE = {
    "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8", "pred": "p",
}  # fmt: skip


def numpy_name(code: str) -> str:
    """numpy's name of a code: uint32 of u4."""
    return {"u": "uint", "i": "int", "f": "float"}[code[0]] + str(8 * int(code[1]))


def emits(*names: str):
    """Registers the emitter of these opcodes."""
    return _registers(EMITTERS, names)


def synchronizes(*names: str):
    """Registers the handler of opcodes that can make warps wait."""
    return _registers(SYNCHRONIZERS, names)


def _registers(table: dict[str, Callable], names: tuple[str, ...]):
    def register(f):
        table.update(dict.fromkeys(names, f))
        return f

    return register


def runtime(f):
    """Make a function callable from generated code under its own name."""
    RUNTIME[f.__name__] = f
    return f


def lookup(table: dict[str, Callable], instr: Instr) -> Callable | None:
    """The entry for the longest registered prefix of an opcode."""
    for n in range(min(len(instr.parts), 4), 0, -1):
        found = table.get(".".join(instr.parts[:n]))
        if found is not None:
            return found
    return None


@dataclass
class Block:
    index: int
    instrs: list[Instr]
    target: int = -1  # block of a taken branch; EXIT for ret
    fall: int = -1  # block after this one
    sync: Callable | None = None
    code: dict[bool, Callable] = field(default_factory=dict)  # masked? -> function
    table: dict[int, tuple[int, ...]] = field(default_factory=dict)


EXIT = (1 << 30) - 1


class Program:
    """A kernel, translated: blocks, the layout of its shared and local memory, addresses of its variables."""

    def __init__(self, module: Module, kernel: Kernel, env: Any) -> None:
        self.module, self.kernel, self.env = module, kernel, env
        self.layout()
        self.blocks: list[Block] = []
        self.check_supported()
        self.cut()

    # -- variables --------------------------------------------------------------------------------------------
    def layout(self) -> None:
        """Addresses of shared and local variables, and of module variables in host memory."""
        self.shared: dict[str, int] = {}
        self.local: dict[str, int] = {}
        at, local, dynamic_align = SHARED_BASE, 0, 16
        externs = []
        everything = [*self.module.variables.values(), *self.kernel.variables]
        used = {o for i in self.kernel.instrs for o in _symbols(i.operands)}
        for var in everything:
            if var.space == "shared" and var.name in used:
                if var.size == 0 or var.extern:
                    externs.append(var)
                    dynamic_align = max(dynamic_align, var.align)
                else:
                    at = (at + var.align - 1) // var.align * var.align
                    self.shared[var.name] = at
                    at += var.size
            elif var.space == "local":
                local = (local + var.align - 1) // var.align * var.align
                self.local[var.name] = local
                local += var.size
        self.static_shared = at - SHARED_BASE
        self.dynamic_offset = (at + dynamic_align - 1) // dynamic_align * dynamic_align
        for var in externs:
            self.shared[var.name] = self.dynamic_offset
        self.local_bytes = local
        self.params = {p.name: p for p in self.kernel.params}
        self.variables: dict[str, Variable] = {v.name: v for v in everything}

    # -- blocks -----------------------------------------------------------------------------------------------
    def check_supported(self) -> None:
        for instr in self.kernel.instrs:
            if instr.name in ("bra", "ret", "exit"):
                continue
            if lookup(EMITTERS, instr) is None and lookup(SYNCHRONIZERS, instr) is None:
                raise UnsupportedInstruction(f"unknown instruction\n  {instr.where()}", line=instr.line)

    def cut(self) -> None:
        instrs = self.kernel.instrs
        leaders = {0, *self.kernel.labels.values()}
        for n, instr in enumerate(instrs):
            if instr.name in ("bra", "ret", "exit", "brx", "trap"):
                leaders.add(n + 1)
            elif lookup(SYNCHRONIZERS, instr) is not None:
                leaders |= {n, n + 1}
        starts = sorted(s for s in leaders if s < len(instrs))
        block_of = {start: b for b, start in enumerate(starts)}
        block_of[len(instrs)] = EXIT
        for b, start in enumerate(starts):
            end = starts[b + 1] if b + 1 < len(starts) else len(instrs)
            block = Block(b, instrs[start:end], fall=b + 1 if b + 1 < len(starts) else EXIT)
            last = block.instrs[-1]
            if last.name == "bra":
                label = last.operands[0]
                if not isinstance(label, Label):
                    raise UnsupportedInstruction(
                        f"a branch to something that is no label\n  {last.where()}", line=last.line
                    )
                block.target = block_of[self.kernel.labels[label.name]]
            elif last.name in ("ret", "exit"):
                block.target = EXIT
            block.sync = lookup(SYNCHRONIZERS, last)
            self.blocks.append(block)
        for block in self.blocks:  # all of it, so that an instruction in an unsupported form is found before running
            if block.sync is None:
                self.function(block, masked=False)

    def function(self, block: Block, masked: bool) -> Callable:
        found = block.code.get(masked)
        if found is None:
            found = block.code[masked] = self.generate(block, masked)
        return found

    def generate(self, block: Block, masked: bool) -> Callable:
        """The function of a block; compiled when first run, so the first call returns a compiler of it."""
        gen = Gen(self, block, masked)
        for instr in block.instrs:
            gen.instruction(instr)
        return gen.finish()


def _symbols(operands: Any):
    for o in operands:
        if isinstance(o, Symbol):
            yield o.name
        elif isinstance(o, Addr):
            yield from _symbols((o.base, *(o.coords or ())))
        elif isinstance(o, Vec):
            yield from _symbols(o.items)


class Gen:
    """Writes the source of one block."""

    def __init__(self, program: Program, block: Block, masked: bool) -> None:
        self.program, self.block, self.masked = program, block, masked
        self.lines: list[str] = []
        self.owner: list[Instr] = []
        self.names: dict[str, Any] = {}  # constants of this block
        self.lists: set[str] = set()
        self.mask: str | None = None
        self.serial = 0
        self.instr: Instr = block.instrs[0]
        self.memo: dict[Any, tuple[str, frozenset]] = {}  # values kept while their registers stay as they are
        self.result: str | None = None
        self.fma_run: list[tuple[int, int, int, int]] = []  # consecutive fma.rn.f32, not written yet

    # -- lines ------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        self.lines.append(text)
        self.owner.append(self.instr)

    def let(self, expr: str) -> str:
        self.serial += 1
        name = f"t{self.serial}"
        self.line(f"{name} = {expr}")
        return name

    def keep(self, obj: Any, prefix: str = "K") -> str:
        """A name for a Python object in the generated code."""
        name = f"{prefix}{len(self.names)}"
        self.names[name] = obj
        return name

    def unsupported(self, why: str = "this form is not implemented") -> UnsupportedInstruction:
        return UnsupportedInstruction(f"{why}\n  {self.instr.where()}", line=self.instr.line)

    @property
    def me(self) -> str:
        """A name for the current instruction."""
        return self.keep(self.instr, "I")

    def instruction(self, instr: Instr) -> None:
        if self.fma_run and instr.op != "fma.rn.f32":
            self.end_fma_run()
        self.instr = instr
        self.mask = "m" if self.masked else None
        if instr.guard is not None:
            self.lists.add("p")
            guard = f"p[{instr.guard.index}]"
            if instr.guard_negated:
                guard = f"~{guard}"
            if instr.name in ("bra", "ret", "exit"):
                self.result = guard if self.mask is None else f"{guard} & m"
                return
            self.mask = self.let(guard if self.mask is None else f"{guard} & m")
        elif instr.name in ("bra", "ret", "exit"):
            return
        emitter = lookup(EMITTERS, instr)
        if emitter is None:
            raise self.unsupported("unknown instruction")
        hook = self.program.env.before_instr
        if hook is not None:
            hook(self, instr)
        try:
            emitter(self, instr)
        except EmulationError:
            raise
        except (IndexError, KeyError, ValueError, AttributeError, TypeError) as error:
            raise self.unsupported(f"operands that do not fit the instruction ({error})") from error

    # -- operands ---------------------------------------------------------------------------------------------
    def reg(self, index: int, code: str) -> str:
        self.lists.add(code)
        return f"{code}[{index}]"

    def constant(self, value: Any, code: str) -> str:
        array = np.array(value, DTYPES[code])
        key = ("const", code, array.tobytes())
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = (self.keep(array), frozenset())
        return found[0]

    def imm(self, o: Imm, code: str) -> str:
        value: Any = o.value
        kind = code[0]
        bits = DTYPES[code].itemsize * 8
        if code == "p":
            return self.constant(bool(value), "p")
        if kind == "f":
            if o.kind == "f32":
                value = struct.unpack("<f", struct.pack("<I", value))[0]
            elif o.kind == "f64":
                value = struct.unpack("<d", struct.pack("<Q", value))[0]
            if code == "f4" and o.kind == "f32":
                return self.keep(np.array(o.value, np.uint32).view(np.float32).reshape(()))
            return self.constant(value, code)
        if o.kind == "f64" and bits == 32:
            value = narrowed(value)
        value &= (1 << bits) - 1
        if kind == "i" and value >> (bits - 1):
            value -= 1 << bits
        return self.constant(value, code)

    def src(self, o: Any, code: str) -> str:
        """An expression for an operand as numpy dtype ``code``. Registers give views: do not write to them."""
        if isinstance(o, Reg):
            if o.cls == "p" or code == "p":
                if o.cls != code:
                    raise self.unsupported(f"register {o.name} does not fit")
                return self.reg(o.index, "p")
            base = BASE_CODE[o.cls]
            if base[1] == code[1]:
                return self.reg(o.index, code)
            source = self.reg(o.index, code[0].replace("f", "u") + base[1])
            return f"{source}.astype(np.{DTYPES[code].name})"
        if isinstance(o, Imm):
            return self.imm(o, code)
        if isinstance(o, Negated):
            return f"(~{self.reg(o.reg.index, 'p')})"
        if isinstance(o, Special):
            return self.special(o, code)
        if isinstance(o, Symbol):
            return self.symbol(o, code)
        raise self.unsupported(f"operand {o} does not fit here")

    def special(self, o: Special, code: str) -> str:
        name = o.name
        if name in ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
            return f"X.wave.env.clock({name!r})"
        if name in ("tid", "ntid", "ctaid", "nctaid"):
            name += ".x"
        if name not in self.program.env.special_names and not name.startswith(("envreg", "reserved_smem")):
            raise self.unsupported(f"unknown special register %{o.name}")
        return f"X.sreg({name!r}, {code!r})"

    def symbol(self, o: Symbol, code: str) -> str:
        """The address of a variable in its own space (global variables: their host address)."""
        p = self.program
        if o.name in p.shared:
            return f"X.shared_symbol({p.shared[o.name] + o.offset}, {code!r})"
        if o.name in p.params:
            return self.constant(p.params[o.name].offset + o.offset, code)
        if o.name in p.local:
            return self.constant(p.local[o.name] + o.offset, code)
        address = p.env.variable_address(o.name)
        if address is None:
            raise self.unsupported(f"unknown name {o.name}")
        return self.constant(address + o.offset, code)

    def space_of(self, name: str) -> str:
        p = self.program
        for space, table in (("shared", p.shared), ("param", p.params), ("local", p.local)):
            if name in table:
                return space
        return p.variables[name].space if name in p.variables else "global"

    def address(self, o: Any, code: str) -> str:
        """An expression for [base + offset]; ``code`` is u4 (shared) or u8."""
        if not isinstance(o, Addr):
            raise self.unsupported("an address is expected")
        bits = 32 if code == "u4" else 64
        if o.base is None:
            return self.constant(o.offset & ((1 << bits) - 1), code)
        if isinstance(o.base, Symbol):
            return self.symbol(Symbol(o.base.name, o.base.offset + o.offset), code)
        base = self.src(o.base, code)
        if o.offset == 0:
            return base
        return f"({base} + {self.constant(o.offset & ((1 << bits) - 1), code)})"

    # -- results ----------------------------------------------------------------------------------------------
    def written(self, o: Reg) -> None:
        """A register changes: forget the values kept that depend on it."""
        gone = [k for k, (_, regs) in self.memo.items() if (o.cls, o.index) in regs]
        for k in gone:
            del self.memo[k]

    def kept(self, key: Any, regs, make: Callable[[], str]) -> str:
        """The name of a value computed from registers, computed again only once one of them has changed."""
        found = self.memo.get(key)
        if found is None:
            found = (make(), frozenset((r.cls, r.index) for r in regs))
            self.memo[key] = found
        return found[0]

    def ufunc(self, name: str, dst: Any, code: str, *srcs: str) -> None:
        """dst = name(*srcs) with a NumPy ufunc, written in place."""
        if isinstance(dst, Sink):
            return
        if code == "p" or BASE_CODE[dst.cls][1] == code[1]:
            self.written(dst)
            out = self.reg(dst.index, code)
            where = f", where={self.mask}" if self.mask else ""
            self.line(f"np.{name}({', '.join(srcs)}, out={out}{where})")
        else:
            self.assign(dst, f"np.{name}({', '.join(srcs)})", code)

    def assign(self, dst: Any, expr: str, code: str) -> None:
        """dst = expr, an array of dtype ``code`` or something that broadcasts to it. A wider register gets the value
        extended as the signedness of ``code`` says."""
        if isinstance(dst, Sink):
            return
        if not isinstance(dst, Reg):
            raise self.unsupported(f"{dst} is no register")
        self.written(dst)
        if dst.cls != "p" and code != "p":
            size = BASE_CODE[dst.cls][1]
            if code[1] != size:
                if int(size) < int(code[1]):
                    raise self.unsupported(f"register {dst.name} is narrower than the result")
                code = code[0].replace("f", "u") + size
        out = self.reg(dst.index, code)
        if self.mask:
            self.line(f"np.copyto({out}, {expr}, 'unsafe', {self.mask})")
        else:
            self.line(f"{out}[...] = {expr}")

    def end_fma_run(self) -> None:
        """Write the consecutive fma.rn.f32 gathered so far: as one call, or one by one where that is not to be had."""
        quads, self.fma_run = self.fma_run, []
        self.lists.add("f4")
        self.line(f"if not {self.keep(FmaRun(quads))}(X):")
        for d, a, b, c in quads:
            self.line(f"    fused_multiply_add(f4[{a}], f4[{b}], f4[{c}], f4[{d}])")

    def finish(self) -> Callable:
        if self.fma_run:
            self.end_fma_run()
        head = [f"    {c} = X.{c}" for c in sorted(self.lists)]
        if self.masked:
            head.append("    m = X.mask")
        body = [f"    {text}" for text in self.lines]
        tail = [f"    return {self.result}"] if self.result else []
        source = "\n".join(["def block(X):", *head, *body, *tail, "" if body or head or tail else "    pass"])
        first = 2 + len(head)
        owner = {first + n: instr for n, instr in enumerate(self.owner)}
        return _Lazy(source, {**RUNTIME, **self.names}, owner)


class _Lazy:
    """A generated function: compiled at its first call; errors get the PTX line of the generated line."""

    __slots__ = ("function", "names", "owner", "source")

    def __init__(self, source: str, names: dict, owner: dict[int, Instr]) -> None:
        self.source, self.names, self.owner = source, names, owner
        self.function: Callable | None = None

    def __call__(self, box: Any) -> Any:
        if self.function is None:
            exec(compile(self.source, "<ptx block>", "exec"), self.names)
            self.function = self.names["block"]
        try:
            return self.function(box)
        except EmulationError:
            raise
        except Exception as error:
            instr = self.instr_of(error)
            where = f"\n  {instr.where()}" if instr else ""
            raise EmulationError(f"the emulator failed: {type(error).__name__}: {error}{where}",
                                 line=instr.line if instr else None) from error  # fmt: skip

    def instr_of(self, error: BaseException) -> Instr | None:
        tb = error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == "<ptx block>":
                return self.owner.get(tb.tb_lineno)
            tb = tb.tb_next
        return None
