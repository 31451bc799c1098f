"""Gradients and tangents of D = act(Z), Z = alpha * A @ B + beta * C + bias, their products through `gemm` itself.

Gradients (reverse mode), with dZ = dD * act'(Z):
    dA = alpha * dZ @ B^T   dB = alpha * A^T @ dZ   dC = beta * dZ   dbias = the column sums of dZ
Tangents (forward mode), of those given:
    dZ = alpha * dA @ B + alpha * A @ dB + beta * dC + dbias   dD = dZ * act'(Z)

Each is made of differentiable operations on the inputs, so that derivatives of derivatives are right. Z is therefore
computed again rather than kept from the forward pass, in D's dtype, which is what a layer without a fused activation
would have kept; relu needs only D. dZ is rounded to the operands' dtype before the products, as torch does.

An operand that the batch broadcasts gets one product over the whole batch, accumulated in fp32, not a sum of rounded
products. A gradient has the memory order of its operand, so that a weight given as `weight.t()` gets its own layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from cutegemm.problem.epilogue import formula_of
from cutegemm.problem.extents import are_equal, have_same
from cutegemm.problem.program.evaluate import summed
from cutegemm.pytorch import sharded, transforms
from cutegemm.run import float32

NO_GRADIENT_INTO = (
    "out: an operand requires grad, and no gradient is recorded of what is written into a tensor; "
    "call gemm under torch.no_grad(), or leave out away"
)
_unpack_dual = torch._VF._unpack_dual
_has_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack


_gemm: Callable[..., torch.Tensor]


def bind(gemm: Callable[..., torch.Tensor]) -> None:
    """Sets the function that multiplies in backward passes and tangents: `cutegemm.gemm`, which imports this module."""
    global _gemm
    _gemm = gemm


class Settings(NamedTuple):
    """The arguments of one call, besides the tensors, that its gradients depend on; see `gemm`."""

    alpha: float
    beta: float
    activation: str | None
    precision: str | None
    backend: str
    forward: bool = False
    """Whether a tensor may carry a tangent of forward mode."""


class GemmFunction(torch.autograd.Function):
    """record(a, b, c, bias, settings, run): D, computed by `run` (a `cutegemm.run.runner.Runner`)."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, c: Any, bias: Any, settings: Settings, run: Any) -> torch.Tensor:
        d = run(a, b, c, settings.alpha, settings.beta, bias, None)
        save(ctx, a, b, c, bias, d, settings)
        return d

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 6
        return *gradients(ctx, grad, ctx.needs_input_grad[:4]), None, None

    @staticmethod
    def jvp(ctx: Any, a: Any, b: Any, c: Any, bias: Any, settings: Settings, run: Any) -> torch.Tensor | None:
        # Switched off here by torch, forward mode is still on for the outer levels of torch.func.
        with forward_ad._set_fwd_grad_enabled(True):
            return tangent(ctx, a, b, c, bias)


# Function.apply would look for transforms of torch.func, which the callers have found already or handle themselves.
record = super(torch.autograd.Function, GemmFunction).apply


def save(ctx: Any, a: Any, b: Any, c: Any, bias: Any, d: torch.Tensor, settings: Settings) -> None:
    """Keeps in `ctx` what `gradients` and `tangent` need."""
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
    if settings.forward:
        ctx.save_for_forward(a, b, c, bias, d)
        ctx.set_materialize_grads(False)


def tangent(ctx: Any, da: Any, db: Any, dc: Any, dbias: Any) -> torch.Tensor | None:
    """dD, from the tangents of a, b, c and bias: None stands for zeros. None where D is of integers."""
    s: Settings = ctx.settings
    a, b, c, bias = (None if t is None else _unpack_dual(t, 0)[0] for t in ctx.saved_tensors[:4])
    dtype, d = ctx.saved_tensors[4].dtype, readable(ctx.saved_tensors[4])
    if not dtype.is_floating_point:
        return None
    options: dict[str, Any] = {"alpha": s.alpha, "precision": float32.of_gradients(s.precision), "backend": s.backend}
    if s.beta == 0:
        dc = None
    beta = 0.0 if dc is None else s.beta
    if da is not None and db is not None:
        # The sum of the two products is rounded once.
        part = _gemm(da, b, dc, beta=beta, bias=dbias, out_dtype=wide(d.dtype), **options)
        dz = _gemm(a, db, part, beta=1.0, out_dtype=d.dtype, **options)
    elif da is not None or db is not None:
        x, y = (da, b) if db is None else (a, db)
        dz = _gemm(x, y, dc, beta=beta, bias=dbias, out_dtype=d.dtype, **options)
    else:
        to = wide(d.dtype)
        terms = [term.to(to) for term in (None if dc is None else dc.to(to) * beta, dbias) if term is not None]
        total = sum(terms, torch.zeros((), device=d.device, dtype=to))
        dz = total.expand(d.shape).to(d.dtype)
    return _times_slope(dz, a, b, c, bias, d, s).to(dtype)


