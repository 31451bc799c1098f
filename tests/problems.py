"""Random operands of every kind, and the check that every numeric test ends with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import cutegemm
from cutegemm.problem import Problem, reference, request

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_ALL = {**DTYPES, "fp64": torch.float64}
MAJORS = ("tn", "tt", "nn", "nt")


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Standard normal tensors of those shapes, contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def matrix(
    rows: int,
    cols: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    row_major: bool = True,
    batch: int | None = None,
    pad: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    """Standard normal values; `pad` elements after each row (or column), `offset` before the first.

    What lies between and around the elements is NaN, so that a kernel that reads it shows.
    """
    outer, inner = (rows, cols) if row_major else (cols, rows)
    count = batch or 1
    storage = torch.full((count * outer * (inner + pad) + offset,), float("nan"), device=generator.device).to(dtype)
    view = storage[offset:].view(count, outer, inner + pad)[:, :, :inner]
    view.copy_(torch.randn(view.shape, generator=generator, device=generator.device))
    view = view if row_major else view.transpose(1, 2)
    return view if batch else view[0]


@dataclass
class Case:
    """One problem with its operands; `run` computes and checks it."""

    a: torch.Tensor
    b: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        m: int,
        n: int,
        k: int,
        dtype: str,
        *,
        seed: int,
        device: str = "cpu",
        majors: str = "tn",
        batch: int | None = None,
        pad: int = 0,
        offset: int = 0,
        **options: Any,
    ) -> Case:
        generator = torch.Generator(device=device).manual_seed(seed)
        layout = {"batch": batch, "pad": pad, "offset": offset}
        a = matrix(m, k, _ALL[dtype], generator, row_major=majors[0] == "t", **layout)
        b = matrix(k, n, _ALL[dtype], generator, row_major=majors[1] == "t", **layout)
        for name, shape in (("c", (m, n)), ("bias", (n,))):
            if options.get(name) is True:
                options[name] = torch.randn(shape, generator=generator, device=device).to(_ALL[dtype])
        return cls(a, b, options)

    def problem(self) -> Problem:
        """What `gemm` would be asked to compute."""
        known = {"alpha": 1.0, "beta": 0.0, **self.options}
        names = ("c", "alpha", "beta", "bias", "activation", "out", "out_dtype", "precision")
        return request.describe(self.a, self.b, *(known.get(name) for name in names)).problem

    def run(self, **backend: Any) -> reference.Verdict:
        """Computes into a poisoned result and checks it; raises AssertionError with the worst element."""
        known = {"c", "alpha", "beta", "bias", "activation", "out_dtype", "precision"}
        numeric = {key: value for key, value in self.options.items() if key in known}
        out = self.options.get("out")
        if out is not None:
            numeric["out_dtype"] = out.dtype
        want = reference.expected(self.a, self.b, **numeric)
        if out is None:
            out = torch.full(want.value.shape, float("nan"), dtype=want.out_dtype, device=self.a.device)
        elif out is not self.options.get("c"):
            out.fill_(float("nan"))
        got = cutegemm.gemm(self.a, self.b, **{**self.options, "out": out}, **backend)
        assert got is out
        verdict = reference.check(got, want)
        assert verdict.ok, verdict.message
        return verdict
