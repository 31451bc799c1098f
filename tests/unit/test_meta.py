"""Tensors on the meta device, which have no memory: calls and layers say what shape and dtype their results have."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cutegemm
from cutegemm import nn, ops

M, N, K, GROUPS, TOP_K = 24, 48, 32, 4, 2
E4M3 = torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, gradient: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient)


def ends() -> torch.Tensor:
    return meta(GROUPS, dtype=torch.int32)


def scale() -> torch.Tensor:
    return meta(1, dtype=torch.float32)


def sums(acc, factor):
    return ops.row_sum(acc * factor)


def mixture(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    experts = meta(M, TOP_K, dtype=torch.int64)
    return cutegemm.moe(x, experts, meta(M, TOP_K), gate_up, meta(GROUPS, N, 40))


CALLS = {
    "gemm": (lambda: cutegemm.gemm(meta(M, K), meta(K, N)), (M, N), torch.bfloat16),
    "gemm of a batch": (lambda: cutegemm.gemm(meta(3, M, K), meta(K, N)), (3, M, N), torch.bfloat16),
    "gemm with c, bias": (
        lambda: cutegemm.gemm(meta(M, K), meta(K, N), meta(M, N), beta=1.0, bias=meta(N), out_dtype=torch.float32),
        (M, N), torch.float32,
    ),
    "gemm into": (lambda: cutegemm.gemm(meta(M, K), meta(K, N), out=meta(M, N)), (M, N), torch.bfloat16),
    "gemm with a program": (
        lambda: cutegemm.gemm(meta(M, K), meta(K, N), epilogue=sums, operands=(meta(M, 1),)),
        (M, 1), torch.float32,
    ),
    "gemm in fp8": (
        lambda: cutegemm.gemm(meta(M, K, dtype=E4M3), meta(K, N, dtype=E4M3), scale_a=scale(), scale_b=scale()),
        (M, N), torch.bfloat16,
    ),
    "linear": (lambda: cutegemm.linear(meta(2, M, K), meta(N, K)), (2, M, N), torch.bfloat16),
    "grouped_gemm": (lambda: cutegemm.grouped_gemm(meta(M, K), meta(GROUPS, K, N), ends()), (M, N), torch.bfloat16),
    "grouped_gemm of groups of K": (
        lambda: cutegemm.grouped_gemm(meta(M, K), meta(K, N), ends()), (GROUPS, M, N), torch.bfloat16,
    ),
    "moe": (lambda: mixture(meta(M, K), meta(GROUPS, 80, K)), (M, N), torch.bfloat16),
    "quantize": (lambda: cutegemm.quantize(meta(M, K), E4M3, "rows")[0], (M, K), E4M3),
    "dequantize": (
        lambda: cutegemm.dequantize(meta(M, K, dtype=E4M3), meta(M, 1, dtype=torch.float32)), (M, K), torch.bfloat16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_what_it_gives(name):
    call, shape, dtype = CALLS[name]
    found = call()
    assert (found.device.type, found.shape, found.dtype) == ("meta", shape, dtype)


RECORDED = {
    "gemm": lambda a: cutegemm.gemm(a, meta(K, N), activation="gelu"),
    "gemm with a program": lambda a: cutegemm.gemm(a, meta(K, N), epilogue=ops.gelu),
    "linear": lambda a: cutegemm.linear(a, meta(N, K)),
    "grouped_gemm": lambda a: cutegemm.grouped_gemm(a, meta(GROUPS, K, N), ends()),
    "moe": lambda a: mixture(a, meta(GROUPS, 80, K)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_gradients_have_shapes_too(name):
    a = meta(M, K, gradient=True)
    RECORDED[name](a).sum().backward()
    assert a.grad is not None
    assert (a.grad.device.type, a.grad.shape, a.grad.dtype) == ("meta", a.shape, a.dtype)


def layers() -> dict[str, torch.nn.Module]:
    with torch.device("meta"):
        experts = nn.MoE(K, 40, GROUPS, top_k=TOP_K).bfloat16()
        return {
            "Linear": nn.Linear(K, K).bfloat16(),
            "SwiGLU": nn.SwiGLU(K, 40).bfloat16(),
            "MoE": experts,
            "Fp8Linear": nn.Fp8Linear(K, K),
            "Fp8MoE": nn.Fp8MoE.from_weights(
                experts.gate_up_proj, experts.down_proj, router=experts.router, scaling="rows"
            ),
        }


@pytest.mark.parametrize("name", ["Linear", "SwiGLU", "MoE", "Fp8Linear", "Fp8MoE"])
def test_layers_of_a_model_on_the_meta_device(name):
    layer = layers()[name]
    with torch.no_grad():
        found = layer(meta(M, K))
    assert (found.device.type, found.shape, found.dtype) == ("meta", (M, K), torch.bfloat16)


def test_flops_are_counted_without_memory():
    with FlopCounterMode(display=False) as counter:
        cutegemm.gemm(meta(M, K), meta(K, N))
    assert counter.get_total_flops() == 2 * M * N * K


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cutegemm.gemm(meta(M, K), torch.ones(K, N).bfloat16()), "b: it is on cpu, .* of a, meta"),
        (lambda: cutegemm.gemm(torch.ones(M, K).bfloat16(), meta(K, N)), "b: it is on meta, .* of a, cpu"),
        (lambda: cutegemm.linear(meta(M, K), torch.ones(N, K).bfloat16()), "weight: it is on cpu, .* of x, meta"),
        (lambda: mixture(meta(M, K), torch.ones(GROUPS, 80, K).bfloat16()), "w_gate_up: it is on cpu, .* of x, meta"),
        (lambda: cutegemm.gemm(meta(M, K), meta(K + 1, N)), r"b: got shape \(33, 48\); with a of shape"),
        (lambda: cutegemm.explain(meta(M, K), meta(K, N)), "a: it is on meta, accepted are CUDA and CPU tensors"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