def recorded_gradients(composed: Callable[..., Any], tensors: Sequence[Any], needs: Sequence[bool], grad: Any) -> Any:
    """The gradients of `composed(*tensors)`, themselves recorded; None of tensors that need none, which may be None."""
    # Views: where one tensor was made of another, autograd would follow that way too, and count it twice.
    tensors = [None if each is None else each.view_as(each) for each in tensors]
    inputs = [each for each, own in zip(tensors, needs, strict=True) if own]
    found = iter(torch.autograd.grad(composed(*tensors), inputs, grad, create_graph=True))
    return [next(found) if own else None for own in needs]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def may_have_tangent(*tensors: Any) -> bool:
    """Whether one of the tensors may carry a tangent that forward mode asks for.

    Code that torch.compile has made enters forward mode without a change of `forward_ad._current_level`. So once
    torch.compile has been imported the tensors themselves are asked, which takes as long as all else that an operator
    does. A dispatch mode would see these questions: under one every tensor counts as one that may carry a tangent.
    """
    if not torch._C._is_fwd_grad_enabled():
        return False
    if forward_ad._current_level >= 0 or _dispatch_modes() > 0 or _has_transforms():
        return True
    return "torch._dynamo" in sys.modules and has_tangent(tensors)


def has_tangent(tensors: tuple[Any, ...]) -> bool:
    """Whether a tensor carries a tangent. To find out makes views, and tracers must not record them: inductor traces an
    operator that writes into `out` twice, and wants the same number of nodes each time.
    """
    if _dispatch_modes() > 0:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # late: it imports sympy

        with disable_proxy_modes_tracing():
            return _has_tangent(tensors)
    return _has_tangent(tensors)


def _has_tangent(tensors: tuple[Any, ...]) -> bool:
    # Torch has one level of forward mode, of number 0.
    return any(tensor is not None and _unpack_dual(tensor, 0)[1] is not None for tensor in tensors)


def refuse_tangents(*tensors: Any) -> None:
    """Raises NotImplementedError, as torch.mm(out=) does, where the result must go into a tensor given."""
    if torch._C._is_fwd_grad_enabled() and has_tangent(tensors):
        raise NotImplementedError(
            "out: a tensor carries a forward-mode tangent, and no tangent is computed of what is written into a "
            "tensor; leave out away, or pass forward_ad.unpack_dual(tensor).primal"
        )


