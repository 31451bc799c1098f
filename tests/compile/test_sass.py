"""What tests read from machine code by themselves is what NVIDIA's tools say of it."""

from __future__ import annotations

import pytest
from cuda.bindings import nvrtc

from tests.sass import opcodes, registers, resources, spilled

# An array whose element is known when the kernel runs lies in local memory, as registers that spill do.
IN_MEMORY = """
extern "C" __global__ void in_memory(int* x) {
  int held[40];
  for (int i = 0; i < 40; ++i) held[i] = x[i] * x[i + 1];
  __syncthreads();
  for (int i = 0; i < 40; ++i) held[x[i] % 40] += held[x[i + 40] % 40];
  x[threadIdx.x] = held[x[threadIdx.x] % 40];
}"""
IN_REGISTERS = 'extern "C" __global__ void in_registers(int* x) { x[threadIdx.x] += x[threadIdx.x + 40]; }'


def compiled(source: str) -> bytes:
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return bytes(cubin)


@pytest.mark.parametrize(("source", "spills"), [(IN_MEMORY, True), (IN_REGISTERS, False)])
def test_registers_and_spills(source, spills):
    cubin = compiled(source)
    said = resources(cubin)
    assert (registers(cubin), spilled(cubin)) == (said["REG"], said["STACK"])
    assert bool(spilled(cubin)) == spills == any(name.startswith(("LDL", "STL")) for name in opcodes(cubin))
