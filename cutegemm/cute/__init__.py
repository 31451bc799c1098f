"""Backend "cute": GEMM kernels written in the CuTe DSL.

    sm90   tensor cores by WGMMA, loads by TMA: all but fp64        hopper/kernel.py
    sm80   tensor cores by mma.sync: all but fp64                   ampere/kernel.py
    simt   fp32 on CUDA cores, also with sliced K                   simt/kernel.py, simt/sliced.py
    dmma   tensor cores by mma.sync: fp64                           dmma/kernel.py
    vector fp32 with few rows or columns of D, at memory's speed    vector/kernel.py

A kernel family is a folder and one row of `FAMILIES`: its configurations, the kinds of products that it takes, its
operator, candidates and footprints. Nothing else here knows a family by name. The cost model chooses among the
candidates (`cutegemm.choice.heuristics`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegemm.backend import Backend
from cutegemm.cute import launch_size, prepare
from cutegemm.cute.ampere import candidates as ampere_candidates
from cutegemm.cute.ampere import config as ampere_config
from cutegemm.cute.ampere import footprint as ampere_footprint
from cutegemm.cute.dmma import candidates as dmma_candidates
from cutegemm.cute.dmma import config as dmma_config
from cutegemm.cute.dmma import footprint as dmma_footprint
from cutegemm.cute.hopper import candidates as hopper_candidates
from cutegemm.cute.hopper import config as hopper_config
from cutegemm.cute.hopper import footprint as hopper_footprint
from cutegemm.cute.hopper import grouping as hopper_grouping
from cutegemm.cute.hopper import sized as hopper_sized
from cutegemm.cute.hopper import validity as hopper_validity
from cutegemm.cute.simt import candidates as simt_candidates
from cutegemm.cute.simt import config as simt_config
from cutegemm.cute.simt import footprint as simt_footprint
from cutegemm.cute.vector import candidates as vector_candidates
from cutegemm.cute.vector import config as vector_config
from cutegemm.cute.vector import footprint as vector_footprint
from cutegemm.problem import ITEMSIZE, work
from cutegemm.problem.dtypes import CUDA_CORES, kind_names
from cutegemm.problem.parts import TABLE as SPLIT

if TYPE_CHECKING:
    from cutegemm.choice.footprint import Footprint
    from cutegemm.cute.compile import CuteKernel
    from cutegemm.cute.launch_config import LaunchedConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Kind, Problem, Signature
    from cutegemm.problem.preparation import Preparation

_FOLDER = Path(__file__).parent
_SHARED_SOURCES = (
    "compile.py", "early_launch.py", "entry.py", "epilogue.py", "graph_memory.py", "groups.py", "launch_config.py",
    "lowering.py", "reduction.py", "source.py", "state_word.py", "tile_order.py", "types.py", "warps/group_tiles.py",
    "warps/part_sum.py", "whole.py", "workspace.py", "../problem/epilogue.py", "../problem/program/graph.py",
    "../run/arguments.py", "../hardware/cubin.py",
)  # fmt: skip
"""Patterns of the files, relative to this folder, that decide what the kernels of every family do."""
_SPLITTING = ("operand_parts.py", "splitter.py")
"""The same for families that split operands into parts."""
_QUANTIZING = ("quantize/scale.py", "../problem/quantization.py", "../problem/program/quantized.py")
"""The same for families that quantize results."""
_CHOICE_SOURCES = {"byte_candidates.py", "candidates.py", "footprint.py", "registers.py", "shortlists.py", "sized.py"}
"""Files of a family's folder that decide which of its kernels is taken, not what it does."""


def _no_splits(text: str, signature: Signature) -> tuple[int, ...]:
    return ()


def _never(config: Any, problem: Problem) -> bool:
    return False


def _at_no_size(m: int, n: int, k: int, batch: int) -> bool:
    return False


def _same(config: Any, problem: Problem, arch: Arch, won_at: object = None) -> Any:
    return config


def _always(config: Any, *about: Any) -> bool:
    return True


def _none_named(signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int) -> list[Any]:
    return []


