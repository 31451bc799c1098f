"""CuTe kernels compile for every architecture without a GPU, to the instructions they must and must not contain."""

from __future__ import annotations

import os
import random
from itertools import product

import pytest

from cutegemm import backend
from cutegemm.cute.simt.config import SimtConfig
from cutegemm.cute.state_word import MOST_SLICES
from cutegemm.cute.warps.part_sum import AT_ONCE
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.sass import crowded, opcodes, registers, spilled

CUTE = backend.get("cute")
FULL = Epilogue(c_dtype="fp32", bias_dtype="fp32", activation="gelu")


def build(problem: Problem, config: str | None, target: str):
    where = arch.get(target)
    chosen = CUTE.parse(config) if config else CUTE.default(problem, where)
    assert CUTE.check(chosen, problem, where) is None
    return CUTE.build(problem.signature, chosen, where)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "precision", "needed"),
    [
        ("fp16", "ieee", ("HMMA.16816.F32", "LDSM", "LDGSTS")),
        ("bf16", "ieee", ("HMMA.16816.F32.BF16", "LDSM", "LDGSTS")),
        ("fp32", "tf32", ("HMMA.1688.F32.TF32", "LDSM", "LDGSTS")),
        ("fp32", "ieee", ("FFMA", "LDS.128")),
    ],
)
@pytest.mark.product(keep=1)
def test_defaults_on_every_architecture(target, dtype, precision, needed):
    kernel = build(Problem.of(4096, 4096, 4096, dtype, precision=precision), None, target)
    assert f".target {target}" in kernel.ptx
    names = opcodes(kernel.cubin)
    if target == "sm_90a" and (dtype, precision) != ("fp32", "ieee"):
        needed = ("HGMMA", "UTMALDG")
    for name in needed:
        assert any(op.startswith(name) for op in names), f"{name} is missing; there are {sorted(names)}"
    if precision == "ieee" and dtype == "fp32":
        assert not any(op.startswith("HMMA") for op in names)
    assert not spilled(kernel.cubin)
    assert registers(kernel.cubin) <= 255


@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize(("dtype", "precision"), [("fp16", "ieee"), ("fp32", "tf32"), ("fp32", "ieee")])
@pytest.mark.product(keep=2)
def test_no_spills_for_any_majors_and_the_whole_epilogue(majors, dtype, precision):
    problem = Problem.of(4096, 4096, 4096, dtype, majors=majors, precision=precision, epilogue=FULL)
    kernel = build(problem, None, "sm_80")
    names = opcodes(kernel.cubin)
    # Of 128 accumulators a thread four lie in local memory for a part of each stage: 6 instructions beside 1,024 FFMA.
    assert spilled(kernel.cubin) <= (16 if (dtype, precision, majors) == ("fp32", "ieee", "tn") else 0)
    if dtype == "fp16":
        transposing = any(op.startswith("LDSM") and ".MT88" in op for op in names)
        assert transposing == (majors != "tn")
    if (dtype, precision) == ("fp32", "ieee"):
        transposed = any(op.startswith("STS") and op in ("STS", "STS.32") for op in names)
        assert transposed == ("t" in majors[0] or majors[1] == "n")


@pytest.mark.parametrize(("k", "width"), [(4096, "128"), (4092, "64"), (4090, "32"), (4095, None)])
@pytest.mark.product(keep=1)
def test_narrow_alignment_takes_narrow_copies(k, width):
    kernel = build(Problem.of(256, 256, k, "fp16"), "sm80/64x64x32/w32x32/s3/g8", "sm_80")
    copies = {op for op in opcodes(kernel.cubin) if op.startswith("LDGSTS")}
    if width is None:
        assert not copies
    elif width == "32":
        assert copies
        assert not any(".64" in op or ".128" in op for op in copies)
    else:
        assert all(f".{width}" in op for op in copies)


PROBES = [
    "sm80/128x256x64/w64x64/s3/g8", "sm80/256x128x32/w64x64/s4/g1", "sm80/64x256x32/w32x64/s2/g8",
    "sm80/32x32x32/w16x16/s8/g8", "sm80/256x64x64/w64x32/s3/g4", "sm80/64x64x64/w16x32/s3/g8",
    "simt/256x128x8/w64x64/s5/g8", "simt/64x128x16/w32x32/s3/g8", "simt/32x64x8/w16x64/s4/g1",
    "simt/128x32x16/w32x32/s2/g8", "simt/64x64x64/w32x64/s3/g8/x4", "simt/64x32x64/w16x32/s3/g8/x4",
    "simt/32x32x128/w32x32/s4/g1/x8", "simt/16x32x128/w16x32/s2/g1/x16",
    "simt/128x128x8/w64x32/s4/g8/r2", "simt/64x64x16/w32x64/s3/g8/r6", "simt/64x128x16/w32x64/s3/g8/r3",
]  # fmt: skip


