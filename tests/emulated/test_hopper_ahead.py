"""Matrix operands of an epilogue that travel through the ring of the Hopper kernel (`ahead`), in the emulator.

Operands are integers, so that all is exact. The emulator reports races, deadlocks and bytes that nobody waits for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutegemm import backend
from cutegemm.cute.hopper.ahead_plan import plan as ring_plan
from tests.emulated.test_program_outputs import check_exact, integers, run

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms")

ONE = "def epilogue(acc, x0: bf16[L, M, N]): return acc + x0"
TWO = "def epilogue(acc, x0: bf16[L, M, N], x1: fp16[M, N]): return acc * x0 - x1"
ROTATED = "def epilogue(acc, x0: bf16[M, N], x1: bf16[M, N]): return acc * x0 + partner(acc) * x1"
REDUCED = (
    "def epilogue(acc, x0: bf16[N], x1: bf16[M, N]): t0 = relu(acc + x0) + x1; return t0, row_sum(t0), column_max(t0)"
)
ROW_SUMS = "def epilogue(acc, x0: bf16[M, N]): t0 = acc + x0; return t0, row_sum(t0)"
GATED = "def epilogue(gate: halves[0], up: halves[1], x0: bf16[L, M, N]): return gate - up + x0"
THREE = "def epilogue(acc, x0: bf16[M, N], x1: bf16[M, N], x2: bf16[L, M, N]): return acc * x0 + x1 - x2"
WIDE = "def epilogue(acc, x0: fp32[L, M, N], x1: bf16[M, N]): return acc + x0 * x1"
HEADS = "def epilogue(acc, x0: bf16[M, 64], x1: bf16[L, M, 128]): return acc * x0 + partner(acc) * x1"
SWAPPED_HEADS = "def epilogue(acc, x0: bf16[M, 64], x1: bf16[L, M, 128], x2: fp16[M, N]): return acc * x0 - x1 * x2"
WIDE_HEADS = "def epilogue(acc, x0: fp32[M, 32], x1: bf16[M, 40]): return acc + x0 * x1"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

COOPERATIVE = [
    "128x64x64/coop2/c1x1/s3/row", "64x128x64/coop1/c2x1/s3/row/pdl", "128x144x64/coop2/c1x2/s2/g2/zig",
    "192x64x64/coop3/c1x1/s3/row", "128x128x32/coop2/c2x2/s3/row", "128x80x32/coop2/c1x1/s8/row/onebuf",
]  # fmt: skip
PING_PONG = [
    "128x160x32/pp/c1x1/s10/row", "128x176x32/pp/c1x2/s9/g2/skew", "128x160x64/pp/c2x1/s5/row/once",
    "128x192x32/pp/c2x2/s8/row/pdl",
]  # fmt: skip
SWAPPED = ["64x32x64/coop1/c1x1/s3/row/swap", "128x64x64/coop2/c2x1/s3/row/swap", "128x160x64/pp/c1x2/s4/row/swap"]


def check(text: str, config: str, shape: tuple[int, int, int], out: torch.dtype = torch.bfloat16) -> None:
    """Two matrices of that shape; every operand of the program, batched as it says."""
    m, n, k = shape
    operands = []
    for number, each in enumerate(text[text.index("(") : text.index("):")].split("x")[1:]):
        dtype, extents = each.split(": ")[1].rstrip("], ").split("[")
        known = {"L": 2, "M": m, "N": n // 2 if text is GATED else n}
        sizes = [int(each) if each.isdecimal() else known[each] for each in extents.split(", ")]
        operands.append(integers(*sizes, dtype=DTYPES[dtype], seed=3 + number))
    a, b = integers(2, m, k, dtype=torch.bfloat16, seed=1), integers(n, k, dtype=torch.bfloat16, seed=2).T
    got, want = run(text, f"sm90/{config}", a, b, *operands, out_dtype=out)
    check_exact(got, want) if isinstance(got, tuple) else check_exact((got,), want)


@pytest.mark.parametrize("shape", [(330, 200, 200), (200, 264, 40)], ids=["deep", "one k tile"])
@pytest.mark.parametrize("config", COOPERATIVE)
@pytest.mark.parametrize("text", [ONE, TWO, ROTATED, REDUCED])
@pytest.mark.product(keep=1)
def test_operands_through_the_ring(text, config, shape):
    check(text, config, shape)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_ring_with_fewer_stages_than_a_step_of_the_epilogue_reads(stages):
    """A stage holds one box here, and a step reads one of each operand: all of them at once."""
    check(THREE, f"64x128x32/coop1/c1x1/s{stages}/row", (200, 136, 72))


@pytest.mark.parametrize("shape", [(200, 400, 200), (200, 392, 24)], ids=["deep", "one k tile"])
@pytest.mark.parametrize("config", PING_PONG)
@pytest.mark.parametrize("text", [TWO, ROTATED, ROW_SUMS])
@pytest.mark.product(keep=1)
def test_operands_through_the_ring_of_ping_pong(text, config, shape):
    check(text, config, shape)


@pytest.mark.parametrize("shape", [(330, 200, 200), (200, 264, 40)], ids=["deep", "one k tile"])
@pytest.mark.parametrize("config", ["128x64x64/coop2/c1x1/s3/row", "128x192x64/coop2/c1x2/s3/g2/zig", PING_PONG[0]])
@pytest.mark.product(keep=1)
def test_columns_that_repeat(config, shape):
    """A tile may be wider than the period, or begin in its middle."""
    check(HEADS, config, shape)


@pytest.mark.parametrize("config", SWAPPED)
@pytest.mark.product(keep=1)
def test_columns_that_repeat_with_swapped_operands(config):
    check(SWAPPED_HEADS, config, (330, 200, 136))


@pytest.mark.parametrize("config", ["128x64x64/coop2/c1x1/s3/row", "128x48x64/coop2/c1x1/s3/row"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_columns_that_repeat_of_several_widths(config, out):
    check(WIDE_HEADS, config, (200, 136, 72), out)


def test_periods_that_are_no_whole_boxes_do_not_take_the_ring():
    from tests.compile.test_program_outputs import problem

    cute, text = backend.get("cute"), "def epilogue(acc, x0: bf16[M, {}]): return acc + x0"
    for config, period, taken in (
        ("sm90/128x128x64/coop2/c1x1/s3/row", 64, True),
        ("sm90/128x128x64/coop2/c1x1/s3/row", 32, False),
        ("sm90/128x96x64/coop2/c1x1/s3/row", 32, True),
        ("sm90/128x96x64/coop2/c1x1/s3/row/swap", 32, False),
        ("sm90/128x96x64/coop2/c1x1/s3/row/swap", 192, True),
    ):
        plan = cute.parse(config).through_ring(problem(text.format(period)).signature)
        assert (plan is not None) == taken, (config, period)


@pytest.mark.parametrize("text", [ONE, TWO, ROTATED, ROW_SUMS])
@pytest.mark.parametrize("tile", ["128x128", "128x160"])
def test_ping_pong_loads_a_lone_operand_and_those_of_small_tiles_itself(text, tile):
    from tests.compile.test_program_outputs import problem

    signature = problem(text.replace("L, ", "").replace("fp16", "bf16")).signature
    chosen = backend.get("cute").parse(f"sm90/{tile}x64/pp/c1x1/s5/row")
    assert (chosen.through_ring(signature) is not None) == (tile == "128x160" and text is not ONE)
    assert replace(chosen, schedule="coop2").through_ring(signature) is not None


@pytest.mark.parametrize("config", SWAPPED)
@pytest.mark.parametrize("text", [ONE, TWO, REDUCED])
@pytest.mark.product(keep=1)
def test_swapped_operands(text, config):
    check(text, config, (330, 200, 136))


@pytest.mark.parametrize(
    "config", ["128x128x64/coop2/c1x1/s3/row", "64x128x64/coop1/c2x1/s3/row", "128x64x64/coop1/c1x1/s3/row/swap"]
)
@pytest.mark.product(keep=1)
def test_gate_and_up(config):
    check(GATED, config, (200, 272, 72))


@pytest.mark.parametrize("config", ["128x64x64/coop2/c1x1/s3/row", "128x160x64/pp/c1x1/s4/row"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.product(keep=1)
def test_those_as_wide_as_the_result_and_others(config, out):
    check(WIDE, config, (200, 136, 72), out)


NARROWER = [
    "128x64x64/coop2/c1x1/s3/row", "64x144x64/coop1/c2x1/s3/row/pdl", "192x96x64/coop3/c1x2/s2/g2/zig",
    "128x128x32/coop2/c2x2/s4/row", "128x80x32/coop2/c1x1/s8/row/onebuf", "128x160x64/pp/c1x2/s5/row",
]  # fmt: skip


@pytest.mark.parametrize("config", NARROWER)
@pytest.mark.parametrize("text", [TWO, ROTATED, REDUCED, HEADS, GATED])
@pytest.mark.product(keep=1)
def test_16_bit_operands_of_a_result_in_fp32(text, config):
    """Rows of their boxes are half as long as those of D's, and swizzled otherwise."""
    check(text, config, (330, 200 if text is not HEADS else 320, 136), torch.float32)


