"""grouped_gemm by backend "torch": results, gradients, torch.compile, and the messages for what it refuses."""

from __future__ import annotations

import itertools
import random
import re
from functools import partial

import pytest
import torch
import torch._dynamo.testing

import cutegemm
from cutegemm import backend, ops
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem, grouped_request, packing
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from cutegemm.run import grouped as run_grouped
from tests.groups import SKEWS, WORKS, GroupCase, sizes_of

ENDS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)


@pytest.mark.parametrize(("work", "name"), [(RAGGED_M, "a"), (SCATTERED, "a"), (GATHERED, "a"), (RAGGED_N, "b")])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_operands_that_groups_divide_are_seen_along_k(work, name, dtype):
    """Whatever their strides; a copy has rows at multiples of 16 bytes and the same elements."""
    for majors, k in itertools.product(("tn", "tt", "nn", "nt"), (1, 5, 16)):
        case = GroupCase.random(work, [3, 0, 4], 7, 6, k, dtype, majors=majors)
        a, b = case.a, case.b
        asked = grouped_request.describe(
            a, b, grouped_request.Sizes(**case.given), case.program(), (), None, None, None
        )
        signature = asked.problem.signature
        assert (signature.a_major if name == "a" else signature.b_major) == "k"
        along_k = {"a": majors[0] == "t", "b": majors[1] == "n"}[name]
        if k > 1:
            assert (name in asked.copied) == (not along_k)
        if name in asked.copied:
            given, matrix = (a, asked.problem.a) if name == "a" else (b, asked.problem.b)
            copy = packing.copied(name, given, work)
            assert torch.equal(copy.nan_to_num(7), given.nan_to_num(7))
            assert copy.stride()[-2:] == (matrix.stride_row, matrix.stride_col)
            assert matrix.leading * copy.element_size() % 16 == 0


def test_rows_of_large_wide_groups_are_gathered_in_a_pass_of_their_own(capsys):
    """From 256 rows a group and 5760 columns on, in 16 and 8 bits, of an A that has no more; they then lie in order."""
    for rows, columns, dtype, a_rows, first in (
        (512, 5760, "bf16", 512, True), (511, 5760, "bf16", 511, False), (512, 5759, "fp16", 512, False),
        (512, 5760, "fp32", 512, False), (512, 5760, "e4m3", 512, True), (512, 5760, "fp16", 513, False),
        (512, 5760, "fp16", 0, True),
    ):  # fmt: skip
        case = GroupCase.random(GATHERED, [rows - 3, 3], rows, columns, 16, dtype)
        a = case.a.new_empty(a_rows, 16)
        asked = grouped_request.describe(
            a, case.b, grouped_request.Sizes(**case.given), case.program(), (), None, None, None
        )
        assert asked.gathers is first
        assert asked.problem.work == (RAGGED_M if first else GATHERED)
        assert ("a" in asked.copied) is first
    case = GroupCase.random(GATHERED, [700, 3], 703, 5760, 16)
    cutegemm.explain(case.a, case.b, **case.given)
    said = "copied first: a  rows: 703 rows are gathered in front of a product of so many columns, not within it"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("majors", ["tt", "nn"])
