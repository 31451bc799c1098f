"""The C++ part calls the compiled kernels' own launchers: they ask the driver for the same launch, to the last byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm.cute import FAMILIES, workspace
from cutegemm.cute import compile as compiler
from cutegemm.cute.quantize import build as quantize_build
from cutegemm.cute.quantize.config import Tile
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.emulator.capture import HostObject
from cutegemm.emulator.recorder import recording
from tuning import host_stub

pytest.importorskip("llvmlite")

_build, _build_quantize = compiler.build, quantize_build.build
hosts: list[HostObject] = []
from_python: list[int] = []
"""An entry for every launch that Python passes on."""
dropping: list[bool] = []
"""With an entry Python launches nothing: a launcher runs while it is recorded only."""


class LinkedKernel(StandaloneKernel):
    """A compiled kernel whose launcher runs here and has its calls of CUDA written down."""

    def __init__(self, signature: Any, config: Any, arch: Any) -> None:
        if isinstance(config, Tile):
            made: compiler.CuteKernel = _build_quantize(signature, config, arch)
        else:
            made = _build(signature, config, arch, lambda: FAMILIES[config.family].make_operator(config, signature))
        super().__init__(signature, config, arch, made._entry)
        hosts.append(HostObject.load(made.object_path, compiler.FUNCTION, made.ptx, arch=arch))
        self._address = hosts[-1]._tracker[f"__tvm_ffi_{compiler.FUNCTION}"]
        function = compiler.function_at(self._address)

        def counted(*arguments: Any) -> None:
            from_python.append(1)
            if not dropping:
                function(*arguments)

        self._function = counted


def operand(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=dtype)


@pytest.mark.parametrize("case", ["TMA", "C and bias", "swapped", "K split"])
@pytest.mark.product(keep=1)
def test_both_ways_ask_for_one_launch(case, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    # Of float32 no cluster along K does what split-K does.
    dtype = torch.float32 if case in {"C and bias", "K split"} else torch.bfloat16
    k = 16384 if case == "K split" else 64
    a, b = operand(64, k, dtype), operand(64, k, dtype).t()
    out = operand(64, 64, dtype)
    options: dict[str, Any] = {"out": out.t() if case == "swapped" else out}
    if case == "C and bias":
        options |= {"c": operand(64, 64, dtype), "beta": 0.5, "bias": torch.ones(64), "alpha": 2.0}
    taken, memory = [], torch.zeros(2**26, dtype=torch.int8)  # a workspace at one place for both ways
    for in_cpp in (False, True):
        hosts.clear()
        with host_stub.on_cpu(LinkedKernel, in_cpp=in_cpp), monkeypatch.context() as patch:
            patch.setattr(workspace, "_allocate_on", lambda *_: memory)
            cutegemm.prepare(a, b, **options)
            (host,) = hosts
            for _ in range(2):
                from_python.clear()
                with recording(host.module) as recorded:
                    cutegemm.gemm(a, b, **options)
                assert not recorded.problems
            assert len(from_python) == (not in_cpp)
            assert bool(workspace.default._of) == (case == "K split")
            taken.append(recorded.operations)
    python, cpp = taken
    assert len(python) == len(cpp) == 1
    assert described(python[0], host) == described(cpp[0], host)


FP8 = torch.float8_e4m3fn
X = operand(32, 256, torch.bfloat16)
SQUARE = operand(32, 32, torch.bfloat16)
VALUES, ROWS, BLOCKS = X.to(FP8), torch.ones(32, 1), torch.ones(32, 2)
KINDS: dict[str, Callable[[], Any]] = {
    "rows": lambda: cutegemm.quantize(X, FP8),
    "blocks": lambda: cutegemm.quantize(X, FP8, "blocks"),
    "a given scale": lambda: cutegemm.quantize(X, FP8, scale=ROWS),
    "scales of rows": lambda: cutegemm.gemm(VALUES, VALUES.t(), scale_a=ROWS, scale_b=ROWS.t(), bias=ROWS[:, 0]),
    "scales of blocks": lambda: cutegemm.gemm(VALUES, VALUES.t(), scale_a=BLOCKS, scale_b=torch.ones(2, 1)),
    "no k": lambda: cutegemm.gemm(X[:, :0], X[:, :0].t(), epilogue=lambda acc, x: acc + x * x, operands=(SQUARE,)),
}


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.product(keep=2)
def test_both_ways_ask_for_one_launch_of_other_kinds(case, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    taken = []
    for in_cpp in (False, True):
        hosts.clear()
        with host_stub.on_cpu(LinkedKernel, in_cpp=in_cpp):
            dropping.append(True)
            KINDS[case]()
            dropping.clear()
            (host,) = hosts
            from_python.clear()
            with recording(host.module) as recorded:
                KINDS[case]()
            assert len(from_python) == (not in_cpp)
            assert not recorded.problems
            (launch,) = recorded.operations
            taken.append(without_addresses(launch, host))
    python, cpp = taken
    assert python == cpp


def without_addresses(launch: Any, host: HostObject) -> Any:
    """`described`, with zeros for the addresses of tensors that each call makes anew."""
    found = described(launch, host)
    params = bytearray(found.params)
    for offset, size in host.module.entries[launch.kernel].params:
        if size in (8, 128):
            params[offset : offset + 8] = bytes(8)
    return replace(found, params=bytes(params))


def described(launch: Any, host: HostObject) -> Any:
    """The launch without what a tensor map has in its second half, which is nothing: whatever lay on the stack."""
    params = bytearray(launch.params)
    for offset, size in host.module.entries[launch.kernel].params:
        if size == 128:
            params[offset + 64 : offset + 128] = bytes(64)
    return replace(launch, params=bytes(params))
