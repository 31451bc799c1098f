"""`gemm` with an epilogue program under torch.compile, torch.export and torch.jit.trace."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.config
import torch.utils.checkpoint

import cutegemm
from cutegemm import ops
from cutegemm.problem.program.text import parse
from tests.unit.test_torch_programs import OP, draw
from tuning import host_stub

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


class Block(torch.nn.Module):
    """Epilogues where models have them: a module's function, one defined in forward, numbers of the module."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(6, 8).normal_())
        self.bias = torch.nn.Parameter(torch.empty(8).normal_())
        self.activation = ops.gelu
        self.scale = 0.5

    def forward(self, x, gate):
        h = cutegemm.gemm(
            x, self.weight, epilogue=lambda acc, b, g: self.activation(acc + b) * g * self.scale,
            operands=(self.bias, gate),
        )  # fmt: skip
        return cutegemm.gemm(h, self.weight.T, epilogue=ops.swiglu)


def test_compiled_training_step(seed):
    torch.manual_seed(seed)
    model = Block()
    step = compiled(model)
    for rows in (4, 4, 9):
        inputs = draw(seed, (rows, 6), (rows, 8))
        want, got = (
            torch.autograd.grad(run(*inputs).square().sum(), list(model.parameters())) for run in (model, step)
        )
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    model.scale = 2.0  # dynamo guards what the function reads
    torch.testing.assert_close(step(*inputs), model(*inputs))


def test_compiled_closures_numbers_and_programs(seed):
    a, b, x = draw(seed, (4, 6), (6, 8), (8,))
    program = parse("def epilogue(acc, bias: fp32[N]): return tanh(acc) + bias")

    def scaled(scale):
        return lambda acc, x: acc * scale + x

    call = compiled(lambda a, function: cutegemm.gemm(a, b, epilogue=function, operands=(x,)) + 1)
    for function in (scaled(2.0), scaled(3.0), scaled(3.0), program):
        torch.testing.assert_close(call(a, function), cutegemm.gemm(a, b, epilogue=function, operands=(x,)) + 1)
    call = compiled(
        lambda a, s, n: cutegemm.gemm(
            a, b, epilogue=lambda acc, x, s, n: (ops.where(ops.row() < n, acc * s, x), ops.cast(acc, torch.bfloat16)),
            operands=(x, s, n),
        )
    )  # fmt: skip
    for scale, rows in ((1.0, 1), (0.25, 2), (3.0, 3)):
        first, second = call(a, scale, rows)
        torch.testing.assert_close(first, torch.where(torch.arange(4)[:, None] < rows, a @ b * scale, x))
        assert second.dtype == torch.bfloat16


def test_compiled_with_sizes_that_change(seed):
    b, x = draw(seed, (6, 8), (8,))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def call(a, rows):
        return cutegemm.gemm(a, b, epilogue=lambda acc, x, r: ops.relu(acc + x) * r, operands=(x, rows))

    for m in (40, 7, 13, 29):
        a, rows = draw(seed, (m, 6), (m, 1))
        torch.testing.assert_close(call(a, rows), torch.relu(a @ b + x) * rows)
    assert counter.frame_count <= 2


def test_compiled_with_floats_that_change(seed):
    """A float argument of an operator is a constant of the graph: each value would compile anew, up to the limit."""
    a, b = draw(seed, (6, 8), (8, 6))
    offsets, ones = torch.tensor([6], dtype=torch.int32), torch.ones(())

    def one_by_one(acc, s):
        return acc * s

    program = cutegemm.trace_epilogue(one_by_one, (0.5,))
    calls = {
        "gemm": lambda s: cutegemm.gemm(a, b, epilogue=one_by_one, operands=(s,)),
        "program": lambda s: cutegemm.gemm(a, b, epilogue=program, operands=(s,)),
        "vmap": lambda s: torch.vmap(lambda a: cutegemm.gemm(a, b, epilogue=one_by_one, operands=(s,)))(a[None]),
        "groups": lambda s: cutegemm.grouped_gemm(a, b[None], offsets, epilogue=one_by_one, operands=(s,)),
        "program in groups": lambda s: cutegemm.grouped_gemm(a, b[None], offsets, epilogue=program, operands=(s,)),
        "scales": lambda s: cutegemm.gemm(
            a.to(torch.float8_e4m3fn), b.t().contiguous().t().to(torch.float8_e4m3fn), scale_a=ones, scale_b=ones,
            out_dtype=torch.float32, epilogue=one_by_one, operands=(s,),
        ),
    }  # fmt: skip
    values = [0.1 * number + 0.05 for number in range(12)]
    for call in calls.values():
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        found = torch.compile(call, fullgraph=True, backend=counter)
        for value in values:
            torch.testing.assert_close(found(value), call(value))
        assert counter.frame_count == 2  # one for the first value, one for all others
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    by_size = torch.compile(
        lambda a: cutegemm.gemm(a, b, epilogue=one_by_one, operands=(a.shape[0] ** -0.5,)),
        fullgraph=True,
        backend=counter,
    )
    for m in range(3, 15):
        (a,) = draw(seed, (m, 8))
        torch.testing.assert_close(by_size(a), (a @ b) * m**-0.5)
    assert counter.frame_count == 2


