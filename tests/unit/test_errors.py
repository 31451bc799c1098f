"""Bad arguments: each message names the argument, what was given and what is accepted."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.errors import UnsupportedError

A, B = torch.ones(4, 6), torch.ones(6, 5)
BIG = torch.zeros(64, 64)

CASES = [
    ("list for a", ([[1.0]], B), {}, TypeError, r"a: got list, expected a torch\.Tensor"),
    ("one dimension", (A[0], B), {}, ValueError, r"a: got 1 dimensions, accepted are 2"),
    ("four dimensions", (A[None, None], B), {}, ValueError, r"a: got 4 dimensions"),
    ("int32", (A.int(), B.int()), {}, TypeError, r"a: got dtype torch\.int32, accepted are .*torch\.float64"),
    ("mixed dtypes", (A, B.half()), {}, TypeError, r"b: got dtype torch\.float16, expected that of a"),
    ("complex", (A.cfloat(), B.cfloat()), {}, TypeError, r"a: got dtype torch\.complex64; complex"),
    ("sparse", (A.to_sparse(), B), {}, TypeError, r"a: got layout torch\.sparse_coo, expected a dense"),
    ("K differs", (A, B[:5]), {}, ValueError, r"b: got shape \(5, 5\); .* K = 6"),
    (
        "batch differs",
        (A.expand(2, 4, 6), B.expand(3, 6, 5)),
        {},
        ValueError,
        r"b: got a batch of 3, expected .* 2, or 1",
    ),
    ("too large", (A[:1].expand(2**31 - 1024, 6), B), {}, ValueError, r"a, b: M is 2147482624; at most 2147482623"),
    ("meta device", (A.to("meta"), B), {}, ValueError, r"b: it is on cpu, expected the device of a, meta"),
    ("devices differ", (A, B.to("meta")), {}, ValueError, r"b: it is on meta, expected the device of a, cpu"),
    ("alpha tensor", (A, B), {"alpha": torch.ones(())}, TypeError, r"alpha: got Tensor, expected a Python float"),
    ("beta text", (A, B), {"beta": "1"}, TypeError, r"beta: got str"),
    ("alpha too large", (A, B), {"alpha": 1e39}, ValueError, r"alpha: got 1e\+39, which fp32 cannot hold"),
    ("beta without c", (A, B), {"beta": 1.0}, ValueError, r"beta: got 1\.0 without c"),
    ("c shape", (A, B, A), {"beta": 1.0}, ValueError, r"c: got shape \(4, 6\), expected \(4, 5\)"),
    ("c dtype", (A, B, torch.ones(4, 5).long()), {"beta": 1.0}, TypeError, r"c: got dtype torch\.int64"),
    ("bias shape", (A, B), {"bias": torch.ones(4)}, ValueError, r"bias: got shape \(4,\), expected \(5,\)"),
    ("bias dtype", (A, B), {"bias": torch.ones(5).double()}, TypeError, r"bias: got dtype torch\.float64"),
    ("activation", (A, B), {"activation": "tanh"}, ValueError, r"activation: got 'tanh', accepted are None, 'relu'"),
    ("out shape", (A, B), {"out": torch.ones(5, 4)}, ValueError, r"out: got shape \(5, 4\), expected \(4, 5\)"),
    ("out dtype", (A, B), {"out": torch.ones(4, 5).int()}, TypeError, r"out: got dtype torch\.int32"),
    (
        "out_dtype and out",
        (A, B),
        {"out": torch.ones(4, 5), "out_dtype": torch.float16},
        TypeError,
        r"out: got dtype torch\.float32, but out_dtype says torch\.float16",
    ),
    ("out_dtype", (A, B), {"out_dtype": torch.int16}, TypeError, r"out_dtype: got torch\.int16, accepted are"),
    (
        "out overlaps a",
        (BIG[:8, :8], BIG[8:16, :8].contiguous()),
        {"out": BIG[4:12, :8]},
        ValueError,
        r"out: it overlaps a",
    ),
    ("out repeats", (A, B), {"out": torch.ones(4, 1).expand(4, 5)}, ValueError, r"out: strides .* several times"),
    (
        "precision",
        (A, B),
        {"precision": "fp64"},
        ValueError,
        r"precision: got 'fp64', accepted are None, 'ieee', 'tf32', .*'bf16x9', and for fp8 'fast'$",
    ),
    ("tf32 of fp16", (A.half(), B.half()), {"precision": "tf32"}, ValueError, r"precision: got 'tf32' for fp16"),
    ("backend", (A, B), {"backend": "cublas"}, ValueError, r"backend: got 'cublas', accepted are 'auto', 'cute'"),
    (
        "config of torch",
        (A, B),
        {"backend": "torch", "config": "x"},
        ValueError,
        r"config: got 'x', but backend 'torch'",
    ),
    (
        "config text",
        (A, B),
        {"backend": "cute", "config": "fast"},
        ValueError,
        r"config: got 'fast', accepted for backend",
    ),
    (
        "config form",
        (A, B),
        {"backend": "cute", "config": "simt/1x2"},
        ValueError,
        r"config: got 'simt/1x2', accepted is simt/BM",
    ),
    (
        "config of CPU tensors without a backend",
        (A, B),
        {"config": "simt/64x64x8/w16x32/s4/g8"},
        ValueError,
        r"^config: got 'simt/64x64x8/w16x32/s4/g8' with backend='auto', .* CPU .*; name backend='cute' to run",
    ),
    (
        "config of another dtype",
        (A, B),
        {"backend": "cute", "config": "sm80/128x128x32/w64x64/s4/g8"},
        UnsupportedError,
        r"cannot serve .* fp32 as tf32, int8, .*; these operands are fp32 with precision 'ieee'",
    ),
    (
        "config too large",
        (A, B),
        {"backend": "cute", "config": "simt/256x128x32/w64x64/s8/g8"},
        UnsupportedError,
        r"shared memory; .* gives a CTA",
    ),
    (
        "tf32 by torch",
        (A, B),
        {"backend": "torch", "precision": "tf32"},
        UnsupportedError,
        r"needs backend 'cute' or 'cutlass2x'",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        cutegemm.gemm(*arguments, **options)


def test_explain_with_offsets_by_position_says_how_to_give_them():
    ends = torch.tensor([2, 5], dtype=torch.int32)
    for more in ({}, {"rows": torch.arange(5, dtype=torch.int32)}, {"epilogue": cutegemm.ops.relu}, {"counts": ends}):
        with pytest.raises(TypeError, match=r"offsets: got a tensor of torch\.int32 by position.*offsets=offsets"):
            cutegemm.explain(torch.ones(5, 4), torch.ones(2, 4, 3), ends, **more)


def test_unknown_option_of_explain():
    with pytest.raises(TypeError, match=r"gamma: no such argument, accepted are alpha"):
        cutegemm.explain(A, B, gamma=1)


def test_unknown_emulated_architecture(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_10")
    with pytest.raises(ValueError, match=r"CUTEGEMM_ARCH: got 'sm_10'"):
        cutegemm.gemm(torch.ones(3, 3), torch.ones(3, 3), backend="cute")