def refuse_gradients(tensors: dict[str, Any], call: str = "gemm") -> None:
    """Raises ValueError for a tensor that requires grad: products of quantized operands record none."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name}: it requires grad, and products of fp8 or int8 operands record no gradients; call {call} "
                "under torch.no_grad() or pass detached tensors (a straight-through estimator belongs to the trainer)"
            )


def readable(x: Any) -> Any:
    """x, or None, as kernels read it. Numbers of 8 bits, with which neither torch nor an epilogue computes,
    become fp32. None are still to be negated, as torch leaves the gradient of an imaginary part.
    """
    if x is None:
        return None
    x = x.resolve_neg() if x.is_neg() else x
    return x.float() if x.element_size() == 1 else x


def gradients(ctx: Any, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """(dA, dB, dC, dbias), None where not needed. `grad`: of D. `needs`: whether a, b, c, bias need theirs."""
    s: Settings = ctx.settings
    a, b, c, bias, d = ctx.saved_tensors
    if d is not None and d.element_size() == 1:
        d = d.detach()  # a mask, whose derivative is 0: torch could not add that to another gradient of 8 bits
    grad, d = readable(grad), readable(d)
    dz = _times_slope(grad, a, b, c, bias, d, s)
    da = db = dc = dbias = None
    if needs[0] or needs[1]:
        rounded = dz if dz.dtype == a.dtype else dz.to(a.dtype)
        if needs[0]:
            da = gradient_of_a(rounded, a, b, s)
        if needs[1]:
            db = gradient_of_b(rounded, a, b, s)
    if needs[2]:
        shape, dtype = ctx.c_like
        if s.beta == 0:
            dc = torch.zeros(shape, dtype=dtype, device=grad.device)
        elif have_same(shape, dz.shape):
            dc = (dz if s.beta == 1 else dz * s.beta).to(dtype)
        else:
            dc = (summed(dz, shape) * s.beta).to(dtype)
    if needs[3]:
        rows, dtype = tuple(range(dz.dim() - 1)), ctx.bias_dtype
        # Torch sums 16-bit numbers in fp32 and rounds once.
        dbias = dz.sum(dim=rows) if dz.dtype == dtype else dz.sum(dim=rows, dtype=wide(dz.dtype)).to(dtype)
    return da, db, dc, dbias


def _times_slope(grad: Any, a: Any, b: Any, c: Any, bias: Any, d: Any, s: Settings) -> torch.Tensor:
    """grad * act'(Z), in D's dtype. d is read for relu only."""
    if s.activation is None:
        return grad
    if s.activation == "relu":
        return torch.ops.aten.threshold_backward(grad, d, 0)
    times_slope = formula_of(s.activation, _TIMES_SLOPE)
    z = _gemm(
        a, b, c, alpha=s.alpha, beta=s.beta if c is not None else 0.0, bias=bias,
        out_dtype=grad.dtype, precision=float32.of_gradients(s.precision), backend=s.backend,
    )  # fmt: skip
    return times_slope(grad, z)


def _silu_backward(grad: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    derived = torch.is_grad_enabled() or forward_ad._current_level >= 0 or _has_transforms()
    if not derived:
        return torch.ops.aten.silu_backward(grad, z)
    # That operator has no derivative of its own.
    wide = z.float()
    gate = torch.sigmoid(wide)
    return (grad.float() * gate * (1 + wide * (1 - gate))).to(grad.dtype)


_TIMES_SLOPE: dict[str | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "silu": _silu_backward,
}
"""(grad, Z) -> grad * act'(Z), in D's dtype, of the activations whose slope is not read off D."""


def gradient_of_a(dz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, s: Settings) -> torch.Tensor:
    if dz.dim() == 3 and b.dim() == 3 and (a.dim() == 2 or not are_equal(a.shape[0], dz.shape[0])):
        # A serves the whole batch: [dZ_1 dZ_2 ...] @ [B_1 B_2 ...]^T
        wide = sharded.merging(dz.transpose(0, 1), range(1, 3)).reshape(dz.shape[1], dz.shape[0] * dz.shape[2])
        tall = transforms.rows(b.mT)
        return _product(wide, tall, a, s).reshape(a.shape)
    return _shaped(_product(dz, b, a, s, turn_y=True), a)


def gradient_of_b(dz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, s: Settings) -> torch.Tensor:
    if dz.dim() == 3 and a.dim() == 3 and (b.dim() == 2 or not are_equal(b.shape[0], dz.shape[0])):
        # B serves the whole batch: [A_1; A_2; ...]^T @ [dZ_1; dZ_2; ...]
        return _product(transforms.rows(a).mT, transforms.rows(dz), b, s).reshape(b.shape)
    return _shaped(_product(a, dz, b, s, turn_x=True), b)


def _shaped(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return gradient if have_same(gradient.shape, like.shape) else gradient.reshape(like.shape)


def _product(
    x: torch.Tensor, y: torch.Tensor, like: torch.Tensor, s: Settings, turn_x: bool = False, turn_y: bool = False
) -> torch.Tensor:
    """alpha * x @ y, column-major when `like` is. turn_x, turn_y: x^T or y^T instead, which costs a view at most."""
    options: dict[str, Any] = {
        "alpha": s.alpha, "precision": float32.of_gradients(s.precision), "backend": s.backend, "out_dtype": like.dtype
    }  # fmt: skip
    if like.stride(-2) == 1 and like.stride(-1) != 1:
        return _gemm(y if turn_y else y.mT, x if turn_x else x.mT, **options).mT
    return _gemm(x.mT if turn_x else x, y.mT if turn_y else y, **options)
