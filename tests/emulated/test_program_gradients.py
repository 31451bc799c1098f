"""Backward passes of epilogue programs whose every step is a kernel, run in the emulator."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.pytorch import autograd

K, M, N = 32, 40, 64


def test_a_gated_mlp_runs_kernels(seed, monkeypatch):
    """Its gate and up are outputs of the first kernel, and dgate and dup those of the one that makes dH."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm90")
    torch.manual_seed(seed)
    found = []
    modules = [cutegemm.nn.SwiGLU(K, N, dtype=torch.bfloat16, backend=backend) for backend in ("cute", "torch")]
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(M, K).bfloat16().requires_grad_()
    for module in modules:
        y = module(x)
        found.append((y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=2.0**-6, atol=2.0**-6 * float(theirs.abs().max())
        )  # fmt: skip


def gelu_bias_gate(acc, bias, gate):
    return ops.gelu(acc + bias) * gate, ops.row_sum(acc)


@pytest.mark.parametrize(
    ("arch", "function", "shapes", "save"),
    [
        ("sm80", gelu_bias_gate, [(N,), (M, N)], "outputs"),
        ("sm90", ops.swiglu, [], "recompute"),
    ],
)
@pytest.mark.product(keep=1)
def test_backward_passes_run_kernels(arch, function, shapes, save, seed, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", arch)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in ((M, K), (K, N), *shapes)
    ]  # fmt: skip
    asked = []
    gemm = autograd._gemm
    monkeypatch.setattr(
        autograd, "_gemm", lambda a, b, **options: asked.append((a.shape[-1], options)) or gemm(a, b, **options)
    )

    def gradients(backend):
        a, b, *operands = inputs
        results = cutegemm.gemm(a, b, epilogue=function, operands=operands, backend=backend, save=save)
        results = results if isinstance(results, tuple) else (results,)
        grads = [torch.ones_like(each) for each in results]
        return torch.autograd.grad(results, inputs, grads)

    got = gradients("cute")
    derived = [depth for depth, options in asked if options.get("epilogue") is not None]
    assert derived == [K if save == "recompute" else 0]
    assert {options["backend"] for _, options in asked} == {"cute"}
    for x, y, like in zip(got, gradients("torch"), inputs, strict=True):
        assert (x.dtype, x.shape) == (like.dtype, like.shape)
        # Each is a sum of at most 64 terms rounded to bf16, 2^-9, at different places of the two ways.
        torch.testing.assert_close(x.float(), y.float(), rtol=2.0**-6, atol=2.0**-6 * float(y.abs().max()))


@pytest.mark.parametrize("grouped", [False, True], ids=["gemm", "grouped"])
@pytest.mark.product(keep=1)
def test_a_gradient_in_fp8_is_read_by_a_kernel(grouped, seed, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm90")
    torch.manual_seed(seed)
    a, b = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(2, N, K).bfloat16()
    found = []
    for backend in ("cute", "torch"):
        if grouped:
            given = a, b.mT, torch.tensor([M // 4, M], dtype=torch.int32)
            d = cutegemm.grouped_gemm(*given, epilogue=ops.gelu, out_dtype=torch.float8_e4m3fn, backend=backend)
        else:
            d = cutegemm.gemm(a, b[0].t(), epilogue=ops.gelu, out_dtype=torch.float8_e4m3fn, backend=backend)
        found += torch.autograd.grad(d, a, torch.ones_like(d))
    torch.testing.assert_close(*found, rtol=2.0**-6, atol=2.0**-6 * float(found[1].abs().max()))
