"""The PTX parser: text to `ptx.Module`.

Reads the PTX of NVRTC, nvcc and the CuTe DSL. Statements end with ``;``; a brace where a statement starts opens a scope
with registers and labels of its own, a brace elsewhere belongs to a vector operand or an initializer.
"""

from __future__ import annotations

import re
import struct

from cutegemm.emulator.errors import PtxError
from cutegemm.emulator.ptx import (
    REGISTER_CLASS,
    TYPE_BYTES,
    Addr,
    Imm,
    Instr,
    Kernel,
    Label,
    Module,
    Negated,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Symbol,
    Variable,
    Vec,
    narrowed,
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\]|\\.)*\"", re.S)
_STOP = re.compile(r"[;{}]|(?<!:):(?!:)")
_ARRAY_DECL = re.compile(r"^(?P<name>[\w$.%]+)\s*(?P<dims>(?:\[\s*\d*\s*\])*)\s*$", re.S)
_NUMBER = re.compile(r"^[-+~]?\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|"
                     r"\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+)[uU]?$")  # fmt: skip


def _blank(match: re.Match) -> str:
    text = match.group()
    return text if text[0] == '"' else "\n" * text.count("\n") or " "


def _align(offset: int, to: int) -> int:
    return (offset + to - 1) // to * to


class _Scope:
    def __init__(self, parent: _Scope | None, serial: int) -> None:
        self.parent, self.serial = parent, serial
        self.regs: dict[str, Reg] = {}
        self.labels: dict[str, str] = {}

    def find_reg(self, name: str) -> Reg | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.regs:
                return scope.regs[name]
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        return self.labels.get(name) or (self.parent.find_label(name) if self.parent else None)


def parse_module(ptx_text: str | bytes) -> Module:
    """Parse PTX text (str, or bytes with an optional trailing NUL). Raises PtxError with the line."""
    if isinstance(ptx_text, bytes):
        ptx_text = ptx_text.decode()
    return ModuleParser(ptx_text.rstrip("\0")).module