@dataclass(frozen=True)
class Family:
    """One kernel family.

    Attributes:
        config: the class of its configurations. module, operator: the DSL operator, as `make_operator` imports it.
        takes: the kinds of products that it is meant for. works: names of `problem.work.TABLE` that it computes.
        candidates: of a signature that it takes, the texts of the configurations to choose among.
        footprint: of (config, signature, arch): the cost model's view of a configuration.
        tries: of (config, signature): whether the tuner tries a configuration of its space that is valid.
        sources: patterns of the files beside `_SHARED_SOURCES` that decide what its kernels do; `_CHOICE_SOURCES` are
            left out.
        splits: of a candidate's text and a signature, the splits of K that it may also have.
        shortlist: of (signature, arch, m, n, k, batch): (text, whether K is split) of the candidates to compare for
            about these sizes; all are compared where it names none.
        sized, in_one_wave, stores_alike, uses_constant, for_constant: those of `Backend`.
        capability: the least compute capability of GPUs that it runs on. forward: whether it runs on newer ones too.
        automatic: one that is not serves only calls that name a configuration.
        clips: whether its loads end where a row does: alignment of an operand then means that of its rows' beginnings.
        beside: the family with whose candidates its own are compared; without one they count where no family before has
            any.
        company: of a signature, the candidates that are compared so, without splits of K; None: all that it has.
            worth_comparing: of (m, n, k, batch): whether they can win at about these sizes, asked where `beside` has a
            shortlist.
        quantizes: whether its kernels give results of `ops.quantize`.
    """

    config: Any
    module: str
    operator: str
    takes: tuple[Kind, ...]
    candidates: Callable[[Signature], tuple[str, ...]]
    footprint: Callable[[Any, Signature, Arch], Footprint]
    sources: tuple[str, ...]
    works: tuple[str, ...] = (work.DENSE,)
    splits: Callable[[str, Signature], tuple[int, ...]] = _no_splits
    shortlist: Callable[[Signature, Arch, int, int, int, int], list[tuple[str, bool]]] = _none_named
    sized: Callable[[Signature, Arch, int, int, int, int], list[Any]] = _none_named
    in_one_wave: Callable[[Any, Problem, Arch, tuple[int, int, int] | None], Any] = _same
    tries: Callable[[Any, Signature], bool] = _always
    stores_alike: Callable[[Any, Problem, Problem], bool] = _always
    uses_constant: Callable[[Any, Problem], bool] = _never
    for_constant: Callable[[Any, Problem, Arch], Any] = _same
    capability: tuple[int, int] = (8, 0)
    forward: bool = True
    automatic: bool = True
    clips: bool = False
    quantizes: bool = False
    beside: str | None = None
    company: Callable[[Signature], tuple[str, ...]] | None = None
    worth_comparing: Callable[[int, int, int, int], bool] = _at_no_size

    def runs_on(self, arch: Arch) -> bool:
        return arch.capability == self.capability or (self.forward and arch.capability > self.capability)

    def make_operator(self, config: Any, signature: Signature) -> Any:
        """The DSL operator; imports the DSL."""
        module = importlib.import_module(f"cutegemm.cute.{self.module}")
        return getattr(module, self.operator)(config, signature)


# A problem goes to the first family that has a candidate for it, the fastest: WGMMA leaves mma.sync nothing to win.
FAMILIES: dict[str, Family] = {
    "sm90": Family(
        hopper_config.HopperConfig,
        "hopper.kernel",
        "HopperGemm",
        hopper_validity.TAKES,
        hopper_candidates.listed,
        hopper_footprint.of,
        ("../hardware/residency.py", *_SPLITTING, "hopper/*.py", *_QUANTIZING),
        works=hopper_grouping.WORKS,
        quantizes=True,
        splits=hopper_candidates.splits,
        tries=hopper_candidates.tries,
        shortlist=hopper_candidates.shortlist,
        sized=hopper_sized.sized,
        in_one_wave=hopper_sized.in_one_wave,
        stores_alike=hopper_candidates.stores_alike,
        uses_constant=hopper_candidates.uses_constant,
        for_constant=hopper_candidates.for_constant,
        capability=(9, 0),
        forward=False,
        clips=True,
    ),
    "sm80": Family(
        ampere_config.AmpereConfig,
        "ampere.kernel",
        "AmpereGemm",
        ampere_config.TAKES,
        ampere_candidates.listed,
        ampere_footprint.of,
        (*_SPLITTING, "warps/*.py", "ampere/*.py"),
        works=tuple(work.TABLE),
        splits=ampere_candidates.splits,
        beside="sm90",
        company=ampere_candidates.beside,
        worth_comparing=ampere_candidates.worth_comparing,
    ),
    "simt": Family(
        simt_config.SimtConfig,
        "simt.sliced",
        "simt_gemm",
        simt_config.TAKES,
        simt_candidates.listed,
        simt_footprint.of,
        ("warps/*.py", "simt/*.py"),
        works=tuple(work.TABLE),
        splits=simt_candidates.splits,
    ),
    "vector": Family(
        vector_config.VectorConfig,
        "vector.kernel",
        "VectorGemm",
        vector_config.TAKES,
        vector_candidates.listed,
        vector_footprint.of,
        ("warps/*.py", "vector/*.py"),
        splits=vector_candidates.splits,
        beside="simt",
    ),
    "dmma": Family(
        dmma_config.DmmaConfig,
        "dmma.kernel",
        "DmmaGemm",
        dmma_config.TAKES,
        dmma_candidates.listed,
        dmma_footprint.of,
        ("warps/*.py", "dmma/*.py"),
    ),
}
_ONLY_QUANTIZING = "only sm90 has kernels for ops.quantize: on compute capability 9.0, of operands for tensor cores"
_OLDEST = min(family.capability for family in FAMILIES.values())


