"""PyTorch's own OpInfo samples of the matrix products, forward and gradients, through `gemm` and `linear`.

What is compared: the result and every gradient, elementwise, with the same operator in float64 on the same numbers.

The bound, with M the operator of absolute values (|x|, |alpha|, ...), also differentiated with |dD|: a result or
gradient is a sum of products, its terms sum to at most M in magnitude, and each operator is built of gemms and sums,
so that |got - exact| <= (gamma_T(fp32) + roundings * u(dtype)) M + a few subnormals, T the number of fp32 additions.
Forward rounds once. A gradient rounds dD to the operands' dtype, the product, a multiple (beta dZ) and a sum over
what was broadcast: four times.
"""

from __future__ import annotations

import argparse
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import cutegemm
from cutegemm.problem import dtype_name, reference
from cutegemm.problem.dtypes import TABLE

OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear")
NAMES = (
    "mm", "addmm", "addmm decomposed", "bmm", "bmm triton_optimized", "baddbmm", "matmul", "nn.functional.linear",
)  # fmt: skip
"""Samples of these, operator and variant; a variant that a version of torch lacks has none."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def operators() -> dict[str, Any]:
    """OpInfo by name (variants named too). Imports torch's test helpers, which want `expecttest`."""
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:
        # Only the base class of torch's own test cases comes from there; no case of theirs runs here.
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        # What torch's helpers import may deprecate something.
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    found = [op for op in op_db if op.name in OPERATORS]
    return {f"{op.name} {op.variant_test_name}".strip(): op for op in found}


@dataclass
class Sample:
    """One OpInfo sample: tensors by name, and the operator by torch and by us as functions of these tensors."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float]
    torch_op: Callable[..., torch.Tensor]
    ours: Callable[..., torch.Tensor]

    def detached(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors changed, each a leaf that requires grad where the sample's does."""
        return {
            name: change(tensor.detach()).requires_grad_(tensor.requires_grad) for name, tensor in self.tensors.items()
        }


class NotApplicable(Exception):
    """The sample asks for something that gemm does not offer; the message says what."""


def samples(name: str, op: Any, device: str, dtype: torch.dtype, options: dict[str, Any]) -> Iterator[Any]:
    """The operator's samples as `Sample` or `NotApplicable`, each also with non-contiguous tensors.

    options: passed to `gemm` and `linear` (a backend).
    """
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        for given in (sample, sample.noncontiguous()):
            try:
                yield _adapt(name.split()[0], given, options)
            except NotApplicable as why:
                yield why


def _adapt(name: str, sample: Any, options: dict[str, Any]) -> Sample:
    x, arguments, keywords = sample.input, list(sample.args), dict(sample.kwargs)
    numbers = {key: keywords.pop(key) for key in ("alpha", "beta") if key in keywords}
    if keywords:
        raise NotApplicable(f"{name}: keyword {', '.join(keywords)}")
    if any(isinstance(number, complex) for number in numbers.values()):
        raise NotApplicable(f"{name}: complex alpha or beta")
    function = torch.nn.functional.linear if name == "nn.functional.linear" else getattr(torch, name)
    names = {"addmm": "cab", "baddbmm": "cab"}.get(name, "abc")
    tensors = dict(zip(names, (x, *arguments), strict=False))

    def by_torch(numbers: dict[str, float], **t: torch.Tensor) -> torch.Tensor:
        return function(*(t[key] for key in names if key in t), **numbers)

    def by_us(**t: torch.Tensor) -> torch.Tensor:
        if name == "nn.functional.linear":
            return cutegemm.linear(t["a"], t["b"], t.get("c"), **options)
        if name in ("addmm", "baddbmm"):
            known = {"alpha": numbers.get("alpha", 1), "beta": numbers.get("beta", 1)}
            return cutegemm.gemm(t["a"], t["b"], t["c"], **known, **options)
        return _matmul(t["a"], t["b"], options) if name == "matmul" else cutegemm.gemm(t["a"], t["b"], **options)

    return Sample(tensors, numbers, by_torch, by_us)


