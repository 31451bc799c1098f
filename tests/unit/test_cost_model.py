"""What each term of the cost model counts: bytes that straddle lines, what writes cost, ragged ends, launches."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import backend
from cutegemm.choice import cost_model, cost_rates, footprint, heuristics
from cutegemm.choice.compare import cheapest
from cutegemm.choice.cost_formula import launch_seconds, tiles_seconds
from cutegemm.choice.cost_model import STRADDLING, Model
from cutegemm.choice.cost_rates import Rates
from cutegemm.choice.cost_terms import Terms
from cutegemm.cute.hopper.footprint import SM90
from cutegemm.hardware import arch
from cutegemm.hardware.arch import LINE
from cutegemm.problem import Problem
from tests.examples import examples
from tests.unit.scaled import scaled_problem

H200 = arch.get("H200")
NOTHING = dataclasses.replace(
    SM90.first, crew=0.0, tail=0.0, lines=0.0, writes=0.0, sectors=0.0, seams=0.0, swapped=0.0,
    outside=0.0, drains=0.0, early=0.0,
)  # fmt: skip
PLAIN = "sm90/128x128x64/coop2/c1x1/s6/row"
FOLDED = "sm90/64x64x64/coop1/c1x1/s4/row/once"
TEXTS = (
    PLAIN, FOLDED, "sm90/128x128x64/coop2/c2x2/s6/serp8/swap/pdl", "sm90/64x96x64/pp/c1x4/s8/serp8/pdl",
    "sm90/128x128x64/coop2/c1x1/s5/row/k32", "sm90/64x16x128/coop1/c1x1x4/s11/row/pdl",
    "sm90/128x256x64/coop2/c2x1/s4/serp8/streamk",
)  # fmt: skip

ALONE = "sm90/64x64x128/coop1/c1x1/s6/row"
SCALED = scaled_problem("blocks", 64, 64, 64)


def model(text: str = PLAIN, majors: str = "tn", out_dtype: str | None = None, **constants: float) -> Model:
    """A model in which only the constants named differ from `NOTHING`."""
    return model_of(Problem.of(64, 64, 64, "bf16", majors=majors, out_dtype=out_dtype), text, **constants)


def model_of(problem: Problem, text: str, **constants: float) -> Model:
    signature = problem.signature
    shape = backend.get("cute").footprint(backend.get("cute").parse(text), signature, H200)
    return Model(shape, signature, H200, dataclasses.replace(NOTHING, **constants))


def costs(sizes: tuple[int, int, int], text: str = PLAIN, majors: str = "tn", **constants: float) -> bool:
    """Whether the constants named make a launch slower."""
    with_them, without = model(text, majors, **constants).seconds(*sizes), model(text, majors).seconds(*sizes)
    assert with_them >= without
    return with_them > without * (1 + 1e-9)


def memory(cost: Model, *sizes: int) -> float:
    return cost.terms(*sizes, 1).memory


# -- loads


def test_the_share_of_rows_that_begin_within_a_line():
    for pitch in range(2 * LINE):
        within = sum(row * pitch % LINE != 0 for row in range(LINE))
        assert STRADDLING[pitch % LINE] == within / LINE


@pytest.mark.parametrize(
    ("majors", "straddling"),
    [("tn", {"k"}), ("tt", {"k", "n"}), ("nn", {"m", "k"}), ("nt", {"m", "n"})],
)
def test_the_rows_of_an_operand_are_along_its_own_major(majors, straddling):
    """A lies along K or M, B along K or N: no other size moves its rows off the lines."""
    for name in "mnk":
        sizes = tuple(4096 + 8 * (each == name) for each in "mnk")
        assert costs(sizes, majors=majors, lines=1.0) == (name in straddling), name
    assert not costs((4096, 4096, 4096), majors=majors, lines=1.0)


def test_an_operand_counts_by_its_share_of_the_tile():
    """Loads bound this: rows of A are 256 of 304, of B 48; with both, all loads take 1 + 7/8 times as long."""
    text, only = (
        "sm90/256x48x64/coop2/c1x1/s4/row",
        {"l2": 1.0, "overlap": 0.0, "within": 0.0, "step": 0.0, "tile": 0.0, "hbm_pj": 0.0},
    )
    plain, lines = model(text, "nt", **only), model(text, "nt", lines=1.0, **only)
    sizes = {"neither": (8192, 8192), "a": (8200, 8192), "b": (8192, 8200), "both": (8200, 8200)}
    longer = {}
    for name, (m, n) in sizes.items():
        longer[name] = lines.terms(m, n, 64000).tiles / plain.terms(m, n, 64000).tiles - 1
    assert longer["neither"] == 0
    assert longer["a"] == pytest.approx(7 / 8 * 256 / 304, rel=0.01)
    assert longer["b"] == pytest.approx(7 / 8 * 48 / 304, rel=0.01)
    assert longer["both"] == pytest.approx(7 / 8, rel=0.01)


def test_fewer_rows_straddle_where_the_pitch_has_larger_powers_of_two():
    cost = model(lines=1.0)
    by_pitch = [cost.seconds(4096, 4096, k) for k in (8 * 513, 16 * 257, 32 * 129, 64 * 65)]  # falling, K rising
    assert by_pitch == sorted(by_pitch, reverse=True)


def test_lines_slow_an_sms_own_port_and_what_waits_for_it():
    cost, straight = (model(lines=rate, port=16.0, l2=1000.0) for rate in (1.0, 0.0))
    few = (128, 128, 65544)
    assert cost.seconds(*few) > 1.5 * straight.seconds(*few)  # one CTA: the L2 is no limit
    waiting, idle = (model(lines=rate, burst=50.0, l2=1000.0) for rate in (1.0, 0.0))
    assert waiting.seconds(*few) > 1.2 * idle.seconds(*few)


@pytest.mark.parametrize(("text", "majors", "rows_a", "rows_b"), [
    ("sm90/128x192x64/coop2/c1x1/s4/row", "tn", 1, 1),
    ("sm90/128x192x64/coop2/c1x1/s4/row", "nt", 1, 1),
    ("sm90/128x64x32/coop2/c1x1/s4/row", "tn", 2, 2),  # 32 elements along K
    ("sm90/128x144x64/coop2/c1x1/s4/row", "tt", 1, 4),  # 288 bytes: boxes of 32
    ("sm90/128x144x64/coop2/c2x1/s4/row", "tt", 1, 4),
    ("sm90/64x96x64/coop1/c2x1/s4/row", "tt", 1, 2),
    ("sm90/128x144x64/coop2/c2x1/s4/row", "nn", 1, 1),
    ("sm90/128x192x64/coop2/c2x1/s4/row", "tt", 1, 1),
    ("sm90/128x192x64/coop2/c1x4/s4/row", "nt", 1, 1),
    ("sm90/128x48x64/coop2/c1x1/s4/row/swap", "nn", 4, 1),  # A is what the tile's N walks along
    ("sm90/128x48x64/coop2/c1x1/s4/row/swap", "tt", 1, 1),
])  # fmt: skip
def test_a_narrow_row_of_a_box_takes_the_port_and_the_l2_as_long_as_a_line(text, majors, rows_a, rows_b):
    config = backend.get("cute").parse(text)
    extents = (config.bn, config.bm) if config.swapped else (config.bm, config.bn)
    cluster = config.cluster[::-1] if config.swapped else config.cluster
    signature = Problem.of(64, 64, 64, "bf16", majors=majors).signature
    shape = backend.get("cute").footprint(config, signature, H200)
    assert shape.narrow == (rows_a, rows_b)  # of the compiled kernel's boxes: tests/emulated/test_hopper_boxes.py
    only = {"overlap": 0.0, "within": 0.0, "step": 0.0, "tile": 0.0, "sync": 0.0, "quad": 0.0}
    for rate, shared, sizes in (("port", (1, 1), (64, 64, 64000)), ("l2", cluster, (64 * 1024, 64 * 1024, 64000))):
        of_a, of_b = (extent * ctas for extent, ctas in zip(extents, shared, strict=True))
        rates = dataclasses.replace(NOTHING, **only, **{rate: 0.1})
        taken, wide = (Model(one, signature, H200, rates) for one in (shape, dataclasses.replace(shape, narrow=(1, 1))))
        ratio = taken.terms(*sizes, 1).tiles / wide.terms(*sizes, 1).tiles
        assert ratio == pytest.approx((of_a * rows_a + of_b * rows_b) / (of_a + of_b), rel=0.01)


def test_a_ragged_end_of_k_costs_operands_along_k_alone():
    ragged, even = (4096, 4096, 4096 + 8), (4096, 4096, 4096 + 64)
    rates = {"tail": 0.3, "outside": 11.0}

    def extra(sizes, majors):
        slow = model(PLAIN, majors, lines=1e-9, **rates).terms(*sizes, 1).tiles
        return slow - model(PLAIN, majors, lines=1e-9, outside=11.0).terms(*sizes, 1).tiles

    assert extra(even, "tn") == extra(ragged, "nt") == 0
    both = extra(ragged, "tn")
    assert both > 0
    for majors in ("tt", "nn"):
        assert extra(ragged, majors) == pytest.approx(both / 2)  # the tile is square
    # Once a tile, not once a step: as much at any depth.
    assert extra((4096, 4096, 8), "tn") == pytest.approx(both)
    assert extra((4096, 4096, 40968), "tn") == pytest.approx(both)


# -- memory


def test_writes_count_by_the_bytes_of_d():
    assert memory(model(writes=0.5), 4096, 4096, 64) > 1.2 * memory(model(), 4096, 4096, 64)
    assert memory(model(writes=0.5), 64, 64, 65536) == pytest.approx(memory(model(), 64, 64, 65536), rel=0.01)
    narrow, wide = (
        memory(model(out_dtype=out, writes=0.5), 4096, 4096, 64) - memory(model(out_dtype=out), 4096, 4096, 64)
        for out in ("bf16", "fp32")
    )
    assert wide == pytest.approx(2 * narrow)


@pytest.mark.parametrize(("n", "out_dtype", "partial"), [
    (4096, "bf16", False), (4112, "bf16", False), (4104, "bf16", True), (4104, "fp32", False), (4100, "fp32", True),
])  # fmt: skip
def test_rows_of_d_that_begin_within_sectors(n, out_dtype, partial):
    sizes = (4096, n, 64)
    ratio = memory(model(out_dtype=out_dtype, sectors=0.5), *sizes) / memory(model(out_dtype=out_dtype), *sizes)
    assert ratio == pytest.approx(1.5 if partial else 1.0, rel=0.05)  # nearly all bytes are D's
    deep = (64, n, 65536)
    ratio = memory(model(out_dtype=out_dtype, sectors=0.5), *deep) / memory(model(out_dtype=out_dtype), *deep)
    assert ratio == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("tile", "out_dtype", "seams"), [
    ("128x128", "bf16", False), ("128x96", "bf16", True), ("128x64", "bf16", False), ("128x32", "bf16", True),
    ("128x96", "fp32", False), ("128x48", "fp32", True),
])  # fmt: skip
def test_tiles_of_d_that_end_within_lines(tile, out_dtype, seams):
    text = f"sm90/{tile}x64/coop2/c1x1/s5/row"
    ratio = memory(model(text, out_dtype=out_dtype, seams=0.5), 4096, 4096, 64) / memory(
        model(text, out_dtype=out_dtype), 4096, 4096, 64
    )
    assert (ratio > 1) == seams


def test_writes_cost_more_where_tiles_along_a_row_are_apart_in_time():
    """The more rows of tiles an order takes together, the more it costs to write D: so much for each doubling of their
    number. A cluster of several rows counts as several. With swapped operands, rows of the order are columns of D.
    """
    whole, torn = (4096, 4096, 64), (4096, 4104, 64)
    for text, doublings in (
        ("c1x1/s5/row", 0), ("c2x1/s5/row", 1), ("c1x2/s5/row", 0), ("c2x1/s5/serp8", 4), ("c1x1/s5/col", 5),
        ("c1x1/s5/serp8/swap", 0), ("c1x2/s5/serp8/swap", 1), ("c1x1/s5/row/swap", 5),
    ):  # fmt: skip
        text = f"sm90/128x128x64/coop2/{text}"
        plain = memory(model(text, apart=0.0, torn=0.0), *whole)
        assert memory(model(text, apart=0.1, torn=0.0), *whole) == pytest.approx(
            plain * (1 + 0.1 * doublings), rel=0.05
        )
        assert memory(model(text, apart=0.0, torn=0.1), *whole) == plain
        plain = memory(model(text, apart=0.0, torn=0.0), *torn)
        assert memory(model(text, apart=0.0, torn=0.1), *torn) == pytest.approx(plain * (1 + 0.1 * doublings), rel=0.05)


def test_swapped_operands_end_within_lines_by_the_rows_of_their_tile():
    """With swapped operands the tile's M lies along D's rows: 128 x 96 is stored as 96 rows of 128."""
    assert not costs((4096, 4096, 64), "sm90/128x96x64/coop2/c1x1/s5/row/swap", seams=5.0)
    assert costs((4096, 4096, 64), "sm90/128x96x64/coop2/c1x1/s5/row", seams=5.0)


def test_swapped_operands_write_dearer():
    sizes = (4096, 4096, 64)
    straight, swapped = PLAIN, PLAIN + "/swap"
    assert not costs(sizes, straight, swapped=0.5)
    assert memory(model(swapped, swapped=0.5), *sizes) == pytest.approx(1.5 * memory(model(swapped), *sizes), rel=0.05)


# -- launches


@pytest.mark.parametrize(("text", "beyond"), [
    ("sm90/64x64x64/coop1/c1x1/s6/row", 0), (PLAIN, 1), ("sm90/64x64x64/pp/c1x1/s6/row", 1),
    ("sm90/192x64x64/coop3/c1x1/s5/row", 2),
])  # fmt: skip
def test_warpgroups_beyond_two_take_longer_to_launch(text, beyond):
    """The producer's is one of them."""
    gained = model(text, crew=1.0).terms(64, 64, 64, 1).fixed - model(text).terms(64, 64, 64, 1).fixed
    assert gained == pytest.approx(beyond * 1e-6)