def _work_refused(family: str, signature: Signature) -> str | None:
    """None, or why no kernel of the family computes the work of these operands."""
    takes = FAMILIES[family].works
    return work.why_not_taken(f"{family} computes", takes, signature.work) or _division_refused(signature)


def _division_refused(signature: Signature) -> str | None:
    """None, or why no kernel loads an operand that groups divide: TMA and vectors begin at a multiple of 16 bytes of
    its contiguous rows, and a group anywhere. Calls copy such operands first (`problem.packing`).
    """
    majors = {"a": signature.a_major, "b": signature.b_major}
    if signature.work == work.RAGGED_K and ITEMSIZE[signature.dtype] == 1:
        return (
            f"tensor cores read {signature.dtype} along K, whose rows are contiguous, and a group begins at no "
            "multiple of 16 bytes of them; accepted are operands of 16 bits, and fp32"
        )
    if signature.work == work.RAGGED_K and "k" in majors.values():
        along = next(name.upper() for name, major in majors.items() if major == "k")
        return (
            f"{along} is K-major: loads cannot begin at any k of a contiguous row; accepted are an M-major A and an "
            "N-major B, for example x.t() and dy of row-major x and dy"
        )
    divided = work.TABLE[signature.work].divided
    if divided is None or majors[divided] == "k":
        return None
    major = majors[divided].upper()
    return f"{divided.upper()} is {major}-major: loads cannot begin at any of its rows; accepted is a K-major one"


@functools.lru_cache(maxsize=4096)
def _invalid(config: Any, signature: Signature, arch: Arch) -> str | None:
    """The validity rule's answer, remembered: a choice within microseconds has no time to ask again."""
    if refused := _work_refused(config.family, signature):
        return refused
    if arch.capability < _OLDEST:
        return _too_old(arch)
    if any(getattr(config, field.name) == 0 for field in fields(config)):
        return f"{config} has a 0; every number of a configuration is at least 1"
    if signature.epilogue.program.quantizes and not FAMILIES[config.family].quantizes:
        return _ONLY_QUANTIZING
    return config.why_invalid(signature, arch)


@functools.lru_cache(maxsize=256)
def _listed(family: str, signature: Signature, in_company: bool = False) -> tuple[Any, ...]:
    """A family's candidates for a signature that it takes; in_company: beside those of another family."""
    row = FAMILIES[family]
    texts = row.company if in_company and row.company is not None else row.candidates
    return tuple(row.config.parse(text) for text in texts(signature))


@functools.lru_cache(maxsize=256)
def _usable(family: str, signature: Signature, arch: Arch, in_company: bool = False) -> tuple[Any, ...]:
    """Those of a family's candidates that are valid whatever the sizes."""
    if not FAMILIES[family].runs_on(arch):
        return ()
    listed = _listed(family, signature, in_company)
    return tuple(config for config in listed if _invalid(config, signature, arch) is None)


@functools.lru_cache(maxsize=256)
def _fastest(signature: Signature, arch: Arch) -> str | None:
    """The first family that is meant for these products on this GPU."""
    meant = (name for name, family in FAMILIES.items() if signature.kind in family.takes and family.runs_on(arch))
    return next(meant, None)