@pytest.mark.parametrize("k", [5, 16])
def test_the_pass_gives_the_rows_that_are_named(majors, k, seed, monkeypatch):
    monkeypatch.setattr(packing, "GATHERED_COLUMNS", 1)
    memo, passes = run_grouped.memo, []
    in_order = packing.in_order
    monkeypatch.setattr(packing, "in_order", lambda *given: passes.append(given) or in_order(*given))

    def gathering(first):
        """Whether calls gather in front from now on; what was planned before does not count."""
        monkeypatch.setattr(packing, "GATHERED_ROWS", 1 if first else 100)
        memo.clear()

    gathering(True)
    case = GroupCase.random(GATHERED, [3, 0, 7, 2], 12, 6, k, seed=seed, majors=majors, tail=2)
    case.run(backend="torch")
    assert passes
    for entry in (-1, -5, -(2**31), case.a.shape[0], case.a.shape[0] + 1, 2**31 - 1):
        case.index[:] = entry
        assert torch.equal(cutegemm.grouped_gemm(case.a, case.b, **case.given)[:12], torch.zeros(12, 6).bfloat16())
    nothing = cutegemm.grouped_gemm(case.a[:0], case.b, case.sizes, rows=case.index)
    assert torch.equal(nothing[:12], torch.zeros(12, 6).bfloat16())
    torch.manual_seed(seed)
    a, b = torch.randn(9, k).bfloat16().requires_grad_(), torch.randn(4, k, 6).bfloat16().requires_grad_()
    index, upstream = torch.tensor([8, 0, 0, 3, 4, 5, 1, 2, -1, 7, 7, 7]).int(), torch.randn(12, 6).bfloat16()
    found = []
    for first in (True, False):
        gathering(first)
        passes.clear()
        d = cutegemm.grouped_gemm(a, b, ENDS, rows=index)
        found.append([d, *torch.autograd.grad(d, (a, b), upstream)])
        assert bool(passes) is first
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    gathering(True)
    both = torch.zeros(12, k + 6).bfloat16()
    with pytest.raises(ValueError, match="out: it overlaps a in memory"):
        cutegemm.grouped_gemm(both[:9, :k], b.detach(), ENDS, rows=index, out=both[:, k - 1 : k + 5])
    monkeypatch.setenv("CUTEGEMM_DEBUG", "1")
    with pytest.raises(ValueError, match="rows: row 11 has 9, accepted are 0 to 8, and -1 for none"):
        cutegemm.grouped_gemm(a, b, ENDS, rows=index.masked_fill(torch.arange(12) == 11, 9))
    memo.clear()


def test_kernels_refuse_groups_within_contiguous_rows():
    config, arch = "sm90/128x64x64/coop2/c1x1/s3/row", arch_table.get("H200")
    for work, majors, said in (
        (RAGGED_M, "nt", "A is M-major"), (RAGGED_N, "tt", "B is N-major"), (RAGGED_K, "nn", "B is K-major")
    ):  # fmt: skip
        problem = Problem.of(64, 64, 64, "bf16", majors=majors, batch=4, work=work)
        assert said in backend.get("cute").check(backend.get("cute").parse(config), problem, arch)
        with pytest.raises(ValueError, match=said):
            backend.get("cute").build(problem.signature, backend.get("cute").parse(config), arch)


def test_sizes_of_every_skew_fit():
    rng = random.Random(0)
    for skew in SKEWS:
        for groups in (1, 2, 7, 40):
            sizes = sizes_of(skew, groups, 50, rng)
            assert len(sizes) == groups
            assert min(sizes) >= 0
            assert sum(sizes) <= 50


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_results_are_those_of_the_groups(work, dtype, seed):
    rng = random.Random(seed)
    for skew in SKEWS:
        sizes = sizes_of(skew, rng.randint(1, 5), 20, rng)
        case = GroupCase.random(work, sizes, 20, 6, 9, dtype, seed=seed, tail=rng.choice((0, 3)))
        case.run()
        GroupCase.random(work, sizes, 20, 6, 9, dtype, seed=seed, integers=True).run(exact=True)
        if work in (RAGGED_M, MASKED, GATHERED, SCATTERED):
            case.epilogue = ops.swiglu
            case.run()


def test_operands_of_groups_and_the_index_of_the_group(seed):
    generator = torch.Generator().manual_seed(seed)
    case = GroupCase.random(RAGGED_M, [3, 0, 7, 2], 0, 6, 9, seed=seed, tail=2)
    case.epilogue = lambda acc, group, row, whole: acc * group + ops.matrix() * row + whole + ops.row()
    case.operands = [torch.randn(shape, generator=generator) for shape in ((4, 1, 6), (14, 1), (14, 6))]
    case.run()
    case = GroupCase.random(RAGGED_N, [3, 0, 7, 2], 6, 0, 9, seed=seed, tail=2)
    case.epilogue = lambda acc, group, column: acc * group + column + ops.matrix() - ops.column()
    case.operands = [torch.randn(shape, generator=generator) for shape in ((4, 6, 1), (14,))]
    case.run()