@pytest.mark.parametrize(("text", "sizes", "early"), [
    ("sm90/64x128x64/coop1/c1x1/s6/row/pdl", (64 * 67, 128, 512), False),
    ("sm90/64x128x64/coop1/c1x1/s6/row/pdl", (64 * 66, 128, 512), True),  # half of 132 SMs
    ("sm90/64x128x64/coop1/c1x1/s3/row/pdl", (64 * 67, 128, 512), True),  # 72 KiB of stages and 16 of D
    ("sm90/64x128x64/coop1/c1x1/s3/row/pdl", (2048, 2048, 512), True),
    ("sm90/64x128x64/coop1/c1x1/s3/row", (64, 128, 512), False),
    ("sm90/128x128x64/coop1/c1x1/s2/row/pdl", (128 * 67, 128, 512), False),  # 160 registers of 256 threads
    ("sm90/64x128x64/pp/c1x1/s3/row/pdl", (64 * 67, 128, 512), False),  # all registers are dealt out
    ("sm90/64x128x64/coop1/c2x1/s6/row/pdl", (128 * 33, 128, 512), True),
    ("sm90/64x128x64/coop1/c2x1/s6/row/pdl", (128 * 34, 128, 512), False),
])  # fmt: skip
def test_the_next_launch_starts_early_where_it_finds_room(text, sizes, early):
    gained = model(text).seconds(*sizes) - model(text, early=0.4).seconds(*sizes)
    assert gained == pytest.approx(0.4e-6 * early, abs=1e-12)


