"""Sizes that the data decide, such as the rows of `x[mask]`, in compiled calls: one graph, as with torch's layers."""

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.problem.extents import are_equal, have_same, is_one

WEIGHT, EXPERTS, BIASES = torch.randn(8, 6), torch.randn(4, 8, 6), torch.randn(4, 6)
LINEAR, SWIGLU, MOE = cutegemm.nn.Linear(8, 6), cutegemm.nn.SwiGLU(8, 16), cutegemm.nn.MoE(8, 16, 4, top_k=2)
ROW, COLUMN = torch.randn(6, requires_grad=True), torch.randn(9, 1, requires_grad=True)


def ends(rows: torch.Tensor) -> torch.Tensor:
    return (torch.arange(1, 5) * rows.shape[0] // 4).int()


def batch(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    chosen = x[mask]
    return cutegemm.gemm(chosen, WEIGHT.expand(chosen.shape[0], 8, 6), chosen[..., :6], beta=1.0)


def gelu(acc, row):
    return ops.gelu(acc) + row


def scaled(acc, column):
    return ops.silu(acc) * column


def sliced(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum().item()
    torch._check(count >= 0)
    torch._check(count <= 9)
    return cutegemm.gemm(x[:count, 0], WEIGHT, epilogue=gelu, operands=(ROW,))


def with_maximum(acc):
    return acc, ops.column_max(acc)


CALLS = {
    "linear": lambda x, mask: LINEAR(x[mask]),
    "linear, transposed": lambda x, mask: LINEAR(x[mask].transpose(0, 1)),
    "batch": batch,
    "program, batch": lambda x, mask: cutegemm.gemm(x[mask], WEIGHT, epilogue=gelu, operands=(ROW,)),
    "program": lambda x, mask: cutegemm.gemm(x[:, 0][mask], WEIGHT, epilogue=scaled, operands=(COLUMN[mask],)),
    "groups": lambda x, mask: cutegemm.grouped_gemm(
        x[:, 0][mask], EXPERTS, ends(x[:, 0][mask]), epilogue=scaled, operands=(COLUMN[mask],)
    ),
    "groups with biases": lambda x, mask: cutegemm.grouped_gemm(
        x[:, 0][mask], EXPERTS, ends(x[:, 0][mask]), bias=BIASES
    ),
    "row as c": lambda x, mask: cutegemm.gemm(x[:, 0][mask], WEIGHT, ROW, beta=0.5),
    "one matrix by a batch": lambda x, mask: cutegemm.gemm(x[:1], x[mask].mT),
    "a batch by one matrix": lambda x, mask: cutegemm.gemm(x[mask], x[:1].mT),
    "maximum": lambda x, mask: cutegemm.gemm(x[:, 0][mask], WEIGHT, epilogue=with_maximum)[1],
    "rows up to an item": sliced,
    "SwiGLU": lambda x, mask: SWIGLU(x[mask]),
    "MoE": lambda x, mask: MOE(x[mask]),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
@pytest.mark.product(keep=8)
def test_sizes_that_the_data_decide(name, seed):
    """Forward and backward in one graph; results and gradients are those of the call itself."""
    torch.manual_seed(seed)
    torch._dynamo.reset()
    call, x = CALLS[name], torch.randn(9, 5, 8)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for mask in (torch.arange(9) % 2 == 0, torch.arange(9) < 8):
        found = []
        for each in (call, compiled):
            leaves = x.clone().requires_grad_(), ROW, COLUMN
            d = each(leaves[0], mask)
            found.append([d, *torch.autograd.grad(d.square().sum(), leaves, allow_unused=True)])
        for want, got in zip(*found, strict=True):
            assert (want is None) == (got is None)
            assert want is None or torch.equal(want, got)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_linear_layer_of_three_dimensions_is_traced(seed):
    """To torch.jit.trace sizes are tensors."""
    torch.manual_seed(seed)
    x = torch.randn(3, 4, 8)
    traced = torch.jit.trace(LINEAR, (x,), check_trace=False)
    assert torch.equal(traced(x), LINEAR(x))


def test_what_is_known_of_plain_extents():
    assert is_one(1)
    assert not is_one(2)
    assert are_equal(3, 3)
    assert have_same((2, 3), torch.Size((2, 3)))
    assert not have_same((2, 3), (2, 4))
    assert not have_same((2, 3), (1, 2, 3))