def test_compiled_under_autocast_and_with_out(seed):
    a, b, x = draw(seed, (8, 16), (16, 8), (8,))

    def call(a, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cutegemm.gemm(a, b, epilogue=lambda acc, x: acc + x, operands=(x,))

    got = compiled(call)(a, b)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, call(a, b))
    # The operand stays fp32: only a and b are cast.
    assert torch.equal(got, cutegemm.gemm(a.bfloat16(), b.bfloat16(), epilogue=lambda acc, x: acc + x, operands=(x,)))
    out, sums = torch.empty(8, 8), torch.empty(8, 1)
    compiled(lambda a, b, out: cutegemm.gemm(a, b, epilogue=lambda acc: (acc, ops.row_sum(acc)), out=out))(
        a, b, (out, sums)
    )  # fmt: skip
    torch.testing.assert_close((out, sums), (a @ b, (a @ b).sum(-1, keepdim=True)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda acc, x: acc, "no result depends on operand 0"),
        (lambda acc, x: ops.row_sum(acc * x) * 2.0, "is a result of its own"),
        (lambda acc, x: acc if acc > x else x, "cannot depend on a value of an epilogue|Data-dependent"),
        (lambda acc, x: str(acc), "returns something else than values"),
        (lambda acc, x: (ops.halves(acc)[0] * x, acc), "returns acc, which ops.halves"),
        (lambda acc, x: acc**x, r"\*\* .*: accepted are 1 to 8"),
    ],
)
def test_compiled_errors_say_what_is_wrong(function, message, seed):
    a, b, x = draw(seed, (4, 6), (6, 8), (8,))
    with pytest.raises(Exception, match=message):
        compiled(lambda a: cutegemm.gemm(a, b, epilogue=function, operands=(x,)))(a)


