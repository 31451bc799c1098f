"""The backend "legacy": the ladder of CUDA C++ kernels behind the library's call.

Served: fp32 on the fp32 rungs, fp16 and bf16 on the 16-bit rungs; every major of A and B and padded leading dimensions;
C of any dtype and strides; batches, also broadcast ones; every size, K = 0 included. Refused: bias and activation,
TF32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from cutegemm.backend import Backend
from cutegemm.choice.footprint import Footprint
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, Signature
from cutegemm.problem.dtypes import why_not_rounded
from legacy_cuda import build as builder
from legacy_cuda import footprint, space
from legacy_cuda.config import WORKS, LegacyConfig, parse, why_invalid
from legacy_cuda.kernel import MAX_GRID_X, LegacyKernel
from legacy_cuda.rungs import LADDERS

TAKES = tuple(dtype for dtypes in LADDERS.values() for dtype in dtypes)
MAX_EXTENT = 2**31 - 1025  # a tile's end must fit a 32-bit integer


class LegacyBackend(Backend[LegacyConfig]):
    """See the module docstring and `cutegemm.backend`."""

    name = "legacy"
    compiler = "nvidia-cuda-nvrtc"
    works = WORKS

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        """None, or a sentence saying why not and what would do."""
        if refused := self.why_work_refused(problem.signature):
            return refused
        epilogue = problem.epilogue
        if arch.capability < (8, 0):
            return f"backend 'legacy' needs compute capability 8.0 or newer, {arch.name} has {arch.capability}"
        if problem.dtype not in TAKES:
            return f"backend 'legacy' multiplies {', '.join(TAKES)}; these operands are {problem.dtype}"
        if refused := why_not_rounded("backend 'legacy' rounds", problem.signature.narrow):
            return refused
        if problem.precision != "ieee":
            return "backend 'legacy' computes fp32 in full precision; for TF32 use backend 'cute' or 'cutlass2x'"
        if epilogue.bias_dtype is not None:
            return "backend 'legacy' adds no bias; backend 'cute' does"
        if epilogue.activation is not None:
            return f"backend 'legacy' applies no activation ({epilogue.activation}); backend 'cute' does"
        for name, extent in (("M", problem.m), ("N", problem.n), ("K", problem.k)):
            if extent > MAX_EXTENT:
                return f"backend 'legacy' takes {name} up to {MAX_EXTENT}, got {extent}"
        if not problem.d.row_major:
            return "backend 'legacy' writes D row-major; the transposed problem has it so"
        return None

    def check(self, config: LegacyConfig, problem: Problem, arch: Arch) -> str | None:
        """None when `config` can serve the problem, else why not."""
        refused = self.supports(problem, arch)
        if refused:
            return refused
        bm, bn, _ = config.tile()
        tiles = -(-problem.m // bm) * -(-problem.n // bn)
        if tiles > MAX_GRID_X:
            return f"{tiles} output tiles; a grid has at most {MAX_GRID_X}: take a larger tile"
        return why_invalid(config, problem.signature, arch)

    def configs(self, problem: Problem, arch: Arch) -> Iterable[LegacyConfig]:
        """Every valid configuration of the two autotuned rungs, then the rungs with their defaults."""
        return space.configs(problem.signature, arch)

    def candidates(self, signature: Signature, arch: Arch) -> Iterable[tuple[LegacyConfig, tuple[int, ...]]]:
        """(configuration, no splits) of the few that `cutegemm.choice.heuristics` may take."""
        return ((config, ()) for config in space.candidates(signature, arch))

    def default(self, problem: Problem, arch: Arch) -> LegacyConfig:
        """The configuration to use when nothing was measured."""
        return space.default(problem, arch)

    def parse(self, text: str) -> LegacyConfig:
        """A configuration from its text; see `legacy_cuda.config.parse`."""
        return parse(text)

    def build(self, signature: Signature, config: LegacyConfig, arch: Arch) -> LegacyKernel:
        """The kernel. Raises ValueError for a configuration that cannot serve the signature; compiles at first use."""
        reason = why_invalid(config, signature, arch)
        if reason is not None:
            raise ValueError(f"config: {config} cannot serve {signature}: {reason}")
        return _kernel(signature, config, arch)

    def sources(self, config: str) -> tuple[Path, ...]:
        return builder.SOURCES

    def footprint(self, config: LegacyConfig, signature: Signature, arch: Arch) -> Footprint:
        """What one CTA does, for the cost model."""
        return footprint.of(config, signature, arch)


@lru_cache(maxsize=512)
def _kernel(signature: Signature, config: LegacyConfig, arch: Arch) -> LegacyKernel:
    return LegacyKernel(signature, config, arch)


BACKEND = LegacyBackend()
