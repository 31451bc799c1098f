"""torch.ops.cutegemm.gemm and gemm_out: `gemm` as operators that torch.compile, vmap, autocast and opcheck know.

Eager calls of plain tensors do not come here (see gemm.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils.flop_counter import register_flop_formula

from cutegemm import native
from cutegemm.problem import request
from cutegemm.problem.dtypes import PRODUCTS, product_dtype_name, torch_dtype
from cutegemm.problem.epilogue import Epilogue
from cutegemm.pytorch import autograd, registering, sharded, sharding, transforms
from cutegemm.pytorch.autocast import cast_operands
from cutegemm.run.call import compute
from cutegemm.run.how import How, schema, settled, split


def _gemm(a, b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *how) -> torch.Tensor:
    return compute(a, b, c, alpha, beta, bias, activation, None, out_dtype, settled(a, how))


def _gemm_out(a, b, c, alpha, beta, bias, activation, *options) -> None:
    how, out = split(options)
    compute(a, b, c, alpha, beta, bias, activation, out, None, settled(a, how))


def _fake_gemm(a, b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *how):
    shape = check(a, b, c, beta, bias, activation)
    How(*how).check()
    if out_dtype is not None and request.comes_of(out_dtype, of_a(a)) is None:
        raise TypeError(f"out_dtype: got {out_dtype}, {request.accepted(of_a(a))}")
    return a.new_empty(shape, dtype=out_dtype or torch_dtype(PRODUCTS[of_a(a)].output))


def _fake_gemm_out(a, b, c, alpha, beta, bias, activation, *options):
    shape = check(a, b, c, beta, bias, activation)
    how, out = split(options)
    how.check()
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out: got shape {tuple(out.shape)}, expected {tuple(shape)}")
    if request.comes_of(out.dtype, of_a(a)) is None:
        raise TypeError(f"out: got dtype {out.dtype}, {request.accepted(of_a(a))}")


def of_a(a: torch.Tensor) -> str:
    """The name of the operands' dtype, which `check` has looked at."""
    return str(product_dtype_name(a.dtype))


def check(a: Any, b: Any, c: Any, beta: float, bias: Any, activation: str | None) -> tuple[Any, ...]:
    """The shape of D. Raises what `gemm` would raise, as far as shapes and dtypes tell."""
    for name, tensor in (("a", a), ("b", b)):
        request.check_dims(name, tensor.dim())
    request.operand_dtypes(a, b)
    torch._check_value(
        a.shape[-1] == b.shape[-2],
        lambda: (
            f"b: got shape {tuple(b.shape)}; with a of shape {tuple(a.shape)} its second to last extent "
            f"must be K = {a.shape[-1]}"
        ),
    )
    request.check_activation(activation)
    if refused := Epilogue(activation=activation).why_refused_for(of_a(a)):
        raise ValueError(refused)
    m, n = a.shape[-2], b.shape[-1]
    shape: tuple[Any, ...] = (m, n)
    if a.dim() == 3 or b.dim() == 3:
        shape = (request.batch_of(a, b), m, n)
    request.check_beta(beta, c)
    if c is not None:
        request.check_c_shape(c, shape)
    for name, tensor in (("c", c), ("bias", bias)):
        if tensor is not None:
            request.check_term(name, tensor, of_a(a))
    if bias is not None:
        if bias.dim() != 1:
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected ({n},), one number a column of the result")
        torch._check_value(
            bias.shape[0] == n,
            lambda: f"bias: got shape {tuple(bias.shape)}, expected ({n},), one number a column of the result",
        )
    return shape


registering.define(
    "gemm(Tensor a, Tensor b, Tensor? c=None, float alpha=1.0, float beta=0.0, Tensor? bias=None, "
    f"str? activation=None, ScalarType? out_dtype=None, {schema()}) -> Tensor",
    _gemm, _fake_gemm,
)  # fmt: skip
registering.define(
    "gemm_out(Tensor a, Tensor b, Tensor? c, float alpha, float beta, Tensor? bias, str? activation, "
    f"{schema('Tensor(d!) out')}) -> ()",
    _gemm_out, _fake_gemm_out,
)  # fmt: skip
registering.refuse_derivatives("gemm_out", autograd.refuse_tangents)

