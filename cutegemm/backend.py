"""What a backend is, and the registry of them: nothing outside a backend knows more of it than the classes here say.

A backend derives from `Backend`, which has the defaults of what a backend need not have. One that computes from the
tensors, by another library, derives from `OnTensors`: it has no kernels.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

from cutegemm.problem.work import DENSE, why_not_taken

if TYPE_CHECKING:
    import torch

    from cutegemm.choice.footprint import Footprint
    from cutegemm.emulator.launch import Captured
    from cutegemm.hardware.arch import Arch
    from cutegemm.native import Launcher
    from cutegemm.problem import Problem, Signature
    from cutegemm.problem.preparation import Preparation
    from cutegemm.problem.program_request import ProgramRequest
    from cutegemm.problem.request import Request
    from cutegemm.run.arguments import Addresses, BoundLaunch, Numbers


class Config(Protocol):
    """A frozen dataclass whose `str()` is stable and is read back by the backend's `parse`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def tile(self) -> tuple[int, int, int]:
        """(M, N, K) of the CTA tile, in elements."""
        ...


class SplitConfig(Config, Protocol):
    """A configuration that may split K among CTAs; one that `Backend.candidates` gives with splits is of this kind."""

    @property
    def splits(self) -> int:
        """Parts of K."""
        ...

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None, or why it can serve no problem of that signature on that GPU."""
        ...


class Kernel(Protocol):
    """A compiled kernel: signature + configuration + architecture."""

    signature: Signature
    config: Any
    arch: Arch

    @property
    def ptx(self) -> str:
        """The PTX text the compiler made; what the emulator runs."""
        ...

    @property
    def cubin(self) -> bytes:
        """The machine code, for disassembly and the occupancy tool."""
        ...

    def bind(self, problem: Problem) -> BoundLaunch:
        """The launch with the problem's sizes and strides filled in; see `cutegemm.run.arguments`."""
        ...

    def launcher(self, problem: Problem) -> Launcher | None:
        """What `bind(problem)` calls, for callers in C++; None where only Python can launch it. With K = 0 it takes an
        address that is not 0 for A and B, such as D's, from which nothing is read.
        """
        ...

    def capture(self, problem: Problem, operands: Addresses, scalars: Numbers) -> Captured:
        """What `bind(problem)(operands, scalars, stream)` would ask of the driver, for the emulator."""
        ...


class Preparer(Protocol):
    """A compiled kernel that prepares an operand."""

    @property
    def ptx(self) -> str:
        """The PTX text."""
        ...

    def bind(self, asked: Preparation) -> Callable[[int, int, int], None]:
        """run(source, target, stream): addresses and the handle of a CUDA stream. It enqueues the kernel on the current
        device and returns at once.
        """
        ...

    def capture(self, asked: Preparation, source: int, target: int) -> Captured:
        """What that would ask of the driver, for the emulator."""
        ...


C = TypeVar("C", bound=Config)