def _matmul(a: torch.Tensor, b: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """torch.matmul's rules for any number of dimensions on top of gemm's two and three."""
    squeeze = []
    if a.dim() == 1:
        a, squeeze = a.unsqueeze(0), [-2]
    if b.dim() == 1:
        b = b.unsqueeze(1)
        squeeze = [*squeeze, -1]
    if max(a.dim(), b.dim()) > 3:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        merged = [t.expand(*batch, *t.shape[-2:]).reshape(batch.numel(), *t.shape[-2:]) for t in (a, b)]
        d = cutegemm.gemm(*merged, **options)
        d = d.view(*batch, *d.shape[-2:])
    else:
        d = cutegemm.gemm(a, b, **options)
    for dim in squeeze:
        d = d.squeeze(dim)
    return d


def check(sample: Sample, seed: int) -> int:
    """Compares result and gradients; returns how many tensors were compared. Raises AssertionError."""
    generator = torch.Generator().manual_seed(seed)
    mine = sample.detached(lambda t: t)
    exact = sample.detached(lambda t: t.double())
    sizes = sample.detached(lambda t: t.double().abs())
    got = sample.ours(**mine)
    want = sample.torch_op(sample.numbers, **exact)
    magnitude = sample.torch_op({key: abs(value) for key, value in sample.numbers.items()}, **sizes)
    depth = sum(t.numel() // min(t.shape, default=1) if t.numel() else 0 for t in mine.values())
    _compare("result", got, want.detach(), magnitude.detach(), depth, 1)
    compared = 1
    if not got.requires_grad:
        return compared
    grad = torch.randn(got.shape, generator=generator).to(got.device, got.dtype)
    got.backward(grad)
    want.backward(grad.double())
    magnitude.backward(grad.double().abs())
    for name, tensor in mine.items():
        if tensor.requires_grad:
            assert tensor.grad is not None, f"no gradient of {name}"
            _compare(f"gradient of {name}", tensor.grad, exact[name].grad, sizes[name].grad, depth, 4)
            compared += 1
    return compared


def _compare(what: str, got: Any, value: Any, magnitude: Any, depth: int, roundings: int) -> None:
    name = dtype_name(got.dtype)
    assert name is not None
    unit = 2.0**-24 if name == "fp32" else 2.0**-23
    relative = reference._gamma(depth + 8, unit) + roundings * 1.01 * TABLE[name].roundoff
    bound = relative * magnitude + (roundings + depth) * TABLE[name].smallest
    verdict = reference.check(got.detach(), reference.Expected(value, bound, got.dtype))
    assert verdict.ok, f"{what}: {verdict.message}"


def left_out(op: Any, device: str) -> Counter[str]:
    """How many samples are not applicable because of their dtype, by reason."""
    offered = op.dtypesIfCUDA if device == "cuda" else op.dtypes
    found = Counter[str]()
    for dtype in offered - set(DTYPES):
        kind = "complex" if dtype.is_complex else "float64" if dtype.is_floating_point else "integer"
        reason = f"{kind} operands (compared are float16, bfloat16, float32)"
        found[reason] += len(list(op.sample_inputs(device, dtype)))
    return found


def run(name: str, op: Any, device: str, dtype: torch.dtype, seed: int, **options: Any) -> tuple[int, Counter[str]]:
    """Checks every sample of one operator in one dtype; returns how many passed, and the others by reason."""
    torch.manual_seed(seed)
    passed, others = 0, Counter[str]()
    for number, sample in enumerate(samples(name, op, device, dtype, options)):
        if isinstance(sample, NotApplicable):
            others[str(sample)] += 1
            continue
        try:
            check(sample, seed)
        except Exception as why:
            shapes = {key: (tuple(t.shape), t.stride()) for key, t in sample.tensors.items()}
            raise AssertionError(f"{name} {dtype} sample {number} {shapes} {sample.numbers}: {why}") from why
        passed += 1
    return passed, others


def main() -> int:
    """Runs all samples and prints the table of what passed and what is not applicable, and why."""
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--backend", default="auto", help="for CPU tensors a named one runs in the emulator")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch sees no CUDA device; accepted here is cpu")
    total, total_left = 0, Counter[str]()
    for name, op in operators().items():
        others, passed = left_out(op, options.device), 0
        for dtype in DTYPES:
            count, more = run(name, op, options.device, dtype, options.seed, backend=options.backend)
            passed, others = passed + count, others + more
        print(f"{name}: {passed} samples pass forward and backward, {others.total()} not applicable", flush=True)
        total, total_left = total + passed, total_left + others
    print(f"{total} samples pass; not applicable:")
    for reason, count in sorted(total_left.items()):
        print(f"  {count} with {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