@pytest.mark.parametrize(
    "function",
    [
        lambda acc, x: ops.where(x > 0, acc, acc),
        lambda acc, x: ops.where(ops.logical_not(acc > 0), acc, 0.0 * x),
        lambda acc, x: ops.where(ops.logical_not(acc > x), acc, 0.0),
    ],
)
def test_compiled_as_eager_where_an_operand_is_simplified_away(function, seed):
    a, b, x = (each.requires_grad_() for each in draw(seed, (4, 6), (6, 8), (8,)))

    def call(a, b, x):
        return cutegemm.gemm(a, b, epilogue=function, operands=(x,))

    want, got = call(a, b, x), compiled(call)(a, b, x)
    assert torch.equal(got, want)
    for mine, theirs in zip(*(torch.autograd.grad(d.sum(), (a, b, x)) for d in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_compiled_refuses_a_condition_for_a_number(seed):
    a, b = draw(seed, (4, 6), (6, 8))
    with pytest.raises(Exception, match=r"operands\[0\]: got bool"):
        compiled(lambda a: cutegemm.gemm(a, b, epilogue=lambda acc, x: acc * x, operands=(True,)))(a)


@pytest.mark.parametrize(
    "epilogue",
    [
        lambda acc, x, rows, share: ops.exp(share) * acc + ops.rsqrt(rows) + x,
        lambda acc, x, rows, share: ops.maximum(share, 0.5) * acc + x,
        lambda acc, x, rows, share: acc**rows + x,
    ],
)
def test_compiled_functions_of_numbers_that_change(epilogue, seed):
    """What dynamo takes for a symbol was made a tensor, or compared with a constant, and raised an error."""

    def call(a, b, x, share):
        return cutegemm.gemm(a, b, epilogue=lambda acc, x: epilogue(acc, x, a.shape[0], share), operands=(x,))

    step = compiled(call)
    for rows, share in ((3, 0.25), (5, 1.5), (6, 0.75)):
        inputs = draw(seed, (rows, 6), (6, 8), (8,))
        torch.testing.assert_close(step(*inputs, share), call(*inputs, share))


@pytest.mark.parametrize("differs", [False, True])
def test_compiled_comparisons_with_sizes_that_change_are_refused(differs, seed):
    """Dynamo takes a value for different from every symbol, so that the last row was masked no more."""

    def call(a, b):
        rows = a.shape[0] - 1
        return cutegemm.gemm(
            a, b, epilogue=lambda acc: ops.where(ops.row() != rows if differs else ops.row() == rows, acc, acc * 0.0)
        )

    def with_operand(a, b):
        return cutegemm.gemm(
            a, b, epilogue=lambda acc, rows: ops.where(ops.row() == rows - 1, acc, 0.0), operands=(a.shape[0],)
        )

    step, other = compiled(call), compiled(with_operand)
    for rows in (3, 5, 6):
        a, b = draw(seed, (rows, 6), (6, 8))
        torch.testing.assert_close(other(a, b), with_operand(a, b))
        if rows == 3:
            torch.testing.assert_close(step(a, b), call(a, b))
            continue
        # torch 2.11 refuses the comparison itself.
        said = "NotImplementedError" if torch.__version__ < (2, 12) else "pass such a number by operands"
        with pytest.raises(Exception, match=said):
            step(a, b)


def test_compiled_mixture_of_tokens_whose_number_is_known_to_no_one(seed):
    x, weights, gate_up, down = draw(seed, (6, 8), (6, 1), (2, 8, 8), (2, 8, 4))

    def call(chosen):
        return cutegemm.moe(x[chosen], chosen[chosen][:, None].int() - 1, weights[chosen], gate_up, down)

    step = compiled(call)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for chosen in ([1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6, [1] * 6):
            rows = torch.tensor(chosen, dtype=torch.bool)
            torch.testing.assert_close(step(rows), call(rows))


def in_a_checkpoint(call):
    return lambda *tensors: torch.utils.checkpoint.checkpoint(call, *tensors, use_reentrant=False)


def in_a_branch(call):
    return lambda *tensors: torch.cond(tensors[0].sum() > -1e9, call, lambda a, b, x: a @ b, tensors)


@pytest.mark.parametrize("within", [in_a_checkpoint, in_a_branch])
@pytest.mark.parametrize(
    "epilogue",
    [
        lambda acc, x: ops.gelu(acc) * x,
        lambda acc, x: ops.where((ops.row() * 2 - 1) // 2 >= ops.column(), acc, x + ops.random(ops.row() + 3)),
        lambda acc, x: ops.cast(ops.row() * ops.column() + ops.matrix(), torch.float32) + ops.maximum(acc, x),
    ],
)
def test_compiled_in_regions_that_write_nothing_outside(within, epilogue, seed):
    """What dynamo gives a region of its own must not change an object that was there before."""

    def call(a, b, x):
        return cutegemm.gemm(a, b, epilogue=epilogue, operands=(x,))

    tensors = draw(seed, (6, 6), (6, 8), (8,))
    torch.testing.assert_close(compiled(within(call))(*tensors), call(*tensors))


def test_compiled_results_of_places_alone(seed):
    a, b = draw(seed, (4, 6), (6, 8))

    def call(a, b):
        return cutegemm.gemm(a, b, epilogue=lambda acc: (acc, ops.column(), ops.row_sum(ops.row() + 1)))

    for got, want in zip(compiled(call)(a, b), call(a, b), strict=True):
        assert torch.equal(got, want)


def test_exported_and_traced(seed):
    a, b = draw(seed, (4, 6), (6, 8))

    class Module(torch.nn.Module):
        def forward(self, a):
            return cutegemm.gemm(a, b, epilogue=ops.swiglu)

    program = torch.export.export(Module(), (a,))
    assert OP in [node.target for node in program.graph.nodes]
    want = cutegemm.gemm(a + 1, b, epilogue=ops.swiglu)
    assert torch.equal(program.module()(a + 1), want)
    assert torch.equal(torch.jit.trace(Module(), (a,))(a + 1), want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_exported_with_a_size_among_the_operands(grouped, strict, seed):
    a, b = draw(seed, (4, 6), (6, 8))

    def last_row(acc, rows):
        return ops.where(ops.row() == rows - 1, acc, 0.0)

    class Module(torch.nn.Module):
        def forward(self, a):
            options = {"epilogue": last_row, "operands": (a.shape[0],)}
            if grouped:
                return cutegemm.grouped_gemm(a, b[None], torch.full((1,), a.shape[0], dtype=torch.int32), **options)
            return cutegemm.gemm(a, b, **options)

    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Module(), (a,), dynamic_shapes=({0: rows},), strict=strict)
    for count in (4, 7, 3):
        (a,) = draw(seed, (count, 6))
        torch.testing.assert_close(program.module()(a), Module()(a))
        assert (program.module()(a)[:-1] == 0).all()


def test_exported_with_a_size_in_the_function_says_where_it_belongs(seed):
    a, b = draw(seed, (4, 6), (6, 8))

    class Module(torch.nn.Module):
        def forward(self, a):
            return cutegemm.gemm(a, b, epilogue=lambda acc: acc * a.shape[0])

    rows = torch.export.Dim("rows", min=2, max=64)
    with pytest.raises(cutegemm.EpilogueError, match="a size that may change: pass it by operands="):
        torch.export.export(Module(), (a,), dynamic_shapes=({0: rows},), strict=False)


SCALED = {"scale_a": torch.ones(())}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda a, b: cutegemm.gemm(a, b, alpha=a.shape[0]), "alpha: got SymInt"),
        (lambda a, b: cutegemm.gemm(a, b, alpha=1 / a.shape[0]), "alpha: got SymFloat"),
        (lambda a, b: cutegemm.gemm(a, b, a.new_ones(8), beta=1 / a.shape[0]), "beta: got SymFloat"),
        (lambda a, b: cutegemm.gemm(a.char(), b.char(), alpha=1 / a.shape[0], **SCALED), "alpha: got SymFloat"),
        (
            lambda a, b: cutegemm.gemm(a, b, epilogue=lambda acc, x: acc * x, operands=(1 / a.shape[0],)),
            r"operands\[0\]: got SymFloat",
        ),
        (
            lambda a, b: cutegemm.gemm(a, b, epilogue=lambda acc, x: acc * x, operands=(a.sum().item(),)),
            r"operands\[0\]: got SymFloat",
        ),
    ],
)
def test_exported_numbers_of_open_sizes_are_refused_by_name(call, named, seed):
    a, b = draw(seed, (4, 6), (6, 8))

    class Module(torch.nn.Module):
        def forward(self, a):
            return call(a, b)

    rows = torch.export.Dim("rows", min=2, max=64)
    said = rf"{named}, which follows from a size .*, or from \.item\(\).*operands=\(a\.shape\[0\],\)\. In the place of"
    with pytest.raises(TypeError, match=said):
        torch.export.export(Module(), (a,), dynamic_shapes=({0: rows},), strict=False)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_division_by_an_open_size(strict, seed):
    """As the refusal of an alpha that follows from one says it."""
    a, b = draw(seed, (4, 6), (6, 8))

    class Module(torch.nn.Module):
        def forward(self, a):
            return cutegemm.gemm(a, b, epilogue=lambda acc, m: acc / m, operands=(a.shape[0],))

    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Module(), (a,), dynamic_shapes=({0: rows},), strict=strict)
    for count in (4, 7, 3):
        (a,) = draw(seed, (count, 6))
        torch.testing.assert_close(program.module()(a), a @ b / count)