class Backend(ABC, Generic[C]):
    """Kernels for problems: which it serves, by which configurations, and the kernels that these give.

    name: the text that `backend=` accepts. compiler: the PyPI package whose version decides what is made of `sources`.
    works: names of `problem.work.TABLE` that it takes; it must refuse others, see `why_work_refused`.
    programs: whether it computes epilogue programs; if not it must refuse them in the same way.
    """

    name: str
    compiler: str
    works: tuple[str, ...] = (DENSE,)
    programs: bool = False

    @abstractmethod
    def supports(self, problem: Problem, arch: Arch) -> str | None:
        """None, or a sentence saying why it cannot serve the problem and what would do."""

    @abstractmethod
    def check(self, config: C, problem: Problem, arch: Arch) -> str | None:
        """None, or why this configuration cannot serve the problem; what `supports` refuses none can."""

    @abstractmethod
    def configs(self, problem: Problem, arch: Arch) -> Iterable[C]:
        """Every valid configuration, for the tuner."""

    @abstractmethod
    def default(self, problem: Problem, arch: Arch) -> C:
        """The configuration to use when nothing was measured. Raises ValueError where none can serve the problem."""

    @abstractmethod
    def parse(self, text: str) -> C:
        """A configuration from its text form. Raises ValueError naming what is accepted."""

    @abstractmethod
    def build(self, signature: Signature, config: C, arch: Arch) -> Kernel:
        """The kernel, compiled or loaded from the kernel store. Raises ValueError for a configuration that cannot serve
        the signature, GemmError where it cannot be compiled here.
        """

    @abstractmethod
    def sources(self, config: str) -> tuple[Path, ...]:
        """The files that decide what a kernel of that configuration (a text) does. Raises ValueError for no such."""

    @abstractmethod
    def footprint(self, config: C, signature: Signature, arch: Arch) -> Footprint:
        """What one CTA does, for the cost model."""

    def candidates(self, signature: Signature, arch: Arch) -> Iterable[tuple[C, tuple[int, ...]]]:
        """(configuration, splits of K that it may also have) of the few that the heuristic may take; without any,
        `default` decides. One with splits is a `SplitConfig`.
        """
        return ()

    def shortlist(
        self, signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int
    ) -> Iterable[tuple[str, bool]]:
        """(text, whether K is split) of the candidates that the heuristic compares for matrices of about these sizes;
        it compares all where this names none of them.
        """
        return ()

    def sized(self, signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int) -> Iterable[C]:
        """Configurations made for these very sizes, which the heuristic compares beside the shortlist. All are valid
        whatever the sizes.
        """
        return ()

    def in_one_wave(self, config: C, problem: Problem, arch: Arch, won_at: tuple[int, int, int] | None = None) -> C:
        """The candidate, in another order of tiles where one wave computes all tiles of the problem and that order is
        known to be faster, or back in its usual order where it won another problem in one wave.

        Args:
            won_at: (M, N, K) of the problem that it won, if it did.
        """
        return config

    def only_by_name(self, config: C) -> str | None:
        """None, or why only a call that names this configuration gets it: no measurement, no search and no heuristic
        may choose it.
        """
        return None

    def uses_constant(self, config: C, problem: Problem) -> bool:
        """Whether its kernel makes use of the operand that no running kernel writes (`Problem.constant`)."""
        return False

    def for_constant(self, config: C, problem: Problem, arch: Arch) -> C:
        """What runs for a problem with such an operand in the place of a configuration that was chosen without."""
        return config

    def stores_alike(self, config: C, problem: Problem, other: Problem) -> bool:
        """Whether it stores a problem's results in the way of another, which differs in their types or in its terms."""
        return True

    def accumulators(self, config: C) -> int:
        """Accumulators of a thread; one with fewer has more registers for an epilogue program. Raises ValueError where
        it computes no programs.
        """
        raise ValueError(f"backend {self.name!r} computes no epilogue programs")

    def why_work_refused(self, signature: Signature) -> str | None:
        """None, or that it takes other works or no epilogue programs; `supports` and `check` ask this first."""
        if signature.epilogue.custom is not None and not self.programs:
            return f"backend {self.name!r} computes no epilogue programs; backends 'cute' and 'torch' do"
        return why_not_taken(f"backend {self.name!r} computes", self.works, signature.work)

    def prepared(self, problem: Problem, arch: Arch) -> tuple[Problem, tuple[Preparation, ...]] | None:
        """The problem with operands as this backend's fastest kernels take them, and the preparations that make it of
        this one, in their order; None where there is no other way to pose it. Only a configuration for which
        `takes_prepared` holds may serve it.
        """
        return None

    def takes_prepared(self, config: C) -> bool:
        """Whether a configuration that `check` accepts for a problem of `prepared` computes it."""
        return False

    def preparer(self, asked: Preparation, arch: Arch) -> Preparer:
        """The kernel of a preparation that `prepared` gave, compiled or loaded from the kernel store. Raises GemmError
        where it cannot be compiled here.
        """
        raise ValueError(f"backend {self.name!r} prepares no operands")

    def missing(self) -> str | None:
        """None, or which tool it needs is not installed."""
        return None

    def passed_over(self, problem: Problem, arch: Arch) -> str | None:
        """None, or why its faster kernels cannot serve the problem."""
        return None

    def unavailable(self, problem: Problem, arch: Arch) -> str | None:
        """None, or why it cannot serve the problem here and now: what `supports` says, or a tool that is missing."""
        return self.supports(problem, arch) or self.missing()

    def read(self, config: Any) -> C:
        """The configuration that a caller means: a text or an object. Raises ValueError naming what is accepted."""
        found = self.parse(config) if isinstance(config, str) else config
        try:
            known = hasattr(found, "tile") and self.parse(str(found)) == found
        except ValueError:
            known = False
        if not known:
            raise ValueError(
                f"config: got {config!r}, expected a configuration of backend {self.name!r} or its text form"
            )
        return found