class CuteBackend(Backend[Any]):
    """See `cutegemm.backend`."""

    name = "cute"
    compiler = "nvidia-cutlass-dsl"
    programs = True
    works = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.works))

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        if refused := self.why_work_refused(problem.signature):
            return refused
        if arch.capability < _OLDEST:
            return _too_old(arch)
        if any(self._serves(family, problem, arch) for family in self._automatic(problem.signature)):
            return None
        if not any(problem.signature.kind in family.takes for family in FAMILIES.values() if family.runs_on(arch)):
            taken = "; ".join(f"{name} takes {kind_names(family.takes)}" for name, family in FAMILIES.items())
            asked = f"{problem.dtype} with precision {problem.precision!r}"
            return f"no CuTe kernel for {arch.name} multiplies {asked}: {taken}"
        families = [family for family in self._automatic(problem.signature) if problem.work in family.works]
        if problem.epilogue.program.quantizes and not any(family.runs_on(arch) for family in families):
            return _ONLY_QUANTIZING
        if not families:
            own = {name: family for name, family in FAMILIES.items() if problem.work in family.works}
            kinds = {name: (each for each in family.takes if each not in SPLIT) for name, family in own.items()}
            taken = "; ".join(f"{name} takes {kind_names(each)}" for name, each in kinds.items())
            return f"of the families that compute {problem.work} products, {taken}"
        return self._why_last(families[-1], problem, arch)

    def _why_last(self, family: Family, problem: Problem, arch: Arch) -> str:
        """Why a family's last candidate, which is its smallest, cannot serve the problem."""
        listed = _listed(family.config.family, problem.signature)
        return str(self.check(listed[-1], problem, arch)) if listed else f"no configuration fits {arch.name}"

    def passed_over(self, problem: Problem, arch: Arch) -> str | None:
        """Why a family for this GPU, faster as a rule, cannot serve the problem, or why another precision is faster;
        None when the first family can, and it is not.
        """
        signature = problem.signature
        name = _fastest(signature, arch)
        if name is None:
            return None
        if not FAMILIES[name].automatic:
            return f"not {name}, which has run in the emulator only so far: name a configuration to use it"
        if self._serves(FAMILIES[name], problem, arch):
            return _why_slow(signature, arch)
        return f"not {name}, because {self._why_last(FAMILIES[name], problem, arch)}"

    def check(self, config: Any, problem: Problem, arch: Arch) -> str | None:
        """None when `config` can serve the problem, else why not."""
        return _invalid(config, problem.signature, arch) or launch_size.why_refused(config, problem)

    def only_by_name(self, config: LaunchedConfig) -> str | None:
        """None when a configuration may be chosen automatically, else why only a call that names it gets it."""
        if not FAMILIES[config.family].automatic:
            return f"{config.family} has run in the emulator only so far"
        return config.only_by_name()

    def uses_constant(self, config: Any, problem: Problem) -> bool:
        """See `Backend.uses_constant`."""
        return FAMILIES[config.family].uses_constant(config, problem)

    def for_constant(self, config: Any, problem: Problem, arch: Arch) -> Any:
        """See `Backend.for_constant`."""
        return FAMILIES[config.family].for_constant(config, problem, arch)

    def stores_alike(self, config: Any, problem: Problem, other: Problem) -> bool:
        """See `Backend.stores_alike`."""
        return FAMILIES[config.family].stores_alike(config, problem, other)

    def accumulators(self, config: Any) -> int:
        """See `Backend.accumulators`: a configuration has them of its own, or a warp tile that its lanes share."""
        own: int | None = getattr(config, "accumulators", None)
        return config.wm * config.wn // 32 if own is None else own

    def configs(self, problem: Problem, arch: Arch) -> Iterator[Any]:
        """Every valid configuration of the automatic families that the tuner tries, each also in the order of tiles
        that a choice takes in one wave; splits of K only where each has steps to do.
        """
        for family in self._automatic(problem.signature):
            whole, split = family.config.space(ITEMSIZE[problem.dtype]), family.config.split_space(problem, arch)
            made = family.sized(problem.signature, arch, *problem.evened) if family.runs_on(arch) else []
            for config in chain(made, (each for each in chain(whole, split) if each not in made)):
                worth_it = config.splits == 1 or config.splits * config.bk <= problem.k
                if worth_it and family.tries(config, problem.signature) and self.check(config, problem, arch) is None:
                    yield from dict.fromkeys((config, family.in_one_wave(config, problem, arch, None)))

    def candidates(self, signature: Signature, arch: Arch) -> list[tuple[Any, tuple[int, ...]]]:
        """(configuration, splits that it may also have) of the few that the heuristic may take: those of the first
        automatic family that has any.
        """
        first = self._first(signature, arch)
        if first is None:
            return []
        name = first.config.family
        beside = (family for family in self._automatic(signature) if family.beside == name)
        found = [(config, first.splits(str(config), signature)) for config in _usable(name, signature, arch)]
        for family in beside:
            for config in _usable(family.config.family, signature, arch, in_company=True):
                found.append((config, family.splits(str(config), signature) if family.company is None else ()))
        return found

    def shortlist(self, signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int) -> list[tuple[str, bool]]:
        """(text, whether K is split) of the `candidates` to compare for about these sizes; none: compare all."""
        family = self._first(signature, arch)
        if family is None:
            return []
        found = family.shortlist(signature, arch, m, n, k, batch)
        for each in self._automatic(signature) if found else ():
            if each.beside == family.config.family and each.worth_comparing(m, n, k, batch):
                found = [*found, *((str(one), False) for one in _usable(each.config.family, signature, arch, True))]
        return found

    def sized(self, signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int) -> list[Any]:
        family = self._first(signature, arch)
        return [] if family is None else family.sized(signature, arch, m, n, k, batch)

    def in_one_wave(self, config: Any, problem: Problem, arch: Arch, won_at: tuple[int, int, int] | None = None) -> Any:
        return FAMILIES[config.family].in_one_wave(config, problem, arch, won_at)

    def default(self, problem: Problem, arch: Arch) -> Any:
        from cutegemm.choice import heuristics

        found = heuristics.choose(problem, arch, self.name)
        if found is None:
            raise ValueError(self.supports(problem, arch))
        return found[1]

    def parse(self, text: str) -> Any:
        return _family(text).config.parse(text)

    def sources(self, config: str) -> tuple[Path, ...]:
        return _sources(_family(config))

    def prepared(self, problem: Problem, arch: Arch) -> tuple[Problem, tuple[Preparation, ...]] | None:
        """The problem with its operands packed for TMA, and the packing; None where that does not help."""
        name = _fastest(problem.signature, arch)
        return prepare.aligned(problem) if name is not None and FAMILIES[name].clips else None

    def takes_prepared(self, config: Any) -> bool:
        return FAMILIES[config.family].clips

    def preparer(self, asked: Preparation, arch: Arch) -> prepare.PreparingKernel:
        return prepare.build(asked, arch)

    def build(self, signature: Signature, config: Any, arch: Arch) -> CuteKernel:
        from cutegemm.cute import compile as compiler

        family = FAMILIES[config.family]
        if refused := _work_refused(config.family, signature):
            raise ValueError(f"config: {config} cannot serve {signature}: {refused}")
        return compiler.build(signature, config, arch, lambda: family.make_operator(config, signature))

    def footprint(self, config: Any, signature: Signature, arch: Arch) -> Footprint:
        return FAMILIES[config.family].footprint(config, signature, arch)

    def _automatic(self, signature: Signature) -> Iterator[Family]:
        found = (family for family in FAMILIES.values() if family.automatic and signature.kind in family.takes)
        return (family for family in found if family.quantizes or not signature.epilogue.program.quantizes)

    def _first(self, signature: Signature, arch: Arch) -> Family | None:
        """The first automatic family with a usable candidate."""
        found = (family for family in self._automatic(signature) if _usable(family.config.family, signature, arch))
        return next(found, None)

    def _serves(self, family: Family, problem: Problem, arch: Arch) -> bool:
        usable = _usable(family.config.family, problem.signature, arch)
        return any(launch_size.why_refused(config, problem) is None for config in usable)