@pytest.mark.parametrize("text", PROBES)
@pytest.mark.product(keep=1)
def test_what_the_validity_rule_accepts_compiles_and_fits(text):
    """The rule's shared memory is what the kernel asks for; its registers fit the CTA."""
    dtype = "fp32" if text.startswith("simt") else "fp16"
    problem = Problem.of(1024, 1024, 1024, dtype)
    kernel = build(problem, text, "sm_90a")
    config = CUTE.parse(text)
    assert registers(kernel.cubin) * config.threads * config.resident <= 64 * 1024
    assert config.smem_bytes(problem.signature) <= arch.get("sm_90a").smem_per_cta
    if config.resident > 1:
        assert not spilled(kernel.cubin)


@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize(
    "text", ["simt/32x32x64/w32x32/s4/g8/x8", "simt/64x64x64/w32x64/s3/g1/x4", "simt/64x32x64/w16x32/s3/g8/x4"]
)
@pytest.mark.product(keep=1)
def test_sliced_k_multiplies_in_registers_and_reads_shared_memory_16_bytes_at_a_time(text, majors):
    problem = Problem.of(512, 512, 512, "fp32", majors=majors, epilogue=FULL)
    kernel = build(problem, text, "sm_90a")
    names, config = opcodes(kernel.cubin), CUTE.parse(text)
    tm, tn = config.thread_tile
    # The epilogue's few (gelu) aside, an FFMA a product: a product of its own and an addition would be two.
    main_loop = config.bk // config.slices * tm * tn
    assert main_loop <= names["FFMA"] < main_loop + 200
    assert names["FMUL"] < 100
    # For 4 k, tm + tn loads; as much again before the loop; the epilogue's own.
    assert names["LDS.128"] >= config.chunks * (tm + tn)
    assert not any(op.startswith("LDS.") and op != "LDS.128" for op in names)
    assert not spilled(kernel.cubin)
    assert all(op.endswith(".128") for op in names if op.startswith("LDGSTS"))


