"""What is written into `out` is told to autograd, on every road; inference tensors are written as torch allows it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cutegemm
from tests.problems import draw

BACKENDS = ("auto", "torch", "legacy")
MODIFIED = "modified by an inplace operation"


def by_operator(a, b, out, c=None, beta=0.0, backend="auto"):
    torch.ops.cutegemm.gemm_out(a, b, c, 1.0, beta, None, None, None, backend, None, out)


def by_gemm(a, b, out, c=None, beta=0.0, backend="auto"):
    assert cutegemm.gemm(a, b, c, beta=beta, out=out, backend=backend) is out


def compiled_by(how):
    def by_compiled(a, b, out, c=None, beta=0.0, backend="auto"):
        torch._dynamo.reset()
        function = torch.compile(
            lambda a, b, c, out: cutegemm.gemm(a, b, c, beta=beta, out=out, backend=backend), backend=how
        )
        function(a, b, c, out)

    return by_compiled


ROADS = {
    "gemm": by_gemm,
    "operator": by_operator,
    "compiled, eager": compiled_by("eager"),
    "compiled, aot_eager": compiled_by("aot_eager"),
}


def check_road(write, out):
    """A product of which `out` is a saved factor has no gradient once `out` was written."""
    w = torch.ones(out.shape, requires_grad=True)
    for _ in range(3):  # the first call plans, the others are remembered
        y = (w * out).sum()
        before = out._version
        with torch.no_grad():
            write()
        assert out._version > before
        with pytest.raises(RuntimeError, match=MODIFIED):
            torch.autograd.grad(y, w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.product(keep=5)
def test_a_graph_that_saved_out_is_refused_its_gradient(road, backend, seed):
    a, b, out = draw(seed, (8, 8), (8, 8), (8, 8))
    check_road(lambda: ROADS[road](a, b, out, backend=backend), out)
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("road", ["gemm", "operator"])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:, 4:12],
        lambda t: t.as_strided((4, 4), (33, 3)),
        lambda t: t[:0],
        lambda t: t[:, :0],
        lambda t: t.view(2, 8, 16),
    ],
    ids=["column-major", "no unit stride", "slice", "odd strides", "no rows", "no columns", "batch"],
)
def test_views_and_empty_tensors(view, road, backend, seed):
    (base,) = draw(seed, (16, 16))
    out = view(base)
    a, b = draw(seed + 1, (*out.shape[:-1], 8), (8, out.shape[-1]))
    check_road(lambda: ROADS[road](a, b, out, backend=backend), out)
    if out.numel():
        check_road(lambda: ROADS[road](a, b, out, backend=backend), base)
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.product(keep=5)
def test_out_that_is_c(road, backend, seed):
    a, b, out = draw(seed, (8, 8), (8, 8), (8, 8))
    check_road(lambda: ROADS[road](a, b, out, out, 1.0, backend), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_copied_first(backend, seed):
    a, b, out = draw(seed, (16, 16), (16, 16), (8, 8))
    check_road(lambda: by_gemm(a[::2, ::2], b[::2, ::2], out, backend=backend), out)


def test_an_operand_that_gemm_saved(seed):
    """The gradient of one product needs what the next one overwrites."""
    a, b, x = draw(seed, (8, 8), (8, 8), (8, 8))
    w = torch.ones(8, 8, requires_grad=True)
    d = cutegemm.gemm(a, w)
    with torch.no_grad():
        cutegemm.gemm(x, b, out=a)
    with pytest.raises(RuntimeError, match=MODIFIED):
        d.sum().backward()


def test_a_leaf_written_without_recording(seed):
    a, b = draw(seed, (8, 8), (8, 8))
    leaf = torch.ones(8, 8, requires_grad=True)
    y = leaf.square().sum()
    with torch.no_grad():
        cutegemm.gemm(a, b, out=leaf)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.backward()


def test_a_refused_call_leaves_the_version(seed):
    a, b, out = draw(seed, (8, 8), (8, 8), (8, 8))
    cutegemm.gemm(a, b, out=out)
    before = a._version
    with pytest.raises(ValueError, match="out: it overlaps a"):
        cutegemm.gemm(a, b, out=a)
    assert a._version == before
    before = out._version
    cutegemm.prepare(a, b, out=out)
    cutegemm.gemm(a, b)
    assert out._version == before


def test_fake_and_meta_tensors():
    with FakeTensorMode():
        a, out = torch.empty(8, 8), torch.empty(8, 8)
    meta = torch.empty(8, 8, device="meta")
    for write, written in (
        (lambda: cutegemm.gemm(a, a, out=out), out),
        (lambda: by_operator(a, a, out), out),
        (lambda: by_operator(torch.empty_like(meta), torch.empty_like(meta), meta), meta),
    ):
        before = written._version
        write()
        assert written._version > before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.product(keep=3)
def test_inference_tensors(road, backend, seed):
    a, b, plain = draw(seed, (8, 8), (8, 8), (8, 8))
    with torch.inference_mode():
        out, scratch = torch.zeros(8, 8), torch.zeros(8, 8)
    write = ROADS[road]
    with pytest.raises(RuntimeError, match="inference tensor"):
        torch.mm(a, b, out=scratch)
    for _ in range(2):
        with pytest.raises(Exception, match=r"inference tensor|inference mode") as caught:
            write(a, b, out, backend=backend)
        if road in ("gemm", "operator"):
            assert str(caught.value).startswith("out: it is an inference tensor, which can be written under")
            assert isinstance(caught.value, ValueError)
            assert torch.equal(out, torch.zeros(8, 8))
        write(a, b, plain, backend=backend)  # the same description, remembered
    with torch.inference_mode():
        write(a, b, out, backend=backend)
        torch.testing.assert_close(out, a @ b)
        before = plain._version
        write(a, b, plain, backend=backend)
        assert plain._version > before
    with pytest.raises(Exception, match=r"inference tensor|inference mode"):
        write(a, b, out, backend=backend)


@pytest.mark.parametrize("function", [cutegemm.prepare, cutegemm.explain])
def test_prepare_and_explain_refuse_an_inference_tensor(function):
    with torch.inference_mode():
        out = torch.zeros(8, 8)
    with pytest.raises(ValueError, match=r"^out: it is an inference tensor"):
        function(torch.ones(8, 8), torch.ones(8, 8), out=out)
    with torch.inference_mode():
        function(torch.ones(8, 8), torch.ones(8, 8), out=out)


def test_compiled_by_inductor(seed):
    """Inductor traces an operator that writes twice, and wants the same number of nodes each time."""
    a, b, out = draw(seed, (8, 8), (8, 8), (8, 8))
    for view in (lambda t: t, lambda t: t.t(), lambda t: t.repeat(1, 2)[:, :8]):
        torch._dynamo.reset()
        product = torch.compile(lambda a, b, out: cutegemm.gemm(a, b, out=out), fullgraph=True)
        given = view(out.clone())
        assert product(a, b, given) is not None
        torch.testing.assert_close(given, a @ b)