_redispatch = torch.ops.cutegemm.gemm.default.redispatch
_DEVICES = frozenset(
    torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in registering.DEVICES
)
"""Key sets of plain tensors, which nothing but a device's kernel handles."""


def _prepare_sharding(a: Any, b: Any, c: Any, bias: Any) -> None:
    """Has DTensor know the operator. Raises ValueError naming a plain tensor among DTensors."""
    sharding.needed()
    sharded.refuse_mixed("torch.ops.cutegemm.gemm", a=a, b=b, c=c, bias=bias)


def _recorded_gemm(keyset, a, b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *how):
    """gemm for one level of autograd: the function that is recorded calls the operator below it.

    torch.library.register_autograd knows neither forward mode nor torch.func.
    """
    how = settled(a, how)
    below = keyset & registering.BELOW_AUTOGRAD
    plain = below.raw_repr() in _DEVICES
    grad = torch.is_grad_enabled()
    forward = autograd.may_have_tangent(a, b, c, bias)
    if not forward and not (grad and torch._C._any_requires_grad(a, b, c, bias)):
        if plain:  # `_gemm`, without another passage through the dispatcher
            return compute(a, b, c, alpha, beta, bias, activation, None, out_dtype, how)
        _prepare_sharding(a, b, c, bias)
        with torch._C._AutoDispatchBelowAutograd():
            return _redispatch(below, a, b, c, alpha, beta, bias, activation, out_dtype, *how)

    if a.element_size() == 1:
        autograd.refuse_gradients({"a": a, "b": b, "c": c, "bias": bias})
    if not plain:
        _prepare_sharding(a, b, c, bias)
    run = registering.below_autograd(
        lambda a, b, c, alpha, beta, bias, out: _redispatch(
            below, a, b, c, alpha, beta, bias, activation, out_dtype, *how
        )
    )
    precision, backend, *_ = how
    settings = autograd.Settings(alpha, beta, activation, precision, backend, forward)
    with enable_single_level_autograd_function():
        return autograd.record(a, b, c, bias, settings, run)


registering.LIBRARY.impl("gemm", _recorded_gemm, "Autograd", with_keyset=True)


def _recorded_natively(keys, a, b, c, alpha, beta, bias, activation, _, out_dtype, *how) -> torch.Tensor:
    """`_recorded_gemm` for calls that the C++ extension leaves to Python."""
    keyset = torch._C.DispatchKeySet.from_raw_repr(keys)
    return _recorded_gemm(keyset, a, b, c, alpha, beta, bias, activation, out_dtype, *how)


native.in_python["record"] = _recorded_natively


def _autocast_gemm(a, b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *how):
    a, b, c, bias, how = cast_operands(a, b, c, bias, None, How(*how))
    with torch._C._DisableAutocast():
        return torch.ops.cutegemm.gemm(a, b, c, alpha, beta, bias, activation, out_dtype, *how)


registering.define_autocast("gemm", _autocast_gemm)


def _vmap_gemm(info, in_dims, a, b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *how):
    dims = (*in_dims, *(None,) * 6)
    (a, b, c, bias), beta, shape = transforms.merge(
        info.batch_size, (a, b, c, bias), (dims[0], dims[1], dims[2], dims[5]), beta
    )
    d = torch.ops.cutegemm.gemm(a, b, c, alpha, beta, bias, activation, out_dtype, *How(*how).for_copies())
    return d.view(shape), 0


torch.library.register_vmap("cutegemm::gemm", _vmap_gemm, lib=registering.LIBRARY)


def _batched_gemm(a, b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *how):
    """gemm of tensors of the older vmap, by which torch.autograd.grad takes a batch of gradients."""
    level, size, tensors, dims = transforms.unwrap((a, b, c, bias))
    (a, b, c, bias), beta, shape = transforms.merge(size, tensors, dims, beta)
    d = torch.ops.cutegemm.gemm(a, b, c, alpha, beta, bias, activation, out_dtype, *How(*how).for_copies())
    return torch._add_batch_dim(d.view(shape), 0, level)


registering.LIBRARY.impl("gemm", _batched_gemm, "Batched")
register_flop_formula([torch.ops.cutegemm.gemm, torch.ops.cutegemm.gemm_out])(registering.flops)