@pytest.mark.parametrize(
    ("text", "majors"),
    [
        ("simt/128x128x16/w64x32/s3/g8/k32", "tn"), ("simt/32x32x64/w32x32/s3/g8/x4/k16", "nt"),
        ("sm80/128x256x64/w64x64/s3/g8/k4", "nn"), ("vector/1x16x128/w1x8/s2/g1/x2/k4", "tn"),
        ("vector/8x128x4/w8x128/s3/g1/x4/k32", "tt"), ("simt/128x256x16/w64x64/s3/g8/k8", "tn"),
        ("simt/256x128x16/w64x64/s3/g8/k66", "tt"), ("simt/256x128x16/w64x64/s3/g8/k7", "nn"),
        ("simt/64x64x16/w32x32/s3/g8/k128", "nt"),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_splits_of_k_and_thin_results_spill_nothing(text, majors):
    """With the whole epilogue; parts are left and read 16 bytes (mma.sync: 8) at a time."""
    problem = Problem.of(512, 512, 512, "fp16" if text.startswith("sm80") else "fp32", majors=majors, epilogue=FULL)
    kernel = build(problem, text, "sm_90a")
    assert not spilled(kernel.cubin)
    names = opcodes(kernel.cubin)
    splits = CUTE.parse(text).splits
    parts = splits if splits <= MOST_SLICES else AT_ONCE
    assert sum(count for op, count in names.items() if op.startswith("LDG.E.128")) >= parts
    assert any(op.startswith("STG.E.64" if text.startswith("sm80") else "STG.E.128") for op in names)


SLICED = [
    SimtConfig(*numbers)
    for numbers in product(
        (16, 32, 64, 128), (32, 64, 128), (32, 64, 128), (16, 32, 64), (32, 64, 128), (2, 3, 4), (1, 8), (2, 4, 8)
    )
]


@pytest.mark.parametrize(("chunks", "number"), [(2, 0), (4, 0), (4, 1), (4, 2)])
@pytest.mark.product(keep=1)
def test_sliced_k_spills_nowhere_that_the_rule_accepts(chunks, number, seed):
    """Above all not where a slice multiplies 16 of each stage: there the compiler loads all of them ahead."""
    rng = random.Random(seed)
    while True:
        config, k = rng.choice(SLICED), rng.choice((1024, 1024, 1022, 1023))
        majors, epilogue = rng.choice(("tn", "tt", "nn", "nt")), rng.choice((None, FULL))
        problem = Problem.of(k, k, k, "fp32", majors=majors, epilogue=epilogue)
        if config.chunks == chunks and CUTE.check(config, problem, arch.get("sm_90a")) is None:
            assert not spilled(build(problem, str(config), "sm_90a").cubin), f"{config} spills for {problem}"
            return


@pytest.mark.parametrize("majors", ["nn", "tn"])
@pytest.mark.parametrize("text", ["simt/64x32x64/w32x32/s3/g8/x4", "simt/16x64x64/w16x64/s2/g8/x4"])
@pytest.mark.product(keep=1)
def test_sliced_k_with_four_chunks_holds_one_buffer_where_two_would_spill(text, majors):
    kernel = build(Problem.of(512, 512, 512, "fp32", majors=majors), text, "sm_90a")
    assert kernel.config.buffers == 1
    assert not spilled(kernel.cubin)


def test_a_kernel_is_compiled_once(store_root, monkeypatch):
    from cutegemm.cute import compile as compiler

    problem = Problem.of(64, 64, 64, "fp16")
    calls = []
    real = compiler.compile_operator
    monkeypatch.setattr(compiler, "compile_operator", lambda *a: calls.append(1) or real(*a))
    first = build(problem, "sm80/32x32x32/w16x16/s3/g8", "sm_80")
    second = build(problem, "sm80/32x32x32/w16x16/s3/g8", "sm_80")
    build(problem, "sm80/32x32x32/w16x16/s3/g8", "sm_90a")
    assert len(calls) == 2
    assert first.object_path == second.object_path
    assert first.object_path.is_relative_to(store_root)


def test_a_stored_kernel_opens_without_the_dsl():
    """A process with a warm store needs neither a compiler nor the DSL: the launcher is linked and loads by itself."""
    import subprocess
    import sys

    kernel = build(Problem.of(64, 64, 64, "fp16"), "sm80/32x32x32/w16x16/s3/g8", "sm_80")
    assert kernel.object_path.with_suffix(".so").exists()
    code = (
        "import sys; from pathlib import Path; from cutegemm.cute import compile as c; "
        f"f = c.function_at(c._open_library(Path({str(kernel.object_path.with_suffix('.so'))!r}))); "
        "print(type(f).__name__); "
        "assert 'cutlass' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Function" in done.stdout


def test_compiling_for_other_architectures_leaves_the_environment_as_it_was(store_root, monkeypatch):
    """Also where it fails, and whatever architecture the user's environment names for the DSL."""
    problem = Problem.of(64, 64, 64, "fp16")
    for named in (None, "sm_120a"):
        monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
        if named is not None:
            monkeypatch.setenv("CUTE_DSL_ARCH", named)
        before = dict(os.environ)
        for number, target in enumerate(("sm_90a", "sm_80")):
            stages = 3 + number + 2 * (named is None)
            kernel = build(problem, f"sm80/32x32x32/w16x16/s{stages}/g8", target)
            assert f".target {target}" in kernel.ptx
            assert dict(os.environ) == before
        test_a_kernel_that_does_not_compile_says_which(store_root)
        assert dict(os.environ) == before


def test_a_kernel_that_does_not_compile_says_which(store_root):
    from cutegemm.cute.compile import compile_operator
    from cutegemm.errors import GemmError

    class Broken:
        config = "sm80/broken"

        def fake_arguments(self):
            return ()

        def __call__(self):
            raise RuntimeError("no such layout")

    with pytest.raises(GemmError, match=r"sm80/broken for sm_80"):
        compile_operator(Broken(), "sm_80")


@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize(
    "text", ["simt/256x128x16/w64x64/s3/g8", "simt/64x64x8/w32x32/s3/g8/r4", "simt/64x128x16/w32x32/s3/g8/r2/k5"]
)
@pytest.mark.product(keep=1)
def test_multiplications_read_registers_of_either_parity(text, majors):
    """`simt.kernel.outer_product`. Without crossed neighbours all of them read two of one parity."""
    assert crowded(build(Problem.of(512, 512, 512, "fp32", majors=majors), text, "sm_90a").cubin) < 0.1


@pytest.mark.parametrize(("majors", "most"), [("nt", 0.1), ("tt", 0.2), ("tn", 0.54), ("nn", 0.5)])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_multiplications_of_slices_read_registers_of_either_parity_but_where_b_is_loaded_along_k(majors, most):
    problem = Problem.of(512, 512, 512, "fp32", majors=majors)
    assert crowded(build(problem, "simt/64x64x32/w32x64/s2/g8/x2", "sm_90a").cubin) < most