def test_compiled_alpha_of_a_size_that_changes(seed):
    def call(a, b):
        return cutegemm.gemm(a, b, a.new_ones(8), alpha=1 / a.shape[0], beta=a.shape[0])

    step = compiled(call)
    for rows in (3, 5, 6):
        a, b = draw(seed, (rows, 6), (6, 8))
        torch.testing.assert_close(step(a, b), a @ b / rows + rows)


def test_integers_that_change_compile_once_more_with_gradients(seed):
    """A seed, and a size: the backward pass reads both, and guards on neither."""
    a, b = draw(seed, (4, 6), (6, 8))
    a.requires_grad_()

    def call(a, seed):
        rows = cutegemm.gemm(a, b, epilogue=lambda acc, n: acc * n, operands=(a.shape[0],))
        return rows + cutegemm.gemm(a, b, epilogue=lambda acc, s: ops.dropout(acc, 0.5, s), operands=(seed,))

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = compiled(call, counter)
    for number in range(2, 14):
        want, got = (torch.autograd.grad(run(a, number).square().sum(), a) for run in (call, step))
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_a_package_of_aotinductor_gives_none_for_empty_lists(seed, tmp_path):
    """Its runtime calls operators with None in place of empty lists of operands."""
    b, experts, scale = *draw(seed, (16, 8), (4, 16, 8)), torch.ones(())

    class Module(torch.nn.Module):
        def forward(self, x):
            ends = torch.arange(1, 5, dtype=torch.int32) * 3
            values = (8 * x).to(torch.float8_e4m3fn)
            out = x.new_empty(12, 8)
            cutegemm.gemm(x, b, epilogue=ops.gelu, out=out)
            return (
                cutegemm.gemm(x, b, epilogue=ops.silu),
                cutegemm.grouped_gemm(x, experts, ends, epilogue=ops.silu),
                cutegemm.gemm(values, values.t(), scale_a=scale, scale_b=scale, epilogue=ops.silu),
                out,
            )

    model, (x,) = Module(), draw(seed, (12, 16))
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for got, want in zip(loaded(x), model(x), strict=True):
            torch.testing.assert_close(got, want)
        with torch.autocast("cpu"):
            for got, want in zip(loaded(x)[:2], model(x)[:2], strict=True):
                torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)
        expected = model(x)
        extension = host_stub.extension()
        try:
            extension.serve_operators()
            for got, want in zip(loaded(x), expected, strict=True):
                torch.testing.assert_close(got, want)
        finally:
            extension.leave_operators()
