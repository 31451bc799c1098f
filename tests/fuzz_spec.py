"""One random problem of the fuzzer, described in full: its `repr` is a program that computes and checks it again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

import cutegemm
from cutegemm.problem import reference
from tests import exact
from tests.problems import DTYPES

GUARD = 4096
"""Elements before and behind every tensor: NaN around an input, a pattern around the result."""

VALUES = ("normal", "integers", "large", "small")

EXACT = "exact"
"""Values beside `VALUES`: integers of which every sum is exact (`tests.exact`), so that D must be, too. Only for D in
fp32, alpha and beta of 1 or -1, and no activation but relu."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage, in elements: `offset` (behind the guard) is its first element's place."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def reach(self) -> int:
        """Elements from the first to past the last; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))

    @property
    def overlaps(self) -> bool:
        """Whether two elements share an address, or might."""
        covered = 0
        for stride, extent in sorted((s, e) for s, e in zip(self.strides, self.shape, strict=True) if e > 1):
            if stride <= covered:
                return True
            covered += (extent - 1) * stride
        return False

    def storage(self, device: str) -> torch.Tensor:
        return torch.empty(2 * GUARD + self.offset + self.reach, dtype=DTYPES[self.dtype], device=device)

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.as_strided(self.shape, self.strides, GUARD + self.offset)


@dataclass(frozen=True)
class Spec:
    """A call of `cutegemm.gemm` with everything that decides its result.

    Attributes:
        seed: of the operands' values. values: one of `VALUES`, or `EXACT`. device: "cuda" or "cpu".
        a, b, c, bias, out: layouts; None for an operand that is not passed. `c_is_out`: out is passed as c too.
        specials: (operand, index, value): elements that are set to an infinity or NaN.
        poison: the byte that fills the result before the call.
        The rest are arguments of `gemm`; dtypes by name.
    """

    seed: int
    device: str
    a: Layout
    b: Layout
    c: Layout | None = None
    bias: Layout | None = None
    out: Layout | None = None
    c_is_out: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    activation: str | None = None
    out_dtype: str | None = None
    precision: str | None = None
    backend: str = "auto"
    config: str | None = None
    values: str = "normal"
    specials: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    poison: int = 0xFF

    def snippet(self) -> str:
        """A program that repeats the problem alone."""
        return f"from tests.fuzz_spec import Layout, Spec\n\nnan, inf = float('nan'), float('inf')\n{self!r}.check()\n"

    def arguments(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The keyword arguments of `gemm` beside a, b and c."""
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "bias": tensors.get("bias"),
            "activation": self.activation,
            "out": tensors.get("out"),
            "out_dtype": DTYPES[self.out_dtype] if self.out_dtype else None,
            "precision": self.precision,
        }

    def layouts(self) -> dict[str, Layout]:
        named = {"a": self.a, "b": self.b, "c": self.c, "bias": self.bias, "out": self.out}
        return {name: layout for name, layout in named.items() if layout is not None}

    def unfilled(self) -> dict[str, torch.Tensor]:
        """CPU tensors that lie as the operands do, to plan with."""
        found = {name: layout.view(layout.storage("cpu")) for name, layout in self.layouts().items()}
        if self.c_is_out:
            found["c"] = found["out"]
        return found

    def check(self, repeat: bool = True) -> float:
        """Computes and checks; with `repeat` twice, for the same bits. Returns the largest error over its bound.

        Raises AssertionError saying what is wrong; errors of the call itself pass through.
        """
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        storages = {name: self._filled(name, layout, generator) for name, layout in self.layouts().items()}
        tensors = {name: layout.view(storages[name]) for name, layout in self.layouts().items()}
        for name, index, value in self.specials:
            tensors[name][index] = value
        if self.c_is_out:
            tensors["c"] = tensors["out"]
        before = {name: storage.clone() for name, storage in storages.items()}
        numeric = self.arguments(tensors)
        numeric.pop("out")
        if self.out is not None:
            numeric["out_dtype"] = DTYPES[self.out.dtype]
        c = tensors["c"].clone() if self.c_is_out else tensors.get("c")
        want = reference.expected(tensors["a"], tensors["b"], c, **numeric)

        got = self._call(tensors)
        verdict = reference.check(got, want)
        assert verdict.ok, verdict.message
        if self.values == EXACT:
            wrong = exact.difference(got, want.value)
            assert wrong is None, wrong
        self._check_surroundings(got, storages, before)
        if repeat:
            first = got.clone()
            for name, storage in storages.items():
                storage.copy_(before[name])
            os.environ["CUTEGEMM_EMULATOR_SEED"] = str(self.seed % 1000 + 1)  # other timing, same bits
            second = self._call(tensors)
            assert _same_bits(first, second), f"another run gave other bits: {_first_difference(first, second)}"
        return verdict.ratio

    def _call(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        options = self.arguments(tensors)
        got = cutegemm.gemm(
            tensors["a"], tensors["b"], tensors.get("c"), **options, backend=self.backend, config=self.config
        )
        out = tensors.get("out")
        assert out is None or got is out, "gemm did not return out"
        assert out is not None or got.is_contiguous(), f"a new result has strides {got.stride()}"
        return got

    def _filled(self, name: str, layout: Layout, generator: torch.Generator) -> torch.Tensor:
        storage = layout.storage(self.device)
        if name == "out":
            storage.view(torch.uint8).fill_(self.poison)
            if not self.c_is_out:
                return storage
        else:
            storage.fill_(float("nan"))
            if name == "c" and self.beta == 0:
                return storage
        # Elements that share an address are filled through the storage, gaps and all.
        target = storage[GUARD : GUARD + layout.offset + layout.reach] if layout.overlaps else layout.view(storage)
        if self.values == EXACT:
            k = self.a.shape[-1]
            largest = exact.largest_operand(k, layout.dtype) if name in ("a", "b") else exact.LARGEST_TERM
            exact.fill(target, largest, generator, signed=self.seed % 2 == 0)
            return storage
        if self.values == "integers":
            values = torch.randint(-2, 3, target.shape, generator=generator, device=self.device).float()
        else:
            values = torch.randn(target.shape, generator=generator, device=self.device)
            values *= {"normal": 1.0, "large": 48.0, "small": 2.0**-12}[self.values]
        target.copy_(values)
        return storage

    def _check_surroundings(
        self, got: torch.Tensor, storages: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
    ) -> None:
        """Inputs, and everything around `out`, must be what they were."""
        for name, storage in storages.items():
            expected = before[name]
            if name == "out":
                assert self.out is not None
                expected = expected.clone()
                self.out.view(expected).copy_(got)
            if not _same_bits(expected, storage):
                where = "around out" if name == "out" else f"to {name}"
                raise AssertionError(f"the call wrote {where}: {_first_difference(expected, storage)}")


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.equal(_bits(x), _bits(y))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _first_difference(x: torch.Tensor, y: torch.Tensor) -> str:
    differs = (_bits(x) != _bits(y)).nonzero()
    place = tuple(int(i) for i in differs[0])
    return f"{len(differs)} elements, the first at {place} was {float(x[place])!r} and is {float(y[place])!r}"
