"""What the headers of a PTX module say: its entries, their parameters and requirements, and its target."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.hardware.arch import get as get_arch


class CaptureError(GemmError):
    """The host code of a kernel could not be linked, refused its arguments, or asked for a launch that no GPU
    accepts.
    """


@dataclass(frozen=True)
class Entry:
    """What the header of a PTX ``.entry`` says.

    params: (offset, size) in bytes of each parameter. required_block: ``.reqntid``. required_cluster:
    ``.reqnctapercluster``. static_smem: bytes of ``.shared`` variables declared in the body.
    """

    name: str
    params: tuple[tuple[int, int], ...]
    required_block: tuple[int, int, int] | None
    required_cluster: tuple[int, int, int] | None
    static_smem: int

    @property
    def param_bytes(self) -> int:
        """Bytes of the whole parameter block."""
        return self.params[-1][0] + self.params[-1][1] if self.params else 0


_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+(?:\d+\s+)?)*)?[\w$%]+(?:\s*\[\s*(\d+)\s*\])?"
)
_SHARED = re.compile(r"(?<!\.extern )\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+[\w$%]+((?:\s*\[\s*\d+\s*\])*)")


def ptx_entries(ptx: str) -> dict[str, Entry]:
    """The entries of a PTX module by name, read off their headers. Raises CaptureError for a header it cannot
    read.
    """
    found: dict[str, Entry] = {}
    text = re.sub(r"//[^\n]*", "", ptx)
    for head, following in itertools.pairwise([*_ENTRY.finditer(text), None]):
        assert head is not None
        name, declared, directives = head.group(1), head.group(2) or "", head.group(3)
        offset, params = 0, []
        for piece in filter(None, (part.strip() for part in declared.split(","))):
            match = _PARAM.fullmatch(piece)
            if match is None:
                raise CaptureError(f"PTX entry {name}: the parameter {piece!r} has a form that is not known here")
            align, kind, count = match.groups()
            width = _type_bytes(kind, name)
            step = int(align) if align else width
            offset = -(-offset // step) * step
            params.append((offset, width * int(count or 1)))
            offset += params[-1][1]
        body = text[head.end() : following.start() if following else len(text)]
        smem = 0
        for align, kind, dims in _SHARED.findall(body):
            width = _type_bytes(kind, name)
            step = int(align) if align else width
            smem = -(-smem // step) * step + width * math.prod(int(n) for n in re.findall(r"\d+", dims))
        found[name] = Entry(
            name, tuple(params), _dims(directives, "reqntid"), _dims(directives, "reqnctapercluster"), smem
        )
    return found


def _type_bytes(kind: str, entry: str) -> int:
    match = re.fullmatch(r"[bsuf](\d+)", kind)
    if match is None:
        raise CaptureError(f"PTX entry {entry}: the type .{kind} is not known here")
    return int(match.group(1)) // 8


def _dims(directives: str, name: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{name}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    return None if match is None else (int(match.group(1)), int(match.group(2) or 1), int(match.group(3) or 1))


def ptx_arch(ptx: str) -> Arch:
    """The architecture that a PTX module is compiled for, from its ``.target``. Raises CaptureError without
    one.
    """
    match = re.search(r"^\s*\.target\s+(sm_\d+)", ptx, re.MULTILINE)
    if match is None:
        raise CaptureError("PTX: no .target line")
    return get_arch(match.group(1))
