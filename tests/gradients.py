"""The float64 gradients and tangents of `gemm` and elementwise bounds on the error of those that it computes.

With Z = alpha A B + beta C + bias, D = act(Z), and G the gradient of D as given:

1. Z is computed within delta (`reference.error bound`, rounded to D's dtype), so that act'(Z) is off by at most
   L delta, L the Lipschitz constant of act': 1/2 for silu, 0.8 for gelu (2 phi(0)) and 0.82 for its tanh form. For relu
   act' jumps at 0: where |Z| <= delta either value is right.
2. Evaluating act' and multiplying by G costs at most 16 fp32 operations and two roundings (D's dtype, A's dtype): with
   that dZ is off by at most `e`.
3. dA = alpha dZ B^T: the bound of that product for exact dZ, and |alpha| e |B|^T, which the last rounding grows by 1 %
   at most. dB alike. dC and dbias: the sums of e, of fp32's additions and of the last rounding.

A tangent is dD = act'(Z) dZ. Two products make dZ; the first stays in fp32 and enters the second as its C, so that the
bounds of both add up. From there on steps 1 and 2 hold with dZ for G, whose own error act' grows by at most 1.13.
"""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.problem import dtype_name, reference
from cutegemm.problem.dtypes import TABLE

_CURVATURE = {None: 0.0, "relu": 0.0, "gelu": 0.8, "gelu_tanh": 0.82, "silu": 0.5}


def expected(
    a: torch.Tensor,
    b: torch.Tensor,
    grad: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str | None = None,
    precision: str = "ieee",
) -> dict[str, reference.Expected]:
    """The gradients of a, b, c, bias (those given) for a gradient `grad` of D; arguments as of `gemm`."""
    terms: dict[str, Any] = {"c": c, "alpha": alpha, "beta": beta, "bias": bias, "precision": precision}
    z = reference.expected(a, b, out_dtype=grad.dtype, **terms)
    given = {name: t for name, t in (("a", a), ("b", b), ("c", c), ("bias", bias)) if t is not None}
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    value = alpha * torch.matmul(exact["a"], exact["b"])
    if c is not None and beta != 0:
        value = value + beta * exact["c"]
    if bias is not None:
        value = value + exact["bias"]
    value.retain_grad()
    reference.activate(value, activation).backward(grad.double())
    dz = value.grad
    assert dz is not None

    size = grad.double().abs()
    error = size * _CURVATURE[activation] * z.bound
    if activation == "relu":
        error = torch.where(z.value.abs() <= z.bound, size, error)
    if activation is not None:
        error = error + 16 * 2.0**-23 * 1.13 * size
    for dtype in (grad.dtype, a.dtype):
        name = _name(dtype)
        error = error + TABLE[name].roundoff * (dz.abs() + error) + TABLE[name].smallest

    products: dict[str, Any] = {"alpha": alpha, "out_dtype": a.dtype, "precision": precision}
    products["tensor_cores"] = not (a.dtype == torch.float32 and precision == "ieee")
    found = {}
    # The bound of a product of a's dtype: of float64 it would be that of fp64 arithmetic.
    kernel = torch.float64 if a.dtype == torch.float64 else torch.float32
    for name, x, y, dx, dy in (
        ("a", dz, b.double().mT, error, b.double().mT.abs()),
        ("b", a.double().mT, dz, a.double().mT.abs(), error),
    ):
        rounded = reference.expected(x.to(kernel), y.to(kernel), **products)
        bound = rounded.bound + 1.01 * abs(alpha) * torch.matmul(dx, dy)
        like = exact[name]
        # One product over what the batch broadcast: at most the sum of the bounds of its parts.
        assert like.grad is not None
        bound = bound.sum_to_size(like.shape) + TABLE[_name(a.dtype)].smallest
        found[name] = reference.Expected(like.grad, bound, a.dtype)
    for name in ("c", "bias"):
        if name in given:
            scale = abs(beta) if name == "c" else 1.0
            like, dtype = exact[name], given[name].dtype
            gradient = torch.zeros_like(like) if like.grad is None else like.grad
            count = max(dz.numel() // max(like.numel(), 1), 1)
            magnitude = (scale * dz.abs()).sum_to_size(like.shape)
            bound = (scale * error).sum_to_size(like.shape) + reference._gamma(count + 2, 2.0**-24) * magnitude
            for rounding in (grad.dtype, dtype):
                short = _name(rounding)
                bound = bound + TABLE[short].roundoff * (magnitude + bound) + TABLE[short].smallest
            found[name] = reference.Expected(gradient, bound, dtype)
    return found


def expected_tangent(
    tensors: dict[str, torch.Tensor],
    tangents: dict[str, torch.Tensor],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee",
) -> reference.Expected:
    """The tangent of D. `tensors`: a, b and perhaps c and bias. `tangents`: those of some of them, by these names."""
    a, b = tensors["a"], tensors["b"]
    da, db, dc, dbias = (tangents.get(name) for name in ("a", "b", "c", "bias"))
    out_dtype = out_dtype or a.dtype
    product: dict[str, Any] = {"alpha": alpha, "precision": precision, "out_dtype": out_dtype}
    z = reference.expected(a, b, tensors.get("c"), beta=beta, bias=tensors.get("bias"), **product)
    scale = 0.0 if dc is None else beta
    if da is not None and db is not None:
        wide = {**product, "out_dtype": torch.float32}
        part = reference.expected(da, b, dc, beta=scale, bias=dbias, **wide)
        dz = reference.expected(a, db, part.value, beta=1.0, **product)
        dz = reference.Expected(dz.value, dz.bound + 1.01 * part.bound, out_dtype)
    else:
        x, y = (a, db) if db is not None else (torch.zeros_like(a) if da is None else da, b)
        dz = reference.expected(x, y, dc, beta=scale, bias=dbias, **product)

    exact = z.value.requires_grad_()
    (value,) = torch.autograd.grad(reference.activate(exact, activation), exact, dz.value)
    if activation is None:
        return dz
    size, z_value = dz.value.abs() + dz.bound, z.value.detach()
    error = 1.13 * dz.bound + size * _CURVATURE[activation] * z.bound
    if activation == "relu":
        error = torch.where(z_value.abs() <= z.bound, size, error)
    error = error + 16 * 2.0**-23 * 1.13 * size
    name = _name(out_dtype)
    bound = error + TABLE[name].roundoff * (value.abs() + error) + TABLE[name].smallest
    return reference.Expected(value, bound, out_dtype)


def check(got: dict[str, torch.Tensor], want: dict[str, reference.Expected]) -> None:
    """Raises AssertionError naming the gradient and its worst element."""
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        verdict = reference.check(gradient, want[name])
        assert verdict.ok, f"gradient of {name}: {verdict.message}"


def _name(dtype: torch.dtype) -> str:
    name = dtype_name(dtype)
    assert name is not None
    return name
