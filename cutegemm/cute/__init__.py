"""Backend "cute": GEMM kernels written in the CuTe DSL.

    sm90   tensor cores by WGMMA, loads by TMA: fp16, bf16, tf32    kernels/hopper.py
    sm80   tensor cores by mma.sync: fp16, bf16, tf32               kernels/ampere.py
    simt   fp32 on CUDA cores, also with sliced K                   kernels/simt.py, simt_sliced.py

A kernel family is one row of `FAMILIES`: which problems it takes, its configuration class, its operator. The cost model
chooses among the configurations that the automatic rows prefer (`cutegemm.heuristics`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from cutegemm.cute import cells, defaults
from cutegemm.cute.config import AmpereConfig, SimtConfig, TileConfig
from cutegemm.cute.hopper_config import HopperConfig
from cutegemm.problem import ITEMSIZE

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.cute.compile import CuteKernel
    from cutegemm.problem import Problem, Signature

MAX_CTAS = 2**31 - 1


@dataclass(frozen=True)
class Family:
    """One kernel family: `takes(signature)` says whether it is meant for such a problem, `preferred(signature)` lists
    the configurations to choose among. One that is not `automatic` serves only calls that name a configuration."""

    config: Any
    module: str
    operator: str
    takes: Callable[[Signature], bool]
    preferred: Callable[[Signature], tuple[str, ...]]
    automatic: bool = True

    def make_operator(self, config: TileConfig, signature: Signature) -> Any:
        """The DSL operator; imports the DSL."""
        module = importlib.import_module(f"cutegemm.cute.kernels.{self.module}")
        return getattr(module, self.operator)(config, signature)


def _on_tensor_cores(signature: Signature) -> bool:
    return signature.dtype != "fp32" or signature.precision == "tf32"


FAMILIES: dict[str, Family] = {
    "sm90": Family(HopperConfig, "hopper", "HopperGemm", _on_tensor_cores, defaults.hopper),
    "sm80": Family(
        AmpereConfig,
        "ampere",
        "AmpereGemm",
        _on_tensor_cores,
        defaults.ampere,
    ),
    "simt": Family(
        SimtConfig,
        "simt_sliced",
        "simt_gemm",
        lambda s: s.dtype == "fp32" and s.precision == "ieee",
        defaults.simt,
    ),
}


@functools.lru_cache(maxsize=4096)
def _invalid(config: TileConfig, signature: Signature, arch: Arch) -> str | None:
    """The validity rule's answer, remembered: a choice within microseconds has no time to ask again."""
    return config.problem(signature, arch)


@functools.lru_cache(maxsize=256)
def _preferred(family: Family, signature: Signature) -> tuple[TileConfig, ...]:
    return tuple(family.config.parse(text) for text in family.preferred(signature))


class CuteBackend:
    """See `cutegemm.backend`."""

    name = "cute"

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        if arch.capability < (8, 0):
            return _too_old(arch)
        if any(self._serves(family, problem, arch) for family in self._automatic(problem.signature)):
            return None
        if not any(f.takes(problem.signature) for f in FAMILIES.values()):
            return (
                f"no CuTe kernel multiplies {problem.dtype} with precision {problem.precision!r}; "
                "backend 'cutlass2x' has 'tf32x3'"
            )
        return f"no configuration fits {arch.name}"

    def passed_over(self, problem: Problem, arch: Arch) -> str | None:
        """Why a family for this GPU, faster as a rule, cannot serve the problem; None when the first one can."""
        signature = problem.signature
        for name, family in FAMILIES.items():
            if not family.takes(signature) or (name == "sm90" and arch.capability != (9, 0)):
                continue
            if not family.automatic:
                return f"not {name}, which has run in the emulator only so far: name a configuration to use it"
            if self._serves(family, problem, arch):
                return None
            return f"not {name}, because {self.check(_preferred(family, signature)[-1], problem, arch)}"
        return None

    def check(self, config: TileConfig, problem: Problem, arch: Arch) -> str | None:
        """None when `config` can serve the problem, else why not."""
        if arch.capability < (8, 0):
            return _too_old(arch)
        invalid = _invalid(config, problem.signature, arch)
        if invalid:
            return invalid
        ctas = _tiles(config, problem) * problem.batch * config.splits
        return None if ctas <= MAX_CTAS else f"{ctas} CTAs; a grid has at most {MAX_CTAS}"

    def configs(self, problem: Problem, arch: Arch) -> Iterator[TileConfig]:
        """Every valid configuration of the automatic families; splits of K only where each has steps to do."""
        for family in self._automatic(problem.signature):
            whole, split = family.config.space(ITEMSIZE[problem.dtype]), family.config.split_space(problem, arch)
            for config in chain(whole, split):
                worth_it = config.splits == 1 or config.splits * config.bk <= problem.k
                if worth_it and self.check(config, problem, arch) is None:
                    yield config

    def candidates(self, signature: Signature, arch: Arch) -> list[tuple[TileConfig, tuple[int, ...]]]:
        """(configuration, splits that it may also have) of the few that the heuristic weighs.

        They are those of the first automatic family that has any: WGMMA leaves mma.sync nothing to win.
        """
        for family in self._automatic(signature):
            configs = ((config, defaults.splits(str(config))) for config in _preferred(family, signature))
            found = [(config, splits) for config, splits in configs if config.problem(signature, arch) is None]
            if found:
                return found
        return []

    def weighed(self, signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int) -> list[tuple[str, bool]]:
        """The `candidates` worth weighing for about these sizes, and whether with K split; see `cells`."""
        return cells.weighed(arch, signature.majors, m, n, k, batch) if signature.dtype != "fp32" else []

    def default(self, problem: Problem, arch: Arch) -> TileConfig:
        from cutegemm import heuristics

        found = heuristics.choose(problem, arch, self.name)
        if found is None:
            raise ValueError(self.supports(problem, arch))
        return found[1]

    def parse(self, text: str) -> TileConfig:
        family = FAMILIES.get(text.split("/", 1)[0])
        if family is None:
            forms = ", ".join(family.config.form() for family in FAMILIES.values())
            raise ValueError(f"config: got {text!r}, accepted for backend 'cute' are {forms}")
        return family.config.parse(text)

    def build(self, signature: Signature, config: TileConfig, arch: Arch) -> CuteKernel:
        from cutegemm.cute import compile as compiler

        family = FAMILIES[config.family]
        return compiler.build(signature, config, arch, lambda: family.make_operator(config, signature))

    def _automatic(self, signature: Signature) -> Iterator[Family]:
        return (family for family in FAMILIES.values() if family.automatic and family.takes(signature))

    def _serves(self, family: Family, problem: Problem, arch: Arch) -> bool:
        configs = _preferred(family, problem.signature)
        return any(self.check(config, problem, arch) is None for config in configs)


def _tiles(config: TileConfig, problem: Problem) -> int:
    bm, bn, _ = config.tile()
    return -(-problem.m // bm) * -(-problem.n // bn)


def _too_old(arch: Arch) -> str:
    has = ".".join(map(str, arch.capability))
    return f"the CuTe kernels need compute capability 8.0 or newer; {arch.name} has {has}"


BACKEND = CuteBackend()