@pytest.mark.parametrize("text", [PLAIN, "sm90/64x96x64/pp/c1x4/s8/serp8/pdl"])
def test_the_last_stores_drain_once_a_launch(text):
    """However many tiles there are, and by the tile's bytes."""

    def drained(*sizes):
        return model(text, drains=3.0).terms(*sizes, 1).tiles - model(text).terms(*sizes, 1).tiles

    once = drained(64, 64, 4096)
    assert once > 0
    assert drained(8192, 8192, 4096) == pytest.approx(once)
    assert drained(0, 64, 64) == 0
    wide = model(text, out_dtype="fp32", drains=3.0).terms(64, 64, 4096, 1).tiles
    assert wide - model(text, out_dtype="fp32").terms(64, 64, 4096, 1).tiles == pytest.approx(2 * once)


def test_the_last_epilogue_of_ping_pong_is_not_hidden():
    """Of one round all costs the same as in a tile without turns; of each further round the hidden share alone."""
    ping, alone = (f"sm90/128x128x64/{schedule}/c1x1/s6/row" for schedule in ("pp", "coop1"))
    one, ten = (128, 128, 8192), (128 * 132 * 10, 128, 8192)

    def longer(text, sizes):
        return model(text, tile=9000.0).terms(*sizes, 1).tiles - model(text, tile=1000.0).terms(*sizes, 1).tiles

    once = longer(alone, one)
    assert longer(ping, one) == pytest.approx(once)
    assert longer(alone, ten) == pytest.approx(10 * once)
    assert longer(ping, ten) == pytest.approx((1 + 9 * NOTHING.hidden) * once)


