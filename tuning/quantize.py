"""Times quantization: `python -m tuning.quantize`, on a GPU.

For each case a copy of the matrix, our kernels and torch's operators under torch.compile are timed in the same process,
captured in CUDA graphs as `cutegemm.tuner.timing` does it, in an order that is reversed from round to round. Rates
count the bytes that one pass must move: the matrix read, values and scales written; of the copy read and written. Our
results are compared with the definition in torch, bit by bit, first; a wrong one is not timed.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

import cutegemm
from cutegemm.problem import quantization
from cutegemm.problem.quantization import BLOCKS, FORMATS, NAMED, ROWS, TENSOR, Group
from cutegemm.tuner import timing
from tuning import cli
from tuning.bench_report import ratios_text, short_text

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SCALINGS: dict[str, Group] = {"tensor": TENSOR, "rows": ROWS} | {
    f"blocks {rows}x{k}": group for (rows, k), group in BLOCKS.items()
}
SHAPES = ((16, 7168), (128, 16384), (4096, 4096), (4096, 14336), (8192, 8192))
"""(rows, K): activations of decoding and of prefill, and a weight."""
AIM = 0.85
"""Share of a copy's rate that is wanted."""


@dataclass(frozen=True)
class Case:
    """One quantization. turned: K is the dimension along which x is not contiguous."""

    rows: int
    k: int
    dtype: str
    values: str
    scaling: str
    turned: bool = False

    @property
    def group(self) -> Group:
        return SCALINGS[self.scaling]

    @property
    def options(self) -> dict[str, Any]:
        """Of `cutegemm.quantize`."""
        block = tuple(self.group) if self.scaling.startswith("blocks") else (1, 128)
        return {"dtype": NAMED[self.values].dtype, "scaling": self.scaling.split()[0], "block": block}

    @property
    def bytes_moved(self) -> int:
        """The matrix read once, values and scales written."""
        shape = self.group.scales((self.rows, self.k))
        scales = shape[0] * shape[1] if shape else 1
        return self.rows * self.k * (DTYPES[self.dtype].itemsize + 1) + 4 * scales

    def draw(self, device: str, seed: int) -> torch.Tensor:
        """x, (rows, K)."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.k, self.rows) if self.turned else (self.rows, self.k)
        x = torch.randn(shape, generator=generator, device=device).to(DTYPES[self.dtype])
        return x.t() if self.turned else x

    def __str__(self) -> str:
        major = ", K not contiguous" if self.turned else ""
        return f"{self.dtype} to {self.values}, {self.scaling}{major}"


def cases(shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Case]:
    """Every scaling of bf16 to e4m3; the other formats, fp32 and the other major by rows."""
    found = [Case(rows, k, "bf16", "e4m3", scaling) for (rows, k), scaling in itertools.product(shapes, SCALINGS)]
    rows, k = shapes[-1]
    found += [Case(rows, k, "bf16", values, "rows") for values in NAMED if values != "e4m3"]
    found += [Case(rows, k, "fp32", "e4m3", "rows")]
    return found + [Case(rows, k, "bf16", "e4m3", scaling, turned=True) for scaling in SCALINGS]


def by_torch(x: torch.Tensor, dtype: torch.dtype, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition by torch's operators, for torch.compile."""
    format = FORMATS[dtype]
    scale = quantization.scale_of(x, format, group)
    return quantization.values_of(x, scale, format), scale


def is_right(case: Case, x: torch.Tensor) -> bool:
    """Whether our values and scales are those of the definition, bit by bit."""
    values, scale = cutegemm.quantize(x, **case.options)
    want, scales = by_torch(x, values.dtype, case.group)
    return torch.equal(scale, scales) and torch.equal(values.view(torch.uint8), want.contiguous().view(torch.uint8))


def time_case(case: Case, sets: int, rounds: int, compiled: bool) -> Mapping[str, timing.Timing]:
    """Times of the copy, our kernels, dequantization and, if wanted, torch.compile."""
    inputs = [case.draw("cuda", seed) for seed in range(sets)]
    results = [cutegemm.quantize(x, **case.options) for x in inputs]
    copies = [torch.empty_like(x) for x in inputs]
    calls: dict[str, list[Callable[[], Any]]] = {
        "copy": [functools.partial(to.copy_, x) for to, x in zip(copies, inputs, strict=True)],
        "ours": [
            functools.partial(cutegemm.quantize, x, **case.options, out=out)
            for x, out in zip(inputs, results, strict=True)
        ],
        "back": [
            functools.partial(cutegemm.dequantize, *result, out=torch.empty_like(result[0], dtype=x.dtype))
            for x, result in zip(inputs, results, strict=True)
        ],
    }
    if compiled:
        torch.compiler.reset()  # what other sizes compiled counts towards a limit
        faster = torch.compile(by_torch, fullgraph=True, dynamic=False)
        calls["compile"] = [functools.partial(faster, x, case.options["dtype"], case.group) for x in inputs]
    return timing.interleaved(calls, 0.0, rounds)


Row = tuple[Case, Mapping[str, timing.Timing]]


def of_copy(row: Row) -> tuple[float, float]:
    """Bytes that our kernels and a copy move in a microsecond."""
    case, found = row
    copied = 2 * case.rows * case.k * DTYPES[case.dtype].itemsize
    return case.bytes_moved / found["ours"].us, copied / found["copy"].us


def table(rows: Sequence[Row]) -> str:
    """Microseconds, GB/s, our rate over a copy's, and torch.compile's time over ours."""
    lines = []
    for case, found in rows:
        rate, copied = (each / 1e3 for each in of_copy((case, found)))
        line = [str(case), f"{case.rows}x{case.k}", found["ours"].us]
        line += [f"{found['ours'].low:.1f} .. {found['ours'].high:.1f}", rate, copied, rate / copied]
        line += [case.bytes_moved / found["back"].us / 1e3 / copied]
        lines.append([*line, found["compile"].us / found["ours"].us if "compile" in found else None])
    headers = ["quantization", "rows x K", "us", "spread", "GB/s", "a copy's", "of it", "back, of it", "compile/ours"]
    return tabulate(lines, headers, floatfmt=("", "", ".1f", "", ".0f", ".0f", ".2f", ".2f", ".2f"), missingval="-")


def summary(rows: Sequence[Row]) -> str:
    """The geometric mean of our rates over a copy's, the least, and the cases below what is wanted."""
    ratios = [(f"{row[0]} {row[0].rows}x{row[0].k}", rate / copied) for row in rows for rate, copied in [of_copy(row)]]
    lines = [f"of a copy's rate: {ratios_text(ratios)}", short_text(ratios, AIM)] if ratios else []
    return "\n".join(filter(None, lines))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every case was right."""
    return cli.time_cases(
        "quantize", "Times quantization beside a copy and torch.compile.", arguments,
        {f"{case} {case.rows}x{case.k}": case for case in cases()},
        wrong=lambda case: "" if is_right(case, case.draw("cuda", 1000)) else "wrong",
        moved=lambda case: case.bytes_moved + case.rows * case.k * DTYPES[case.dtype].itemsize,
        time_case=time_case, table=table, summary=summary,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
