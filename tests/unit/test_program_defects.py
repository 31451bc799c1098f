"""Calls with an epilogue program that once went wrong, on backend "torch" or without a kernel."""

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import cutegemm
from cutegemm import ops
from cutegemm.errors import EpilogueError

A, B = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)


def scale(acc, s):
    return acc * s


@pytest.mark.parametrize(("small", "large", "kind"), [(3, 2**40, "int32"), (3.0, -1e300, "fp32")])
def test_a_number_that_is_too_large_is_refused_after_a_call_with_a_small_one(small, large, kind):
    assert torch.equal(cutegemm.gemm(A, B, epilogue=scale, operands=(small,), backend="torch"), 3 * (A @ B))
    with pytest.raises(ValueError, match=rf"operands\[0\]: got .*, which {kind} cannot hold"):
        cutegemm.gemm(A, B, epilogue=scale, operands=(large,), backend="torch")


@pytest.mark.parametrize("p", [np.float32(0.25), np.float64(0.25)])
def test_numpys_numbers_are_numbers_of_an_epilogue(p):
    want = cutegemm.gemm(A, B, epilogue=lambda acc: ops.dropout(acc * 2.5, 0.25, 7), backend="torch")
    got = cutegemm.gemm(A, B, epilogue=lambda acc: ops.dropout(acc * np.float32(2.5), p, 7), backend="torch")
    assert torch.equal(got, want)
    with pytest.raises(EpilogueError, match=r"dropout: p is 1\.5, accepted are"):
        cutegemm.gemm(A, B, epilogue=lambda acc: ops.dropout(acc, np.float32(1.5), 7))
    chosen = cutegemm.gemm(A, B, epilogue=lambda acc: ops.where(np.bool_(False), 0.0, acc), backend="torch")
    assert torch.equal(chosen, A @ B)


def test_a_tuple_of_one_result_gives_a_tensor_under_torch_compile_too():
    out = torch.empty(8, 8, dtype=torch.bfloat16)

    def halved(a, b, out):
        return cutegemm.gemm(a, b, epilogue=lambda acc: acc * 0.5, out=(out,))

    compiled = torch.compile(halved, fullgraph=True, backend="eager")
    assert compiled(A, B, out) is out
    assert torch.equal(out, 0.5 * (A @ B))


@pytest.mark.parametrize("batch", [None, 2])
def test_vmap_names_the_operand_whose_batch_does_not_fit(batch):
    a = torch.ones(4, 8, 16) if batch is None else torch.ones(4, batch, 8, 16)
    mapped = torch.func.vmap(
        lambda a, x: cutegemm.gemm(a, B.float(), epilogue=lambda acc, x: acc + x, operands=(x,)), in_dims=(0, 0)
    )
    with pytest.raises(ValueError, match=r"operands\[0\]: got shape \(3, 1, 8\), expected a batch of 1"):
        mapped(a, torch.ones(4, 3, 1, 8))


