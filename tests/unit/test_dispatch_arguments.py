"""Arguments of calls that go through torch's operators: refused in the terms of the call, as in every other call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cutegemm
from cutegemm import ops

A = torch.linspace(-1.0, 1.0, 32).view(4, 8)
INDEX = torch.arange(24).int()


class Sub(torch.Tensor):
    """A subclass without functions of its own: torch dispatches its calls."""


PLAIN = [
    ({"bias": 3}, TypeError, "bias: got int, expected a torch.Tensor"),
    ({"c": 2, "beta": 1.0}, TypeError, "c: got int, expected a torch.Tensor"),
    ({"activation": 3}, ValueError, "activation: got 3, accepted are None, 'relu'"),
    ({"constant": 3}, ValueError, "constant: got 3, accepted are None, 'a' and 'b'"),
    ({"backend": 3}, ValueError, "backend: got 3, accepted are 'auto'"),
    ({"precision": 3}, ValueError, "precision: got 3, accepted are None, 'ieee'"),
    ({"out_dtype": "x"}, TypeError, "out_dtype: got 'x', "),
]


@pytest.mark.parametrize(("options", "kind", "message"), PLAIN)
@pytest.mark.parametrize("how", ["plain", "subclass", "vmap"])
def test_gemm(how, options, kind, message):
    calls = {
        "plain": lambda: cutegemm.gemm(A, A.t(), **options),
        "subclass": lambda: cutegemm.gemm(A.as_subclass(Sub), A.t(), **options),
        "vmap": lambda: torch.func.vmap(lambda x: cutegemm.gemm(x, A.t(), **options))(torch.stack((A, A))),
    }
    with pytest.raises(kind, match=message):
        calls[how]()


@pytest.mark.parametrize("precision", ["bf16x5", 3, ["tf32"]])
@pytest.mark.parametrize(
    "call",
    [
        lambda precision: cutegemm.gemm(A, A.t(), precision=precision),
        lambda precision: cutegemm.linear(A, A, precision=precision),
        lambda precision: cutegemm.gemm(A, A.t(), epilogue=ops.relu, precision=precision),
        lambda precision: cutegemm.grouped_gemm(
            A, A.t().expand(2, 8, 4), torch.tensor([1, 4]).int(), precision=precision
        ),
    ],
    ids=["gemm", "linear", "epilogue", "groups"],
)
def test_a_precision_that_autocast_drops(call, precision):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="precision: got"):
        call(precision)


GROUPS = [
    ({"rows": [1, 2]}, TypeError, "rows: got list"),
    ({"places": INDEX, "out_rows": True}, TypeError, "out_rows: got bool, expected an int"),
    ({"places": INDEX, "out_rows": 2.5}, TypeError, "out_rows: got float, expected an int"),
    ({"places": INDEX, "out_rows": np.int64(30)}, TypeError, "out_rows: got int64, expected an int"),
    ({"out_dtype": "bf16"}, TypeError, "out_dtype: got 'bf16', "),
    ({"backend": ["cute"]}, ValueError, "backend: got ['cute'], accepted are 'auto'"),
    ({"precision": 3}, ValueError, "precision: got 3, accepted are None, 'ieee'"),
    ({"scaling": 3}, ValueError, "scaling: got 3, accepted are None, 'tensor'"),
    ({"scale_a": 3}, TypeError, "scale_a: "),
]


@pytest.mark.parametrize(("options", "kind", "message"), GROUPS)
@pytest.mark.parametrize("recorded", [True, False])
def test_products_in_groups(recorded, options, kind, message):
    x, w = torch.zeros(24, 16, requires_grad=recorded), torch.zeros(2, 16, 32)
    with pytest.raises(kind) as raised:
        cutegemm.grouped_gemm(x, w, torch.tensor([5, 24]).int(), **options)
    assert str(raised.value).startswith(message)


def test_gradients_that_torch_has_still_to_negate():
    """The gradient of an imaginary part under a conjugation."""
    a, b = A.clone().requires_grad_(), torch.linspace(0.0, 2.0, 64).view(8, 8)
    mlp = cutegemm.nn.SwiGLU(8, 8)
    calls = (
        lambda: cutegemm.gemm(a, b),
        lambda: cutegemm.linear(a, b),
        lambda: mlp(a),
        lambda: cutegemm.gemm(a, b, epilogue=ops.gelu),
    )
    for call in calls:
        d = call()
        upstream = torch.linspace(1.0, 3.0, d.numel()).view(d.shape)
        (got,) = torch.autograd.grad((torch.complex(torch.zeros_like(d), d).conj() * 1j * upstream).real.sum(), a)
        (want,) = torch.autograd.grad(call(), a, upstream)
        torch.testing.assert_close(got, want)
