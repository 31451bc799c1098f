"""Backend "cutlass2x": CUTLASS 2.x `device::Gemm`, instantiated by CUTLASS's own Python emitter and compiled by nvcc.

    config    a configuration, its text form and the one rule of validity; the published tunings
    candidates, footprint   what the heuristic chooses among, and the cost model's view of it
    emit      configuration -> C++         (`python -m cutegemm.cutlass2x --config ... --emit` prints it)
    toolkit   nvcc and the headers: a CUDA toolkit or NVIDIA's PyPI packages
    build     C++ -> libraries in the kernel store, several kernels a file, files in parallel
    kernel    the launch, and its capture for the emulator

Served: fp16, bf16, fp32 as IEEE (CUDA cores), TF32 and 3xTF32; every major of A and B, padded and misaligned operands;
D of any dtype; C row-major of D's dtype, or a bias of D's dtype along its columns; relu, gelu, silu; batches; K = 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cutegemm.backend import Backend
from cutegemm.cutlass2x import candidates, emit, footprint
from cutegemm.cutlass2x.config import FORM, TAKES, WORKS, Cutlass2xConfig, narrowed, published, space
from cutegemm.errors import GemmError
from cutegemm.problem.dtypes import why_not_taken

if TYPE_CHECKING:
    from cutegemm.choice.footprint import Footprint
    from cutegemm.cutlass2x.kernel import Cutlass2xKernel
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem, Signature

__all__ = ["BACKEND", "FORM", "Cutlass2xConfig", "build_many", "published"]

MAX_GRID_Y = 65535


class Cutlass2xBackend(Backend[Cutlass2xConfig]):
    """See `cutegemm.backend`."""

    name = "cutlass2x"
    compiler = "nvidia-cutlass"
    works = WORKS

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        """None, or a sentence saying why not and what would do."""
        refused = self._refused(problem, arch)
        if refused is None and next(self._defaults(problem, arch), None) is None:
            return f"no configuration of it fits {arch.name} and this size; backend 'cute' may"
        return refused

    def _refused(self, problem: Problem, arch: Arch) -> str | None:
        """Why no configuration can, whatever its tile."""
        if refused := self.why_work_refused(problem.signature):
            return refused
        epilogue, c = problem.epilogue, problem.c
        if arch.capability < (8, 0):
            return f"it needs compute capability 8.0 or newer; {arch.name} has {'.'.join(map(str, arch.capability))}"
        if refused := why_not_taken("it multiplies", TAKES, problem.signature.kind):
            return refused
        if epilogue.activation not in emit.ACTIVATIONS:
            return (
                f"it has no activation {epilogue.activation!r}, only {', '.join(map(repr, emit.ACTIVATIONS))}; "
                "backend 'cute' has it"
            )
        if epilogue.c_dtype is not None and epilogue.bias_dtype is not None:
            return "its epilogues read either C or a bias; backend 'cute' reads both"
        if epilogue.bias_dtype is not None and epilogue.bias_axis == "m":
            return "it adds a bias along the columns of a row-major result only; backend 'cute' adds it along rows too"
        for what, dtype in (("C", epilogue.c_dtype), ("a bias", epilogue.bias_dtype)):
            if dtype not in (None, problem.out_dtype):
                return f"it reads {what} of the result's dtype, {problem.out_dtype}, not {dtype}; backend 'cute' does"
        if epilogue.c_dtype is not None and c is not None and not c.row_major:
            return (
                "it reads a C only whose rows are contiguous (whose columns are, if those of out are); pass such a "
                "copy, or take backend 'cute', which reads any strides"
            )
        if not problem.d.row_major:
            return "it writes D row-major; the transposed problem has it so"
        return None

    def check(self, config: Cutlass2xConfig, problem: Problem, arch: Arch) -> str | None:
        """None when `config` can serve the problem, else why not."""
        return self._refused(problem, arch) or self._unfit(config, problem, arch)

    def _unfit(self, config: Cutlass2xConfig, problem: Problem, arch: Arch) -> str | None:
        """Why `config` cannot serve a problem that another may."""
        invalid = config.why_invalid(problem.signature, arch)
        if invalid:
            return invalid
        if problem.batch > 1 and (config.splits > 1 or config.swizzle == "streamk"):
            return "split-K and stream-K take one product, not a batch"
        if problem.k == 0 and (config.splits > 1 or config.swizzle == "streamk"):
            return "split-K and stream-K divide K, and there is none"
        bm, bn, _ = config.threadblock
        tiles_m, tiles_n = -(-problem.m // bm), -(-problem.n // bn)
        rows = tiles_m if config.swizzle == "h" else tiles_n
        if rows > MAX_GRID_Y and config.swizzle != "streamk":
            return f"{rows} tiles along {'M' if config.swizzle == 'h' else 'N'}; a grid has at most {MAX_GRID_Y}"
        if tiles_m * tiles_n > 2**31 - 1:
            return f"{tiles_m * tiles_n} tiles; at most {2**31 - 1}"
        return None

    def configs(self, problem: Problem, arch: Arch) -> Iterator[Cutlass2xConfig]:
        """Every valid configuration, the published ones first."""
        if self._refused(problem, arch):
            return
        listed = set()
        for config in (*published(), *space(problem.signature)):
            narrow = narrowed(config, problem.signature)
            if narrow not in listed and self._unfit(narrow, problem, arch) is None:
                listed.add(narrow)
                yield narrow

    def candidates(self, signature: Signature, arch: Arch) -> Iterator[tuple[Cutlass2xConfig, tuple[int, ...]]]:
        """(configuration, splits that it may also have) of the few that `cutegemm.choice.heuristics` may take."""
        for config in candidates.listed(signature):
            if config.why_invalid(signature, arch) is None:
                yield config, (2, 4, 8)

    def missing(self) -> str | None:
        """What the toolkit lacks; None when kernels can be compiled here."""
        from cutegemm.cutlass2x import toolkit

        try:
            toolkit.find()
        except GemmError as why:
            return str(why)
        return None

    def default(self, problem: Problem, arch: Arch) -> Cutlass2xConfig:
        """The configuration to use when nothing was measured: the largest tile that gives every SM one.

        When even the smallest does not and K is long, K is split until the SMs are busy.
        """
        last = None
        for config in self._defaults(problem, arch):
            last = config
            if _tiles(config, problem) * problem.batch >= arch.sm_count:
                return config
        if last is None:
            raise ValueError(self.supports(problem, arch))
        splits = min(8, arch.sm_count // max(1, _tiles(last, problem)), problem.k // 1024)
        if problem.batch == 1 and splits > 1:
            return replace(last, splits=splits)
        return last

    def parse(self, text: str) -> Cutlass2xConfig:
        """A configuration from its text; see `cutegemm.cutlass2x.config`."""
        return Cutlass2xConfig.parse(text)

    def build(self, signature: Signature, config: Cutlass2xConfig, arch: Arch) -> Cutlass2xKernel:
        """The kernel, from the kernel store or compiled now (10 to 20 s, with a log line).

        Raises ValueError for a configuration that cannot serve the signature, GemmError when nvcc refuses it or there
        is no toolkit.
        """
        return build_many([(signature, config)], arch)[0]

    def sources(self, config: str) -> tuple[Path, ...]:
        from cutegemm.cutlass2x import build

        return build.SOURCES

    def footprint(self, config: Cutlass2xConfig, signature: Signature, arch: Arch) -> Footprint:
        """What one CTA does, for the cost model."""
        return footprint.of(config, signature, arch)

    def _defaults(self, problem: Problem, arch: Arch) -> Iterator[Cutlass2xConfig]:
        configs = candidates.listed(problem.signature)
        return (config for config in configs if self._unfit(config, problem, arch) is None)


def build_many(
    pairs: Sequence[tuple[Signature, Cutlass2xConfig]], arch: Arch, *, jobs: int | None = None
) -> list[Cutlass2xKernel]:
    """The kernels of several signatures and configurations, those that the store lacks compiled together.

    Args:
        jobs: nvcc processes at a time; the number of cores when None.

    Raises:
        ValueError: a configuration cannot serve its signature. GemmError: nvcc refuses one, or there is no toolkit.
    """
    from cutegemm.cutlass2x import build
    from cutegemm.cutlass2x.kernel import Cutlass2xKernel

    for signature, config in pairs:
        reason = config.why_invalid(signature, arch)
        if reason is not None:
            raise ValueError(f"config: {config} cannot serve {signature}: {reason}")
    entries = build.build_many(pairs, arch, jobs=jobs)
    return [Cutlass2xKernel(*pair, arch, entry) for pair, entry in zip(pairs, entries, strict=True)]


def _tiles(config: Cutlass2xConfig, problem: Problem) -> int:
    bm, bn, _ = config.threadblock
    return -(-problem.m // bm) * -(-problem.n // bn)


BACKEND = Cutlass2xBackend()
