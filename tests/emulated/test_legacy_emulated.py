"""Every rung of the ladder in the emulator: right on ragged problems of all majors, synchronized, as it claims."""

from __future__ import annotations

import functools

import pytest
import torch

from cutegemm.emulator import EmulationError
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.mutate import mutations
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.reference import check, expected
from cutegemm.run.arguments import Operands, Scalars
from legacy_cuda.backend import BACKEND
from legacy_cuda.config import LegacyConfig, parse
from legacy_cuda.rungs import RUNGS
from tests.problems import Case
from tuning.ladder_profile import RungProfile, profile_rung

CASES = [(rung.name, dtype) for rung in RUNGS.values() for dtype in rung.dtypes]
ONE_DTYPE = [(rung.name, rung.dtypes[0]) for rung in RUNGS.values()]
# Small shapes of the very same kernels where the defaults would spend the time on empty tiles.
SMALLER = {"wmma_warp_tile": "bm64/bn32/warps_m2/warps_n2", "wmma_double_buffer": "bm64/bn32/warps_m2/warps_n2"}


@pytest.mark.parametrize(("rung", "dtype"), CASES)
@pytest.mark.product(keep=1)
def test_whole_tiles_and_c(rung, dtype, seed):
    """Aligned operands: the vector instantiation, its tiles all whole; C in the other dtype as well."""
    bm, bn, bk = LegacyConfig.of(rung).tile()
    other = "fp32" if dtype != "fp32" else "fp16"
    c = torch.randn(bm, bn).to({"fp32": torch.float32, "fp16": torch.float16}[other])
    case = Case.random(bm, bn, max(2 * bk, 16), dtype, majors="tt", seed=seed, c=c, alpha=-0.5, beta=2.0)
    case.run(backend="legacy", config=rung)