@pytest.mark.parametrize("shape", [(), (6,), (1, 6), (1, 1, 6), (4, 1, 6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_program_of_an_operand_for_each_group_takes_one_for_all(shape, transposed):
    """A function would be traced for such an operand; a program says that groups may differ."""
    sizes = torch.tensor([3, 0, 7, 2])
    m, n = (6, 12) if transposed else (12, 6)
    a = torch.randn(*((4,) if transposed else ()), m, 9)
    b = torch.randn(*(() if transposed else (4,)), 9, n)
    of_group, given = torch.randn(4, 1, 6), torch.randn(shape)
    if transposed:
        of_group, given = of_group.mT, given.mT if given.dim() > 1 else given
    program = cutegemm.trace_epilogue(lambda acc, x: acc + x, operands=(of_group,))
    ends = sizes.cumsum(0).int()
    call = partial(cutegemm.grouped_gemm, a, b, ends)
    if transposed and len(shape) == 1:
        with pytest.raises(ValueError, match=r"operands\[0\]"):
            call(epilogue=program, operands=(given,))
        return
    taken = given[(None,) * (3 - given.dim())].expand(of_group.shape).repeat_interleave(sizes, 0)
    wanted = taken[:, 0] if not transposed else taken[:, :, 0].t()
    torch.testing.assert_close(call(epilogue=program, operands=(given,)), call() + wanted)


def test_a_bias_is_one_for_all_or_one_a_group():
    case = GroupCase.random(RAGGED_M, [3, 0, 7, 2], 0, 6, 9, "fp32")
    plain = case.call()
    groups = torch.searchsorted(case.sizes.long(), torch.arange(12), right=True)
    for bias in (torch.randn(6), torch.randn(4, 6)):
        assert torch.equal(case.call(bias=bias), plain + (bias if bias.dim() == 1 else bias[groups]))


def test_offsets_that_descend_or_leave_the_array_are_clamped():
    a, b = torch.randn(12, 9), torch.randn(4, 9, 6)
    for given, meant in (([5, 3, 99, 7], [5, 5, 12, 12]), ([-4, 6, -1, 2**31 - 1], [0, 6, 6, 12])):
        got, want = (cutegemm.grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32)) for ends in (given, meant))
        assert torch.equal(got, want)


def test_the_rows_of_d_are_checked_after_an_equal_call():
    a, b, places = torch.randn(3, 5), torch.randn(1, 5, 6), torch.tensor([0, 2, 1], dtype=torch.int32)

    def call(out_rows):
        return cutegemm.grouped_gemm(a, b, torch.tensor([3]).int(), places=places, out_rows=out_rows)

    call(3)
    with pytest.raises(TypeError, match="out_rows: got float, expected an int"):
        call(3.0)


@pytest.mark.parametrize("several", [False, True])
def test_the_rows_of_a_scattered_result_are_those_of_what_it_is_written_to(several):
    a, b, places = torch.randn(4, 8), torch.randn(1, 8, 6), torch.tensor([5, 0, 3, 1]).int()
    outs = tuple(torch.zeros(7, 6) for _ in range(1 + several))
    program = (lambda acc: (acc, 2 * acc)) if several else (lambda acc: acc)
    cutegemm.grouped_gemm(a, b, torch.tensor([4]).int(), places=places, epilogue=program, out=outs)
    want = torch.zeros(7, 6).index_copy_(0, places.long(), a @ b[0])
    for factor, out in enumerate(outs, 1):
        torch.testing.assert_close(out, factor * want)


def test_debugging_names_the_group_or_the_row(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_DEBUG", "1")
    a, b = torch.randn(12, 9), torch.randn(4, 9, 6)

    def call(ends, **options):
        return cutegemm.grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32), **options)

    call([3, 3, 10, 12])
    with pytest.raises(ValueError, match="offsets: group 2 ends at 1, before group 1, which ends at 3"):
        call([3, 3, 1, 12])
    with pytest.raises(ValueError, match="offsets: group 3 has 13, accepted are 0 to 12"):
        call([3, 3, 3, 13])
    with pytest.raises(ValueError, match="rows: row 1 has 12, accepted are 0 to 11, and -1 for none"):
        call([1, 1, 1, 2], rows=torch.tensor([-1, 12], dtype=torch.int32))
    free = [1] * 9  # places behind the last end
    call([1, 1, 1, 3], places=torch.tensor([2, -1, 1, *free], dtype=torch.int32))
    with pytest.raises(ValueError, match="places: rows 0 and 2 both have 2; each row of D has one"):
        call([1, 1, 1, 3], places=torch.tensor([2, -1, 2, *free], dtype=torch.int32))
    with pytest.raises(ValueError, match="counts: group 1 has -1, accepted are 0 to 12"):
        cutegemm.grouped_gemm(a.expand(2, -1, -1), b[:2], counts=torch.tensor([3, -1], dtype=torch.int32))
    for off in ("0", ""):
        monkeypatch.setenv("CUTEGEMM_DEBUG", off)
        call([3, 3, 1, 12])


