"""torch.ops.cutegemm.scaled_mm: a product of scaled operands as an operator, for torch.compile and fake tensors."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.pytorch import scaled
from cutegemm.pytorch.dispatch import is_dispatched

_library = torch.library.Library("cutegemm", "FRAGMENT")
_library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, str? activation, "
    "ScalarType out_dtype, str? accumulate, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def is_needed(*tensors: Any) -> bool:
    """Whether the call is for torch's dispatcher to see, and so for the operator."""
    return torch.compiler.is_dynamo_compiling() or torch._C._is_tracing() or is_dispatched(*tensors)


def _compute(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, activation: str | None, out_dtype: torch.dtype,
    accumulate: str | None, backend: str,
) -> torch.Tensor:  # fmt: skip
    precision = scaled.precision_of(a, None, accumulate)
    with torch.no_grad():
        result: torch.Tensor = scaled.compute(
            a=a, b=b, c=None, alpha=1.0, beta=0.0, bias=bias, activation=activation, out=None, out_dtype=out_dtype,
            precision=precision, backend=backend, config=None, epilogue=None, operands=(), save=None, scale_a=scale_a,
            scale_b=scale_b, scales=None,
        )  # fmt: skip
    return result


def _fake(a, b, scale_a, scale_b, bias, activation, out_dtype, accumulate, backend):
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"a, b: got {a.dim()} and {b.dim()} dimensions, accepted are 2")
    torch._check_value(a.shape[1] == b.shape[0], lambda: f"b: got {b.shape[0]} rows, expected K = {a.shape[1]}")
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _refuse_gradients(keyset, a, b, scale_a, scale_b, bias, activation, out_dtype, accumulate, backend):
    scaled.refuse_gradients({"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias})
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.cutegemm.scaled_mm.default.redispatch(
            keyset & torch._C._after_autograd_keyset,
            a, b, scale_a, scale_b, bias, activation, out_dtype, accumulate, backend,
        )  # fmt: skip


for _device in ("CPU", "CUDA"):
    _library.impl("scaled_mm", _compute, _device)
torch.library.register_fake("cutegemm::scaled_mm", _fake, lib=_library)
_library.impl("scaled_mm", _refuse_gradients, "Autograd", with_keyset=True)
