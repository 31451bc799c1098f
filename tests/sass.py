"""Reading machine code with NVIDIA's disassemblers from PyPI; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest


def _tool(name: str) -> str:
    found = next(Path(sys.prefix).rglob(f"nvidia/**/bin/{name}"), None)
    path = str(found) if found else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (pip install nvidia-cuda-{name})")
    return path


def _run(name: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(name), *arguments, file.name], capture_output=True, text=True, check=True).stdout


def opcodes(cubin: bytes) -> Counter[str]:
    """How often each SASS opcode (with its modifiers) stands in the code."""
    text = _run("nvdisasm", "-c", cubin=cubin)
    return Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", text, re.MULTILINE))


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL of the kernel, from cuobjdump."""
    text = _run("cuobjdump", "-res-usage", cubin=cubin)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
