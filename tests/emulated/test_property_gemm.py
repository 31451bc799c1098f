"""Random problems through real kernels in the emulator, drawn and shrunk by hypothesis.

What `python -m tests.fuzz` does with many kernels and many problems, in small: a kernel of each family and
epilogue path, some problems each. A failure prints the program that repeats it.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from cutegemm.choice import plan
from cutegemm.cute import FAMILIES
from cutegemm.problem import Problem
from tests.examples import examples
from tests.fuzz_draw import Limits, Pair, Template, draw

pytest.importorskip("llvmlite")

SMALL = Limits("cpu", 2**15, 2**12)

KERNELS = {
    "simt": Template("cute", "simt/32x32x8/w16x32/s4/g8", "fp32", None, "fp32", "tt", aligns=(16, 4, 4), c="aligned",
                     c_dtype="fp32", align_c=4, bias="fp32", activation="relu"),
    "simt, transposing": Template("cute", "simt/64x128x16/w32x32/s3/g8", "fp32", None, "bf16", "tn", aligns=(16, 8, 2)),
    "sm80 fp16, any C, column-major D": Template("cute", "sm80/32x32x32/w16x16/s3/g4", "fp16", None, "fp16", "nt",
                                                 "col", (4, 2, 2), c="any", c_dtype="bf16", activation="gelu"),
    "sm80 bf16": Template("cute", "sm80/64x32x32/w32x16/s4/g8", "bf16", None, "fp32", "tn", aligns=(16, 16, 16),
                          bias="fp16", activation="silu"),
    "sm80 tf32": Template("cute", "sm80/32x32x16/w16x16/s3/g1", "fp32", "tf32", "fp32", "tt", aligns=(8, 16, 4),
                          c="aligned", c_dtype="fp32", align_c=4),
    "sm90": Template("cute", "sm90/64x64x64/coop1/c1x1/s4/serp8", "fp16", None, "fp16", "tn", aligns=(16, 16, 16),
                     activation="gelu_tanh"),
    "sm90, cluster, C and bias": Template("cute", "sm90/64x32x32/coop1/c2x1/s3/hilbert", "bf16", None, "fp32", "nt",
                                          "row", (16, 16, 4), c="any", c_dtype="fp32", bias="bf16"),
    "legacy": Template("legacy", "warp_tile", "fp32", None, "fp32", "nt", aligns=(4, 4, 4), c="any", c_dtype="fp16"),
    "legacy wmma": Template("legacy", "wmma_double_buffer", "bf16", None, "bf16", "tn", aligns=(2, 2, 2)),
    "torch": Template("torch", None, "fp32", None, "fp16", "tn", "col", (4, 4, 2), c="any", c_dtype="fp32",
                      activation="silu"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.product(keep=1)
def test_random_problems(name):
    template, arch = KERNELS[name], plan.emulated_arch()
    found = draw(template, random.Random(0), SMALL, arch)
    assert found is not None
    kernel: Pair = found[1]

    @given(st.randoms(use_true_random=False))
    @settings(max_examples=examples(20), database=None, suppress_health_check=list(HealthCheck), print_blob=True)
    def check(rng):
        drawn = draw(template, rng, SMALL, arch, frozenset((kernel,)))
        assume(drawn is not None)
        spec, _ = drawn
        note(spec.snippet())
        spec.check(repeat=rng.random() < 0.25)

    check()


@pytest.mark.parametrize("family", ["simt", "sm80"])
@pytest.mark.product(keep=1)
def test_the_threads_of_every_configuration_load_every_element_once(family):
    """Of both operands, either major, every alignment class: the loaders' arithmetic, without a compiler."""
    import cutlass

    from cutegemm.cute.warps.tile_load import TileLoader, TransposingLoader

    arch = plan.emulated_arch()
    kinds = {"simt": [("fp32", "ieee", cutlass.Float32)], "sm80": [("fp16", "ieee", cutlass.Float16),
                                                                   ("fp32", "tf32", cutlass.Float32)]}  # fmt: skip
    shapes = set()
    for dtype, precision, numeric in kinds[family]:
        signature = Problem.of(64, 64, 64, dtype, precision=precision).signature
        for config in FAMILIES[family].config.space():
            if config.why_invalid(signature, arch) is None:
                transposing = family == "simt" and config.slices == 1
                shapes |= {
                    (numeric, extent, config.bk, config.threads, transposing) for extent in (config.bm, config.bn)
                }
    assert len(shapes) > 20
    for numeric, extent, bk, threads, transposing in shapes:
        for k_major in (True, False):
            loader = TransposingLoader if transposing and k_major else TileLoader
            for align in (16, 8, 4, 2):
                if align >= numeric.width // 8:
                    _check_cover(loader(numeric, extent, bk, k_major, align, threads))


def _check_cover(loader) -> None:
    per_row = loader.vectors_per_row // loader.row_parts
    seen = set()
    for thread in range(loader.threads):
        loader.tid_inner, loader.tid_outer = (thread % per_row) * loader.vector, thread // per_row
        for p in range(loader.passes):
            row, inner = loader._place(p)
            assert 0 <= row < loader.outer, vars(loader)
            assert 0 <= inner <= loader.inner - loader.vector, vars(loader)
            seen.add((row, inner))
    assert len(seen) * loader.vector == loader.outer * loader.inner, vars(loader)