@pytest.mark.parametrize("save", ["outputs", "recompute"])
@pytest.mark.parametrize("grouped", [False, True], ids=["gemm", "grouped"])
def test_saved_tensors_are_read_once(grouped, save):
    """torch.utils.checkpoint refuses a second time, and save_on_cpu copies again each time."""
    a, x = torch.randn(8, 16, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    b = torch.randn(*([2] if grouped else []), 16, 8, requires_grad=True)
    ends = [torch.tensor([3, 8], dtype=torch.int32)] if grouped else []
    call = cutegemm.grouped_gemm if grouped else cutegemm.gemm

    def product(a, b, x):
        return call(a, b, *ends, epilogue=lambda acc, x: cutegemm.ops.gelu(acc) * x, operands=(x,), save=save)

    want = torch.autograd.grad(product(a, b, x).sum(), (a, b, x))
    result = torch.utils.checkpoint.checkpoint(product, a, b, x, use_reentrant=False)
    for got, each in zip(torch.autograd.grad(result.sum(), (a, b, x)), want, strict=True):
        assert torch.equal(got, each)


@pytest.mark.parametrize("save", ["outputs", "recompute"])
@pytest.mark.parametrize("name", ["swiglu_pairs", "rope"])
def test_neighbouring_columns_take_batches_of_gradients(name, save, seed):
    """Autograd's own vmap knows fewer operators than torch.vmap."""
    torch.manual_seed(seed)
    a, b, angle = (torch.randn(shape, requires_grad=True) for shape in ((4, 6), (6, 8), (4, 8)))
    operands = (angle.cos(), angle.sin()) if name == "rope" else ()
    d = cutegemm.gemm(a, b, epilogue=getattr(cutegemm.ops, name), operands=operands, save=save)
    leaves, grads = (a, b, angle)[: 3 if operands else 2], torch.randn(3, *d.shape)
    got = torch.autograd.grad(d, leaves, grads, is_grads_batched=True, retain_graph=True)
    for number, grad in enumerate(grads):
        want = torch.autograd.grad(d, leaves, grad, retain_graph=True)
        torch.testing.assert_close([each[number] for each in got], list(want))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("way", ["eager", "compiled", "torch.func", "operator"])
def test_a_gradient_of_an_operand_is_refused_where_a_and_b_are_of_8_bits(way, dtype):
    """The accumulators were saved in the dtype of a, and the gradient was wrong."""
    a, b, x = A.to(dtype), B.to(dtype), torch.ones(8, requires_grad=True)

    def product(x):
        return cutegemm.gemm(a, b, epilogue=lambda acc, x: acc * x, operands=(x,), out_dtype=torch.float32)

    def plain(x):
        return torch.ops.cutegemm.gemm(a, b, bias=x, out_dtype=torch.float32)

    calls = {
        "eager": product, "compiled": torch.compile(product, backend="aot_eager"), "operator": plain,
        "torch.func": torch.func.grad(lambda x: product(x).sum()),
    }  # fmt: skip
    with pytest.raises(Exception, match="it requires grad, and products of fp8 or int8 operands record no gradients"):
        calls[way](x)
    with torch.no_grad():
        assert torch.equal(product(x), A.float() @ B.float())


def test_numbers_are_folded_whatever_the_default_device():
    """They were made on the default device: "meta" tensors have no value, and a GPU's would wait for its stream."""
    ops = cutegemm.ops

    def scaled(acc):
        return acc * ops.exp(0.5) + ops.minimum(3.0, 4.0)

    def folded(acc):
        return acc + ops.cast(ops.exp(ops.where(ops.row() * 0 == 0, 0.3, 0.5)), "bf16")

    with torch.device("meta"):
        got = [cutegemm.gemm(A, B, epilogue=each, out_dtype=torch.float32) for each in (scaled, folded)]
        assert ops.maximum(torch.zeros(2, device="cpu"), 3.0).tolist() == [3.0, 3.0]
    product = A.float() @ B.float()
    torch.testing.assert_close(got[0], product * 1.6487212707 + 3)
    torch.testing.assert_close(got[1], product + torch.tensor(0.3).exp().bfloat16())


class Changing:
    """Its factor is another number whenever it is read."""

    def __init__(self) -> None:
        self.reads = 0

    @property
    def factor(self) -> float:
        self.reads += 1
        return self.reads + 0.375


ENDS = torch.tensor([3, 8], dtype=torch.int32)
CALLS = {
    "gemm": lambda epilogue: cutegemm.gemm(A, B, epilogue=epilogue, backend="torch"),
    "gradient": lambda epilogue: cutegemm.gemm(A.clone().requires_grad_(), B, epilogue=epilogue, backend="torch"),
    "grouped": lambda epilogue: cutegemm.grouped_gemm(A, B.expand(2, 16, 8), ENDS, epilogue=epilogue, backend="torch"),
    "scaled": lambda epilogue: cutegemm.gemm(
        A.to(torch.int8), B.to(torch.int8), epilogue=epilogue, scale_a=torch.ones(8, 1), scale_b=torch.ones(1, 8),
        backend="torch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_function_that_changes_is_traced_once_a_call(call):
    """It was traced for the key and again for the plan. The second program's kernel served later calls of the first."""
    changing = Changing()
    for first in (0, 0, 2):
        changing.reads = first
        got = CALLS[call](lambda acc: acc * changing.factor)
        assert changing.reads == first + 1
        assert torch.equal(got, ((A @ B).float() * (first + 1.375)).to(got.dtype))


NINES, OF_NINES = torch.full((5, 64), 9, dtype=torch.int8), torch.tensor([2, 5], dtype=torch.int32)
STACKED = torch.full((2, 64, 16), 9, dtype=torch.int8)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_groups_of_int8_are_cast_as_the_program_says(dtype, compiled):
    """They came as int32."""

    def product(a, b):
        return cutegemm.grouped_gemm(a, b, OF_NINES, epilogue=lambda acc: ops.cast(acc, dtype))

    got = (torch.compile(product, backend="eager", fullgraph=True) if compiled else product)(NINES, STACKED)
    assert got.dtype == dtype
    assert torch.equal(got, cutegemm.gemm(NINES, STACKED[0], epilogue=lambda acc: ops.cast(acc, dtype)))


def test_groups_of_int8_refuse_a_result_that_contradicts_the_cast():
    given = {"epilogue": lambda acc: ops.cast(acc, torch.float16)}
    with pytest.raises(TypeError, match=r"out: got dtype torch.float32, expected float16"):
        cutegemm.grouped_gemm(NINES, STACKED, OF_NINES, out=torch.empty(5, 16), **given)
    with pytest.raises(TypeError, match=r"out_dtype: got torch.int32, but the epilogue casts its first result to fp16"):
        cutegemm.grouped_gemm(NINES, STACKED, OF_NINES, out_dtype=torch.int32, **given)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    ("program", "dtypes"),
    [
        (lambda acc: ops.cast(acc, torch.int8), (torch.int8,)),
        (lambda acc: (ops.cast(acc, torch.float32), acc * 2), (torch.float32, torch.bfloat16)),
        (lambda acc: (acc, ops.cast(acc, torch.int8)), (torch.bfloat16, torch.int8)),
    ],
)
def test_int8_with_scales_takes_a_program_that_casts_its_results(program, dtypes, groups, compiled):
    """It was refused for an out_dtype that nobody had passed."""

    def product(a, b):
        options = {"scale_a": torch.tensor(0.01), "epilogue": program}
        return cutegemm.grouped_gemm(a, b, OF_NINES, **options) if groups else cutegemm.gemm(a, b[0], **options)

    found = (torch.compile(product, backend="eager", fullgraph=True) if compiled else product)(NINES, STACKED)
    found = found if isinstance(found, tuple) else (found,)
    assert [each.dtype for each in found] == list(dtypes)
    want = program(torch.full((5, 16), 5184 * 0.01))
    for mine, theirs in zip(found, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=0.5, rtol=0.01)  # int8 is rounded