class ModuleParser:
    def __init__(self, text: str) -> None:
        self.source = text
        self.text = _COMMENT.sub(_blank, text)
        self.source_lines = text.splitlines()
        self.pos = 0
        self.line = 1
        self.line_pos = 0
        self.module = Module(text, "", {}, {})
        self.parse_module()
        if not self.module.kernels:
            raise PtxError("this PTX holds no .entry")

    # -- a cursor over the text -------------------------------------------------------------------------------
    def line_at(self, pos: int) -> int:
        self.line += self.text.count("\n", self.line_pos, pos)
        self.line_pos = pos
        return self.line

    def fail(self, message: str, line: int) -> PtxError:
        text = self.source_lines[line - 1].strip() if line <= len(self.source_lines) else ""
        return PtxError(f"{message}\n  PTX line {line}: {text}", line=line)

    def statements(self):
        """Yield (kind, text, line): kind is ';', '{', '}' or ':'. A brace counts as a scope only where a
        statement starts; inside a statement it belongs to a vector operand or an initializer."""
        text, n = self.text, len(self.text)
        while True:
            while self.pos < n and text[self.pos].isspace():
                self.pos += 1
            if self.pos >= n:
                return
            start = self.pos
            depth = 0
            scan = start
            while True:
                found = _STOP.search(text, scan)
                if not found:
                    if text[start:].strip():
                        raise self.fail("a statement without its ';'", self.line_at(start))
                    return
                ch, at = found.group(), found.start()
                head = text[start:at].strip()
                is_label = ch == ":" and re.fullmatch(r"[\w$%]+", head)
                opens = ch == "{" and (not head or self.opens_body(head))
                if depth == 0 and (ch in "};" or is_label or opens):
                    self.pos = at + 1
                    yield ch, head, self.line_at(start)
                    break
                depth += {"{": 1, "}": -1}.get(ch, 0)
                scan = at + 1

    @staticmethod
    def opens_body(head: str) -> bool:
        return (".entry" in head or ".func" in head or head.startswith(".section")) and "=" not in head

    # -- module scope -----------------------------------------------------------------------------------------
    def parse_module(self) -> None:
        # .version, .target, .address_size and .file end with their line: give them a ';' so one reader serves all
        self.text = re.sub(r"(?m)^(\s*\.(?:version|target|address_size|file)\b[^\n;]*)$", r"\1;", self.text)
        self.text = re.sub(r"(?m)^(\s*\.loc\b[^\n;]*)$", r"\1;", self.text)
        stream = self.statements()
        for kind, head, line in stream:
            if kind == "{" and ".entry" in head:
                self.parse_kernel(head, line, stream)
            elif kind == "{":
                self.skip_block(stream)
            elif kind == ";":
                self.module_statement(head, line)
            else:
                raise self.fail(f"unexpected {kind!r}", line)

    def skip_block(self, stream) -> None:
        depth = 1
        for kind, _, _ in stream:
            depth += {"{": 1, "}": -1}.get(kind, 0)
            if depth == 0:
                return

    def module_statement(self, head: str, line: int) -> None:
        word = head.split(None, 1)[0] if head else ""
        if word == ".target":
            self.module.target = head.split(None, 1)[1].split(",")[0].strip()
        elif re.search(r"\.(global|const|shared)\b", head) and ".func" not in head:
            for var in self.variable(head, line):
                self.module.variables[var.name] = var

    def variable(self, head: str, line: int) -> list[Variable]:
        """`.shared .align 16 .b8 name[1024]`, `.const .f32 x = 0f3F800000`, ... -> Variables."""
        decl, eq, init = head.partition("=")
        words = decl.replace("[", " [").split()
        space, align, elem, vector, extern = "", 0, "", 1, False
        i = 0
        while i < len(words) and words[i].startswith("."):
            w = words[i][1:]
            if w == "align":
                i += 1
                align = int(words[i])
            elif w in ("v2", "v4"):
                vector = int(w[1])
            elif w in TYPE_BYTES:
                elem = w
            elif w in ("global", "const", "shared", "local", "param"):
                space = w
            elif w in ("extern", "visible", "weak", "common"):
                extern = w == "extern"
            elif w == "attribute" or w.startswith("attribute("):
                while ")" not in words[i]:
                    i += 1
            elif w.startswith(("shared::", "param::")):
                space = w.partition("::")[0]
            else:
                raise self.fail(f"unknown word .{w} in a declaration", line)
            i += 1
        if not elem:
            raise self.fail("a declaration without a type", line)
        rest = " ".join(words[i:])
        found = _ARRAY_DECL.match(rest)
        if not found:
            names = [n.strip() for n in rest.split(",")]
            if not all(re.fullmatch(r"[\w$%]+", n) for n in names):
                raise self.fail("a declaration that could not be read", line)
            size = TYPE_BYTES[elem] * vector
            return [Variable(n, space, size, align or size, None, extern) for n in names]
        count = vector
        unsized = False
        for dim in re.findall(r"\[\s*(\d*)\s*\]", found["dims"]):
            unsized |= dim == ""
            count *= int(dim or 1)
        size = TYPE_BYTES[elem] * count
        data, relocations = self.initializer(init.strip(), elem, line) if eq else (None, ())
        if unsized:
            size = len(data) if data is not None else 0
        if data is not None:
            data = data.ljust(size, b"\0")
        return [Variable(found["name"], space, size, align or TYPE_BYTES[elem] * vector, data, extern, relocations)]

    def initializer(self, text: str, elem: str, line: int) -> tuple[bytes, tuple]:
        flat = [t.strip() for t in re.sub(r"[{}]", " ", text).split(",") if t.strip()]
        out = bytearray()
        relocations = []
        width = TYPE_BYTES[elem]
        for item in flat:
            imm = self.number(item)
            if imm is not None:
                value = imm.value
                if elem == "f32" and imm.kind == "f64":
                    value = narrowed(value)
                out += (value & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
                continue
            found = re.fullmatch(r"(?:generic\(\s*)?([\w$]+)\s*\)?\s*(?:\+\s*(\d+))?", item)
            if not found:
                raise self.fail(f"initializer {item!r} could not be read", line)
            relocations.append((len(out), found[1], int(found[2] or 0)))
            out += bytes(width)
        return bytes(out), tuple(relocations)

    # -- kernels ----------------------------------------------------------------------------------------------
    def parse_kernel(self, head: str, line: int, stream) -> None:
        found = re.search(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*((?:\.[a-z].*)?)$", head, re.S)
        if not found:
            raise self.fail("an .entry that could not be read", line)
        name, params_text, tail = found[1], found[2] or "", found[3]
        params, offset = [], 0
        for item in filter(None, (p.strip() for p in params_text.split(","))):
            item = re.sub(r"\.ptr\b(?:\s*\.(?:global|shared|const|local)\b)?(?:\s*\.align\s+\d+)?", "", item)
            var = self.variable(item, line)[0]
            offset = _align(offset, var.align)
            params.append(Param(var.name, offset, var.size, var.align))
            offset += var.size
        directives = {
            d[0]: tuple(int(n) for n in re.findall(r"\d+", d[1])) for d in re.findall(r"\.(\w+)([^.]*)", tail)
        }
        kernel = Kernel(name, line, params, directives)
        self.parse_body(kernel, stream)
        self.module.kernels[name] = kernel

    def parse_body(self, kernel: Kernel, stream) -> None:
        serial = 0
        root = scope = _Scope(None, 0)
        counts = dict.fromkeys(("p", "16", "32", "64", "128"), 0)
        raw: list[tuple[_Scope, str, int]] = []
        for kind, head, line in stream:
            if kind == "{":
                serial += 1
                scope = _Scope(scope, serial)
            elif kind == "}":
                if head:
                    raise self.fail("a statement without its ';'", line)
                if scope is root:
                    break
                assert scope.parent is not None
                scope = scope.parent
            elif kind == ":":
                unique = head if scope is root else f"{head}#{scope.serial}"
                scope.labels[head] = unique
                kernel.labels[unique] = len(raw)
            elif head.startswith(".reg"):
                self.declare_registers(head, scope, counts, kernel, line)
            elif head.startswith("."):
                if re.match(r"\.(shared|local|param|const|global)\b", head):
                    kernel.variables += self.variable(head, line)
                elif not re.match(r"\.(loc|pragma|branchtargets|callprototype|alias)\b", head):
                    raise self.fail("unknown directive", line)
            elif head:
                raw.append((scope, head, line))
        else:
            raise self.fail(f"the body of {kernel.name} does not end", kernel.line)
        kernel.register_counts = counts
        kernel.instrs = [self.instruction(*item) for item in raw]

    def declare_registers(self, head, scope, counts, kernel, line) -> None:
        found = re.fullmatch(r"\.reg\s*(?:\.v[24]\s*)?\.(\w+)\s+(.*)", head, re.S)
        if not found or found[1] not in REGISTER_CLASS:
            raise self.fail("a register declaration that could not be read", line)
        cls = REGISTER_CLASS[found[1]]
        for item in found[2].split(","):
            item = item.strip()
            ranged = re.fullmatch(r"([\w$%]+)<(\d+)>", item)
            names = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [item]
            for name in names:
                reg = Reg(name, cls, counts[cls])
                counts[cls] += 1
                scope.regs[name] = reg
                kernel.register_names[name if scope.parent is None else f"{name}#{scope.serial}"] = reg

    # -- instructions -----------------------------------------------------------------------------------------
    def instruction(self, scope: _Scope, head: str, line: int) -> Instr:
        text = " ".join(head.split())
        guard, negated = None, False
        rest = text
        if rest.startswith("@"):
            found = re.match(r"@\s*(!?)\s*([\w$%]+)\s+(.*)$", rest)
            if not found:
                raise self.fail("a guard predicate that could not be read", line)
            guard = scope.find_reg(found[2])
            if guard is None:
                raise self.fail(f"unknown guard predicate {found[2]}", line)
            negated, rest = bool(found[1]), found[3]
        op, _, args = rest.partition(" ")
        if "{" in op or "[" in op:  # no blank between the opcode and its first operand
            cut = min(i for i in (op.find("{"), op.find("[")) if i >= 0)
            op, args = op[:cut], op[cut:] + " " + args
        is_call = op.split(".")[0] == "call"
        operands = () if is_call else tuple(self.operand(scope, a, line) for a in _split(args))
        return Instr(op, tuple(op.split(".")), operands, guard, negated, line, text)

    def operand(self, scope: _Scope, text: str, line: int):
        text = text.strip()
        if not text:
            raise self.fail("an empty operand", line)
        if text[0] == "{" and text[-1] == "}":
            return Vec(tuple(self.operand(scope, t, line) for t in _split(text[1:-1])))
        if text[0] == "[" and text[-1] == "]":
            return self.address(scope, text[1:-1], line)
        if text == "_":
            return Sink()
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(scope, first, line), self.operand(scope, second, line))
        if text[0] == "!":
            reg = scope.find_reg(text[1:].strip())
            if reg is None:
                raise self.fail(f"unknown register {text[1:]}", line)
            return Negated(reg)
        reg = scope.find_reg(text)
        if reg is not None:
            return reg
        imm = self.number(text)
        if imm is not None:
            return imm
        if text[0] == "%":
            return Special(text[1:])
        if text == "WARP_SZ":
            return Imm(32, "int")
        label = scope.find_label(text)
        if label is not None:
            return Label(label)
        found = re.fullmatch(r"([\w$]+)\s*(?:([+-])\s*(\w+))?", text)
        if found:
            return Symbol(found[1], int((found[2] or "+") + str(int(found[3] or "0", 0))))
        raise self.fail(f"operand {text!r} could not be read", line)

    def address(self, scope: _Scope, text: str, line: int) -> Addr:
        parts = _split(text)
        base_text = parts[0].strip()
        coords: tuple | None = None
        extra: tuple = ()
        if len(parts) > 1:
            vec = self.operand(scope, parts[1], line)
            coords = vec.items if isinstance(vec, Vec) else (vec,)
            extra = tuple(self.operand(scope, p, line) for p in parts[2:])
        found = re.fullmatch(r"([\w$%.]+?)\s*(?:\+\s*(-?\s*\w+)|-\s*(\w+))?", base_text)
        if not found:
            raise self.fail(f"address [{text}] could not be read", line)
        offset = int(found[2].replace(" ", ""), 0) if found[2] else -int(found[3], 0) if found[3] else 0
        base = self.operand(scope, found[1], line)
        if isinstance(base, Imm):
            return Addr(None, base.value + offset, coords, extra)
        if not isinstance(base, (Reg, Symbol)):
            raise self.fail(f"address [{text}] could not be read", line)
        return Addr(base, offset, coords, extra)

    @staticmethod
    def number(text: str) -> Imm | None:
        text = text.strip()
        if not text or not (text[0].isdigit() or text[0] in "-+~") or not _NUMBER.match(text):
            return None
        sign = text[0] if text[0] in "-+~" else ""
        body = text[len(sign) :].strip().rstrip("uU")
        if body[:2] in ("0f", "0F") and len(body) == 10:
            bits = int(body[2:], 16)
            return Imm(bits ^ 0x80000000 if sign == "-" else bits, "f32")
        if body[:2] in ("0d", "0D") and len(body) == 18:
            bits = int(body[2:], 16)
            return Imm(bits ^ (1 << 63) if sign == "-" else bits, "f64")
        if re.search(r"[.]", body) or (re.search(r"[eE]", body) and not body.lower().startswith("0x")):
            value = float(body) * (-1 if sign == "-" else 1)
            return Imm(int.from_bytes(struct.pack("<d", value), "little"), "f64")
        if body.lower().startswith(("0x", "0b")):
            number = int(body, 0)
        elif len(body) > 1 and body[0] == "0" and set(body) <= set("01234567"):
            number = int(body, 8)
        else:
            number = int(body)
        return Imm({"-": -number, "~": ~number}.get(sign, number), "int")


def _split(text: str) -> list[str]:
    """Split operands at the commas that stand outside of brackets and braces."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    if text[start:].strip():
        out.append(text[start:])
    return out
