"""The CUTLASS 2.x backend without a compiler: texts, validity, refusals, choices, emission, the toolkit, statuses."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys

import pytest
import torch

import cutegemm
from cutegemm.cutlass2x import BACKEND, __main__, build, emit, kernel, toolkit
from cutegemm.cutlass2x.config import SWIZZLES, Cutlass2xConfig, published, space
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.run import kernel_store
from tests.gpu import cutlass2x_cases, sanitize_cutlass2x
from tests.problems import matrix

A100, H200, ADA = arch.get("sm_80"), arch.get("sm_90a"), arch.get("sm_89")
FP16 = Problem.of(512, 512, 512, "fp16")
GOOD = "cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id4"
KINDS = [("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32"), ("fp32", "tf32x3")]

needs_emitter = pytest.mark.skipif(
    not __import__("importlib").util.find_spec("cutlass_library"), reason="needs nvidia-cutlass (the emitter)"
)


def test_text_of_every_configuration_is_read_back():
    for dtype, precision in KINDS:
        configs = list(space(Problem.of(64, 64, 64, dtype, precision=precision).signature))
        for config in random.Random(0).sample(configs, 200):
            assert BACKEND.parse(str(config)) == config
    for extra in ("/k3", "/a4", "/k8/a2"):
        assert str(BACKEND.parse(GOOD + extra)) == GOOD + extra


@pytest.mark.parametrize(
    "text",
    ["", "cutlass2x", GOOD + "/", GOOD.replace("w64", "64"), GOOD + "/a4/k2", GOOD.replace("id4", "id3"), "sm80/1x1x1"],
)
def test_text_that_is_no_configuration(text):
    with pytest.raises(ValueError, match="accepted"):
        BACKEND.parse(text)


INVALID = [
    ("128x128x32/w64x64x32/s1/i16x8x16/id1", FP16, "stages is 1"),
    ("128x128x32/w64x64x32/s9/i16x8x16/id1", FP16, "stages is 9"),
    ("128x128x32/w64x64x32/s4/i16x8x8/id1", Problem.of(8, 8, 8, "fp32"), "takes 1x1x1"),
    ("128x128x8/w64x64x8/s4/i1x1x1/id1", FP16, "takes 16x8x16 or 16x8x8"),
    ("128x128x32/w64x64x32/s4/i16x8x16/id1", Problem.of(8, 8, 8, "fp32", precision="tf32x3"), "takes 16x8x8"),
    ("96x128x32/w32x64x32/s4/i16x8x16/id1", FP16, "power of two"),
    ("128x64x32/w64x128x32/s4/i16x8x16/id1", FP16, "does not divide"),
    ("128x128x64/w64x64x32/s4/i16x8x16/id1", FP16, "share K"),
    ("256x256x32/w32x64x32/s3/i16x8x16/id1", FP16, "32 warps"),
    ("128x128x32/w128x64x32/s3/i16x8x16/id1", FP16, "spill"),
    ("64x64x64/w16x16x64/s3/i16x8x16/id1", FP16, "from 32x32"),
    ("128x128x16/w64x64x16/s4/i16x8x16/id1", FP16, "at least 32"),
    ("128x128x16/w64x64x16/s4/i16x8x8/id1", FP16, "64 and more"),
    ("32x256x32/w32x32x32/s4/i16x8x16/id1", FP16, "each must make one"),
    ("256x256x64/w64x64x64/s4/i16x8x16/id1", FP16, "shared memory"),
    ("128x128x16/w64x64x16/s2/i16x8x8/id1", Problem.of(8, 8, 8, "fp32", precision="tf32"), "3 and more"),
    ("128x128x32/w64x64x32/s4/i16x8x16/id1", Problem.of(7, 7, 7, "fp16"), "cp.async"),
    ("128x128x32/w64x64x32/s4/i16x8x16/id1/a2", FP16, "cp.async"),
    ("128x128x32/w64x64x32/s4/i16x8x16/id1/a3", FP16, "align is 3"),
    ("128x128x32/w64x64x32/s4/i16x8x16/id1/k65", FP16, "splits is 65"),
    ("128x128x32/w64x64x32/s4/i16x8x16/streamk/k2", FP16, "stream-K divides"),
    ("128x128x32/w64x64x32/s4/i16x8x16/h/k2", FP16, "identity swizzle"),
    ("64x64x32/w32x32x32/s4/i1x1x1/id1", Problem.of(8, 8, 8, "fp32"), "8 or 16"),
    ("64x64x16/w32x32x16/s2/i1x1x1/id1", Problem.of(8, 8, 8, "fp32"), "takes 8 (the padding"),
    ("64x64x8/w8x32x8/s4/i1x1x1/id1", Problem.of(8, 8, 8, "fp32"), "16x32"),
]


@pytest.mark.parametrize(("text", "problem", "reason"), INVALID, ids=[row[0] for row in INVALID])
def test_invalid(text, problem, reason):
    config = BACKEND.parse(f"cutlass2x/{text}")
    assert reason in (config.why_invalid(problem.signature, A100) or "")
    assert BACKEND.check(config, problem, A100) is not None
    with pytest.raises(ValueError, match="cannot serve"):
        BACKEND.build(problem.signature, config, A100)


def test_the_published_set_is_valid_where_its_shared_memory_fits():
    assert len(set(published())) == 20
    for swizzle in SWIZZLES:
        assert all(config.why_invalid(FP16.signature, H200) is None for config in published(swizzle)[:11])
    fails = [config for config in published() if config.why_invalid(FP16.signature, H200)]
    assert [str(config) for config in fails] == ["cutlass2x/256x256x64/w64x64x64/s4/i16x8x16/id1"]
    assert "shared memory" in fails[0].why_invalid(FP16.signature, H200)
    assert sum(config.why_invalid(FP16.signature, ADA) is None for config in published()) < 20


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("gpu", [A100, H200, ADA], ids=lambda a: a.name)
def test_every_size_has_a_valid_default(dtype, precision, gpu):
    for m, n, k in ((1, 1, 1), (7, 11, 13), (8, 8, 0), (4096, 4096, 4096), (16, 28672, 4096), (64, 64, 65536)):
        for majors in ("tn", "nt"):
            for batch in (1, 5):
                problem = Problem.of(m, n, k, dtype, majors=majors, batch=batch, precision=precision)
                assert BACKEND.supports(problem, gpu) is None
                assert BACKEND.check(BACKEND.default(problem, gpu), problem, gpu) is None


def test_defaults_fill_the_gpu():
    assert BACKEND.default(Problem.of(8192, 8192, 8192, "bf16"), H200).tile() == (128, 256, 64)
    assert BACKEND.default(Problem.of(8192, 8192, 8192, "fp32"), H200).tile() == (256, 128, 8)
    assert BACKEND.default(Problem.of(64, 64, 65536, "bf16"), H200).splits == 8
    assert BACKEND.default(Problem.of(64, 64, 65536, "bf16", batch=2), H200).splits == 1
    assert BACKEND.default(Problem.of(63, 63, 63, "fp16"), H200).stages == 2


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_listed_configurations_are_valid_and_differ(dtype, precision):
    for size in (512, 511):
        problem = Problem.of(size, size, size, dtype, precision=precision)
        found = list(BACKEND.configs(problem, H200))
        assert len(found) == len(set(found)) > 20
        assert all(BACKEND.check(config, problem, H200) is None for config in found)


def test_a_batch_takes_neither_split_nor_stream_k():
    problem = Problem.of(64, 64, 512, "fp16", batch=3)
    for text in ("/k2", ""):
        config = BACKEND.parse((GOOD if text else GOOD.replace("id4", "streamk")) + text)
        assert "batch" in BACKEND.check(config, problem, H200)


def test_grid_limits():
    wide = Problem.of(8, 128 * 65536, 8, "fp16")
    assert "tiles along N" in BACKEND.check(BACKEND.parse(GOOD), wide, H200)
    tall = Problem.of(128 * 65536, 8, 8, "fp16")
    assert BACKEND.check(BACKEND.parse(GOOD), tall, H200) is None
    assert "tiles along M" in BACKEND.check(BACKEND.parse(GOOD.replace("id4", "h")), tall, H200)


REFUSED = [
    (Epilogue(activation="gelu_tanh"), "backend 'cute'"),
    (Epilogue("fp16", "fp16"), "either C or a bias"),
    (Epilogue(None, "fp16", "m"), "along the columns"),
    (Epilogue("fp32"), "reads C of the result's dtype, fp16, not fp32"),
    (Epilogue(None, "bf16"), "reads a bias of the result's dtype"),
]


@pytest.mark.parametrize(("epilogue", "reason"), REFUSED, ids=[row[1] for row in REFUSED])
def test_supports_says_who_can(epilogue, reason):
    said = BACKEND.supports(Problem.of(64, 64, 64, "fp16", epilogue=epilogue), H200)
    assert said is not None
    assert reason in said
    assert "'cute'" in said


def test_supports_refuses_a_strided_c():
    problem = Problem.of(64, 64, 64, "fp16", epilogue=Epilogue("fp16"))
    strided = dataclasses.replace(problem, c=problem.c.transposed())
    said = BACKEND.supports(strided, H200)
    assert "a C only whose rows are contiguous (whose columns are, if those of out are)" in said


def test_access_widths_follow_alignment_and_dtype():
    config = BACKEND.parse(GOOD)
    assert config.access(FP16.signature) == (8, 8, 8)
    assert config.access(Problem.of(512, 512, 512, "fp16", out_dtype="fp32").signature) == (8, 8, 4)
    narrow = dataclasses.replace(FP16.signature, align_a=4, align_b=8, align_d=2)
    assert config.access(narrow) == (2, 4, 1)
    assert BACKEND.parse(GOOD + "/a4").access(FP16.signature) == (2, 2, 8)
    with_c = dataclasses.replace(FP16.signature, epilogue=Epilogue("fp16"), align_c=4)
    assert config.access(with_c) == (8, 8, 2)
    simt = BACKEND.parse("cutlass2x/64x64x8/w32x32x8/s4/i1x1x1/id1")
    assert simt.access(Problem.of(64, 64, 64, "fp32").signature) == (1, 1, 1)


def test_split_k_slices_all_have_work():
    for splits in (1, 2, 3, 5, 8, 64):
        config = dataclasses.replace(BACKEND.parse(GOOD), splits=splits)
        for k in (0, 1, 31, 32, 33, 160, 1000, 4096):
            found = kernel.slices(config, k)
            steps = max(1, -(-k // 32))
            each = -(-steps // found)
            assert 1 <= found <= splits
            assert (found - 1) * each < steps
            assert found == 1 or k // 32 // found >= 1  # what parallel split-K gives all slices but the last


@needs_emitter
def test_emitted_source():
    text = emit.kernel_source(FP16.signature, BACKEND.parse(GOOD))
    assert "cutlass::gemm::device::Gemm<" in text
    assert "GemmShape<128, 128, 32>" in text
    assert "GemmIdentityThreadblockSwizzle<4>" in text
    assert "/* split-K */ false" in text
    assert "call.batch > 1" in text
    split = BACKEND.parse(GOOD + "/k3")
    assert "GemmSplitKParallel<" in emit.kernel_source(FP16.signature, split)
    wide = Problem.of(512, 512, 512, "fp16", out_dtype="fp32").signature
    assert "/* split-K */ true" in emit.kernel_source(wide, split)
    assert "HorizontalSwizzle," in emit.kernel_source(FP16.signature, BACKEND.parse(GOOD.replace("id4", "h")))
    stream = emit.kernel_source(FP16.signature, BACKEND.parse(GOOD.replace("id4", "streamk")))
    assert "ThreadblockSwizzleStreamK" in stream
    assert "device::Gemm<" not in stream
    gelu = Problem.of(8, 8, 8, "fp16", epilogue=Epilogue(activation="gelu")).signature
    assert emit.kernel_source(gelu, BACKEND.parse(GOOD)).count("LinearCombinationGELU<") == 2
    three = Problem.of(64, 64, 64, "fp32", precision="tf32x3").signature
    config = BACKEND.parse("cutlass2x/64x64x16/w32x32x16/s3/i16x8x8/id1")
    assert emit.kernel_source(three, config).count("OpMultiplyAddFastF32") == 2


@needs_emitter
@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
def test_both_kinds_are_emitted_with_the_same_operands(majors):
    signature = dataclasses.replace(Problem.of(512, 512, 512, "fp16", majors=majors).signature, align_a=8, align_b=4)
    text = emit.kernel_source(signature, BACKEND.parse(GOOD))
    a = "RowMajor" if majors[0] == "t" else "ColumnMajor"
    b = "ColumnMajor" if majors[1] == "n" else "RowMajor"
    kind = "cutlass::half_t, cutlass::layout::{}"
    gemm, universal = text.split("DefaultGemmUniversal<")
    order = [gemm.index(kind.format(name), gemm.index("device::Gemm<")) for name in (a, b)]
    assert order == sorted(order)
    none = "cutlass::ComplexTransform::kNone"
    lines = [line.split("//")[0].strip() for line in universal.splitlines()[1:3]]
    assert lines == [f"{kind.format(a)}, {none}, 4,", f"{kind.format(b)}, {none}, 2,"]


def test_names_differ_whenever_kernels_do():
    signatures = [FP16.signature, Problem.of(512, 512, 512, "bf16").signature, Problem.of(512, 512, 511).signature]
    names = {emit.function_name(s, c) for s in signatures for c in published()}
    assert len(names) == 60


def test_no_toolkit_is_said_plainly(monkeypatch, tmp_path):
    if toolkit.importlib.util.find_spec("cutlass_library") is None or toolkit.shutil.which("g++") is None:
        pytest.skip("needs nvidia-cutlass and g++")
    monkeypatch.setattr(toolkit, "_candidates", lambda: iter([tmp_path / "bin" / "nvcc"]))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    with pytest.raises(GemmError, match=r"CUDA_HOME.*pip install nvidia-cuda-nvcc") as said:
        toolkit.find()
    assert str(tmp_path) in str(said.value)


def test_no_cutlass_is_said_plainly(monkeypatch):
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GemmError, match=r"cutegemm\[cutlass2x\]"):
        toolkit._cutlass()


def test_a_unit_that_fails_is_named_and_the_others_are_kept(store_root, monkeypatch):
    tools = object()
    monkeypatch.setattr(toolkit, "find", lambda: tools)

    def compile_source(source, gpu, found, tight):
        assert found is tools
        if "/id8" in source:
            raise GemmError("nvcc failed: 42")
        return kernel_store.Artefacts({"unit.ptx": source.encode()}, {})

    monkeypatch.setattr(build, "compile_source", compile_source)
    monkeypatch.setattr(emit, "translation_unit", lambda pairs: "".join(str(c) for _, c in pairs))
    good, bad = ((FP16.signature, BACKEND.parse(GOOD.replace("id4", swizzle))) for swizzle in ("id1", "id8"))
    with pytest.raises(GemmError, match=r"42\n.*/id8"):
        build.build_many([good, bad], H200, jobs=2)
    monkeypatch.setattr(build, "compile_source", None)
    (entry,) = build.build_many([good], H200)
    assert entry.text("unit.ptx") == str(good[1])


def test_units_are_shared_and_found_again(store_root, monkeypatch):
    monkeypatch.setattr(toolkit, "find", lambda: "tools")
    monkeypatch.setattr(emit, "translation_unit", lambda pairs: " ".join(str(c) for _, c in pairs))
    compiled = []

    def compile_source(source, gpu, found, tight):
        compiled.append(source)
        return kernel_store.Artefacts({"unit.ptx": source.encode()}, {})

    monkeypatch.setattr(build, "compile_source", compile_source)
    pairs = [(FP16.signature, config) for config in published()[:9]]
    entries = build.build_many(pairs, H200, jobs=3)
    assert sorted(len(source.split()) for source in compiled) == [3, 3, 3]
    for (_, config), entry in zip(pairs, entries, strict=True):
        assert str(config) in entry.text("unit.ptx").split()
    assert [e.path for e in build.build_many(pairs[::-1], H200)] == [e.path for e in entries][::-1]
    assert len(compiled) == 3
    build.build_many(pairs[:1], A100)
    assert len(compiled) == 4


def test_a_damaged_unit_is_compiled_once_more_for_each_kernel(store_root, monkeypatch, caplog):
    monkeypatch.setattr(toolkit, "find", lambda: "tools")
    monkeypatch.setattr(emit, "translation_unit", lambda pairs: " ".join(str(c) for _, c in pairs))
    monkeypatch.setattr(
        build, "compile_source", lambda source, *_: kernel_store.Artefacts({"unit.ptx": source.encode()}, {})
    )
    pairs = [(FP16.signature, config) for config in published()[:2]]
    (entry, _) = build.build_many(pairs, H200, jobs=1)
    entry.file("unit.ptx").write_text("damaged")
    again = build.build(*pairs[0], H200)
    assert again.text("unit.ptx") == str(pairs[0][1])
    caplog.clear()
    assert build.build(*pairs[0], H200).path == again.path
    assert not caplog.records  # nothing was said to be compiled


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (101, r"a\.clone"),
        (103, r"c: its address"),
        (207, "initialize: internal"),
        (304, "invalid problem"),
        (1035, "35"),
    ],
)
def test_statuses_are_described(status, said):
    assert pytest.importorskip("re").search(said, kernel.describe(status, FP16.signature))


def test_the_small_problems_of_the_sanitizer_reach_every_kind_of_kernel():
    specs = cutlass2x_cases.smallest(H200)
    fitting = {str(config) for config in published() if config.why_invalid(FP16.signature, H200) is None}
    assert fitting <= {spec.config for spec in specs}
    assert {(spec.dtype, spec.options.get("precision")) for spec in specs} == set(cutlass2x_cases.KINDS)
    for spec in specs:
        signature, config = spec.kernel(H200)
        assert config.why_invalid(signature, H200) is None
        bm, bn, bk = config.threadblock
        if spec.config:  # more than a tile along M, and K comes round to the first stage
            assert spec.shape[0] > bm
            assert spec.shape[1] % bn
            assert spec.shape[2] > config.stages * bk
            assert spec.shape[2] % bk
    assert {spec.kernel(H200)[1].swizzle for spec in specs} >= {"id1", "id4", "streamk", "h"}
    assert {spec.kernel(H200)[1].splits for spec in specs} == {1, 2, 3}


def test_operands_move_to_a_device_with_their_strides(seed):
    padded = matrix(5, 7, torch.float16, torch.Generator().manual_seed(seed), row_major=False, pad=3, offset=2)
    got = sanitize_cutlass2x.moved(padded, "cpu")
    assert torch.equal(got, padded)
    assert (got.stride(), got.storage_offset()) == (padded.stride(), padded.storage_offset()) == ((1, 8), 2)


def test_call_structure_matches_the_source():
    fields = [
        name.strip(" *;") for line in emit.CALL_FIELDS.split(";") for name in line.replace("const", "").split(",")
    ]
    assert [name.split()[-1].strip("*") for name in fields if name.split()] == [
        name for name, *_ in kernel.Call._fields_
    ]


@needs_emitter
def test_command(capsys):
    assert __main__.main(["--config", GOOD, "--emit"]) == 0
    assert "cutlass::gemm::device::Gemm<" in capsys.readouterr().out
    assert __main__.main(["--list", "--dtype", "fp32", "--precision", "tf32x3"]) == 0
    assert "i16x8x8" in capsys.readouterr().out
    assert __main__.main(["--config", GOOD, "--dtype", "fp32", "--emit"]) == 2
    assert "takes 1x1x1" in capsys.readouterr().err
    assert __main__.main(["--activation", "gelu_tanh", "--emit"]) == 2
    assert __main__.main(["--config", "nonsense", "--emit"]) == 2
    assert __main__.main(["--dtype", "bf16", "--precision", "tf32x3", "--emit"]) == 2
    assert "'tf32x3' for bf16" in capsys.readouterr().err
    assert __main__.main(["--config", GOOD, "--c", "--bias", "--emit"]) == 2
    assert "either C or a bias" in capsys.readouterr().err


@needs_emitter
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GOOD, "fp16->fp16/ieee"),
        ("cutlass2x/128x128x8/w32x64x8/s4/i1x1x1/id4", "fp32->fp32/ieee"),
        ("cutlass2x/128x128x16/w64x64x16/s4/i16x8x8/id4", "fp32->fp32/tf32"),
    ],
)
def test_the_source_of_any_configuration_is_shown_without_naming_a_dtype(capsys, config, kind):
    assert __main__.main(["--config", config, "--bias", "--activation", "relu", "--emit"]) == 0
    shown = capsys.readouterr().out
    assert f"// {config}\n" in shown
    assert f"// {kind}" in shown
    assert "LinearCombinationRelu<" in shown


@needs_emitter
def test_a_reader_that_stops_is_no_error():
    command = [sys.executable, "-m", "cutegemm.cutlass2x", "--list", "--arch", "sm_90a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("cutlass2x/")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_tf32x3_is_accepted_and_refused_clearly():
    a = torch.randn(8, 8)
    with pytest.raises(ValueError, match="got 'tf32x3' for fp16"):
        cutegemm.gemm(a.half(), a.half(), precision="tf32x3")
    for backend in ("torch", "auto", "legacy"):
        with pytest.raises(UnsupportedError, match=r"tf32x3|TF32"):
            cutegemm.gemm(a, a, precision="tf32x3", backend=backend)
    assert Cutlass2xConfig.parse(GOOD).tile() == (128, 128, 32)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--emit", "--size", "-5"], "--size: got -5, accepted is 1 or more"),
        (["--list", "--size", "0"], "--size: got 0"),
        (["--jobs", "0"], "--jobs: got 0, accepted is 1 or more"),
    ],
)
def test_the_command_refuses_a_number_that_is_none(arguments, said, capsys):
    from cutegemm.cutlass2x.__main__ import main

    assert main(arguments) == 2
    taken = capsys.readouterr()
    assert said in taken.err
    assert taken.out == ""