def _why_slow(signature: Signature, arch: Arch) -> str | None:
    """None, or that products of parts cannot be as fast as fp32 on the CUDA cores of that GPU, by their peak rates."""
    if signature.parts is None:
        return None
    most, plain = arch.peak(signature.unit) / len(signature.parts.terms), arch.peak(CUDA_CORES)
    if most > plain:
        return None
    return f"at most {most:.1f} TFLOP/s on {arch.name}, where precision='ieee' has up to {plain:.1f}"


def _family(text: str) -> Family:
    family = FAMILIES.get(text.split("/", 1)[0])
    if family is None:
        forms = ", ".join(family.config.form() for family in FAMILIES.values())
        raise ValueError(f"config: got {text!r}, accepted for backend 'cute' are {forms}")
    return family


@functools.cache
def _sources(family: Family) -> tuple[Path, ...]:
    patterns = (*_SHARED_SOURCES, *family.sources)
    found = (path for pattern in patterns for path in sorted(_FOLDER.glob(pattern)))
    return tuple(path for path in found if path.name not in _CHOICE_SOURCES)


def _too_old(arch: Arch) -> str:
    has = ".".join(map(str, arch.capability))
    oldest = ".".join(map(str, _OLDEST))
    return f"the CuTe kernels need compute capability {oldest} or newer; {arch.name} has {has}"


BACKEND = CuteBackend()