A, B = torch.empty(12, 8), torch.empty(4, 8, 6)
NESTED = torch.nested.nested_tensor([A, A], layout=torch.jagged)
WRONG = [
    ((A, B), {}, ValueError, "offsets, counts: got neither"),
    ((A, B, ENDS.long()), {}, TypeError, "offsets: got dtype torch.int64, accepted is torch.int32"),
    ((A, B, ENDS.view(2, 2)), {}, ValueError, "offsets: got 2 dimensions, expected 1"),
    ((A, B, ENDS.expand(2, 4).reshape(-1)[::2]), {}, ValueError, "offsets: got stride 2, expected a contiguous"),
    ((A, B, ENDS[:3]), {}, ValueError, "b: got 4 matrices, and offsets has 3 groups"),
    ((A, B[:0], ENDS[:0]), {}, ValueError, "offsets: got 0 groups, accepted are 1 to 1024"),
    ((A, B.mT, ENDS), {}, ValueError, "its second to last extent must be K = 8"),
    ((A.expand(4, -1, -1), B, ENDS), {}, ValueError, "offsets: got them with a of 3 and b of 3 dimensions"),
    ((A, B), {"counts": ENDS}, ValueError, "counts: got them with a of 2 and b of 3 dimensions"),
    ((A[0], B, ENDS), {}, ValueError, "a: got 1 dimensions, accepted are 2 (rows of all groups) and 3"),
    ((A, B.bfloat16(), ENDS), {}, TypeError, "b: got dtype torch.bfloat16, expected that of a"),
    ((A, B, [3, 3, 10, 12]), {}, TypeError, "offsets: got list, expected an int32 tensor"),
    ((A.t(), A, ENDS), {"rows": ENDS}, ValueError, "rows: got an index with groups of K; accepted are offsets"),
    ((A, B, ENDS), {"places": ENDS}, ValueError, "places: got 4 numbers, and a has 12 rows"),
    ((A, B, ENDS), {"rows": ENDS, "places": ENDS}, ValueError, "rows, places: got both"),
    ((A, B, ENDS), {"out_rows": 3}, ValueError, "out_rows: got it without places"),
    ((A.t(), A, ENDS), {"epilogue": ops.swiglu}, ValueError, "a ragged K has none; compute them apart"),
    ((B.mT, A.t(), ENDS), {"epilogue": ops.swiglu}, ValueError, "with groups of columns, columns do not belong"),
    ((A, B, ENDS), {"epilogue": lambda acc, x: acc * x, "operands": (torch.ones(4, 12, 6),)}, ValueError,
     "operands[0]: got shape (4, 12, 6); accepted are (12, 6), (4, 1, 6), and what broadcasts to one of them"),
    ((A, B, ENDS), {"operands": (A,)}, ValueError, "operands: they are given without an epilogue"),
    ((A, B, ENDS), {"epilogue": lambda acc, x: acc * x, "operands": 3}, TypeError,
     "operands: got int, expected a tuple"),
    ((3, B.clone().requires_grad_(), ENDS), {"epilogue": ops.relu}, TypeError, "a: got int, expected a torch.Tensor"),
    ((A, B, ENDS), {"bias": A[0], "epilogue": ops.relu}, ValueError, "epilogue: got one together with bias"),
    ((A, B, ENDS), {"bias": torch.ones(3)}, ValueError, "bias: got shape (3,), expected (N,) or (G, N)"),
    ((A, B, ENDS), {"bias": torch.ones(3, 6)}, ValueError, "bias: got shape (3, 6), expected (N,) or (G, N)"),
    ((A, B, ENDS), {"bias": torch.ones(6).bool()}, TypeError, "bias: got dtype torch.bool, accepted are"),
    ((A, B, ENDS), {"bias": torch.ones(4, 6).to_sparse()}, TypeError, "bias: got a nested tensor or layout"),
    ((A, B, ENDS), {"bias": torch.ones(6, device="meta")}, ValueError, "bias: it is on meta, expected the device of a"),
    ((A, NESTED, ENDS), {}, TypeError, "b: got a nested tensor, expected a dense one"),
    ((A, B, ENDS), {"out": 3}, ValueError, "out: got int, but the epilogue has 1 results"),
    ((A, B, ENDS), {"out": torch.empty(4, 6)}, ValueError, "out: got shape (4, 6), expected (12, 6)"),
    ((A, B, ENDS), {"save": "all"}, ValueError, "save: got 'all'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "kind", "message"), WRONG, ids=[each[3][:40] for each in WRONG])
def test_a_bad_call_is_refused_with_the_reason(given, options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        cutegemm.grouped_gemm(*given, **options)


# -- gradients --------------------------------------------------------------------------------------------------------
def plain(case: GroupCase, a, b, operands):
    """The product group by group with torch's operators, 0 where no group is."""
    ends = [0, *case.sizes.tolist()]
    pairs = list(itertools.pairwise(ends))
    if case.work == RAGGED_K:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairs])
    if case.work == RAGGED_N:
        return torch.cat([a[g] @ b[:, i:j] for g, (i, j) in enumerate(pairs)], 1)
    if case.work == MASKED:
        rows = torch.arange(a.shape[1])[None, :, None] < case.sizes[:, None, None]
        return torch.where(rows, a @ b, 0)
    if case.work == GATHERED:
        a = torch.where(case.index[:, None] >= 0, a[case.index.clamp(min=0).long()], 0)
    parts = []
    for g, (i, j) in enumerate(pairs):
        part = a[i:j] @ b[g]
        if operands:
            gate, up = part.chunk(2, -1)
            part = torch.nn.functional.silu(gate + operands[1][g]) * up * operands[0][i:j]
        parts.append(part)
    d = torch.cat(parts)
    if case.work == SCATTERED:
        inside = case.index < case.options["out_rows"]
        d = d.new_zeros(case.options["out_rows"], d.shape[1]).index_put((case.index[inside].long(),), d[inside])
    return d


def weighted(acc, row, group):
    gate, up = ops.halves(acc)
    return ops.silu(gate + group) * up * row


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("save", [None, "recompute"])
@pytest.mark.parametrize("majors", ["tt", "nn"])
def test_gradients_are_those_of_torch(work, save, majors, seed):
    """First and second ones; operands too: a number a row and a row a group. Gradients lie as their operands do."""
    case = GroupCase.random(work, [3, 0, 7, 2], 12, 6, 5, "fp32", seed=seed, majors=majors)
    torch.manual_seed(seed)
    a, b = (torch.randn_like(each).requires_grad_() for each in (case.a, case.b))
    operands, options = [], {}
    if work in (RAGGED_M, GATHERED, SCATTERED):
        operands = [torch.randn(12, 1).requires_grad_(), torch.randn(4, 1, 3).requires_grad_()]
        options = {"epilogue": weighted, "operands": operands, "save": save}
    got = cutegemm.grouped_gemm(a, b, **case.given, **options)
    want = plain(case, a, b, operands)
    if work in (MASKED, SCATTERED):
        got = torch.where(want == 0, 0, got)
    inputs = [a, b, *operands]
    upstream = torch.randn_like(want)
    for _ in range(2):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        first, second = (torch.autograd.grad(d, inputs, upstream, create_graph=True) for d in (got, want))
        for mine, theirs in zip(first, second, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        got, want = (torch.stack([(each**2).sum() for each in grads]) for grads in (first, second))
        upstream = torch.ones_like(want)


def test_what_belongs_to_no_group_has_no_gradient():
    a, b = torch.randn(14, 5, requires_grad=True), torch.randn(4, 5, 6, requires_grad=True)
    with torch.no_grad():
        a[12:] = torch.nan
    d = cutegemm.grouped_gemm(a, b, ENDS)
    da, db = torch.autograd.grad(d, (a, b), torch.ones_like(d))
    assert torch.equal(da[12:], torch.zeros(2, 5))
    assert da.isfinite().all()
    assert db.isfinite().all()
    assert torch.equal(db[1], torch.zeros(5, 6))


def test_torch_agrees_with_the_operator():
    """opcheck: schema, fake tensors, autograd, dynamic shapes."""
    a, b = torch.randn(12, 5, requires_grad=True), torch.randn(4, 5, 6, requires_grad=True)
    text, rows = cutegemm.trace_epilogue(ops.swiglu).text, torch.arange(12, dtype=torch.int32)
    arguments = (a, b, ENDS, None, None, rows, 12, [], [], [], text, None, None, "auto", None, "recompute", True)
    torch.library.opcheck(torch.ops.cutegemm.grouped_gemm, arguments)


def test_compiled_calls_take_any_number_of_tokens_without_another_compilation():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(x, gate_up, down, ends, weight):
        hidden = cutegemm.grouped_gemm(x, gate_up, ends, epilogue=ops.swiglu)
        return cutegemm.grouped_gemm(hidden, down, ends, epilogue=lambda acc, w: acc * w, operands=(weight,))

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    gate_up, down = torch.randn(4, 5, 12), torch.randn(4, 6, 5)
    for sizes in ([3, 0, 7, 3], [1, 2, 3, 4], [0, 0, 31, 0]):  # no other extent is 13
        ends = torch.tensor(sizes).cumsum(0).int()
        weight = torch.randn(int(ends[-1]), 1)
        leaves = [t.clone().requires_grad_() for t in (torch.randn(int(ends[-1]), 5), gate_up, down)]
        others = [t.detach().clone().requires_grad_() for t in leaves]
        got, want = compiled(*leaves, ends, weight), layer(*others, ends, weight)
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
        for mine, theirs in zip(leaves, others, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert counter.frame_count == 1


@pytest.mark.parametrize("grad", [False, True])
def test_operands_that_groups_do_not_take_are_refused(grad):
    a, b = torch.ones(4, 16).double(), torch.ones(1, 16, 3).double()
    bias = torch.ones(3, requires_grad=grad)
    with pytest.raises(
        TypeError, match=r"a: got dtype torch\.float64, accepted for products in groups are torch\.float16"
    ):
        cutegemm.grouped_gemm(a, b, torch.tensor([4]).int(), bias=bias)


def test_a_compiled_product_of_fp8_has_the_dtype_of_the_eager_one():
    """The graph was told that D is fp8, and that e4m3 and e5m2 do not go together."""
    a = torch.randn(4, 16).to(torch.float8_e4m3fn)
    b, ends = torch.randn(1, 16, 8).to(torch.float8_e5m2), torch.tensor([4]).int()
    want = cutegemm.grouped_gemm(a, b, ends)
    compiled = torch.compile(lambda: cutegemm.grouped_gemm(a, b, ends).float() + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), want.float() + 1)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = cutegemm.grouped_gemm(mode.from_tensor(a), mode.from_tensor(b), mode.from_tensor(ends))
    assert fake.dtype == want.dtype == torch.bfloat16


def test_precisions_that_groups_do_not_take_are_not_offered():
    """Torch's refusal named backend "cute", whose refusal named the same precisions."""
    a, b, ends = torch.randn(4, 16), torch.randn(1, 16, 8), torch.tensor([4]).int()
    with pytest.raises(cutegemm.UnsupportedError, match=r"bf16x6.*is for dense products; .* accept 'ieee' and 'tf32'"):
        cutegemm.grouped_gemm(a, b, ends, precision="bf16x6")
    with pytest.raises(cutegemm.UnsupportedError, match="operands are split into parts for dense products"):
        cutegemm.grouped_gemm(a, b, ends, precision="bf16x6", backend="cute")


def test_a_bias_of_groups_of_columns_has_none_for_each():
    a, b, ends = torch.randn(3, 6, 32), torch.randn(32, 6), torch.tensor([2, 2, 6], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"^bias: got shape \(3, 6\), accepted is \(N,\) where groups are columns of b$"
    ):
        cutegemm.grouped_gemm(a, b, ends, bias=torch.ones(3, 6))
    for bias in (torch.arange(6.0), torch.arange(6.0)[None], torch.full((1, 1), 2.0)):
        found = cutegemm.grouped_gemm(a, b, ends, bias=bias)
        torch.testing.assert_close(found, cutegemm.grouped_gemm(a, b, ends) + bias)


def test_open_sizes_with_a_bias_in_a_graph():
    """Dynamo finds no symbolic size by `in`."""
    w, ends, bias = (
        torch.randn(3, 32, 24),
        torch.tensor([2, 2, 6], dtype=torch.int32),
        torch.nn.Parameter(torch.ones(3, 24)),
    )

    def product(x, w):
        return cutegemm.grouped_gemm(x, w, ends, bias=bias)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(6, 32)
    torch.testing.assert_close(compiled(x, w), product(x, w))
