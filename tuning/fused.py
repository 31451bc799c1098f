"""Times epilogue programs: `python -m tuning.fused`, on a GPU.

For each case the plain product, the product with the program, torch eager and torch.compile are timed in the same
process, captured in CUDA graphs as `cutegemm.tuner.timing` does it, in an order that is reversed from round to round.
Every result of ours is checked against the float64 reference first; a wrong one is not timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

import cutegemm
from cutegemm import ops
from cutegemm.problem import program_request, reference
from cutegemm.problem.program import bound
from cutegemm.tuner import timing
from tuning import cli, epilogues

Tensors = tuple[Any, ...]
functional = torch.nn.functional


@dataclass(frozen=True)
class Case:
    """One program, and what torch writes for it.

    Attributes:
        name: as the table shows it. m, n, k: of the product; n counts the columns of the accumulators.
        epilogue: the function of acc and the operands.
        operands: makes them, for (m, n, device).
        eager: of (x, w, *operands), with w (k, n): the same by torch's operators; one tensor or a tuple.
    """

    name: str
    m: int
    n: int
    k: int
    epilogue: Callable[..., Any]
    eager: Callable[..., Any]
    operands: Callable[[int, int, Any], Tensors] = lambda m, n, device: ()

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


def _swiglu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w).chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gelu_bias_residual(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x @ w + bias) + residual


def _vector_and_matrix(m: int, n: int, device: Any) -> Tensors:
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    return make(n), make(m, n)


def _matrix(m: int, n: int, device: Any) -> Tensors:
    return (torch.randn(m, n, device=device, dtype=torch.bfloat16),)


def _angles(m: int, n: int, device: Any) -> Tensors:
    """Cosines and sines of the first two thirds of the columns (Q and K), 1 and 0 for V."""
    turned = n // 3 * 2 // 2 * 2
    angle = torch.zeros(m, n, device=device)
    rates = 10000.0 ** (-torch.arange(turned // 2, device=device) % 64 / 64)
    angle[:, :turned] = (torch.arange(m, device=device)[:, None] * rates).repeat_interleave(2, dim=1)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def _rope(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = x @ w
    even, odd = y.unflatten(-1, (-1, 2)).unbind(-1)
    return y * cos + torch.stack((-odd, even), -1).flatten(-2) * sin


def _head_angles(m: int, n: int, device: Any) -> tuple[Any, ...]:
    """Cosines and sines (M, 128) that all heads share, as models hold them, and the first column of V: Llama-3-8B's QKV
    has 32 heads of Q, 8 of K and 8 of V.
    """
    rates = 10000.0 ** (-torch.arange(64, device=device) / 64)
    angle = (torch.arange(m, device=device)[:, None] * rates).repeat_interleave(2, dim=1)
    return angle.cos().bfloat16(), angle.sin().bfloat16(), n * 5 // 6 // 128 * 128


def _rope_heads(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, values: int) -> torch.Tensor:
    y = x @ w
    heads = y[:, :values].unflatten(-1, (values // cos.shape[-1], cos.shape[-1]))
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    turned = heads * cos[:, None] + torch.stack((-odd, even), -1).flatten(-2) * sin[:, None]
    return torch.cat((turned.flatten(-2), y[:, values:]), -1)


def _residual_and_squares(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> Tensors:
    y = x @ w + residual
    return y, y.float().square().sum(-1)


def cases(scale: int = 1) -> list[Case]:
    """The cases of issue 19's table. `scale`: divides every size, for a look at small ones."""

    def case(name: str, m: int, n: int, k: int, *rest: Any) -> Case:
        return Case(name, max(m // scale, 1), n // scale // 16 * 16, k // scale // 16 * 16, *rest)

    return [
        case("swiglu", 512, 2 * 5504, 2048, ops.swiglu, _swiglu),
        case("swiglu", 16, 2 * 14336, 4096, ops.swiglu, _swiglu),
        case("swiglu", 4096, 2 * 14336, 4096, ops.swiglu, _swiglu),
        case("silu", 4096, 4096, 4096, ops.silu, lambda x, w: functional.silu(x @ w)),
        *(
            case(
                "gelu(acc + bias) + residual", *sizes, epilogues.gelu_bias_residual,
                _gelu_bias_residual, _vector_and_matrix,
            )
            for sizes in ((4096, 4096, 4096), (512, 4096, 14336))
        ),
        case("rope", 4096, 6144, 4096, ops.rope, _rope, _angles),
        case("rope, heads of 128", 4096, 6144, 4096, epilogues.rope_heads, _rope_heads, _head_angles),
        case(
            "residual, row sums of squares", 4096, 4096, 4096, epilogues.residual_squares, _residual_and_squares,
            _matrix,
        ),
        case(
            "silu and the accumulators", 4096, 4096, 4096, lambda acc: (ops.silu(acc), acc),
            lambda x, w: (functional.silu(y := x @ w), y),
        ),
    ]  # fmt: skip


def draw(case: Case, device: Any, seed: int) -> Tensors:
    """x (m, k), w (k, n) as a layer's weight has it (K-major), and the operands; normal numbers."""
    torch.manual_seed(seed)
    x = torch.randn(case.m, case.k, device=device, dtype=torch.bfloat16)
    w = torch.randn(case.n, case.k, device=device, dtype=torch.bfloat16).t() / case.k**0.5
    return x, w, *case.operands(case.m, case.n, device)


def fused(case: Case, given: Tensors, **options: Any) -> Any:
    """The case by one call of `gemm`."""
    x, w, *operands = given
    return cutegemm.gemm(x, w, epilogue=case.epilogue, operands=tuple(operands), **options)


def checked(case: Case, given: Tensors, **options: Any) -> str:
    """Runs our call once; "" when every result lies within its bound, else what is wrong."""
    x, w, *operands = given
    got = fused(case, given, **options)
    asked = program_request.describe(x, w, case.epilogue, tuple(operands), None, None, None)
    acc, _, error = reference.accumulators(x, w)
    want = bound.bounds(asked.program, acc, error, tuple(operands))
    for each, wanted in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        verdict = bound.check(each, wanted)
        if not verdict.ok:
            return verdict.message
    return ""


def time_case(case: Case, sets: int, rounds: int, compiled: bool) -> Mapping[str, timing.Timing]:
    """Times of the product alone, our program, torch eager and, if wanted, torch.compile."""
    inputs = [draw(case, "cuda", seed) for seed in range(sets)]
    eager = case.eager
    ways: dict[str, Callable[[Tensors], Any]] = {
        "product": lambda given: cutegemm.gemm(given[0], given[1]),
        "ours": lambda given: fused(case, given),
        "eager": lambda given: eager(*given),
    }
    if compiled:
        faster = torch.compile(eager, fullgraph=True, dynamic=False)
        ways["compile"] = lambda given: faster(*given)
    calls = {name: [functools.partial(way, given) for given in inputs] for name, way in ways.items()}
    return timing.interleaved(calls, case.flops, rounds)


def table(rows: Sequence[tuple[Case, Mapping[str, timing.Timing]]]) -> str:
    """Microseconds of each way, what the program costs over the product, and its ratio to torch's ways."""
    lines = []
    for case, found in rows:
        ours = found["ours"].us
        line = [case.name, f"{case.m}x{case.n}x{case.k}", found["product"].us, ours]
        line += [f"{found['ours'].low:.1f} .. {found['ours'].high:.1f}", f"{ours / found['product'].us - 1:+.1%}"]
        line += [found[name].us / ours if name in found else None for name in ("eager", "compile")]
        lines.append(line)
    headers = ["epilogue", "MxNxK", "product us", "ours us", "spread", "over it", "eager/ours", "compile/ours"]
    return tabulate(lines, headers, floatfmt=("", "", ".1f", ".1f", "", "", ".2f", ".2f"), missingval="-")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every case was right."""
    return cli.time_cases(
        "fused", "Times epilogue programs beside torch eager and torch.compile.", arguments,
        {f"{case.name} {case.m}x{case.n}x{case.k}": case for case in cases()},
        wrong=lambda case: (message := checked(case, draw(case, "cuda", 1000))) and f"wrong: {message}",
        moved=lambda case: 2 * (case.m * case.k + case.n * case.k + case.m * case.n),
        time_case=time_case, table=table,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