def test_large_clusters_cost_from_the_second_round_on():
    text = "sm90/128x128x64/coop2/c2x2/s6/row"
    one, two = (256 * 30, 256, 4096), (256 * 31, 256, 4096)
    assert not costs(one, text, quad=0.3)
    assert not costs(two, text, quad=NOTHING.quad)
    assert model(text, quad=0.3).terms(*two, 1).tiles == pytest.approx(
        1.3 / (1 + NOTHING.quad) * model(text).terms(*two, 1).tiles
    )


# -- the formula and its terms

TIMES = st.floats(0, 1e-3, allow_subnormal=False)
POWER = st.floats(-1e-3, 1e-3, allow_subnormal=False)
SHARE = st.floats(0, 1, allow_subnormal=False)


@given(st.integers(1, 50), st.integers(1, 500), TIMES, TIMES, st.integers(1, 16), TIMES, TIMES, st.sampled_from((0, 1)))
def test_rounds_of_tiles_take_longer_with_every_term(rounds, steps, step, latency, stages, epilogue, more, stays):
    """From this and the next test it follows that less in any term makes a lower bound. Rounding may lose 1e-12 s."""

    def took(rounds, steps, step, latency, epilogue, partial=0.0):
        return tiles_seconds(rounds, steps, step, latency, stages, epilogue, partial, stays)

    least = took(rounds, steps, step, latency, epilogue) * (1 - 1e-9) - 1e-12
    assert took(rounds + 1, steps, step, latency, epilogue) >= least
    assert took(rounds, steps + 1, step, latency, epilogue) >= least
    assert took(rounds, steps, step + more, latency, epilogue) >= least
    assert took(rounds, steps, step, latency + more, epilogue) >= least
    assert took(rounds, steps, step, latency, epilogue + more) >= least
    assert took(rounds, steps, step, latency, epilogue, more) >= least


