"""Reading machine code with NVIDIA's disassemblers from PyPI; no GPU is needed."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from cutegemm.hardware.cubin import usage


@functools.cache
def _tool(name: str) -> str:
    found = next(Path(sysconfig.get_path("purelib"), "nvidia").glob(f"*/bin/{name}"), None)
    path = str(found) if found else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (pip install nvidia-cuda-{name})")
    return path


def _run(name: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(name), *arguments, file.name], capture_output=True, text=True, check=True).stdout


@functools.lru_cache(maxsize=4)
def opcodes(cubin: bytes) -> Counter[str]:
    """How often each SASS opcode (with its modifiers) stands in the code."""
    text = _run("nvdisasm", "-c", "-ndf", cubin=cubin)  # without its analysis of the data's flow: a third of the time
    return Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", text, re.MULTILINE))


@functools.lru_cache(maxsize=4)
def instructions(cubin: bytes) -> list[str]:
    """The SASS of each instruction, in order, with its guard and operands."""
    text = _run("nvdisasm", "-c", "-ndf", cubin=cubin)
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", text, re.MULTILINE)


def overlaps(cubin: bytes) -> bool:
    """Whether the WGMMAs of a k tile follow one another without a wait. Where ptxas cannot follow who writes the
    accumulators it serializes them, and each of them ends a group of its own (`gsb0`): 6 to 12 % slower on an H200.
    """
    products = [text for text in instructions(cubin) if re.match(r"(@!?U?P\w+ )?[HQI]GMMA", text)]
    return bool(products) and sum("gsb0" in text for text in products) <= len(products) / 2


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL of the kernel, from cuobjdump. `registers` asks no other program, and is quicker."""
    text = _run("cuobjdump", "-res-usage", cubin=cubin)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def registers(cubin: bytes) -> int:
    """The most registers that a thread of its kernels has."""
    return max(kernel.registers for kernel in usage(cubin))


def spilled(cubin: bytes) -> int:
    """Bytes of stack that its kernels have: no kernel of the collection needs any but for registers that spill."""
    return sum(kernel.stack for kernel in usage(cubin))


def crowded(cubin: bytes) -> float:
    """Share of the FFMA that read two registers of one parity: a quarter of an SM reads an even one and an odd one a
    cycle. What `.reuse` kept of the FFMA before in the same place is not read, also where others stand between the two.
    """
    kept: list[str] = []
    found = []
    for text in instructions(cubin):
        if match := re.fullmatch(r"FFMA R\d+, (-?R\d+(?:\.reuse)?), (-?R\d+(?:\.reuse)?), (-?R\d+(?:\.reuse)?)", text):
            names = [each.removesuffix(".reuse") for each in match.groups()]
            read = {int(name.lstrip("-R")) for place, name in enumerate(names) if kept[place : place + 1] != [name]}
            found.append(len({number % 2 for number in read}) < len(read))
            kept = [name if each.endswith(".reuse") else "" for name, each in zip(names, match.groups(), strict=True)]
    return sum(found) / len(found)
