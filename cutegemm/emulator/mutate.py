"""Mutation testing of kernels: take each synchronization instruction away, or weaken it, and see whether anything
notices.

A kernel's synchronization is right only if every piece of it is needed and its absence would be seen. `mutations`
lists, for a PTX text, one changed text for each way of breaking one synchronization instruction; `tests/mutation.py`
runs them and says what noticed.

Text is changed at the instruction alone, so line numbers stay, and everything else of the kernel is the compiler's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_STATEMENT = re.compile(
    r"(?<![\w$.%])(?P<guard>@!?%?[\w$]+\s+)?"
    r"(?P<op>(?:bar|barrier|mbarrier|cp|fence|membar|wgmma|griddepcontrol|setmaxnreg|ld|st|red|atom)(?:\.[\w:]+)+)"
    r"(?P<arguments>[^;]*);"
)
_ONLY_DELETED = ("bar", "barrier", "membar", "fence", "griddepcontrol")
_REGISTER = re.compile(r"%[a-zA-Z]+\d+")


@dataclass(frozen=True)
class Mutation:
    """One broken version of a kernel.

    Attributes:
        site: the instruction with its registers made anonymous, and which of those that read alike it is: ``bar.sync 0
        #2``.
            Stable when a recompilation moves lines or renumbers registers.
        change: what is done to it: ``delete``, ``wait 1 more``, ``16 bytes fewer``, ...
        line: its line in the PTX (1-based).
        text: the instruction as it stands there.
        ptx: the whole changed text.
    """

    site: str
    change: str
    line: int
    text: str
    ptx: str = field(repr=False)

    def __str__(self) -> str:
        return f"line {self.line}: {self.text.strip()} -> {self.change}"


def mutations(ptx: str) -> list[Mutation]:
    """Every mutation of the synchronization in a PTX text, in the order of its lines.

    Commits and waits of cp.async groups in a text that issues no cp.async are left out: their groups are always empty.
    """
    visible = re.sub(r"//[^\n]*|/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match.group()), ptx, flags=re.DOTALL)
    copies = re.search(r"(?<![\w$.%])cp\.async\.c[ag]\.", visible) is not None
    seen: Counter[str] = Counter()
    found = []
    for match in _STATEMENT.finditer(visible):
        changes = list(_changes(match["op"], match["arguments"].strip(), match["guard"] or ""))
        if not changes or (not copies and re.match(r"cp\.async\.(commit|wait)", match["op"])):
            continue
        start = match.start("guard") if match["guard"] else match.start("op")
        text = ptx[start : match.end()]
        shape = _REGISTER.sub("%", re.sub(r"\s+", " ", text.rstrip(";")))
        seen[shape] += 1
        line = ptx.count("\n", 0, start) + 1
        for change, replacement in changes:
            broken = ptx[:start] + replacement + ptx[match.end() :]
            found.append(Mutation(f"{shape} #{seen[shape]}", change, line, text, broken))
    return found


def _changes(op: str, arguments: str, guard: str) -> Iterator[tuple[str, str]]:
    """(name of the change, replacement text) for an instruction; nothing for one that does not synchronize."""
    operands = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", arguments)] if arguments else []
    parts = op.split(".")
    family = ".".join(parts[:2])
    if parts[0] == "barrier" and parts[1] == "cluster":
        yield "delete", ""
        if "arrive" in parts and "relaxed" not in parts:
            kept = [part for part in parts if part != "release"]
            yield "relaxed", f"{guard}{'.'.join([*kept[:3], 'relaxed', *kept[3:]])};"
    elif parts[0] == "setmaxnreg":
        yield "delete", ""
        yield "8 registers more", f"{guard}{op} {int(operands[0], 0) + 8};"
        if not guard:
            # Warps of a one-dimensional block: threads 0 to 31 of each 128.
            yield (
                "not in the first warp",
                "{ .reg .pred %mutant; .reg .b32 %place; mov.u32 %place, %tid.x; and.b32 %place, %place, 96; "
                f"setp.ne.u32 %mutant, %place, 0; @%mutant {op} {arguments}; }}",
            )
    elif parts[0] in _ONLY_DELETED or family in ("wgmma.fence", "wgmma.commit_group"):
        yield "delete", ""
    elif family == "wgmma.wait_group" or (parts[0] == "cp" and "wait_group" in parts):
        yield "wait 1 more", f"{guard}{op} {int(operands[0], 0) + 1};"
        yield "delete", ""
    elif parts[0] == "cp" and {"commit_group", "wait_all", "mbarrier"} & set(parts):
        yield "delete", ""
    elif parts[0] == "mbarrier":
        yield from _mbarrier_changes(op, parts, operands, guard)
    elif parts[0] in ("ld", "st", "red", "atom") and {"acquire", "release", "acq_rel"} & set(parts):
        weaker = ".".join("relaxed" if part in ("acquire", "release", "acq_rel") else part for part in parts)
        yield "relaxed", f"{guard}{weaker} {arguments};"


def _mbarrier_changes(op: str, parts: Sequence[str], operands: Sequence[str], guard: str) -> Iterator[tuple[str, str]]:
    if parts[1] in ("try_wait", "test_wait"):
        yield "do not wait", f"{guard}setp.eq.u32 {operands[0]}, 0, 0;"
    elif parts[1] in ("init", "inval"):
        yield "delete", ""
        if parts[1] == "init":
            yield "expect 1 arrival fewer", _with_changed(op, operands, 1, 1, guard)
    elif "expect_tx" in parts:
        yield "16 bytes fewer", _with_changed(op, operands, len(operands) - 1, 16, guard)
        if parts[1] == "arrive":
            plain = op.replace(".expect_tx", "")
            yield "expect no bytes", f"{guard}{plain} {', '.join(operands[:-1])};"
        yield "delete", ""
    elif parts[1] in ("arrive", "arrive_drop", "complete_tx"):
        yield "delete", ""


def _with_changed(op: str, operands: Sequence[str], which: int, less: int, guard: str) -> str:
    """The instruction with one operand made smaller by ``less``, through a register of its own."""
    value = operands[which]
    prepare = f"sub.u32 %mutant, {value}, {less};"
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", value):
        prepare = f"mov.u32 %mutant, {int(value, 0) - less};"
    changed = [*operands[:which], "%mutant", *operands[which + 1 :]]
    return f"{{ .reg .b32 %mutant; {prepare} {guard}{op} {', '.join(changed)}; }}"