def test_the_first_loads_of_the_next_tile_are_under_way_during_an_epilogue():
    """Three rounds of one step that waits 5 beside an epilogue of 3, a stage being free: 3 of the 5 are hidden."""
    assert tiles_seconds(3, 1, 0.0, 5.0, 2, 3.0) == 3 * (5 + 3) - 5
    assert tiles_seconds(3, 1, 0.0, 5.0, 2, 3.0, 0.0, 1.0) == 3 * (5 + 3) - 5 - 2 * 3
    assert tiles_seconds(3, 1, 0.0, 2.0, 2, 3.0, 0.0, 1.0) == 3 * (2 + 3) - 2 - 2 * 2  # no more than the wait
    assert tiles_seconds(1, 1, 0.0, 5.0, 2, 3.0, 0.0, 1.0) == 3  # no tile follows
    assert tiles_seconds(3, 1, 6.0, 5.0, 2, 3.0, 0.0, 1.0) == 3 * (6 + 3)  # nothing waits


@given(TIMES, TIMES, TIMES, POWER, SHARE, TIMES, SHARE)
def test_a_launch_takes_longer_with_every_term(tiles, memory, fixed, power, overlap, more, counted):
    """Rounding may lose 1e-12 s, as above."""
    least = launch_seconds(tiles, memory, fixed, power, overlap) * (1 - 1e-9) - 1e-12
    assert launch_seconds(tiles + more, memory, fixed, power, overlap) >= least
    assert launch_seconds(tiles, memory + more, fixed, power, overlap) >= least
    assert launch_seconds(tiles, memory, fixed + more, power, overlap) >= least
    assert launch_seconds(tiles, memory, fixed, power + more, overlap) >= least
    assert launch_seconds(tiles, memory, fixed, power, overlap, counted) * (1 - 1e-9) - 1e-12 <= least + 2e-12