def test_which_operands_of_a_result_in_fp32_take_the_ring():
    from tests.compile.test_program_outputs import problem

    for text, tile, taken in (
        (WIDE, "128x64", ["x0"]),  # those of its width alone
        (TWO, "128x64", ["x0", "x1"]),
        (TWO, "128x48", ["x0", "x1"]),
        (TWO, "128x40", None),  # boxes of 16 bytes have no swizzle
    ):
        chosen = backend.get("cute").parse(f"sm90/{tile}x64/coop2/c1x1/s3/row")
        plan = ring_plan(chosen, problem(text.replace("L, ", ""), "fp32").signature)
        assert (None if plan is None else [each.name for each in plan.operands]) == taken, (text, tile)


def test_a_row_that_serves_all_rows_and_c_that_is_out():
    import cutegemm

    a, b = (integers(*shape, dtype=torch.bfloat16, seed=1) for shape in ((200, 64), (64, 136)))
    config = "sm90/64x64x64/coop1/c1x1/s3/row"
    row = integers(1, 136, dtype=torch.bfloat16, seed=2)
    want = a.double() @ b.double()
    got = cutegemm.gemm(a, b, c=row.expand(200, 136), beta=2.0, backend="cute", config=config)
    assert torch.equal(got.double(), want + 2 * row.double())
    c = integers(200, 136, dtype=torch.bfloat16, seed=3)
    expected = want + c.double()
    cutegemm.gemm(a, b, c=c, beta=1.0, out=c, backend="cute", config=config)
    assert torch.equal(c.double(), expected)


@pytest.mark.parametrize(
    "config", [each for each in (*COOPERATIVE, *PING_PONG, *SWAPPED) if "x32/coop2/c2x2" not in each]
)
def test_the_plan_holds_every_unit_once(config):
    from tests.compile.test_program_outputs import problem

    chosen = backend.get("cute").parse(f"sm90/{config}")
    text = TWO.replace("L, ", "").replace("fp16", "bf16")
    made = ring_plan(chosen, problem(text).signature)
    assert made is not None
    assert chosen.through_ring(problem(text).signature) == made
    units = [unit for stage in range(made.stages) for unit in made.of_stage(stage)]
    assert units == list(range(made.units))
    assert all(0 < len(made.of_stage(stage)) <= made.in_a + made.in_b for stage in range(made.stages))
    # A box has 64 rows; those of all consumers and operands are the whole tile, twice.
    columns = chosen.store_columns(2, problem(text).signature)
    assert made.units * made.sharers * 64 * columns == len(made.operands) * chosen.bm * chosen.bn
    assert made.held <= chosen.stages
    if chosen.ping_pong:
        assert made.stages < chosen.stages
