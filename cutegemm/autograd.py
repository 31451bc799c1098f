"""Gradients of D = act(Z), Z = alpha * A @ B + beta * C + bias, their products through `gemm` itself.

With dZ = dD * act'(Z):   dA = alpha * dZ @ B^T   dB = alpha * A^T @ dZ   dC = beta * dZ   dbias = the column sums of dZ

Each is made of differentiable operations on the inputs, so that gradients of gradients are right. Z is therefore
computed again rather than kept from the forward pass, in D's dtype, which is what a layer without a fused activation
would have kept; relu needs only D. dZ is rounded to the operands' dtype before the products, as torch does.

An operand that the batch broadcasts gets one product over the whole batch, accumulated in fp32, not a sum of rounded
products. A gradient has the memory order of its operand, so that a weight given as `weight.t()` gets its own layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Settings(NamedTuple):
    """The arguments of one call that its gradients depend on, beside the tensors; see `gemm`."""

    alpha: float
    beta: float
    activation: str | None
    precision: str | None
    backend: str


class GemmFunction(torch.autograd.Function):
    """apply(a, b, c, bias, settings, run): D, computed by `run` (a `cutegemm.runner.Runner`)."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, c: Any, bias: Any, settings: Settings, run: Any) -> torch.Tensor:
        d = run(a, b, c, settings.alpha, settings.beta, bias, None)
        save(ctx, a, b, c, bias, d, settings)
        return d

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return *gradients(ctx, grad, ctx.needs_input_grad[:4]), None, None


def save(ctx: Any, a: Any, b: Any, c: Any, bias: Any, d: torch.Tensor, settings: Settings) -> None:
    """Keeps in `ctx` what `gradients` needs."""
    ctx.settings = settings
    ctx.c_like = None if c is None else (c.shape, c.dtype)
    ctx.bias_dtype = None if bias is None else bias.dtype
    again = settings.activation not in (None, "relu")
    ctx.save_for_backward(
        a,
        b,
        c if again and settings.beta != 0 else None,
        bias if again else None,
        d if settings.activation == "relu" else None,
    )


def gradients(ctx: Any, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """(dA, dB, dC, dbias), None where not needed. `grad`: of D. `needs`: whether a, b, c, bias need theirs."""
    s: Settings = ctx.settings
    a, b, c, bias, d = ctx.saved_tensors
    dz = _before_activation(grad, a, b, c, bias, d, s)
    da = db = dc = dbias = None
    if needs[0] or needs[1]:
        rounded = dz.to(a.dtype)
        if needs[0]:
            da = _of_a(rounded, a, b, s)
        if needs[1]:
            db = _of_b(rounded, a, b, s)
    if needs[2]:
        shape, dtype = ctx.c_like
        if s.beta == 0:
            dc = torch.zeros(shape, dtype=dtype, device=grad.device)
        elif shape == dz.shape:
            dc = (dz if s.beta == 1 else dz * s.beta).to(dtype)
        else:
            dc = (dz.float() * s.beta).sum_to_size(shape).to(dtype)
    if needs[3]:
        dbias = dz.sum(dim=tuple(range(dz.dim() - 1)), dtype=torch.float32).to(ctx.bias_dtype)
    return da, db, dc, dbias


def _before_activation(grad: Any, a: Any, b: Any, c: Any, bias: Any, d: Any, s: Settings) -> torch.Tensor:
    """dZ from dD, in D's dtype."""
    if s.activation is None:
        return grad
    if s.activation == "relu":
        return torch.ops.aten.threshold_backward(grad, d, 0)
    from cutegemm.gemm import gemm

    z = gemm(
        a, b, c, alpha=s.alpha, beta=s.beta if c is not None else 0.0, bias=bias,
        out_dtype=grad.dtype, precision=s.precision, backend=s.backend,
    )  # fmt: skip
    if s.activation == "silu":
        if not torch.is_grad_enabled():
            return torch.ops.aten.silu_backward(grad, z)
        # That operator has no derivative of its own.
        wide = z.float()
        gate = torch.sigmoid(wide)
        return (grad.float() * gate * (1 + wide * (1 - gate))).to(grad.dtype)
    approximate = "tanh" if s.activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, z, approximate=approximate)


def _of_a(dz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, s: Settings) -> torch.Tensor:
    if dz.dim() == 3 and b.dim() == 3 and (a.dim() == 2 or a.shape[0] != dz.shape[0]):
        # A serves the whole batch: [dZ_1 dZ_2 ...] @ [B_1 B_2 ...]^T
        wide = dz.transpose(0, 1).flatten(1)
        tall = b.transpose(1, 2).flatten(0, 1)
        return _product(wide, tall, a, s).reshape(a.shape)
    return _product(dz, b.mT, a, s).reshape(a.shape)


def _of_b(dz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, s: Settings) -> torch.Tensor:
    if dz.dim() == 3 and a.dim() == 3 and (b.dim() == 2 or b.shape[0] != dz.shape[0]):
        # B serves the whole batch: [A_1; A_2; ...]^T @ [dZ_1; dZ_2; ...]
        return _product(a.flatten(0, 1).mT, dz.flatten(0, 1), b, s).reshape(b.shape)
    return _product(a.mT, dz, b, s).reshape(b.shape)


def _product(x: torch.Tensor, y: torch.Tensor, like: torch.Tensor, s: Settings) -> torch.Tensor:
    """alpha * x @ y, column-major when `like` is."""
    from cutegemm.gemm import gemm

    options: dict[str, Any] = {"alpha": s.alpha, "precision": s.precision, "backend": s.backend}
    if like.stride(-2) == 1 and like.stride(-1) != 1:
        return gemm(y.mT, x.mT, **options).mT
    return gemm(x, y, **options)