def test_an_estimate_is_made_of_its_terms():
    cost = model(latency=3.0, tail=0.3, outside=11.0)
    terms = cost.terms(8200, 4096, 4104, 3)
    assert terms.seconds == cost.seconds(8200, 4096, 4104, 3)
    assert terms.seconds == launch_seconds(terms.tiles, terms.memory, terms.fixed, terms.power, NOTHING.overlap)
    for longer in ("tiles", "memory", "fixed"):
        assert 0 < getattr(terms, longer) < terms.seconds
    assert terms.step >= max(terms.multiply, terms.shared, terms.port, terms.l2)
    assert terms.tiles > terms.rounds * (terms.steps * terms.step + terms.epilogue)
    assert cost.terms(128, 128, 4096).latency == pytest.approx((3e-6 + terms.port) / 5)  # six stages, one held


def test_terms_are_printed_by_name_in_microseconds():
    config = "simt/64x64x16/w32x64/s2/g8/r6"
    problem = Problem.of(4096, 4096, 4096, "fp32")
    terms = heuristics.terms(problem, config, "cute", H200)
    assert terms.learned != 1.0
    lines = [line.split(maxsplit=3) for line in terms.table().splitlines()]
    assert [line[0] for line in lines] == list(Terms._fields)
    for (name, number, unit, meaning), value in zip(lines, terms, strict=True):
        if isinstance(value, int) or name == "learned":
            assert float(number) == pytest.approx(value, rel=1e-3)
            continue
        assert unit == "us"
        assert float(number) == pytest.approx(value * 1e6, abs=5e-4)
        assert len(meaning) > 10
    assert terms.seconds == heuristics.estimate(problem, config, "cute", H200)


