"""CUTLASS 2.x kernels of every kind in the emulator, from the PTX of the build that a GPU would run.

All kernels of this file are compiled as one translation unit, once: CUTLASS's headers take as long as six of them.
The kernel store keeps it between runs.
"""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.choice import plan
from cutegemm.cutlass2x import BACKEND, build, build_many
from cutegemm.errors import GemmError
from tests import needs
from tests.problems import Case

pytest.importorskip("llvmlite", reason="the emulator needs llvmlite")

TENSOR, TF32, SIMT = "i16x8x16", "i16x8x8", "i1x1x1"

# name: (sizes, dtype, configuration, options)
CASES: dict[str, tuple[tuple[int, int, int], str, str, dict]] = {
    "fp16": ((72, 40, 72), "fp16", f"64x64x32/w32x32x32/s3/{TENSOR}/id1", {}),
    "C": ((136, 72, 40), "fp16", f"64x64x32/w32x32x32/s4/{TENSOR}/id4", {"c": True, "alpha": 0.75, "beta": -1.5}),
    "bias, horizontal": (
        (96, 72, 64), "bf16", f"64x64x32/w32x32x32/s3/{TENSOR}/h",
        {"majors": "nt", "bias": True, "activation": "gelu"},
    ),
    "odd, two stages": ((33, 35, 37), "fp16", f"64x64x32/w32x32x32/s2/{TENSOR}/id1", {"majors": "nn"}),
    "split-K": (
        (40, 72, 264), "fp16", f"64x64x32/w32x32x32/s3/{TENSOR}/id1/k4",
        {"c": True, "beta": 0.5, "activation": "relu"},
    ),
    "split-K into fp32": (
        (40, 72, 264), "fp16", f"64x64x32/w32x32x32/s3/{TENSOR}/id1/k3", {"out_dtype": torch.float32, "alpha": 2.0},
    ),
    "split-K into fp32, relu": (
        (40, 72, 97), "fp32", f"64x64x16/w32x32x16/s3/{TF32}/id1/k4",
        {"precision": "tf32", "activation": "relu", "alpha": -2.0},
    ),
    "split-K into fp32, silu": (
        (40, 72, 97), "fp32", f"64x64x16/w32x32x16/s3/{TF32}/id1/k4",
        {"precision": "tf32", "activation": "silu", "bias": True},
    ),
    "stream-K": ((72, 136, 200), "fp16", f"64x64x32/w32x32x32/s3/{TENSOR}/streamk", {}),
    "tf32": ((72, 40, 72), "fp32", f"64x64x16/w32x32x16/s3/{TF32}/id2", {"precision": "tf32", "majors": "nt"}),
    "tf32x3": ((72, 40, 72), "fp32", f"64x64x16/w32x32x16/s3/{TF32}/id1", {"precision": "tf32x3"}),
    "SIMT": ((67, 41, 29), "fp32", f"64x64x8/w32x32x8/s4/{SIMT}/id1", {"majors": "tt"}),
    "SIMT, silu": ((67, 41, 29), "fp32", f"32x32x8/w16x32x8/s2/{SIMT}/id1", {"activation": "silu", "bias": True}),
    "K = 0": ((40, 24, 0), "fp16", f"64x64x32/w32x32x32/s2/{TENSOR}/id1", {"c": True, "beta": 0.5}),
    "SIMT, K = 0": ((40, 24, 0), "fp32", f"64x64x8/w32x32x8/s4/{SIMT}/id1", {}),
    "batch": ((40, 72, 64), "fp16", f"64x64x32/w32x32x32/s3/{TENSOR}/id1", {"batch": 3}),
}  # fmt: skip
MORE = {
    "C", "odd, two stages", "split-K into fp32", "split-K into fp32, relu", "split-K into fp32, silu", "stream-K",
    "tf32x3", "SIMT, silu", "K = 0", "SIMT, K = 0",
}  # fmt: skip
"""Those whose kernels `make nightly` compiles."""


def made(name: str, seed: int) -> tuple[Case, str]:
    (m, n, k), dtype, config, options = CASES[name]
    return Case.random(m, n, k, dtype, seed=seed, **options), f"cutlass2x/{config}"


@pytest.fixture(scope="module", autouse=True)
def kernels(request):
    """Compiles the kernels of all chosen cases together. Skips where there is no nvcc, saying what is missing."""
    pairs = []
    chosen = {item.name for item in request.session.items}
    for name in CASES:
        if name not in MORE or f"test_right_in_the_emulator[{name}]" in chosen:
            case, config = made(name, 0)
            pairs.append((case.problem().signature, BACKEND.parse(config)))
    needs.cutlass2x()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "MOST_PER_UNIT", len(CASES))
        return build_many(list(dict.fromkeys(pairs)), plan.emulated_arch(), jobs=1)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in CASES])
def test_right_in_the_emulator(name, seed):
    case, config = made(name, seed)
    case.run(backend="cutlass2x", config=config)


@pytest.mark.parametrize("name", ["fp16", "tf32", "SIMT"])
def test_infinities_and_nans_go_where_the_reference_puts_them(name, seed):
    case, config = made(name, seed)
    case.a[3, 5], case.a[10, 0], case.b[7, 9] = float("inf"), float("nan"), float("-inf")
    case.run(backend="cutlass2x", config=config)


def test_a_misaligned_bias_is_refused(seed):
    case, config = made("bias, horizontal", seed)
    bias = torch.zeros(73, dtype=torch.bfloat16)[1:]
    with pytest.raises(GemmError, match=r"bias: its address .*\(bias\.clone"):
        cutegemm.gemm(case.a, case.b, bias=bias, activation="gelu", backend="cutlass2x", config=config)


@pytest.mark.slow
def test_tf32x3_is_far_closer_than_tf32(seed):
    case, config = made("tf32x3", seed)
    want = case.a.double() @ case.b.double()
    errors = {}
    for name in ("tf32x3", "tf32"):
        # Without its low halves every product is TF32's: that error is the yardstick.
        a, b = (case.a, case.b) if name == "tf32x3" else (rounded(case.a), rounded(case.b.mT).mT)
        got = cutegemm.gemm(a, b, precision="tf32x3", backend="cutlass2x", config=config)
        errors[name] = float((got.double() - want).abs().max())
    assert errors["tf32x3"] < errors["tf32"] / 50


def rounded(x: torch.Tensor) -> torch.Tensor:
    """fp32 numbers cut to TF32's ten mantissa bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
