"""Scaled operands in groups: which recipe a shape says, torch's backend against sums written out, what is refused."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
import torch._dynamo.testing

import cutegemm
from cutegemm import ops
from cutegemm.choice import plan
from cutegemm.hardware import arch
from cutegemm.problem import grouped_request, grouped_scales
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from cutegemm.run import grouped
from tests.groups import RECIPES, SKEWS, WORKS, GroupCase, sizes_of

G, T, M, N, K = 3, 130, 140, 260, 300
ENDS = torch.tensor([50, 50, 130], dtype=torch.int32)
ROWS = torch.empty(T, K).to(torch.float8_e4m3fn)  # A, whose rows groups divide
COLUMNS = torch.empty(T, K).to(torch.float8_e5m2).t()
STACKED_A = torch.empty(G, M, K).to(torch.float8_e4m3fn)
STACKED_B = torch.empty(G, N, K).to(torch.float8_e5m2).mT


def found(a, b, sizes, shape_a, shape_b, scaling=None):
    extents = grouped_request.extents(a, b, sizes)
    scales = (None if shape is None else torch.ones(shape) for shape in (shape_a, shape_b))
    return grouped_scales.recipes(a, b, extents, *scales, scaling)


@pytest.mark.parametrize(
    ("a", "b", "shape_a", "shape_b", "expected"),
    [
        (ROWS, STACKED_B, (), (1,), "tensor [] | tensor []"),
        (ROWS, STACKED_B, (G,), (G,), "tensor [L] | tensor [L]"),
        (ROWS, STACKED_B, (T, 1), (G, 1, N), "rows [M] | rows [LN]"),
        (ROWS, STACKED_B, (T,), (G, N), "rows [M] | rows [LN]"),
        (ROWS, STACKED_B, (T, 3), (G, 3, 3), "blocks a1 [] | blocks b128 [L]"),
        (ROWS, STACKED_B, (1, T, 1), (1, 3, N), "rows [M] | blocks b1 []"),
        (STACKED_A, COLUMNS, (G, M), (T,), "rows [LM] | rows [N]"),
        (STACKED_A, COLUMNS, (G, 2, 3), (3, T), "blocks a128 [L] | blocks b1 []"),
        (STACKED_A, COLUMNS, (1, M, 1), (1, T), "rows [M] | rows [N]"),
        (STACKED_A, STACKED_B, (G, M, 3), (G, 3, N), "blocks a1 [L] | blocks b1 [L]"),
        (ROWS.t(), ROWS, (G, K, 1), (G, 1, K), "rows [LM] | rows [LN]"),
        (ROWS.t(), ROWS, (G * K,), (G * K,), "rows [LM] | rows [LN]"),
        (ROWS.t(), ROWS, (K, 1), (1, K), "rows [M] | rows [N]"),
    ],
)
def test_the_shape_says_the_recipe(a, b, shape_a, shape_b, expected):
    sizes = grouped_request.Sizes(None, ENDS) if a.dim() == b.dim() == 3 else grouped_request.Sizes(ENDS)
    texts = []
    for each in found(a, b, sizes, shape_a, shape_b):
        given = each.recipe.input
        along = "L" * given.batched + "M" * given.m + "N" * given.n
        texts.append(" ".join((each.recipe.name, *([given.scales] if given.scales else []), f"[{along}]")))
        assert each.scale.dim() == (3 if given.batched else 2)
    assert " | ".join(texts) == expected


def test_a_shape_that_may_be_two_recipes_is_named():
    a, b, ends = ROWS[:G], STACKED_B, grouped_request.Sizes(ENDS)
    message = r"scale_a: got shape \(3,\), which may be \(3, 1, 1\) \(tensor\) or \(3, 1\) \(rows\); reshape it"
    with pytest.raises(ValueError, match=message):
        found(a, b, ends, (G,), None)
    assert not found(a, b, ends, (G,), None, "rows")[0].recipe.input.batched
    assert found(a, b, ends, (G,), None, ("tensor", None))[0].recipe.input.batched
    # What means the same is no question: K of one block, groups of which there is one.
    assert found(a[:, :128], b[:, :128], ends, (G, 1), (G, 1, N), "blocks")[0].recipe.name == "rows"
    one = grouped_request.Sizes(ENDS[:1])
    assert found(a[:1], b[:1], one, (1,), (1,))[0].recipe.name == "tensor"


F8 = {"a": ROWS, "b": STACKED_B, "offsets": ENDS}
WRONG = [
    ({"scale_a": torch.ones(T, 4)}, ValueError, "scale_a: got shape (130, 4); with a of shape (130, 300) and 3 groups"),
    ({"scale_a": torch.ones(2, 3)}, ValueError, "blocks of 128 rows have no scales here, because groups of rows end"),
    ({"scale_b": torch.ones(N)}, ValueError, "scale_b: got shape (260,); with b of shape (3, 300, 260) and 3 groups"),
    ({"scale_b": torch.ones(3, 3)}, ValueError, "(3, 1, 260) or (3, 260) (rows)"),
    ({"scale_a": torch.ones(T, 1), "scaling": "blocks"}, ValueError, "accepted are (130, 3) (blocks)"),
    ({"scale_a": torch.ones(T, 1).double()}, TypeError, "scale_a: got dtype torch.float64, accepted is torch.float32"),
    ({"scale_a": 2.0}, TypeError, "scale_a: got float, expected a torch.Tensor"),
    ({"scaling": "rows"}, ValueError, "scaling: got 'rows' without scale_a and scale_b"),
    ({"scale_a": torch.ones(()), "scaling": "mx"}, ValueError, "scaling: got 'mx', accepted are None, 'tensor'"),
    ({"scale_a": torch.ones(T, 3), "accumulate": "fast"}, ValueError, "accumulate: got 'fast' with scales of blocks"),
    ({"scale_a": torch.ones((), requires_grad=True)}, ValueError, "scale_a: it requires grad, and products of fp8 or"),
    ({"bias": torch.ones(N, requires_grad=True)}, ValueError, "bias: it requires grad, and products of fp8 or int8"),
    ({"a": ROWS.t(), "b": ROWS, "scale_a": torch.ones(K, 2)}, ValueError, "because groups of K end within them"),
    ({"a": ROWS.t(), "b": ROWS, "scale_b": torch.ones(2, 3), "scaling": "blocks"}, ValueError,
     "scale_b: got shape (2, 3) as blocks of K; groups of K end within blocks"),
    ({"a": ROWS.float(), "b": STACKED_B.float(), "scale_a": torch.ones(())}, TypeError,
     "scale_a: a has dtype torch.float32; scales are for torch.float8_e4m3fn"),
    ({"a": ROWS.float(), "b": STACKED_B.float(), "accumulate": "fast"}, ValueError, "whose sums are never promoted"),
    ({"out_dtype": torch.int32}, TypeError, "out_dtype: got dtype torch.int32, accepted are torch.float16"),
    ({"a": ROWS.to(torch.int8)}, TypeError, "b: got dtype torch.float8_e5m2, expected that of a, torch.int8"),
    ({"a": ROWS.to(torch.int8), "b": STACKED_B.to(torch.int8), "out_dtype": torch.int32, "scale_a": torch.ones(())},
     ValueError, "out_dtype: got torch.int32 with an epilogue or scales; it is for the plain product of int8"),
    ({"a": ROWS.to(torch.int8), "b": STACKED_B.to(torch.int8), "epilogue": ops.swiglu}, ValueError,
     "out_dtype: got None for int8 operands and an epilogue, whose results are no int32"),
    ({"rows": torch.zeros(T, dtype=torch.int32, device="meta"), "scale_a": torch.ones(T, 1)}, ValueError,
     "rows: it is on meta, expected the device of a, cpu"),
    ({"rows": torch.zeros(T, dtype=torch.int32).to_sparse(), "scale_a": torch.ones(T, 1)}, TypeError,
     "rows: got layout torch.sparse_coo, expected a dense"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), WRONG, ids=[each[2][:40] for each in WRONG])
def test_a_bad_call_is_refused_with_the_reason(given, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        cutegemm.grouped_gemm(**{**F8, **given})


def test_scales_of_a_program_that_is_passed_are_checked_too():
    """A kernel reads all of them: others would be read outside of their tensor."""
    case = GroupCase.random(RAGGED_M, [5, 7], 0, 8, 300, "e4m3", recipes=("blocks", "blocks"))
    program, operands, _ = case.described()
    case.epilogue, case.scales = program, {}
    case.operands = operands
    case.call()
    case.operands = (operands[0], operands[1][:, :2].clone())
    with pytest.raises(ValueError, match=r"operands\[1\]: got scales of blocks of shape \(2, 2, 8\), accepted"):
        case.call()


# -- numbers ----------------------------------------------------------------------------------------------------------
def numbers(operand, scale, group, begin, end, rows_divided):
    """The numbers that one group's A (rows, K) stands for in float64, by the definition of each recipe."""
    x = operand[begin:end] if rows_divided else operand[group]
    own = scale
    if scale.dim() == 1:
        own = scale[group] if len(scale) == 4 else scale[begin:end, None] if rows_divided else None
    elif scale.dim() == 2 and rows_divided:
        own = scale[begin:end]
    elif scale.dim() == 2:
        own = scale[group][:, None]
    elif scale.dim() == 3:
        own = scale[group]
    if own.dim() == 2:
        down = torch.arange(x.shape[0]) // (128 if own.shape[0] != x.shape[0] else 1)
        own = own[down][:, torch.arange(x.shape[1]) // 128 if own.shape[1] > 1 else torch.zeros(x.shape[1]).long()]
    return x.double() * own.double()


@pytest.mark.parametrize("kinds", [("e4m3", "e5m2"), ("int8", "int8")])
@pytest.mark.parametrize("recipes", [*itertools.product(RECIPES, (*RECIPES, "blocks128"))])
@pytest.mark.product(keep=10)
def test_groups_of_rows_are_the_products_of_what_their_operands_stand_for(kinds, recipes, seed):
    case = GroupCase.random(
        RAGGED_M, [60, 0, 1, 90], 0, 140, 300, kinds[0], b_dtype=kinds[1], recipes=recipes, seed=seed,
        out_dtype=torch.float32,
    )  # fmt: skip
    got = case.call()
    ends = [0, *case.sizes.tolist()]
    for group, (begin, end) in enumerate(itertools.pairwise(ends)):
        a = numbers(case.a, case.scales["scale_a"], group, begin, end, True)
        scale_b = case.scales["scale_b"]
        b = numbers(case.b.mT, scale_b if scale_b.dim() < 3 else scale_b.mT, group, begin, end, False).t()
        error = (got[begin:end].double() - a @ b).abs()
        assert bool((error <= 1e-5 * (a.abs() @ b.abs()) + 1e-6).all()), (recipes, float(error.max()))
    case.run()


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8"])
def test_every_work_by_torch(work, kind, seed):
    rng = random.Random(seed)
    known = RECIPES if work != RAGGED_K else RECIPES[:-1]
    for skew in SKEWS:
        sizes = sizes_of(skew, rng.randint(1, 5), 30, rng)
        recipes = rng.choice((*known, None)), rng.choice((*known, None))
        exact = kind == "int8" and recipes == (None, None)
        case = GroupCase.random(work, sizes, 200 if work == MASKED else 30, 10, 150, kind, recipes=recipes, seed=seed)
        case.run(exact=exact)
        if not exact and work not in (RAGGED_N, RAGGED_K):
            case.epilogue, case.options["out_dtype"] = ops.swiglu, torch.float16
            case.run()


def test_sums_of_int8_are_exact_and_bfloat16_with_scales():
    a, b = torch.full((3, 2**16), -128, dtype=torch.int8), torch.full((2, 2**16, 5), -128, dtype=torch.int8)
    ends = torch.tensor([1, 3], dtype=torch.int32)
    exact = cutegemm.grouped_gemm(a, b, ends)
    assert exact.dtype == torch.int32
    assert bool((exact == 2**30).all())
    scaled = cutegemm.grouped_gemm(a, b, ends, scale_a=torch.tensor([1.0, 2.0]), scale_b=torch.tensor(2.0**-30))
    assert scaled.dtype == torch.bfloat16
    assert scaled[:, 0].tolist() == [1, 2, 2]
    out = torch.zeros(3, 5, dtype=torch.int32)
    assert cutegemm.grouped_gemm(a, b, ends, out=out) is out
    assert bool((out == 2**30).all())


def test_rows_behind_the_last_end_are_not_written():
    case = GroupCase.random(RAGGED_M, [4, 3], 0, 8, 16, "int8", tail=5, recipes=("rows", None))
    case.run(out=(torch.empty(12, 8, dtype=torch.bfloat16),))
    case = GroupCase.random(SCATTERED, [4, 3], 0, 8, 16, "e4m3", recipes=("rows", None), out_dtype=torch.float8_e4m3fn)
    out = torch.full((16, 8), 1.0).to(torch.float8_e4m3fn)
    case.call(out=out)
    assert int((out.float() == 1).all(1).sum()) >= 16 - 7


# -- torch ------------------------------------------------------------------------------------------------------------
def test_torch_agrees_with_the_operator():
    """opcheck: schema, fake tensors, dynamic shapes. Of int8, because torch's comparison of results has no fp8."""
    case = GroupCase.random(RAGGED_M, [4, 0, 7], 0, 16, 40, "int8", recipes=("rows", "blocks"))
    sizes = (case.sizes, None, None, None, None)
    scales = (case.scales["scale_a"], case.scales["scale_b"], ["rows", "blocks"])
    text = cutegemm.trace_epilogue(ops.relu).text
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (case.a, case.b, *sizes, *scales, [], [], [], text)
    torch.library.opcheck(torch.ops.cutegemm.scaled_grouped_gemm, arguments, test_utils=tests)


def test_compiled_calls_take_any_number_of_tokens_without_another_compilation():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(x, scale, weights, scales, ends):
        return cutegemm.grouped_gemm(x, weights, ends, scale_a=scale, scale_b=scales, epilogue=ops.swiglu)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    weights, scales = torch.randn(4, 12, 40).to(torch.float8_e4m3fn).mT, torch.rand(4, 1, 12)
    for sizes in ([3, 0, 7, 3], [1, 2, 3, 4], [0, 0, 31, 0]):
        ends = torch.tensor(sizes).cumsum(0).int()
        x, scale = torch.randn(int(ends[-1]), 40).to(torch.float8_e4m3fn), torch.rand(int(ends[-1]), 1)
        assert torch.equal(compiled(x, scale, weights, scales, ends), layer(x, scale, weights, scales, ends))
    assert counter.frame_count == 1


def test_fake_results_are_like_real_ones():
    case = GroupCase.random(GATHERED, [4, 0, 7], 0, 16, 40, "int8", recipes=("rows", None))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        sizes = {"offsets": mode.from_tensor(case.sizes), "rows": mode.from_tensor(case.index)}
        operands = mode.from_tensor(case.a), mode.from_tensor(case.b)
        plain = cutegemm.grouped_gemm(*operands, **sizes)
        scale = mode.from_tensor(case.scales["scale_a"])
        scaled = cutegemm.grouped_gemm(*operands, **sizes, scale_a=scale)
        with pytest.raises(ValueError, match=r"out_dtype: got torch\.int32 with an epilogue or scales"):
            cutegemm.grouped_gemm(*operands, **sizes, scale_a=scale, out_dtype=torch.int32)
    assert (plain.dtype, scaled.dtype) == (torch.int32, torch.bfloat16)
    assert plain.shape == scaled.shape == (11, 16)


# -- plans ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("work", [RAGGED_M, RAGGED_N, MASKED, GATHERED, SCATTERED])
@pytest.mark.parametrize("recipes", [("rows", "rows"), ("blocks", "blocks"), ("groups", "tensor"), (None, None)])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.product(keep=8)
def test_the_heuristic_has_a_hopper_kernel_for_every_recipe(work, recipes, kind):
    case = GroupCase.random(work, [40, 0, 7], 64, 256, 320, kind, recipes=recipes)
    program, operands, dtype = case.described()
    dtype = torch.int32 if kind == "int8" and recipes == (None, None) else dtype
    asked = grouped_request.describe(
        case.a, case.b, grouped_request.Sizes(**case.given), program, operands, None, dtype, None
    )  # fmt: skip
    chosen = plan.choose(asked.problem, arch.get("H200"))
    assert chosen.backend == "cute"
    assert str(chosen.config).startswith("sm90/")
    text = plan.describe(plan.Plan(asked.problem, chosen, arch.get("H200"), None))
    assert ("fp32[" in text) == (recipes != (None, None))


def test_explain_tells_of_groups_and_their_scales(capsys):
    given = {"scale_a": torch.ones(T, 3), "scale_b": torch.ones(G, 3, 3), "backend": "cute"}
    cutegemm.explain(ROWS, STACKED_B, offsets=ENDS, **given)
    told = capsys.readouterr().out
    assert re.search(r"groups\s+ragged m", told)
    assert "fp32[A, 1, 128], x1: fp32[L, B, 128, 128]" in told
    assert re.search(r"configuration\s+sm90/", told)
    assert re.search(r"bound .* bytes if no group is empty\)", told), "weights of empty groups are not read"
    with pytest.raises(ValueError, match="c: got a tensor with offsets"):
        cutegemm.explain(ROWS, STACKED_B, ROWS, offsets=ENDS)


def test_vmap_is_refused_by_name():
    given = {"scale_a": torch.ones(()), "scale_b": torch.ones(())}
    with pytest.raises(NotImplementedError, match=r"grouped_gemm, moe: torch\.vmap .* is not supported"):
        torch.vmap(lambda a: cutegemm.grouped_gemm(a, STACKED_B, ENDS, **given))(torch.stack([ROWS, ROWS]))


def test_a_plan_is_remembered_by_the_scales_that_it_reads():
    case = GroupCase.random(RAGGED_M, [4, 7], 0, 16, 40, "e4m3", recipes=("rows", "rows"))
    keys = []
    for scale in (case.scales["scale_a"], case.scales["scale_a"][:, 0], torch.rand(2)):
        case.scales = {"scale_a": scale}
        program, operands, _ = case.described()
        sizes = grouped_request.Sizes(**case.given)
        keys.append(grouped.key_of(case.a, case.b, sizes, program, operands, None, None, None, "auto", None))
    assert keys[0] == keys[1] != keys[2]