@pytest.mark.parametrize(("rung", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("majors", ["tt", "tn", "nt", "nn"])
@pytest.mark.product(keep=2)
def test_ragged_edges_of_all_majors(rung, dtype, majors, seed):
    """One element over or short of a tile along every axis, odd leading dimensions: the scalar instantiation."""
    bm, bn, bk = LegacyConfig.of(rung).tile()
    m, n, k = min(bm + 1, 70), min(bn - 1, 67), max(bk + 3, 9)
    Case.random(m, n, k, dtype, majors=majors, seed=seed, pad=1, offset=1).run(backend="legacy", config=rung)


@pytest.mark.parametrize(("rung", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("majors", ["tt", "nn"])
@pytest.mark.product(keep=1)
def test_vectors_at_the_edges(rung, dtype, majors, seed):
    """Aligned, but no multiple of a tile: vectors are whole or absent, C and a batch of two beside them."""
    case = Case.random(72, 40, 24, dtype, majors=majors, seed=seed, batch=2, pad=8, c=True, beta=0.5)
    case.run(backend="legacy", config=rung)


@pytest.mark.parametrize(("rung", "dtype"), ONE_DTYPE)
@pytest.mark.product(keep=1)
def test_one_element_and_no_k(rung, dtype, seed):
    Case.random(1, 1, 1, dtype, seed=seed).run(backend="legacy", config=rung)
    Case.random(5, 3, 0, dtype, seed=seed, c=True, beta=-1.0).run(backend="legacy", config=rung)


@pytest.mark.parametrize("rung", ["coalesced", "double_buffer_shared", "warp_tile_async", "wmma_double_buffer"])
@pytest.mark.product(keep=2)
def test_the_hopper_build(rung, seed, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    Case.random(40, 72, 48, RUNGS[rung].dtypes[0], majors="tt", seed=seed).run(backend="legacy", config=rung)


@pytest.mark.parametrize(
    "text",
    [
        "thread_tile_1d/bm32/bn32/bk16/tm4",
        "thread_tile_2d/bm64/bn32/bk16/tm4/tn8",
        "padded/bm64/bn128/bk16/tm4/tn8",
        "swizzled/bm64/bn64/bk16/tm4/tn8",
        "double_buffer_shared/bm32/bn64/bk8/tm4/tn4",
        "double_buffer_registers/bm64/bn64/bk8/tm8/tn4",
        "async_copy/bm64/bn64/bk8/tm16/tn4",
        "warp_tile/bm64/bn64/bk8/wm32/wn32/wniter1/tm8/tn4",
        "warp_tile/bm128/bn128/bk8/wm128/wn32/wniter4/tm4/tn4",
        "warp_tile_async/bm32/bn32/bk8/wm32/wn16/wniter1/tm4/tn4/stages4/group1",
        "warp_tile_async/bm64/bn128/bk16/wm32/wn64/wniter1/tm4/tn4/stages2/group2",
    ],
)
@pytest.mark.product(keep=1)
def test_other_parameters(text, seed):
    Case.random(100, 140, 44, "fp32", majors="tt", seed=seed).run(backend="legacy", config=text)


@pytest.mark.parametrize(
    ("rung", "text"),
    [
        ("block_tile", ""),
        ("double_buffer_shared", "bm64/bn64/tm4/tn8"),
        ("double_buffer_registers", "bm64/bn64/bk8/tm4/tn8"),
        ("async_copy", "bm64/bn64/tm4/tn8"),
        ("warp_tile_async", "bm64/bn64/bk8/wm32/wn32/wniter1/tm8/tn4/stages3"),
        ("wmma_double_buffer", SMALLER["wmma_double_buffer"]),
        ("wmma_warp_tile", SMALLER["wmma_warp_tile"]),
    ],
)
@pytest.mark.product(keep=2)
def test_every_barrier_and_wait_is_needed(rung, text):
    """Each barrier, commit and wait deleted or weakened, one at a time: the emulator or the numbers must show it."""
    config = parse("/".join(filter(None, (rung, text))))
    bm, bn, bk = config.tile()
    problem = Problem.of(bm, bn, 6 * bk, config.spec.dtypes[0], majors="tt")
    kernel = BACKEND.build(problem.signature, config, arch_table.get("sm_80"))
    # Not bar.warp.sync, whose last one in an epilogue is needless: tests.mutation goes through those, with a reason.
    changed = [m for m in mutations(kernel.ptx) if m.site.startswith(("bar.sync", "barrier.sync", "cp.async.wait"))]
    assert changed, "nothing to take away"
    assert all(_right(kernel, problem, kernel.ptx, seed) for seed in range(2))
    for mutation in changed:
        if "wait" in mutation.site and mutation.change == "delete":
            continue  # the weaker "wait 1 more" says the same, sharper
        assert not all(_right(kernel, problem, mutation.ptx, seed) for seed in range(4)), (
            f"{mutation.site} {mutation.change}"
        )


def _right(kernel, problem, ptx, seed) -> bool:
    generator = torch.Generator().manual_seed(seed)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[problem.dtype]
    a = torch.randn(problem.m, problem.k, generator=generator).to(dtype)
    b = torch.randn(problem.k, problem.n, generator=generator).to(dtype)
    d = torch.full((problem.m, problem.n), float("nan"), dtype=dtype)
    launches = kernel.capture(problem, Operands(a.data_ptr(), b.data_ptr(), 0, 0, d.data_ptr()), Scalars())
    try:
        emulate(ptx, launches, {"a": a, "b": b, "d": d}, outputs={"d"}, seed=seed)
    except EmulationError:
        return False
    return bool(check(d, expected(a, b, tensor_cores=problem.dtype != "fp32")))


@functools.cache
def profile(rung: str) -> RungProfile:
    """The counts of a rung at 128x128x16, taken when a test first asks for them: each worker needs those of its own."""
    found = profile_rung(LegacyConfig.of(rung), "fp32", (128, 128, 16), arch_table.get("sm_80"))
    assert found.verdict == "ok"
    return found


class TestWhatEachRungClaims:
    """The counts show what each rung is about."""

    def test_coalescing(self):
        # A column of lanes touches a sector for every element; along a row the sectors are the bytes asked for.
        assert profile("naive").sectors > 5 * profile("naive").sectors_ideal
        assert profile("coalesced").sectors == profile("coalesced").sectors_ideal

    def test_tiles_in_shared_memory_save_global_traffic(self):
        assert profile("block_tile").sectors < profile("coalesced").sectors / 10
        assert profile("warp_shuffle").wavefronts == 0
        assert profile("warp_shuffle").sectors == profile("block_tile").sectors

    def test_register_tiles_save_loads(self):
        assert profile("register_tile").sectors < profile("coalesced").sectors / 2
        assert profile("thread_tile_1d").wavefronts < 0.6 * profile("block_tile").wavefronts
        assert profile("thread_tile_2d").wavefronts < 0.4 * profile("thread_tile_1d").wavefronts

    def test_vectors_save_instructions(self):
        assert profile("vectorized_global").instructions < 0.85 * profile("thread_tile_2d").instructions

    def test_padding_and_swizzling_remove_bank_conflicts(self):
        assert profile("vectorized_both").conflicts > 1000
        assert profile("padded").conflicts == profile("swizzled").conflicts == 0
        for rung in ("double_buffer_shared", "double_buffer_registers", "async_copy", "warp_tile", "warp_tile_async"):
            assert profile(rung).conflicts == 0, rung

    def test_warp_tiles_read_shared_memory_less(self):
        assert profile("warp_tile").wavefronts < 0.8 * profile("double_buffer_shared").wavefronts