class OnTensors(Backend[Any]):
    """A backend that computes from the tensors themselves, on any device: it has no kernels and no configurations."""

    @abstractmethod
    def supports(self, problem: Problem, arch: Arch | None = None) -> str | None:
        """As `Backend.supports`; `arch` does not matter."""

    @abstractmethod
    def runner(self, asked: Request) -> Callable[..., torch.Tensor]:
        """What computes calls of this description: a `cutegemm.run.runner.Runner`."""

    @abstractmethod
    def program_core(self, asked: ProgramRequest) -> Callable[..., None]:
        """What computes calls with an epilogue program: a `cutegemm.run.fused.Core`."""

    def check(self, config: Any, problem: Problem, arch: Arch) -> str | None:
        return f"backend {self.name!r} has no configurations"

    def configs(self, problem: Problem, arch: Arch) -> Iterable[Any]:
        return ()

    def default(self, problem: Problem, arch: Arch) -> NoReturn:
        self._refuse()

    def read(self, config: Any) -> NoReturn:
        raise ValueError(f"config: got {config!r}, but backend {self.name!r} has no configurations")

    def parse(self, text: str) -> NoReturn:
        self.read(text)

    def build(self, signature: Signature, config: Any, arch: Arch) -> NoReturn:
        self._refuse()

    def sources(self, config: str) -> NoReturn:
        self._refuse()

    def footprint(self, config: Any, signature: Signature, arch: Arch) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        names = ", ".join(map(repr, WITH_KERNELS))
        raise ValueError(f"backend: got {self.name!r}, which has no kernels of ours; accepted are {names}")


_MODULES = {
    "cute": "cutegemm.cute",
    "cutlass2x": "cutegemm.cutlass2x",
    "legacy": "legacy_cuda.backend",
    "torch": "cutegemm.torch_backend",
}
"""The module whose `BACKEND` is the backend of that name."""

NAMES = ("auto", *_MODULES)
LAST_RESORT = "torch"
"""The backend of a problem that none with kernels serves, and of CPU tensors where none is named."""
WITH_KERNELS = tuple(name for name in _MODULES if name != LAST_RESORT)
"""Backends with kernels of ours. backend="auto" asks them for a CUDA tensor in this order: a later one serves what the
earlier cannot, or what it is estimated to do clearly faster."""

PREPARING = ("cute",)
"""Those of them that may prepare operands (`Backend.prepared`): a choice asks no others, nor imports them for it."""


def check_name(name: Any) -> None:
    """Raises ValueError unless it is one of `NAMES`."""
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"backend: got {name!r}, accepted are {', '.join(map(repr, NAMES))}")


@functools.cache
def get(name: str) -> Backend[Any]:
    """The backend of that name, imported at first use.

    Raises:
        ValueError: no such backend.
    """
    module = _MODULES.get(name)
    if module is None:
        raise ValueError(f"backend: got {name!r}, accepted are {', '.join(map(repr, NAMES))}")
    found: Backend[Any] = importlib.import_module(module).BACKEND
    return found


def last_resort() -> OnTensors:
    """The backend `LAST_RESORT`."""
    found = get(LAST_RESORT)
    assert isinstance(found, OnTensors)
    return found


@functools.lru_cache(maxsize=1024)
def named_by(config: str) -> str:
    """The backend whose configuration this text is. Raises ValueError with what each accepts."""
    refusals = []
    for name in WITH_KERNELS:
        try:
            get(name).parse(config)
        except ValueError as why:
            refusals.append(str(why))
        else:
            return name
    raise ValueError("; or ".join(refusals))


def check_config(config: Any, backend: str) -> None:
    """Raises ValueError for what is no configuration of that backend, with "auto" of none."""
    if backend == "auto":
        named_by(str(config))
    else:
        get(backend).read(config)