@pytest.mark.parametrize("module", [cost_model, cost_rates, footprint, heuristics])
def test_nothing_central_asks_for_a_family_by_name(module):
    """A new family adds nothing there: its backend says what it is like."""
    code = ast.parse(inspect.getsource(module))
    texts = {node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    families = {"sm90", "sm80", "simt", "tf32", "cutlass2x", "legacy", "wmma"}
    assert not {word for text in texts if "\n" not in text for word in re.findall(r"\w+", text)} & families


def test_power_is_that_of_the_gpu():
    signature, config = Problem.of(64, 64, 64, "bf16").signature, backend.get("cute").parse(PLAIN)
    halved = dataclasses.replace(H200, watts_per_sm=H200.watts_per_sm / 2)
    whole, half = (heuristics.model(config, "cute", signature, gpu).terms(8192, 8192, 8192) for gpu in (H200, halved))
    rest = cost_rates.rates(SM90).rest * 1e-6
    assert half.power + rest == pytest.approx(2 * (whole.power + rest))
    assert half.seconds > 1.3 * whole.seconds


def test_every_constant_has_a_line_with_its_unit():
    lines = [line.strip() for line in Rates.__doc__.splitlines() if line.strip().endswith("]")]
    names = [line.partition(":")[0] for line in lines]
    assert names == [field.name for field in dataclasses.fields(Rates)]
    units = {line.rpartition("[")[2].rstrip("]") for line in lines}
    known = {"us", "clocks", "bytes/clock", "sums/clock", "share", "pJ", "stages", "warps", "CTAs"}
    assert units == {*known, "multiple of their time"}


# -- the quick bound

SIZES = st.one_of(st.sampled_from([0, 1, 2, 64, 65, 128, 129, 4096, 4104, 28672]), st.integers(1, 10**5))


@settings(max_examples=examples(200))
@given(
    SIZES, SIZES, SIZES, st.sampled_from([0, 1, 3, 300]), st.sampled_from(TEXTS),
    st.sampled_from(["tn", "tt", "nn", "nt"]), st.sampled_from(["bf16", "fp32"]), st.floats(0, 3), st.floats(0, 50),
    st.sampled_from([1.0, 48.0]),
)  # fmt: skip
def test_the_bound_holds_for_any_constants(m, n, k, batch, text, majors, out_dtype, rate, burst, l2):
    names = "crew tail lines writes sectors seams swapped drains thread each beside bunch"
    extra = dict.fromkeys(names.split(), rate)
    assert model(FOLDED)._fold > 1  # CTAs that share an SM are among them
    cost = model(
        text, majors, out_dtype, outside=11.0, l2=l2, burst=burst, latency=0.1 + burst / 10, early=0.3, **extra
    )
    seconds = cost.seconds(m, n, k, batch)
    assert cost.at_least(m, n, k, batch) <= seconds * (1 + 1e-9)
    assert 0 < seconds < float("inf")


def test_the_cheapest_of_several_is_found_by_bounds():
    models = [model(text, "tt", lines=0.5, outside=11.0, tail=0.3) for text in TEXTS]
    for sizes in ((4104, 200, 1000, 2), (64, 64, 64, 1), (8192, 8192, 8192, 1), (16, 16, 65536, 1)):
        seconds = [cost.seconds(*sizes) for cost in models]
        assert cheapest(models, *sizes) == (min(seconds), seconds.index(min(seconds)))
        near, place = cheapest(models, *sizes, close=0.5)
        assert near == seconds[place] <= 2 * min(seconds)
    assert cheapest([], 64, 64, 64, 1) == (float("inf"), None)


@pytest.mark.parametrize(
    ("m", "n", "k", "batch"), [s for s in itertools.product((0, 64), (0, 64), (0, 64), (0, 7)) if 0 in s]
)
def test_nothing_to_do_costs_little_more_than_a_launch(m, n, k, batch):
    for text in TEXTS:
        terms = model(text, lines=1.0, tail=0.3, outside=11.0).terms(m, n, k, batch)
        assert (terms.rounds > 0) == (m * n * batch > 0)
        assert 0 < terms.seconds < 30e-6


def test_every_constant_counts_somewhere():
    """No constant of `Rates` is without effect on some configuration and shape."""
    shapes = ((16, 28672, 4104), (8200, 8200, 8200), (256, 256, 65536), (300, 40, 72), (4096, 4100, 64))
    texts = (*TEXTS, "sm90/128x128x64/coop1/c1x2/s5/hilbert", "sm90/128x128x64/pp/c2x1x2/s4/row")
    rates = SM90.first
    for field in dataclasses.fields(Rates):
        changed = {**dataclasses.asdict(rates), field.name: getattr(rates, field.name) * 1.5 + 0.1}
        models = [(model(text, **changed), model(text, **dataclasses.asdict(rates))) for text in texts]
        for text in ("simt/64x64x16/w32x32/s3/g8/r4/k5", "simt/64x64x32/w32x64/s2/g8/x2"):
            fp32 = Problem.of(64, 64, 64, "fp32"), text
            models.append((model_of(*fp32, **changed), model_of(*fp32, **dataclasses.asdict(rates))))
        models.append((model_of(SCALED, ALONE, **changed), model_of(SCALED, ALONE, **dataclasses.asdict(rates))))
        assert any(
            one.seconds(*sizes) != other.seconds(*sizes) for (one, other), sizes in itertools.product(models, shapes)
        ), field.name


def test_promotions_take_time_where_nothing_hides_them_and_energy_everywhere():
    rows, sizes = Problem.of(64, 64, 64, "e4m3"), (4096, 4096, 4096)

    def added(text: str, problem: Problem = rows, **constants: float) -> float:
        return model_of(problem, text, **constants).seconds(*sizes) - model_of(problem, text).seconds(*sizes)

    of_two = "sm90/128x128x128/coop2/c1x1/s5/row"
    assert added(ALONE, promote=64.0) > added(of_two, promote=64.0) > 0
    assert added(f"{ALONE}/twin", promote=64.0) == added(f"{of_two}/twin", promote=64.0) == 0
    halves = "sm90/128x128x128/coop2/c1x1/s5/row/half"
    assert added(halves, promote=64.0) > added(of_two, promote=64.0)
    assert added(halves, SCALED, scales=50.0) == 0  # which no stage of the ring has
    assert added(ALONE, scales=50.0) == 0 < added(ALONE, SCALED, scales=50.0)
    watts = [model_of(each, ALONE, promote_pj=50.0).terms(*sizes).power for each in (rows, SCALED)]
    assert model_of(rows, ALONE).terms(*sizes).power < watts[0] < watts[1]
    assert costs(sizes, promote=64.0, scales=50.0, promote_pj=50.0) is False  # 16 bits are added up in one accumulator
