"""Providers of `tuning.bench` for scaled operands of fp8: torch's `_scaled_mm` and `cutegemm.gemm`, recipe by recipe,
and DeepGEMM with scales of blocks.

All scales are 1, so that the result is that of the plain product, which the benchmark checks. They are read and
multiplied all the same. Of blocks, torch and DeepGEMM want A's scales with contiguous columns and ours lie as
quantization writes them: what a transposition would cost is not in their times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import cutegemm
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem
from cutegemm.tuner.timing import Call
from tuning.bench_basis import Inputs, NotServed, Prepared, Provider, tell

RECIPES = ("tensor", "rows", "blocks")


def scales(problem: Problem, recipe: str, device: torch.device, columns: bool = False) -> tuple[Any, Any]:
    """The scales of A and B. columns: those of A's blocks lie column after column, those of B's along K."""
    m, n, k = problem.m, problem.n, problem.k
    blocks = -(-k // 128)
    shapes = {"tensor": ((), ()), "rows": ((m, 1), (1, n)), "blocks": ((m, blocks), (blocks, -(-n // 128)))}[recipe]
    found = [torch.ones(shape, device=device) for shape in shapes]
    if columns and recipe == "blocks":
        found = [each.t().contiguous().t() for each in found]
    return found[0], found[1]


def torch_call(problem: Problem, recipe: str, fast: bool, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Call:
    """torch's product of operands of one byte: `_scaled_mm`, of int8 `_int_mm`. Raises what torch raises."""
    if problem.dtype == "int8":
        torch._int_mm(a, b, out=out)  # refuses 16 rows or fewer, among others
        return partial(torch._int_mm, a, b, out=out)
    scale_a, scale_b = scales(problem, recipe, a.device, columns=True)
    of_result = torch.ones((), device=a.device) if out.element_size() == 1 else None
    call = partial(
        torch._scaled_mm, a, b, scale_a, scale_b, scale_result=of_result, out_dtype=out.dtype, use_fast_accum=fast,
        out=out,
    )  # fmt: skip
    call()
    return call


class ScaledTorch(Provider):
    """`torch._scaled_mm` with scales of a recipe. fast: with fast accumulation."""

    def __init__(self, recipe: str, fast: bool = False) -> None:
        self.name = f"torch-{recipe}{'-fast' if fast else ''}"
        self._recipe, self._fast = recipe, fast

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        if problem.dtype not in ("e4m3", "e5m2"):
            raise NotServed(f"torch._scaled_mm multiplies fp8, not {problem.dtype}")
        try:
            return Prepared([torch_call(problem, self._recipe, self._fast, a, b, out) for a, b in inputs])
        except Exception as why:  # whatever torch does not take
            raise NotServed(f"torch._scaled_mm: {why}") from why


class ScaledCutegemm(Provider):
    """`cutegemm.gemm` with scales of a recipe. accumulate: as there."""

    def __init__(self, recipe: str, accumulate: str | None = None) -> None:
        self.name = f"cutegemm-{recipe}{'-fast' if accumulate else ''}"
        self._recipe, self._accumulate = recipe, accumulate

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        calls: list[Call] = []
        for a, b in inputs:
            scale_a, scale_b = scales(problem, self._recipe, a.device)
            options = {"out": out, "scale_a": scale_a, "scale_b": scale_b, "accumulate": self._accumulate}
            try:
                cutegemm.prepare(a, b, **options)
            except (GemmError, ValueError, TypeError) as why:
                raise NotServed(str(why)) from why
            calls.append(partial(cutegemm.gemm, a, b, **options))
        return Prepared(calls)


class DeepGemm(Provider):
    """DeepGEMM as of 7 May 2025, its last version in plain Python: blocks of 1 x 128 of A with 128 x 128 of B."""

    name = "deep_gemm"

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        if (problem.dtype, problem.precision, problem.out_dtype) != ("e4m3", "ieee", "bf16"):
            kind = f"{problem.dtype} to {problem.out_dtype}, {problem.precision}"
            raise NotServed(f"deep_gemm multiplies e4m3 to bf16, promoted, not {kind}")
        if problem.signature.majors != "tn":
            raise NotServed(f"deep_gemm reads both operands along K, majors tn, not {problem.signature.majors}")
        if problem.n % 64 or problem.k % 128:
            raise NotServed(f"deep_gemm takes multiples of 64 for N and of 128 for K, not {problem.n} and {problem.k}")
        tell(self.name, problem, "nvcc compiles its kernel")
        try:
            import deep_gemm

            multiply, laid = deep_gemm.gemm_fp8_fp8_bf16_nt, deep_gemm.get_col_major_tma_aligned_tensor
            calls: list[Call] = []
            for a, b in inputs:
                scale_a, scale_b = scales(problem, "blocks", a.device)
                left, right = (a, laid(scale_a)), (b.t(), scale_b.t().contiguous())
                calls.append(partial(multiply, left, right, out))
            calls[0]()
        except Exception as why:  # no nvcc, other versions of it, no headers of CUTLASS
            raise NotServed(f"deep_gemm: {type(why).__name__}: {why}{HOW_TO_INSTALL[self.name]}") from why
        return Prepared(calls)


HOW_TO_INSTALL = {
    "deep_gemm": "; commit d75b218 of github.com/deepseek-ai/DeepGEMM (7 May 2025) runs from its source folder: name "
    "it in PYTHONPATH, link the folders cute and cutlass of nvidia-cutlass's headers (cutlass_library/source/include) "
    "into its deep_gemm/include, and install cuda-bindings and nvcc (CUDA_HOME or DG_JIT_NVCC_COMPILER)"
}
"""What a message adds of providers that no package index has."""


MAKERS: dict[str, tuple[Callable[[], Any], str, str]] = {
    **{f"torch-{recipe}": (partial(ScaledTorch, recipe), "torch", "torch") for recipe in RECIPES},
    **{f"torch-{recipe}-fast": (partial(ScaledTorch, recipe, True), "torch", "torch") for recipe in RECIPES[:2]},
    **{f"cutegemm-{recipe}": (partial(ScaledCutegemm, recipe), "cutegemm", "cutegemm") for recipe in RECIPES},
    **{
        f"cutegemm-{recipe}-fast": (partial(ScaledCutegemm, recipe, "fast"), "cutegemm", "cutegemm")
        for recipe in RECIPES[:2]
    },
    "deep_gemm": (DeepGemm, "deep_gemm", "deep_gemm"),
}
"""Rows of `bench_providers`' table: provider, module that must be importable, its package."""
