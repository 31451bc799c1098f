"""The validity rule of CUTLASS 2.x configurations against nvcc, and what its kernels take of a GPU's resources.

A probe costs nvcc 10 s for the headers and 1 s a kernel, 3 s when it refuses; `-m slow` compiles a sample
of the whole space.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
from pathlib import Path

import pytest

from cutegemm.cutlass2x import BACKEND, build, build_many, emit, published, toolkit
from cutegemm.cutlass2x.config import Cutlass2xConfig
from cutegemm.errors import GemmError
from cutegemm.hardware import arch
from cutegemm.hardware.cubin import usage
from cutegemm.problem import Problem, Signature
from tests.problems import MAJORS

H200 = arch.get("sm_90a")
KINDS = [("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32"), ("fp32", "tf32x3")]
FP16, FP32 = (Problem.of(512, 512, 512, dtype).signature for dtype in ("fp16", "fp32"))

# What the rule refuses because nvcc does (other refusals are about registers and shared memory, which it leaves to
# the launch).
REFUSED = [
    (FP16, "64x64x64/w16x16x64/s3/i16x8x16/id1"),
    (FP16, "128x128x16/w64x64x16/s4/i16x8x16/id1"),
    (dataclasses.replace(FP16, align_a=2), "64x64x32/w32x32x32/s3/i16x8x16/id1"),
    (FP32, "64x64x16/w32x32x16/s2/i1x1x1/id1"),
]


@pytest.fixture(scope="module")
def tools():
    try:
        return toolkit.find()
    except GemmError as why:
        pytest.skip(str(why))


def said_by_nvcc(tools: toolkit.Toolkit, pairs: list[tuple[Signature, Cutlass2xConfig]], folder: Path) -> str:
    """What nvcc says when it compiles the kernels to PTX; nothing when it takes them all."""
    source = folder / "probe.cu"
    source.write_text(emit.translation_unit(pairs))
    include = [f"-I{path}" for path in (tools.cutlass, *tools.include)]
    command = [str(tools.nvcc), "-ptx", "-arch=compute_90", *build.OPTIONS, *include, str(source)]
    done = subprocess.run([*command, "-o", str(folder / "probe.ptx")], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(("signature", "text"), REFUSED, ids=[text for _, text in REFUSED])
@pytest.mark.product(keep=1)
def test_nvcc_refuses_what_the_rule_refuses(tools, tmp_path, signature, text):
    config = BACKEND.parse(f"cutlass2x/{text}")
    assert config.why_invalid(signature, H200)
    assert "static assertion failed" in said_by_nvcc(tools, [(signature, config)], tmp_path)


@pytest.mark.slow
def test_kernels_fit_the_register_file(store_root, tools):
    """The largest published CTAs: nvcc alone would give their 512 threads more than 128 registers each."""
    config = next(c for c in published() if c.threads == 512)
    (kernel,) = build_many([(FP16, config)], H200)
    found = usage(kernel.cubin)
    assert len(found) == 2
    assert all(one.registers * config.threads <= 65536 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_nvcc_takes_what_the_rule_takes(tools, tmp_path, seed, dtype, precision):
    choose = random.Random(seed)
    space = list(BACKEND.configs(Problem.of(512, 512, 512, dtype, precision=precision), H200))
    pairs = []
    for config in choose.sample(space, 8):
        majors = choose.choice(MAJORS)
        pairs.append((Problem.of(512, 512, 512, dtype, majors=majors, precision=precision).signature, config))
    said = said_by_nvcc(tools, pairs, tmp_path)
    refused = [f"{s} {c}" for s, c in pairs if emit.function_name(s, c) in said]
    assert not said, f"{refused}: {said[:2000]}"
